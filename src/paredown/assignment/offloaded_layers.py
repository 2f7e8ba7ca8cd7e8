"""Chooses packed activations to move to host memory, which `assign` considers if the caller gives a `host_budget`.

A copy adds no error, and no time as long as it takes no longer than the operations that run beside it. So formats and recomputation are
chosen anew for some sets of layers whose packed activations would be in host memory: none, and the first quarter, half, three quarters and
all of the layers in forward order, since backward needs the first layers last. Of the plans within both budgets `HostBudget.best` takes

    without prefer, and for "speed"    the plan that adds the least predicted time, among those of small error
                                       (assignment/checkpointed_layers.py); if there is none, the plan of least error
    for "accuracy"                     the plan of least error

A plan whose copies the step would wait for longer than it takes without a plan is not chosen.

Copies are priced by the rates that `calibrate` measured, of the device if it has a calibration and of one H200 otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from paredown.assignment.checkpointed_layers import added_seconds
from paredown.errors import BudgetError, PlanError
from paredown.plan.byte_intervals import host_bytes
from paredown.plan.calibration import REFERENCE, Calibration, find_calibration
from paredown.plan.checkpointed_trace import step_under
from paredown.plan.plan import Plan
from paredown.plan.planned_step import IN_GRAPHS, NOT_CUDA, offloaded_names, offloaded_trace, planned_step, saving_layers
from paredown.plan.selectors import first_match
from paredown.plan.step_time import offload_wait, predict_step
from paredown.plan.trace import Trace
from paredown.sizes import parse_bytes, say_bytes

TRIED = "Packed activations in host memory were tried too."
TOO_LARGE = "With packed activations in host memory, a plan that fits needs {} of it, and host_budget is {}: raise it."
TOO_SLOW = (
    "With packed activations in host memory a step would wait {:.3g} s for copies ({}), longer than it takes without a plan; a plan that "
    "asks for it with plan.offloading(...) does it."
)
PARTS = 4  # the layers, in forward order, are tried by so many parts
ALL_PACKED = Plan.uniform(activation="int8/64@bf16")  # decides which layers can offload something
Found = Callable[[tuple[str, ...]], tuple[Plan, float]]  # slots to offload -> (plan, predicted error); raises BudgetError


def with_offload(step: Trace, slots: tuple[str, ...]) -> Trace:
    """Return the trace if packed values of the activations `slots` are in host memory until backward needs them."""
    return offloaded_trace(step, ALL_PACKED.offloading(*slots)) if slots else step


def offloaded_slots(trace: Trace, plan: Plan) -> tuple[str, ...]:
    """Return those names and patterns in `plan.offload` under which some activation really moves to host memory."""
    step = planned_step(step_under(trace, plan), plan) if plan.offload else trace
    return tuple(text for text in plan.offload if first_match((text,), offloaded_names(step)))


def offload_choices(step: Trace) -> Iterator[tuple[str, ...]]:
    """Yield sets of activations to try to move to host memory, as name patterns: none, then more and more layers."""
    yield ()
    paths = list(dict.fromkeys(path for path, _ in saving_layers(step, ALL_PACKED.offloading("*")) if path))
    counts = sorted({-(-len(paths) * part // PARTS) for part in range(1, PARTS + 1)} if paths else ())
    yield from (tuple(f"{path}[.:]*" for path in paths[:count]) for count in counts)


@dataclass(frozen=True)
class HostBudget:
    """The bytes of host memory that a plan may use for packed activations, and the speed of copies to it."""

    nbytes: int
    calibration: Calibration

    @staticmethod
    def of(trace: Trace, given: Any, calibration: Calibration | None) -> HostBudget | None:
        """Return the argument `host_budget` of `assign` as a HostBudget, or None if `given` is None.

        Raise PlanError unless `trace` is of an eager step on a GPU.
        """
        if given is None:
            return None
        if trace.device != "cuda" or trace.is_compiled:
            reason = NOT_CUDA if trace.device != "cuda" else IN_GRAPHS
            raise PlanError(f"host_budget is for eager steps on a GPU: {reason}. Leave it out, or trace the step as it runs there.")
        return HostBudget(parse_bytes(given), calibration or find_calibration(trace.device)[0] or REFERENCE)

    def best(self, trace: Trace, step: Trace, found: Found, tolerated: Sequence[float]) -> Plan:
        """Return the best plan over several sets of activations in host memory; raise BudgetError if none fits.

        `found(slots)` returns the plan, and its error, with packed values of `slots` in host memory. `trace` is the step as it was traced,
        `step` the same step with modules that run over pieces of the sequence. `tolerated` lists error limits, the smallest first: of the
        plans within the first limit that any plan keeps, the quickest is best. If none keeps a limit, or the list is empty, the plan of
        least error is best.
        """
        step_seconds = predict_step(trace, calibration=self.calibration).seconds if trace.operations else inf
        plans, failed, advice = list[tuple[Plan, float, float]](), list[BudgetError](), TRIED
        for slots in offload_choices(step):
            try:
                plan, error = found(slots)
            except BudgetError as reason:
                failed.append(reason)
                continue
            nbytes, wait = self._cost(trace, plan)
            if nbytes > self.nbytes:
                advice = TOO_LARGE.format(say_bytes(nbytes), say_bytes(self.nbytes))
            elif wait > step_seconds:
                advice = TOO_SLOW.format(wait, self.calibration.say_copies())
            else:
                plans.append((plan, error, added_seconds(trace, plan, self.calibration)))
        if not plans:  # not even without offload, which was tried first
            unfit = BudgetError(f"{failed[0]} {advice}")
            unfit.smallest_bytes = min((one.smallest_bytes for one in failed if one.smallest_bytes is not None), default=None)
            raise unfit
        plan = _best(plans, tolerated)
        return replace(plan, reason=plan.reason + self._say(trace, plan)) if plan.offload else plan

    def _cost(self, trace: Trace, plan: Plan) -> tuple[int, float]:
        """Return the bytes of pinned host memory that `plan` takes, and the seconds that a step waits for copies."""
        step = planned_step(step_under(trace, plan), plan)
        return host_bytes(step, plan, is_rounded=True), offload_wait(step, plan, self.calibration)

    def _say(self, trace: Trace, plan: Plan) -> str:
        nbytes, wait = self._cost(trace, plan)
        time = f"the step waits {1e3 * wait:.3g} ms for copies" if wait else "copies are hidden behind the step's operations"
        count = len(plan.offload)
        head = f" Packed activations of {count} layer{'s' * (count > 1)} are in host memory until backward needs them"
        size = f"{say_bytes(nbytes)} of {say_bytes(self.nbytes)}"
        return f"{head}: {size} of pinned memory, and {time} (predicted at {self.calibration.say_copies()})."


def _best(plans: Sequence[tuple[Plan, float, float]], tolerated: Sequence[float]) -> Plan:
    """Return the plan that is best of `plans`, tuples (plan, error, seconds added to a step).

    Of the plans within the first limit in `tolerated` that any plan's error keeps, it is the quickest; if no plan keeps a limit, the plan
    of least error. Of equal plans it is the first, which offloads least.
    """
    for largest in tolerated:
        if near := [row for row in plans if row[1] <= largest]:
            return min(near, key=lambda row: (row[2], row[1]))[0]
    return min(plans, key=lambda row: (row[1], row[2]))[0]
