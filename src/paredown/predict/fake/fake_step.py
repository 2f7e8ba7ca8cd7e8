"""`FakeStep` runs forward, loss and backward of a model on fake tensors, and records what they allocate and save.

The step runs on the CPU with the operations of the target device (predict/fake/fake_tensors.py). A `Timeline` gives each operation a tick
and records every allocation (predict/timeline.py); a `Recorder` packs every saved tensor that can be packed (predict/saved_lifetimes.py).

`ModuleRunTimes` records when a weight that is stored packed must be decoded: while a module that owns it runs. A checkpoint calls its
modules again in backward and holds what they saved: then the weight is decoded until its gradient is complete.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves

from paredown.autograd.graph import tensors_in
from paredown.autograd.module_watch import Watch
from paredown.errors import TraceError
from paredown.predict.fake.fake_tensors import DeviceForms, FakeTensors, inner_tensors
from paredown.predict.saved_lifetimes import Recorder
from paredown.predict.timeline import Allocation, Timeline
from paredown.predict.token_modules import TracedCalls
from paredown.roles import Role

Span = tuple[int, int]
LOSS = "loss"  # phase of the loss, and name prefix of tensors that it saves
TRACING, IS_FAKE = "transformers.utils.import_utils", "is_fake_tensor"
NO_GRADIENT = "no gradient reaches the loss: every parameter is frozen, or the model runs under no_grad."
NO_LOSS, LOSS_EXAMPLE = "There is no loss", "loss=torch.nn.functional.cross_entropy"
ADVICE = "Fake tensors have shapes and no values: move that decision out of the model, or make it depend on shapes alone."


@dataclass(frozen=True)
class Arguments:
    """A batch split into what the model gets (`args`, `keywords`) and the `targets`, which only the loss gets."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    targets: tuple[Any, ...]

    @staticmethod
    def of(batch: Any, loss: Any) -> Arguments:
        """Return `batch` split: with a `loss`, the last item of a tuple is the target; all others go to the model."""
        if isinstance(loss, type) or not (loss is None or callable(loss)):
            given = f"the class {loss.__name__}: pass an instance, {loss.__name__}()" if isinstance(loss, type) else repr(loss)
            raise TraceError(f"loss is a function of the model's output and the target, such as {LOSS_EXAMPLE}, not {given}.")
        if isinstance(batch, dict):
            return Arguments((), batch, ())
        if not isinstance(batch, tuple | list):
            batch = (batch,)
        if loss is not None and len(batch) < 2:
            raise TraceError(
                f"with a loss the batch is (inputs..., target); it has {len(batch)} item. Add the target, or leave out the loss."
            )
        items = tuple(batch)
        return Arguments(items[:-1], {}, items[-1:]) if loss is not None else Arguments(items, {}, ())


@final
class Loss(nn.Module):
    """A module that calls a loss function, so that hooks on modules also see the tensors that the loss saves."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = (function,)

    def forward(self, *args: Any) -> Tensor:
        """Return the loss that the function computes from `args`."""
        return self._function[0](*args)


class ModuleRunTimes:
    """Records when modules that own parameters run, in ticks (positions of operations in the step).

    A weight that is stored packed must be decoded at these times.
    """

    def __init__(self, modules: Iterable[nn.Module], current_tick: Callable[[], int]) -> None:
        self._current_tick = current_tick
        self._modules = [module for module in modules if any(p is not None for p in module._parameters.values())]
        self._entered: dict[nn.Module, list[tuple[int, list[int]]]] = {module: [] for module in self._modules}
        self._spans: dict[int, list[Span]] = {id(p): [] for module in self._modules for p in module._parameters.values()}

    @contextmanager
    def recording(self) -> Generator[None]:
        """Return a context in which all calls of modules are recorded, those in forward and those in backward."""
        handles: list[Any] = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(self._enter))
            # always: torch.utils.checkpoint ends a second pass by an exception, as soon as all that backward needs is there
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def spans(self, parameter: Tensor) -> tuple[Span, ...]:
        """Return the spans (first and last operation) in which modules that own `parameter` run with it."""
        return merged(self._spans.get(id(parameter), ()))

    def _enter(self, module: nn.Module, args: Any) -> None:
        # a parameter that an adapter has replaced for this call is read outside of the module
        own = [id(p) for p in module._parameters.values() if id(p) in self._spans]
        self._entered[module].append((self._current_tick() + 1, own))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        entered, own = self._entered[module].pop()
        for key in own:
            self._spans[key].append((entered, max(entered, self._current_tick())))


class FakeStep:
    """Runs one training step on fake tensors, and holds the records from which its trace is built.

    `initial_tensors` has (name, role, tensor) of parameters, buffers and inputs. `gradient_complete_at` maps the id of a parameter to the
    operation (tick) at which its gradient is complete. `held` has allocations that exist when backward begins, though autograd's graph does
    not hold them.
    """

    def __init__(self, model: nn.Module, loss_module: nn.Module, fakes: FakeTensors, device: str) -> None:
        self.model, self.loss_module, self.fakes, self.device = model, loss_module, fakes, device
        self.device_forms = DeviceForms(device, fakes)
        self.timeline = Timeline(self._where, device=device)
        self.recorder = Recorder(self.timeline)
        self.module_runs = ModuleRunTimes(model.modules(), lambda: self.timeline.current_tick)
        self.traced_calls = TracedCalls(model, self.timeline, device)
        # from here on new fakes are made for tensors that the model uses and no module registers
        fakes.around = lambda: self.timeline.owned_by(Role.BUFFER)
        fakes.mode.place = lambda: self.timeline.module()
        self.watches: list[Watch] = []
        self.head: Any = None  # the output head, if its loss is computed in chunks (loss/output_head.py), else None
        self.view_outputs: Any = None  # hooks of sessions on modules (session/view_outputs.py), or None
        self.in_place_on_views: set[str] = set()  # modules that modified a view in place: autograd hides what that saves
        self.backward_at = self.returned_bytes = 0
        self.has_assumed_mask = False
        self.held: list[Allocation] = []
        self.initial_tensors: list[tuple[str, Role, Tensor]] = []
        self.gradient_complete_at: dict[int, int] = {}

    def _where(self) -> str:
        if self.timeline.phase == LOSS:
            return LOSS
        return self.watches[0].where() if self.watches else ""

    def run(
        self,
        arguments: Arguments,
        loss: Callable[..., Tensor] | None,
        autocast: torch.dtype | None,
        compiled: Callable[[Arguments], Any] | None = None,
    ) -> None:
        """Run forward, loss and backward on fake tensors.

        `loss` is None if the model returns its loss. `autocast` is the dtype of autocast, or None. `compiled` is a function that runs
        forward with torch.compile, or None in eager mode.
        """
        self._record_initial_tensors(arguments)
        with ExitStack() as stack:
            stack.callback(self.fakes.mode.forget)
            for context in (_without_fake_tensor_log(), self._square_masks_are_causal(), torch.enable_grad(), self.fakes.mode):
                stack.enter_context(context)
            if compiled is None:
                stack.enter_context(_masks_by_values())
            output: Any = None
            with self.device_forms.autocast(autocast):
                if compiled is not None:
                    with self._explained("forward"), signature_errors(self.model, arguments, "trace_step"):
                        output = compiled(arguments)
                for context in (torch.device("cpu"), self.device_forms, self.timeline):
                    stack.enter_context(context)
                if compiled is None:
                    with self._watched(self.model, "", backward=stack):
                        stack.enter_context(self.traced_calls.recording())
                        stack.enter_context(self.module_runs.recording())  # after the watch: what a module saved is packed first
                        with signature_errors(self.model, arguments, "trace_step"):
                            output = self.model(*arguments.args, **arguments.keywords)
                self.recorder.end_forward()
                value = self._loss(output, arguments, loss)
            if loss is None:
                live, output = self.timeline.live(), None
                self.returned_bytes = sum(allocation.nbytes for allocation in live if allocation.death is not None)
            self._record_held((output, value))
            self.backward_at = self.timeline.tick()
            self.timeline.phase = "backward"
            with self._explained("backward"), self._recording_gradients(), self.device_forms.autocast(None):
                value.backward()
            self._mark_gradients()

    @contextmanager
    def _recording_gradients(self) -> Generator[None]:
        """Return a context that records the operation (tick) at which each parameter's gradient is complete."""
        complete_at, timeline = self.gradient_complete_at, self.timeline

        def record(parameter: Tensor) -> None:
            complete_at.setdefault(id(parameter), timeline.current_tick)

        trained = [p for _, role, p in self.initial_tensors if role is Role.WEIGHT and p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(record) for p in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _square_masks_are_causal(self) -> Generator[None]:
        """Return a context in which nn.Transformer takes square attention masks to be causal.

        Otherwise it would compare the values of a mask, which fake tensors do not have.
        """
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

    def _record_held(self, returned: tuple[Any, ...]) -> None:
        """Record the tensors that exist before backward though neither autograd's graph nor `returned` holds them."""
        known = {unit.allocation for unit in self.recorder.units} | set(self.recorder.weight_casts)
        known |= {self.timeline.find(tensor) for tensor in tensors_in(returned)}
        self.held = [
            allocation
            for allocation in self.timeline.live()
            if allocation.owner is None and allocation.nbytes and allocation not in known
        ]

    def _record_initial_tensors(self, arguments: Arguments) -> None:
        for module in (self.model, self.loss_module):
            for name, p in module.named_parameters():
                parts = inner_tensors(p) or {"": p}
                self.initial_tensors += [
                    (f"{name}.{part}" if part else name, Role.WEIGHT, tensor) for part, tensor in parts.items()
                ]
            self.initial_tensors += [(name, Role.BUFFER, buffer) for name, buffer in module.named_buffers()]
        inputs = [t for t in tree_leaves((arguments.args, arguments.keywords, arguments.targets)) if isinstance(t, Tensor)]
        for number, tensor in enumerate(dict.fromkeys(inputs)):
            self.initial_tensors.append((f"input{number + 1}", Role.INPUT, tensor))
        for name, role, tensor in self.initial_tensors:
            if self.timeline.find(tensor) is None:
                self.timeline.add(tensor, op="", module=name.rpartition(".")[0], owner=role)

    @contextmanager
    def _watched(self, module: nn.Module, outside: str, backward: ExitStack | None = None) -> Generator[None]:
        """Return a context that records the tensors that `module` saves, under names that begin with `outside`.

        Its hooks stay until `backward` closes if reentrant checkpoints run layers again in backward; otherwise, and if it is None, they are
        removed at the end of the context.
        """
        watch = Watch(module, lambda saved: self.recorder.saved(saved, outside=outside), on_enter=self.recorder.entered)
        watch.checkpoints.store_by(self.recorder.second_pass)
        self.watches.append(watch)
        watch.attach()
        hooks = [part for part in (self.view_outputs, None if outside else self.head) if part is not None]
        for part in hooks:
            part.attach()  # in front of the hooks of the watch
        try:
            with self._explained(outside or "forward"):
                yield
        finally:
            self.watches.remove(watch)
            if backward is not None and watch.checkpoints.lacks_second_passes:
                backward.callback(watch.detach)
            else:
                watch.detach()
            self.in_place_on_views |= set() if outside else watch.in_place_on_views
            for part in hooks:
                part.detach()

    def _loss(self, output: Any, arguments: Arguments, loss: Callable[..., Tensor] | None) -> Tensor:
        if loss is None:
            return loss_of(output)
        self.timeline.phase = LOSS
        module = Loss(loss)
        with self._watched(module, LOSS):
            value = module(output, *arguments.targets)
        self.timeline.phase = "forward"
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TraceError(f"the loss is one number that backward starts from; this loss is {_describe(value)}.")
        if value.grad_fn is None:
            raise TraceError(NO_GRADIENT)
        return value

    @contextmanager
    def _explained(self, phase: str) -> Generator[None]:
        """Return a context that adds the module, the phase and the last operation to errors of the model's code."""
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            op = str(error.func).removeprefix("aten.").removesuffix(".default")
            causes = {"_local_scalar_dense": "reads a number out of a tensor (.item(), int(), bool(), an if on a tensor)"}
            cause = causes.get(op, f"calls {op}, whose result has a shape that depends on its values,")
            raise TraceError(f"{phase} of {self._place()} {cause} and that cannot be traced. {ADVICE}") from error
        except TraceError:
            raise
        except UnsupportedOperatorException as error:
            raise self._without_fake(phase, error.func) from error
        except Exception as error:
            if "no fake impl registered" in str(error):  # the message of torch.library.custom_op
                raise self._without_fake(phase, self.timeline.last_op) from error
            if "tensor subclasses" in str(error):  # the message of .numpy() on a fake tensor
                raise TraceError(f"{phase} of {self._place()} converts a tensor to NumPy (.numpy()). {ADVICE}") from error
            error.add_note(f"paredown: in the traced {phase} of {self._place()}, last operation {self.timeline.last_op!r}.")
            raise

    def _without_fake(self, phase: str, op: object) -> TraceError:
        place, advice = self._place(), "Register one with torch.library.register_fake."
        return TraceError(f"{phase} of {place} calls {op}, which has no implementation for fake tensors. {advice}")

    def _place(self) -> str:
        path = self.timeline.last_module
        return f"module {path!r}" if path else f"the model {type(self.model).__name__}"

    def _mark_gradients(self) -> None:
        for _, p in self.trained():
            allocation = self.timeline.find(p.grad) if p.grad is not None else None
            if allocation is not None and allocation.owner is None:
                allocation.owner = Role.GRADIENT
        self.held = [allocation for allocation in self.held if allocation.owner is not Role.GRADIENT]  # made before backward

    def trained(self) -> list[tuple[str, Tensor]]:
        """Return (name, parameter) of each parameter that got a gradient in the step."""
        return [(name, p) for name, role, p in self.initial_tensors if role is Role.WEIGHT and p.grad is not None]


@contextmanager
def signature_errors(model: nn.Module, arguments: Arguments, function: str) -> Generator[None]:
    """Return a context that turns a TypeError into a TraceError if forward of `model` cannot take `arguments`.

    `function` is the name of the function that the user called, for the message.
    """
    try:
        yield
    except TypeError as error:
        fault = _signature_fault(model, arguments)
        if not fault:
            raise
        has_targets = bool(arguments.targets) or len(arguments.args) < 2
        advice = f"pass the loss that takes it: {function}(..., {LOSS_EXAMPLE})"
        raise TraceError(fault if has_targets else f"{fault} {missing_loss(len(arguments.args), advice)}") from error


def _signature_fault(model: nn.Module, arguments: Arguments) -> str:
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # of a function without a signature
        return ""
    try:
        signature.bind(*arguments.args, **arguments.keywords)
    except TypeError as error:
        count = len(arguments.args)
        given = f"{count} positional argument{'s' * (count != 1)}" if count else f"the keywords {', '.join(arguments.keywords)}"
        return f"{type(model).__name__}.forward({', '.join(signature.parameters)}) cannot be called with {given}: {error}."
    return ""


def missing_loss(count: int, advice: str) -> str:
    """Return the error message for a step without a loss if the last of `count` parts of its batch may be the target.

    `advice` says how to give the loss.
    """
    return f"{NO_LOSS}, so the model is called with all {count} parts of the batch; if the last one is the target, {advice}."


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans (start, end) in order, with those joined that overlap or follow each other without a gap.

    >>> merged([(7, 9), (1, 4), (2, 3), (5, 5)])
    ((1, 5), (7, 9))
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model returned, as its output or as `.loss` of it; raise TraceError if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor):
        loss = output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TraceError(
            f"loss=None takes .loss of the model's output, or an output of one number; this is {_describe(output)}. Pass a loss."
        )
    if loss.grad_fn is None:
        raise TraceError(NO_GRADIENT)
    return loss


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def _masks_by_values() -> Generator[None]:
    """Return a context in which Hugging Face models read the values of masks and positions, as in a real step.

    If they see fake tensors, these models drop no mask, make further masks from positions, and repeat keys and values. In this context they
    read values that are known (tensor_values.py). Compiled models see fake tensors, and do make these masks.
    """
    module: Any = sys.modules.get(TRACING)
    before = getattr(module, IS_FAKE, None)
    if before is not None:
        setattr(module, IS_FAKE, lambda tensor: False)
    try:
        yield
    finally:
        if before is not None:
            setattr(module, IS_FAKE, before)


@contextmanager
def _without_fake_tensor_log() -> Generator[None]:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
