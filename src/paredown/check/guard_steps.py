"""Decides for a guard, before each optimizer step, whether to take the step, to skip it, or to repair the plan.

    measured before a step                                         action
    gradients not finite, or far larger than usual                 the step is skipped; the next forward pass measures every slot in full
    the same in the next step, and no slot has a large error       the step is skipped, and suspects are raised: first slots that
                                                                   backward exponentiates, then by predicted or measured error
    a slot whose error is too large, or grew much                  the slot is raised by one level
    steps 10, 30, 100, 300, ...                                    sensitivities are measured with as many examples as fit into the budget,
                                                                   and formats are chosen anew

Other slots are lowered so that raised ones fit into the budget (`assignment/repair.py`). Decisions depend only on numbers that are reduced
over all processes, so that all processes decide alike. A guard does nothing while no slot is packed.

A probe holds its saved tensors unmodified, beside the model, and must stay within the budget too. Its bytes are at most

    model, optimizer state, gradients        which exist when it runs, before an optimizer step
    + GRADIENTS x gradients                  exact gradients, those of another backward pass, and a difference
    + SAVED x activations of the examples    unmodified and rounded activations, and their gradients

Both factors are upper bounds: 2.2 to 2.4, and 1.4 to 2.9, were measured on GPTs, ViTs and ResNets (`tests/check/test_guard_probe.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import inf, isfinite, sqrt
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from paredown.assignment.assignment_problem import ladder_of
from paredown.assignment.repair import LEVELS, RepairedPlan, RepairTerms, repair, replan
from paredown.assignment.sensitivity import Sensitivities
from paredown.autograd.hooks import register_weakly
from paredown.check.guard import Guard, GuardState, OptimizerSteps, check_model, total_norm
from paredown.check.probe import probe
from paredown.errors import ApplyError
from paredown.formats.format import Format
from paredown.optim.parameter_state import owner_of
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.planned_step import planned_step
from paredown.plan.trace import Trace
from paredown.roles import Role
from paredown.session.changes import THE_PROBE, THE_STEP, UNMODIFIED, Action
from paredown.session.eager.activations import Activations
from paredown.session.signals import UNSEEN, SessionGuard, Signals, SlotSignal
from paredown.session.value_bounds import is_capturing
from paredown.sizes import say_bytes, say_bytes_twice

GRADIENTS, SAVED = 2.5, 3.0  # the factors at the top of the file
WITHIN_STEP = (Role.ACTIVATION, Role.TEMPORARY, Role.ERROR)  # roles of tensors that do not exist between steps
REPROBE_BACKWARDS = 8  # backward passes of a probe: about 12 step times, six times in 10,000 steps
MIN_ERROR = 0.05  # a smaller error is no reason to act, however fast it grew
MIN_LARGEST = 8.0  # smaller values do no harm in an exponent, in 8 bits
SUSPECT_DIVISOR = 8  # one of this many slots is raised at the first suspicion
MAX_LISTED = 8  # skipped steps in a row that are listed each; then the 16th, the 32nd, ...
NOT_FINITE = "gradients are not finite"
OVER_BUDGET = "no other slot can be lowered enough to keep the budget"


@final
class GuardRunner(SessionGuard):
    """The guard at work in one session: it skips steps and changes formats during training.

    It calls `change(plan)` with each new plan, so that the session stores tensors accordingly.
    """

    def __init__(
        self, guard: Guard, plan: Plan, model: nn.Module, activations: Activations, change: Callable[[Plan], None]
    ) -> None:
        check_model(guard.trace, model)
        self.guard, self.plan, self._model, self._change = guard, plan, weakref.ref(model), change
        self.budget_bytes = guard.budget_for(plan)
        self._levels = LEVELS if guard.limits.levels is None else ladder_of(guard.limits.levels)
        trace = planned_step(guard.trace, plan)
        self.slots = {slot.name: slot for slot in trace.activations if not slot.stays}
        self.sensitivities = guard.sensitivities
        self.memory = GuardState()
        self.actions: list[Action] = []
        self.is_probing = False
        self._activations = activations
        self.format_of: Callable[[str], Format | None] = self._eager_format
        self.signals = Signals(activations, list(self.slots), guard.limits.every)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._handle = register_weakly(register_optimizer_step_pre_hook, self, GuardRunner.before_step)

    @property
    def terms(self) -> RepairTerms:
        """Return the trace, budget, sensitivities and allowed formats that a new plan must respect."""
        return RepairTerms(self.guard.trace, self.budget_bytes, self.sensitivities, self._levels)

    def passes_over(self) -> bool:
        """Return whether the guard itself runs this forward pass; raise ApplyError in a CUDA graph capture."""
        if is_capturing():
            raise ApplyError(
                "a CUDA graph is being captured, but the guard of this session reads measured errors on the host before each optimizer "
                "step, which a capture forbids. Capture a session without a guard: apply(plan, model)."
            )
        return self.is_probing

    def read_formats(self, format_of: Callable[[str], Format | None]) -> None:
        """Replace the function from which the guard reads a saved tensor's current format, given its name."""
        self.format_of = format_of

    def close(self) -> None:
        """Remove the guard's hooks from the optimizers and from the model."""
        self._handle.remove()
        self._activations.observe(None)

    # --- before a step ----------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip the step that `optimizer` is about to take, or change formats, if limits are exceeded."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]
        if not parameters or not self.signals.has_any or not getattr(optimizer, "updates_next", True):
            return
        if owner_of(parameters[0]) not in (None, optimizer):
            return  # a torch.optim optimizer inside one of paredown.optim, whose step is the one that counts
        has_scaler = getattr(optimizer, "found_inf", None) is not None  # a GradScaler skips steps itself
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm, measured = self.signals.read(None if has_scaler else total_norm(gradients))
        name = self._names[id(parameters[0])]
        is_new = self.memory.begin(name)
        if not self._takes(self.memory.taken.setdefault(name, OptimizerSteps()), norm, measured, is_new=is_new):
            drop = getattr(optimizer, "drop_gradients", optimizer.zero_grad)
            drop()
        if self.guard.batch is not None and is_new and self.memory.is_probe_due():
            self._probe_within_budget()

    def _takes(self, taken: OptimizerSteps, norm: float, measured: Mapping[str, SlotSignal], *, is_new: bool) -> bool:
        """Return whether the optimizer step may run, after raising formats of tensors with too large errors.

        `norm` is the gradient norm, `measured` has the errors of saved tensors, and `taken` the statistics of the optimizer. `is_new` says
        whether this optimizer call begins a new training step.
        """
        memory, signals = self.memory, self.signals
        alarm = self._alarm(taken, norm)
        wrong = self._wrong(measured)
        if alarm and not wrong and signals.looks_at_all:
            wrong = dict.fromkeys(self._suspects(taken, measured), f"{alarm}, and it is a suspect")
        wrong = {name: why for name, why in wrong.items() if not memory.is_refused(name)}
        if wrong:
            keeps = {name for name in self.slots if memory.is_held(name) or self._is_tight(name)}
            self._use(repair(self.plan, self.terms, raised=list(wrong), keeps=keeps), wrong)
        signals.looks_at_all = bool(alarm) or (signals.looks_at_all and not is_new)
        memory.update(measured)
        taken.update(norm if norm != UNSEEN else None, is_taken=not alarm)
        if alarm and (taken.left_out <= MAX_LISTED or taken.left_out.bit_count() == 1):
            count = f", {taken.left_out} steps in a row" if taken.left_out > MAX_LISTED else ""
            self.actions.append(Action(memory.steps, THE_STEP, "due", "skipped", alarm + count))
        return not alarm

    def _alarm(self, taken: OptimizerSteps, norm: float) -> str:
        """Return why a step with the gradient norm `norm` must be skipped; "" if it may be taken."""
        if not isfinite(norm):
            return NOT_FINITE
        usual = taken.usual_norm()
        is_jump = usual is not None and norm > self.guard.limits.gradient_jump * usual
        if is_jump and taken.left_out < self.guard.limits.patience:
            return f"the gradient norm is {norm:.3g}, and usually {usual:.3g}"
        return ""

    def _wrong(self, measured: Mapping[str, SlotSignal]) -> dict[str, str]:
        wrong: dict[str, tuple[float, str]] = {}
        limits = self.guard.limits
        for name, signal in measured.items():
            before = self.memory.looks.get(name)
            if not isfinite(signal.largest):
                continue  # the values themselves are not finite: the format is not the cause
            if signal.error > limits.error:
                reason = (
                    "values above the largest one of its format become infinite"
                    if signal.error == inf
                    else f"its squared rounding error is {signal.error:.3g} times its sum of squares"
                )
                wrong[name] = signal.error, reason
            elif before is not None and signal.error > max(MIN_ERROR, limits.jump * before.error):
                wrong[name] = signal.error, f"its rounding error rose from {before.error:.2g} to {signal.error:.2g}"
            elif before is not None and signal.largest > max(MIN_LARGEST, self._growth(name) * before.largest):
                wrong[name] = signal.error, f"its largest value rose from {before.largest:.3g} to {signal.largest:.3g}"
        return {name: why for name, (_, why) in sorted(wrong.items(), key=lambda row: (-row[1][0], row[0]))}

    def _growth(self, name: str) -> float:
        """Return the factor by which a saved tensor's largest value may grow before it gets a more precise format."""
        if self.slots[name].pin is not None:
            return sqrt(self.guard.limits.jump)  # query and key, which are multiplied with each other in an exponent
        format = self.format_of(name)
        is_scaled = format is None or format.block is not None
        return inf if is_scaled else self.guard.limits.jump

    def _suspects(self, taken: OptimizerSteps, measured: Mapping[str, SlotSignal]) -> list[str]:
        """Return the saved tensors to store more precisely if gradients are unusual though no error is large.

        Those that backward exponentiates come first, then those of the largest error. With each call in a row there are twice as many.
        """

        def rank(name: str) -> tuple[bool, float, str]:
            error, format = measured[name].error, self.format_of(name)
            if self.sensitivities is not None and format is not None:
                error = self.sensitivities.of(name, format) or error
            return self.slots[name].pin is None, -error, name

        count = max(1, len(measured) // SUSPECT_DIVISOR) << min(taken.suspicions, 10)
        taken.suspicions += 1
        return sorted(measured, key=rank)[:count]

    def _eager_format(self, name: str) -> Format | None:
        decision = self._activations.decisions.get(name)
        return decision.format if decision is not None else None

    def _is_tight(self, name: str) -> bool:
        signal = self.memory.looks.get(name)
        return signal is not None and signal.error > self.guard.limits.error / 4

    # --- plans ------------------------------------------------------------------------------------------------------------

    def _use(self, repaired: RepairedPlan, why: Mapping[str, str], whole: str = "") -> None:
        """Put a repaired plan to work, and record an `Action` for each slot that was changed or refused a change.

        `why` has the reason by slot (saved tensor), and `whole`, if given, replaces the reasons of all changes.
        """
        steps = self.memory.steps
        for move in repaired.moves:
            is_raised = move.slot in repaired.raised
            reason = whole or (
                why[move.slot] if is_raised and move.slot in why else f"makes space for {', '.join(repaired.raised[:3])}"
            )
            before, after = str(move.before or UNMODIFIED), str(move.after or UNMODIFIED)
            self.actions.append(Action(steps, move.slot, before, after, reason))
            self.memory.forget(move.slot, held_until=steps + self.guard.limits.hold if is_raised and not whole else None)
        for name in repaired.refused:
            current = str(self.plan.find((name,), self.slots[name].role).format or UNMODIFIED)
            self.actions.append(Action(steps, name, current, current, f"{why.get(name, whole)}; {OVER_BUDGET}"))
            self.memory.refused_until[name] = steps + self.guard.limits.hold
        if repaired.moves:
            self.plan = repaired.plan
            self._change(repaired.plan)

    def _probe_within_budget(self) -> None:
        trace, batch = self.guard.trace, self.guard.batch
        part = examples_within(batch, trace, self.plan, self.budget_bytes)
        if part is not None:
            self.reprobe(part, self.guard.loss)
            return
        least = say_bytes(probe_bytes(trace, self.plan, batch, num_examples=1))
        why = f"one example would take {least} of a budget of {say_bytes_twice(self.budget_bytes)}"
        self.actions.append(Action(self.memory.steps, THE_PROBE, "due", "skipped", why))

    def reprobe(self, batch: Any, loss: Callable[..., Tensor] | None) -> Sensitivities:
        """Measure on `batch` how much gradient error rounding each saved tensor causes, and choose formats anew.

        The new formats are within the budget. `loss` is as for `probe`.
        """
        model = self._model()
        if model is None:
            raise ApplyError("the model of this session was deleted: there is nothing to probe. Keep a reference to the model.")
        with self._probing():
            measured = probe(model, batch, self.guard.trace, loss=loss, backwards=REPROBE_BACKWARDS, seed=self.memory.steps)
        self.sensitivities = Sensitivities(_averaged(measured.errors, self.signals.device), self.memory.steps)
        keeps = {name for name in self.slots if self.memory.is_held(name)}
        self._use(replan(self.plan, self.terms, keeps=keeps), {}, whole=f"sensitivities of step {self.memory.steps}")
        return self.sensitivities

    @contextmanager
    def _probing(self) -> Generator[None]:
        self.is_probing = True
        try:
            yield
        finally:
            self.is_probing = False

    # --- checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guard as JSON values, for `load_state_dict`."""
        return {
            "memory": self.memory.to_json(),
            "actions": [action.to_json() for action in self.actions],
            "sensitivities": self.sensitivities.to_json() if self.sensitivities is not None else None,
            "looks_at_all": self.signals.looks_at_all,
        }

    def load_state_dict(self, state: Mapping[str, Any], plan: Plan) -> None:
        """Restore what `state_dict()` of a guard returned; `plan` must be the plan that was in use then."""
        try:
            memory, actions = GuardState.from_json(state["memory"]), [Action(*row) for row in state["actions"]]
            saved, looks_at_all = state["sensitivities"], bool(state["looks_at_all"])
            sensitivities = Sensitivities.from_json(saved) if saved is not None else None
        except (KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ApplyError(
                f"the guard's part of the state cannot be read ({what}). Pass what session.state_dict() returned."
            ) from error
        self.memory, self.actions, self.sensitivities = memory, actions, sensitivities
        self.signals.looks_at_all = looks_at_all
        self.plan = plan
        self._change(plan)


def _averaged(errors: Mapping[str, Mapping[str, float]], device: torch.device) -> dict[str, dict[str, float]]:
    """Return gradient errors, by slot and format, averaged over all processes.

    All processes must have measured the same saved tensors (slots) in the same formats.
    """
    rows = [(name, text) for name in sorted(errors) for text in sorted(errors[name])]
    values = torch.tensor([errors[name][text] for name, text in rows], dtype=torch.float32, device=device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    means: dict[str, dict[str, float]] = {name: {} for name in errors}
    for (name, text), value in zip(rows, values.tolist(), strict=True):
        means[name][text] = value
    return means


# --- the memory of a probe --------------------------------------------------------------------------------------------------------


def probe_bytes(trace: Trace, plan: Plan, batch: Any, *, num_examples: int | None = None) -> int:
    """Return the predicted peak in bytes while a probe measures gradient errors, before an optimizer step.

    The probe gets the first `num_examples` of `batch`, or all if it is None.
    """
    fixed, each = _costs(trace, plan, batch)
    return int(fixed + each * (count_examples(batch) if num_examples is None else num_examples))


def examples_within(batch: Any, trace: Trace, plan: Plan, budget_bytes: int) -> Any | None:
    """Return the part of `batch` with as many examples as a probe can run on within the budget; None if it is none."""
    fixed, each = _costs(trace, plan, batch)
    num = int((budget_bytes - fixed) // each) if each else 1 << 62
    return first_examples(batch, num) if num > 0 else None


def first_examples(batch: Any, num: int) -> Any:
    """Return the first `num` examples of `batch`, or the whole batch if it has at most `num`."""
    total = count_examples(batch)
    if num >= total:
        return batch
    return tree_map(lambda leaf: leaf[:num] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == total else leaf, batch)


def _costs(trace: Trace, plan: Plan, batch: Any) -> tuple[float, float]:
    """Return (fixed bytes, bytes per example of `batch`); from them the peak memory of a probe is predicted."""
    baseline, current = footprint(trace), footprint(trace, plan)
    held = sum(nbytes for role, nbytes in current.by_role.items() if role not in WITHIN_STEP) + current.workspace_bytes
    share = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)) / max(
        baseline.by_role.get(Role.INPUT, 0), 1
    )
    gradients, saved = (baseline.by_role.get(role, 0) for role in (Role.GRADIENT, Role.ACTIVATION))
    return held + GRADIENTS * gradients, SAVED * saved * min(share, 1.0) / count_examples(batch)


def count_examples(batch: Any) -> int:
    """Return the number of examples in `batch`: the length of its first tensor, or 1 if there is no tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf)), 1)
