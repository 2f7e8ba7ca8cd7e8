"""One fake step: forward, loss and backward of a model on fake tensors, and what was seen meanwhile.

It runs on the CPU in the form that it has on the target device (trace/fake_tensors.py), under a clock that ticks with each
operation (trace/timeline.py), and
everything that can be packed is taken out of autograd's hands on the way (trace/saved_tensors.py).

When a weight that waits packed is plain in a step: while a module that has it runs, and where it is used outside of such modules.

A checkpoint calls modules again in backward, and holds what they saved: then the weight is plain until its gradient is there.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves

from paredown.errors import TraceError
from paredown.roles import Role
from paredown.trace.autograd_graph import tensors_in
from paredown.trace.fake_tensors import DeviceForms, FakeTensors
from paredown.trace.module_watch import Watch
from paredown.trace.saved_tensors import Recorder
from paredown.trace.timeline import Allocation, Timeline

Span = tuple[int, int]


class ModuleRunTimes:
    """Follows the calls of `modules` that have parameters of their own, in ticks of a clock."""

    def __init__(self, modules: Iterable[nn.Module], now: Callable[[], int]) -> None:
        self._now = now
        self._modules = [module for module in modules if any(p is not None for p in module._parameters.values())]
        self._having: dict[int, list[nn.Module]] = {}  # by id of a parameter
        for module in self._modules:
            for parameter in module._parameters.values():
                self._having.setdefault(id(parameter), []).append(module)
        self._entered: dict[nn.Module, list[int]] = {module: [] for module in self._modules}
        self._spans: dict[nn.Module, list[Span]] = {module: [] for module in self._modules}

    @contextmanager
    def followed(self) -> Generator[None]:
        """Follow calls, those in backward too: a checkpoint calls its modules again."""
        handles: list[Any] = []
        for module in self._modules:
            handles += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def spans(self, parameter: Tensor) -> tuple[Span, ...]:
        """From which tick to which modules run that have `parameter`, both included."""
        return merged(span for module in self._having.get(id(parameter), ()) for span in self._spans[module])

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._entered[module].append(self._now() + 1)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        entered = self._entered[module].pop()
        self._spans[module].append((entered, max(entered, self._now())))


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in order, those that overlap or follow each other as one.

    >>> merged([(7, 9), (1, 4), (2, 3), (5, 5)])
    ((1, 5), (7, 9))
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)


# --- One fake step ---

LOSS = "loss"  # what stands before the names of what the loss saves
ADVICE = "A trace has shapes and no numbers: move that decision out of the model, or make it depend on shapes alone."


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


def note_missing_loss(error: Exception, function: str) -> None:
    """Add a note where a model got a target, as it does from a batch without a loss."""
    if isinstance(error, TypeError) and "positional argument" in str(error):
        error.add_note(
            f"paredown: if the last part of the batch is the target, give the loss that takes it: {function}(..., loss=...)."
        )


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


class FakeStep:
    """Runs the step.

    `brought`: parameters, buffers and inputs with name and role. `complete`: when the gradient of a parameter was, by the parameter's id.
    """

    def __init__(self, model: nn.Module, beside: nn.Module, fakes: FakeTensors, device: str) -> None:
        self.model, self.beside, self.fakes, self.device = model, beside, fakes, device
        self.elsewhere = DeviceForms(device, fakes)
        self.timeline = Timeline(self._where, is_cuda=device == "cuda")
        self.recorder = Recorder(self.timeline)
        self.running = ModuleRunTimes(model.modules(), lambda: self.timeline.now)
        fakes.around = lambda: self.timeline.owned_by(
            Role.BUFFER
        )  # from now on: tensors that the model has, and no module registers
        self.watches: list[Watch] = []
        self.backward_at = self.returned_bytes = 0
        self.has_assumed_mask = False
        self.held: list[Allocation] = []
        self.brought: list[tuple[str, Role, Tensor]] = []
        self.complete: dict[int, int] = {}

    def _where(self) -> str:
        if self.timeline.phase == LOSS:
            return LOSS
        return self.watches[0].where() if self.watches else ""

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
                    stack.enter_context(self.running.followed())  # after the watch: what a module saved is packed first
                    output = self.model(*given.args, **given.keywords)
                self.recorder.ends()
                value = self._loss(output, given, loss)
            if loss is None:
                there, output = self.timeline.live(), None
                self.returned_bytes = sum(made.nbytes for made in there if made.death is not None)
            self._note_held((output, value))
            self.backward_at = self.timeline.tick()
            self.timeline.phase = "backward"
            with self._explained("backward"), self._noting_gradients():
                value.backward()
            self._take_gradients()

    @contextmanager
    def _noting_gradients(self) -> Generator[None]:
        """Note when the gradient of each parameter is complete: then it can be folded into an accumulator, or used."""
        complete, timeline = self.complete, self.timeline

        def note(parameter: Tensor) -> None:
            complete.setdefault(id(parameter), timeline.now)

        trained = [p for _, role, p in self.brought if role is Role.WEIGHT and p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(note) for p in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

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
            self.brought += [(name, Role.WEIGHT, p) for name, p in module.named_parameters()]
            self.brought += [(name, Role.BUFFER, buffer) for name, buffer in module.named_buffers()]
        inputs = [t for t in tree_leaves((given.args, given.keywords, given.targets)) if isinstance(t, Tensor)]
        for number, tensor in enumerate(dict.fromkeys(inputs)):
            self.brought.append((f"input{number + 1}", Role.INPUT, tensor))
        for name, role, tensor in self.brought:
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
            note_missing_loss(error, "trace_step")
            error.add_note(f"paredown: in the traced {phase} of {self._place()}, last operation {self.timeline.last_op!r}.")
            raise

    def _place(self) -> str:
        path = self.timeline.last_module
        return f"module {path!r}" if path else f"the model {type(self.model).__name__}"

    def _take_gradients(self) -> None:
        for _, p in self.trained():
            found = self.timeline.find(p.grad) if p.grad is not None else None
            if found is not None and found.owner is None:
                found.owner = Role.GRADIENT

    def trained(self) -> list[tuple[str, Tensor]]:
        """The parameters that have a gradient, by name."""
        return [(name, p) for name, role, p in self.brought if role is Role.WEIGHT and p.grad is not None]


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
