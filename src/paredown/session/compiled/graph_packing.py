"""Packs the tensors that the graphs of torch.compile save for backward, as a plan requests: all use of torch's private API is here.

`torch.compile` traces a joint graph of forward and backward, and a partitioner makes two graphs of it; the forward graph returns the saved
tensors behind its own outputs, the backward graph takes them as placeholders, before the tangents. `PlanPartitioner` is such a partitioner
(`torch._inductor.config.custom_partitioner_fn`, torch 2.9 and later): it calls torch's own, then edits the two graphs.

    forward   ..., x                      ->   ..., codes, scales, minimums
    backward  x, tangents                 ->   codes, scales, minimums, tangents;  x = decode(codes, scales, minimums)

Encode and decode (codec/graph_codec.py) are traced into aten operations, which Inductor fuses into the operations before and after. They
read the tensor in its own memory order. Comparisons that backward would make with decoded values are made in forward instead, and saved as
bits; saved booleans become bits too. Torch's choice of what to recompute stays, with one change: an operation that Inductor can fuse is
also recomputed where backward materializes its result, since a stored tensor must be decoded anyway.

`PlanBackend` adds two tensors to the inputs of every graph: the step counter of stochastic rounding, and the measured numbers.
"""

# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd.utils import _is_primal, _is_tangent
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad
from torch.utils.checkpoint import CheckpointPolicy

from paredown.codec import backend
from paredown.codec import graph_ops as graph_ops  # defines torch.ops.paredown
from paredown.codec.graph_codec import decode_in_graph, encode_in_graph, keys_in_graph
from paredown.codec.packed import default_overflow
from paredown.errors import ApplyError
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.plan.plan import Plan
from paredown.plan.storage import is_same_level, resolve_format
from paredown.roles import Role
from paredown.session.compiled.graph_checks import NUM_NUMBERS, Check, check_of
from paredown.session.compiled.graph_decisions import (
    HELD,
    INPUT,
    SHARED,
    GraphDecision,
    GraphReport,
    ValueCheck,
    fits_bits,
    inverse_order,
    is_boolean,
    mask_codec,
    memory_order,
    nbytes_of,
    num_values,
    obstacle,
    sizes_in_memory,
    storage_of,
)
from paredown.session.compiled.graph_signals import NUM_SIGNALS, GraphSignal, SlotMeasure
from paredown.session.compiled.graph_slots import (
    GraphSlot,
    JointGraph,
    hint,
    num_recomputed_sums,
    read_joint_graph,
    root_and_path,
    slot_of,
)
from paredown.session.compiled.packed_graph import PackedGraph
from paredown.session.compiled.recomputed_chains import RecomputedChains
from paredown.trace.autograd_graph import MIN_PACKED_NUMEL, tensors_in
from paredown.trace.operations import Use

RECOMPUTES = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "recompute_views": True,  # the tensor behind a view is saved, which is dense
}
# What recomputes a residual stream from all its summands makes one kernel that writes all of its values when backward begins: in a ViT of
# 12 layers 1.9 GiB, in GPT-2 9 of 65 ms. The stages of a ResNet have up to 6 summands, and are smaller and faster recomputed.
BREAKS_CHAINS = {"ban_recompute_used_far_apart": True, "ban_recompute_long_fusible_chains": True}
MAX_RECOMPUTED_SUMS = 8
# Inductor writes a value that several kernels read to memory if it takes more than 30 operations. Unpacking codes below 8 bits and
# recomputing a norm take more; in backward of ResNet-50 it wrote 0.77 GiB in float32 for the largest norm.
INLINES = {"realize_opcount_threshold": 64}
TOO_MANY_NUMBERS = (
    f"a compiled graph has more than {NUM_NUMBERS} numbers to measure (logits of attention, statistics of norms): compile "
    "parts of the model one by one, or insert a graph break."
)
KERNEL_DEVICES = ("cuda",)  # where codes below 8 bits are encoded by `paredown::encode`


@dataclass(frozen=True, eq=False)
class PlanPartitioner(CustomPartitionerFn):
    """Partitions joint graphs, packs what forward saves, and calls `on_graph` with a report of each graph."""

    plan: Plan
    seed: int
    on_graph: Callable[..., None]
    kept: dict[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])  # names of slots not to pack -> why
    has_guard: bool = False  # the graphs measure packed slots
    roots: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # paths of the modules that are variables of the compiled function

    def uuid(self) -> Any:
        """Identifies plan and code in the keys of Inductor's caches."""
        return ("paredown", _source_hash(), self.plan.key, self.seed, sorted(self.kept), self.has_guard)

    def __reduce__(self) -> Any:
        """Pickled as its uuid: Inductor pickles its settings to make the keys of its cache."""
        return repr, (self.uuid(),)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph, packed."""
        if not self.plan.packs_activations:
            return min_cut_rematerialization_partition(gm, joint_inputs, **options)
        joint = joint_graph(gm, options, self.roots)
        forward, backward = partition(gm, joint_inputs, options)
        editor = GraphEditor(forward, backward, options["num_fwd_outputs"])
        report = GraphReport([])
        chosen = self._decide(editor, joint, report)
        bits = {node.name: d.format.bits_per_value for node, d in chosen if d.format is not None}
        if saved := chains_to_save(backward.graph, bits):
            forward, backward = partition(gm, joint_inputs, options, saved)
            editor, report = GraphEditor(forward, backward, options["num_fwd_outputs"]), GraphReport([])
            chosen = self._decide(editor, joint, report)
        editor.add_checks([(node, d.slot, d.format) for node, d in chosen if d.format is not None], joint, report)
        editor.save_comparisons({node.name for node, _ in chosen}, report)
        for node, decision in chosen:
            stored = editor.pack(node, self._codec(decision, node))
            report.decisions.append(replace(decision, stored_bytes=stored))
        if self.has_guard:
            editor.add_signals([(node, SlotMeasure.of(d, self.seed)) for node, d in chosen if d.format is not None], report)
        editor.delay_recomputation()
        editor.finish()
        self.on_graph(report)
        return forward, backward

    def _decide(self, editor: GraphEditor, joint: Any, report: GraphReport) -> list[tuple[fx.Node, GraphDecision]]:
        """The saved tensors to pack; unmodified ones that the plan requests a format for go to the report."""
        chosen: list[tuple[fx.Node, GraphDecision]] = []
        kept = set[int]()  # storages of tensors that are saved unmodified
        for node in editor.saved_floats():
            if node.name not in joint.of_inputs:
                continue  # parameters, and casts of parameters, are not activations
            held = INPUT if node.op == "placeholder" else HELD if editor.is_output(node) else ""
            decision = self._decision(node, slot_of(editor.placeholders[node.name], joint), held)
            if decision.format is not None:
                chosen.append((node, decision))
            elif decision.asked is not None:
                report.decisions.append(decision)
                kept.add(storage_of(node))
        shared = [pair for pair in chosen if storage_of(pair[0]) in kept]
        report.decisions += [replace(decision, format=None, reason=SHARED) for _, decision in shared]
        return [pair for pair in chosen if pair not in shared]

    def _decision(self, node: fx.Node, slot: GraphSlot, held: str) -> GraphDecision:
        """The decision for a saved tensor; `held`: why memory of it stays allocated anyway, or ""."""
        value: Tensor = node.meta["val"]
        numel = hint(value.numel())
        assignment = self.plan.find(slot.names, Role.ACTIVATION)
        dtype = str(value.dtype).removeprefix("torch.")
        format, reason = resolve_format(assignment, slot.needs, dtype=dtype, numel=numel)
        if slot.needs.use is Use.EXACT:
            format, reason = None, slot.reason
        elif held:
            format, reason = None, held
        elif slot.names in self.kept:
            format, reason = None, self.kept[slot.names]
        elif format is not None:
            problem = obstacle(value, format, slot)
            format, reason = (None, problem) if problem else (format, reason)
        same = is_same_level(assignment.format, format)
        rounding = assignment.resolved_rounding if same else Rounding.NEAREST_EVEN
        return GraphDecision(slot, assignment.format, format, rounding, reason, numel * value.element_size(), 0)

    def _codec(self, decision: GraphDecision, node: fx.Node) -> GraphCodec:
        """How a saved tensor is encoded and decoded."""
        assert decision.format is not None
        tensor_id = crc32(decision.slot.names[0].encode()) if decision.slot.names else 0
        has_kernel = node.meta["val"].device.type in KERNEL_DEVICES and backend.find_kernels() is not None
        return GraphCodec(decision.format, decision.rounding, self.seed, tensor_id, has_kernel)


@dataclass(frozen=True)
class GraphCodec:
    """How one saved tensor is encoded and decoded in a graph.

    `uses_kernel`: by `paredown::encode`. Inductor would fuse the encoding of 8-bit codes into some kernels that read the same values, but
    steps of GPT-2, Llama and ViT-B/16 in 8 bits take as long or longer then, and compiling takes 1.9 to 2.0 instead of 1.3 to 1.4 times as
    long as without packing (one H200).
    """

    format: Format
    rounding: Rounding
    seed: int
    tensor_id: int
    uses_kernel: bool

    @property
    def is_random(self) -> bool:
        """Whether rounding draws random bits."""
        return self.rounding is Rounding.STOCHASTIC

    @property
    def names(self) -> tuple[str, str, str]:
        """Format, rounding and overflow as `paredown::encode` takes them."""
        return str(self.format), self.rounding.value, default_overflow(self.format).value

    def encode(self, x: Tensor, keys: Tensor | None) -> tuple[Tensor, ...]:
        """The parts of flat `x`."""
        return encode_in_graph(x, self.format, self.rounding, default_overflow(self.format), keys)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """The flat values of the parts."""
        return decode_in_graph(parts, self.format, numel, dtype, in_order=self.uses_kernel)


def joint_graph(gm: fx.GraphModule, options: dict[str, Any], roots: Mapping[str, str] | None = None) -> JointGraph:
    """The operations of a joint graph that a partitioner takes with `options`."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    static: Iterable[int] = options.get("static_lifetime_input_indices") or ()
    unique = {node.name for node in fx_graph_cse(gm.graph).nodes}  # as the partitioner does first
    return read_joint_graph(gm.graph, [placeholders[i] for i in static], unique, roots)


def partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], options: dict[str, Any], saved: Set[str] = frozenset()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph, before activations are packed; `saved`: names of nodes that forward must save."""
    marked = [node for node in gm.graph.nodes if node.name in saved and "recompute" not in node.meta]
    for node in marked:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        with functorch_config.patch(RECOMPUTES):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        if num_recomputed_sums(backward.graph) > MAX_RECOMPUTED_SUMS:
            with functorch_config.patch({**RECOMPUTES, **BREAKS_CHAINS}):
                forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
    finally:
        for node in marked:
            del node.meta["recompute"]
    return forward, backward


def chains_to_save(backward: fx.Graph, bits: Mapping[str, float]) -> set[str]:
    """The names of recomputed tensors that are better saved (recomputed_chains.py); `bits`: of a value of each packed tensor."""
    return RecomputedChains(backward, of_tangents(backward), get_default_op_list()).to_save(bits)


def of_tangents(backward: fx.Graph) -> set[fx.Node]:
    """The nodes of a backward graph that depend on gradients."""
    found = {node for node in backward.find_nodes(op="placeholder") if _is_tangent(node)}
    for node in backward.nodes:
        if any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


class GraphEditor:
    """Edits a forward and a backward graph together, so that saved tensors and placeholders stay in the same order."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
        self.forward, self.backward = forward, backward
        self._num_outputs = num_outputs
        self._output = forward.graph.output_node()
        self._returned: list[Any] = list(self._output.args[0])  # type: ignore[arg-type]
        self._by_name = {node.name: node for node in forward.graph.nodes}
        self._order = {node: i for i, node in enumerate(backward.graph.nodes)}
        self.placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        self._step, self._numbers = _added_inputs(forward.graph)
        self._int_step: fx.Node | None = None  # the step as int32, for kernels
        self._scales = set[fx.Node]()  # placeholders of the scales of packed tensors
        self._traces: dict[Any, fx.GraphModule] = {}
        self._parts: dict[str, list[fx.Node]] = {}  # of packed tensors, by name

    def saved_floats(self) -> list[fx.Node]:
        """Saved tensors of floating point of at least MIN_PACKED_NUMEL values."""
        saved = [node for node in self._returned[self._num_outputs :] if isinstance(node, fx.Node)]
        tensors = [(node, value) for node in saved if isinstance(value := node.meta.get("val"), Tensor)]
        return [node for node, value in tensors if value.is_floating_point() and hint(value.numel()) >= MIN_PACKED_NUMEL]

    def is_output(self, node: fx.Node) -> bool:
        """Whether the forward graph returns `node` to the caller."""
        return any(other is node for other in self._returned[: self._num_outputs])

    def save_comparisons(self, packed: set[str], report: GraphReport) -> None:
        """Save exactly the booleans that backward would compute from tensors in `packed`; make bits of them and of saved booleans."""
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
        """Measure in forward what decides whether operands of attention and inputs of norms may be packed."""
        if any(not isinstance(size, int) for node, _, _ in packed for size in node.meta["val"].shape):
            return  # a graph of dynamic sizes is not compiled again: `obstacle` lets nothing be packed that would need a check
        measured: dict[Any, list[tuple[Check, tuple[GraphSlot, ...], list[fx.Node]]]] = {}
        for number, operation in joint.operations.items():
            users = [(node, slot, format) for node, slot, format in packed if number in slot.numbers]
            if check := check_of(operation, users, self._by_name):
                parts = self._insert_traced(self.forward.graph, check.kind, check.measure, check.sources)
                measured.setdefault(check.kind, []).append((check, tuple(slot for _, slot, _ in users), parts))
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
        """Replace a saved tensor by its encoded parts; returns their bytes."""
        value: Tensor = node.meta["val"]
        old = self.placeholders.pop(node.name)
        place = next(i for i in range(self._num_outputs, len(self._returned)) if self._returned[i] is node)
        if not old.users:  # backward compared it and nothing else: the comparison is saved
            self._returned[place : place + 1] = []
            self.backward.graph.erase_node(old)
            return 0
        order = memory_order(value)
        (flat,) = self._insert_traced(self.forward.graph, "flat", lambda x: (x.permute(order).reshape(-1),), [node])
        parts = self._encoded(flat, codec)
        self._returned[place : place + 1] = parts
        new = self._add_placeholders(parts, before=old)
        if codec.format.block:
            self._scales.add(new[1])
        self._parts[node.name] = parts
        sizes, back, dtype = sizes_in_memory(value, order), inverse_order(order), value.dtype
        (result,) = self._insert_traced(
            self.backward.graph,
            ("decode", *codec.names, codec.uses_kernel, value.shape, value.stride(), dtype),
            lambda *p: (codec.decode(p, num_values(value, p[0], codec.format), dtype).reshape(sizes).permute(back),),
            new,
            before=min(old.users, key=lambda user: self._order.get(user, 0)),
        )
        old.replace_all_uses_with(result)
        self.backward.graph.erase_node(old)
        return sum(nbytes_of(part) for part in parts)

    def delay_recomputation(self) -> None:
        """Recompute large tensors right before their use (recomputed_chains.py)."""

        def insert(function: Callable[..., Tensor], arguments: list[fx.Node], before: fx.Node) -> fx.Node:
            return self._insert_traced(self.backward.graph, function, lambda *t: (function(*t),), arguments, before=before)[0]

        RecomputedChains(self.backward.graph, of_tangents(self.backward.graph), get_default_op_list()).delay(self._scales, insert)

    def add_signals(self, measures: list[tuple[fx.Node, SlotMeasure]], report: GraphReport) -> None:
        """Measure packed tensors in forward for a guard; the numbers are the last ones of the graph. Not where sizes are dynamic."""
        found = [(node, m) for node, m in measures if node.name in self._parts and isinstance(node.meta["val"].numel(), int)]
        first, graph = NUM_NUMBERS - NUM_SIGNALS * len(found), self.forward.graph
        if not found:
            return
        if first < max((check.first + check.count for check in report.checks), default=0):
            raise ApplyError(
                f"a guard measures {len(found)} slots of a compiled graph, too many: compile parts of the model one by one."
            )
        numbers: list[fx.Node] = []
        for place, (node, of) in enumerate(found):
            sources, order = [node, self._step, *self._parts[node.name]], memory_order(node.meta["val"])
            traced = _trace(lambda x, *t, o=order, f=of: (f(x.permute(o).reshape(-1), *t),), *(n.meta["val"] for n in sources))
            numbers += _insert(graph, traced, sources, _after(sources))
            report.signals.append(GraphSignal(of.slot.names, first + NUM_SIGNALS * place))
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = next((node for node in copies if node.args[0] is self._numbers), None)  # by `add_checks`
        sources = [self._numbers if written is None else written.args[1], *numbers]
        traced = _trace(lambda others, *t: (torch.cat([others[:first], *t]),), *(n.meta["val"] for n in sources))
        (numbers_of_all,) = _insert(graph, traced, sources, self._output)
        with graph.inserting_before(self._output):
            copied = graph.call_function(torch.ops.aten.copy_.default, (self._numbers, numbers_of_all))
        copied.meta["val"] = self._numbers.meta["val"]
        if written is not None:
            graph.erase_node(written)

    def finish(self) -> None:
        """Write the outputs back and check both graphs."""
        self._output.args = (tuple(self._returned),)
        self.backward.graph.eliminate_dead_code()
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()

    # --- private ---

    def _encoded(self, flat: fx.Node, codec: GraphCodec) -> list[fx.Node]:
        """Codes, scales and minimums of a flat tensor of the forward graph."""
        graph = self.forward.graph
        if codec.uses_kernel:
            self._int_step = self._int_step or self._insert_traced(graph, "step", lambda s: (s.to(torch.int32),), [self._step])[0]
            return _call(
                graph, torch.ops.paredown.encode.default, [flat, self._int_step], (*codec.names, codec.seed, codec.tensor_id)
            )
        if not codec.is_random:
            return self._insert_traced(graph, ("encode", *codec.names), lambda x: codec.encode(x, None), [flat])
        traced = _trace(lambda step: (keys_in_graph(step, codec.seed, codec.tensor_id),), self._step.meta["val"])
        keys = _insert(graph, traced, [self._step], _after([flat, self._step]))
        return self._insert_traced(graph, ("encode", *codec.names), lambda x, keys: codec.encode(x, keys), [flat, *keys])

    def _insert_traced(
        self, graph: fx.Graph, name: Any, function: Callable[..., Any], arguments: list[fx.Node], before: fx.Node | None = None
    ) -> list[fx.Node]:
        """The outputs of `function`, a tuple, behind its arguments or before a node.

        It is traced once for arguments of the same sizes, strides, dtypes and `name`.
        """
        values: list[Tensor] = [node.meta["val"] for node in arguments]
        key = (name, *((v.shape, v.stride(), v.dtype, v.device) for v in values))
        if any(not isinstance(size, int) for v in values for size in v.shape):
            return _insert(graph, _trace(function, *values), arguments, before or _after(arguments))
        if key not in self._traces:
            self._traces[key] = _trace(function, *values)
        return _insert(graph, self._traces[key], arguments, before or _after(arguments))

    def _measure(self, function: Callable[..., Tensor], sources: list[fx.Node]) -> fx.Node:
        """Numbers of a forward pass, computed at its end."""
        traced = _trace(lambda *t: (function(*t),), *(node.meta["val"] for node in sources))
        return _insert(self.forward.graph, traced, sources, self._output)[0]

    def _write_numbers(self, numbers: fx.Node) -> None:
        """Copy numbers to the input that the host reads."""
        with self.forward.graph.inserting_before(self._output):
            copy = self.forward.graph.call_function(torch.ops.aten.copy_.default, (self._numbers, numbers))
        copy.meta["val"] = self._numbers.meta["val"]

    def _is_saved(self, name: str) -> bool:
        return any(isinstance(n, fx.Node) and n.name == name and n.op != "placeholder" for n in self._returned[self._num_outputs :])

    def _save_mask(self, node: fx.Node) -> int:
        """Compute a boolean of backward in forward, and save it as bits; returns their bytes."""
        value: Tensor = node.meta["val"]
        encode, decode = mask_codec(value)
        source = self._computed_in_forward(node)
        parts = _insert(self.forward.graph, _trace(encode, value), [source], _after([source]))
        decoded = _trace(decode, parts[0].meta["val"])
        if node.op == "placeholder":
            place = next(i for i in range(self._num_outputs, len(self._returned)) if self._returned[i] is source)
            self._returned[place : place + 1] = parts
            new = self._add_placeholders(parts, before=node)
            first = min(node.users, key=lambda user: self._order.get(user, 0))
            self.placeholders.pop(node.name)
        else:
            at = self._num_saved_tensors()
            self._returned[at:at] = parts
            last = [p for p in self.backward.graph.find_nodes(op="placeholder") if not _is_tangent(p)][-1]
            new = self._add_placeholders(parts, after=last)
            first = node
        (result,) = _insert(self.backward.graph, decoded, new, first)
        node.replace_all_uses_with(result)
        self.backward.graph.erase_node(node)
        return nbytes_of(parts[0])

    def _num_saved_tensors(self) -> int:
        """The place behind the last saved tensor among the outputs of forward: symbolic sizes come after it."""
        tensors = (isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor) for n in self._returned)
        return next((i for i, is_tensor in enumerate(tensors) if i >= self._num_outputs and not is_tensor), len(self._returned))

    def _computed_in_forward(self, node: fx.Node) -> fx.Node:
        """The node of forward with the value of a node of backward that depends on no tangent; copied there if need be."""
        if node.name in self._by_name:
            return self._by_name[node.name]
        inputs = {i: self._computed_in_forward(i) for i in node.all_input_nodes}
        with self.forward.graph.inserting_before(_after(list(inputs.values()))):
            copy = self.forward.graph.node_copy(node, lambda i: inputs[i])
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


# --- torch.compile ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlanBackend:
    """A backend of torch.compile: Inductor, with `partitioner`, and two more inputs of each graph."""

    partitioner: PlanPartitioner
    step: Callable[[torch.device], Tensor]  # the step counter of a device, set to the number of the next call
    seed: Callable[[], int]
    plan: Callable[[], Plan]  # the current one: a guard changes it
    names: Callable[[], dict[int, str]]  # of parameters, by their id
    on_call: Callable[[GraphReport, Any, Tensor, int], None]  # after each call with gradients: outputs, numbers, number of calls
    inductor: Any  # torch's own backend, which resolved mode and options

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """The compiled graph."""
        return PackedGraph(self, gm, example_inputs)

    def roots(self, gm: fx.GraphModule, example_inputs: list[Any]) -> dict[str, str]:
        """The paths in the model of the modules that are variables of a compiled function, from the names of their parameters."""
        names, found = self.names(), dict[str, str]()
        for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
            name, source = names.get(id(example), ""), getattr(node, "_dynamo_source", None)
            text = getattr(source, "name", "")  # a method in earlier versions of torch
            root, inside = root_and_path(str(text() if callable(text) else text))
            if inside and f".{name}".endswith(f".{inside}"):
                found.setdefault(root, name[: -len(inside)].rstrip("."))
        return found

    def __deepcopy__(self, memo: Any) -> PlanBackend:
        """The same backend: a copy of a compiled model packs in the same session."""
        return self

    def compile(self, gm: fx.GraphModule, inputs: list[Any], partitioner: PlanPartitioner) -> Callable[..., Any]:
        """`gm` compiled by Inductor; `inputs` end with the two that are added."""
        patches = {**self._patches(), **self.inductor.config, "custom_partitioner_fn": partitioner}
        # a hit in the cache of AOTAutograd would skip the partitioner, whose report the session needs; Inductor's own cache stays
        with functorch_config.patch(enable_autograd_cache=False), _more_inputs(gm.graph, inputs[-2:]):
            return compile_fx(gm, inputs, config_patches=patches)  # type: ignore[return-value]

    def _patches(self) -> dict[str, Any]:
        """Inductor's settings for this plan, unless the user sets them."""
        formats = (assignment.format for _, assignment in self.partitioner.plan.rules)
        return INLINES if any(format is not None and format.element.width < 8 for format in formats) else {}


def make_backend(
    partitioner: PlanPartitioner,
    *,
    step: Callable[[torch.device], Tensor],
    seed: Callable[[], int],
    plan: Callable[[], Plan],
    names: Callable[[], dict[int, str]],
    on_call: Callable[[GraphReport, Any, Tensor, int], None],
    options: dict[str, Any],
) -> PlanBackend:
    """The backend for torch.compile(**options); takes `mode` and `options` out of `options`, which belong to Inductor."""
    backend = options.pop("backend", "inductor")
    if backend != "inductor":
        raise ApplyError(
            f"session.compile packs tensors in the graphs of Inductor, and backend={backend!r} was requested: leave backend out, or call "
            "torch.compile(model, backend=...), which packs nothing."
        )
    inductor = torch._TorchCompileInductorWrapper(options.pop("mode", None), options.pop("options", None), options.get("dynamic"))
    return PlanBackend(partitioner, step, seed, plan, names, on_call, inductor)


@contextmanager
def _more_inputs(graph: fx.Graph, examples: Sequence[Tensor]) -> Generator[None]:
    """A context in which a graph has more placeholders, behind the others. Dynamo needs its graph unchanged afterwards."""
    added: list[fx.Node] = []
    for i, example in enumerate(examples):
        placeholders = graph.find_nodes(op="placeholder")
        where = graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(next(iter(graph.nodes)))
        with where:
            node = graph.placeholder(f"paredown_{i}")
        node.meta["example_value"] = example
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}  # CUDA graphs may write to it
        node._dynamo_source = ConstantSource(f"paredown_{i}")  # type: ignore[attr-defined]  # AOTAutograd identifies inputs by it
        added.append(node)
    try:
        yield
    finally:
        for node in added:
            graph.erase_node(node)


def autograd_node_of(outputs: Any) -> Any:
    """The autograd node of the call of a compiled graph that returned `outputs`; None if it has none. Views of outputs are behind it."""
    nodes = [t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None]
    for _ in range(3):
        found = next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)
        if found is not None:
            return found
        nodes = [parent for node in nodes for parent, _ in node.next_functions if parent is not None]
    return None


def holds_tensors(node: Any) -> bool:
    """Whether backward has not freed what an `autograd_node_of` saved."""
    try:
        return len(node.saved_tensors) + len(getattr(node, "_tensors_no_vc_check", ())) > 0
    except RuntimeError:
        return False


# --- graphs -----------------------------------------------------------------------------------------------------------


def _trace(function: Callable[..., Any], *values: Tensor) -> fx.GraphModule:
    """`function` as a graph of aten operations, decomposed as Inductor does."""
    with values[0].fake_mode:  # type: ignore[attr-defined]
        return make_fx(function, decomposition_table=select_decomp_table())(*values)


def _insert(graph: fx.Graph, traced: fx.GraphModule, arguments: Sequence[fx.Node], before: fx.Node) -> list[fx.Node]:
    """Copy a traced graph before a node; returns the nodes of its outputs."""
    copies: dict[fx.Node, Any] = {}
    remaining = iter(arguments)
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(remaining)
            elif node.op == "output":
                outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                return [copies[output] for output in outputs]
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
    raise AssertionError("a traced graph has an output")


def _call(graph: fx.Graph, target: Any, tensors: list[fx.Node], others: tuple[Any, ...]) -> list[fx.Node]:
    """The results of an operation that returns a list of tensors, behind its arguments."""
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


def _after(nodes: list[fx.Node]) -> fx.Node:
    """The node before which something can be inserted that reads `nodes`; behind all placeholders."""
    graph = nodes[0].graph
    last = max(nodes, key=lambda node: node._sort_key)
    if last.op == "placeholder":
        return next(node for node in graph.nodes if node.op != "placeholder")
    return last.next


def _added_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that `PlanBackend` added: the step counter, and the tensor that measured numbers are written to."""
    nodes = [node for node in graph.find_nodes(op="placeholder") if _is_primal(node)][-2:]
    found = [(node.meta["val"].dtype, tuple(node.meta["val"].shape)) for node in nodes]
    if found != [(torch.int64, (1,)), (torch.float32, (NUM_NUMBERS,))]:
        raise AssertionError(
            f"the last inputs of a compiled graph are {found}, not those that were added: torch.compile {torch.__version__} "
            "reordered them. Use torch 2.11 to 2.13, or torch.compile(model), which packs no activations."
        )
    return nodes


def _source_hash() -> str:
    folder = Path(__file__).parent
    package = folder.parent.parent
    files = (*sorted(folder.glob("*.py")), package / "codec" / "graph_codec.py", package / "trace" / "operations.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
