"""One forward pass whose saved tensors are held as they are, and can come back rounded: another format for every backward.

    board = HeldForward(model, seed=0)
    loss = board.forward(lambda: criterion(model(x), y))
    board.lower({"fc1:input": Format.parse("int4/64@bf16")})      # from now on backward gets this slot as it would be decoded
    torch.autograd.grad(loss, parameters, retain_graph=True)

Slots are those of a session. A pinned one goes no lower than its pin. One that a session would compute again from another is rounded by
itself: as if that other had the same format, nearly, and exact as long as it has none.

How rounding errors spread in one backward: energies on the edges of autograd's graph, and what an error on an edge does to gradients.

While an exact backward runs, a hook behind each node measures the energy |g|^2 of what comes in and of what goes out on each edge. A
node that saved a slot is called again with that slot rounded, and the energy of the difference is measured on each edge. Nothing else of
the backward is repeated, and its result is exact.

An error on an edge is then followed to the parameters, as if every node passed on relative errors as they are:

    worth(parameter) = 1 / |g_p|^2          worth(node) = sum over edges of |out_k|^2 / |in|^2 * worth(where k leads)
    error(slot)      = sum over nodes that saved it, and their edges, of |difference_k|^2 * worth(where k leads)

Where an edge leads to a parameter, as from a linear layer to its weight, this is exact. Elsewhere it is an estimate: `probe` scales it by
what it measures.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final
from zlib import crc32

import torch
from torch import Tensor, nn

from paredown.codec.packed import PackedTensor, encode_flat
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from paredown.plan.plan import Plan
from paredown.plan.storage import PINNED, Assignment, resolve_format
from paredown.session.activations import Activations
from paredown.session.stored_tensors import RecomputedValues, StoragePiece, StoredForm, StoredValues, as_flat
from paredown.trace.autograd_graph import ACCUMULATE, Saved
from paredown.trace.module_watch import Watch
from paredown.trace.operations import Needs, Pin, Use


@dataclass(eq=False)
class HeldSlot:
    """A slot: what waits for it, its exact values, and the nodes that saved it."""

    name: str
    op: str
    waiting: StoredValues | RecomputedValues
    exact: Tensor
    nodes: list[Any] = field(default_factory=list)
    pin: Pin | None = None
    is_centered: bool = False  # backward subtracts a mean from it
    rounded: dict[Format, PackedTensor] = field(default_factory=dict[Format, PackedTensor])  # what several nodes ask for one by one

    def given(self, format: Format) -> Format | None:
        """What a session would give where `format` is asked for."""
        dtype = str(self.exact.dtype).removeprefix("torch.")
        return resolve_format(
            Assignment(format), Needs(Use.VALUE, self.pin, self.is_centered), dtype=dtype, numel=self.exact.numel()
        )[0]

    def restore(self) -> None:
        """The exact values come back."""
        self.waiting.plain, self.waiting.version = self.exact, self.exact._version

    def lower(self, format: Format, seed: Seed, *, keeps: bool = False) -> None:
        """Values rounded to `format` come back; `keeps` them for the next time."""
        packed = self.rounded.get(format) or self.packed(format, seed)
        if keeps:
            self.rounded[format] = packed
        values = packed.decode()
        self.waiting.plain, self.waiting.version = values, values._version

    def packed(self, format: Format, seed: Seed) -> PackedTensor:
        """The exact values in `format`, as a session would round them."""
        return encode_flat(self.exact, format, Assignment(format).resolved_rounding, None, seed)


@final
class HeldForward:
    """Holds what one forward pass of `model` saves; `slots` are its slots by name, in the order of their saving."""

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self.slots: dict[str, HeldSlot] = {}
        self._seed = seed
        self._by_waiting: dict[StoredForm, HeldSlot] = {}
        self._activations = Activations(Plan.uniform(activation=PINNED), seed)
        self._activations.min_numel = 1
        self._activations.on_packed = self._note
        self._watch = Watch(model, self._activations.save, on_begin=self._begin, on_end=self._activations.end, min_numel=1)

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """What `run` returns, which calls the model; afterwards all slots are exact."""
        self._watch.attach()
        try:
            loss = run()
        finally:
            self._watch.detach()
        for held in self._by_waiting.values():
            if held.waiting.plain is None:  # others are held by the caller, and never packed
                self.slots.setdefault(held.name, held)
        self.restore()
        return loss

    def restore(self) -> None:
        """All slots come back exact."""
        for held in self._by_waiting.values():
            held.restore()

    def lower(self, formats: Mapping[str, Format], *, turn: int = 0) -> None:
        """These slots come back rounded, and all others exact; `turn` gives other random bits."""
        self.restore()
        for name, format in formats.items():
            found = self.slots[name].given(format)
            if found is not None:
                self.slots[name].lower(found, self.seed_of(name, turn))

    def close(self) -> None:
        """Let go of the graph and of all that it holds, at once: a weight that a graph holds cannot be packed."""
        for held in self._by_waiting.values():
            held.nodes.clear()
        self.slots.clear()
        self._by_waiting.clear()

    def seed_of(self, name: str, turn: int) -> Seed:
        """The seed of a slot's stochastic rounding."""
        return Seed(self._seed, crc32(name.encode()), turn)

    def _begin(self) -> bool:
        self._activations.begin(is_sharded=False)
        return True

    def _note(self, saved: Saved, piece: StoragePiece, waiting: StoredForm) -> None:
        if not isinstance(waiting, StoredValues | RecomputedValues):
            return
        held = self._by_waiting.get(waiting)
        if held is None:
            exact = as_flat(piece.storage, piece.tensor.dtype) if piece.is_whole else piece.flat().detach()
            self._by_waiting[waiting] = held = HeldSlot(saved.name, saved.op, waiting, exact)
        held.nodes.append(saved.node)
        if saved.pin is not None and (held.pin is None or saved.pin.significant_bits > held.pin.significant_bits):
            held.pin = saved.pin
        held.is_centered = held.is_centered or saved.is_centered


# --- How rounding errors spread in one backward ---

Energies = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class SlotRounding:
    """A slot in a format: `lower` makes backward see it so, `restore` as it was."""

    slot: str
    format: str
    lower: Callable[[], None]
    restore: Callable[[], None]


@dataclass(eq=False)
class NodeEnergies:
    """A node that ran: energies of what came in, of what went out, and of the differences by (slot, format)."""

    node: Any
    came: Tensor
    went: Energies
    differences: dict[tuple[str, str], Energies] = field(default_factory=dict)


class NoiseMeasurement:
    """Measures one exact backward. `trials`: for a node, the slots that it saved, in each format."""

    def __init__(self, trials: Mapping[Any, Sequence[SlotRounding]]) -> None:
        self._trials = trials
        self._passed: list[NodeEnergies] = []

    def backward(self, loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The exact gradients of `parameters`; the graph is kept."""
        handles = [node.register_hook(self._hook(node)) for node in nodes_behind(loss)]
        try:
            return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()

    def errors(self, parameters: Sequence[Tensor], energies: Sequence[float]) -> dict[tuple[str, str], tuple[float, float]]:
        """By slot and format: (the error of parameters that an edge leads to at once, the estimate of the others)."""
        own = {id(p): 1 / energy for p, energy in zip(parameters, energies, strict=True) if energy > 0}
        numbers = iter(_numbers(tensor for passed in self._passed for tensor in _tensors(passed)))
        read = [_Read.of(passed, numbers) for passed in self._passed]
        worth: dict[Any, float] = {}
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for row in reversed(read):  # parameters first
            targets = [edge for edge, _ in row.node.next_functions]
            values = [_worth(target, own, worth) for target in targets]
            if row.came > 0:
                worth[row.node] = sum(out / row.came * value for out, value in zip(row.went, values, strict=False))
            for place, energies_of in row.differences.items():
                direct, rest = found.get(place, (0.0, 0.0))
                for target, value, energy in zip(targets, values, energies_of, strict=False):
                    is_direct = target is not None and _parameter(target) is not None
                    direct, rest = (direct + energy * value, rest) if is_direct else (direct, rest + energy * value)
                found[place] = direct, rest
        return found

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        def measure(went: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> None:
            sums = [energy for energy in map(energy_of, came) if energy is not None]
            if not sums:
                return
            passed = NodeEnergies(node, torch.stack(sums).sum(), tuple(map(energy_of, went)))
            for trial in self._trials.get(node, ()):
                trial.lower()
                again = _called(node, came)
                trial.restore()
                passed.differences[trial.slot, trial.format] = tuple(
                    None if a is None or b is None else energy_of(_fitted(b, a) - a) for a, b in zip(went, again, strict=False)
                )
            self._passed.append(passed)

        return measure


@dataclass(frozen=True, eq=False)
class _Read:
    """`NodeEnergies` in numbers of Python."""

    node: Any
    came: float
    went: list[float]
    differences: dict[tuple[str, str], list[float]]

    @staticmethod
    def of(passed: NodeEnergies, numbers: Any) -> _Read:
        came = next(numbers)
        went = [0.0 if tensor is None else next(numbers) for tensor in passed.went]
        rows = {place: [0.0 if t is None else next(numbers) for t in row] for place, row in passed.differences.items()}
        return _Read(passed.node, came, went, rows)


def _tensors(passed: NodeEnergies) -> Iterable[Tensor]:
    rows = [(passed.came,), passed.went, *passed.differences.values()]
    return (tensor for row in rows for tensor in row if tensor is not None)


def _numbers(tensors: Iterable[Tensor]) -> list[float]:
    """Numbers of one element each, read at once."""
    found = list(tensors)
    return torch.stack(found).tolist() if found else []


def energy_of(tensor: Tensor | None) -> Tensor | None:
    """The sum of squares, on the device; None for no tensor and for integers."""
    if tensor is None or not tensor.is_floating_point():
        return None
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()


def nodes_behind(loss: Tensor) -> list[Any]:
    """All nodes that backward from `loss` may run, without those that accumulate gradients."""
    waiting, seen = [loss.grad_fn], dict[Any, None]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node.name() != ACCUMULATE:
            seen[node] = None
            waiting.extend(before for before, _ in node.next_functions)
    return list(seen)


def _called(node: Any, came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    with torch.no_grad():
        found = node.apply(*came) if is_custom else node(*came)
    return found if isinstance(found, tuple) else (found,)


def _fitted(tensor: Tensor, to: Tensor) -> Tensor:
    """Of the shape that the engine gave to a gradient: summed over what was broadcast."""
    return tensor if tensor.shape == to.shape else tensor.sum_to_size(to.shape)


PASSING = frozenset(("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "PermuteBackward0"))


def _parameter(node: Any) -> Tensor | None:
    """The parameter that an edge leads to through views and casts alone."""
    while node is not None and node.name() in PASSING:
        node = node.next_functions[0][0]
    return node.variable if node is not None and node.name() == ACCUMULATE else None


def _worth(node: Any, own: Mapping[int, float], worth: Mapping[Any, float]) -> float:
    if node is None:
        return 0.0
    return own.get(id(node.variable), 0.0) if node.name() == ACCUMULATE else worth.get(node, 0.0)
