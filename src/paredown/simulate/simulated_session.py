"""Simulate mode: arithmetic sees the rounded values, forward and backward, on an unmodified model; no memory is saved.

    activation   the output of every operation, rounded when it is made; backward passes straight through
    error        the gradient of an activation, rounded as each operation that takes the activation sends it back
    weight       a rounded copy of the parameter, for forward and backward; the parameter itself is the master
    gradient     of a parameter, rounded when backward has summed it up
    master, moment1, moment2   rounded after each step of the optimizer, whichever it is

Products accumulate in float32, by TF32 on a GPU where both operands have at most 10 mantissa bits. Slots have the names that traces and
plans use; an activation answers to the name of what made it (`relu:output`) and to those under which it is saved (`conv2:input`).

Not followed: what torch.compile runs. Checkpointed modules are rounded alike when backward computes them again (with
use_reentrant=False; the older form loses the gradients at the borders of a part). Losses outside of the model are rounded if they
are called inside `with session.following():`.

What is rounded when an optimizer steps: gradients before it if asked for, then masters and moments after it.

Hooks that torch runs for every optimizer see the step of whoever has the model's parameters: the user's loop does not change. The
parameter that the optimizer updates is the master; the weight that the model computes with is rounded from it in each forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paredown.errors import ApplyError
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.changes import Change, Changes, describe_state
from paredown.session.checkpointing import CheckpointedModules
from paredown.simulate.forward_calls import ForwardCalls
from paredown.simulate.outline import LOSS, Outline, of_call
from paredown.simulate.rounded_slots import Promotion, RoundedSlot, RoundedSlots
from paredown.simulate.rounded_values import MODES, RoundedValues, Simulate
from paredown.trace.autograd_graph import tensors_in
from paredown.trace.module_watch import Hook
from paredown.trace.optimizer_state import role_of_state

__all__ = ["MODES", "Simulate", "SimulatedSession"]


class Updates:
    """Rounds around the steps of all optimizers that hold parameters of `names` (id -> name)."""

    def __init__(self, places: RoundedSlots, names: dict[int, str], *, gradients_at_step: bool) -> None:
        self._places, self._names, self._gradients_at_step = places, names, gradients_at_step
        self.num_steps = 0
        me: weakref.ref[Updates] = weakref.ref(self)
        self._handles = [
            register_optimizer_step_pre_hook(_weak(me, Updates._before)),
            register_optimizer_step_post_hook(_weak(me, Updates._after)),
        ]
        self.close = weakref.finalize(self, _remove, self._handles)  # steps are torch's again, also when nobody holds this

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        mine = self._mine(optimizer) if self._gradients_at_step else ()
        self._round([(parameter.grad, name, Role.GRADIENT) for name, parameter in mine if parameter.grad is not None])

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        mine = list(self._mine(optimizer))
        self.num_steps += bool(mine)
        found: list[tuple[Tensor, str, Role]] = [(parameter, name, Role.MASTER) for name, parameter in mine]
        for name, parameter in mine:
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor) and state.shape == parameter.shape and state.is_floating_point() and state.dim():
                    found.append((state, name, role_of_state(str(key))))
        self._round(found)

    def _mine(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None:
                    yield name, parameter

    def _round(self, tensors: list[tuple[Tensor, str, Role]]) -> None:
        slots = [(tensor, self._places.of((name,), role)) for tensor, name, role in tensors]
        self._places.round_all([(tensor, tensor, place) for tensor, place in slots if place is not None])


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _weak(ref: weakref.ref[Updates], method: Callable[[Updates, Any], None]) -> Callable[..., None]:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = ref()
        if found is not None:
            method(found, optimizer)

    return hook


# --- Simulate mode ---

VERSION = 1
FIELDS: set[str] = set(("version", "mode", "plan", "seed", "forwards", "steps", "promotions"))
COMPILED = "torch.compile runs the model: its operations are not seen"
NOT_AGAIN = "simulate mode saves no memory, and computing it again would change no value"
NO_RESIDUE = "nothing is left over: parameters stay as wide as they are"


@final
class SimulatedSession:
    """A plan at work on a model, its values rounded."""

    def __init__(self, plan: Plan, model: nn.Module, seed: int, how: Simulate, on_close: Callable[..., None]) -> None:
        self.how, self._model, self._on_close = how, weakref.ref(model), on_close
        CheckpointedModules(plan, model)  # refuses modules that are not there
        self._places = RoundedSlots(plan, seed, raised=how.raised, share=how.share, all_live=how.all_live)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._values = RoundedValues(self._places, self._names, how)
        self._calls = ForwardCalls(model, self._values)
        self._updates = Updates(self._places, self._names, gradients_at_step=how.gradients == "step")
        self._outline: Outline | None = None
        self._missing: tuple[str, ...] = ()
        self._notes: list[str] = []
        self._depth, self._is_running = 0, False  # calls of the model, inside of itself too
        self._hooked = set[int]()
        self._begin_hook = Hook(self._begin)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin_hook, with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._end), always_call=True),
        ]
        self._calls.attach()
        self._is_open = True

    # --- what a user asks -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, without what promotion changed."""
        return self._places.plan

    @property
    def seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._places.seed

    @property
    def forwards(self) -> int:
        """Forward passes so far: the step of stochastic rounding."""
        return self._places.forwards

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """What was raised because it overflowed."""
        return self._places.promotions

    @property
    def outline(self) -> Outline | None:
        """The values of a forward pass, once there was one."""
        return self._outline

    def following(self, path: str = LOSS) -> AbstractContextManager[None]:
        """A context in which operations outside of the model, such as those of a loss, are rounded too, under this name."""
        return self._calls.following(path)

    def promote(self) -> None:
        """Raise what overflowed in the last training pass. Each training pass begins with this, in a captured graph too."""
        self._places.promote()

    def set_plan(self, plan: Plan, *, forwards: int | None = None, seed: int | None = None) -> None:
        """Other formats for the same slots, also for a CUDA graph that was captured; `Simulate(all_live=True)` has every slot.

        `forwards`: where the count of passes goes on. `seed`: another one, unless it is None.
        """
        if not isinstance(plan, Plan):
            raise ApplyError(
                f"set_plan takes a Plan, not {type(plan).__name__}: session.set_plan(Plan.uniform(activation='e4m3fn'))."
            )
        self._places.set_plan(plan, self.seed if seed is None else seed)
        self._values.relearn()
        if forwards is not None:
            self._places.forwards = forwards

    def capturing(self) -> AbstractContextManager[None]:
        """A context around the capture of a CUDA graph, in which parameters and their state are rounded by few launches.

        The graph runs once the context is left, and has at most one training step. It may be captured without, in more launches.
        """
        model = self._model()
        return self._places.capturing(() if model is None else model.parameters())

    @property
    def changes(self) -> Changes:
        """What is not as it was asked for, slot by slot; complete after the first forward pass."""
        rows = [Change(p.slot, "as planned", "raised", f"{p.share:.1%} overflowed by pass {p.forward}") for p in self.promotions]
        rows += [Change(slot, "a format", "as it is", reason) for slot, reason in self._places.refused.items()]
        rows += [Change(name, "a format", "nothing", "no such slot in this model") for name in self._missing]
        residue = self.plan.find(("",), Role.RESIDUE).format
        rows += [Change("residue", str(residue), "nothing", NO_RESIDUE)] if residue is not None else []
        rows += [Change(path, "computed again", "as it is", NOT_AGAIN) for path in self.plan.recompute]
        rows += [Change("the model", "names of what is saved", "names of what is made", note) for note in self._notes]
        rows += [Change("the model", "rounded values", "as they are", COMPILED)] if self._begin_hook.was_compiled else []
        return Changes(rows)

    def state_dict(self) -> dict[str, Any]:
        """The plan, the seed, the counts of passes and steps, and what was raised: with these, training goes on with the same bits."""
        self._places.promote()
        head = {"version": VERSION, "mode": "simulate", "plan": self.plan.to_json(), "seed": self.seed}
        promotions = [list(promotion) for promotion in self.promotions]
        return {**head, "forwards": self.forwards, "steps": self._updates.num_steps, "promotions": promotions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a simulated session with the same plan was."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION or set(state) != FIELDS:
            raise ApplyError(
                f"this is not the state of a simulated session, version {VERSION}: it {describe_state(state)}. "
                "Give what state_dict() of one returned."
            )
        other = Plan.from_json(state["plan"])
        if other != self.plan:
            raise ApplyError(f"the state is of another plan; they differ in:\n{self.plan.diff(other)}\nApply that plan, then load.")
        self._places.seed, self._places.forwards = int(state["seed"]), int(state["forwards"])
        self._updates.num_steps = int(state["steps"])
        self._places.restore(state["promotions"])

    def close(self) -> None:
        """Give the plain model back. Graphs that are waiting for their backward still round."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.detach()
        self._updates.close()
        model = self._model()
        if model is not None:
            self._on_close(model, self)
        self._is_open = False

    def __enter__(self) -> SimulatedSession:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self._model()
        what = type(model).__name__ if model is not None else "a model that is gone"
        state = f"{self.forwards} forward passes, {len(self.promotions)} slots raised" if self._is_open else "closed"
        return f"SimulatedSession({what}, {state})"

    # --- one forward pass -----------------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            return None
        with self._calls.paused():
            rounded = self._prepare(model, args, kwargs)
        self._calls.start()
        self._is_running = True
        return rounded

    def _prepare(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """All that comes before a pass: the arguments, rounded."""
        first = next((t for tensors in (model.parameters(), tensors_in((args, kwargs))) for t in tensors), None)
        self._places.move(first.device if first is not None else torch.device("cpu"))
        if self._outline is None:
            self._learn(model, args, kwargs)
        self._hook_parameters(model)
        looks = self.how.raised is not None and torch.is_grad_enabled() and model.training
        if looks:
            self._places.promote()
        self._places.begin()
        self._values.has_stepped = self._updates.num_steps > 0
        if self._places.is_capturing and not looks:
            self._values.copy_all(model.parameters())
        return self._values.begin(args, kwargs, looks=looks)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._is_running:
            self._is_running = False
            self._calls.stop()
            with self._calls.paused():
                self._values.end(output)

    def _learn(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The names of all slots, by one pass on fake tensors; without it a slot has the name of its maker alone."""
        try:
            self._outline = of_call(model, args, kwargs)
        except Exception as error:  # whatever a user's model does with tensors that have no numbers
            self._outline = Outline((), {})
            self._notes.append(f"the forward pass cannot be followed without running it ({type(error).__name__}: {error})"[:200])
            return
        self._missing = tuple(self.plan.check([*self._outline.slots(), *self._slots_of_loss()]))
        self._values.learn(self._outline)

    def _slots_of_loss(self) -> list[tuple[tuple[str, ...], Role]]:
        """What the plan says of a loss: that is met when it is called."""
        names = [key.partition("=")[2] or key for key, _ in self.plan.rules]
        return [((name,), role) for name in names if name.startswith(f"{LOSS}:") for role in (Role.ACTIVATION, Role.ERROR)]

    def _hook_parameters(self, model: nn.Module) -> None:
        """Round gradients of parameters, also of those that are thawed later."""
        for parameter in model.parameters() if self.how.gradients == "backward" else ():
            name = self._names.get(id(parameter))
            if name is None or id(parameter) in self._hooked or not parameter.requires_grad:
                continue
            self._hooked.add(id(parameter))
            place = self._places.of((name,), Role.GRADIENT)
            if place is not None:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(place)))

    def _accumulated(self, place: RoundedSlot) -> Callable[[Tensor], None]:
        places = self._places  # not the session, which has the model: nobody collects a parameter that its own hook keeps

        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                places.round_(parameter.grad, place)

        return hook
