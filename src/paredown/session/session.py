"""`apply` puts a plan onto an unmodified model: from then on its saved activations and its weights wait packed, in the user's own loop.

    session = apply(plan, model)
    loss = criterion(model(x), y); loss.backward(); optimizer.step()     # nothing changes here
    session.changes                                                      # what was asked for and what was given, slot by slot
    session.close()                                                      # the plain model again

The model keeps its class, parameters, state_dict and keys; a copy of it is a plain model. No activation is packed without gradients (eval
under no_grad), inside checkpointed parts (which are not kept at all; `plan.recompute` makes more of them), and in what torch.compile
compiles as a whole. Packed weights are the same parameters, plain inside of their modules; outside they behave as
`optim/packed_parameter.py` says.

Where a session and an optimizer meet: what the plan asks for moments and gradients, and what became of it.

The optimizers of `paredown.optim` use the formats that the plan gives to each parameter, whether they are made before or after `apply`.
Rows of `session.changes` say what is not as it was asked for: small parameters, gradients that others hold, or no such optimizer at all.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.assign.sensitivity import Sensitivities
from paredown.errors import ApplyError
from paredown.formats.catalog import MIN_DIMS, MIN_NUMEL, is_small
from paredown.optim.parameter_state import Choice, RequestedFormats, owner_of, request_of, set_request
from paredown.plan.plan import Plan
from paredown.roles import FORMATTED, Role
from paredown.session.activations import Activations
from paredown.session.changes import (
    AGAIN,
    HELD,
    LOWERED,
    Actions,
    Change,
    Changes,
    Explanation,
    SlotExplanation,
    describe_state,
    explain_session,
)
from paredown.session.checkpointing import CheckpointedModules
from paredown.session.guard import Guard, checked_guard
from paredown.session.guard_steps import GuardRunner
from paredown.session.weights import ADDED, Weights
from paredown.simulate.rounded_values import MODES, Simulate
from paredown.simulate.simulated_session import SimulatedSession
from paredown.trace.autograd_graph import MIN_PACKED_NUMEL
from paredown.trace.module_watch import Watch

STATE = (Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
NOBODY = "no optimizer of paredown.optim has these parameters yet: make one, such as paredown.optim.AdamW(model.parameters())"
SMALL = "they keep float32 state and plain gradients: that takes little, and norms and biases are sensitive"
REPLICATED = "gradients of several processes are averaged in the buckets of DistributedDataParallel, which hold them plain"
SHARDED = "fully_shard brings the gradient of each shard as a plain tensor"


def requested_formats_of(model: nn.Module, plan: Plan) -> list[tuple[nn.Parameter, RequestedFormats]]:
    """The formats that `plan` gives to the parameters of `model`; ApplyError or OptimError if their optimizer cannot follow it."""
    rows: list[tuple[nn.Parameter, RequestedFormats]] = []
    checked: set[Any] = set()
    for name, parameter in model.named_parameters():
        assigned = {role: plan.find((name,), role) for role in (Role.WEIGHT, *STATE)}
        choices: dict[Role, Choice] = {role: (a.format, a.rounding_in(role)) for role, a in assigned.items()}
        if any(format is not None for format, _ in choices.values()):
            rows.append((parameter, RequestedFormats(name, choices)))
            owner = owner_of(parameter)
            if owner is not None and owner not in checked and owner.has_started:
                raise ApplyError(
                    f"{type(owner).__name__} of paredown.optim has {name} and has state already ({owner.updates} updates), which is not "
                    "stored in the plan's formats. Apply the plan before the first step and before load_state_dict(); or apply it "
                    "without that optimizer, make a new one, and load export_state() of the old one into it."
                )
            if owner is not None:
                checked.add(owner)
                owner.check_request(parameter, rows[-1][1])
    return rows


def request_formats(model: nn.Module, rows: list[tuple[nn.Parameter, RequestedFormats]]) -> None:
    """Record the plan's formats for optimizers that are made later, and pass them on to those that were made before."""
    for parameter, request in rows:
        set_request(parameter, request)
    for owner in {owner_of(parameter) for parameter in model.parameters()} - {None}:
        if not owner.has_started:
            owner.follow_requests()


def withdraw_requests(model: nn.Module) -> None:
    """Ask for nothing any more."""
    for parameter in model.parameters():
        set_request(parameter, None)


def state_changes(model: nn.Module, plan: Plan) -> Iterator[Change]:
    """What the plan asks for moments and gradients, and is given otherwise."""
    wanted = [(name, p, role, plan.find((name,), role).format) for name, p in model.named_parameters() for role in STATE]
    wanted = [row for row in wanted if row[3] is not None]
    if wanted and all(owner_of(p) is None for _, p, _, _ in wanted):
        for role in STATE:
            formats = list(dict.fromkeys(str(format) for _, _, of, format in wanted if of is role))
            if formats:
                yield Change(role.value, ", ".join(formats), "as it is", NOBODY)
        return
    small = {name for name, p, _, _ in wanted if is_small(p.shape)}
    if small:
        yield Change(
            f"{len(small)} parameters of fewer than {MIN_DIMS} dimensions or {MIN_NUMEL} values", "formats", "float32", SMALL
        )
    for name, p, role, format in wanted:
        given = None if name in small else _given(p, role)
        if given is not None:
            yield Change(f"{role.value}={name}", str(format), *given)


def _given(parameter: Tensor, role: Role) -> tuple[str, str] | None:
    """What one slot of a parameter has instead of what was asked for, and why."""
    owner = owner_of(parameter)
    if owner is None:
        return "as it is", NOBODY
    entry = owner.entry_of(parameter)
    if entry is not None and request_of(parameter) is None and entry.choices.format(role) is None:
        return "as it is", ADDED
    if role is not Role.GRADIENT or entry is None or entry.gradient is not None:
        return None
    if owner.memory.release:
        return "nothing", "release=True uses each gradient in backward and frees it"
    if entry.choices.format(Role.GRADIENT) is None:
        return "as it is", "the optimizer was made with gradient=None for it"
    return "as it is", SHARDED if isinstance(parameter, DTensor) else REPLICATED


# --- `apply` puts a plan onto an unmodified model ---

VERSION = 1
# Both weak, as a session knows its model; the hooks on the model keep the session.
_SESSIONS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session | SimulatedSession]] = weakref.WeakKeyDictionary()
COMPILED = "torch.compile runs the model: packing does not reach what it saves"
IN_THREADS = "it ran in a thread while several forward passes of the model were running: which of them it belongs to is not known"
LATER = "store mode has no such tensor"


class Session:
    """A plan at work on a model."""

    def __init__(self, plan: Plan, model: nn.Module, seed: int, *, is_compiled: bool = False, guard: Guard | None = None) -> None:
        self.plan = self.applied = plan  # a guard changes the first
        self._model = weakref.ref(model)
        self._packs_activations = plan.packs_activations
        if not self._packs_activations:
            self._missing = tuple(plan.check(self._parameter_slots()))
        self._activations = Activations(plan, seed)
        self._is_checked = False
        self._modules = list(model.modules())
        self._watch = Watch(model, self._activations.save, on_begin=self._begin, on_end=self._end, min_numel=MIN_PACKED_NUMEL)
        rows = requested_formats_of(model, plan)  # may refuse
        self._recomputed = CheckpointedModules(plan, model)  # may refuse too
        self._watch.passed_over = frozenset(self._recomputed.modules)
        self._guarded = GuardRunner(guard, plan, model, self._activations, self._change) if guard is not None else None  # and this
        self._weights = Weights(plan, model, is_compiled=is_compiled)
        self._watch.attach(follows=self._packs_activations)
        try:
            self._weights.attach()
        except BaseException:
            self._watch.detach()
            raise
        self._recomputed.attach()
        request_formats(model, rows)
        self._is_open = True

    @property
    def seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._activations.seed

    @property
    def forwards(self) -> int:
        """Forward passes with gradients so far: the step of stochastic rounding."""
        return self._activations.forwards

    @property
    def stored_bytes(self) -> int:
        """Bytes of the activations that wait packed at this moment."""
        return self._activations.stored_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are packed: their codes and scales."""
        return self._weights.nbytes

    def unpacked(self) -> AbstractContextManager[None]:
        """A context in which all parameters are plain, as if there was no session; what was changed is encoded when it ends."""
        return self._weights.unpacked()

    @property
    def changes(self) -> Changes:
        """What is not as it was asked for, slot by slot; complete after the first forward pass."""
        model = self._model()
        rows = [*self._weights.changes(), *(state_changes(model, self.plan) if model is not None else ())]
        rows += [Change(name, text, "nothing", LATER) for name, text in self._asked_later()]
        asked = self.plan.find
        for name, decision in self._activations.decisions.items():
            if decision.format != decision.asked and name not in self._activations.returned:
                rows.append(Change(name, str(decision.asked), str(decision.format or "as it is"), decision.reason))
        for name, reason in self._activations.left.items():
            wanted = asked((name,), Role.ACTIVATION).format
            is_own = reason in ("it is a weight", "it is a buffer") or self._recomputed.has(name)
            if wanted is not None and not is_own:
                rows.append(Change(name, str(wanted), "as it is", reason))
        for name in sorted(self._activations.returned):
            wanted = asked((name,), Role.ACTIVATION).format
            if wanted is not None:
                rows.append(Change(name, str(wanted), "as it is", HELD))
        rest = asked(("",), Role.ACTIVATION).format
        if rest is not None and self._watch.small:
            small = f"{len(self._watch.small)} of fewer than {MIN_PACKED_NUMEL} values"
            rows.append(Change(small, str(rest), "as they are", "packing them would save little"))
        rows += [Change(name, "a format", "nothing", "no such slot in this model") for name in self._missing]
        rows += [Change(path, str(rest), "plain", IN_THREADS) for path in sorted(self._watch.in_threads) if rest is not None]
        if self._watch.was_compiled and self._packs_activations:
            rows.append(Change("the model", "packed activations", "as they are", COMPILED))
        if self._watch.was_compiled:
            rows += [Change(path, AGAIN, "saved", COMPILED) for path in self._recomputed.paths]
        return Changes(rows)

    @property
    def actions(self) -> Actions:
        """What the guard did, step by step; nothing without one."""
        return Actions(self._guarded.actions if self._guarded is not None else ())

    @property
    def budget_bytes(self) -> int | None:
        """What the guard keeps to; None without one."""
        return self._guarded.budget_bytes if self._guarded is not None else None

    @property
    def sensitivities(self) -> Sensitivities | None:
        """What the guard knows of them: those that it was given, or measured last."""
        return self._guarded.sensitivities if self._guarded is not None else None

    def reprobe(self, batch: Any, *, loss: Callable[..., Tensor] | None = None) -> Sensitivities:
        """Measure sensitivities anew, and let the guard settle the plan by them; `batch` and `loss` are as in `probe`."""
        if self._guarded is None:
            raise ApplyError("this session has no guard, which would use them: apply(plan, model, guard=Guard(trace)).")
        return self._guarded.reprobe(batch, loss)

    def explain(self) -> Explanation:
        """Slot by slot: what the plan asked for, what it is now, and why: lowered, pinned, held, raised later."""
        slots = self._guarded.slots if self._guarded is not None else self._activations.decisions
        changes = self.changes
        told = {change.slot for change in changes}
        rows = [
            SlotExplanation(path, AGAIN, AGAIN, "its inside is not saved") for path in self._recomputed.paths if path not in told
        ]
        packed = {f"weight={name}": str(weight.packed.format) for name, weight in self._weights.weights.items()}
        rows += [SlotExplanation(slot, text, text, LOWERED) for slot, text in packed.items() if slot not in told]
        return Explanation([*explain_session(self.applied, self._activations, changes, self.actions, slots), *rows])

    def state_dict(self) -> dict[str, Any]:
        """The plan, the seed and the count of forward passes: with these, stochastic rounding goes on with the same bits.

        With a guard, the plan is the one that it came to, and all that the guard remembers is there too.
        """
        state = {"version": VERSION, "plan": self.plan.to_json(), "seed": self.seed, "forwards": self.forwards}
        if self._guarded is not None:
            state["guard"] = {"applied": self.applied.to_json(), **self._guarded.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a session with the same plan was."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION or not {"plan", "seed", "forwards"} <= set(state):
            raise ApplyError(
                f"this is not the state of a session, version {VERSION}: it {describe_state(state)}. "
                "Give what session.state_dict() returned."
            )
        if not all(type(state[name]) is int and abs(state[name]) < 2**64 for name in ("seed", "forwards")):
            raise ApplyError("seed and forwards of a session's state are whole numbers. Give what session.state_dict() returned.")
        guard: Mapping[str, Any] | None = state.get("guard")
        if guard is not None and (not isinstance(guard, Mapping) or "applied" not in guard):
            raise ApplyError(f"the guard's part of the state {describe_state(guard)}. Give what session.state_dict() returned.")
        if (guard is None) != (self._guarded is None):
            has, had = ("no guard", "one") if self._guarded is None else ("a guard", "none")
            raise ApplyError(f"this session has {has}, and the one whose state this is had {had}. Apply the plan in the same way.")
        other = Plan.from_json(state["plan"] if guard is None else guard["applied"])
        if other != self.applied:
            raise ApplyError(
                f"the state belongs to another plan; they differ in:\n{self.applied.diff(other)}\nApply that plan, then load."
            )
        if guard is not None and self._guarded is not None:
            self._guarded.load_state_dict(guard, Plan.from_json(state["plan"]))
        self._activations.seed, self._activations.forwards = int(state["seed"]), int(state["forwards"])

    def close(self) -> None:
        """Give the plain model back, its weights decoded. Graphs that are waiting for their backward still work."""
        self._watch.detach()
        self._recomputed.detach()
        self._weights.detach()
        if self._guarded is not None:
            self._guarded.close()
        model = self._model()
        if model is not None:
            withdraw_requests(model)
            _close(model, self)
        self._is_open = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self._model()
        what = type(model).__name__ if model is not None else "a model that is gone"
        passes = "1 forward pass" if self.forwards == 1 else f"{self.forwards} forward passes"
        state = f"{passes}, {self.stored_bytes:,} bytes waiting" if self._is_open else "closed"
        return f"Session({what}, {state})"

    # --- inside -----------------------------------------------------------------------------------------------------------

    _missing: tuple[str, ...] = ()

    def _begin(self) -> bool:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
            raise ApplyError(
                "a model with a paredown session was called inside torch.func (vmap, grad, jacrev ...), which forbids packing what it "
                "saves. Call session.close() first, or use a copy: copy.deepcopy(model) is a plain model."
            )
        if self._guarded is not None and self._guarded.is_probing:
            return False
        if not self._packs_activations:  # activations as the user wrote it
            self._activations.forwards += 1
            return False
        self._activations.begin(is_sharded=any(hasattr(type(module), "reshard") for module in self._modules))
        return True

    def _end(self, output: Any) -> None:
        self._activations.end(output)
        if output is not None and not self._is_checked:
            seen = self._activations.names | self._watch.small
            self._missing = tuple(self.plan.check([((name,), Role.ACTIVATION) for name in seen] + self._parameter_slots()))
            self._is_checked = True
            self._watch.end_first_pass()

    def _change(self, plan: Plan) -> None:
        """A guard came to another plan: it holds from the next forward pass on."""
        self.plan = plan
        self._activations.change(plan)

    def _parameter_slots(self) -> list[tuple[tuple[str, ...], Role]]:
        model = self._model()
        names = [name for name, _ in model.named_parameters()] if model is not None else []
        return [((name,), role) for role in FORMATTED if role is not Role.ACTIVATION for name in names]

    def _asked_later(self) -> list[tuple[str, str]]:
        """What a plan asks for parameters and their state: a role where that is all alike, single slots otherwise."""
        rows: list[tuple[str, str]] = []
        for role in (role for role in FORMATTED if role in (Role.MASTER, Role.ERROR)):
            whole = self.plan.find(("",), role).format
            rows += [(role.value, str(whole))] if whole is not None else []
            for (name,) in [names for names, of in self._parameter_slots() if of is role]:
                own = self.plan.find((name,), role).format
                rows += [(f"{role.value}={name}", str(own))] if own is not None and own != whole else []
        return rows


@overload
def apply(
    plan: Plan, model: nn.Module, *, seed: int = 0, mode: Literal["store"] = "store", guard: Guard | None = None
) -> Session: ...
@overload
def apply(plan: Plan, model: nn.Module, *, seed: int = 0, mode: Literal["simulate", "peppp"] | Simulate) -> SimulatedSession: ...
def apply(
    plan: Plan, model: nn.Module, *, seed: int = 0, mode: str | Simulate = "store", guard: Guard | None = None
) -> Session | SimulatedSession:
    """Put `plan` onto `model`, in place. `seed` is that of stochastic rounding.

    `mode`: "store" makes tensors wait packed; "simulate", or a `Simulate` with choices of its own, makes arithmetic see rounded values;
    "peppp" is the `Simulate` that rounds where PEPPP does.
    A `guard` changes the plan of a store session when rounding goes wrong.
    """
    if isinstance(plan, nn.Module) or isinstance(model, Plan):
        raise ApplyError("apply takes the plan first, then the model: paredown.apply(plan, model).")
    if not isinstance(plan, Plan) or not isinstance(model, nn.Module):
        given = f"{type(plan).__name__} and {type(model).__name__}"
        raise ApplyError(f"apply takes a Plan and a torch.nn.Module, not {given}: apply(Plan.preset('activations8'), model).")
    is_compiled, model = is_wrapped_by_compile(model), unwrapped(model)
    for other, session in [(other, ref()) for other, ref in list(_SESSIONS.items())]:
        inside = "this model" if other is model else "a part of this model" if _is_part(other, model) else None
        inside = inside or ("a model that this is a part of" if _is_part(model, other) else None)
        if inside:
            raise ApplyError(f"{inside} has a session already: call its close() before applying another plan. It is {session!r}.")
    session = _session(plan, model, seed, mode, is_compiled=is_compiled, guard=guard)
    _SESSIONS[model] = weakref.ref(session)
    return session


def _session(
    plan: Plan, model: nn.Module, seed: int, mode: str | Simulate, *, is_compiled: bool, guard: Guard | None
) -> Session | SimulatedSession:
    if mode == "store":
        return Session(plan, model, seed, is_compiled=is_compiled, guard=checked_guard(guard, plan))
    how = MODES.get(mode) if isinstance(mode, str) else mode
    if not isinstance(how, Simulate):
        allowed = ", ".join(map(repr, ("store", *MODES)))
        raise ApplyError(f"mode {mode!r} is unknown. Allowed: {allowed}, or a paredown.simulate.simulated_session.Simulate.")
    if is_compiled:
        raise ApplyError("a compiled model cannot be simulated: its operations are not seen. Apply the plan to the model inside.")
    if guard is not None:
        raise ApplyError(
            "a guard keeps a memory budget, and simulate mode saves no memory: Simulate(raised=...) raises what overflows."
        )
    return SimulatedSession(plan, model, seed, how, on_close=_close)


def _close(model: nn.Module, session: Session | SimulatedSession) -> None:
    """Another session may have this model."""
    current = _SESSIONS.get(model)
    if current is not None and current() is session:
        del _SESSIONS[model]


def session_of(model: nn.Module) -> Session | SimulatedSession | None:
    """The open session of this model."""
    found = _SESSIONS.get(model)
    return found() if found is not None else None


def is_wrapped_by_compile(model: nn.Module) -> bool:
    """Whether torch.compile stands around the user's model."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return hasattr(model, "_orig_mod") or (isinstance(model, wrappers) and is_wrapped_by_compile(model.module))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, DataParallel or torch.compile, so that slots keep their names."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # type: ignore[assignment]
    return model


def _is_part(part: nn.Module, whole: nn.Module) -> bool:
    return any(module is part for module in whole.modules())
