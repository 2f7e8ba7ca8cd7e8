"""`token_modules` finds the modules of a traced step that can run over pieces of the sequence, and the memory of a piece.

`TracedCalls` records each call of a module with gradients: the ticks of its forward and of its backward, and its arguments. After the step,
each module that was called once runs the operations of a session (session/tiles.py) on fake tensors: first those that decide whether it
acts on tokens one by one, then the forward and second pass of two pieces, for two lengths of a piece. The bytes at each tick grow linearly
with the number of tokens, so that two lengths determine them for all lengths. Modules of the same class, sizes and arguments are looked at
once.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paredown.autograd.token_ops import PRIMES, reason_to_run_whole
from paredown.plan.trace import PieceBytes, TokenModule
from paredown.predict.timeline import Timeline
from paredown.roles import Role
from paredown.session.checkpointing import frozen_statistics
from paredown.session.tiles import ARGUMENTS, NO_TOKENS, gradients_of_pieces, output_of_pieces

PLAIN = (bool, int, float, str, torch.dtype, type(None))
OTHER_ARGUMENTS = "it gets arguments that are no tensors, numbers or texts"
IN_BACKWARD = "the model checkpoints it itself: let the plan do that (plan.recomputing), and tiles are counted"
NOT_ALIKE = "pieces of different lengths call different operations"
LENGTHS = PRIMES[4], PRIMES[12]  # tokens of pieces


class InputShape(NamedTuple):
    """The shape and dtype of a module's input tensor, and whether the input requires a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class TracedCall:
    """A record of one call of a module: when it ran, the numbers of its autograd nodes, and its arguments.

    `x` describes the module's input, if the module gets exactly one tensor, as first argument; else it is None. `rest` are its other
    arguments. `num_tensors` counts the tensors among all arguments, and is -1 if there are values of other types than numbers and texts.
    """

    module: nn.Module
    start: int
    first_node: int
    num_tensors: int
    x: InputShape | None
    rest: tuple[Any, Any]
    autocast: tuple[bool, torch.dtype]
    end: int = -1
    last_node: int = -1


class TracedCalls:
    """Records the calls of modules with parameters in the forward pass of a traced step.

    `device` is the device for which the step is traced. `token_modules` decides by the calls which modules can run in pieces.
    """

    def __init__(self, model: nn.Module, timeline: Timeline, device: str) -> None:
        self._paths = {module: path for path, module in model.named_modules() if path}
        self._timeline, self._device, self._open = timeline, device, dict[nn.Module, TracedCall]()
        self.calls: dict[str, list[TracedCall]] = {}
        self.called_again: set[str] = set()  # modules that a checkpoint of the model's own runs again

    @contextmanager
    def recording(self) -> Generator[None]:
        """Return a context in which calls of modules are recorded."""
        handles: list[Any] = []
        for module in self._paths:
            if next(module.parameters(), None) is not None and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._timeline.phase == "backward":
            self.called_again.add(self._paths[module])
        if self._timeline.phase != "forward" or not torch.is_grad_enabled():
            return
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        is_first = len(tensors) == 1 and bool(args) and args[0] is tensors[0]
        x = InputShape(tuple(tensors[0].shape), tensors[0].dtype, tensors[0].requires_grad) if is_first else None
        autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        place = self._timeline.current_tick + 1, torch._C._autograd._get_sequence_nr()
        call = TracedCall(module, *place, len(tensors), x, (args[1:], kwargs) if is_first else ((), {}), autocast)
        is_plain = all(isinstance(value, PLAIN) for value in tree_leaves(call.rest))
        self._open[module] = call if is_plain else TracedCall(module, *place, -1, None, ((), {}), autocast)
        self.calls.setdefault(self._paths[module], []).append(self._open[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open.pop(module, None)
        if call is not None:
            call.end, call.last_node = max(call.start, self._timeline.current_tick), torch._C._autograd._get_sequence_nr()


def token_modules(step: Any, known: dict[Any, str | tuple[PieceBytes, PieceBytes]]) -> tuple[TokenModule, ...]:
    """Return, for each module that a step called once, whether it can run over pieces, and the memory of a piece.

    Pieces are parts of the sequence. `step` must be a `FakeStep` that has run. `known` caches results for further traces of the same model.
    """
    calls = {path: made[0] for path, made in step.traced_calls.calls.items() if len(made) == 1 and made[0].end >= 0}
    again = step.traced_calls.called_again
    places = step.fakes.mode.places.copy()
    rows = [TokenModule(path, whole=IN_BACKWARD) for path in sorted(again - set(calls))]
    for path, call in calls.items():
        key = _key(call)
        if key not in known and path not in again:
            known[key] = _pieces(step, call)
        found = IN_BACKWARD if path in again else known[key]
        spans = [span for node, span in step.timeline.node_ticks.items() if call.first_node <= node < call.last_node]
        is_alone = isinstance(call.module, nn.Linear)
        if isinstance(found, str) or call.x is None or not spans:
            rows.append(TokenModule(path, is_alone, found if isinstance(found, str) else NO_TOKENS))
            continue
        backward = min(first for first, _ in spans), max(last for _, last in spans)
        ticks = (call.start, call.end), backward
        rows.append(TokenModule(path, is_alone, "", call.x.shape[-2], *ticks, *found))
    step.fakes.mode.places = places
    return tuple(rows)


def _key(call: TracedCall) -> Any:
    """Return a key that is equal for calls whose modules allocate the same memory, so that one of them is measured."""
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in call.module.named_parameters())
    training = tuple(part.training for part in call.module.modules())
    return type(call.module), repr(call.module), parameters, call.x, call.num_tensors, repr(call.rest), call.autocast, training


def _pieces(step: Any, call: TracedCall) -> str | tuple[PieceBytes, PieceBytes]:
    """Return the bytes of a piece of the sequence, in forward and in backward, or why the module must run whole."""
    if call.x is None:
        return OTHER_ARGUMENTS if call.num_tensors < 0 else ARGUMENTS.format(call.num_tensors)
    if len(call.x.shape) < 2 or not call.x.dtype.is_floating_point:
        return NO_TOKENS

    def run(piece: Tensor) -> Any:
        return call.module._call_impl(piece, *call.rest[0], **call.rest[1])

    is_enabled, dtype = call.autocast
    with step.fakes.mode, step.device_forms.autocast(dtype if is_enabled else None), frozen_statistics(call.module):
        uncached = torch.autocast("cpu", dtype=dtype, enabled=is_enabled, cache_enabled=False)
        with torch.device("cpu"), step.device_forms, uncached:
            example = torch.empty(call.x.shape, dtype=call.x.dtype)
            reason = reason_to_run_whole(call.module, example, run)
            if reason:
                return reason
            held = [_held(step, call, run, length) for length in LENGTHS]
    (forward, backward), (more_forward, more_backward) = held
    if (len(forward), len(backward)) != (len(more_forward), len(more_backward)):
        return NOT_ALIKE
    return _piece_bytes(forward, more_forward), _piece_bytes(backward, more_backward)


def _held(step: Any, call: TracedCall, run: Callable[[Tensor], Tensor], length: int) -> tuple[list[int], list[int]]:
    """Return the bytes at each operation if two pieces of `length` tokens run, as two lists: forward and backward.

    Inputs, outputs and gradients of the whole sequence are left out.
    """
    assert call.x is not None
    shape = (*call.x.shape[:-2], 2 * length, call.x.shape[-1])
    x, trained = torch.empty(shape, dtype=call.x.dtype), list[Tensor](p for p in call.module.parameters() if p.requires_grad)
    there = [x, *call.module.parameters(), *call.module.buffers()]
    forward, (out,) = _bytes_by_tick(step, there, lambda: [output_of_pieces(run, x, length)])
    gradient, needs_input = torch.empty_like(out), call.x.requires_grad
    if not (needs_input or trained):
        return forward, [0]

    def gradients() -> list[Tensor | None]:
        return gradients_of_pieces(run, x, gradient, trained, length=length, needs_input=needs_input)

    return forward, _bytes_by_tick(step, [*there, gradient], gradients)[0]


def _bytes_by_tick(step: Any, there: list[Tensor], run: Callable[[], list[Any]]) -> tuple[list[int], list[Any]]:
    """Return (bytes at each operation while `run()` runs, its results); bytes of the first result are left out.

    `there` are tensors that exist before the call and do not count.
    """
    timeline = Timeline(str, device=step.device)
    for tensor in there:
        if timeline.find(tensor) is None:
            timeline.add(tensor, op="", module="", owner=Role.WEIGHT)
    with timeline:
        results = run()
    end = timeline.tick()
    whole = timeline.find(results[0]) if results[0] is not None else None
    totals = [0] * (end + 2)
    for allocation in timeline.allocations:
        if allocation is not whole and allocation.owner is None:
            death = end if allocation.death is None else allocation.death
            for tick in range(allocation.birth, death + 1):
                totals[tick] += allocation.nbytes
    return totals, results


def _piece_bytes(held: list[int], more: list[int]) -> PieceBytes:
    """Return (fixed bytes, bytes per token) of each operation that may be the peak of a piece of some length.

    `held` and `more` are the bytes at each operation for the shorter and the longer piece of LENGTHS.
    """
    pairs: set[tuple[int, int]] = set()
    for few, many in zip(held, more, strict=True):
        by_token = max(0, -(-(many - few) // (LENGTHS[1] - LENGTHS[0])))
        pairs.add((max(0, few - by_token * LENGTHS[0]), by_token))
    return tuple(sorted(p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs)))
