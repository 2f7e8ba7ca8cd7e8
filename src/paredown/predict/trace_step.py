"""`trace_step` finds every tensor that a training step stores, by a step on fake tensors that needs neither data nor memory for weights.

Every tensor that autograd saves is a slot with a name, and so are parameters, gradients, optimizer state, buffers and inputs. One step on
fake tensors (predict/fake/fake_step.py) records the lifetime of each; `footprint(trace, plan)` is arithmetic on the result.

>>> trace = trace_step(torch.nn.Linear(8, 4), (torch.empty(2, 8), torch.empty(2, 4)), loss=torch.nn.functional.mse_loss, device="cpu")
>>> [(slot.name, slot.role.value, slot.nbytes) for slot in trace.slots[:2]]
[('weight', 'weight', 128), ('bias', 'weight', 16)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paredown.autograd.checkpoints import CHOOSES, router_weights
from paredown.autograd.graph import tensors_in
from paredown.errors import TraceError
from paredown.loss.output_head import CHUNKED_LOSS, OutputHead, find_head
from paredown.plan.trace import DEVICES, Output, Slot, Trace
from paredown.predict.fake.fake_step import LOSS, Arguments, FakeStep, merged
from paredown.predict.fake.fake_tensors import FakeTensors, check_model, with_fake_tensors
from paredown.predict.optimizer_state import OptimizerState, StateTensor, state_of_optimizer
from paredown.predict.saved_lifetimes import OUTSIDE, held_slots, slots_of
from paredown.predict.timeline import Allocation
from paredown.predict.token_modules import token_modules
from paredown.roles import Role
from paredown.session.view_outputs import ViewOutputs
from paredown.session.weights.graph_linears import GraphLinears
from paredown.sizes import say_bytes

__all__ = ["Slot", "Trace", "trace_step"]

CROSS_ENTROPY = ("log_softmax", "nll_loss")  # names of operations
ALL_LOGITS, NO_CROSS_ENTROPY = "the loss is not in chunks, and all logits of {} are counted: {}", "no cross entropy reads them"


def trace_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Any = None,
    device: Any = None,
    autocast: torch.dtype | None = None,
    compiled: bool = False,
    chunked_loss: bool = CHUNKED_LOSS,
) -> Trace:
    """Return every tensor that one step of `model` on `batch` stores on `device`, which may be absent here.

    If `batch` is a tuple, it holds the model's positional arguments, and with `loss` the target as its last item; if it is a mapping,
    keyword arguments; if it is a tensor, the only argument. Without `loss` the step's loss is `.loss` of the output, or the output itself
    if it is one number. `optimizer` is "sgd", "sgdm", "adam", "adamw", "lion", "muon", or an instance. `autocast` is the dtype of the
    autocast context around forward and loss. The model, the batch and all random states are left unchanged.

    `compiled` says whether torch.compile compiles the model. Its graphs are traced and not compiled; slots are the tensors that they save.
    This clears Dynamo's cache: models that were compiled before in this process are compiled again at their next call. With `chunked_loss`,
    a session computes the loss of a language model's output head in chunks, and all logits never exist; the baseline is in `unmodified`.
    """
    model = getattr(model, "_orig_mod", model)  # the module that torch.compile wrapped
    check_model(model)
    target = _device(device)
    if not (autocast is None or isinstance(autocast, torch.dtype)):
        raise TraceError(f"autocast is a dtype such as torch.bfloat16, or None, not {autocast!r}.")
    loss_module = nn.ModuleDict({LOSS: loss}) if isinstance(loss, nn.Module) else nn.ModuleDict()  # its parameters train too
    state = state_of_optimizer(optimizer, {**dict(model.named_parameters()), **dict(loss_module.named_parameters())}, target, model)
    tracer = StepTracer(model, loss_module, target, state, batch, loss, (autocast, compiled))
    unmodified, head = tracer.trace(), OutputHead(model, traced_device=target) if chunked_loss else None
    if head is None or not head.is_found:
        missing = (
            (head.reason_missing(slot.shape, slot.nbytes) for slot in unmodified.activations if _is_of_loss(slot)) if head else ()
        )
        note = next(filter(None, missing), "")
        return replace(unmodified, notes=(*unmodified.notes, f"the loss is not in chunks: {note}")) if note else unmodified
    in_chunks = tracer.trace(head) if not head.reason else None
    if in_chunks is not None and head.use.num_losses:
        return replace(in_chunks, unmodified=unmodified)
    note = ALL_LOGITS.format(head.use.path, head.reason or NO_CROSS_ENTROPY)
    return replace(unmodified, notes=(*unmodified.notes, note))


def _is_of_loss(slot: Slot) -> bool:
    return any(saver.op.strip("_").startswith(CROSS_ENTROPY) for saver in slot.savers)


@dataclass(frozen=True, eq=False)
class StepTracer:
    """Traces one training step: without a session, and also as sessions run it if that is different.

    `options` are the dtype of autocast (or None), and whether the model is compiled. `known_modules` caches results of `token_modules` for
    further traces of this step.
    """

    model: nn.Module
    loss_module: nn.Module
    device: str
    state: OptimizerState
    batch: Any
    loss: Callable[..., Tensor] | None
    options: tuple[torch.dtype | None, bool]
    known_modules: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def trace(self, head: Any = None) -> Trace:
        """Return the trace of the step as sessions run it; if others run it differently, it contains that trace too.

        `head` is the output head of a language model whose loss is computed in chunks, or None.
        """
        trace, has_hidden = self._trace(head, in_session=False)
        return replace(self._trace(head, in_session=True)[0], without_packing=trace) if has_hidden else trace

    def _trace(self, head: Any, *, in_session: bool) -> tuple[Trace, bool]:
        """Return the trace of the step, and whether in-place operations hide from it what autograd saves.

        With `in_session`, views that modules return are replaced as sessions do it, so that nothing is hidden.
        """
        fakes = FakeTensors()
        with with_fake_tensors(self.model, fakes), with_fake_tensors(self.loss_module, fakes):
            step = FakeStep(self.model, self.loss_module, fakes, self.device)
            step.head = head
            step.view_outputs = ViewOutputs(self.model, FakeTensor) if in_session else None
            arguments = Arguments.of(fakes.batch(_as_dict(self.batch)), self.loss)
            finish = _run(step, arguments, self.loss, *self.options)
            traced = TraceBuilder(step).trace(self.state, self.batch, self.options[0], self.known_modules)
            return finish(traced), bool(step.in_place_on_views)


def _run(
    step: FakeStep, arguments: Arguments, loss: Callable[..., Tensor] | None, autocast: torch.dtype | None, compiled: bool
) -> Callable[[Trace], Trace]:
    """Run the step on fake tensors; return a function that adds the compiled graphs, if any, to the step's trace."""
    if not compiled:
        step.run(arguments, loss, autocast)
        return lambda trace: trace
    from paredown.predict.compiled_trace import GraphCapture, compiled_trace  # Inductor takes seconds to import

    capture, linears = GraphCapture(step), GraphLinears(step.model, find_head(step.model)[1])
    step.run(arguments, loss, autocast, capture.forward)
    return lambda trace: compiled_trace(trace, capture, linears.names)


def _device(device: Any) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = str(device).partition(":")[0]
    if kind not in DEVICES:
        raise TraceError(f"device {str(device)!r} cannot be traced. Allowed: {', '.join(DEVICES)}.")
    return kind


def _as_dict(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


class TraceBuilder:
    """Builds the `Trace` of a training step from the records of a `FakeStep` that has run."""

    def __init__(self, step: FakeStep) -> None:
        self.step = step
        self._parameter_ids = {id(p) for p in step.model.parameters()}
        self._router_ids = {id(p) for p in router_weights(step.model).values() if not p.requires_grad}

    def trace(self, state: OptimizerState, batch: Any, autocast: torch.dtype | None, known_modules: dict[Any, Any]) -> Trace:
        """Return the trace of the step that ran; `known_modules` caches results for further traces of the step."""
        end = self.step.timeline.tick()
        slots = [self._persistent_slot(name, role, tensor, end) for name, role, tensor in self.step.initial_tensors]
        slots += [self._gradient_slot(name, p, end, is_released=name in state.released) for name, p in self.step.trained()]
        slots += [_constant_slot(number, allocation, end) for number, allocation in enumerate(self._constants())]
        slots += [_state_slot(tensor, end) for tensor in state.states]
        names = {self.step.timeline.find(tensor): name for name, role, tensor in self.step.initial_tensors if role is Role.WEIGHT}
        names = {allocation: name for allocation, name in names.items() if allocation is not None}
        if self.step.device == "cuda":
            self.step.recorder.leave_small()
        activations = [*slots_of(self.step.recorder, names, end), *held_slots(self.step.held, end)]
        outputs = self._outputs(end)
        if state.transient_bytes:
            size = state.transient_bytes
            outputs.append(Output("optimizer.step", "", "step", (size,), "uint8", size, end, end))
        if state.matrix_bytes:  # phase "step" has only what parameters with packed state do not need, so this is of another phase
            size = state.matrix_bytes
            outputs.append(Output("newton_schulz", "", "backward", (size,), "uint8", size, end, end))
        return Trace(
            model=type(self.step.model).__name__,
            batch=_describe(batch),
            device=self.step.device,
            dtype=str(autocast or _main_dtype(self.step.model)).removeprefix("torch."),
            optimizer=state.name,
            slots=(*slots, *activations),
            outputs=tuple(outputs),
            length=end,
            backward_at=self.step.backward_at,
            returned_bytes=self.step.returned_bytes,
            notes=(*state.notes, *self._notes()),
            operations=self.step.timeline.operations(),
            token_modules=token_modules(self.step, known_modules),
        )

    def _persistent_slot(self, name: str, role: Role, tensor: Tensor, end: int) -> Slot:
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.element_size()
        slot = Slot(name, role, name.rpartition(".")[0], tuple(tensor.shape), dtype, nbytes, 0, end, numel=tensor.numel())
        if role is not Role.WEIGHT:
            return slot
        allocation = self.step.timeline.find(tensor)
        stays = CHOOSES if id(tensor) in self._router_ids else "" if id(tensor) in self._parameter_ids else OUTSIDE
        parts, running = self.step.recorder.weight_parts(allocation, end), self._decoded_spans(tensor, allocation)
        return replace(slot, stays=stays, parts=parts, running=running, is_frozen=not tensor.requires_grad)

    def _gradient_slot(self, name: str, parameter: Tensor, end: int, *, is_released: bool) -> Slot:
        """Return the trace's entry of the gradient of `parameter`.

        After the operation `dropped` it was added to an accumulator and is freed, or, with `is_released`, used for the update in backward.
        """
        assert parameter.grad is not None
        allocation = self.step.timeline.find(parameter.grad)
        birth = allocation.birth if allocation is not None else 0
        dropped = max(birth, self.step.gradient_complete_at.get(id(parameter), birth))
        slot = self._persistent_slot(name, Role.GRADIENT, parameter.grad, end)
        return replace(slot, birth=birth, dropped=dropped, death=dropped if is_released else end)

    def _decoded_spans(self, weight: Tensor, allocation: Allocation | None) -> tuple[tuple[int, int], ...]:
        """Return the spans (first and last operation) in which `weight` must be decoded if it is packed."""
        calls, complete = self.step.module_runs.spans(weight), self.step.gradient_complete_at.get(id(weight), 0)
        calls = [(start, max(end, complete) if start > self.step.backward_at else end) for start, end in calls]
        return merged([*calls, *((tick, tick) for tick in (allocation.uses if allocation is not None else ()))])

    def _constants(self) -> list[Allocation]:
        """Return the allocations of tensors that the model uses and that are neither parameters nor buffers."""
        return [allocation for allocation in self.step.timeline.allocations if allocation.owner is Role.BUFFER and allocation.op]

    def _outputs(self, end: int) -> list[Output]:
        """Return every allocation that an operation of the step made, with the name of its saved tensor, if any."""
        slot_of: dict[Allocation, str] = {**self.step.recorder.weight_casts, **dict.fromkeys(self.step.held, "held")}
        slot_of.update({unit.allocation: unit.savers[unit.first].name for unit in reversed(self.step.recorder.units)})
        outputs: list[Output] = []
        for allocation in self.step.timeline.allocations:
            death = end if allocation.death is None else allocation.death
            birth = allocation.birth + allocation.happens_in_place()
            is_output = allocation.op and allocation.owner in (None, Role.GRADIENT)
            if allocation.nbytes and birth <= death and is_output:
                slot = slot_of.get(allocation, "gradient" if allocation.owner is Role.GRADIENT else "")
                origin = (allocation.op, allocation.module, allocation.phase, allocation.shape, allocation.dtype, allocation.nbytes)
                outputs.append(Output(*origin, birth, death, slot, allocation.used, tuple(allocation.inputs)))
        return outputs

    def _notes(self) -> Iterator[str]:
        if self.step.has_assumed_mask:
            yield "a square attention mask of nn.Transformer is assumed to be causal, since fake tensors have no values"
        if self.step.returned_bytes:
            more = say_bytes(self.step.returned_bytes)
            yield f"the model's output is assumed freed once its loss is read (loss = model(**batch).loss); held, it takes {more} more"
        places = self.step.fakes.mode.places
        if places:
            names = [f"{name!r}" if name else "the model itself" for name in places]
            first = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            yield (
                f"shapes or decisions that depend on values of activations are those of assumed values, {places.total()} times in "
                f"{first}: random scores send equal shares of the tokens to all experts"
            )
        if self.step.recorder.hooked:
            places, count = list(self.step.recorder.hooked), self.step.recorder.hooked.total()
            first = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
            yield f"{count} saved tensors in {len(places)} modules ({first}) are held by hooks of other code, such as checkpointing"


def _constant_slot(number: int, allocation: Allocation, end: int) -> Slot:
    return Slot(
        f"constant{number + 1}", Role.BUFFER, allocation.module, allocation.shape, allocation.dtype, allocation.nbytes, 0, end
    )


def _state_slot(state: StateTensor, end: int) -> Slot:
    numel = torch.Size(state.shape).numel()
    dtype = str(state.dtype).removeprefix("torch.")
    module = state.parameter.rpartition(".")[0]
    return Slot(state.name, state.role, module, state.shape, dtype, numel * state.dtype.itemsize, 0, end, numel=numel)


def _describe(batch: Any) -> tuple[str, ...]:
    """Return a text "name: shape dtype" for each tensor of a batch."""
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, tuple | list) else (batch,))
    return tuple(
        f"{name}: {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, value in items for t in tensors_in(value)
    )


def _main_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that most values of the model's parameters have; float32 if it has no parameters."""
    sizes: dict[torch.dtype, int] = {}
    for p in model.parameters():
        sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
