"""What a guard remembers from step to step: all of it goes into checkpoints, so that a run that is resumed has the same future."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from paredown.session.guard import probe_steps
from paredown.session.signals import Look

LEARNED = 10  # gradient norms that are seen before one counts as unusual
MOST = 2.0  # one norm counts as no more than so many usual ones
KEPT = 0.9  # how much of what is usual stays when a new number comes


@dataclass
class Taken:
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
class Memory:
    """`looks`: the usual error of a slot, and its largest value when it came to its format.

    `taken`: of each optimizer, by the name of its first parameter. `done`: the optimizers that came to this step.
    """

    steps: int = 0
    done: list[str] = field(default_factory=list[str])
    taken: dict[str, Taken] = field(default_factory=dict[str, Taken])
    looks: dict[str, Look] = field(default_factory=dict[str, Look])
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

    def learn(self, looks: Mapping[str, Look]) -> None:
        """Take what was seen of slots into account."""
        for name, look in looks.items():
            if isfinite(look.error) and isfinite(look.largest):
                before = self.looks.get(name)
                self.looks[name] = look if before is None else Look(_mixed(before.error, look.error), before.largest)

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
    def from_json(value: Mapping[str, Any]) -> Memory:
        """The memory whose `to_json` is `value`."""
        looks = {name: Look(*pair) for name, pair in value["looks"].items()}
        taken = {name: Taken(**row) for name, row in value["taken"].items()}
        until = {name: dict(value[name]) for name in ("held_until", "refused_until")}
        parts: dict[str, Any] = {**value, "done": list(value["done"]), "taken": taken, "looks": looks, **until}
        return Memory(**parts)


def _mixed(usual: float, now: float) -> float:
    return KEPT * usual + (1 - KEPT) * now
