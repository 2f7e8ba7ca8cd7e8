"""`compiled_trace` returns the trace of a compiled training step, from the graphs of torch.compile, which are traced and not compiled.

The slots of the trace are the tensors that forward graphs save for backward, under the names and needs that compiled sessions give them
(graph_slots.py); a plan that packs activations decides their storage as sessions do. Working memory is that of the buffers that Inductor
allocates (graph_memory.py). Tensors outside of the graphs, such as those of a loss function, are recorded one by one; no plan packs them.

Sessions partition graphs differently if they pack activations: then backward recomputes more. The trace itself is the step with packed
activations, and `without_packing` the step under a plan that packs none; where chains of recomputed tensors are saved in 4 bits
(recomputed_chains.py), there is also `in_4_bits`.

A packed tensor is decoded right before its first use in backward. Where an operation that Inductor cannot fuse reads it (a matrix product,
a convolution, attention) the decoded tensor is written to memory until its last use; elsewhere kernels decode it as they read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from paredown.autograd.operation_kinds import kind_of
from paredown.autograd.operations import MIN_PACKED_NUMEL, SMALL, Use, max_left_bytes
from paredown.formats.format import Format
from paredown.loss.loss_operator import NAME as LOSS_OPERATOR
from paredown.plan.trace import Output, Part, Recomputation, Saver, Slot, Trace
from paredown.predict.captured_step import CapturedGraph, GraphCall, GraphCapture, Partition
from paredown.predict.graph_memory import Buffer, GraphMemory
from paredown.predict.timeline import Allocation
from paredown.roles import Role
from paredown.session.compiled.graph_decisions import HELD, SHARED, fits_bits, obstacle
from paredown.session.compiled.graph_editor import of_tangents
from paredown.session.compiled.graph_slots import aten_name, hint, is_boolean, module_path, slot_of
from paredown.session.compiled.recomputed_tensors import RecomputedTensor, is_tensor, recomputable_tensors
from paredown.session.weights.saved_weights import COMPILED

GRADIENT = "it is a gradient, which a loss in chunks computes in forward"
EIGHT_BITS = Format.parse("int8/64@bf16")
FEW = f"it has fewer than {MIN_PACKED_NUMEL} values, or no floats"
MASK_OF_SEVERAL = "it is a comparison of several packed tensors, in exact bits"
OUTSIDE_OF_GRAPHS = "it is saved outside of the compiled graphs"
# a slot has one packed part for each use, so that it can store up to three comparisons of its tensor
MASK_USES = (Use.SIGN, Use.INSIDE, Use.MASK)


@dataclass(frozen=True)
class GraphTimes:
    """One call of a forward and a backward graph: their buffers, and when in the step each is written and read.

    Times are ticks of the step; `end` is the last one. `backward` is None for a graph without gradients.
    """

    partition: Partition
    forward: GraphMemory
    backward: GraphMemory | None
    call: GraphCall
    end: int

    def placeholder(self, node: fx.Node) -> fx.Node | None:
        """Return the input of the backward graph for a node that forward saves; None if there is none."""
        gm = self.partition.backward
        found = gm.graph.find_nodes(op="placeholder") if gm is not None else ()
        return next((p for p in found if p.name == node.name), None)

    def born(self, buffer: Buffer) -> int:
        """Return the tick of the step at which forward writes `buffer`."""
        return self.call.forward_at + max(buffer.birth, 0)

    def encoded(self, buffer: Buffer) -> int:
        """Return the time in the step from which forward holds the codes of a buffer.

        They are written behind convolutions with workspaces, which take more.
        """
        last = max(self.forward.workspaces().intersection([buffer.birth, *buffer.reads]), default=-1)
        return max(self.born(buffer), self.call.forward_at + last + 1)

    def released(self, at: int) -> int:
        """Return the last time in the step at which the codes of a tensor that is decoded for a read at time `at` are held.

        A convolution's workspace, which takes more than the codes, is allocated when they are freed.
        """
        is_convolved = self.backward is not None and at - self.call.backward_at in self.backward.workspaces()
        return at - is_convolved

    def read_in_forward(self, buffer: Buffer) -> int:
        """Return the last tick of the step at which forward reads `buffer`."""
        return self.call.forward_at + max(buffer.death, 0)

    def returned(self) -> dict[Buffer, Allocation]:
        """Return the allocations of those buffers that forward both saves and returns to its caller."""
        nodes = {node.name: node for node in self.partition.forward.graph.nodes}
        pairs = ((self.forward.of(nodes[name]), allocation) for name, allocation in self.call.held.items() if name in nodes)
        return {buffer: allocation for buffer, allocation in pairs if buffer is not None}

    def held_until(self, buffer: Buffer) -> int:
        """Return the time (tick) at which the caller of the graph frees `buffer`, an output; 0 for other buffers."""
        allocation = self.returned().get(buffer)
        return 0 if allocation is None else self.end if allocation.death is None else allocation.death

    def reads(self, node: fx.Node) -> tuple[int, int]:
        """Return the first and last tick at which backward reads the saved tensor of `node`, a node of forward.

        Both are the end of the step if backward does not run.
        """
        return self.reads_of(self.placeholder(node))

    def decoded(self, node: fx.Node) -> tuple[int, int]:
        """Return the first and last time (tick) at which backward decodes the tensor of `node` if it is packed.

        Comparisons with its values do not count, since forward stores their results as masks.
        """
        first, last = self.reads(node)
        placeholder = self.placeholder(node)
        if self.backward is None or placeholder is None or self.call.backward_at < 0:
            return first, last
        times = self.backward.value_reads(placeholder)
        return (self.call.backward_at + times[0], self.call.backward_at + times[-1]) if times else (first, last)

    def reads_of(self, node: fx.Node | None) -> tuple[int, int]:
        """Return the first and last time (tick) at which backward reads `node`, a node of the backward graph."""
        if self.backward is None or node is None or self.call.backward_at < 0:
            return self.end, self.end
        times = self.backward.reads(node) or [0]
        return self.call.backward_at + min(times), self.call.backward_at + max(times)

    def is_overwritten(self, node: fx.Node) -> bool:
        """Return whether the last kernel that reads a saved tensor may write its result over it."""
        placeholder = self.placeholder(node)
        source = self.backward.of(placeholder) if self.backward is not None and placeholder is not None else None
        if self.backward is None or source is None or not source.reads:
            return False
        found = (b for b in self.backward.buffers if b.birth == source.reads[-1] and b.kind == "pointwise" and source in b.sources)
        return any(buffer.nbytes == source.nbytes for buffer in found)


class StepSlots:
    """The slots (saved tensors) and allocations of a compiled step, made of the calls of its graphs.

    `partition_of` chooses how each graph is split into forward and backward. `end` is the last tick of the step.
    """

    def __init__(
        self,
        calls: list[GraphCall],
        end: int,
        partition_of: Callable[[CapturedGraph], Partition],
        *,
        on_cuda: bool,
        is_packed: bool = False,
    ) -> None:
        self.slots: list[Slot] = []
        self.outputs: list[Output] = []
        self._end, self._on_cuda, self._is_packed = end, on_cuda, is_packed
        self._num_storages = 0
        self._numbers: dict[Buffer, int] = {}  # storage numbers of buffers in the graph that is being added
        self._recomputable: dict[str, RecomputedTensor] = {}
        memories: dict[fx.GraphModule, GraphMemory] = {}
        for call in calls:
            partition = partition_of(call.graph)
            graphs = [gm for gm in (partition.forward, partition.backward) if gm is not None]
            for gm in graphs:
                is_ordered = gm is partition.backward and partition is not call.graph.plain
                memories[gm] = memories.get(gm) or GraphMemory(gm.graph, on_cuda=on_cuda, by_last=is_ordered)
            backward = memories[partition.backward] if partition.backward is not None else None
            self._add(GraphTimes(partition, memories[partition.forward], backward, call, end))
        self.slots = with_unique_names(self.slots)

    def _add(self, times: GraphTimes) -> None:
        nodes = list(dict.fromkeys(node for node in _saved(times.partition) if node.op != "placeholder"))
        by_buffer: dict[Buffer, list[fx.Node]] = {}
        for node in nodes:
            buffer = times.forward.of(node)
            if buffer is not None and buffer.birth >= 0:
                by_buffer.setdefault(buffer, []).append(node)
        self._numbers = {buffer: self._num_storages + i for i, buffer in enumerate(by_buffer)}
        self._num_storages += len(by_buffer)
        self._recomputable = recomputable_tensors(times.partition.forward.graph, times.partition.num_outputs)
        made = {node: slot for buffer, group in by_buffer.items() for node, slot in self._slots(buffer, group, times)}
        made = _without_small(made) if self._on_cuda else made
        self.slots += self._with_comparisons(made, times)
        self.outputs += _temporaries(times.forward, times.call.forward_at, "forward")
        if times.backward is not None and times.call.backward_at >= 0:
            compared = _recomputed(times.backward) if self._is_packed else ()
            self.outputs += _temporaries(times.backward, times.call.backward_at, "backward", compared)
        self.outputs += _returned(times, set(by_buffer), self._end)

    def _slots(self, buffer: Buffer, nodes: list[fx.Node], times: GraphTimes) -> Iterator[tuple[fx.Node, Slot]]:
        """Yield a slot for each saved tensor in one buffer; if one of them cannot be packed, none is."""
        found = [(node, self._slot(node, buffer, self._numbers[buffer], times)) for node in nodes]
        if any(slot.role is Role.ACTIVATION and slot.stays for _, slot in found):
            found = [(node, slot if slot.stays else replace(slot, stays=SHARED)) for node, slot in found]
        yield from found

    def _slot(self, node: fx.Node, buffer: Buffer, storage: int, times: GraphTimes) -> Slot:
        value: Tensor = node.meta["val"]
        last = times.reads(node)[1] - (_is_gradient(node) and times.is_overwritten(node))
        birth, dropped = times.born(buffer), max(times.read_in_forward(buffer), times.held_until(buffer))
        savers, stays = _savers(node, times)
        is_cast = value.is_floating_point() and node.name not in times.call.graph.joint.of_inputs
        spans = (times.decoded(node),) if _is_written(times.placeholder(node)) else ()
        released = times.released(spans[0][0]) if spans else last
        part = Part(savers[0].use, times.encoded(buffer), released, spans) if not stays else None
        return Slot(
            savers[0].name,
            Role.TEMPORARY if is_cast else Role.ACTIVATION,
            module_path(node.meta.get("nn_module_stack"))[0],
            tuple(hint(size) for size in value.shape),
            str(value.dtype).removeprefix("torch."),
            buffer.nbytes,
            birth,
            max(last, dropped),
            numel=hint(value.numel()),
            storage=-1 if is_cast else storage,
            dropped=dropped,
            savers=() if is_cast else savers,
            parts=(part,) if part is not None and not is_cast else (),
            stays="" if is_cast else stays,
            recomputation=None if is_cast or stays else self._recomputation(node, times),
        )

    def _recomputation(self, node: fx.Node, times: GraphTimes) -> Recomputation | None:
        """Return how backward could recompute the saved tensor of `node`; None if it cannot."""
        tensor = self._recomputable.get(node.name)
        if tensor is None or times.call.backward_at < 0:
            return None
        buffers = (times.forward.of(source) for source in tensor.sources)
        sources = {self._numbers[buffer] for buffer in buffers if buffer is not None and buffer in self._numbers}
        op = str(tensor.products[-1].target) if tensor.products else str(node.target)
        cost = op, tensor.flops, tensor.moved_bytes, tensor.written_bytes
        return Recomputation(tuple(sorted(sources)), *cost, *times.reads(node))

    def _with_comparisons(self, made: dict[fx.Node, Slot], times: GraphTimes) -> list[Slot]:
        """Return the slots `made`, with a mask for each comparison that backward makes with packed tensors only.

        Such a mask is stored in bits, as one more part of its tensor's slot or as a slot of its own.
        """
        slots = dict(made)
        packable = {node.name: node for node, slot in made.items() if slot.parts and slot.parts[0].use is Use.VALUE}
        extra: list[Slot] = []
        for mask, sources in _comparisons(times.partition.backward, set(packable)):
            last = times.reads_of(mask)[1]
            node = packable[min(sources)]
            slot, numel = slots[node], hint(mask.meta["val"].numel())
            birth = max(made[packable[name]].birth for name in sources)
            free = [use for use in MASK_USES if use not in slot.uses]
            if len(sources) == 1 and free and slot.numel == numel:
                saver = replace(slot.savers[0], name=f"{slot.savers[0].name}>{mask.name}", use=free[0], pin=None, is_centered=False)
                slots[node] = replace(slot, parts=(*slot.parts, Part(free[0], birth, last)), savers=(*slot.savers, saver))
            else:
                nbytes = -(-numel // 8) if fits_bits(mask.meta["val"]) else numel
                extra.append(self._mask_slot(mask, nbytes, birth, last))
        return [*slots.values(), *extra]

    def _mask_slot(self, mask: fx.Node, nbytes: int, birth: int, death: int) -> Slot:
        storage, self._num_storages = self._num_storages, self._num_storages + 1
        name = _place(mask)
        saver = Saver(name, aten_name(mask), "mask", Use.EXACT)
        module = name.partition(":")[0]
        slot = Slot(name, Role.ACTIVATION, module, (nbytes,), "uint8", nbytes, birth, death, numel=nbytes, storage=storage)
        return replace(slot, dropped=death, savers=(saver,), stays=MASK_OF_SEVERAL)


# --- saved tensors ----------------------------------------------------------------------------------------------------


def _saved(partition: Partition) -> list[fx.Node]:
    """Return the nodes of the tensors that the forward graph saves for backward."""
    outputs: Any = partition.forward.graph.output_node().args[0]
    return [node for node in outputs[partition.num_outputs :] if is_tensor(node)]


def _savers(node: fx.Node, times: GraphTimes) -> tuple[tuple[Saver, ...], str]:
    """Return the operations that saved the tensor of `node`, and why no plan can pack it ("" if a plan can)."""
    value: Tensor = node.meta["val"]
    own, place = _place(node), aten_name(node)
    if _is_gradient(node):
        return (Saver(f"{own.partition(':')[0]}:{LOSS_OPERATOR}", place, "output", Use.EXACT),), GRADIENT
    if is_boolean(node) and fits_bits(value):
        return (Saver(own, place, "mask", Use.MASK),), ""
    placeholder = times.placeholder(node)
    if placeholder is None or not value.is_floating_point() or hint(value.numel()) < MIN_PACKED_NUMEL:
        return (Saver(own, place, "output", Use.EXACT),), FEW
    slot = slot_of(placeholder, times.call.graph.joint)
    outputs: Any = times.partition.forward.graph.output_node().args[0]
    held = HELD if any(other is node for other in outputs[: times.partition.num_outputs]) else ""
    stays = slot.reason if slot.needs.use is Use.EXACT else held or obstacle(value, EIGHT_BITS, slot)
    if stays:
        return (Saver(own, place, "output", Use.EXACT),), stays
    pin, is_centered = slot.needs.pin, slot.needs.is_centered
    return tuple(Saver(name, place, name.rpartition(":")[2], Use.VALUE, pin, is_centered) for name in slot.names or (own,)), ""


def _without_small(made: dict[fx.Node, Slot]) -> dict[fx.Node, Slot]:
    """Return the saved tensors `made`, the smallest marked as unmodified, since sessions on a GPU do not pack them."""
    sizes = {node: slot.nbytes for node, slot in made.items() if slot.parts and slot.parts[0].use is Use.VALUE}
    largest = max_left_bytes(list(sizes.values()))
    small = {node for node, nbytes in sizes.items() if nbytes <= largest}
    return {
        node: replace(slot, stays=SMALL, parts=(), recomputation=None) if node in small else slot for node, slot in made.items()
    }


def _is_gradient(node: fx.Node) -> bool:
    """Return whether `node`, which forward saves, is a gradient that a loss in chunks computes in forward."""
    return bool(node.all_input_nodes) and aten_name(node.all_input_nodes[0]) == LOSS_OPERATOR


def _place(node: fx.Node) -> str:
    """Return the slot name "module:node" for a saved tensor that no operation names."""
    return f"{module_path(node.meta.get('nn_module_stack'))[0]}:{node.name}"


def _is_written(placeholder: fx.Node | None) -> bool:
    """Return whether a decoded tensor is written to memory, since an operation that Inductor cannot fuse reads it."""
    if placeholder is None or is_boolean(placeholder):
        return False
    stack, seen = list(placeholder.users), set[fx.Node]()
    while stack:
        user = stack.pop()
        if user.op != "call_function" or user in seen:
            continue
        seen.add(user)
        kind = kind_of(user)
        if kind == "extern":
            return True
        stack += list(user.users) if kind == "view" else []
    return False


def _comparisons(backward: fx.GraphModule | None, packed: set[str]) -> Iterator[tuple[fx.Node, set[str]]]:
    """Yield (node, names of tensors) for each boolean tensor that backward computes only from the tensors `packed`."""
    of: dict[fx.Node, set[str]] = {}
    of_tangents: set[fx.Node] = set()
    for node in backward.graph.nodes if backward is not None else ():
        if node.op == "placeholder":
            of[node] = {node.name} & packed
            if node.name.startswith("tangents"):
                of_tangents.add(node)
        elif any(i in of_tangents for i in node.all_input_nodes):
            of_tangents.add(node)
        else:
            of[node] = set[str]().union(*(of.get(i, ()) for i in node.all_input_nodes))
            if of[node] and is_boolean(node):
                yield node, of[node]
                of[node] = set()


def with_unique_names(slots: list[Slot]) -> list[Slot]:
    """Return the slots, some renamed so that no two operations that saved tensors share a name."""
    counts = Counter(saver.name for slot in slots for saver in slot.savers)
    taken: Counter[str] = Counter()
    named: list[Slot] = []
    for slot in slots:
        if slot.role is not Role.ACTIVATION:
            taken[slot.name] += 1
            named.append(replace(slot, name=f"{slot.name}~{taken[slot.name]}") if taken[slot.name] > 1 else slot)
            continue
        savers = [saver for saver in slot.savers if counts[saver.name] == 1 or saver.use in MASK_USES]
        values = [saver for saver in slot.savers if saver.use not in MASK_USES]
        if not any(saver in values for saver in savers) and values:
            free = next((saver for saver in values if not taken[saver.name]), None)
            savers = [free or replace(values[0], name=f"{values[0].name}~{taken[values[0].name] + 1}"), *savers]
        taken.update(saver.name for saver in savers)
        recomputation = slot.recomputation if counts[savers[0].name] == 1 else None  # a plan could not name this slot alone
        named.append(replace(slot, name=savers[0].name, savers=tuple(savers), recomputation=recomputation))
    return named


# --- other memory -----------------------------------------------------------------------------------------------------


def _recomputed(backward: GraphMemory) -> set[fx.Node]:
    """Return the nodes that backward recomputes from saved tensors; it reads comparisons of their values as bits that forward saves."""
    graph = next(iter(backward.order)).graph
    return set(graph.nodes) - of_tangents(graph)


def _temporaries(memory: GraphMemory, begin: int, phase: str, compared: Collection[fx.Node] = ()) -> Iterator[Output]:
    """Yield an allocation for each buffer that lives only within one call of a graph; it begins at the time `begin`.

    Comparisons of the nodes `compared` do not read their buffers.
    """
    for buffer in memory.buffers:
        if buffer.is_output or buffer.birth < 0:
            continue
        node = buffer.node
        value = node.meta.get("val")
        shape = tuple(hint(size) for size in value.shape) if isinstance(value, Tensor) else (buffer.nbytes,)
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "uint8"
        module = module_path(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))[0]
        last = min(buffer.death, max([buffer.birth, *memory.value_reads(node)])) if node in compared else buffer.death
        yield Output(aten_name(node), module, phase, shape, dtype, buffer.nbytes, begin + buffer.birth, begin + last)


def _returned(times: GraphTimes, saved: set[Buffer], end: int) -> Iterator[Output]:
    """Yield an allocation for each buffer that a graph both returns and saves, except those in `saved`."""
    for buffer, allocation in times.returned().items():
        if buffer not in saved:
            death = end if allocation.death is None else allocation.death
            origin = (allocation.op, allocation.module, allocation.phase, allocation.shape, allocation.dtype, allocation.nbytes)
            yield Output(*origin, allocation.birth, max(death, allocation.birth))


# --- the trace --------------------------------------------------------------------------------------------------------


def compiled_trace(base: Trace, capture: GraphCapture, decoded: Collection[str] = ()) -> Trace:
    """Return the trace of a compiled step, from the recorded graphs and `base`, the trace of all operations outside.

    `decoded` names the packed frozen weights that graphs decode.
    """
    outside = tuple(
        replace(slot, stays=slot.stays or OUTSIDE_OF_GRAPHS) if slot.role is Role.ACTIVATION else slot
        for slot in _frozen_weights(base, decoded)
    )
    base = replace(base, slots=tuple(_numbered(outside)), notes=(*base.notes, *_notes(capture)), is_compiled=True)

    def trace(partition_of: Callable[[CapturedGraph], Partition], *, is_packed: bool = True) -> Trace:
        step = StepSlots(capture.calls, base.length, partition_of, on_cuda=base.device == "cuda", is_packed=is_packed)
        return replace(base, slots=(*base.slots, *step.slots), outputs=(*base.outputs, *step.outputs))

    has_chains = any(call.graph.in_4_bits is not call.graph.packed for call in capture.calls)
    in_4_bits = trace(lambda graph: graph.in_4_bits) if has_chains else None
    plain = trace(lambda graph: graph.plain, is_packed=False)
    return replace(trace(lambda graph: graph.packed), without_packing=plain, in_4_bits=in_4_bits)


def _frozen_weights(base: Trace, decoded: Collection[str]) -> Iterator[Slot]:
    """Yield the tensors (slots) of `base`, with frozen weights as compiled graphs store them.

    Those in `decoded` may be packed. The largest has a decoded copy during the whole step, an upper bound: graphs decode one at a time.
    """
    largest = max((slot for slot in base.slots if slot.name in decoded), key=lambda slot: slot.nbytes, default=None)
    for slot in base.slots:
        if slot.role is not Role.WEIGHT or not slot.is_frozen:
            yield slot
        elif slot.name not in decoded:
            yield replace(slot, stays=slot.stays or COMPILED)
        else:
            yield replace(slot, parts=(), running=((0, base.length),) if slot is largest else ())


def _numbered(slots: tuple[Slot, ...]) -> Iterator[Slot]:
    """Yield the slots of tensors outside of graphs, with storage numbers that no slot inside of graphs has."""
    for slot in slots:
        yield replace(slot, storage=-1000 - slot.storage) if slot.role is Role.ACTIVATION and slot.storage >= 0 else slot


def _notes(capture: GraphCapture) -> Iterator[str]:
    num = len({id(call.graph) for call in capture.calls})
    if num != 1:
        yield f"the step has {num} compiled graphs; operations between graphs in forward are not counted"
