"""Rounds saved tensors of one forward pass to another format for every backward pass, and measures how rounding errors propagate.

    board = HeldForward(model, seed=0)
    loss = board.forward(lambda: criterion(model(x), y))
    board.round({"fc1:input": Format.parse("int4/64@bf16")})      # backward now gets the decoded values of this slot
    torch.autograd.grad(loss, parameters, retain_graph=True)

`HeldForward` has the slots of a session, and keeps their exact values. A pinned slot is not rounded to less than its pin. A slot that a
session would recompute from another slot is rounded by itself, about as if that slot had the same format.

`NoiseMeasurement` runs one exact backward pass. A hook behind each node measures the energy |g|^2 of the gradients that enter the node, and
of those that leave it on each edge. A node that saved a slot also runs with that slot rounded, and the energy of the difference is measured
on each edge. Nothing else of the backward pass runs twice, and its result is exact.

An error on an edge is then propagated to the parameters, as if every node preserved relative errors:

    weight(parameter) = 1 / |g_p|^2         weight(node) = sum over edges of |out_k|^2 / |in|^2 * weight(target of k)
    error(slot)       = sum over nodes that saved it, and their edges, of |difference_k|^2 * weight(target of k)

Where an edge leads to a parameter, as from a linear layer to its weight, this is exact. Elsewhere it is an estimate, which `probe` scales
by measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paredown.autograd.graph import ACCUMULATE, Saved
from paredown.autograd.module_watch import Watch
from paredown.autograd.operations import Needs, Pin, Use
from paredown.codec.packed import PackedTensor, encode_flat
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from paredown.plan.plan import Plan
from paredown.plan.storage import PINNED, Assignment, resolve_format
from paredown.session.eager.activations import Activations
from paredown.session.eager.recomputed_values import RecomputedValues
from paredown.session.eager.stored_tensors import StoragePiece, StoredForm, StoredValues, as_flat


@dataclass(eq=False)
class HeldSlot:
    """A saved tensor that a probe can round: its exact values, and the autograd nodes that saved it.

    Backward reads it through `form`, which refers to exact or to rounded values.
    """

    name: str
    op: str
    form: StoredValues | RecomputedValues
    exact: Tensor
    nodes: list[Any] = field(default_factory=list)
    pin: Pin | None = None
    is_centered: bool = False  # backward subtracts a mean from it
    # rounded values, stored for several nodes that use the slot one by one
    rounded: dict[Format, PackedTensor] = field(default_factory=dict[Format, PackedTensor])

    def resolved(self, format: Format) -> Format | None:
        """Return the format in which a session stores this tensor if a plan requests `format`; None: unmodified."""
        dtype = str(self.exact.dtype).removeprefix("torch.")
        return resolve_format(
            Assignment(format), Needs(Use.VALUE, self.pin, self.is_centered), dtype=dtype, numel=self.exact.numel()
        )[0]

    def restore(self) -> None:
        """Make backward read the exact values of this tensor again."""
        self.form.refer_to(self.exact)

    def round(self, format: Format, seed: Seed, *, keeps: bool = False) -> None:
        """Make backward read this tensor's values rounded to `format`; with `keeps`, later calls reuse the codes."""
        packed = self.rounded.get(format) or self.encode(format, seed)
        if keeps:
            self.rounded[format] = packed
        self.form.refer_to(packed.decode())

    def encode(self, format: Format, seed: Seed) -> PackedTensor:
        """Return the exact values of this tensor encoded in `format`, with the bits that a session would store."""
        return encode_flat(self.exact, format, Assignment(format).resolved_rounding, None, seed)


@final
class HeldForward:
    """A forward pass of `model` for several backward passes, each with other saved tensors (`slots`) rounded."""

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self.slots: dict[str, HeldSlot] = {}
        self._seed = seed
        self._by_form: dict[StoredForm, HeldSlot] = {}
        self._activations = Activations(Plan.uniform(activation=PINNED), seed, min_numel=1)
        self._activations.observe(self._note)
        self._watch = Watch(model, self._activations.save, on_begin=self._begin, on_end=self._activations.end, min_numel=1)
        self._watch.checkpoints.reports_inputs = False  # nodes are called one by one, and no node reads them

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """Call `run()`, which calls the model, and return its loss. All saved tensors are exact after this call."""
        self._watch.attach()
        try:
            loss = run()
        finally:
            self._watch.detach()
        for held in self._by_form.values():
            if held.form.plain_values is None:  # the caller holds the others, which are never packed
                self.slots.setdefault(held.name, held)
        self.restore()
        return loss

    def restore(self) -> None:
        """Make backward read the exact values of all saved tensors again."""
        for held in self._by_form.values():
            held.restore()

    def round(self, formats: Mapping[str, Format], *, turn: int = 0) -> None:
        """Round the saved tensors in `formats`, and make all others exact; each `turn` has other random bits."""
        self.restore()
        for name, format in formats.items():
            resolved = self.slots[name].resolved(format)
            if resolved is not None:
                self.slots[name].round(resolved, self.seed_of(name, turn))

    def close(self) -> None:
        """Release autograd's graph and its tensors, since a weight that a graph holds cannot be packed."""
        for held in self._by_form.values():
            held.nodes.clear()
        self.slots.clear()
        self._by_form.clear()

    def seed_of(self, name: str, turn: int) -> Seed:
        """Return the seed for the stochastic rounding of the saved tensor `name`; each `turn` has another seed."""
        return Seed(self._seed, crc32(name.encode()), turn)

    def _begin(self) -> bool:
        self._activations.begin(is_sharded=False)
        return True

    def _note(self, saved: Saved, piece: StoragePiece, form: StoredForm) -> None:
        if not isinstance(form, StoredValues | RecomputedValues):
            return
        held = self._by_form.get(form)
        if held is None:
            exact = as_flat(piece.storage, piece.tensor.dtype) if piece.is_whole else piece.flat().detach()
            self._by_form[form] = held = HeldSlot(saved.name, saved.op, form, exact)
        held.nodes.append(saved.node)
        if saved.pin is not None and (held.pin is None or saved.pin.significant_bits > held.pin.significant_bits):
            held.pin = saved.pin
        held.is_centered = held.is_centered or saved.is_centered


# --- propagation of rounding errors in one backward pass ---------------------------------------------------------------------------

Energies = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class SlotRounding:
    """A saved tensor in one format: `round` makes backward read its rounded values, `restore` the exact ones."""

    slot: str
    format: str
    round: Callable[[], None]
    restore: Callable[[], None]


@dataclass(eq=False)
class NodeEnergies:
    """The sums of squares ("energies") of the gradients of one autograd node, measured in a backward pass.

    `incoming` and `outgoing` are those of the gradients that the node gets and returns. `differences` has, by (saved tensor, format), those
    of the changes of `outgoing` if the tensor is rounded.
    """

    node: Any
    incoming: Tensor
    outgoing: Energies
    differences: dict[tuple[str, str], Energies] = field(default_factory=dict)


class NoiseMeasurement:
    """Measures in one exact backward pass how much rounding each saved tensor would change the gradients.

    `trials` maps each autograd node to the tensors that it saved, once for each format; the node runs again for each of them.
    """

    def __init__(self, trials: Mapping[Any, Sequence[SlotRounding]]) -> None:
        self._trials = trials
        self._measured: list[NodeEnergies] = []

    def backward(self, loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the exact gradients of `parameters`; measure meanwhile how rounding tensors would change them."""
        handles = [node.register_hook(self._hook(node)) for node in nodes_behind(loss)]
        try:
            return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()

    def errors(self, parameters: Sequence[Tensor], energies: Sequence[float]) -> dict[tuple[str, str], tuple[float, float]]:
        """Return (direct, estimated) squared relative gradient errors for each (saved tensor, format).

        The direct error is that of parameters whose gradient the tensor's node itself computes; the other is an estimate for all parameters
        further back. `energies` has the sum of squares of each parameter's gradient, in the order of `parameters`.
        """
        of_parameters = {id(p): 1 / energy for p, energy in zip(parameters, energies, strict=True) if energy > 0}
        tensors, structure = tree_flatten([(row.incoming, row.outgoing, row.differences) for row in self._measured])
        known = [tensor for tensor in tensors if tensor is not None]
        numbers = iter(torch.stack(known).tolist() if known else ())  # with a single transfer from the device
        rows = tree_unflatten([0.0 if tensor is None else next(numbers) for tensor in tensors], structure)
        weights: dict[Any, float] = {}
        errors: dict[tuple[str, str], tuple[float, float]] = {}
        nodes = [row.node for row in self._measured]
        for node, (incoming, outgoing, by_format) in zip(reversed(nodes), reversed(rows), strict=True):  # from parameters to loss
            targets = [edge for edge, _ in node.next_functions]
            values = [_weight(target, of_parameters, weights) for target in targets]
            if incoming > 0:
                weights[node] = sum(out / incoming * value for out, value in zip(outgoing, values, strict=False))
            for key, differences in by_format.items():
                direct, rest = errors.get(key, (0.0, 0.0))
                for target, value, energy in zip(targets, values, differences, strict=False):
                    is_direct = target is not None and _parameter(target) is not None
                    direct, rest = (direct + energy * value, rest) if is_direct else (direct, rest + energy * value)
                errors[key] = direct, rest
        return errors

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        def measure(outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            sums = [energy for energy in map(energy_of, incoming) if energy is not None]
            if not sums:
                return
            measured = NodeEnergies(node, torch.stack(sums).sum(), tuple(map(energy_of, outgoing)))
            for trial in self._trials.get(node, ()):
                trial.round()
                rounded = _run(node, incoming)
                trial.restore()
                measured.differences[trial.slot, trial.format] = tuple(
                    None if a is None or b is None else energy_of(_summed_to(b, a) - a)
                    for a, b in zip(outgoing, rounded, strict=False)
                )
            self._measured.append(measured)

        return measure


def energy_of(tensor: Tensor | None) -> Tensor | None:
    """Return the sum of squares of a tensor, as a tensor on its device; None if `tensor` is None or has integers."""
    if tensor is None or not tensor.is_floating_point():
        return None
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()


def nodes_behind(loss: Tensor) -> list[Any]:
    """Return the autograd nodes that run in backward from `loss`, except the nodes that accumulate p.grad."""
    pending, seen = [loss.grad_fn], dict[Any, None]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and node.name() != ACCUMULATE:
            seen[node] = None
            pending.extend(edge for edge, _ in node.next_functions)
    return list(seen)


def _run(node: Any, incoming: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    with torch.no_grad():
        outgoing = node.apply(*incoming) if is_custom else node(*incoming)
    return outgoing if isinstance(outgoing, tuple) else (outgoing,)


def _summed_to(tensor: Tensor, to: Tensor) -> Tensor:
    """Return `tensor` summed over broadcast dimensions to the shape of `to`, as the autograd engine does."""
    return tensor if tensor.shape == to.shape else tensor.sum_to_size(to.shape)


VIEWS_AND_CASTS = frozenset(("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "PermuteBackward0"))


def _parameter(node: Any) -> Tensor | None:
    """Return the parameter whose gradient `node` accumulates, directly or behind views and casts, or None."""
    while node is not None and node.name() in VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
    return node.variable if node is not None and node.name() == ACCUMULATE else None


def _weight(node: Any, of_parameters: Mapping[int, float], of_nodes: Mapping[Any, float]) -> float:
    if node is None:
        return 0.0
    return of_parameters.get(id(node.variable), 0.0) if node.name() == ACCUMULATE else of_nodes.get(node, 0.0)
