"""`Guard`: what a session may do when rounding goes wrong while a model trains, and from when on it does.

    guard = Guard(trace, budget="6GiB", sensitivities=probe(model, batch, trace))
    session = apply(plan, model, guard=guard)

A guard looks at what is packed and at gradients. A step whose gradients are not finite, or far larger than those before, is left out;
slots whose rounding went wrong are raised by one level, and others, the least sensitive ones, go down by one where the budget would not
hold otherwise. `session.actions` has all of it.

What a guard sees of the slots that are packed: numbers on the device, collected in forward passes and read once a step.

For each slot two numbers, of the forward pass in which it was looked at last since the last step:

    error       |x - decoded|^2 / |x|^2, of a piece of 4096 values, or of all of them in a full look; |x - mean of its 64 values|^2 below
                the line where backward subtracts a mean, as norms do: a format that loses the differences has an error of 1 or more
    largest     max |x|, of all values

Nothing waits for the device until `read`, which is one transfer for all slots and the gradient norm, and one reduction where several
processes train: the largest of each number counts, so that all of them read the same.

What a guard remembers from step to step: all of it goes into checkpoints, so that a run that is resumed has the same future.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paredown.assign.problem import ladder_of
from paredown.assign.sensitivity import Sensitivities
from paredown.codec.packed import encode_flat
from paredown.errors import ApplyError, BudgetError
from paredown.formats.rounding import Seed
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.activations import Activations
from paredown.session.stored_tensors import StoragePiece, StoredForm, StoredValues
from paredown.sizes import parse_bytes, say_bytes
from paredown.trace.autograd_graph import Saved
from paredown.trace.trace import Trace

EVERY = 16


@dataclass(frozen=True)
class Limits:
    """When a guard acts. Errors are squared and relative: |x - decoded|^2 / |x|^2.

    `every`: a slot is looked at in one forward pass of so many. `error`: a slot that loses more than this is raised. `jump`: so is one
    whose error, or whose largest value where that matters (no scale of its own; the root of it where it stands in an exponent), is so many
    times what it was. `gradient_jump`: a step whose gradient norm is so
    many times the usual one is left out. `hold`: for so many steps a slot that was raised is not lowered. `patience`: after so many steps
    in a row were left out for finite gradients, they are taken as they are. `levels`: the formats that activations may get, the best first;
    None for as it is, bf16, and 8, 4 and 2 bits.
    """

    every: int = EVERY
    error: float = 4.0  # 2 bits lose 0.04 to 1.4, by how values are spread
    jump: float = 16.0
    gradient_jump: float = 30.0
    hold: int = 1000
    patience: int = 4
    levels: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("every", "hold", "patience"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ApplyError(f"Limits: {name} is {value!r}; it is a whole number from 1 up.")
        for name in ("error", "jump", "gradient_jump"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > (1 if name != "error" else 0):
                raise ApplyError(f"Limits: {name} is {value!r}; it is a number above {1 if name != 'error' else 0}.")
        if self.levels is not None:
            ladder_of(self.levels)  # refuses what is no format


@dataclass(frozen=True)
class Guard:
    """The settings of a guard. `budget` None is the predicted peak of the plan that is applied: a guard never takes more.

    `sensitivities` say who pays; without them the role table does. With a `batch` (and its `loss`, as for `probe`; a part of a batch will
    do, as it is not packed) they are measured anew at 10, 30, 100, 300, ... steps, and the plan is settled anew.
    """

    trace: Trace
    budget: int | str | None = None
    sensitivities: Sensitivities | None = None
    limits: Limits = field(default_factory=Limits)
    batch: Any = None
    loss: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trace, Trace):
            raise ApplyError(
                f"a guard needs the trace of the step, to know what a slot takes: Guard(trace_step(model, batch), ...), not "
                f"{type(self.trace).__name__}."
            )
        for name, kind in (("sensitivities", Sensitivities | None), ("limits", Limits)):
            if not isinstance(getattr(self, name), kind):
                raise ApplyError(f"Guard: {name} is of type {type(getattr(self, name)).__name__}.")
        if self.budget is not None:
            parse_bytes(self.budget, whole=1)  # refuses what is no size, here where it is written

    def budget_for(self, plan: Plan) -> int:
        """The budget in bytes, which `plan` must be within."""
        peak = footprint(self.trace, plan).peak_bytes
        if self.budget is None:
            return peak
        is_share = isinstance(self.budget, str) and "%" in self.budget
        allowed = parse_bytes(self.budget, whole=footprint(self.trace).peak_bytes if is_share else None)
        if peak > allowed:
            raise BudgetError(
                f"the plan needs {say_bytes(peak)} of a budget of {say_bytes(allowed)}, before a guard changes anything. "
                "Plan for that budget first, such as with assign(trace, budget), or leave the guard's budget out."
            )
        return allowed


def checked_guard(guard: Any, plan: Plan) -> Guard | None:
    """What `apply` was given as a guard, if `plan` is within its budget."""
    if isinstance(guard, Guard):
        guard.budget_for(plan)
    if guard is None or isinstance(guard, Guard):
        return guard
    raise ApplyError(
        f"guard is {shorten(repr(guard), 60)}: give Guard(trace), where trace = trace_step(model, batch, ...) is the step that is "
        "trained. Without it nothing is known of what a slot takes, and a budget cannot be kept."
    )


def check_model(trace: Trace, model: nn.Module) -> None:
    """Refuse the trace of another model, whose slots would never be seen."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for slot in trace.of(Role.WEIGHT):
        if not slot.stays and own.get(slot.name) != slot.shape:
            there = f"{own[slot.name]} in this one" if slot.name in own else f"this one, a {type(model).__name__}, has none"
            raise ApplyError(
                f"the guard's trace is of another model, a {trace.model}: {slot.name!r} is {slot.shape} there, and {there}. "
                "Trace the model that is trained: Guard(trace_step(model, batch, ...))."
            )


def probe_steps() -> Iterator[int]:
    """When sensitivities are measured anew: 10, 30, 100, 300, ...

    >>> from itertools import islice
    >>> list(islice(probe_steps(), 6))
    [10, 30, 100, 300, 1000, 3000]
    """
    step = 10
    while True:
        yield step
        yield 3 * step
        step *= 10


# --- What a guard sees of the slots that are packed ---

SAMPLE = 4096
UNSEEN = -1.0
TOO_LARGE = 3e38  # stands for infinity and NaN, which a reduction would lose
TINY = 1e-30
CENTERED_LEN = 64  # values that are taken to have one mean, as those of a channel or of a row


@dataclass(frozen=True)
class SlotSignal:
    """What was seen of a slot: its error, and its largest value; infinity where they are not finite."""

    error: float
    largest: float


class Signals:
    """Collects the numbers of the slots `names`, in one order for all processes."""

    def __init__(self, activations: Activations, names: Sequence[str], every: int) -> None:
        self._activations, self._names, self._every = activations, tuple(names), every
        self._places = {name: place for place, name in enumerate(names)}
        self._numbers: Tensor | None = None  # (2, num_slots): errors, largest values
        self.looks_at_all = False
        activations.on_packed = self._packed

    @property
    def has_any(self) -> bool:
        """Whether anything was packed so far."""
        return self._numbers is not None

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self._numbers.device if self._numbers is not None else torch.device("cpu")

    def read(self, norm: Tensor | None) -> tuple[float, dict[str, SlotSignal]]:
        """The gradient norm, and what was seen of each slot since the last time, alike on all processes."""
        assert self._numbers is not None
        first = self._numbers.new_tensor([UNSEEN]) if norm is None else norm.detach().reshape(1).to(self._numbers)
        numbers = torch.cat([first, self._numbers.reshape(-1)])
        numbers = numbers.nan_to_num(nan=TOO_LARGE, posinf=TOO_LARGE, neginf=TOO_LARGE).clamp_max(TOO_LARGE)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        self._numbers.fill_(UNSEEN)
        values = [inf if value >= 0.99 * TOO_LARGE else value for value in numbers.tolist()]
        num = len(self._names)
        seen = zip(self._names, values[1 : 1 + num], values[1 + num :], strict=True)
        return values[0], {name: SlotSignal(error, largest) for name, error, largest in seen if error != UNSEEN}

    def _packed(self, saved: Saved, piece: StoragePiece, waiting: StoredForm) -> None:
        place = self._places.get(saved.name)
        if place is None or type(waiting) is not StoredValues or waiting.packed is None:
            return
        if self._numbers is None:
            self._numbers = torch.full((2, len(self._names)), UNSEEN, device=piece.tensor.device)
        if self.looks_at_all or (place + self._activations.forwards) % self._every == 0:
            flat = piece.flat()
            exact, rounded = self._all(flat, waiting) if self.looks_at_all else self._sample(flat, saved.name)
            self._numbers[0, place] = relative_error(exact.float(), rounded.float(), is_centered=saved.is_centered)
            self._numbers[1, place] = torch.linalg.vector_norm(flat, inf)

    def _all(self, flat: Tensor, waiting: StoredValues) -> tuple[Tensor, Tensor]:
        assert waiting.packed is not None
        return flat, waiting.packed.decode()

    def _sample(self, flat: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """(exact, decoded) values of a piece; its place moves through the tensor from look to look."""
        decision = self._activations.decisions[name]
        assert decision.format is not None
        num_pieces = max(1, flat.numel() // SAMPLE)
        start = self._activations.forwards // self._every * 7919 % num_pieces * SAMPLE
        piece = flat[start : start + SAMPLE].contiguous()
        seed = Seed(self._activations.seed, decision.tensor_id, self._activations.forwards)
        packed = encode_flat(piece, decision.format, decision.rounding, decision.overflow, seed)
        return piece, packed.decode()


def relative_error(exact: Tensor, rounded: Tensor, *, is_centered: bool) -> Tensor:
    """|rounded - exact|^2 / |exact|^2 of flat tensors; `is_centered` subtracts the mean of each 64 values from `exact` below the line.

    >>> exact = torch.tensor([100.0, 101.0]).repeat(32)
    >>> float(relative_error(exact, exact + 0.5, is_centered=True))
    1.0
    """
    error = (rounded - exact).square().sum()
    if is_centered and exact.numel() >= CENTERED_LEN:
        exact = exact[: exact.numel() // CENTERED_LEN * CENTERED_LEN].view(-1, CENTERED_LEN)
        exact = exact - exact.mean(dim=1, keepdim=True)
    return error / exact.square().sum().clamp_min(TINY)


def total_norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """The norm of all gradients together, on the device; infinity or NaN if any value is."""
    if not gradients:
        return None
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]


# --- What a guard remembers from step to step ---

LEARNED = 10  # gradient norms that are seen before one counts as unusual
MOST = 2.0  # one norm counts as no more than so many usual ones
KEPT = 0.9  # how much of what is usual stays when a new number comes


@dataclass
class OptimizerSteps:
    """The steps of one optimizer: its usual gradient norm, and of how many; `left_out` and `suspicions` are those in a row."""

    norm: float = 0.0
    num_norms: int = 0
    left_out: int = 0
    suspicions: int = 0

    def usual_norm(self) -> float | None:
        """The usual gradient norm, once enough are known."""
        return self.norm if self.num_norms >= LEARNED else None

    def learn(self, norm: float | None, *, is_taken: bool) -> None:
        """Take a step into account."""
        self.left_out = 0 if is_taken else self.left_out + 1
        if is_taken:
            self.suspicions = 0
        if is_taken and norm is not None:
            self.norm = _mixed(self.norm, min(norm, MOST * self.norm)) if self.num_norms else norm
            self.num_norms += 1


@dataclass
class GuardState:
    """`looks`: the usual error of a slot, and its largest value when it came to its format.

    `taken`: of each optimizer, by the name of its first parameter. `done`: the optimizers that came to this step.
    """

    steps: int = 0
    done: list[str] = field(default_factory=list[str])
    taken: dict[str, OptimizerSteps] = field(default_factory=dict[str, OptimizerSteps])
    looks: dict[str, SlotSignal] = field(default_factory=dict[str, SlotSignal])
    held_until: dict[str, int] = field(default_factory=dict[str, int])
    refused_until: dict[str, int] = field(default_factory=dict[str, int])

    def begin(self, optimizer: str) -> bool:
        """Whether a step begins, which the first optimizer to come again does where a model has several."""
        is_new = not self.done or optimizer in self.done
        self.steps += is_new
        self.done = [optimizer] if is_new else [*self.done, optimizer]
        return is_new

    def is_held(self, name: str) -> bool:
        """Whether a slot was raised not long ago."""
        return self.held_until.get(name, -1) > self.steps

    def is_refused(self, name: str) -> bool:
        """Whether nobody could pay for a slot not long ago."""
        return self.refused_until.get(name, -1) > self.steps

    def is_probe_due(self) -> bool:
        """Whether sensitivities are measured anew after this step."""
        return self.steps == next(step for step in probe_steps() if step >= self.steps)

    def learn(self, looks: Mapping[str, SlotSignal]) -> None:
        """Take what was seen of slots into account."""
        for name, look in looks.items():
            if isfinite(look.error) and isfinite(look.largest):
                before = self.looks.get(name)
                self.looks[name] = look if before is None else SlotSignal(_mixed(before.error, look.error), before.largest)

    def forget(self, name: str, *, held_until: int | None) -> None:
        """A slot has another format now: what was usual is not."""
        self.looks.pop(name, None)
        if held_until is not None:
            self.held_until[name] = held_until

    def to_json(self) -> dict[str, Any]:
        """The JSON value."""
        looks = {name: [look.error, look.largest] for name, look in self.looks.items()}
        return {**asdict(self), "looks": looks}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GuardState:
        """The memory whose `to_json` is `value`."""
        looks = {name: SlotSignal(*pair) for name, pair in value["looks"].items()}
        taken = {name: OptimizerSteps(**row) for name, row in value["taken"].items()}
        until = {name: dict(value[name]) for name in ("held_until", "refused_until")}
        parts: dict[str, Any] = {**value, "done": list(value["done"]), "taken": taken, "looks": looks, **until}
        return GuardState(**parts)


def _mixed(usual: float, now: float) -> float:
    return KEPT * usual + (1 - KEPT) * now
