"""Tiles: modules that act on tokens one by one run over pieces of the sequence, so that their temporaries are those of one piece.

A rule of `plan.tiles` names modules and a number of tokens. Inside a named module, the outermost modules are tiled that compute each token
of their output from this token alone: MLPs, norms, projections with adapters. A module's operations decide that when it is first called
(autograd/token_ops.py), not its name. Attention runs whole, and so does a single linear layer unless a rule names it, since its only large
tensors are its input and output.

    forward     each piece runs without gradients into its part of the output; autograd keeps the module's input alone
    backward    each piece runs again with gradients, and its backward at once; the input's gradient is written piece by piece

Gradients of parameters are summed over pieces in their dtype, in float32 for 16-bit parameters, and reach autograd once: hooks of
DistributedDataParallel, fully_shard and optimizers see one complete gradient. Sums are in another order than without tiles.

Under activation checkpointing of the layer around it, the input is saved before the first piece runs, so that a second forward pass that
needs nothing more ends there: of a transformer layer whose MLP is last, the MLP runs forward twice in a step, as without tiles. A tiled
module before the last one runs three times.

Packed frozen weights are decoded for each piece, one layer at a time: the decoded weights of an MLP are often larger than a piece's
temporaries. Under autocast weights are cast for each piece. Random bits, tensor arguments beside the input and second derivatives are
refused with a sentence, and torch.compile runs the modules whole.

A tiled call is `module._compiled_call_impl`, which torch calls in place of the module with its hooks, and leaves out of copies and pickles.
Hooks on modules inside are called for each piece.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from paredown.autograd.graph import has_storage
from paredown.autograd.hooks import is_dynamo_compiling, patched_attributes
from paredown.autograd.module_watch import Watch
from paredown.autograd.token_ops import OperationNames, mixes, reason_to_run_whole
from paredown.errors import ApplyError, PlanError
from paredown.plan.checkpointed_trace import is_inside, outermost
from paredown.plan.plan import TILED, Plan
from paredown.plan.tiled_trace import NONE_INSIDE
from paredown.session.changes import Change, SlotExplanation
from paredown.session.checkpointing import CheckpointedModules, callable_paths, frozen_statistics

WHOLE = "whole"
ROWS = "each token of its output depends on that token alone; pieces run again in backward"
ARGUMENTS = "it gets {} tensors, and only a module with one can run over pieces"
NO_TOKENS = "its input has no floating-point values of tokens, (..., tokens, features)"
SHARDED = "fully_shard manages its parameters by themselves: wrap the layer around it instead"
TAKEN = "module.compile() compiled it"
COMPILED = "torch.compile runs the model"
SHORT = "its sequences had no more tokens than a piece"
NOT_CALLED = "no forward pass with gradients has called it"
TWICE = (
    "module {!r} runs in tiles, whose gradients cannot be differentiated again (create_graph=True). Close the session, or leave the module "
    "out of plan.tiles."
)


class Reason(NamedTuple):
    """Says why a module runs whole, rather than over pieces of the sequence.

    `is_expected`: such modules, attention for example, never run in pieces, so a rule for the layer around them does not mean them.
    """

    text: str
    is_expected: bool = False


class TiledModules:
    """Makes the modules that `plan.tiles` names run over pieces of the sequence, so that their temporaries are smaller."""

    def __init__(self, plan: Plan, model: nn.Module, watch: Watch, checkpointed: CheckpointedModules) -> None:
        self._watch, self._checkpointed, self._local = watch, checkpointed, threading.local()
        self._calls: dict[str, TiledCall] = {}
        self._is_attached = False
        self._asked: dict[str, str] = {}  # path of a module that a rule matches -> text of the rule
        paths = dict(model.named_modules()) if plan.tiles else {}
        for text, length in plan.tiles:
            try:
                matches = outermost(paths, (text,), what="tile")
            except PlanError as error:
                raise ApplyError(f"{error} Correct it, or use a plan that was made for this model.") from None
            for path in (found for match in matches for found in callable_paths(match, paths[match])):
                self._add(path, paths[path], text, length)

    def _add(self, path: str, module: nn.Module, text: str, length: int) -> None:
        self._asked[path] = text
        for name, part in module.named_modules(prefix=path):
            is_alone = isinstance(part, nn.Linear) and part is not module
            if not is_alone and next(part.parameters(), None) is not None and not isinstance(part, torch.jit.ScriptModule):
                self._calls[name] = TiledCall(self, part, name, length)

    # --- calls ---

    def attach(self) -> None:
        """Replace the calls of the tiled modules, so that they run over pieces of the sequence."""
        self._is_attached = True
        for call in self._calls.values():
            call.attach()

    def detach(self) -> None:
        """Restore the calls of the tiled modules; backward of existing graphs still runs over pieces."""
        self._is_attached = False
        for call in self._calls.values():
            call.detach()

    @contextmanager
    def attached(self) -> Generator[None]:
        """Return a context in which modules run in pieces even after `detach`, for backward, which runs layers again."""
        added = [call for call in self._calls.values() if call.attach()]
        try:
            yield
        finally:
            for call in () if self._is_attached else added:
                call.detach()

    @property
    def is_running(self) -> bool:
        """Return whether this thread is running a module on one piece of a sequence, or is in the context of `paused`."""
        return getattr(self._local, "is_running", False)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Return a context in which modules called in this thread run on the whole sequence."""
        with patched_attributes(self._local, is_running=True):
            yield

    @contextmanager
    def pieces(self) -> Generator[None]:
        """Return a context to run a module on one piece: hooks ignore its submodules, which are not tiled or checkpointed."""
        with self.paused(), self._watch.passing_over(), self._checkpointed.paused():
            yield

    def check(self, asked: TiledCall) -> None:
        """Raise ApplyError if a rule names the module of `asked`, and no module in it can run over pieces of the sequence."""
        inside = [call for path, call in self._calls.items() if is_inside(path, asked.path)]
        if asked.path in self._asked and asked.whole is not None and not any(call.is_by_token for call in inside):
            why = next((call.whole.text for call in inside if call.whole is not None), "")
            raise ApplyError(NONE_INSIDE.format(self._asked[asked.path], f"{asked.path} has none, since {why}"))

    # --- what happened ---

    def changes(self, *, was_compiled: bool) -> Iterator[Change]:
        """Yield a `Change` for each module that should run over pieces of the sequence, and runs whole.

        `was_compiled`: whether torch.compile runs the model, so that no module runs in pieces.
        """
        for path, text in self._asked.items():
            inside = {name: call for name, call in self._calls.items() if is_inside(name, path)}
            length = TILED.format(next(iter(inside.values())).length) if inside else text
            if was_compiled or not any(call.was_called for call in inside.values()):
                yield Change(path, length, WHOLE, COMPILED if was_compiled else NOT_CALLED)
                continue
            for name, call in inside.items():
                others = [other for part, other in inside.items() if part != name and is_inside(part, name)]
                if call.whole is not None and not call.whole.is_expected and not any(other.was_called for other in others):
                    yield Change(name, length, WHOLE, call.whole.text)
            if not any(call.has_run for call in inside.values()) and any(call.is_short for call in inside.values()):
                yield Change(path, length, WHOLE, SHORT)

    def explain(self) -> list[SlotExplanation]:
        """Return a row for each module that ran over pieces of the sequence, and for each whose kind never does."""
        rows: list[SlotExplanation] = []
        for path, call in self._calls.items():
            asked = TILED.format(call.length)
            if call.has_run:
                rows.append(SlotExplanation(path, asked, asked, ROWS))
            elif call.whole is not None and call.whole.is_expected:
                rows.append(SlotExplanation(path, asked, WHOLE, call.whole.text))
        return rows


@final
class TiledCall:
    """Replaces the call of one module: runs the module over pieces of the sequence, or whole where it must.

    `whole` is the reason why a call ran whole; None as long as no call had to.
    """

    def __init__(self, tiles: TiledModules, module: nn.Module, path: str, length: int) -> None:
        self.tiles, self.path, self.length, self.module = tiles, path, length, weakref.ref(module)
        self.whole: Reason | None = None
        self.is_by_token = self.has_run = self.is_short = False
        self._reasons: dict[Any, Reason | None] = {}  # by the properties of a call that its operations can depend on

    def attach(self) -> bool:
        """Make the module run over pieces of the sequence; return False if it did before, or if its call cannot be replaced."""
        module = self.module()
        if module is None or module._compiled_call_impl is self:
            return False
        if module._compiled_call_impl is not None:
            self.whole = Reason(TAKEN)
            return False
        module._compiled_call_impl = self
        return True

    def detach(self) -> None:
        """Restore the module's own call, so that it runs on the whole sequence."""
        module = self.module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = None

    @property
    def was_called(self) -> bool:
        """Return whether a forward pass with gradients called the module, other than on a piece of an outer module's input."""
        return self.is_by_token or self.whole is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module over pieces of the sequence if this call allows it, otherwise whole, and return its output."""
        module = self.module()
        assert module is not None
        if self.tiles.is_running or is_dynamo_compiling() or not torch.is_grad_enabled():
            return module._call_impl(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not all(has_storage(value) and not isinstance(value, FakeTensor) for value in tensors):
            return module._call_impl(*args, **kwargs)
        reason = self._reason(module, tensors, args)
        if reason is not None:
            return self._whole(module, reason, args, kwargs)
        self.is_by_token, trained, x = True, [p for p in module.parameters() if p.requires_grad], args[0]
        if x.shape[-2] <= self.length or not (x.requires_grad or trained):
            self.is_short = self.is_short or x.shape[-2] <= self.length
            with self.tiles.paused():
                return module._call_impl(*args, **kwargs)
        self.has_run = True
        return self._tiled(module, x, trained, (args[1:], kwargs))

    def _whole(self, module: nn.Module, reason: Reason, args: Any, kwargs: Any) -> Any:
        """Run the module on the whole sequence and return its output; the first such call records the reason."""
        if self.whole is not None:
            return module._call_impl(*args, **kwargs)
        with OperationNames() as names:
            out = module._call_impl(*args, **kwargs)
        mixing = f", and applies {names.mixing}" if names.mixing and names.mixing not in reason.text else ""
        self.whole = reason._replace(text=f"{reason.text}{mixing}")
        self.tiles.check(self)
        return out

    def _reason(self, module: nn.Module, tensors: list[Tensor], args: tuple[Any, ...]) -> Reason | None:
        """Return why this call runs the module whole; None if it can run in pieces. `tensors`: all tensors among its arguments."""
        if len(tensors) != 1 or not args or args[0] is not tensors[0]:
            return Reason(ARGUMENTS.format(len(tensors)), is_expected=True)
        x = tensors[0]
        if x.dim() < 2 or not x.is_floating_point():
            return Reason(NO_TOKENS)
        key = (x.dtype, x.dim(), x.shape[-1], autocast_of(x), tuple(part.training for part in module.modules()))
        if key not in self._reasons:
            self._reasons[key] = self._measured_reason(module, x, args)
        return self._reasons[key]

    def _measured_reason(self, module: nn.Module, x: Tensor, args: tuple[Any, ...]) -> Reason | None:
        if any(isinstance(p, DTensor) for p in module.parameters()):
            return Reason(SHARDED)
        devices, autocast = [x.device] if x.is_cuda else [], uncached_autocast(*autocast_of(x))
        with self.tiles.pieces(), frozen_statistics(module), autocast, torch.random.fork_rng(devices=devices):
            text = reason_to_run_whole(module, x, lambda probe: module._call_impl(probe, *args[1:]))
        return Reason(text, is_expected=mixes(text)) if text else None

    def _tiled(self, module: nn.Module, x: Tensor, trained: list[nn.Parameter], rest: tuple[Any, Any]) -> Tensor:
        kept: Any = TileInput.apply(x, *trained)  # first: here a second forward pass that needs no output ends
        run = TileRun(self, module, rest, kept.grad_fn, x.requires_grad, autocast_of(x))
        with self.tiles.pieces(), run.autocast():
            run.out = output_of_pieces(run.of_piece, x, self.length)
        return Tiles.apply(run, kept, x, *trained)  # type: ignore[return-value]


class TileRun:
    """Holds what the backward of one call of a module that runs over pieces of the sequence needs beside the saved input.

    `rest`: the arguments of the call after the input. `saved`: the autograd node that holds the input. `out`: the output of the call, until
    `Tiles.forward` returns it.
    """

    def __init__(
        self,
        call: TiledCall,
        module: nn.Module,
        rest: tuple[Any, Any],
        saved: Any,
        needs_input: bool,
        autocast: tuple[str, bool, Any],
    ) -> None:
        self.call, self.module, self.rest, self.saved, self.needs_input = call, module, rest, saved, needs_input
        self._autocast = autocast
        self.out: Tensor | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context with the autocast settings that the module's call had in forward."""
        return uncached_autocast(*self._autocast)

    def of_piece(self, piece: Tensor) -> Any:
        """Return the output of the module for one piece of the sequence."""
        return self.module._call_impl(piece, *self.rest[0], **self.rest[1])

    def gradients(self, x: Tensor, gradient: Tensor, trained: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the input `x` and of the parameters `trained`, given the `gradient` of the output."""
        with self.call.tiles.pieces(), self.autocast():
            return gradients_of_pieces(self.of_piece, x, gradient, trained, length=self.call.length, needs_input=self.needs_input)


def pieces_of(x: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first position, values) of each piece of `length` tokens (dimension -2) of `x`."""
    for start in range(0, x.shape[-2], length):
        yield start, x.narrow(-2, start, min(length, x.shape[-2] - start)).contiguous()


@torch.no_grad()
def output_of_pieces(call: Callable[[Tensor], Any], x: Tensor, length: int) -> Tensor:
    """Return a module's output for `x`, computed in pieces of `length` tokens by `call`."""
    out: Any = None
    for start, piece in pieces_of(x, length):
        part = call(piece)
        if out is None:
            out = part.new_empty((*part.shape[:-2], x.shape[-2], part.shape[-1]))
        out.narrow(-2, start, part.shape[-2]).copy_(part)
        del part
    return out


@torch.enable_grad()
def gradients_of_pieces(
    call: Callable[[Tensor], Any], x: Tensor, gradient: Tensor, trained: list[Tensor], *, length: int, needs_input: bool
) -> list[Tensor | None]:
    """Return the gradients of `x` and of the parameters `trained`, given the `gradient` of a module's output.

    `call` returns the output for one piece of `length` tokens. `needs_input`: whether `x` needs a gradient.
    """
    of_input = torch.empty_like(x) if needs_input else None
    sums = GradientSums(trained, gradient)
    for start, piece in pieces_of(x.detach(), length):
        inputs = [piece.requires_grad_(), *trained] if needs_input else trained
        out: Any = call(piece)
        of_piece = gradient.narrow(-2, start, piece.shape[-2])
        found: list[Tensor | None] = [None] * len(inputs)
        if out.requires_grad:
            found[:] = torch.autograd.grad(out, inputs, of_piece, allow_unused=True)
        del out
        if of_input is not None:
            part = found.pop(0)
            with torch.no_grad():
                into = of_input.narrow(-2, start, piece.shape[-2])
                _ = into.zero_() if part is None else into.copy_(part)
            del part
        sums.add(found)
    return [of_input, *sums.results()]


class GradientSums:
    """Adds up gradients of parameters over the pieces of a sequence, in float32 for 16-bit parameters, else in their dtype."""

    def __init__(self, trained: list[Tensor], gradient: Tensor) -> None:
        self._trained, self._borrowed = trained, gradient.untyped_storage()._cdata
        self._sums: list[Tensor | None] = [None] * len(trained)

    @torch.no_grad()
    def add(self, gradients: list[Tensor | None]) -> None:
        """Add the gradients of one piece to the sums, and set the items of the list to None, which frees them."""
        for place in range(len(gradients)):
            gradient, gradients[place] = gradients[place], None
            held = self._sums[place]
            if gradient is not None and held is not None:
                held.add_(gradient)
            elif gradient is not None:
                wide = gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
                is_own = wide.is_contiguous() and wide.untyped_storage()._cdata != self._borrowed
                self._sums[place] = wide if is_own else wide.clone(memory_format=torch.contiguous_format)

    def results(self) -> Iterable[Tensor | None]:
        """Yield the sums, converted to the dtypes of the parameters."""
        for place, parameter in enumerate(self._trained):
            held, self._sums[place] = self._sums[place], None
            yield None if held is None else held.to(parameter.dtype)


@final
class TileInput(Function):
    """Saves the input of a module that runs over pieces of the sequence, as an autograd function.

    It returns an empty tensor, whose autograd node holds the input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *trained: Tensor) -> Tensor:
        """Save `x`, and return an empty tensor, which requires a gradient if `x` or a parameter in `trained` does."""
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return None for each input, since `Tiles` returns the gradients."""
        return (None,) * len(ctx.needs_input_grad)


@final
class Tiles(Function):
    """Returns the output of a module that runs over pieces of the sequence, and runs it again in backward, piece by piece."""

    @staticmethod
    def forward(ctx: Any, run: TileRun, kept: Tensor, x: Tensor, *trained: Tensor) -> Tensor:
        """Return the module's output, which is computed already; `kept` is the result of `TileInput`."""
        ctx.run, ctx.trained = run, trained
        out, run.out = run.out, None
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the input and of the parameters."""
        run: TileRun = ctx.run
        if torch.is_grad_enabled():
            raise ApplyError(TWICE.format(run.call.path))
        (x,) = run.saved.saved_tensors
        return None, None, *run.gradients(x, gradients[0], list(ctx.trained))


def autocast_of(x: Tensor) -> tuple[str, bool, Any]:
    """Return the device type of `x`, and whether and in which dtype autocast is on for it."""
    kind = x.device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def uncached_autocast(kind: str, is_enabled: bool, dtype: Any) -> AbstractContextManager[Any]:
    """Return an autocast context for a type of device (`kind`), without torch's cache of casts.

    With the cache, other modules would get casts of weights that were made without gradients.
    """
    return torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=False)
