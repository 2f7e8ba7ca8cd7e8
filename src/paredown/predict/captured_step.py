"""`GraphCapture` captures the graphs of a compiled training step on fake tensors: Dynamo and AOTAutograd trace them, nothing is compiled.

torch.compile runs with a backend that stops before Inductor's code generation. Each graph is partitioned twice, as plain torch.compile does
and as sessions with packed activations do (`partition` in graph_packing.py), and called with fake tensors, so that autograd, the loss and
code between graphs run as they do in training. A call of a graph takes as many ticks of the timeline as the graph has nodes; `calls` says
when it began. Memory inside of the graphs follows from their nodes (graph_memory.py).

A graph for CUDA is traced on the CPU with the operations that CUDA has (`DeviceForms`): Dynamo's own evaluation of shapes and dtypes
(`run_node`) and the tracing of AOTAutograd both run in that mode. Inductor pads matrix products with sizes that are no multiples of 8 on
CUDA where a timing favours that; here all large ones are padded whose rows do not begin on a multiple of 4 bytes.
"""

# pyright: reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.utils as dynamo_utils
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.fx_passes import pad_mm

from paredown.errors import TraceError
from paredown.formats.format import Format
from paredown.predict.fake.fake_step import Arguments, FakeStep
from paredown.predict.fake.fake_tensors import DeviceForms
from paredown.predict.graph_memory import GraphMemory
from paredown.predict.timeline import Allocation
from paredown.roles import Role
from paredown.session.compiled.graph_decisions import storage_of
from paredown.session.compiled.graph_packing import chains_to_save, joint_graph, partition
from paredown.session.compiled.graph_slots import JointGraph, aten_name, module_path
from paredown.session.compiled.recomputed_tensors import is_tensor, save_recomputed

PADDED_BYTES = 1 << 20  # matrix products whose output is larger are padded
# The least that a GPU copies asynchronously to shared memory. Steps on an H200 hold copies of the gradient of logits that pad both products
# of backward with 50,257 classes (GPT-2), and at most one of them with 30,522 (BERT).
COPIED_BYTES = 4


BITS = Format.parse("uint4/64@bf16+bf16").bits_per_value  # of inputs of norms in 4 bits


@dataclass(frozen=True)
class Partition:
    """A forward graph and a backward graph, split from AOTAutograd's joint graph; `backward` is None without gradients.

    The outputs of forward from index `num_outputs` on are the tensors saved for backward.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int


@dataclass
class CapturedGraph:
    """A graph of a compiled step, split into forward and backward in three ways, by what sessions do with activations.

    They are stored unmodified (`plain`), packed (`packed`) or packed in 4 bits (`in_4_bits`). `joint` has facts about the nodes before the
    split.
    """

    plain: Partition
    packed: Partition
    in_4_bits: Partition
    joint: JointGraph

    def num_ticks(self, *, is_backward: bool) -> int:
        """Return how many ticks of the step's timeline a call of the forward or backward graph takes."""
        graphs = [part.backward if is_backward else part.forward for part in (self.plain, self.packed, self.in_4_bits)]
        return max(len(gm.graph.nodes) for gm in graphs if gm is not None)


@dataclass
class GraphCall:
    """One call of a compiled graph, with the ticks of the step's timeline at which its forward and backward began.

    `backward_at` is -1 if backward did not run. `held` maps nodes to the allocations of outputs that forward both returns and saves.
    """

    graph: CapturedGraph
    forward_at: int
    backward_at: int = -1
    held: dict[str, Allocation] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AllPartitions(CustomPartitionerFn):
    """A partitioner for torch.compile that splits each joint graph in all three ways of `CapturedGraph`.

    It calls `on_graph` with the result, and returns to torch the split in which activations are unmodified.
    """

    on_graph: Callable[[CapturedGraph], None]
    on_cuda: bool

    def uuid(self) -> Any:
        """Return a text that identifies the partitioner in the keys of Inductor's caches."""
        return "paredown trace"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return forward and backward graph with unmodified activations; call `on_graph` with all three splits."""
        joint = joint_graph(gm, options)
        packed = partition(gm, joint_inputs, options, on_cuda=self.on_cuda)
        saved = chains_to_save(packed[1].graph, dict.fromkeys((node.name for node in packed[0].graph.nodes), BITS))
        in_4_bits, count = packed, options["num_fwd_outputs"]
        if saved:
            in_4_bits = _copied(packed[0]), _copied(packed[1])
            save_recomputed(*in_4_bits, count, saved)
        plain = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        of_packed = Partition(*packed, count)
        of_4_bits = Partition(*in_4_bits, count) if saved else of_packed
        self.on_graph(CapturedGraph(Partition(*plain, count), of_packed, of_4_bits, joint))
        return plain


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph module whose nodes have the same names."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


class GraphCapture:
    """Runs forward of a training step under torch.compile on fake tensors, and records each call of a graph."""

    def __init__(self, step: FakeStep) -> None:
        self.step, self.calls = step, list[GraphCall]()
        self._graphs: dict[Any, CapturedGraph] = {}  # by torch's number of the graph
        self._partitioned: CapturedGraph | None = None
        self._forms = DeviceForms(step.device, step.fakes, in_graph=True) if step.device == "cuda" else nullcontext()

    def __deepcopy__(self, memo: Any) -> GraphCapture:
        """Return this object itself, since Lightning copies the arguments of torch.compile, which refer to it."""
        return self

    def forward(self, arguments: Arguments) -> Any:
        """Run the model under torch.compile, and return its output."""
        torch._dynamo.reset()
        with dynamo_config.patch(suppress_errors=False), self._evaluated_in_forms(), self._recorded_loss():
            try:
                compiled = torch.compile(self.step.model, backend=self._backend, dynamic=False)
                output = compiled(*arguments.args, **arguments.keywords)
            finally:
                torch._dynamo.reset()
                gc.collect()  # what Dynamo's records in reference cycles hold would seem to be held by the step
        if not self.calls:
            name = type(self.step.model).__name__
            raise TraceError(
                f"torch.compile makes no graph of {name}: it runs in eager mode, which a trace without compiled=True describes. Is "
                "torch.compiler.disable or TORCHDYNAMO_DISABLE in use?"
            )
        return output

    @contextmanager
    def _recorded_loss(self) -> Generator[None]:
        """Return a context that records the operations of a loss in chunks, which run outside of graphs."""
        step = self.step

        @contextmanager
        def recording() -> Generator[None]:
            with torch.device("cpu"), step.device_forms, step.timeline:
                yield

        with patch.object(step.head.use, "around", recording) if step.head is not None else nullcontext():
            yield

    @contextmanager
    def _evaluated_in_forms(self) -> Generator[None]:
        """Return a context in which Dynamo computes shapes and dtypes as on the device of the trace."""
        run_node = dynamo_utils.run_node

        def run_in_forms(*args: Any, **keywords: Any) -> Any:
            with self._forms:
                return run_node(*args, **keywords)

        with patch.object(dynamo_utils, "run_node", run_in_forms):
            yield

    def _backend(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Return the function that Dynamo calls in place of its graph `gm`; it runs on fake tensors."""
        partitioner = AllPartitions(self._on_partition, on_cuda := self.step.device == "cuda")
        patches = {"custom_partitioner_fn": partitioner, "shape_padding": on_cuda}
        outputs = self.step.head.in_graph(gm, inputs) if self.step.head is not None else None
        with functorch_config.patch(enable_autograd_cache=False), self._forms, _padding(self.step.device):
            compiled: Any = compile_fx(gm, inputs, inner_compile=self._compile, config_patches=patches)  # type: ignore[return-value]
        return compiled if outputs is None else lambda *args: outputs(compiled(*args), args)

    def _on_partition(self, graph: CapturedGraph) -> None:
        self._partitioned = graph

    def _compile(self, gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        """Return a function that runs the forward or backward graph `gm` on fake tensors, and records its calls.

        A graph without gradients is treated as a forward graph.
        """
        number = options.get("graph_id")
        if options.get("is_backward"):
            return self._backward(gm, self._graphs[number])
        found, self._partitioned = self._partitioned, None
        if found is None:
            alone = Partition(gm, None, len(gm.graph.output_node().args[0]))  # type: ignore[arg-type]
            found = CapturedGraph(alone, alone, alone, JointGraph())
        self._graphs[number] = found
        return self._forward(gm, found)

    def _forward(self, gm: fx.GraphModule, graph: CapturedGraph) -> Callable[..., Any]:
        @_boxed
        def run(args: list[Any]) -> Any:
            call = GraphCall(graph, self._begin(graph, is_backward=False))
            self.calls.append(call)
            with self.step.timeline.paused():
                outputs = _apart(gm(*args), graph.plain.num_outputs)
            self._register(outputs[: graph.plain.num_outputs], graph.plain.forward, call.forward_at, call.held)
            return outputs

        return run

    def _backward(self, gm: fx.GraphModule, graph: CapturedGraph) -> Callable[..., Any]:
        @_boxed
        def run(args: list[Any]) -> Any:
            call = next(call for call in reversed(self.calls) if call.graph is graph and call.backward_at < 0)
            call.backward_at = self._begin(graph, is_backward=True)
            with self.step.timeline.paused():
                outputs = gm(*args)
            self._register(outputs, gm, call.backward_at, {})
            return outputs

        return run

    def _begin(self, graph: CapturedGraph, *, is_backward: bool) -> int:
        """Advance the step's timeline by the ticks of one graph call, and return the call's first tick."""
        timeline = self.step.timeline
        begin = timeline.current_tick + 1
        timeline.current_tick += graph.num_ticks(is_backward=is_backward)
        return begin

    def _register(self, outputs: Sequence[Any], gm: fx.GraphModule, begin: int, held: dict[str, Allocation]) -> None:
        """Record the outputs of a call of `gm`, which began at the time (tick) `begin`, as allocations.

        Outputs that forward also saves for backward are entered in `held` by node; they become saved tensors of the trace later.
        """
        timeline, end = self.step.timeline, self.step.timeline.current_tick
        memory = GraphMemory(gm.graph)
        nodes: list[Any] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        saved = {storage_of(node) for node in nodes[len(outputs) :] if is_tensor(node)}
        for value, node in zip(outputs, nodes, strict=False):
            if not (isinstance(value, Tensor) and is_tensor(node)) or timeline.find(value) is not None:
                continue
            is_saved = storage_of(node) in saved
            buffer = memory.of(node)
            timeline.current_tick = begin + (max(buffer.birth, 0) if buffer is not None else 0)
            module = module_path(node.meta.get("nn_module_stack"))[0]
            allocation = timeline.add(value, op=aten_name(node), module=module, owner=Role.ACTIVATION if is_saved else None)
            timeline.current_tick = end
            if is_saved:
                held[node.name] = allocation


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function that calls `run` and then empties the list of arguments, as AOTAutograd asks of a backend."""

    def call(args: list[Any]) -> Any:
        outputs = run(args)
        args.clear()
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _apart(outputs: Sequence[Any], num_outputs: int) -> list[Any]:
    """Return the outputs of forward with copies of those saved tensors that share memory with a returned one."""
    returned = {value.untyped_storage()._cdata for value in outputs[:num_outputs] if isinstance(value, Tensor)}
    saved = [
        value.clone() if isinstance(value, Tensor) and value.untyped_storage()._cdata in returned else value
        for value in outputs[num_outputs:]
    ]
    return [*outputs[:num_outputs], *saved]


@contextmanager
def _padding(device: str) -> Generator[None]:
    """Return a context in which Inductor pads large matrix products as on a GPU, without timing what is faster."""

    def should_pad(match: Any, mat1: Tensor, mat2: Tensor, *args: Any, **keywords: Any) -> bool:
        sizes = [*mat1.shape[-2:], mat2.shape[-1]]
        align = pad_mm.get_alignment_size(mat1)
        is_large = mat1.shape[-2] * mat2.shape[-1] * mat1.element_size() >= PADDED_BYTES
        return bool(align) and is_large and any(size * mat1.element_size() % COPIED_BYTES for size in sizes)

    can_patch = device == "cuda" and hasattr(pad_mm, "should_pad")  # elsewhere nothing is padded
    with patch.object(pad_mm, "should_pad", should_pad) if can_patch else nullcontext():
        yield
