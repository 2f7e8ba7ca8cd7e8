"""What one training step keeps: `trace_step` follows forward, loss and backward on fake tensors, without data and without weights.

Every tensor that autograd saves is a slot with a name, and so are parameters, gradients, optimizer state, buffers and inputs. One fake step
runs on the CPU in the form that it has on the target device (forms.py), under a clock that ticks with each operation (timeline.py), and
everything that can be packed is taken out of autograd's hands on the way (units.py). `footprint(trace, plan)` is arithmetic on the result.

>>> trace = trace_step(torch.nn.Linear(8, 4), (torch.empty(2, 8), torch.empty(2, 4)), loss=torch.nn.functional.mse_loss, device="cpu")
>>> [(slot.name, slot.role.value, slot.nbytes) for slot in trace.slots[:2]]
[('weight', 'weight', 128), ('bias', 'weight', 16)]
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves

from paredown.errors import TraceError
from paredown.plan.fakes import Fakes, check_model, faked
from paredown.plan.forms import Elsewhere
from paredown.plan.graph import tensors_in
from paredown.plan.optimizers import Kept, kept_by
from paredown.plan.record import Trace
from paredown.plan.sizes import say_bytes
from paredown.plan.slots import Output, Slot
from paredown.plan.timeline import Allocation, Timeline
from paredown.plan.units import Recorder, held_slots, slots_of
from paredown.plan.watch import Watch
from paredown.roles import Role

__all__ = ["Slot", "Trace", "trace_step"]

DEVICES = ("cuda", "cpu")
LOSS = "loss"  # what stands before the names of what the loss saves
ADVICE = "A trace has shapes and no numbers: move that decision out of the model, or make it depend on shapes alone."


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
    kept = kept_by(optimizer, {**dict(model.named_parameters()), **dict(beside.named_parameters())}, target)
    fakes = Fakes()
    with faked(model, fakes), faked(beside, fakes):
        step = Step(model, beside, fakes, target)
        step.run(Arguments.of(fakes.batch(_plain(batch)), has_loss=loss is not None), loss, autocast)
        return step.trace(kept, batch, autocast)


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


@dataclass(frozen=True)
class Arguments:
    """A batch, sorted into what the model is called with and what the loss gets beside its output."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    targets: tuple[Any, ...]

    @staticmethod
    def of(batch: Any, *, has_loss: bool) -> Arguments:
        """The arguments in `batch`."""
        if isinstance(batch, dict):
            return Arguments((), batch, ())
        if not isinstance(batch, tuple | list):
            batch = (batch,)
        if has_loss and len(batch) < 2:
            raise TraceError(
                f"with a loss the batch is (inputs..., target); it has {len(batch)} part. Add the target, or leave out the loss."
            )
        parts = tuple(batch)
        return Arguments(parts[:-1], {}, parts[-1:]) if has_loss else Arguments(parts, {}, ())


@contextmanager
def _quiet() -> Generator[None]:
    """Without what torch logs of an error in a fake operation: the error itself is raised, and says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@final
class Loss(nn.Module):
    """A loss as a module, so that what it saves can be watched; a loss that is a module itself is hidden inside, under no name."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._hidden = (function,)

    def forward(self, *args: Any) -> Tensor:
        """What the function gives."""
        return self._hidden[0](*args)


class Step:
    """One fake step: runs it, and turns what was seen into a trace."""

    def __init__(self, model: nn.Module, beside: nn.Module, fakes: Fakes, device: str) -> None:
        self.model, self.beside, self.fakes, self.device = model, beside, fakes, device
        self.elsewhere = Elsewhere(device, fakes)
        self.timeline = Timeline(self._where)
        self.recorder = Recorder(self.timeline)
        fakes.around = lambda: self.timeline.owned_by(
            Role.BUFFER
        )  # from now on: tensors that the model has, and no module registers
        self.watches: list[Watch] = []
        self.backward_at = self.returned_bytes = 0
        self.has_assumed_mask = False
        self.held: list[Allocation] = []
        self._kept: list[tuple[str, Role, Tensor]] = []

    def _where(self) -> str:
        if self.timeline.phase == LOSS:
            return LOSS
        return self.watches[0].where() if self.watches else ""

    # --- running it ---------------------------------------------------------------------------------------------------------

    def run(self, given: Arguments, loss: Callable[..., Tensor] | None, autocast: torch.dtype | None) -> None:
        """Forward, loss and backward."""
        self._hold(given)
        with ExitStack() as stack:
            for context in (
                _quiet(),
                self._masks_by_shape(),
                torch.enable_grad(),
                self.fakes.mode,
                torch.device("cpu"),
                self.elsewhere,
                self.timeline,
            ):
                stack.enter_context(context)
            output: Any = None
            with self.elsewhere.autocast(autocast):
                with self._watched(self.model, ""):
                    output = self.model(*given.args, **given.keywords)
                self.recorder.ends()
                value = self._loss(output, given, loss)
            if loss is None:
                there, output = self.timeline.live(), None
                self.returned_bytes = sum(made.nbytes for made in there if made.death is not None)
            self._note_held((output, value))
            self.backward_at = self.timeline.tick()
            self.timeline.phase = "backward"
            with self._explained("backward"):
                value.backward()
            self._take_gradients()

    @contextmanager
    def _masks_by_shape(self) -> Generator[None]:
        """nn.Transformer looks whether a mask is the causal one. Here it has no numbers: a square one is taken for it."""
        before = transformer._detect_is_causal_mask

        def is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
            if is_causal is not None or mask is None:
                return bool(is_causal)
            self.has_assumed_mask |= mask.dim() == 2 and mask.shape[0] == mask.shape[1]
            return mask.dim() == 2 and mask.shape[0] == mask.shape[1]

        transformer._detect_is_causal_mask = is_causal_mask
        try:
            yield
        finally:
            transformer._detect_is_causal_mask = before

    def _note_held(self, returned: tuple[Any, ...]) -> None:
        """What waits for backward without that autograd's graph says so: a checkpoint's inputs, tensors that the model put aside."""
        known = {unit.allocation for unit in self.recorder.units} | set(self.recorder.weight_casts)
        known |= {self.timeline.find(tensor) for tensor in tensors_in(returned)}
        self.held = [made for made in self.timeline.live() if made.owner is None and made.nbytes and made not in known]

    def _hold(self, given: Arguments) -> None:
        """What is there before the step: parameters, buffers and inputs."""
        for module in (self.model, self.beside):
            self._kept += [(name, Role.WEIGHT, p) for name, p in module.named_parameters()]
            self._kept += [(name, Role.BUFFER, buffer) for name, buffer in module.named_buffers()]
        inputs = [t for t in tree_leaves((given.args, given.keywords, given.targets)) if isinstance(t, Tensor)]
        for number, tensor in enumerate(dict.fromkeys(inputs)):
            self._kept.append((f"input{number + 1}", Role.INPUT, tensor))
        for name, role, tensor in self._kept:
            if self.timeline.find(tensor) is None:
                self.timeline.add(tensor, op="", module=name.rpartition(".")[0], owner=role)

    @contextmanager
    def _watched(self, module: nn.Module, outside: str) -> Generator[None]:
        watch = Watch(module, lambda saved: self.recorder.saved(saved, outside=outside))
        self.watches.append(watch)
        watch.attach()
        try:
            with self._explained(outside or "forward"):
                yield
        finally:
            self.watches.remove(watch)
            watch.detach()

    def _loss(self, output: Any, given: Arguments, loss: Callable[..., Tensor] | None) -> Tensor:
        if loss is None:
            return _loss_of(output)
        self.timeline.phase = LOSS
        module = Loss(loss)
        with self._watched(module, LOSS):
            value = module(output, *given.targets)
        self.timeline.phase = "forward"
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TraceError(f"the loss is one number that backward starts from; this one gave {_say(value)}.")
        if value.grad_fn is None:
            raise TraceError("no gradient reaches the loss: every parameter is frozen, or the model runs under no_grad.")
        return value

    @contextmanager
    def _explained(self, phase: str) -> Generator[None]:
        """Errors with the place where they came up."""
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            op = str(error.func).removeprefix("aten.").removesuffix(".default")
            what = {"_local_scalar_dense": "reads a number out of a tensor (.item(), int(), bool(), an if on a tensor)"}
            does = what.get(op, f"calls {op}, whose result has a shape that depends on its numbers,")
            raise TraceError(f"{phase} of {self._place()} {does} and that cannot be followed. {ADVICE}") from error
        except TraceError:
            raise
        except UnsupportedOperatorException as error:
            advice = "Register how it computes shapes with torch.library.register_fake."
            raise TraceError(
                f"{phase} of {self._place()} calls {error.func}, which has no form for fake tensors. {advice}"
            ) from error
        except Exception as error:
            if "tensor subclasses" in str(error):  # what .numpy() says
                raise TraceError(f"{phase} of {self._place()} takes a tensor out of torch (.numpy()). {ADVICE}") from error
            if isinstance(error, TypeError) and "positional argument" in str(error):
                error.add_note(
                    "paredown: if the last part of the batch is the target, give the loss that takes it: trace_step(..., loss=...)."
                )
            error.add_note(f"paredown: in the traced {phase} of {self._place()}, last operation {self.timeline.last_op!r}.")
            raise

    def _place(self) -> str:
        path = self.timeline.last_module
        return f"module {path!r}" if path else f"the model {type(self.model).__name__}"

    # --- what was seen ------------------------------------------------------------------------------------------------------

    def _take_gradients(self) -> None:
        for name, role, p in list(self._kept):
            if role is Role.WEIGHT and p.grad is not None:
                found = self.timeline.find(p.grad)
                if found is not None and (found.owner is None or found.owner is Role.GRADIENT):
                    found.owner = Role.GRADIENT
                self._kept.append((name, Role.GRADIENT, p.grad))

    def trace(self, kept: Kept, batch: Any, autocast: torch.dtype | None) -> Trace:
        """The trace of the step that ran."""
        ends = self.timeline.tick()
        slots = [self._kept_slot(name, role, tensor, ends) for name, role, tensor in self._kept]
        slots += [_constant(number, made, ends) for number, made in enumerate(self._constants())]
        slots += [_state_slot(state, ends) for state in kept.states]
        activations = [*slots_of(self.recorder, ends), *held_slots(self.held, ends)]
        outputs = self._outputs(ends)
        if kept.transient_bytes:
            size = kept.transient_bytes
            outputs.append(Output("optimizer.step", "", "step", (size,), "uint8", size, ends, ends))
        return Trace(
            model=type(self.model).__name__,
            batch=_describe(batch),
            device=self.device,
            dtype=str(autocast or _main_dtype(self.model)).removeprefix("torch."),
            optimizer=kept.name,
            slots=(*slots, *activations),
            outputs=tuple(outputs),
            length=ends,
            backward_at=self.backward_at,
            returned_bytes=self.returned_bytes,
            notes=(*kept.notes, *self._notes()),
        )

    def _kept_slot(self, name: str, role: Role, tensor: Tensor, ends: int) -> Slot:
        found = self.timeline.find(tensor) if role is Role.GRADIENT else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.element_size()
        birth = found.birth if found is not None else 0
        return Slot(name, role, name.rpartition(".")[0], tuple(tensor.shape), dtype, nbytes, birth, ends, numel=tensor.numel())

    def _constants(self) -> list[Allocation]:
        """Tensors that the model uses and no module registers."""
        return [made for made in self.timeline.allocations if made.owner is Role.BUFFER and made.op]

    def _outputs(self, ends: int) -> list[Output]:
        slot_of: dict[Allocation, str] = {**self.recorder.weight_casts, **dict.fromkeys(self.held, "held")}
        slot_of.update({unit.allocation: unit.savers[unit.first].name for unit in reversed(self.recorder.units)})
        outputs: list[Output] = []
        for made in self.timeline.allocations:
            death = ends if made.death is None else made.death
            birth = made.birth + made.happens_in_place()
            is_own = made.op and made.owner in (None, Role.GRADIENT)
            if made.nbytes and birth <= death and is_own:
                slot = slot_of.get(made, "gradient" if made.owner is Role.GRADIENT else "")
                outputs.append(Output(made.op, made.module, made.phase, made.shape, made.dtype, made.nbytes, birth, death, slot))
        return outputs

    def _notes(self) -> Iterator[str]:
        if self.has_assumed_mask:
            yield "a square attention mask of nn.Transformer is taken for the causal one, since its numbers are not known"
        if self.returned_bytes:
            more = say_bytes(self.returned_bytes)
            yield f"the model's output is let go once its loss is read (loss = model(**batch).loss); held, it takes {more} more"
        if self.recorder.hooked:
            places, count = list(self.recorder.hooked), self.recorder.hooked.total()
            first = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
            yield f"{count} saved tensors in {len(places)} modules ({first}) are held by others' hooks, as checkpointing has"


def _constant(number: int, made: Allocation, ends: int) -> Slot:
    return Slot(f"constant{number + 1}", Role.BUFFER, made.module, made.shape, made.dtype, made.nbytes, 0, ends)


def _state_slot(state: Any, ends: int) -> Slot:
    numel = torch.Size(state.shape).numel()
    dtype = str(state.dtype).removeprefix("torch.")
    module = state.parameter.rpartition(".")[0]
    return Slot(state.name, state.role, module, state.shape, dtype, numel * state.dtype.itemsize, 0, ends, numel=numel)


def _loss_of(output: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor):
        found = output
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise TraceError(
            f"loss=None takes .loss of the model's output, or an output of one number; this is {_say(output)}. Give a loss."
        )
    if found.grad_fn is None:
        raise TraceError("no gradient reaches the loss: every parameter is frozen, or the model runs under no_grad.")
    return found


def _say(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


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
