"""One forward pass whose saved tensors are held as they are, and can come back rounded: another format for every backward.

    board = Board(model, seed=0)
    loss = board.forward(lambda: criterion(model(x), y))
    board.lower({"fc1:input": Format.parse("int4/64@bf16")})      # from now on backward gets this slot as it would be decoded
    torch.autograd.grad(loss, parameters, retain_graph=True)

Slots are those of a session. A pinned one goes no lower than its pin. One that a session would compute again from another is rounded by
itself: as if that other had the same format, nearly, and exact as long as it has none.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final
from zlib import crc32

from torch import Tensor, nn

from paredown.codec.packed import PackedTensor, encode_flat
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from paredown.plan.assignment import Assignment
from paredown.plan.given import PINNED, given
from paredown.plan.graph import Saved
from paredown.plan.ops import Needs, Pin, Use
from paredown.plan.plan import Plan
from paredown.plan.watch import Watch
from paredown.session.stored import Activations
from paredown.session.waiting import Piece, Recomputed, Values, Waiting, as_flat


@dataclass(eq=False)
class Held:
    """A slot: what waits for it, its exact values, and the nodes that saved it."""

    name: str
    op: str
    waiting: Values | Recomputed
    exact: Tensor
    nodes: list[Any] = field(default_factory=list)
    pin: Pin | None = None
    is_centered: bool = False  # backward subtracts a mean from it
    rounded: dict[Format, PackedTensor] = field(default_factory=dict[Format, PackedTensor])  # what several nodes ask for one by one

    def given(self, format: Format) -> Format | None:
        """What a session would give where `format` is asked for."""
        dtype = str(self.exact.dtype).removeprefix("torch.")
        return given(Assignment(format), Needs(Use.VALUE, self.pin, self.is_centered), dtype=dtype, numel=self.exact.numel())[0]

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
class Board:
    """Holds what one forward pass of `model` saves; `slots` are its slots by name, in the order of their saving."""

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self.slots: dict[str, Held] = {}
        self._seed = seed
        self._by_waiting: dict[Waiting, Held] = {}
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

    def _note(self, saved: Saved, piece: Piece, waiting: Waiting) -> None:
        if not isinstance(waiting, Values | Recomputed):
            return
        held = self._by_waiting.get(waiting)
        if held is None:
            exact = as_flat(piece.storage, piece.tensor.dtype) if piece.is_whole else piece.flat().detach()
            self._by_waiting[waiting] = held = Held(saved.name, saved.op, waiting, exact)
        held.nodes.append(saved.node)
        if saved.pin is not None and (held.pin is None or saved.pin.significant_bits > held.pin.significant_bits):
            held.pin = saved.pin
        held.is_centered = held.is_centered or saved.is_centered
