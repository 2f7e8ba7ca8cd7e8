"""`probe` measures the gradient error that rounding each slot causes: one forward and at most 16 backward passes for hundreds of slots.

    1   An exact backward pass. Each node that saved a slot also runs with that slot rounded, in up to three formats (`probe_passes.py`);
        each format counts as a backward pass.
    2   The saved input of a linear or convolution layer affects only that layer's weight gradient: its error is exact after 1. Errors that
        propagate to other layers are estimates, which are corrected: neighbouring slots of one operation form a group, one backward
        pass with the whole group rounded measures the group's error, and it is divided in proportion to the estimates.

Squared errors of slots add up, so the error of a group is the sum of those of its slots. A group of one slot is measured directly: with few
slots all of them are. A slot that a session recomputes from another (`Slot.recomputed_from`) has an error of its own here, that of the
operations that saved it; with the other slot packed, it adds to the other slot's error.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from math import inf, isfinite, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.assignment.sensitivity import Sensitivities
from paredown.check.probe_passes import HeldForward, HeldSlot, NoiseMeasurement, SlotRounding, energy_of
from paredown.errors import ApplyError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.plan.storage import significant_bits
from paredown.plan.trace import Slot, Trace
from paredown.predict.fake.fake_step import Arguments, loss_of, signature_errors

FORMATS = ("int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16")
BACKWARDS = 16
MAX_FORMATS = 3  # most formats in which nodes run; errors of further formats are scaled by the squared rounding error of the values
MIN_ESTIMATED = 0.02  # a slot is corrected by groups if more than this share of its error is an estimate


def probe(
    model: nn.Module,
    batch: Any,
    trace: Trace,
    *,
    loss: Callable[..., Tensor] | None = None,
    formats: Sequence[str | Format] | None = None,
    backwards: int = BACKWARDS,
    seed: int = 0,
) -> Sensitivities:
    """Return the squared relative gradient errors that rounding single activations causes, by slot and format.

    An error is summed over parameters: |difference|^2 / |gradient|^2. `trace` is of this model, and `batch` and `loss` are those of
    `trace_step`; the batch may be smaller than the traced one, and should be if memory is short, since a probe packs nothing. `formats`
    None stands for FORMATS. `backwards` is the most backward passes to run, `seed` that of stochastic rounding. The model's gradients,
    buffers, mode and random states are afterwards the same as before.
    """
    checked = _checked_formats(formats, backwards, trace)
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ApplyError(
            "the model is sharded (fully_shard), and torch.autograd.grad returns no gradients of shards: probe it before it is sharded."
        )
    board, parameters = HeldForward(model, seed=seed), [p for p in model.parameters() if p.requires_grad]
    with restored_state(model), torch.enable_grad(), closing(board):
        value = board.forward(lambda: _loss(model, batch, trace, loss))
        slots = {slot.name: slot for slot in trace.activations if not slot.stays and slot.name in board.slots}
        if not slots:
            raise ApplyError(_nothing_in_common(trace, board))
        return Sensitivities(ProbeMeasurement(board, slots, value, parameters).errors(checked, backwards))


class ProbeMeasurement:
    """The measurements of `probe` after one forward pass: backward passes with different saved tensors rounded."""

    def __init__(self, board: HeldForward, slots: Mapping[str, Slot], loss: Tensor, parameters: Sequence[Tensor]) -> None:
        self.board, self.slots, self.loss, self.parameters = board, slots, loss, parameters
        self.trained: list[tuple[Tensor, Tensor]] = []  # parameters with a gradient, and the exact gradient
        self.energies: list[float] = []  # sums of squares of those gradients

    def errors(self, formats: Sequence[Format], backwards: int) -> dict[str, dict[str, float]]:
        """Return the squared relative gradient error of each slot (saved tensor) in each format, by name and format.

        At most `backwards` backward passes run; errors in formats that they leave out are estimated.
        """
        called = formats if len(formats) <= min(MAX_FORMATS, backwards - 1) else [_middle(formats)]
        noise = NoiseMeasurement(self._trials(called))
        exact = noise.backward(self.loss, self.parameters)
        for held in self.board.slots.values():
            held.rounded.clear()
        self.trained = [(p, g) for p, g in zip(self.parameters, exact, strict=True) if g is not None]
        self.energies = torch.stack([_energy(g) for _, g in self.trained]).double().tolist()
        if not all(map(isfinite, self.energies)):
            raise ApplyError(
                "the gradients of this batch are not finite without any rounding: there is nothing to compare with. Use another batch."
            )
        parts = noise.errors([p for p, _ in self.trained], self.energies)
        middle = _middle(called)
        at_middle = {name: parts.get((name, str(middle)), (0.0, 0.0)) for name in self.slots}
        scales = self._scales(at_middle, middle, backwards - 1 - len(called))
        errors = {
            name: {str(f): sum(parts.get((name, str(f)), (0.0, 0.0))) * scales.get(name, 1.0) for f in called}
            for name in self.slots
        }
        self._extend(errors, middle, [format for format in formats if format not in called])
        return {name: {text: inf if isnan(error) else error for text, error in row.items()} for name, row in errors.items()}

    def _trials(self, formats: Sequence[Format]) -> dict[Any, list[SlotRounding]]:
        trials: dict[Any, list[SlotRounding]] = defaultdict(list)
        for name in self.slots:
            held = self.board.slots[name]
            for format in formats:
                resolved = held.resolved(format)
                if resolved is not None:
                    round_slot = partial(held.round, resolved, self.board.seed_of(name, 0), keeps=True)
                    for node in dict.fromkeys(held.nodes):
                        trials[node].append(SlotRounding(name, str(format), round_slot, held.restore))
        return trials

    def _scales(self, parts: Mapping[str, tuple[float, float]], format: Format, backwards: int) -> dict[str, float]:
        """Return factors by which estimated errors of saved tensors are corrected.

        They come from at most `backwards` passes, each with a group of tensors rounded. `parts` has, for each tensor, the (exact,
        estimated) parts of its error in `format`.
        """
        estimates = [name for name, (direct, rest) in parts.items() if rest > MIN_ESTIMATED * (direct + rest)]
        scales: dict[str, float] = {}
        alone = sorted(estimates, key=lambda name: -sum(parts[name]))[: backwards // 3]
        others = {name: self.board.slots[name].op for name in estimates if name not in alone}
        for group in [*([name] for name in alone), *groups(others, max(backwards, 0) - len(alone))]:
            measured, estimated = self.error_of(group, format), sum(sum(parts[name]) for name in group)
            scales.update(dict.fromkeys(group, measured / estimated if estimated > 0 else 1.0))
        return scales

    def error_of(self, names: Iterable[str], format: Format) -> float:
        """Return the squared relative gradient error if the saved tensors `names` are rounded to `format` together."""
        self.board.round(dict.fromkeys(names, format), turn=1)
        gradients = torch.autograd.grad(self.loss, [p for p, _ in self.trained], retain_graph=True)
        self.board.restore()
        parts = torch.stack([_energy(g - exact) for g, (_, exact) in zip(gradients, self.trained, strict=True)]).double()
        return sum(part / whole for part, whole in zip(parts.tolist(), self.energies, strict=True) if whole > 0)

    def _extend(self, errors: Mapping[str, dict[str, float]], known: Format, formats: Sequence[Format]) -> None:
        """Add estimated errors in `formats` that were not measured, in proportion to the rounding errors of the values.

        `errors` maps saved tensors to their error by format; all of them were measured in the format `known`.
        """
        for name, row in errors.items() if formats else ():
            held = self.board.slots[name]
            base = self._rounding_error(held, known)
            for format in formats:
                row[str(format)] = row[str(known)] * (self._rounding_error(held, format) / base if base > 0 else 1.0)

    def _rounding_error(self, held: HeldSlot, format: Format) -> float:
        resolved = held.resolved(format)
        if resolved is None:
            return 0.0
        decoded = held.encode(resolved, self.board.seed_of(held.name, 0)).decode()
        return float(_energy(decoded.float() - held.exact.float()))


def groups(ops: Mapping[str, str], count: int) -> list[list[str]]:
    """Return at most `count` groups of saved tensors, about equally large, each of neighbours that one operation saved.

    `ops` maps the name of each tensor to the operation that saved it. If there are more operations than groups, the rarest share one.

    >>> groups({"a": "norm", "b": "gelu", "c": "norm", "d": "norm", "e": "gelu"}, 3)
    [['a'], ['c', 'd'], ['b', 'e']]
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, op in ops.items():
        kinds[op].append(name)
    if not count:
        return []
    if len(kinds) > count:  # the rarest are one group
        rare = sorted(kinds, key=lambda op: len(kinds[op]))[: len(kinds) - count + 1]
        kinds["others"] = [name for op in rare for name in kinds.pop(op)]
    parts = dict.fromkeys(kinds, 1)
    for _ in range(min(count, len(ops)) - len(kinds)):
        parts[max(parts, key=lambda op: len(kinds[op]) / parts[op])] += 1
    return [
        names[i * len(names) // n : (i + 1) * len(names) // n] for op, names in kinds.items() for n in [parts[op]] for i in range(n)
    ]


@contextmanager
def restored_state(model: nn.Module) -> Generator[None]:
    """Return a context that restores the model's buffers and torch's random states when it ends."""
    named = ((module._buffers, name, b) for module in model.modules() for name, b in module._buffers.items())
    saved = [(buffers, name, b, b.clone()) for buffers, name, b in named if b is not None]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for buffers, name, buffer, copy in saved:
                buffers[name] = buffer
                buffer.data.copy_(copy)  # does not change the version counter: the backward of another graph may need the buffer


def _loss(model: nn.Module, batch: Any, trace: Trace, loss: Callable[..., Tensor] | None) -> Tensor:
    arguments = Arguments.of(dict(batch) if isinstance(batch, Mapping) else batch, loss)
    device = next((p.device.type for p in model.parameters()), "cpu")
    dtype = getattr(torch, trace.dtype)
    dtypes = {p.dtype for p in model.parameters()}
    with ExitStack() as stack:
        if dtype not in dtypes and not torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, dtype))
        with signature_errors(model, arguments, "probe"):
            output = model(*arguments.args, **arguments.keywords)
        return loss(output, *arguments.targets) if loss is not None else loss_of(output)


def _checked_formats(formats: Sequence[str | Format] | None, backwards: int, trace: Any) -> list[Format]:
    if not isinstance(trace, Trace):
        raise ApplyError(
            f"probe takes a model, a batch and a Trace, not {type(trace).__name__}: probe(model, batch, trace_step(model, batch))."
        )
    if type(backwards) is not int or backwards < 2:
        raise ApplyError(f"backwards is {backwards!r}; it must be 2 or more: an exact backward pass, and one with slots rounded.")
    if formats is not None and (isinstance(formats, str | Format) or not formats):
        raise ApplyError(f"formats is {formats!r}; it must be a list of formats, such as {list(FORMATS)!r}.")
    return list(dict.fromkeys(find_format(format) for format in formats or FORMATS))


def _nothing_in_common(trace: Trace, board: HeldForward) -> str:
    if not board.slots:
        return (
            "the forward pass of this batch saved nothing that a probe can round: all parameters are frozen, the batch is tiny, or the "
            "model has an open session (then session.reprobe(batch) of a session with a guard probes it)."
        )
    first = ", ".join(repr(name) for name in list(board.slots)[:3])
    return (
        f"none of the {len(trace.activations)} activations of the trace of {trace.model} was saved by this model, which has "
        f"{len(board.slots)} ({first}, ...). Trace the model that is probed; one with an open session is probed by session.reprobe(batch)."
    )


def _middle(formats: Sequence[Format]) -> Format:
    return sorted(formats, key=lambda format: -significant_bits(format))[len(formats) // 2]


def _energy(tensor: Tensor) -> Tensor:
    energy = energy_of(tensor)
    assert energy is not None
    return energy
