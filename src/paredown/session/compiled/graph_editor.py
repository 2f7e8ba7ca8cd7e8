"""Edits the two graphs of a partitioned joint graph together: saved tensors become codes, comparisons become bits, numbers are measured.

Encode is the operation `paredown::encode`; decode (codec/graph_codec.py) is one of ours too, or traced into aten operations, and Inductor
fuses it into the operations that read the values. They read a tensor in its own memory order.
"""

# pyright: reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.utils import _is_primal, _is_tangent
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from paredown.autograd.operations import MIN_PACKED_NUMEL
from paredown.codec.graph_codec import decode_in_graph
from paredown.codec.packed import default_overflow
from paredown.errors import ApplyError
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.session.compiled.graph_checks import ENOUGH_NUMBERS, MAX_RANGES_TRIED, NUM_NUMBERS, GraphCheck, check_of
from paredown.session.compiled.graph_decisions import (
    GraphReport,
    ValueCheck,
    fits_bits,
    inverse_order,
    is_code,
    mask_codec,
    nbytes_of,
    num_values,
    sizes_in_memory,
)
from paredown.session.compiled.graph_signals import NUM_SIGNALS, GraphSignal, SlotMeasure
from paredown.session.compiled.graph_slots import (
    GraphSlot,
    JointGraph,
    hint,
    is_boolean,
)
from paredown.session.compiled.lowerings import lowers
from paredown.session.compiled.memory_orders import MemoryOrders
from paredown.session.compiled.recomputed_chains import RecomputedChains
from paredown.session.compiled.recomputed_tensors import end_of_tensors, last_saved

TOO_MANY_NUMBERS = (
    f"a compiled graph has more than {NUM_NUMBERS} numbers to measure (logits of attention, statistics of norms): compile "
    "parts of the model one by one, or insert a graph break."
)


@dataclass(frozen=True)
class GraphCodec:
    """States how one saved tensor is encoded in a graph, by the operation `paredown::encode`.

    Inductor would fuse an encoding of 8-bit codes in aten operations into some kernels that read the same values, but steps of GPT-2, Llama
    and ViT-B/16 in 8 bits take as long or longer then, and compiling takes 1.9 to 2.0 instead of 1.3 to 1.4 times as long as without
    packing (one H200).
    """

    format: Format
    rounding: Rounding
    seed: int
    tensor_id: int

    @property
    def arguments(self) -> tuple[str, str, str, int, int]:
        """Return the arguments of `paredown::encode` after its tensors."""
        overflow = default_overflow(self.format).value
        return str(self.format), self.rounding.value, overflow, self.seed, self.tensor_id


class GraphEditor:
    """Edits a forward graph and its backward graph together, so that the tensors saved by one stay the inputs of the other."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
        self.forward, self.backward = forward, backward
        self.num_outputs = num_outputs
        self._output = forward.graph.output_node()
        self._returned: list[Any] = list(self._output.args[0])  # type: ignore[arg-type]
        self._by_name = {node.name: node for node in forward.graph.nodes}
        self._order = {node: i for i, node in enumerate(backward.graph.nodes)}
        self.placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        self._step, self._numbers = _added_inputs(forward.graph)
        self._int_step: fx.Node | None = None  # the step as int32, for kernels
        self._scales = set[fx.Node]()  # placeholders of the scales of packed tensors
        self._traces: dict[Any, fx.GraphModule] = {}
        self._constants: dict[fx.Graph, dict[Any, fx.Node]] = {forward.graph: {}, backward.graph: {}}
        self._written: fx.Node | None = None  # the measured numbers
        self._parts: dict[str, list[fx.Node]] = {}  # of packed tensors, by name
        self._orders = MemoryOrders(forward)
        self._code_orders: dict[str, list[int]] = {}  # of packed tensors, by name

    def saved_floats(self) -> list[fx.Node]:
        """Return the nodes of saved floating-point tensors with at least MIN_PACKED_NUMEL values."""
        saved = [node for node in self._returned[self.num_outputs :] if isinstance(node, fx.Node)]
        tensors = [(node, value) for node in saved if isinstance(value := node.meta.get("val"), Tensor)]
        large = [node for node, value in tensors if value.is_floating_point() and hint(value.numel()) >= MIN_PACKED_NUMEL]
        return [node for node in large if not is_code(node)]

    def is_output(self, node: fx.Node) -> bool:
        """Return whether the forward graph returns `node` to the caller."""
        return any(other is node for other in self._returned[: self.num_outputs])

    def save_comparisons(self, packed: set[str], report: GraphReport) -> None:
        """Save boolean tensors as bits, also comparisons that backward would make of the rounded tensors named in `packed`."""
        with_tangents = of_tangents(self.backward.graph)
        rounded = {node for name, node in self.placeholders.items() if name in packed}
        saved = [node for name, node in self.placeholders.items() if is_boolean(node) and self._is_saved(name)]
        found = [node for node in saved if fits_bits(node.meta["val"])]
        for node in self.backward.graph.nodes:
            if node.op == "placeholder" or node in with_tangents:
                continue
            if any(i in rounded for i in node.all_input_nodes):
                if is_boolean(node):
                    found.append(node)
                else:
                    rounded.add(node)
        for node in found:
            report.mask_bytes += self._save_mask(node)

    def add_checks(self, packed: list[tuple[fx.Node, GraphSlot, Format]], joint: JointGraph, report: GraphReport) -> None:
        """Make forward measure numbers that decide whether operands of attention and inputs of norms may be packed."""
        if any(not isinstance(size, int) for node, _, _ in packed for size in node.meta["val"].shape):
            return  # a graph of dynamic sizes is not compiled again: `obstacle` lets nothing be packed that would need a check
        measured: dict[Any, list[tuple[GraphCheck, tuple[GraphSlot, ...], list[fx.Node]]]] = {}
        operands = {number: [use for use in packed if number in use[1].numbers] for number in joint.operations}
        found: list[tuple[GraphCheck, tuple[GraphSlot, ...]]] = []
        for max_ranges in MAX_RANGES_TRIED:
            found = [
                (check, tuple(slot for _, slot, _ in operands[number]))
                for number, operation in joint.operations.items()
                if (check := check_of(operation, operands[number], self._by_name, self._orders.tensor, max_ranges))
            ]
            if sum(check.count for check, _ in found) <= ENOUGH_NUMBERS:
                break
        for check, slots in found:
            parts = self._insert_traced(self.forward.graph, check.kind, check.measure, check.sources)
            measured.setdefault(check.kind, []).append((check, slots, parts))
        nodes, count = list[fx.Node](), 0
        for of_kind in measured.values():
            parts, join = [part for *_, parts in of_kind for part in parts], of_kind[0][0].join
            nodes.append(self._measure(lambda *t, f=join: f(t).float(), parts))
            for check, slots, _ in of_kind:
                report.checks.append(ValueCheck(slots, count, check.count, check.reason))
                count += check.count
        if count > NUM_NUMBERS:
            raise ApplyError(TOO_MANY_NUMBERS)
        if nodes:
            self._write_numbers(self._measure(lambda *t: pad(torch.cat(t), (0, NUM_NUMBERS - count)), nodes))

    def pack(self, node: fx.Node, codec: GraphCodec) -> int:
        """Replace a saved tensor in both graphs by the codes and scales that `codec` makes, and return their bytes."""
        value: Tensor = node.meta["val"]
        old = self.placeholders.pop(node.name)
        place = next(i for i in range(self.num_outputs, len(self._returned)) if self._returned[i] is node)
        if not old.users:  # backward compared it and nothing else: the comparison is saved
            self._returned[place : place + 1] = []
            self.backward.graph.erase_node(old)
            return 0
        order = self._orders.of(node, old)
        parts = self._encoded(node, order, codec)
        self._returned[place : place + 1] = parts
        new = self._add_placeholders(parts, before=old)
        if codec.format.block:
            self._scales.add(new[1])
        self._parts[node.name], self._code_orders[node.name] = parts, order
        first = min(old.users, key=lambda user: self._order.get(user, 0))
        old.replace_all_uses_with(self._decoded(new, codec.format, value, order, first))
        self.backward.graph.erase_node(old)
        return sum(nbytes_of(part) for part in parts)

    def delay_recomputation(self) -> None:
        """Make backward recompute large tensors right before they are used, rather than early."""

        def insert(function: Callable[..., Tensor], arguments: list[fx.Node], before: fx.Node) -> fx.Node:
            return self._insert_traced(self.backward.graph, function, lambda *t: (function(*t),), arguments, before=before)[0]

        RecomputedChains(self.backward.graph, of_tangents(self.backward.graph)).delay(self._scales, insert)

    def add_signals(self, measures: list[tuple[fx.Node, SlotMeasure]], report: GraphReport) -> None:
        """Make forward measure the rounding errors of packed tensors, for a guard that changes formats by them.

        Tensors of dynamic sizes are left out; the errors are the last of the numbers that the graph measures.
        """
        found = [(node, m) for node, m in measures if node.name in self._parts and isinstance(node.meta["val"].numel(), int)]
        first, graph = NUM_NUMBERS - NUM_SIGNALS * len(found), self.forward.graph
        if not found:
            return
        count = max((check.first + check.count for check in report.checks), default=0)
        if first < count:
            raise ApplyError(
                f"a guard measures {len(found)} slots of a compiled graph, which has place for {(NUM_NUMBERS - count) // NUM_SIGNALS}: "
                "compile parts of the model one by one, or insert a graph break."
            )
        numbers: list[fx.Node] = []
        for place, (node, of) in enumerate(found):
            sources, order = [node, self._step, *self._parts[node.name]], self._code_orders[node.name]
            traced = _trace(lambda x, *t, o=order, f=of: (f(x.permute(o).reshape(-1), *t),), *(n.meta["val"] for n in sources))
            numbers += _insert(graph, traced, sources, _after(sources))
            report.signals.append(GraphSignal(of.slot.names, first + NUM_SIGNALS * place))
        self._write_numbers(
            self._measure(lambda others, *t: torch.cat([others[:first], *t]), [self._written or self._numbers, *numbers])
        )

    def finish(self) -> None:
        """Write the edited outputs back into both graphs, check the graphs and recompile them."""
        self._output.args = (tuple(self._returned),)
        self.backward.graph.eliminate_dead_code()
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()

    # --- private ---

    def _encoded(self, node: fx.Node, order: list[int], codec: GraphCodec) -> list[fx.Node]:
        """Insert the encoding of a tensor into the forward graph; return the nodes of codes, scales and minimums.

        `order`: the dimensions of the tensor in the order in which it is encoded.
        """
        graph = self.forward.graph
        self._int_step = self._int_step or self._insert_traced(graph, "step", lambda s: (s.to(torch.int32),), [self._step])[0]
        return _call(graph, torch.ops.paredown.encode.default, [node, self._int_step], (order, *codec.arguments))

    def _decoded(self, parts: list[fx.Node], format: Format, value: Tensor, order: list[int], before: fx.Node) -> fx.Node:
        """Insert the decoding of `parts` (codes, scales) to a tensor like `value` into backward; return its node."""
        sizes, dims, dtype = sizes_in_memory(value, order), inverse_order(order), value.dtype
        if lowers(format, value.numel(), dtype):
            arguments = (parts, str(format), dtype, sizes, dims)
            return _insert_call(self.backward.graph, torch.ops.paredown.decode.default, arguments, before)
        return self._insert_traced(
            self.backward.graph,
            ("decode", str(format), value.shape, *order, dtype),
            lambda *p: (decode_in_graph(p, format, num_values(value, p[0], format), dtype).reshape(sizes).permute(dims),),
            parts,
            before=before,
        )[0]

    def _insert_traced(
        self, graph: fx.Graph, name: Any, function: Callable[..., Any], arguments: list[fx.Node], before: fx.Node | None = None
    ) -> list[fx.Node]:
        """Insert the operations of `function` into a graph, and return the nodes of its outputs.

        The function is traced once for all arguments of the same sizes, strides, dtypes and `name`. `before`: the node before which to
        insert; None: right behind the arguments.
        """
        values: list[Tensor] = [node.meta["val"] for node in arguments]
        key = (name, *((v.shape, v.stride(), v.dtype, v.device) for v in values))
        if any(not isinstance(size, int) for v in values for size in v.shape):
            return _insert(graph, _trace(function, *values), arguments, before or _after(arguments))
        if key not in self._traces:
            self._traces[key] = _trace(function, *values)
        return _insert(graph, self._traces[key], arguments, before or _after(arguments), self._constants[graph])

    def _measure(self, function: Callable[..., Tensor], sources: list[fx.Node]) -> fx.Node:
        """Insert a call of `function` on the nodes `sources` at the end of forward; return the result's node."""
        traced = _trace(lambda *t: (function(*t),), *(node.meta["val"] for node in sources))
        return _insert(self.forward.graph, traced, sources, self._output)[0]

    def _write_numbers(self, numbers: fx.Node) -> None:
        """Make forward copy all measured numbers into the tensor that the host reads."""
        graph = self.forward.graph
        for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            if copy.args[0] is self._numbers:
                graph.erase_node(copy)
        with graph.inserting_before(self._output):
            copy = graph.call_function(torch.ops.aten.copy_.default, (self._numbers, numbers))
        copy.meta["val"] = self._numbers.meta["val"]
        self._written = numbers

    def _is_saved(self, name: str) -> bool:
        return any(isinstance(n, fx.Node) and n.name == name and n.op != "placeholder" for n in self._returned[self.num_outputs :])

    def _save_mask(self, node: fx.Node) -> int:
        """Save a boolean tensor as bits instead of computing it in backward, and return the bytes of the bits."""
        value: Tensor = node.meta["val"]
        source = self._computed_in_forward(node)
        order = self._orders.of(source)
        encode, decode = mask_codec(value, order)
        parts = self._insert_traced(self.forward.graph, ("mask", *order), encode, [source])
        if node.op == "placeholder":
            place = next(i for i in range(self.num_outputs, len(self._returned)) if self._returned[i] is source)
            self._returned[place : place + 1] = parts
            new = self._add_placeholders(parts, before=node)
            first = min(node.users, key=lambda user: self._order.get(user, 0))
            self.placeholders.pop(node.name)
        else:
            at = end_of_tensors(self._returned, self.num_outputs)
            self._returned[at:at] = parts
            new = self._add_placeholders(parts, after=last_saved(self.backward.graph))
            first = node
        (result,) = self._insert_traced(self.backward.graph, ("bits", value.shape, *order), decode, new, before=first)
        node.replace_all_uses_with(result)
        self.backward.graph.erase_node(node)
        return nbytes_of(parts[0])

    def _computed_in_forward(self, node: fx.Node) -> fx.Node:
        """Return the forward node that computes the same value as `node`, a backward node that depends on no gradient.

        If forward has no such node, the backward node is copied there.
        """
        if node.name in self._by_name:
            return self._by_name[node.name]
        inputs = {i: self._computed_in_forward(i) for i in node.all_input_nodes}
        with self.forward.graph.inserting_before(_after(list(inputs.values()))):
            copy = self.forward.graph.node_copy(node, lambda i: inputs[i])
        self._orders.add(copy)
        self._by_name[node.name] = copy
        return copy

    def _add_placeholders(
        self, parts: list[fx.Node], *, before: fx.Node | None = None, after: fx.Node | None = None
    ) -> list[fx.Node]:
        graph, added = self.backward.graph, list[fx.Node]()
        for part in parts:
            where = graph.inserting_before(before) if before is not None else graph.inserting_after(after)
            with where:
                placeholder = graph.placeholder(part.name)
            placeholder.target = placeholder.name  # the code that FX generates would mix up arguments of other names
            placeholder.meta = dict(part.meta)
            added.append(placeholder)
            after = placeholder if before is None else None
        return added


# --- graphs -----------------------------------------------------------------------------------------------------------


def of_tangents(backward: fx.Graph) -> set[fx.Node]:
    """Return the nodes of a backward graph that depend on tangents (the gradients of the forward graph's outputs)."""
    found = {node for node in backward.find_nodes(op="placeholder") if _is_tangent(node)}
    for node in backward.nodes:
        if any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _trace(function: Callable[..., Any], *values: Tensor) -> fx.GraphModule:
    """Return `function` as a graph of aten operations, decomposed as Inductor does it."""
    with values[0].fake_mode:  # type: ignore[attr-defined]
        # copies of a traced graph have the same example tensors, and make_fx would take equal arguments for one
        return make_fx(function, decomposition_table=select_decomp_table())(*(value.detach() for value in values))


def _insert(
    graph: fx.Graph,
    traced: fx.GraphModule,
    arguments: Sequence[fx.Node],
    before: fx.Node,
    constants: dict[Any, fx.Node] | None = None,
) -> list[fx.Node]:
    """Copy the nodes of a traced graph before a node of `graph`, and return the nodes of its outputs.

    `arguments`: the nodes that the copies read. `constants`: copies of nodes that read none, by a key, to which new ones are added.
    """
    copies: dict[fx.Node, Any] = {}
    remaining, own = iter(arguments), set[fx.Node]()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(remaining)
        elif node.op == "output":
            outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            return [copies[output] for output in outputs]
        elif constants is not None and own.issuperset(node.all_input_nodes):
            own.add(node)
            key = repr((node.target, fx.map_arg((node.args, node.kwargs), lambda n: copies[n])))
            if key not in constants:
                inputs = [copies[i] for i in node.all_input_nodes] or graph.find_nodes(op="placeholder")[-1:]
                with graph.inserting_before(_after(inputs)):
                    constants[key] = graph.node_copy(node, lambda n: copies[n])
            copies[node] = constants[key]
        else:
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, lambda n: copies[n])
    raise AssertionError("a traced graph has an output")


def _call(graph: fx.Graph, target: Any, tensors: list[fx.Node], others: tuple[Any, ...]) -> list[fx.Node]:
    """Insert a call of an operation that returns several tensors, behind its arguments, and return the nodes of the results.

    `tensors`: the operation's arguments that are nodes. `others`: the arguments that follow them.
    """
    values: list[Tensor] = [node.meta["val"] for node in tensors]
    with values[0].fake_mode:  # type: ignore[attr-defined]
        results: list[Tensor] = target(*values, *others)
    with graph.inserting_before(_after(tensors)):
        call = graph.call_function(target, (*tensors, *others))
        nodes = [graph.call_function(operator.getitem, (call, i)) for i in range(len(results))]
    call.meta["val"] = results
    for node, value in zip(nodes, results, strict=True):
        node.meta["val"] = value
    return nodes


def _insert_call(graph: fx.Graph, target: Any, arguments: tuple[Any, ...], before: fx.Node) -> fx.Node:
    """Insert a call of `target`, which takes a list of tensors, in front of `before`; return the result's node."""
    values: tuple[Any, ...] = fx.map_arg(arguments, lambda node: node.meta["val"])
    with values[0][0].fake_mode, graph.inserting_before(before):
        call = graph.call_function(target, arguments)
        call.meta["val"] = target(*values)
    return call


def _after(nodes: list[fx.Node]) -> fx.Node:
    """Return the first node before which an operation that reads `nodes` can be inserted."""
    graph = nodes[0].graph
    last = max(nodes, key=lambda node: node._sort_key)
    if last.op == "placeholder":
        return next(node for node in graph.nodes if node.op != "placeholder")
    return last.next


def _added_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the two inputs that `PlanBackend` added: the step counter, and the tensor for measured numbers."""
    nodes = [node for node in graph.find_nodes(op="placeholder") if _is_primal(node)][-2:]
    found = [(node.meta["val"].dtype, tuple(node.meta["val"].shape)) for node in nodes]
    if found != [(torch.int64, (1,)), (torch.float32, (NUM_NUMBERS,))]:
        raise AssertionError(
            f"the last inputs of a compiled graph are {found}, not those that were added: torch.compile {torch.__version__} "
            "reordered them. Use torch 2.11 to 2.13, or torch.compile(model), which packs no activations."
        )
    return nodes
