"""The training loss as it goes, and what it tells: whether a run diverged, and whether it is hopeless.

The losses of a run are added up on the device and read at most POINTS times, so that steps need not wait: a point of the curve is the mean
since the last one. A run has **diverged** when a point is not finite, or above LIMIT times the larger of the first point and the loss of
blind guessing. It is **hopeless** when at one half or three quarters of its steps neither the mean over the last quarter of the
run nor the mean over its last tenth is better than blind guessing: equal odds for every answer, or, where that is unknown, the
first point. So a run that falls late goes on. Runs of fewer than FEWEST steps are never called hopeless.

>>> import torch
>>> curve = Curve(steps=100, blind_loss=math.log(10))
>>> points = [curve.add(torch.tensor(2.31)) for _ in range(50)]
>>> curve.verdict
Verdict(status=<Status.STOPPED: 'stopped'>, reason='hopeless: the mean training loss of steps 26 to 50 of 100 is 2.31, of the \
last 10 it is 2.31, and blind guessing has 2.303')
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from paredown.plan.trial import Status

POINTS = 100
LIMIT = 20.0
LOOKS = (0.5, 0.75)  # shares of a run after which it may be called hopeless
FEWEST = 100


class Verdict(NamedTuple):
    """Why a run ends before its last step."""

    status: Status
    reason: str


class Curve:
    """Points (step, mean loss since the last point), steps counted from 1."""

    def __init__(self, steps: int, *, blind_loss: float | None = None, stops_early: bool = True) -> None:
        self.points: list[tuple[int, float]] = []
        self.step = 0
        self.verdict: Verdict | None = None
        self._steps, self._blind_loss = steps, blind_loss
        self._every = -(-steps // POINTS)
        looks = [-(-math.ceil(share * steps) // self._every) * self._every for share in LOOKS]  # the first point from there on
        self._looks = looks if stops_early and steps >= FEWEST else []
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> bool:
        """Take the loss of one more step; whether there is a new point."""
        loss = loss.detach().float()
        self._sum = loss if self._sum is None else self._sum + loss
        if not self.is_point(self.step + 1):
            self.step += 1
            return False
        self.point(self._sum.item())
        self._sum = None
        return True

    def is_point(self, step: int) -> bool:
        """Whether a point of the curve is at this step."""
        return step % self._every == 0 or step >= self._steps

    def may_stop(self, step: int) -> bool:
        """Whether a run may be called hopeless at this step: it is judged as it is then."""
        return step in self._looks

    def point(self, total: float) -> None:
        """Take the sum of all losses since the last point, up to the next one."""
        last = self.step // self._every * self._every
        self.step = min(last + self._every, self._steps)
        mean = total / (self.step - last)
        self.verdict = self._diverged(mean)
        if math.isfinite(mean):
            self.points.append((self.step, mean))
        if self.verdict is None and self._looks and self.step >= self._looks[0]:
            self._looks.pop(0)
            self.verdict = self._hopeless()

    def _diverged(self, mean: float) -> Verdict | None:
        at = f"at step {self.step} of {self._steps}"
        if not math.isfinite(mean):
            return Verdict(Status.DIVERGED, f"the training loss is {mean} {at}")
        limit = LIMIT * max(self.points[0][1] if self.points else mean, self._blind_loss or 0.0, 0.0)
        if self.points and mean > limit > 0:
            return Verdict(Status.DIVERGED, f"the training loss is {mean:.4g} {at}, above {LIMIT:g} times what it was at the start")
        return None

    def _hopeless(self) -> Verdict | None:
        """Of the last quarter and the last tenth of the run."""
        since, lately = self.step - self._steps // 4, self.step - self._steps // 10
        bar = self._blind_loss if self._blind_loss is not None else self.points[0][1]
        quarter, tenth = self._mean(since), self._mean(lately)
        if min(quarter, tenth) < bar:
            return None
        than = f"blind guessing has {bar:.4g}" if self._blind_loss is not None else f"it began with {bar:.4g}"
        place = f"steps {since + 1} to {self.step} of {self._steps} is {quarter:.4g}, of the last {self.step - lately} it is {tenth:.4g}"
        return Verdict(Status.STOPPED, f"hopeless: the mean training loss of {place}, and {than}")

    def _mean(self, since: int) -> float:
        """Over the points after a step."""
        late = [loss for step, loss in self.points if step > since]
        return sum(late) / len(late)
