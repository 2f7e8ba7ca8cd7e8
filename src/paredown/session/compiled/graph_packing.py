"""Packs the tensors that the graphs of torch.compile save for backward, as a plan requests.

`torch.compile` traces a joint graph of forward and backward, and a partitioner makes two graphs of it; the forward graph returns the saved
tensors behind its own outputs, the backward graph takes them as placeholders, before the tangents. `PlanPartitioner` is such a partitioner
(`torch._inductor.config.custom_partitioner_fn`, torch 2.9 and later): it calls torch's own, then edits the two graphs (graph_editor.py).

    forward   ..., x                      ->   ..., codes, scales, minimums
    backward  x, tangents                 ->   codes, scales, minimums, tangents;  x = decode(codes, scales, minimums)

Comparisons that backward would make with decoded values are made in forward instead, and saved as bits; saved booleans become bits too.
Torch's choice of what to recompute stays, with one change: an operation that Inductor can fuse is also recomputed where backward
materializes its result, since a stored tensor must be decoded anyway.

`PlanBackend` adds two tensors to the inputs of every graph: the step counter of stochastic rounding, and the measured numbers.
"""

# pyright: reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

from paredown.autograd.graph import tensors_in
from paredown.autograd.operations import SMALL, Use, max_left_bytes
from paredown.codec.products import DECOMPOSITIONS
from paredown.errors import ApplyError
from paredown.formats.rounding import Rounding
from paredown.plan.plan import Plan
from paredown.plan.storage import is_same_level, resolve_format
from paredown.roles import Role
from paredown.session.compiled.graph_decisions import (
    HELD,
    INPUT,
    NOT_RECOMPUTABLE,
    OF_RECOMPUTED,
    SHARED,
    SOURCE,
    GraphDecision,
    GraphReport,
    obstacle,
    storage_of,
)
from paredown.session.compiled.graph_editor import GraphCodec, GraphEditor, of_tangents
from paredown.session.compiled.graph_products import finish_products
from paredown.session.compiled.graph_signals import SlotMeasure
from paredown.session.compiled.graph_slots import (
    GraphSlot,
    JointGraph,
    hint,
    num_recomputed_sums,
    read_joint_graph,
    root_and_path,
    slot_of,
)
from paredown.session.compiled.grouped_casts import group_casts
from paredown.session.compiled.kernel_order import ByLastOperation, RowsInRegisters
from paredown.session.compiled.packed_graph import PackedGraph
from paredown.session.compiled.recomputed_chains import RecomputedChains
from paredown.session.compiled.recomputed_tensors import (
    RecomputedTensor,
    recomputable_tensors,
    recompute_saved,
    save_recomputed,
)

if TYPE_CHECKING:
    from paredown.session.compiled.compiled_graphs import CompiledGraphs

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
# Inductor keeps a freed buffer for a later one of its size where its own estimate of the peak allows it; packed ViT-B/16 peaks at 4.26 GiB
# then and at 4.01 GiB without, in the same time: the caching allocator returns such memory as quickly, and to any buffer.
FREES = {"allow_buffer_reuse": False}
# Inductor compares the order of kernels with three others by its own estimate of the peak, which counts values that fused kernels never
# write to memory: with FP8 products it took an order with a peak of 1.71 instead of 1.49 GiB (three layers of a 1B network).
BY_LAST_OPERATION = {"_post_fusion_custom_pass": ByLastOperation(), "reorder_for_peak_memory": False}
# Inductor reorders the loops of transposed writes so that it can fuse them into reductions along rows, where they are not coalesced.
KEEPS_LOOPS = {"loop_ordering_after_fusion": False}


@dataclass(frozen=True, eq=False)
class PlanPartitioner(CustomPartitionerFn):
    """Splits joint graphs of torch.compile into forward and backward, as its own partitioner does, and packs what is saved."""

    plan: Plan
    seed: int
    on_graph: Callable[..., None]
    kept: dict[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])  # names of slots not to pack -> why
    has_guard: bool = False  # the graphs measure packed slots
    roots: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # paths of the modules that are variables of the compiled function

    def uuid(self) -> Any:
        """Return values that identify plan and code in the keys of Inductor's caches."""
        return ("paredown", _source_hash(), self.plan.key, self.seed, sorted(self.kept), self.has_guard)

    def __reduce__(self) -> Any:
        """Return how to pickle the partitioner, by its uuid, since Inductor pickles its settings for cache keys."""
        return repr, (self.uuid(),)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of the joint graph `gm`, with saved tensors packed."""
        if not self.plan.packs_activations:
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
            finish_products(backward)
            return forward, backward
        joint = joint_graph(gm, options, self.roots)
        forward, backward = partition(gm, joint_inputs, options)
        editor = GraphEditor(forward, backward, options["num_fwd_outputs"])
        report = GraphReport([])
        chosen = self._decide(editor, joint, report)
        bits = {node.name: d.format.bits_per_value for node, d in chosen if d.format is not None}
        if saved := chains_to_save(backward.graph, bits):
            save_recomputed(forward, backward, options["num_fwd_outputs"], saved)
            editor, report = GraphEditor(forward, backward, options["num_fwd_outputs"]), GraphReport([])
            chosen = self._decide(editor, joint, report)
        if self.plan.recomputed:
            report = GraphReport([])
            sources = self._recompute(editor, joint, report)
            editor = GraphEditor(forward, backward, options["num_fwd_outputs"])
            chosen = self._decide(editor, joint, report, sources)
        editor.add_checks([(node, d.slot, d.format) for node, d in chosen if d.format is not None], joint, report)
        editor.save_comparisons({node.name for node, _ in chosen}, report)
        for node, decision in chosen:
            stored = editor.pack(node, self._codec(decision))
            report.decisions.append(replace(decision, stored_bytes=stored))
        if self.has_guard:
            editor.add_signals([(node, SlotMeasure.of(d, self.seed)) for node, d in chosen if d.format is not None], report)
        editor.delay_recomputation()
        editor.finish()
        finish_products(backward)
        group_casts(forward, backward)
        self.on_graph(report)
        return forward, backward

    def _recompute(self, editor: GraphEditor, joint: JointGraph, report: GraphReport) -> set[str]:
        """Make backward recompute the saved tensors that the plan names; return the names of tensors that this reads.

        A name in the plan that several saved tensors share selects none of them.
        """
        found, chosen = recomputable_tensors(editor.forward.graph, editor.num_outputs), dict[str, RecomputedTensor]()
        slots = {n: slot_of(editor.placeholders[n.name], joint) for n in editor.saved_floats() if n.name in joint.of_inputs}
        counts = Counter(name for slot in slots.values() for name in slot.names)
        for node in (node for node in editor.forward.graph.nodes if node in slots):
            names = [name for name in slots[node].names if counts[name] == 1]
            if not self.plan.recomputes(names):
                continue
            tensor = found.get(node.name) if slots[node].needs.use is not Use.EXACT else None
            if tensor is None or any(source.name in chosen for source in tensor.sources):
                report.not_recomputed[names[0]] = NOT_RECOMPUTABLE if tensor is None else OF_RECOMPUTED
            else:
                chosen[node.name] = tensor
                report.recomputed |= set(names)
        recompute_saved(editor.forward, editor.backward, editor.num_outputs, chosen.values())
        return {source.name for tensor in chosen.values() for source in tensor.sources}

    def _decide(
        self, editor: GraphEditor, joint: Any, report: GraphReport, sources: Collection[str] = ()
    ) -> list[tuple[fx.Node, GraphDecision]]:
        """Return which saved tensors to pack and how; tensors that stay unmodified are added to the report.

        `sources`: names of saved tensors from which others are recomputed.
        """
        chosen: list[tuple[fx.Node, GraphDecision]] = []
        kept = set[int]()  # storages of tensors that are saved unmodified
        for node in editor.saved_floats():
            if node.name not in joint.of_inputs:
                continue  # parameters, and casts of parameters, are not activations
            held = INPUT if node.op == "placeholder" else HELD if editor.is_output(node) else SOURCE if node.name in sources else ""
            decision = self._decision(node, slot_of(editor.placeholders[node.name], joint), held)
            if decision.format is not None:
                chosen.append((node, decision))
            elif decision.asked is not None:
                report.decisions.append(decision)
                kept.add(storage_of(node))
        small = small_tensors(chosen)
        report.decisions += [replace(decision, format=None, reason=SMALL) for _, decision in small]
        kept |= {storage_of(node) for node, _ in small}
        chosen = [pair for pair in chosen if pair not in small]
        shared = [pair for pair in chosen if storage_of(pair[0]) in kept]
        report.decisions += [replace(decision, format=None, reason=SHARED) for _, decision in shared]
        return [pair for pair in chosen if pair not in shared]

    def _decision(self, node: fx.Node, slot: GraphSlot, held: str) -> GraphDecision:
        """Return how the saved tensor `node` is stored.

        `held`: the reason why its memory stays allocated even if it is packed, or "".
        """
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

    def _codec(self, decision: GraphDecision) -> GraphCodec:
        assert decision.format is not None
        tensor_id = crc32(decision.slot.names[0].encode()) if decision.slot.names else 0
        return GraphCodec(decision.format, decision.rounding, self.seed, tensor_id)


def small_tensors(chosen: Sequence[tuple[fx.Node, GraphDecision]]) -> list[tuple[fx.Node, GraphDecision]]:
    """Return the smallest of the `chosen` tensors on a GPU, which stay unmodified as packing costs a launch each."""
    largest = max_left_bytes([d.unmodified_bytes for _, d in chosen])
    return [(node, d) for node, d in chosen if node.meta["val"].is_cuda and d.unmodified_bytes <= largest]


def joint_graph(gm: fx.GraphModule, options: dict[str, Any], roots: Mapping[str, str] | None = None) -> JointGraph:
    """Return the model's operations in the joint graph `gm`; `options`: keyword arguments of the partitioner.

    `roots`: the paths in the model of modules that are variables of the compiled function, such as {"self": "layers.3"}.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    static: Iterable[int] = options.get("static_lifetime_input_indices") or ()
    unique = {node.name for node in fx_graph_cse(gm.graph).nodes}  # as the partitioner does first
    return read_joint_graph(gm.graph, [placeholders[i] for i in static], unique, roots)


def partition(gm: fx.GraphModule, joint_inputs: Sequence[object], options: dict[str, Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a joint graph, before activations are packed."""
    with functorch_config.patch(RECOMPUTES):
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
    if num_recomputed_sums(backward.graph) > MAX_RECOMPUTED_SUMS:
        with functorch_config.patch({**RECOMPUTES, **BREAKS_CHAINS}):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
    return forward, backward


def chains_to_save(backward: fx.Graph, bits: Mapping[str, float]) -> set[str]:
    """Return the names of recomputed tensors that should be saved instead, to lower the peak in backward.

    `bits`: the bits per value of each packed tensor, by name.
    """
    return RecomputedChains(backward, of_tangents(backward)).to_save(bits)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlanBackend:
    """Compiles graphs by Inductor, as a backend of torch.compile, so that they pack the tensors which they save.

    Each graph gets two more inputs: the step counter, and a tensor for the numbers that the graph measures.
    """

    graphs: CompiledGraphs  # the current plan, seed and step counters
    partitioner: PlanPartitioner
    names: Callable[[], dict[int, str]]  # of parameters, by their id
    inductor: Any  # torch's own backend, which resolved mode and options

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile a Dynamo graph by Inductor, with packing of saved tensors; return the function that runs it."""
        return PackedGraph(self, gm, example_inputs)

    def roots(self, gm: fx.GraphModule, example_inputs: list[Any]) -> dict[str, str]:
        """Return, for each variable through which a compiled function reaches modules, the path of its module in the model."""
        names, found = self.names(), dict[str, str]()
        for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
            name, source = names.get(id(example), ""), getattr(node, "_dynamo_source", None)
            text = getattr(source, "name", "")  # a method in earlier versions of torch
            root, inside = root_and_path(str(text() if callable(text) else text))
            if inside and f".{name}".endswith(f".{inside}"):
                found.setdefault(root, name[: -len(inside)].rstrip("."))
        return found

    def __deepcopy__(self, memo: Any) -> PlanBackend:
        """Return the backend itself: a copy of a compiled model packs in the same session."""
        return self

    def compile(self, gm: fx.GraphModule, inputs: list[Any], partitioner: PlanPartitioner) -> Callable[..., Any]:
        """Return `gm` compiled by Inductor; `inputs` end with the step counter and the tensor for measured numbers."""
        patches = {**self._patches(inputs[-1].device.type), **self.inductor.config, "custom_partitioner_fn": partitioner}
        # a hit in the cache of AOTAutograd would skip the partitioner, whose report the session needs; Inductor's own cache stays
        with functorch_config.patch(enable_autograd_cache=False), _more_inputs(gm.graph, inputs[-2:]), collection_paused():
            operations = {**select_decomp_table(), **DECOMPOSITIONS} if self.graphs.products is not None else None
            return compile_fx(gm, inputs, compile_kernels, patches, operations)  # type: ignore[return-value]

    def _patches(self, device: str) -> dict[str, Any]:
        """Return the settings of Inductor for this plan; settings of the user take precedence."""
        plan = self.partitioner.plan
        formats = [format for format in plan.activation_formats if format is not None]
        has_few_bits = any(format.element.width < 8 for format in formats)
        loops = KEEPS_LOOPS if plan.multiplies else {}
        order = BY_LAST_OPERATION if plan.packs_activations else {}
        return {
            **loops,
            **order,
            **(INLINES if has_few_bits else {}),
            **(FREES if device == "cuda" and plan.packs_activations else {}),
        }


def inductor_of(options: dict[str, Any]) -> Any:
    """Return Inductor as a backend of torch.compile, set by those of the `options` that it takes, which are removed."""
    backend = options.pop("backend", "inductor")
    if backend != "inductor":
        raise ApplyError(
            f"session.compile packs tensors in the graphs of Inductor, and backend={backend!r} was requested: leave backend out, or call "
            "torch.compile(model, backend=...), which packs nothing."
        )
    return torch._TorchCompileInductorWrapper(options.pop("mode", None), options.pop("options", None), options.get("dynamic"))


@contextmanager
def collection_paused() -> Generator[None]:
    """Return a context without garbage collection, which takes 8 % of the time of compiling a ResNet-50."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compile_kernels(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Return a forward or backward graph compiled by Inductor; AOTAutograd calls it for backward when backward first runs."""
    with collection_paused(), _row_choices():
        return compile_fx_inner(gm, inputs, **options)


def _row_choices() -> AbstractContextManager[Any]:
    """Return a context in which Inductor's kernels hold longer rows in registers, unless the user chose otherwise."""
    return nullcontext() if inductor_config.inductor_choices_class is not None else V.set_choices_handler(RowsInRegisters())


@contextmanager
def _more_inputs(graph: fx.Graph, examples: Sequence[Tensor]) -> Generator[None]:
    """Return a context in which a Dynamo graph has additional inputs at its end, one for each of `examples`."""
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
    """Return the autograd node of the compiled call that returned `outputs`; None without gradients.

    If an output is a view, the node is a few nodes behind it.
    """
    nodes = [t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None]
    for _ in range(3):
        found = next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)
        if found is not None:
            return found
        nodes = [parent for node in nodes for parent, _ in node.next_functions if parent is not None]
    return None


def holds_tensors(node: Any) -> bool:
    """Return whether an autograd node still has its saved tensors; backward frees them."""
    try:
        return len(node.saved_tensors) + len(getattr(node, "_tensors_no_vc_check", ())) > 0
    except RuntimeError:
        return False


def _source_hash() -> str:
    folder = Path(__file__).parent
    package = folder.parent.parent
    others = ("codec/graph_codec.py", "codec/products.py", "autograd/operations.py")
    files = (*sorted(folder.glob("*.py")), *(package / name for name in others))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
