"""Simulate mode: arithmetic sees rounded values, forward and backward, on an unmodified model; no memory is saved.

    activation   the output of every operation, rounded when it is computed; the gradient passes straight through the rounding
    error        the gradient of an activation, rounded for each operation that uses the activation
    weight       a rounded copy of the parameter, for forward and backward; the parameter itself is the master weight
    gradient     of a parameter, rounded when backward has accumulated it
    master, moment1, moment2   rounded after each optimizer step

Products accumulate in float32, with TF32 on a GPU where both operands have at most 10 mantissa bits. Slots have the names that traces and
plans use; an activation has the name of the operation that computes it (`relu:output`) and those under which it is saved (`conv2:input`).

What torch.compile runs is not rounded. Checkpointed modules are rounded in the same way when they run again in backward (with
use_reentrant=False; the reentrant form loses the gradients at the borders of a checkpoint). A loss outside the model is rounded if it is
called inside `with session.following():`.

`Updates` registers step hooks that torch calls for every optimizer, so that the training loop does not change: the parameter that the
optimizer updates is the master weight, and each forward pass computes with a copy that is rounded from it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paredown.autograd.graph import tensors_in
from paredown.autograd.hooks import Hook, register_weakly
from paredown.errors import ApplyError
from paredown.plan.plan import OFFLOADED, TILED, Plan
from paredown.roles import Role, role_of_state
from paredown.session.changes import CHECKPOINTED, UNMODIFIED, Change, Changes, describe_state
from paredown.session.checkpointing import CheckpointedModules
from paredown.simulate.forward_calls import ForwardCalls
from paredown.simulate.outline import LOSS, Outline, of_call
from paredown.simulate.range_counts import RangeCounts
from paredown.simulate.rounded_slots import Promotion, RoundedSlot, RoundedSlots
from paredown.simulate.rounded_values import MODES, RoundedValues, Simulate

__all__ = ["MODES", "Simulate", "SimulatedSession"]

VERSION = 1
FIELDS: set[str] = set(("version", "mode", "plan", "seed", "forwards", "steps", "promotions"))
COMPILED = "torch.compile runs the model, and hides its operations"
NOT_CHECKPOINTED = "simulate mode saves no memory, and checkpointing and tiles would change no value"
NO_RESIDUE = "parameters keep their precision, so that there is no residue"
NO_FROZEN = "simulate mode rounds all weights by the rules of the role weight"


@final
class SimulatedSession:
    """The session of a plan in simulate mode: until `close`, it rounds the values that a model computes in training."""

    def __init__(self, plan: Plan, model: nn.Module, seed: int, how: Simulate, on_close: Callable[..., None]) -> None:
        self.how, self._model, self._on_close = how, weakref.ref(model), on_close
        CheckpointedModules(plan, model)  # raises for modules that the model does not have
        self._slots = RoundedSlots(plan, seed, raised=how.raised, share=how.share, all_live=how.all_live)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._values = RoundedValues(self._slots, self._names, how)
        self._calls = ForwardCalls(model, self._values)
        self._updates = Updates(self._slots, self._names, gradients_at_step=how.gradients == "step")
        self._outline: Outline | None = None
        self._missing: tuple[str, ...] = ()
        self._notes: list[str] = []
        self._depth, self._is_running = 0, False  # nesting of calls of the model
        self._hooked = set[int]()
        self._begin_hook = Hook(self._begin)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin_hook, with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._end), always_call=True),
        ]
        self._calls.attach()
        self._is_open = True

    @property
    def plan(self) -> Plan:
        """The plan of the session; formats that became wider after overflows are not in it."""
        return self._slots.plan

    @property
    def seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._slots.seed

    @property
    def forwards(self) -> int:
        """The number of forward passes so far, which selects the random bits of stochastic rounding."""
        return self._slots.forwards

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """The changes of tensors to wider formats because values overflowed, in the order in which they happened."""
        return self._slots.promotions

    @property
    def counts(self) -> RangeCounts:
        """The counts of each tensor's values that underflowed, became 0, saturated, or became infinite or NaN.

        The first passes are counted, and then every 16th, with their backward and optimizer step; none in captured CUDA graphs.
        """
        return self._slots.counts

    @property
    def outline(self) -> Outline | None:
        """The list of all values that a forward pass computes; None before the first forward pass."""
        return self._outline

    def following(self, path: str = LOSS) -> AbstractContextManager[None]:
        """Return a context in which operations outside of the model, such as a loss, are rounded; `path` begins their names."""
        return self._calls.following(path)

    def promote(self) -> None:
        """Give tensors that overflowed in the last training pass their wider format now, rather than when the next pass begins."""
        self._slots.promote()

    def set_plan(self, plan: Plan, *, forwards: int | None = None, seed: int | None = None) -> None:
        """Change to the formats of another plan, also in a captured CUDA graph.

        Only tensors that are rounded now change; with `Simulate(all_live=True)` all do.

        `forwards`: the number of forward passes to continue from; None to keep it. `seed`: a new seed; None to keep it.
        """
        if not isinstance(plan, Plan):
            raise ApplyError(
                f"set_plan takes a Plan, not {type(plan).__name__}: session.set_plan(Plan.uniform(activation='e4m3fn'))."
            )
        self._slots.set_plan(plan, self.seed if seed is None else seed)
        self._values.refresh()
        if forwards is not None:
            self._slots.forwards = forwards

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context in which to capture a CUDA graph, so that it rounds parameters in few kernel launches.

        The graph may have at most one training step, and can be replayed after the context ends. Without this context it has more launches.
        """
        model = self._model()
        return self._slots.capturing(() if model is None else model.parameters())

    @property
    def changes(self) -> Changes:
        """The tensors that are not rounded as the plan requests, with reasons; complete after the first forward pass."""
        rows = [Change(p.slot, "as planned", "raised", f"{p.share:.1%} overflowed by pass {p.forward}") for p in self.promotions]
        rows += [Change(slot, "a format", UNMODIFIED, reason) for slot, reason in self._slots.refused.items()]
        rows += [Change(name, "a format", "nothing", "no such slot in this model") for name in self._missing]
        residue = self.plan.find(("",), Role.RESIDUE).format
        rows += [Change("residue", str(residue), "nothing", NO_RESIDUE)] if residue is not None else []
        rows += [
            Change(key, str(asked), "nothing", NO_FROZEN) for key, asked in self.plan.rules if key.startswith(Role.FROZEN.value)
        ]
        rows += [Change(path, CHECKPOINTED, UNMODIFIED, NOT_CHECKPOINTED) for path in self.plan.recompute]
        rows += [Change(path, TILED.format(length), UNMODIFIED, NOT_CHECKPOINTED) for path, length in self.plan.tiles]
        rows += [Change(text, OFFLOADED, UNMODIFIED, NOT_CHECKPOINTED) for text in self.plan.offload]
        rows += [Change("the model", "names of saved tensors", "names of outputs", note) for note in self._notes]
        rows += [Change("the model", "rounded values", UNMODIFIED, COMPILED)] if self._begin_hook.was_compiled else []
        return Changes(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return plan, seed, counts and changes to wider formats; a training that loads them continues with the same bits."""
        self._slots.promote()
        head = {"version": VERSION, "mode": "simulate", "plan": self.plan.to_json(), "seed": self.seed}
        promotions = [list(promotion) for promotion in self.promotions]
        return {**head, "forwards": self.forwards, "steps": self._updates.num_steps, "promotions": promotions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of a simulated session returned; that session must have had the same plan."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION or set(state) != FIELDS:
            raise ApplyError(
                f"this is not the state of a simulated session, version {VERSION}: it {describe_state(state)}. "
                "Pass what state_dict() of a simulated session returned."
            )
        other = Plan.from_json(state["plan"])
        if other != self.plan:
            raise ApplyError(
                f"the state belongs to another plan; they differ in:\n{self.plan.diff(other)}\nApply that plan, then load the state."
            )
        self._slots.seed, self._slots.forwards = int(state["seed"]), int(state["forwards"])
        self._updates.num_steps = int(state["steps"])
        self._slots.restore(state["promotions"])

    def close(self) -> None:
        """Remove the session from the model; a later backward pass through an earlier forward pass still rounds."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.detach()
        self._updates.close()
        model = self._model()
        if model is not None:
            self._on_close(model, self)
        self._is_open = False

    @property
    def model(self) -> nn.Module | None:
        """The model that the session belongs to; None if it was deleted."""
        return self._model()

    def __enter__(self) -> SimulatedSession:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self._model()
        what = type(model).__name__ if model is not None else "a model that was deleted"
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
        first = next((t for tensors in (model.parameters(), tensors_in((args, kwargs))) for t in tensors), None)
        self._slots.move(first.device if first is not None else torch.device("cpu"))
        if self._outline is None:
            self._trace_outline(model, args, kwargs)
        self._hook_parameters(model)
        for sentence in self._slots.new_warnings():
            warnings.warn(sentence, UserWarning, stacklevel=2)
        counts_overflow = self.how.raised is not None and torch.is_grad_enabled() and model.training
        self._slots.promote()
        self._slots.begin()
        self._values.has_stepped = self._updates.num_steps > 0
        if self._slots.is_capturing and not counts_overflow:
            self._values.copy_all(model.parameters())
        return self._values.begin(args, kwargs, counts_overflow=counts_overflow)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._is_running:
            self._is_running = False
            self._calls.stop()
            with self._calls.paused():
                self._values.end(output)

    def _trace_outline(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Find the names of all values by a forward pass on fake tensors; if it fails, only names of outputs are known."""
        try:
            self._outline = of_call(model, args, kwargs)
        except Exception as error:  # a user's model may do anything with fake tensors
            self._outline = Outline((), {})
            self._notes.append(f"the forward pass fails on fake tensors ({type(error).__name__}: {error})"[:200])
            return
        named = [key.partition("=")[2] or key for key, _ in self.plan.rules]  # some may be slots of a loss outside of the model
        of_loss = [((n,), role) for n in named if n.startswith(f"{LOSS}:") for role in (Role.ACTIVATION, Role.ERROR)]
        self._missing = tuple(self.plan.check([*self._outline.slots(), *of_loss]))
        self._values.set_outline(self._outline)

    def _hook_parameters(self, model: nn.Module) -> None:
        for parameter in model.parameters() if self.how.gradients == "backward" else ():
            name = self._names.get(id(parameter))
            if name is None or id(parameter) in self._hooked or not parameter.requires_grad:
                continue
            self._hooked.add(id(parameter))
            slot = self._slots.of((name,), Role.GRADIENT)
            if slot is not None:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(slot)))

    def _accumulated(self, slot: RoundedSlot) -> Callable[[Tensor], None]:
        slots = self._slots  # not self, which refers to the model: a parameter that its own hook keeps alive is never freed

        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                slots.round_(parameter.grad, slot)

        return hook


# --- rounding around optimizer steps ----------------------------------------------------------------------------------------------


class Updates:
    """Hooks, called for every optimizer of torch, that round gradients before a step, and parameters and state after it."""

    def __init__(self, slots: RoundedSlots, names: dict[int, str], *, gradients_at_step: bool) -> None:
        self._slots, self._names, self._gradients_at_step = slots, names, gradients_at_step
        self.num_steps = 0
        self._handles = [
            register_weakly(register_optimizer_step_pre_hook, self, Updates._before),
            register_weakly(register_optimizer_step_post_hook, self, Updates._after),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        parameters = self._parameters(optimizer) if self._gradients_at_step else ()
        self._round([(parameter.grad, name, Role.GRADIENT) for name, parameter in parameters if parameter.grad is not None])

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        parameters = list(self._parameters(optimizer))
        self.num_steps += bool(parameters)
        tensors: list[tuple[Tensor, str, Role]] = [(parameter, name, Role.MASTER) for name, parameter in parameters]
        for name, parameter in parameters:
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor) and state.shape == parameter.shape and state.is_floating_point() and state.dim():
                    tensors.append((state, name, role_of_state(str(key))))
        self._round(tensors)

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None:
                    yield name, parameter

    def _round(self, tensors: list[tuple[Tensor, str, Role]]) -> None:
        pairs = [(tensor, self._slots.of((name,), role)) for tensor, name, role in tensors]
        self._slots.round_all([(tensor, tensor, slot) for tensor, slot in pairs if slot is not None])
