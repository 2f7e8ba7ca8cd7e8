"""`probe` measures what rounding each slot does to gradients: one forward pass, at most 16 backwards, for hundreds of slots.

    1   the exact backward; each node that saved a slot is called again, alone, with it rounded, in each of up to three formats
    (probe_passes.py):
        that counts as a backward each
    2   what a linear or convolution layer has of its input reaches nothing but its own weight: that error is known then. Where errors
        go on to other layers they were estimated, and are put right: slots of one operation and depth are a group, a backward with the
        whole group rounded tells the group's error, and each slot has its share of it by its estimate

Errors add up over slots, so that the sum of a group is what its slots are worth together. A group of one is measured outright: with few
slots all of them are. A slot that a session computes again from another (`Slot.recomputed_from`) has its own error here, that of its own
savers: with the other packed, it is what that one's format adds to that one's own error.
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

from paredown.assign.sensitivity import Sensitivities
from paredown.errors import ApplyError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.plan.storage import significant_bits
from paredown.session.probe_passes import HeldForward, HeldSlot, NoiseMeasurement, SlotRounding, energy_of
from paredown.trace.fake_step import Arguments, _loss_of, note_missing_loss
from paredown.trace.trace import Slot, Trace

FORMATS = ("int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16")
BACKWARDS = 16
CALLED = 3  # formats in which nodes are called again; others follow by the energy of the rounding error alone
FLOWS = 0.02  # a slot is put in a group if more than this share of its error is an estimate


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
    """The squared relative gradient error of each activation of `trace` in each of `formats`, rounded alone.

    `batch` and `loss` are as in `trace_step`; a smaller batch than the one that was traced will do, and should be small where memory is
    short, for nothing is packed meanwhile. The model is afterwards what it was: gradients, buffers, mode and random states.
    """
    wanted = _checked(formats, backwards, trace)
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ApplyError(
            "the model is sharded (fully_shard), and gradients of shards come by hooks alone: probe it before it is sharded."
        )
    board, parameters = HeldForward(model, seed=seed), [p for p in model.parameters() if p.requires_grad]
    with restored_state(model), torch.enable_grad(), closing(board):
        value = board.forward(lambda: _loss(model, batch, trace, loss))
        slots = {slot.name: slot for slot in trace.activations if not slot.stays and slot.name in board.slots}
        if not slots:
            raise ApplyError(_nothing_in_common(trace, board))
        return Sensitivities(ProbeMeasurement(board, slots, value, parameters).errors(wanted, backwards))


class ProbeMeasurement:
    """The backwards of one probe."""

    def __init__(self, board: HeldForward, slots: Mapping[str, Slot], loss: Tensor, parameters: Sequence[Tensor]) -> None:
        self.board, self.slots, self.loss, self.parameters = board, slots, loss, parameters
        self.trained: list[tuple[Tensor, Tensor]] = []  # with its exact gradient
        self.energies: list[float] = []  # of those

    def errors(self, formats: Sequence[Format], backwards: int) -> dict[str, dict[str, float]]:
        """By slot and format."""
        called = formats if len(formats) <= min(CALLED, backwards - 1) else [_middle(formats)]
        noise = NoiseMeasurement(self._trials(called))
        exact = noise.backward(self.loss, self.parameters)
        for held in self.board.slots.values():
            held.rounded.clear()
        self.trained = [(p, g) for p, g in zip(self.parameters, exact, strict=True) if g is not None]
        self.energies = torch.stack([_energy(g) for _, g in self.trained]).double().tolist()
        if not all(map(isfinite, self.energies)):
            raise ApplyError("the gradients of this batch are not finite without any rounding: there is nothing to compare with.")
        parts = noise.errors([p for p, _ in self.trained], self.energies)
        middle = _middle(called)
        at_middle = {name: parts.get((name, str(middle)), (0.0, 0.0)) for name in self.slots}
        scales = self._scales(at_middle, middle, backwards - 1 - len(called))
        found = {
            name: {str(f): sum(parts.get((name, str(f)), (0.0, 0.0))) * scales.get(name, 1.0) for f in called}
            for name in self.slots
        }
        self._extend(found, middle, [format for format in formats if format not in called])
        return {name: {text: inf if isnan(error) else error for text, error in row.items()} for name, row in found.items()}

    def _trials(self, formats: Sequence[Format]) -> dict[Any, list[SlotRounding]]:
        """For each node, what to round before it is called again."""
        trials: dict[Any, list[SlotRounding]] = defaultdict(list)
        for name in self.slots:
            held = self.board.slots[name]
            for format in formats:
                there = held.given(format)
                if there is not None:
                    lower = partial(held.lower, there, self.board.seed_of(name, 0), keeps=True)
                    for node in dict.fromkeys(held.nodes):
                        trials[node].append(SlotRounding(name, str(format), lower, held.restore))
        return trials

    def _scales(self, parts: Mapping[str, tuple[float, float]], format: Format, backwards: int) -> dict[str, float]:
        """By what to multiply estimates, from backwards of whole groups."""
        flowing = [name for name, (direct, rest) in parts.items() if rest > FLOWS * (direct + rest)]
        scales: dict[str, float] = {}
        alone = sorted(flowing, key=lambda name: -sum(parts[name]))[: backwards // 3]
        others = {name: self.board.slots[name].op for name in flowing if name not in alone}
        for group in [*([name] for name in alone), *groups(others, max(backwards, 0) - len(alone))]:
            measured, estimated = self.error_of(group, format), sum(sum(parts[name]) for name in group)
            scales.update(dict.fromkeys(group, measured / estimated if estimated > 0 else 1.0))
        return scales

    def error_of(self, names: Iterable[str], format: Format) -> float:
        """The error of these slots together, by a backward."""
        self.board.lower(dict.fromkeys(names, format), turn=1)
        again = torch.autograd.grad(self.loss, [p for p, _ in self.trained], retain_graph=True)
        self.board.restore()
        parts = torch.stack([_energy(g - exact) for g, (_, exact) in zip(again, self.trained, strict=True)]).double()
        return sum(part / whole for part, whole in zip(parts.tolist(), self.energies, strict=True) if whole > 0)

    def _extend(self, found: Mapping[str, dict[str, float]], known: Format, formats: Sequence[Format]) -> None:
        """Other formats, by how much larger the rounding error of the values themselves is."""
        for name, row in found.items() if formats else ():
            held = self.board.slots[name]
            base = self._rounding_error(held, known)
            for format in formats:
                row[str(format)] = row[str(known)] * (self._rounding_error(held, format) / base if base > 0 else 1.0)

    def _rounding_error(self, held: HeldSlot, format: Format) -> float:
        there = held.given(format)
        if there is None:
            return 0.0
        decoded = held.packed(there, self.board.seed_of(held.name, 0)).decode()
        return float(_energy(decoded.float() - held.exact.float()))


def groups(ops: Mapping[str, str], count: int) -> list[list[str]]:
    """Slots of one operation, next to each other in the order of the forward pass; at most `count` groups, of about equal size.

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
    """A context after which buffers and random states are what they were."""
    named = ((module._buffers, name, b) for module in model.modules() for name, b in module._buffers.items())
    there = [(buffers, name, b, b.clone()) for buffers, name, b in named if b is not None]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for buffers, name, buffer, copy in there:
                buffers[name] = buffer
                buffer.data.copy_(copy)  # not counted as a modification: another graph may be waiting for its backward


def _loss(model: nn.Module, batch: Any, trace: Trace, loss: Callable[..., Tensor] | None) -> Tensor:
    given = Arguments.of(dict(batch) if isinstance(batch, Mapping) else batch, has_loss=loss is not None)
    device = next((p.device.type for p in model.parameters()), "cpu")
    dtype = getattr(torch, trace.dtype)
    own = {p.dtype for p in model.parameters()}
    with ExitStack() as stack:
        if dtype not in own and not torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, dtype))
        try:
            output = model(*given.args, **given.keywords)
        except TypeError as error:
            note_missing_loss(error, "probe")
            raise
        return loss(output, *given.targets) if loss is not None else _loss_of(output)


def _checked(formats: Sequence[str | Format] | None, backwards: int, trace: Any) -> list[Format]:
    if not isinstance(trace, Trace):
        raise ApplyError(
            f"probe takes a model, a batch and a Trace, not {type(trace).__name__}: probe(model, batch, trace_step(model, batch))."
        )
    if type(backwards) is not int or backwards < 2:
        raise ApplyError(f"backwards is {backwards!r}; a probe takes 2 or more: an exact one, and one with slots rounded.")
    if formats is not None and (isinstance(formats, str | Format) or not formats):
        raise ApplyError(f"formats is {formats!r}; give a list of them, such as {list(FORMATS)!r}.")
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
    found = energy_of(tensor)
    assert found is not None
    return found
