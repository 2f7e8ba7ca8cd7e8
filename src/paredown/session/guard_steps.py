"""A guard at work: before each step of an optimizer it reads what was seen, and leaves the step out, repairs the plan, or does nothing.

    seen before a step                                             done
    gradients not finite, or far larger than usual                 the step is left out; the next forward pass looks at every slot in full
    the same again, and nothing wrong with any slot                the step is left out, and slots under suspicion are raised: what backward
                                                                   exponentiates first, then by predicted or seen error, more each time
    a slot that loses too much, or much more than it did           it is raised by one level
    steps 10, 30, 100, 300, ...                                    sensitivities are measured anew, with as many examples as the budget has
                                                                   room for, and the plan is settled anew

Whoever is raised is paid for by others (`assign/repair.py`). What decides is read from a reduction over all processes, and nothing else
that differs between them: all do the same. With nothing packed a guard does nothing.

How many examples a guard may probe with: a probe holds what it saves as it is, beside the model, and is to stay within the budget too.

    a probe takes    model, optimizer state, gradients        they are there when it runs, before a step of the optimizer
                     GRADIENTS x gradients                    the exact ones, those of one more backward, and a difference
                     SAVED x activations of the examples      as they are, rounded, and what flows back

Both factors are from above: 2.2 to 2.4, and 1.4 to 2.9, were measured on GPTs, ViTs and ResNets (`tests/session/test_guard_probe.py`).
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import inf, isfinite, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from paredown.assign.problem import ladder_of
from paredown.assign.repair import LEVELS, RepairedPlan, RepairTerms, repair, replan
from paredown.assign.sensitivity import Sensitivities
from paredown.errors import ApplyError
from paredown.optim.parameter_state import owner_of
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.activations import Activations
from paredown.session.changes import THE_PROBE, THE_STEP, Action
from paredown.session.guard import UNSEEN, Guard, GuardState, OptimizerSteps, Signals, SlotSignal, check_model, total_norm
from paredown.session.probe import probe
from paredown.sizes import say_bytes
from paredown.trace.trace import Trace

GRADIENTS, SAVED = 2.5, 3.0
COMES_AND_GOES = (Role.ACTIVATION, Role.TEMPORARY, Role.ERROR)


def probe_bytes(trace: Trace, plan: Plan, batch: Any, *, num_examples: int | None = None) -> int:
    """The predicted peak of a probe of `batch`, or of its first examples, between two steps of training under `plan`."""
    beside, each = _costs(trace, plan, batch)
    return int(beside + each * (count_examples(batch) if num_examples is None else num_examples))


def examples_within(batch: Any, trace: Trace, plan: Plan, budget_bytes: int) -> Any | None:
    """The first examples of `batch`, as many as can be probed within the budget; None if not even one can."""
    beside, each = _costs(trace, plan, batch)
    num = int((budget_bytes - beside) // each) if each else 1 << 62
    return first_examples(batch, num) if num > 0 else None


def first_examples(batch: Any, num: int) -> Any:
    """The first `num` examples of `batch`, or all where it has no more."""
    there = count_examples(batch)
    return tree_map(lambda leaf: leaf[:num] if _has_examples(leaf, there) else leaf, batch) if num < there else batch


def _costs(trace: Trace, plan: Plan, batch: Any) -> tuple[float, float]:
    """(what a probe takes however few examples it has, for each example)."""
    written, now = footprint(trace), footprint(trace, plan)
    held = sum(nbytes for role, nbytes in now.by_role.items() if role not in COMES_AND_GOES) + now.workspace_bytes
    share = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)) / max(written.by_role.get(Role.INPUT, 0), 1)
    gradients, saved = (written.by_role.get(role, 0) for role in (Role.GRADIENT, Role.ACTIVATION))
    return held + GRADIENTS * gradients, SAVED * saved * min(share, 1.0) / count_examples(batch)


def count_examples(batch: Any) -> int:
    """The length of the first tensor that has one."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf)), 1)


def _has_examples(leaf: Any, num: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == num


# --- A guard at work ---

REPROBE_BACKWARDS = 8  # six probes of about 12 step times each, of 10,000 steps
NOTICED = 0.05  # an error below this is no reason to act, however fast it grew
MILD = 8.0  # values below this do no harm in an exponent, in 8 bits
SHARE = 8  # one of so many slots is raised at the first suspicion
TOLD = 8  # steps in a row that are written down each; then the 16th, the 32nd, ...
NOT_FINITE = "gradients are not finite"
NO_ROOM = "nobody else can pay for it within the budget"


class GuardRunner:
    """The guard of one session. `change` puts another plan to work."""

    def __init__(
        self, guard: Guard, plan: Plan, model: nn.Module, activations: Activations, change: Callable[[Plan], None]
    ) -> None:
        check_model(guard.trace, model)
        self.guard, self.plan, self._model, self._change = guard, plan, weakref.ref(model), change
        self.budget_bytes = guard.budget_for(plan)
        self._levels = LEVELS if guard.limits.levels is None else ladder_of(guard.limits.levels)
        self.slots = {slot.name: slot for slot in guard.trace.activations if not slot.stays}
        self.sensitivities = guard.sensitivities
        self.memory = GuardState()
        self.actions: list[Action] = []
        self.is_probing = False
        self._activations = activations
        self._signals = Signals(activations, list(self.slots), guard.limits.every)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._handle = register_optimizer_step_pre_hook(_weakly(self))
        weakref.finalize(self, self._handle.remove)

    @property
    def terms(self) -> RepairTerms:
        """Within which plans are repaired."""
        return RepairTerms(self.guard.trace, self.budget_bytes, self.sensitivities, self._levels)

    def close(self) -> None:
        """Look no more."""
        self._handle.remove()
        self._activations.on_packed = lambda saved, piece, waiting: None

    # --- before a step ----------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Decide about the step that `optimizer` is about to take."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]
        if not parameters or not self._signals.has_any or not getattr(optimizer, "updates_next", True):
            return
        if owner_of(parameters[0]) not in (None, optimizer):
            return  # torch's own, inside of one of paredown.optim, whose step it is
        has_scaler = getattr(optimizer, "found_inf", None) is not None  # a GradScaler leaves steps out by itself
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm, looks = self._signals.read(None if has_scaler else total_norm(gradients))
        name = self._names[id(parameters[0])]
        is_new = self.memory.begin(name)
        if not self._takes(self.memory.taken.setdefault(name, OptimizerSteps()), norm, looks, is_new=is_new):
            drop = getattr(optimizer, "drop_gradients", optimizer.zero_grad)
            drop()
        if self.guard.batch is not None and is_new and self.memory.is_probe_due():
            self._probe_within_budget()

    def _takes(self, taken: OptimizerSteps, norm: float, looks: Mapping[str, SlotSignal], *, is_new: bool) -> bool:
        """Whether the step is taken by the optimizer that has `taken` those before; repairs the plan."""
        memory, signals = self.memory, self._signals
        alarm = self._alarm(taken, norm)
        wrong = self._wrong(looks)
        if alarm and not wrong and signals.looks_at_all:
            wrong = dict.fromkeys(self._suspects(taken, looks), f"{alarm}, and it is under suspicion")
        wrong = {name: why for name, why in wrong.items() if not memory.is_refused(name)}
        if wrong:
            keeps = {name for name in self.slots if memory.is_held(name) or self._is_tight(name)}
            self._put(repair(self.plan, self.terms, raised=list(wrong), keeps=keeps), wrong)
        signals.looks_at_all = bool(alarm) or (signals.looks_at_all and not is_new)
        memory.learn(looks)
        taken.learn(norm if norm != UNSEEN else None, is_taken=not alarm)
        if alarm and (taken.left_out <= TOLD or taken.left_out.bit_count() == 1):
            count = f", {taken.left_out} steps in a row" if taken.left_out > TOLD else ""
            self.actions.append(Action(memory.steps, THE_STEP, "due", "left out", alarm + count))
        return not alarm

    def _alarm(self, taken: OptimizerSteps, norm: float) -> str:
        """What is wrong with gradients, "" for nothing."""
        if not isfinite(norm):
            return NOT_FINITE
        usual = taken.usual_norm()
        is_jump = usual is not None and norm > self.guard.limits.gradient_jump * usual
        if is_jump and taken.left_out < self.guard.limits.patience:
            return f"the gradient norm is {norm:.3g}, and usually {usual:.3g}"
        return ""

    def _wrong(self, looks: Mapping[str, SlotSignal]) -> dict[str, str]:
        """The slots whose rounding went wrong, and how, the worst first."""
        found: dict[str, tuple[float, str]] = {}
        limits = self.guard.limits
        for name, look in looks.items():
            before = self.memory.looks.get(name)
            if not isfinite(look.largest):
                continue  # the forward pass is not finite itself: no format is to blame
            if look.error > limits.error:
                said = (
                    "values past its largest one become infinite"
                    if look.error == inf
                    else f"rounding it makes an error of {look.error:.3g} times its energy"
                )
                found[name] = look.error, said
            elif before is not None and look.error > max(NOTICED, limits.jump * before.error):
                found[name] = look.error, f"its rounding error rose from {before.error:.2g} to {look.error:.2g}"
            elif before is not None and look.largest > max(MILD, self._growth(name) * before.largest):
                found[name] = look.error, f"its largest value rose from {before.largest:.3g} to {look.largest:.3g}"
        return {name: why for name, (_, why) in sorted(found.items(), key=lambda row: (-row[1][0], row[0]))}

    def _growth(self, name: str) -> float:
        """By what the largest value may grow: by much where no block has a scale of its own, by less where backward is not linear."""
        if self.slots[name].pin is not None:
            return sqrt(self.guard.limits.jump)  # two of them are multiplied with each other in an exponent
        decision = self._activations.decisions.get(name)
        is_scaled = decision is None or decision.format is None or decision.format.block is not None
        return inf if is_scaled else self.guard.limits.jump

    def _suspects(self, taken: OptimizerSteps, looks: Mapping[str, SlotSignal]) -> list[str]:
        """Slots to raise where gradients are wrong and no slot is: those that are pinned, then by error; more from time to time."""

        def blame(name: str) -> tuple[bool, float, str]:
            decision = self._activations.decisions.get(name)
            error = looks[name].error
            if self.sensitivities is not None and decision is not None and decision.format is not None:
                error = self.sensitivities.of(name, decision.format) or error
            return self.slots[name].pin is None, -error, name

        count = max(1, len(looks) // SHARE) << min(taken.suspicions, 10)
        taken.suspicions += 1
        return sorted(looks, key=blame)[:count]

    def _is_tight(self, name: str) -> bool:
        """Whether a slot loses so much that it may not be lowered: a bar below that for raising it."""
        look = self.memory.looks.get(name)
        return look is not None and look.error > self.guard.limits.error / 4

    # --- plans ------------------------------------------------------------------------------------------------------------

    def _put(self, repaired: RepairedPlan, why: Mapping[str, str], whole: str = "") -> None:
        """Put a repaired plan to work, and write down what became of whom."""
        steps = self.memory.steps
        for move in repaired.moves:
            is_raised = move.slot in repaired.raised
            reason = whole or (why[move.slot] if is_raised and move.slot in why else f"pays for {', '.join(repaired.raised[:3])}")
            self.actions.append(Action(steps, move.slot, str(move.before or "as it is"), str(move.after or "as it is"), reason))
            self.memory.forget(move.slot, held_until=steps + self.guard.limits.hold if is_raised and not whole else None)
        for name in repaired.refused:
            there = str(self.plan.find((name,), self.slots[name].role).format or "as it is")
            self.actions.append(Action(steps, name, there, there, f"{why.get(name, whole)}; {NO_ROOM}"))
            self.memory.refused_until[name] = steps + self.guard.limits.hold
        if repaired.moves:
            self.plan = repaired.plan
            self._change(repaired.plan)

    def _probe_within_budget(self) -> None:
        """Probe with as many examples of the guard's batch as the budget has room for."""
        trace, batch = self.guard.trace, self.guard.batch
        part = examples_within(batch, trace, self.plan, self.budget_bytes)
        if part is not None:
            self.reprobe(part, self.guard.loss)
            return
        least = say_bytes(probe_bytes(trace, self.plan, batch, num_examples=1))
        why = f"one example would take {least} of a budget of {say_bytes(self.budget_bytes)}"
        self.actions.append(Action(self.memory.steps, THE_PROBE, "due", "left out", why))

    def reprobe(self, batch: Any, loss: Callable[..., Tensor] | None) -> Sensitivities:
        """Measure sensitivities anew, and settle the plan by them."""
        model = self._model()
        if model is None:
            raise ApplyError("the model of this session is gone.")
        with self._probing():
            found = probe(model, batch, self.guard.trace, loss=loss, backwards=REPROBE_BACKWARDS, seed=self.memory.steps)
        self.sensitivities = Sensitivities(_averaged(found.errors, self._signals.device), self.memory.steps)
        keeps = {name for name in self.slots if self.memory.is_held(name)}
        self._put(replan(self.plan, self.terms, keeps=keeps), {}, whole=f"sensitivities of step {self.memory.steps}")
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
        """All that decides what a guard does next, as JSON values."""
        return {
            "memory": self.memory.to_json(),
            "actions": [action.to_json() for action in self.actions],
            "sensitivities": self.sensitivities.to_json() if self.sensitivities is not None else None,
            "looks_at_all": self._signals.looks_at_all,
        }

    def load_state_dict(self, state: Mapping[str, Any], plan: Plan) -> None:
        """Go on where a guard was that had come to `plan`."""
        try:
            memory, actions = GuardState.from_json(state["memory"]), [Action(*row) for row in state["actions"]]
            saved, looks_at_all = state["sensitivities"], bool(state["looks_at_all"])
            sensitivities = Sensitivities.from_json(saved) if saved is not None else None
        except (KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ApplyError(
                f"the guard's part of the state cannot be read ({what}). Give what session.state_dict() returned."
            ) from error
        self.memory, self.actions, self.sensitivities = memory, actions, sensitivities
        self._signals.looks_at_all = looks_at_all
        self.plan = plan
        self._change(plan)


def _weakly(guarded: GuardRunner) -> Callable[..., None]:
    """A hook for all optimizers that keeps nothing alive."""
    there = weakref.ref(guarded)

    def before_step(optimizer: Any, args: Any, keywords: Any) -> None:
        found = there()
        if found is not None:
            found.before_step(optimizer)

    return before_step


def _averaged(errors: Mapping[str, Mapping[str, float]], device: torch.device) -> dict[str, dict[str, float]]:
    """The mean over all processes, which have the same slots."""
    rows = [(name, text) for name in sorted(errors) for text in sorted(errors[name])]
    values = torch.tensor([errors[name][text] for name, text in rows], dtype=torch.float32, device=device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    found: dict[str, dict[str, float]] = {name: {} for name in errors}
    for (name, text), value in zip(rows, values.tolist(), strict=True):
        found[name][text] = value
    return found
