"""Which tensors of a graph Inductor writes to memory, and when: `GraphMemory(graph)`.

Inductor makes kernels of many operations, and values inside of a kernel take no memory. The rules here are those of its lowering and
scheduling, in short:

    views           alias what they view
    externs         matrix products, convolutions, attention: their inputs and outputs are buffers
    reductions      their outputs are buffers
    other           pointwise: a value is inlined into its readers, and read again from its own inputs in each, unless it is an output, an
                    extern reads it, or it has several readers and more than MAX_READS inputs or MAX_OPERATIONS operations

A buffer whose readers are all in the kernel that makes it is not allocated. Two operations are in one kernel if they go over the same number
of elements and no barrier lies between them: an extern, a scatter, or a reduction over other dimensions than the last ones.

Times are places in the order of the graph's nodes. A buffer that a kernel reads last may become the kernel's output of the same size.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from paredown.session.compiled.graph_decisions import hint

MAX_READS = 4  # Inductor's realize_reads_threshold
MAX_ACCUMULATED_READS = 8  # its realize_acc_reads_threshold
MAX_OPERATIONS = 30  # its realize_opcount_threshold


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names("""
    view _unsafe_view permute transpose t slice select expand unsqueeze squeeze alias detach as_strided split split_with_sizes unbind
    diagonal reshape view_as_real view_as_complex getitem
""")
REDUCTIONS = _names("""
    sum mean amax amin var_mean var prod any all argmax argmin logsumexp max min prepare_softmax_online xor_sum std linalg_vector_norm
    norm count_nonzero
""")
SCATTERS = _names("""
    index_put _unsafe_index_put _unsafe_masked_index_put_accumulate scatter scatter_add scatter_reduce embedding_dense_backward
    index_add cumsum cumprod
""")
POINTWISE = _names("""
    convert_element_type full iota where clone index _unsafe_index gather embedding cat constant_pad_nd copy empty empty_strided
    scalar_tensor arange fill rev inductor_seeds inductor_seed inductor_lookup_seed inductor_random inductor_randint full_like
    zeros_like ones_like empty_like broadcast_in_dim slice_scatter select_scatter as_strided_scatter avg_pool2d avg_pool2d_backward
    _low_memory_max_pool_offsets_to_indices max_pool2d_with_indices_backward _unsafe_masked_index repeat flip roll _to_copy copy_
    bernoulli masked_fill device_put
""")


def kind_of(node: fx.Node) -> str:
    """view, extern, reduction, scatter or pointwise."""
    name = _name(node)
    if name in VIEWS:
        return "view"
    if name in REDUCTIONS:
        return "reduction"
    if name in SCATTERS:
        return "scatter"
    tags = getattr(node.target, "tags", ())
    return "pointwise" if name in POINTWISE or torch.Tag.pointwise in tags else "extern"


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else str(node.target)


@dataclass(eq=False)
class Buffer:
    """Memory of one value: made at `birth`, read last at `death`; `reads`: the times of its reads. Inputs of the graph have birth -1."""

    node: fx.Node
    nbytes: int
    birth: int
    kind: str
    domain: int = 0  # elements that its kernel goes over
    reads: list[int] = field(default_factory=list)
    sources: list[Buffer] = field(default_factory=list)
    readers: list[Buffer] = field(default_factory=list)
    is_output: bool = False
    is_removed: bool = False

    @property
    def death(self) -> int:
        """The time of the last read."""
        return max([self.birth, *self.reads])


@dataclass(eq=False)
class Value:
    """What a node is: a buffer, or operations on buffers that its readers repeat."""

    node: fx.Node
    buffer: Buffer | None = None
    sources: tuple[Buffer, ...] = ()
    operations: int = 0

    def read(self) -> tuple[Buffer, ...]:
        """The buffers that a reader of this value reads."""
        return (self.buffer,) if self.buffer is not None else self.sources


class GraphMemory:
    """The buffers of a graph. `buffers`: those that are allocated; `of`: the buffer of each node that has one, its views included."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.buffers: list[Buffer] = []
        self._values: dict[fx.Node, Any] = {}
        self._kinds = {node: kind_of(node) for node in graph.nodes if node.op == "call_function"}
        for node in graph.nodes:
            self._lower(node)
        self._behind = _behind_barriers(graph, self._kinds)
        self._fuse()
        self._fuse_copies()
        self._reuse()

    def of(self, node: fx.Node) -> Buffer | None:
        """The buffer of a node or of the tensor that it views; None for a value that is inlined."""
        value = self._values.get(node)
        return value.buffer if isinstance(value, Value) else None

    # --- lowering ---

    def _lower(self, node: fx.Node) -> None:
        at = self.order[node]
        if node.op in ("placeholder", "get_attr"):
            self._values[node] = Value(node, Buffer(node, _nbytes(node.meta.get("val")), -1, "input"))
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
        if isinstance(source, Value) and source.buffer is None and self._is_stored(source, node):
            self._realize(source, at)
        return source

    def _compute(self, node: fx.Node, at: int) -> Any:
        kind, inputs = self._kinds[node], self._inputs(node)
        if kind == "extern":
            for value in inputs:
                self._realize(value, at)
        sources = tuple(dict.fromkeys(buffer for value in inputs for buffer in value.read()))
        result = node.meta.get("val")
        if isinstance(result, tuple | list):
            return tuple(self._buffered(node, part, kind, sources, at) for part in result)
        if kind != "pointwise":
            return self._buffered(node, result, kind, sources, at)
        value = Value(node, None, sources, 1 + sum(v.operations for v in inputs if v.buffer is None))
        if self._is_stored(value, node):
            self._realize(value, at)
        return value

    def _is_stored(self, value: Value, node: fx.Node) -> bool:
        """Whether a pointwise value becomes a buffer at `node`, which makes it or views it."""
        users, num_reads = list(_users(node)), len(value.sources)
        if num_reads > MAX_ACCUMULATED_READS or any(user.op == "output" for user in users):
            return True
        if len(node.users) < 2:
            return False
        is_needed = any(self._kinds.get(user) == "extern" for user in users)
        return is_needed or num_reads > MAX_READS or value.operations > MAX_OPERATIONS

    def _realize(self, value: Value, at: int) -> Buffer:
        """The buffer of a value, made at `at` unless it has one."""
        if value.buffer is None:
            made = self._buffered(value.node, value.node.meta.get("val"), "pointwise", value.sources, at)
            value.buffer = made.buffer
        assert value.buffer is not None
        if at > value.buffer.birth:
            value.buffer.reads.append(at)
        return value.buffer

    def _buffered(self, node: fx.Node, result: Any, kind: str, sources: tuple[Buffer, ...], at: int) -> Value:
        buffer = Buffer(node, _nbytes(result), at, kind, _domain(node, result, kind), sources=list(sources))
        for source in sources:
            source.reads.append(at)
            source.readers.append(buffer)
        self.buffers.append(buffer)
        return Value(node, buffer)

    def _inputs(self, node: fx.Node) -> list[Value]:
        found: list[Value] = []
        for i in node.all_input_nodes:
            value = self._values.get(i)
            found += [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Value)]
        return found

    # --- fusion ---

    def _fuse(self) -> None:
        """Remove buffers that only the kernel that makes them reads."""
        for buffer in reversed(self.buffers):
            if buffer.is_output or buffer.kind in ("extern", "scatter") or not buffer.readers:
                continue
            if all(self._is_one_kernel(buffer, reader) for reader in buffer.readers):
                buffer.is_removed = True
                for source in buffer.sources:
                    source.reads += buffer.reads
                    source.readers += buffer.readers
        self.buffers = [buffer for buffer in self.buffers if not buffer.is_removed and buffer.nbytes]

    def _is_one_kernel(self, buffer: Buffer, reader: Buffer) -> bool:
        if reader.kind in ("extern", "scatter") or buffer.domain != reader.domain:
            return False
        return not self._behind[reader.node] >> self.order[buffer.node] & 1

    def _fuse_copies(self) -> None:
        """Pointwise operations of the same size on the same buffers are one kernel, at the time of the first of them."""
        first: dict[tuple[Any, ...], int] = {}
        for buffer in self.buffers:
            if buffer.kind == "pointwise" and buffer.sources:
                key = (buffer.domain, *sorted(id(source) for source in buffer.sources))
                buffer.birth = first.setdefault(key, buffer.birth)

    def _reuse(self) -> None:
        """Let a kernel write its output over an input of the same size that nothing reads later."""
        by_birth: dict[int, list[Buffer]] = {}
        for buffer in self.buffers:
            by_birth.setdefault(buffer.birth, []).append(buffer)
        for buffer in self.buffers:
            if buffer.is_output or buffer.birth < 0:
                continue
            at = buffer.death
            for output in by_birth.get(at, ()):
                if output.kind == "pointwise" and output.nbytes == buffer.nbytes and buffer in output.sources and at > buffer.birth:
                    buffer.reads = [read for read in buffer.reads if read < at]
                    by_birth[at] = [other for other in by_birth[at] if other is not output]
                    break


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a value, those behind views included."""
    for user in node.users:
        if user.op == "call_function" and kind_of(user) == "view":
            yield from _users(user)
        else:
            yield user


def _behind_barriers(graph: fx.Graph, kinds: dict[fx.Node, str]) -> dict[fx.Node, int]:
    """For each node, as bits, the nodes from which a path leads to it through a barrier."""
    before: dict[fx.Node, int] = {}
    behind: dict[fx.Node, int] = {}
    for i, node in enumerate(graph.nodes):
        before[node], behind[node] = 1 << i, 0
        for source in node.all_input_nodes:
            before[node] |= before[source]
            behind[node] |= behind[source] | (before[source] if _is_barrier(source, kinds.get(source, "input")) else 0)
    return behind


def _is_barrier(node: fx.Node, kind: str) -> bool:
    if kind in ("extern", "scatter"):
        return True
    return kind == "reduction" and not _is_over_last_dimensions(node)


def _is_over_last_dimensions(node: fx.Node) -> bool:
    """Whether a reduction is over the last dimensions of its input, which are adjacent in memory."""
    source = node.all_input_nodes[0].meta.get("val")
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(source, Tensor) or not isinstance(dims, list | tuple | int):
        return False
    rank = source.dim()
    reduced = sorted(d % rank for d in (dims if isinstance(dims, list | tuple) else (dims,)))
    return reduced == list(range(rank - len(reduced), rank)) and source.is_contiguous()


def _domain(node: fx.Node, result: Any, kind: str) -> int:
    """How many elements the kernel of a node goes over."""
    value = node.all_input_nodes[0].meta.get("val") if kind == "reduction" and node.all_input_nodes else result
    return prod(hint(size) for size in value.shape) if isinstance(value, Tensor) else 0


def _nbytes(value: Any) -> int:
    """Bytes of the memory of a tensor, gaps of its strides included."""
    if not isinstance(value, Tensor):
        return 0
    sizes = [(hint(size), hint(stride)) for size, stride in zip(value.shape, value.stride(), strict=True)]
    if any(size == 0 for size, _ in sizes):
        return 0
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * value.element_size()
