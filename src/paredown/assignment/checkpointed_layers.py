"""What `assign` recomputes where quantization alone is not enough, or slower: repeated layers (activation checkpointing) of an eager step,
single tensors of a compiled one.

Checkpointing adds no error and costs a forward pass of each layer, so it follows the argument `recompute` of `assign`, not a price:

    None     where formats would be slower or their errors large (`quickest_plan`). With `levels` of the caller, or a method that only
             serves comparisons: only if no plan without it fits, and then as few layers as bring the error to that of all activations
             in the second format of the ladder (uint4)
    True     also if no plan without it keeps the error at or below that of all activations in the first format of the ladder (int8): as
             few layers as bring it there
    False    never

The layers that save most memory come first; if no number of layers brings the error there, the number of least error is taken. Fewer are
faster: on networks of real size packing a layer took about half the time of recomputing it (benchmarks/assign_times.py). For the same
layers, a larger budget never gives more error.

`quickest_plan` compares

    formats          of activations, weights and optimizer state, of least error
    layers alone     as few as fit, nothing quantized: exact
    both             formats of activations alone, with as few layers as keep the error small; only where formats alone would have a
                     larger error, or would pack weights or optimizer state, which costs time and needs paredown.optim

Of those whose error is at most that of all activations in the first format of the ladder (int8), it takes the one of least
predicted time; if there is none, the same with the second format (uint4); if there is none, the one of least error. So a plan is
never predicted to be slower than checkpointing alone, where that is enough.

In a compiled step the choices are the tensors that backward can recompute (`Slot.recomputation`), in place of layers; the text above holds
for both. What they are computed from is stored unmodified, so they add no error. They come in the order of predicted seconds for each byte
that is freed, where a source that is no longer packed counts against them; none is a source of another one.

The predicted time that a plan adds to a step only serves to compare two plans: without `prefer` it is that of REFERENCE, one H200
(plan/calibration.py), on any device, so that plans do not depend on what was measured where. `prefer="speed"` compares predictions of the
calibrated device (assignment/speed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from math import inf

from paredown.assignment.assignment_problem import AssignmentProblem
from paredown.assignment.storage_options import LADDER, Ladder
from paredown.assignment.strategies import AssignmentPoint, role_table_error
from paredown.autograd.operations import Use
from paredown.plan.calibration import REFERENCE, Calibration
from paredown.plan.checkpointed_trace import checkpointed_trace, modules_of, outermost
from paredown.plan.footprint import bound_of, footprint
from paredown.plan.plan import Plan
from paredown.plan.planned_step import NUMBERED, planned_step
from paredown.plan.step_time import added_time, product_of
from paredown.plan.storage import Assignment
from paredown.plan.trace import Slot, Trace, cached_on_trace
from paredown.roles import Role

Solution = tuple[AssignmentProblem, AssignmentPoint, tuple[str, ...]]  # problem, point, checkpointed layers
UNMODIFIED: Ladder = (None,)
ProblemOf = Callable[[Trace, Ladder | None], AssignmentProblem]
SizeOf = Callable[[Trace, Plan], int]  # `bound_of`, the peak with its margin, or `peak_of`


def quickest_plan(
    trace: Trace, budget_bytes: int, problem_of: ProblemOf, plan_of: Callable[[Solution], Plan], size_of: SizeOf = bound_of
) -> Solution | None:
    """Return the solution (formats and checkpointed layers) within the budget that adds the least time to a step.

    The error must be at most that of all activations in int8, or if no solution keeps that, in uint4; if none keeps that either, the
    solution of least error is returned. The result is None if the only plans that fit pack weights or optimizer state and also checkpoint
    layers. `problem_of` sets up the search for plans of a trace, `plan_of` makes the plan of a solution, and `size_of` returns the bytes
    that must be within the budget.
    """
    small, tolerated = (tolerated_error(trace, LADDER, recompute) for recompute in (True, None))
    problem = problem_of(trace, None)
    point = problem.best(budget_bytes)
    formats = None if point is None else (problem, point, ())
    solutions = [formats, layers_alone(trace, budget_bytes, problem_of, size_of)]
    if formats is None or formats[1].error > small or _packs_parameters(formats):
        solutions.append(_both(trace, budget_bytes, problem_of, small))
    if not _within(solutions, small):
        solutions.append(_both(trace, budget_bytes, problem_of, tolerated))
    within_error = _within(solutions, small) or _within(solutions, tolerated)
    if within_error:
        return min(within_error, key=lambda solution: (added_seconds(trace, plan_of(solution)), solution[1].error))
    return min(_within(solutions, inf), key=lambda solution: solution[1].error, default=None)


def _within(solutions: Iterable[Solution | None], error: float) -> list[Solution]:
    return [solution for solution in solutions if solution is not None and solution[1].error <= error]


def layers_alone(trace: Trace, budget_bytes: int, problem_of: ProblemOf, size_of: SizeOf = bound_of) -> Solution | None:
    """Return the fewest checkpointed layers that fit the budget, with nothing quantized; None if none fit."""
    layers = recompute_choices(trace)

    def fits(count: int) -> bool:
        return size_of(trace, exact_plan(trace, layers[:count])) <= budget_bytes

    if not layers or not fits(len(layers)):
        return None
    chosen = tuple(layers[: fewest_layers(fits, 0, len(layers))])
    problem = problem_of(with_choice(trace, chosen), UNMODIFIED)
    point = problem.best(budget_bytes)
    return None if point is None else (problem, point, chosen)


def _both(trace: Trace, budget_bytes: int, problem_of: ProblemOf, tolerated: float) -> Solution | None:
    problem = problem_of(trace, LADDER)
    point = problem.best(budget_bytes)
    if point is not None and point.error <= tolerated:
        return problem, point, ()
    return with_layers(trace, budget_bytes, lambda step: problem_of(step, LADDER), tolerated)


def _packs_parameters(solution: Solution) -> bool:
    problem, point, _ = solution
    return any(format is not None and role is not Role.ACTIVATION for (_, role), format in problem.formats(point).items())


# --- what can be recomputed --------------------------------------------------------------------------------------------


def recompute_choices(trace: Trace) -> list[str]:
    """Return the layers (or tensors of a compiled step) that backward can recompute, the best first."""
    return recomputable_slots(trace) if trace.is_compiled else repeated_layers(trace)


def exact_plan(trace: Trace, chosen: Iterable[str]) -> Plan:
    """Return a plan that recomputes `chosen`, layers or tensors of a compiled step, and quantizes nothing.

    For a compiled step it has a rule for activations, since a session without one would run plain torch.compile.
    """
    return Plan((("activation", Assignment()),) if trace.is_compiled else (), recompute=tuple(chosen))


def with_choice(trace: Trace, chosen: tuple[str, ...]) -> Trace:
    """Return the trace of the step in which backward recomputes `chosen`: layers, or tensors of a compiled step."""
    return planned_step(trace, exact_plan(trace, chosen))


@cached_on_trace
def recomputable_slots(trace: Trace) -> list[str]:
    """Return the names of the tensors to recompute in a compiled step's backward, the least time per byte first.

    Tensors that are being read when the step is at its peak are left out, since recomputing them would not lower the peak. No tensor in the
    list is computed from another one in it.
    """
    by_storage = {slot.storage: slot for slot in trace.activations}
    tick = footprint(trace, exact_plan(trace, ())).peak_tick
    rated: list[tuple[float, int, Slot]] = []
    for slot in trace.activations:
        if slot.recomputation is not None and not slot.recomputation.first <= tick <= slot.recomputation.last:
            sources = (by_storage[number] for number in slot.recomputation.sources if number in by_storage)
            freed = slot.nbytes - sum(source.nbytes for source in sources if source.parts) // 2
            seconds = REFERENCE.operation_seconds(product_of(slot))
            rated += [(seconds / freed, -freed, slot)] if freed > 0 else []
    chosen, gone, kept = list[str](), set[int](), set[int]()
    for *_, slot in sorted(rated, key=lambda row: row[:2]):
        sources = set(slot.recomputation.sources) if slot.recomputation is not None else set()
        if slot.storage not in kept and not sources & gone:
            chosen.append(slot.name)
            gone.add(slot.storage)
            kept |= sources
    return chosen


# --- how many layers ---------------------------------------------------------------------------------------------------


@cached_on_trace
def repeated_layers(trace: Trace) -> list[str]:
    """Return the layers (modules named by a number) that can be checkpointed, the most bytes saved first."""
    numbered = [path for path in modules_of(trace) if NUMBERED.fullmatch(path.rpartition(".")[2])]
    saved = {path: _saved_bytes(trace, path) for path in outermost(numbered, numbered)}
    return sorted((path for path, nbytes in saved.items() if nbytes > 0), key=lambda path: -saved[path])


def _saved_bytes(trace: Trace, path: str) -> int:
    checkpointed = checkpointed_trace(trace, (path,))
    return sum(slot.nbytes for slot in trace.activations) - sum(slot.nbytes for slot in checkpointed.kept_activations)


def tolerated_error(trace: Trace, ladder: Ladder, recompute: bool | None) -> float:
    """Return the predicted error above which `assign` checkpoints layers instead of using fewer bits.

    It is the error if all activations have the first format of `ladder` (formats, the most precise first), or, unless `recompute` is True,
    the second one: then checkpointing is the last resort.
    """
    formats = [format for format in ladder if format is not None]
    slots = [slot for slot in trace.activations if not slot.stays and Use.VALUE in slot.uses]
    return sum(role_table_error(slot, formats[:2][0 if recompute else -1]) for slot in slots) if formats else 0.0


def with_layers(
    trace: Trace, budget_bytes: int, problem_of: Callable[[Trace], AssignmentProblem], tolerated: float
) -> Solution | None:
    """Return formats and checkpointed layers: the fewest layers for which the predicted error is at most `tolerated`.

    If no number of layers brings the error that low, return those of least error; None if nothing fits the budget.
    """
    layers = recompute_choices(trace)

    @cache
    def solution_with(count: int) -> Solution | None:
        chosen = tuple(layers[:count])
        problem = problem_of(with_choice(trace, chosen))
        point = problem.best(budget_bytes)
        return None if point is None else (problem, point, chosen)

    def is_tolerated(count: int) -> bool:
        solution = solution_with(count)
        return solution is not None and solution[1].error <= tolerated

    counts = list(_counts(len(layers)))
    enough = next((count for count in counts if is_tolerated(count)), None)
    if enough is not None:
        too_few = max((count for count in counts if count < enough), default=0)
        return solution_with(fewest_layers(is_tolerated, too_few, enough))
    fitting = [solution for solution in map(solution_with, counts) if solution is not None]
    return min(fitting, key=lambda solution: solution[1].error, default=None)


def fewest_layers(is_enough: Callable[[int], bool], too_few: int, enough: int) -> int:
    """Return the smallest number above `too_few` for which `is_enough` returns True.

    `is_enough(enough)` must be true, and so must be every number above one that is enough.

    >>> fewest_layers(lambda count: count >= 7, 4, 8), fewest_layers(lambda count: True, 0, 1)
    (7, 1)
    """
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
    return enough


def _counts(num_layers: int) -> Iterator[int]:
    """Yield the numbers of layers to try: 1, 2, 4, 8, ... below `num_layers`, and `num_layers` itself.

    >>> list(_counts(12)), list(_counts(0))
    ([1, 2, 4, 8, 12], [])
    """
    count = 1
    while count < num_layers:
        yield count
        count *= 2
    if num_layers:
        yield num_layers


# --- predicted time ----------------------------------------------------------------------------------------------------


def added_seconds(trace: Trace, plan: Plan, calibration: Calibration = REFERENCE) -> float:
    """Return the predicted seconds that `plan` adds to a step, by default on one H200.

    These are seconds of the device, plus the host's for packing and checkpointing; calls of operations in a second forward pass cost the
    host nothing, since the device is busy meanwhile. For a compiled step they are seconds of the device alone.
    """
    added = added_time(trace, plan, replace(calibration, host=replace(calibration.host, operation=0.0)))
    return added.device_seconds + (0.0 if trace.is_compiled else added.host_seconds)
