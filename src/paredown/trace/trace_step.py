"""What one training step keeps: `trace_step` follows forward, loss and backward on fake tensors, without data and without weights.

Every tensor that autograd saves is a slot with a name, and so are parameters, gradients, optimizer state, buffers and inputs. One fake step
(trace/fake_step.py) tells when each of them is there; `footprint(trace, plan)` is arithmetic on the result.

>>> trace = trace_step(torch.nn.Linear(8, 4), (torch.empty(2, 8), torch.empty(2, 4)), loss=torch.nn.functional.mse_loss, device="cpu")
>>> [(slot.name, slot.role.value, slot.nbytes) for slot in trace.slots[:2]]
[('weight', 'weight', 128), ('bias', 'weight', 16)]
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import TraceError
from paredown.roles import Role
from paredown.sizes import say_bytes
from paredown.trace.autograd_graph import tensors_in
from paredown.trace.fake_step import LOSS, Arguments, FakeStep, merged
from paredown.trace.fake_tensors import FakeTensors, check_model, with_fake_tensors
from paredown.trace.optimizer_state import OptimizerState, StateTensor, state_of_optimizer
from paredown.trace.saved_tensors import OUTSIDE, held_slots, slots_of
from paredown.trace.timeline import Allocation
from paredown.trace.trace import Output, Slot, Trace

__all__ = ["Slot", "Trace", "trace_step"]

DEVICES = ("cuda", "cpu")


def trace_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Any = None,
    device: Any = None,
    autocast: torch.dtype | None = None,
) -> Trace:
    """Every tensor that one step of `model` on `batch` keeps on `device`, also where that device is absent.

    `batch`: a tuple is the model's arguments, the last one the target when `loss` is given; a mapping is keywords; a tensor is the
    one argument. Without a `loss` the step's loss is `.loss` of the output, or the output itself when that is one number. `optimizer`:
    "sgd", "sgdm", "adam", "adamw", "lion", or an instance. `autocast`: the dtype of the autocast context around forward and loss. The
    model, the batch and all random states are afterwards what they were.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled module is traced as it was written
    check_model(model)
    target = _device(device)
    if not (autocast is None or isinstance(autocast, torch.dtype)):
        raise TraceError(f"autocast is a dtype such as torch.bfloat16, or None, not {autocast!r}.")
    beside = nn.ModuleDict({LOSS: loss}) if isinstance(loss, nn.Module) else nn.ModuleDict()  # its parameters train too
    kept = state_of_optimizer(optimizer, {**dict(model.named_parameters()), **dict(beside.named_parameters())}, target)
    fakes = FakeTensors()
    with with_fake_tensors(model, fakes), with_fake_tensors(beside, fakes):
        step = FakeStep(model, beside, fakes, target)
        step.run(Arguments.of(fakes.batch(_plain(batch)), has_loss=loss is not None), loss, autocast)
        return TraceBuilder(step).trace(kept, batch, autocast)


def _device(device: Any) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = str(device).partition(":")[0]
    if kind not in DEVICES:
        raise TraceError(f"device {str(device)!r} is unknown to a trace. Allowed: {', '.join(DEVICES)}.")
    return kind


def _plain(batch: Any) -> Any:
    """A mapping of any kind as a dict; batches of other libraries are mappings that are none of torch's containers."""
    return dict(batch) if isinstance(batch, Mapping) else batch


class TraceBuilder:
    """A step that ran, told as a trace."""

    def __init__(self, step: FakeStep) -> None:
        self.step = step
        self._own = {id(p) for p in step.model.parameters()}

    def trace(self, kept: OptimizerState, batch: Any, autocast: torch.dtype | None) -> Trace:
        """The trace of the step that ran."""
        ends = self.step.timeline.tick()
        slots = [self._kept_slot(name, role, tensor, ends) for name, role, tensor in self.step.brought]
        slots += [self._gradient_slot(name, p, ends, is_released=name in kept.released) for name, p in self.step.trained()]
        slots += [_constant(number, made, ends) for number, made in enumerate(self._constants())]
        slots += [_state_slot(state, ends) for state in kept.states]
        names = {self.step.timeline.find(tensor): name for name, role, tensor in self.step.brought if role is Role.WEIGHT}
        names = {found: name for found, name in names.items() if found is not None}
        activations = [*slots_of(self.step.recorder, names, ends), *held_slots(self.step.held, ends)]
        outputs = self._outputs(ends)
        if kept.transient_bytes:
            size = kept.transient_bytes
            outputs.append(Output("optimizer.step", "", "step", (size,), "uint8", size, ends, ends))
        return Trace(
            model=type(self.step.model).__name__,
            batch=_describe(batch),
            device=self.step.device,
            dtype=str(autocast or _main_dtype(self.step.model)).removeprefix("torch."),
            optimizer=kept.name,
            slots=(*slots, *activations),
            outputs=tuple(outputs),
            length=ends,
            backward_at=self.step.backward_at,
            returned_bytes=self.step.returned_bytes,
            notes=(*kept.notes, *self._notes()),
        )

    def _kept_slot(self, name: str, role: Role, tensor: Tensor, ends: int) -> Slot:
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.element_size()
        slot = Slot(name, role, name.rpartition(".")[0], tuple(tensor.shape), dtype, nbytes, 0, ends, numel=tensor.numel())
        if role is not Role.WEIGHT:
            return slot
        found = self.step.timeline.find(tensor)
        stays = "" if id(tensor) in self._own else OUTSIDE
        parts, running = self.step.recorder.weight_parts(found, ends), self._plain_spans(tensor, found)
        return replace(slot, stays=stays, parts=parts, running=running)

    def _gradient_slot(self, name: str, parameter: Tensor, ends: int, *, is_released: bool) -> Slot:
        """Of the gradient of `parameter`; one that is folded or used at once is gone after `dropped`."""
        assert parameter.grad is not None
        found = self.step.timeline.find(parameter.grad)
        birth = found.birth if found is not None else 0
        dropped = max(birth, self.step.complete.get(id(parameter), birth))
        slot = self._kept_slot(name, Role.GRADIENT, parameter.grad, ends)
        return replace(slot, birth=birth, dropped=dropped, death=dropped if is_released else ends)

    def _plain_spans(self, weight: Tensor, found: Allocation | None) -> tuple[tuple[int, int], ...]:
        """When `weight` is plain if it waits packed otherwise, apart from what backward has decoded for it."""
        calls, complete = self.step.running.spans(weight), self.step.complete.get(id(weight), 0)
        calls = [(start, max(end, complete) if start > self.step.backward_at else end) for start, end in calls]
        return merged([*calls, *((tick, tick) for tick in (found.uses if found is not None else ()))])

    def _constants(self) -> list[Allocation]:
        """Tensors that the model uses and no module registers."""
        return [made for made in self.step.timeline.allocations if made.owner is Role.BUFFER and made.op]

    def _outputs(self, ends: int) -> list[Output]:
        slot_of: dict[Allocation, str] = {**self.step.recorder.weight_casts, **dict.fromkeys(self.step.held, "held")}
        slot_of.update({unit.allocation: unit.savers[unit.first].name for unit in reversed(self.step.recorder.units)})
        outputs: list[Output] = []
        for made in self.step.timeline.allocations:
            death = ends if made.death is None else made.death
            birth = made.birth + made.happens_in_place()
            is_own = made.op and made.owner in (None, Role.GRADIENT)
            if made.nbytes and birth <= death and is_own:
                slot = slot_of.get(made, "gradient" if made.owner is Role.GRADIENT else "")
                what = (made.op, made.module, made.phase, made.shape, made.dtype, made.nbytes)
                outputs.append(Output(*what, birth, death, slot, made.used))
        return outputs

    def _notes(self) -> Iterator[str]:
        if self.step.has_assumed_mask:
            yield "a square attention mask of nn.Transformer is taken for the causal one, since its numbers are not known"
        if self.step.returned_bytes:
            more = say_bytes(self.step.returned_bytes)
            yield f"the model's output is let go once its loss is read (loss = model(**batch).loss); held, it takes {more} more"
        if self.step.recorder.hooked:
            places, count = list(self.step.recorder.hooked), self.step.recorder.hooked.total()
            first = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
            yield f"{count} saved tensors in {len(places)} modules ({first}) are held by others' hooks, as checkpointing has"


def _constant(number: int, made: Allocation, ends: int) -> Slot:
    return Slot(f"constant{number + 1}", Role.BUFFER, made.module, made.shape, made.dtype, made.nbytes, 0, ends)


def _state_slot(state: StateTensor, ends: int) -> Slot:
    numel = torch.Size(state.shape).numel()
    dtype = str(state.dtype).removeprefix("torch.")
    module = state.parameter.rpartition(".")[0]
    return Slot(state.name, state.role, module, state.shape, dtype, numel * state.dtype.itemsize, 0, ends, numel=numel)


def _describe(batch: Any) -> tuple[str, ...]:
    """Shape and dtype of each tensor of a batch."""
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, tuple | list) else (batch,))
    return tuple(
        f"{name}: {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, value in named for t in tensors_in(value)
    )


def _main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most parameters."""
    sizes: dict[torch.dtype, int] = {}
    for p in model.parameters():
        sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
