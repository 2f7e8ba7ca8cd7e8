"""`GraphMemory(graph)` predicts which tensors of a graph Inductor writes to memory, and when.

Inductor makes kernels of many operations, and values inside of a kernel take no memory. The rules here are those of its lowering and
scheduling, in short:

    views           share the memory of the tensor that they view
    externs         matrix products, convolutions, attention: their inputs and outputs are buffers (memory of their own)
    reductions      their outputs are buffers
    other           pointwise: a value is inlined into its readers, and read again from its own inputs in each, unless it is an output, an
                    extern reads it, or it has several readers and more than MAX_READS inputs or MAX_OPERATIONS operations

Operations that share memory are joined in one kernel, those that share most bytes first, if they go over the same number of
elements, reduce over the same dimensions if both reduce, and no cycle results. A kernel runs right after those that it reads from. A
buffer whose readers are all in the kernel that makes it is not allocated.

Times are places in the order of kernels. A kernel may write its output over a buffer of the same size that it is the last to read.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from paredown.autograd.operation_kinds import kind_of, name_of, readers_of
from paredown.loss.chunked_cross_entropy import CHUNK_BYTES, KERNEL_DEVICES
from paredown.loss.loss_operator import SCRATCH, OperatorSettings
from paredown.predict.fake.device_ops import CUDA_WORKSPACES, FLASH_COLUMNS, FLASH_ROWS, is_channels_last, round_up
from paredown.predict.fake.fake_tensors import DeviceForms, FakeTensors
from paredown.predict.timeline import Timeline
from paredown.session.compiled.graph_slots import hint
from paredown.session.compiled.kernel_order import sorted_by_last
from paredown.session.compiled.memory_orders import CONVOLUTIONS, keeps_layout

FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
MAX_READS = 4  # Inductor's realize_reads_threshold
MAX_ACCUMULATED_READS = 8  # its realize_acc_reads_threshold
MAX_OPERATIONS = 30  # its realize_opcount_threshold
MAX_FUSED = 64  # its max_fusion_size
MAX_DISTANCE = 64  # kernels farther apart are not joined, unless one reads what the other writes


OPERATIONS = {"decode": 14, "unpack_bits": 4}  # operations in the kernel of one node; other nodes have 1


@dataclass(eq=False)
class Buffer:
    """Memory that one kernel of a graph writes and others read, as Inductor would allocate it.

    `birth` is the time of writing and `reads` are those of reading: positions in the order of kernels. Inputs of the graph have birth -1.
    """

    node: fx.Node
    nbytes: int
    birth: int
    kind: str
    domain: int = 0  # how many elements its kernel loops over
    axis: str = ""  # for a reduction: "rows" if it is over the last dimensions, else "columns"
    reads: list[int] = field(default_factory=list)
    sources: list[Buffer] = field(default_factory=list)
    readers: list[Buffer] = field(default_factory=list)
    is_output: bool = False
    is_workspace: bool = False  # copies that a convolution makes of its operands
    is_removed: bool = False
    is_reused: bool = False  # the kernel that reads it last writes its own output over it

    @property
    def death(self) -> int:
        """Return the last time at which the buffer has memory of its own, before another output may take it over."""
        return max([self.birth, *self.reads]) - self.is_reused


@dataclass(eq=False)
class GraphValue:
    """What a node of a graph computes: it is stored in `buffer`, or if that is None, each reader computes it again."""

    node: fx.Node
    buffer: Buffer | None = None
    sources: tuple[Buffer, ...] = ()
    operations: int = 0

    def read(self) -> tuple[Buffer, ...]:
        """Return the buffers that a kernel must read to compute this value."""
        return (self.buffer,) if self.buffer is not None else self.sources


class GraphMemory:
    """The buffers that Inductor would allocate for a graph, with the times at which kernels write and read them.

    `by_last`: kernels are in the order of their last operations, as in backward graphs of sessions (kernel_order.py).
    """

    def __init__(self, graph: fx.Graph, *, on_cuda: bool = False, by_last: bool = False) -> None:
        self._by_last, self._on_cuda, self._keeps_layout = by_last, on_cuda, keeps_layout(graph)
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.buffers: list[Buffer] = []
        self._inputs_of_graph: list[Buffer] = []
        self._values: dict[fx.Node, Any] = {}
        self._kinds = {node: kind_of(node) for node in graph.nodes if node.op == "call_function"}
        for node in graph.nodes:
            self._lower(node)
        self._schedule()
        self._reuse()

    def of(self, node: fx.Node) -> Buffer | None:
        """Return the buffer that stores a node's values; None if each kernel that needs them computes them itself."""
        value = self._values.get(node)
        return value.buffer if isinstance(value, GraphValue) else None

    def reads(self, node: fx.Node) -> list[int]:
        """Return the times at which kernels read a node's buffer, or if it has none, compute its values anew."""
        buffer = self.of(node)
        if buffer is not None:
            return buffer.reads
        return self._reads_behind(node, skips_booleans=False)

    def value_reads(self, node: fx.Node) -> list[int]:
        """Return the times of the kernels that need the values of a node, not only a comparison of them."""
        return self._reads_behind(node, skips_booleans=True)

    def _reads_behind(self, node: fx.Node, *, skips_booleans: bool) -> list[int]:
        found, stack, seen = set[int](), list(node.users), set[fx.Node]()
        while stack:
            user = stack.pop()
            result = user.meta.get("val")
            if user in seen or (skips_booleans and isinstance(result, Tensor) and result.dtype == torch.bool):
                continue
            seen.add(user)
            value = self._values.get(user)
            first = value[0] if isinstance(value, tuple) and value else value
            if isinstance(first, GraphValue) and first.buffer is not None and self._kinds.get(user) != "view":
                found.add(first.buffer.birth)
            else:
                stack += list(user.users)
        return sorted(found)

    def workspaces(self) -> set[int]:
        """Return the times of convolutions with a workspace."""
        return {buffer.birth for buffer in self.buffers if buffer.is_workspace}

    # --- lowering ---

    def _lower(self, node: fx.Node) -> None:
        at = self.order[node]
        if node.op in ("placeholder", "get_attr"):
            buffer = Buffer(node, _nbytes(node.meta.get("val")), -1, "input")
            self._inputs_of_graph.append(buffer)
            self._values[node] = GraphValue(node, buffer)
        elif node.op == "output":
            for value in self._inputs(node):
                buffer = value.buffer or self._realize(value, at)
                buffer.is_output = True
        elif self._kinds[node] == "view":
            self._values[node] = self._view(node, at)
        else:
            self._values[node] = self._compute(node, at)

    def _view(self, node: fx.Node, at: int) -> Any:
        source = self._values[node.all_input_nodes[0]]
        if node.target is operator.getitem and isinstance(source, tuple):
            return source[node.args[1]]  # type: ignore[index]
        if isinstance(source, GraphValue) and source.buffer is None and self._is_stored(source, node):
            self._realize(source, at)
        return source

    def _compute(self, node: fx.Node, at: int) -> Any:
        kind, inputs = self._kinds[node], self._inputs(node)
        if kind == "extern":
            for value in inputs:
                self._realize(value, at)
        sources = tuple(dict.fromkeys(buffer for value in inputs for buffer in value.read()))
        result = node.meta.get("val")
        if node.target is FLASH_BACKWARD:
            self.buffers.append(Buffer(node, _flash_workspace(node.args[1]), at, kind))
        if name_of(node) in SCRATCH:
            self.buffers.append(Buffer(node, _loss_scratch(node), at, kind))
        if (
            self._on_cuda
            and name_of(node) in CONVOLUTIONS
            and (self._keeps_layout or node.all_input_nodes[0].meta["val"].dim() != 4)
        ):
            self.buffers.append(Buffer(node, _transposed_bytes(node), at, kind, is_workspace=True))
        if isinstance(result, tuple | list):
            return tuple(self._buffered(node, part, kind, sources, at) for part in result)
        if kind != "pointwise":
            return self._buffered(node, result, kind, sources, at)
        value = GraphValue(
            node, None, sources, OPERATIONS.get(name_of(node), 1) + sum(v.operations for v in inputs if v.buffer is None)
        )
        if self._is_stored(value, node):
            self._realize(value, at)
        return value

    def _is_stored(self, value: GraphValue, node: fx.Node) -> bool:
        """Return whether Inductor writes the value of this pointwise operation to memory, for its readers."""
        users, num_reads = list(readers_of(node)), len(value.sources)
        if num_reads > MAX_ACCUMULATED_READS or any(user.op == "output" for user in users):
            return True
        if len(node.users) < 2:
            return False
        is_needed = any(self._kinds.get(user) == "extern" for user in users)
        return is_needed or num_reads > MAX_READS or value.operations > MAX_OPERATIONS

    def _realize(self, value: GraphValue, at: int) -> Buffer:
        """Return the buffer of a value that is read at the time `at`; make one if the value has none."""
        if value.buffer is None:
            made = self._buffered(value.node, value.node.meta.get("val"), "pointwise", value.sources, at)
            value.buffer = made.buffer
        assert value.buffer is not None
        if at > value.buffer.birth:
            value.buffer.reads.append(at)
        return value.buffer

    def _buffered(self, node: fx.Node, result: Any, kind: str, sources: tuple[Buffer, ...], at: int) -> GraphValue:
        axis = "" if kind != "reduction" else "rows" if _is_over_last_dimensions(node) else "columns"
        buffer = Buffer(node, _nbytes(result), at, kind, _domain(node, result, kind), axis, sources=list(sources))
        for source in sources:
            source.reads.append(at)
            source.readers.append(buffer)
        self.buffers.append(buffer)
        return GraphValue(node, buffer)

    def _inputs(self, node: fx.Node) -> list[GraphValue]:
        found: list[GraphValue] = []
        for i in node.all_input_nodes:
            value = self._values.get(i)
            found += [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, GraphValue)]
        return found

    # --- kernels ---

    def _schedule(self) -> None:
        """Set the times at which buffers are written and read, by the predicted order of kernels."""
        order = kernel_order(self.buffers, by_last=self._by_last)
        self.num_kernels = len(set(order.values()))
        for buffer in self.buffers:
            readers = {order[reader] for reader in buffer.readers}
            buffer.birth, buffer.reads = order[buffer], sorted(readers)
            buffer.is_removed = bool(readers) and readers == {buffer.birth} and not buffer.is_output
        for value in self._inputs_of_graph:
            value.reads = sorted({order[reader] for reader in value.readers})
        self.buffers = [buffer for buffer in self.buffers if not buffer.is_removed and buffer.nbytes]

    def _reuse(self) -> None:
        """Mark each buffer over which the last kernel that reads it writes an output of the same size."""
        by_birth: dict[int, list[Buffer]] = {}
        for buffer in self.buffers:
            by_birth.setdefault(buffer.birth, []).append(buffer)
        for buffer in self.buffers:
            if buffer.is_output or buffer.birth < 0:
                continue
            at = buffer.death
            for output in by_birth.get(at, ()):
                if output.kind == "pointwise" and output.nbytes == buffer.nbytes and buffer in output.sources and at > buffer.birth:
                    buffer.is_reused = True
                    by_birth[at] = [other for other in by_birth[at] if other is not output]
                    break


def _is_over_last_dimensions(node: fx.Node) -> bool:
    """Return whether a reduction is over the last dimensions of its input, whose values are adjacent in memory."""
    source = node.all_input_nodes[0].meta.get("val")
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(source, Tensor) or not isinstance(dims, list | tuple | int):
        return False
    rank = source.dim()
    reduced = sorted(d % rank for d in (dims if isinstance(dims, list | tuple) else (dims,)))
    return reduced == list(range(rank - len(reduced), rank)) and source.is_contiguous()


def _domain(node: fx.Node, result: Any, kind: str) -> int:
    """Return the number of elements that the kernel of a node loops over; only kernels of the same number are fused."""
    value = node.all_input_nodes[0].meta.get("val") if kind == "reduction" and node.all_input_nodes else result
    return prod(hint(size) for size in value.shape) if isinstance(value, Tensor) else 0


def _flash_workspace(query: Any) -> int:
    """Return the workspace in bytes of flash attention's backward; `query` is the graph's node of the queries."""
    num, heads, length, width = (hint(size) for size in query.meta["val"].shape)
    return 4 * num * heads * round_up(length, FLASH_ROWS) * (1 + round_up(width, FLASH_COLUMNS))


def _loss_scratch(node: fx.Node) -> int:
    """Return the bytes that the operator `node`, a loss in chunks, allocates beside its inputs and results."""
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in node.args[:-1]]
    tensors = tuple((tuple(hint(size) for size in v.shape), v.dtype) if v is not None else None for v in values)
    return scratch_bytes(name_of(node), tensors, str(node.args[-1]))


def _transposed_bytes(node: fx.Node) -> int:
    """Return the bytes of the channels_last copies that cuDNN makes of the operands of `node`, a 16-bit convolution.

    In forward it copies the input and the output; in backward the output's gradient and the input, and then the output's gradient and the
    input's gradient. Measured for the U-Net of bench_compile.py on one H200: 0.086 GiB where this function returns 0.078. Measured peaks of
    the 3-D U-Net of bench_zoo.py are 0.29 GiB (plain) and 0.70 (8 bits) above the buffers of Inductor's code; this function returns 0.31
    and 0.72.
    """
    arguments: Any = fx.map_arg(node.args, lambda i: i.meta["val"])
    result: Any = node.meta.get("val")
    tensors: list[Tensor] = [arguments[0], arguments[1] if name_of(node) == "convolution_backward" else result]
    is_transposed = all(t.element_size() == 2 and not is_channels_last(t) for t in tensors)
    return CUDA_WORKSPACES[node.target](arguments, result) if is_transposed else 0


def _nbytes(value: Any) -> int:
    """Return the bytes of a tensor's memory, with the gaps that its strides leave; 0 for other values."""
    if not isinstance(value, Tensor):
        return 0
    sizes = [(hint(size), hint(stride)) for size, stride in zip(value.shape, value.stride(), strict=True)]
    if any(size == 0 for size, _ in sizes):
        return 0
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * value.element_size()


# --- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Kernel:
    """One kernel of a graph, which writes `buffers`, while it is decided which kernels Inductor would fuse.

    `first` and `last` are the indices of its first and last buffer in the graph. `domain` is the number of elements that it loops over, 0
    if it cannot be fused.
    """

    buffers: list[Buffer]
    first: int
    last: int
    domain: int
    axis: str

    def can_join(self, other: Kernel) -> bool:
        """Return whether Inductor could fuse this kernel with `other`, if no cycle of dependencies results."""
        if not self.domain or self.domain != other.domain or (self.axis and other.axis and self.axis != other.axis):
            return False
        if len(self.buffers) + len(other.buffers) > MAX_FUSED:
            return False
        if max(self.last - other.first, other.last - self.first) > MAX_DISTANCE and not (self.reads(other) or other.reads(self)):
            return False
        columns = {b for kernel in (self, other) for b in kernel.buffers if b.axis == "columns"}
        return not any(source in columns for kernel in (self, other) for b in kernel.buffers for source in b.sources)

    def reads(self, other: Kernel) -> bool:
        """Return whether this kernel reads a buffer that the other one writes."""
        return any(source in other.buffers for buffer in self.buffers for source in buffer.sources)


class Kernels:
    """The kernels of a graph; `join_all` fuses them as Inductor would, from which their order follows."""

    def __init__(self, buffers: list[Buffer]) -> None:
        is_alone = [buffer.kind in ("extern", "scatter") for buffer in buffers]
        together: dict[Any, Kernel] = {}  # outputs of one extern are made by one call
        self.of: dict[Buffer, Kernel] = {}
        for i, (buffer, alone) in enumerate(zip(buffers, is_alone, strict=True)):
            key = buffer.node if alone else buffer
            kernel = together.setdefault(key, Kernel([], i, i, 0 if alone else buffer.domain, buffer.axis))
            kernel.buffers.append(buffer)
            kernel.last = i
            self.of[buffer] = kernel

    def join_all(self, buffers: list[Buffer]) -> None:
        """Fuse kernels that share memory, the pairs that share most bytes first, if no cycle results."""
        for _, one, two in sorted(_pairs(buffers), key=lambda pair: -pair[0]):
            a, b = self.of[one], self.of[two]
            if a is not b and a.can_join(b) and not (self._reaches(a, b) or self._reaches(b, a)):
                a.buffers, a.axis = [*a.buffers, *b.buffers], a.axis or b.axis
                a.first, a.last = min(a.first, b.first), max(a.last, b.last)
                self.of.update(dict.fromkeys(b.buffers, a))

    def sources(self, kernel: Kernel) -> list[Kernel]:
        """Return the other kernels whose results `kernel` reads."""
        found = dict.fromkeys(self.of[s] for b in kernel.buffers for s in b.sources if s in self.of)
        return [other for other in found if other is not kernel]

    def _reaches(self, start: Kernel, end: Kernel) -> bool:
        """Return whether kernel `end` depends on results of kernel `start`, directly or through other kernels."""
        stack, seen = [k for k in self.sources(end) if k is not start], set[Kernel]()
        while stack:
            kernel = stack.pop()
            if kernel is start:
                return True
            if kernel not in seen:
                seen.add(kernel)
                stack += self.sources(kernel)
        return False


def _pairs(buffers: list[Buffer]) -> Iterator[tuple[int, Buffer, Buffer]]:
    """Yield (shared bytes, buffer, buffer) for each pair of buffers that a fused kernel could write together."""
    sources = dict.fromkeys(source for buffer in buffers for source in buffer.sources)
    for shared in sources:
        users = [b for b in (shared, *shared.readers) if b.kind in ("pointwise", "reduction")]
        for i, one in enumerate(users):
            yield from ((shared.nbytes, one, two) for two in users[i + 1 :] if one.domain == two.domain and one is not two)


def kernel_order(buffers: list[Buffer], *, by_last: bool = False) -> dict[Buffer, int]:
    """Return the position of each buffer's kernel among the fused kernels, in the order of their first or last operations."""
    kernels = Kernels(buffers)
    kernels.join_all(buffers)
    found = sorted(dict.fromkeys(kernels.of.values()), key=lambda kernel: kernel.first)
    if by_last:
        found = sorted_by_last({kernel: kernels.sources(kernel) for kernel in found}, {kernel: kernel.last for kernel in found})
    placed: dict[Kernel, int] = {}
    for kernel in found:
        stack = [kernel]
        while stack:
            missing = [source for source in kernels.sources(stack[-1]) if source not in placed]
            if missing and stack[-1] not in placed:
                stack += sorted(missing, key=lambda source: -source.first)
            else:
                placed.setdefault(stack.pop(), len(placed))
    return {buffer: placed[kernel] for buffer, kernel in kernels.of.items()}


def scratch_bytes(name: str, tensors: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...], settings: str) -> int:
    """Return the most bytes that the operator `name` of a loss in chunks allocates beside its results.

    They are measured by a run on fake tensors of the shapes and dtypes `tensors`. `settings` is the text of its `OperatorSettings`.
    """
    device = OperatorSettings.parse(settings).device
    return _scratch_bytes(name, tensors, settings, (CHUNK_BYTES.get(device), KERNEL_DEVICES.get(device)))


@lru_cache(maxsize=64)
def _scratch_bytes(name: str, tensors: tuple[Any, ...], settings: str, constants: tuple[Any, ...]) -> int:
    device, fakes = OperatorSettings.parse(settings).device, FakeTensors()
    timeline = Timeline(lambda: "", device=device)
    with fakes.mode, torch.no_grad():
        inputs = [
            torch.empty(shape, dtype=dtype) if shape is not None else None for shape, dtype in (t or (None, None) for t in tensors)
        ]
        with DeviceForms(device, fakes), timeline:
            results = SCRATCH[name](*inputs, settings)
        num_results = sum(allocation.nbytes for t in results if (allocation := timeline.find(t)) is not None)
        given = [allocation for t in inputs if t is not None and (allocation := timeline.find(t)) is not None]
    changes: Counter[int] = Counter()
    for allocation in (allocation for allocation in timeline.allocations if allocation not in given):
        changes[allocation.birth] += allocation.nbytes
        if allocation.death is not None:
            changes[allocation.death + 1] -= allocation.nbytes
    return max(accumulate(changes[tick] for tick in sorted(changes)), default=0) - num_results
