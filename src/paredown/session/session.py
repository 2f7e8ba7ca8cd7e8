"""`Session` applies a plan to a model: activations and weights are stored packed, the training loop is unmodified.

    session = apply(plan, model)
    loss = criterion(model(x), y); loss.backward(); optimizer.step()     # the loop does not change
    session.changes                                                      # slots that are not stored as the plan requests, with reasons
    session.close()                                                      # the unmodified model

The model keeps its class, parameters, state_dict and keys; a copy of it is a model without a session. Activations are not packed in passes
without gradients (eval under no_grad), outside of calls of modules (a call of a submodule is a forward pass too), inside
checkpointed modules (which save nothing; `plan.recompute` names more of them) and modules in tiles (which save their input; tiles.py), and
in models that torch.compile compiles whole. Packed weights are the same parameters: ordinary tensors while their module runs, and otherwise
as `optim/packed_parameter.py` describes.

The optimizers of `paredown.optim` use the formats that the plan requests for moments and gradients, whether they are created before or
after `apply`. `session.changes` lists what an optimizer stores differently: small parameters, gradients that DistributedDataParallel or
fully_shard hold, or all of them if no such optimizer has the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paredown.autograd.module_watch import Watch, is_wrapped_by_compile, unwrapped
from paredown.autograd.operations import MIN_PACKED_NUMEL, SMALL
from paredown.errors import ApplyError
from paredown.loss.output_head import CHUNKED_LOSS, LOSS_SLOTS, OutputHead, find_head
from paredown.optim.parameter_state import request_formats, withdraw_requests
from paredown.optim.sharded.packed_shards import reshard
from paredown.plan.plan import Plan
from paredown.plan.tiled_trace import IN_GRAPHS
from paredown.plan.trace import Trace
from paredown.roles import FORMATTED, Role
from paredown.session.changes import (
    CHECKPOINTED,
    QUANTIZED,
    UNMODIFIED,
    Actions,
    Change,
    Changes,
    Explanation,
    SlotExplanation,
    StoredBytes,
    Summary,
    activation_changes,
    describe_state,
    explain_session,
    peak_memory,
    recompute_changes,
    requested_formats_of,
    requests_without_tensor,
    state_changes,
    stored_bytes,
)
from paredown.session.checkpointing import CheckpointedModules, SecondPasses
from paredown.session.eager.activations import Activations
from paredown.session.eager.product_layers import ProductLayers
from paredown.session.measured_runs import MeasuredRuns
from paredown.session.open_sessions import any_session_of, check_has_none, forget, register
from paredown.session.signals import GuardFactory
from paredown.session.tiles import TiledModules
from paredown.session.unused_plans import (
    NOTHING,
    NOTHING_SAVED,
    UNSEEN,
    UnseenSteps,
    does_nothing,
    scripted_changes,
    scripted_parts,
    unused_rules,
)
from paredown.session.view_outputs import ViewOutputs, check_is_not_graphed
from paredown.session.weights.packed_weights import Weights
from paredown.sizes import say_bytes

if TYPE_CHECKING:
    from paredown.session.compiled.compiled_graphs import CompiledGraphs

VERSION = 1
COMPILED = "torch.compile runs the model: what it saves cannot be packed; call session.compile() instead"
IN_THREADS = (
    "it ran in a thread while several forward passes of the model were running: it is not known to which of them it belongs"
)
NOT_YET = "no forward pass so far has such a slot"
NO_SUCH_TENSOR = "store mode has no such tensor"


class Session:
    """Applies a plan to a model until `close`: packs activations and weights, and reports what it cannot pack."""

    awaits_optimizer = False  # whether an integration creates an optimizer of paredown.optim later, so that `changes` asks for none

    def __init__(
        self,
        plan: Plan,
        given: nn.Module,
        seed: int,
        *,
        make_guard: GuardFactory | None = None,
        chunked_loss: bool = CHUNKED_LOSS,
    ) -> None:
        """Apply `plan` to the model `given`, which torch.compile or DDP may wrap. `seed` seeds stochastic rounding."""
        plan.check_stored()
        self.plan = self.applied = plan  # a guard changes `plan`
        is_compiled, model = is_wrapped_by_compile(given), unwrapped(given)
        self._model, self._called = weakref.ref(model), weakref.ref(model if is_compiled else given)
        self._packs_activations = plan.packs_activations
        self._scripted = scripted_parts(model) if self._packs_activations else []
        if not self._packs_activations:
            self._missing = tuple(plan.check(self._parameter_slots()))
        self._activations = Activations(plan, seed)
        self._is_checked, self._modules = False, list(model.modules())
        self._watch = Watch(model, self._activations.save, on_begin=self._begin, on_end=self._end, min_numel=MIN_PACKED_NUMEL)
        self._activations.report_small_to(self._watch.leave_out)
        reshard(model)
        rows = requested_formats_of(model, plan)  # what may raise stands before the first hook is registered
        self._checkpointed = CheckpointedModules(plan, model, lambda: self._tiles.attached())
        self._tiles = TiledModules(plan, model, self._watch, self._checkpointed)
        checkpointed = frozenset(self._checkpointed.modules)
        begin_second_pass, packed = SecondPasses(self._activations).begin, self._activations
        self._watch.follow_for(packed.save_again, packed.begin_inside, passed_over=checkpointed, on_recomputation=begin_second_pass)
        self._guard = make_guard(self._activations, self._change) if make_guard is not None else None
        self._weights = Weights(plan, model, is_compiled=is_compiled, checkpointed=checkpointed)
        self._unused = unused_rules(plan, model)
        self.products = ProductLayers(plan, model)
        self._attach(model, chunked_loss)
        request_formats(model, rows)
        self._unseen = UnseenSteps(model, self) if self._packs_activations else None
        self._is_open = True

    def _attach(self, model: nn.Module, chunked_loss: bool) -> None:
        self._watch.attach(follows=self._packs_activations)
        try:
            self._weights.attach()
        except BaseException:
            self._watch.detach()
            raise
        self._checkpointed.attach()
        self._tiles.attach()
        self._view_outputs = ViewOutputs(model)
        if self._packs_activations:
            self._view_outputs.attach()
        self._head = OutputHead(model, is_on=chunked_loss)
        self._head.attach()
        self.products.attach()

    @property
    def seed(self) -> int:
        """Return the seed of stochastic rounding."""
        return self._activations.seed

    @property
    def forwards(self) -> int:
        """Return the number of forward passes with gradients so far, which selects random bits for rounding."""
        return self._compiled.calls if self._compiled is not None else self._activations.forwards

    @property
    def has_run(self) -> bool:
        """Return whether a forward pass with gradients has run, without reading from a device as `forwards` may."""
        return self._compiled.calls > 0 if self._compiled is not None else self._activations.count.has_run

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of packed activations now on the model's device; `host_bytes` has those in host memory."""
        return self._activations.stored_bytes + (self._compiled.stored_bytes if self._compiled is not None else 0)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of packed activations that are now in host memory, because the plan offloads them."""
        return self._activations.host_bytes

    @property
    def runs(self) -> MeasuredRuns:
        """Return the contexts in which `verify` runs training steps of this model."""
        return MeasuredRuns(self._activations, self._watch, self._weights, self._checkpointed, self._tiles)

    @property
    def model(self) -> nn.Module | None:
        """Return the model that the session belongs to; None if it was deleted."""
        return self._model()

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of codes and scales of the packed weights."""
        return self._weights.nbytes

    def compile(self, **options: Any) -> Any:
        """Return the model compiled by torch.compile, with graphs that pack the tensors which they save for backward.

        Arguments are those of torch.compile. Call the returned model in place of the original one, and compile before the first
        step. From now on the original model saves its activations unmodified when it is called directly.
        """
        model = self._model()
        if model is None or not self._is_open:
            raise ApplyError("this session is closed, or its model was deleted: apply the plan again, then call compile().")
        if self.plan.tiles:
            raise ApplyError(IN_GRAPHS)
        from paredown.session.compiled.compiled_graphs import CompiledGraphs  # Inductor takes seconds to import

        self._watch.detach()
        self._view_outputs.detach()
        self._head.detach()
        self.products.detach()
        if self._compiled is None:
            self._weights = self._weights.in_graphs(model, find_head(model)[1])
            self._weights.attach()
            signals = self._guard.signals if self._guard is not None else None
            self._compiled = CompiledGraphs(
                self.plan,
                self.seed,
                calls=self.forwards,
                signals=signals,
                head=self._head,
                products=self.products if self.plan.multiplies else None,
                before_call=self._weights.check_frozen,
            )
        if self._guard is not None:
            self._guard.read_formats(self._compiled.format_of)
        return self._compiled.compile(model, self._called() or model, **options)

    def unpacked(self) -> AbstractContextManager[None]:
        """Return a context in which packed parameters are decoded; those changed in it are quantized again at its end."""
        return self._weights.unpacked()

    @property
    def changes(self) -> Changes:
        """Return the tensors of a step that are not stored as the plan requests; complete after the first forward pass.

        After `close`, these are the changes that the session had when it was closed.
        """
        if self._final_changes is not None:
            return self._final_changes
        model, rows = self._model(), [*self._weights.changes()]
        rows += state_changes(model, self.plan, awaits_optimizer=self.awaits_optimizer) if model is not None else ()
        rows += [
            Change(name, text, "nothing", NO_SUCH_TENSOR)
            for name, text in requests_without_tensor(self.plan, self._parameter_slots())
        ]
        packed = self._activations
        rows += activation_changes(self.plan, packed, self._checkpointed.has, self._watch.in_place_on_views)
        rows += self._compiled.changes() if self._compiled is not None else []
        rows += self.products.changes()
        rows += [Change(*row) for row in self._head.rows(packed.saved_by(*LOSS_SLOTS))]
        if packed.host is not None and self.forwards:
            rows += [Change(*row) for row in packed.host.changes(is_compiled=self._compiled is not None)]
        rest = self.plan.find(("",), Role.ACTIVATION).format
        if rest is not None and self._watch.small:
            small = f"{len(self._watch.small)} of fewer than {MIN_PACKED_NUMEL} values"
            rows.append(Change(small, str(rest), UNMODIFIED, "packing them would save little"))
        if rest is not None and packed.small:
            small = f"{len(packed.small)} of at most {say_bytes(packed.max_left_bytes)}"
            rows.append(Change(small, str(rest), UNMODIFIED, SMALL))
        rows += [Change(name, "a format", "nothing", "no such slot in this model") for name in self._missing]
        rows += [*self._unused, *scripted_changes(self.plan, self._scripted)]
        if not self._is_checked and self._packs_activations and self.forwards and self._compiled is None:
            rows += [Change(name, "a format", "nothing", NOT_YET) for name in self.plan.unmatched(self._seen_slots())]
        if self._is_unseen():
            rows.append(Change("the model", "packed activations", UNMODIFIED, UNSEEN))
        rows += [Change(path, str(rest), UNMODIFIED, IN_THREADS) for path in sorted(self._watch.in_threads) if rest is not None]
        if self._watch.was_compiled and self._packs_activations:
            rows.append(Change("the model", "packed activations", UNMODIFIED, COMPILED))
        is_compiled = self._watch.was_compiled or self._compiled is not None
        rows += self._tiles.changes(was_compiled=is_compiled) if self.forwards or is_compiled else []
        rows += recompute_changes(self.plan, self._checkpointed.paths if is_compiled else (), is_eager=self._compiled is None)
        if not rows and self._packs_activations and self._stores_nothing(self._stored_bytes()):
            rows.append(Change("the model", "packed activations", "nothing", NOTHING_SAVED))
        return Changes(rows)

    @property
    def actions(self) -> Actions:
        """Return what the guard did, in order (formats raised and lowered, steps skipped); empty without a guard."""
        return Actions(self._guard.actions if self._guard is not None else ())

    @property
    def budget_bytes(self) -> int | None:
        """Return the guard's limit on the predicted peak memory, in bytes; None without a guard."""
        return self._guard.budget_bytes if self._guard is not None else None

    @property
    def sensitivities(self) -> Any:
        """Return the gradient error of rounding each saved tensor, as given to the guard or measured last; None if unknown."""
        return self._guard.sensitivities if self._guard is not None else None

    def reprobe(self, batch: Any, *, loss: Callable[..., Tensor] | None = None) -> Any:
        """Measure the gradient error that rounding each saved tensor causes, and let the guard choose formats anew.

        The arguments are those of `probe`.
        """
        if self._guard is None:
            raise ApplyError("reprobe needs a guard, and this session has none: apply(plan, model, guard=Guard(trace)).")
        return self._guard.reprobe(batch, loss)

    def explain(self) -> Explanation:
        """Return a table of slots (tensors of the step): requested format, format in use, and the reason."""
        slots = self._guard.slots if self._guard is not None else self._activations.decisions
        changes = self.changes
        changed = {change.slot for change in changes}
        paths = [path for path in self._checkpointed.paths if path not in changed]
        rows = [SlotExplanation(path, CHECKPOINTED, CHECKPOINTED, "the activations inside it are not saved") for path in paths]
        packed = {f"weight={name}": str(weight.packed.format) for name, weight in self._weights.weights.items()}
        rows += [SlotExplanation(slot, text, text, QUANTIZED) for slot, text in packed.items() if slot not in changed]
        rows += [*self.products.explain(), *self._tiles.explain()]
        return Explanation([*explain_session(self.applied, self._activations, changes, self.actions, slots), *rows])

    def summary(self, trace: Trace | None = None) -> Summary:
        """Return stored bytes against the baseline, the peak memory, and what is not stored as requested, in at most ten lines.

        Activations are those of the forward pass that saved most. With a `trace` of the step, the predicted peaks are compared. In eager
        sessions on a CPU, the share of packing in the time of the steps is measured (`packing_share`).
        """
        peak, share = peak_memory(self._model(), self.applied, trace), self._activations.packing_time.share
        stored = self._stored_bytes()
        nothing = NOTHING if self._stores_nothing(stored) else ""
        return Summary(self._model_name(), self._state(), stored, peak, self.changes, share, nothing)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, the seed and the number of forward passes, from which stochastic rounding continues with the same bits.

        With a guard, the plan is the current one, and the state of the guard is included.
        """
        state = {"version": VERSION, "plan": self.plan.to_json(), "seed": self.seed, "forwards": self.forwards}
        if self._guard is not None:
            state["guard"] = {"applied": self.applied.to_json(), **self._guard.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of a session with the same plan returned; raise ApplyError for another state."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION or not {"plan", "seed", "forwards"} <= set(state):
            raise ApplyError(
                f"this is not the state of a session, version {VERSION}: it {describe_state(state)}. "
                "Pass what session.state_dict() returned."
            )
        if not all(type(state[name]) is int and abs(state[name]) < 2**64 for name in ("seed", "forwards")):
            text = "seed and forwards of a session's state are integers below 2^64."
            raise ApplyError(f"{text} Pass what session.state_dict() returned.")
        guard: Mapping[str, Any] | None = state.get("guard")
        if guard is not None and (not isinstance(guard, Mapping) or "applied" not in guard):
            raise ApplyError(f"the guard's part of the state {describe_state(guard)}. Pass what session.state_dict() returned.")
        if (guard is None) != (self._guard is None):
            has, had = ("no guard", "one") if self._guard is None else ("a guard", "none")
            text = f"this session has {has}, and the session that saved the state had {had}."
            raise ApplyError(f"{text} Call apply with the same guard argument.")
        other = Plan.from_json(state["plan"] if guard is None else guard["applied"])
        if other != self.applied:
            raise ApplyError(
                f"the state belongs to another plan; they differ in:\n{self.applied.diff(other)}\nApply that plan, then load the state."
            )
        if guard is not None and self._guard is not None:
            self._guard.load_state_dict(guard, Plan.from_json(state["plan"]))
        self._activations.resume(int(state["seed"]), int(state["forwards"]))
        if self._compiled is not None:
            self._compiled.resume(self.seed, self._activations.forwards)

    def close(self, *, packed_base: bool | None = None) -> None:
        """Remove the session from the model and decode its weights; backward of existing graphs still works.

        `packed_base`: True leaves frozen weights packed, False decodes all. By default frozen weights stay packed that were packed before
        `apply`, since they were loaded so; a later session uses them without quantizing again. The model that `compile` returned stays
        usable, and its graphs still pack what they save: call torch.compile(model) for unmodified graphs.
        """
        self._final_changes, self._final_bytes = self.changes, self._stored_bytes()  # while weights are packed
        self._watch.detach()
        self._view_outputs.detach()
        self._head.detach()
        self.products.detach()
        if self._unseen is not None:
            self._unseen.close()
        self._checkpointed.detach()
        self._tiles.detach()
        self._weights.detach(packed_base)
        if self._guard is not None:
            self._guard.close()
        model = self._model()
        if model is not None:
            withdraw_requests(model)
            forget(model, self)
        self._is_open = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        stored = [f"{row.name} {row}" for row in self._stored_bytes()[:1]]
        return f"Session({', '.join([self._model_name(), self._state(), *stored])})"

    # --- private ----------------------------------------------------------------------------------------------------------

    _compiled: CompiledGraphs | None = None
    _final_changes: Changes | None = None  # of a closed session
    _final_bytes: tuple[StoredBytes, ...] | None = None
    _missing: tuple[str, ...] = ()  # slot names of the plan that this model does not have

    def _begin(self) -> bool:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
            raise ApplyError(
                "a model with a paredown session was called inside torch.func (vmap, grad, jacrev ...), which forbids packing what it "
                "saves. Call session.close() first, or use a copy: copy.deepcopy(model) has no session."
            )
        if self._guard is not None and self._guard.passes_over():
            return False
        if not self._packs_activations:
            self._activations.forwards += 1
            return False
        self._activations.begin(is_sharded=any(hasattr(kind, "reshard") for kind in set(map(type, self._modules))))
        return True

    def _end(self, output: Any) -> None:
        self._activations.end(output)
        if output is None or not self._watch.collects_small or self._watch.checkpoints.lacks_second_passes:
            return
        if not self._is_checked and self._watch.entrance is self._model():  # a submodule's pass saves some slots
            self._missing = tuple(self.plan.check(self._seen_slots()))
            self._is_checked = True
        self._watch.end_first_pass()

    def _seen_slots(self) -> list[tuple[tuple[str, ...], Role]]:
        seen = self._activations.names | self._watch.small | self._watch.checkpoints.in_second_passes | self._head.slots
        return [((name,), Role.ACTIVATION) for name in seen] + self._parameter_slots()

    def _stores_nothing(self, stored: tuple[StoredBytes, ...]) -> bool:
        has_run = not self._packs_activations or self.forwards > 0 or self._is_unseen()
        return self._compiled is None and does_nothing(self.applied, stored, has_run=has_run)

    def _is_unseen(self) -> bool:
        """Return whether parameters have gradients although the session has seen no forward pass."""
        return self._unseen is not None and self._compiled is None and not self._watch.was_compiled and self._unseen.check()

    def _model_name(self) -> str:
        model = self._model()
        return type(model).__name__ if model is not None else "a model that was deleted"

    def _state(self) -> str:
        passes = "1 forward pass" if self.forwards == 1 else f"{self.forwards} forward passes"
        actions = f", {len(self.actions)} actions of the guard" if self.actions else ""
        graphs = self._compiled.reports if self._compiled is not None else ()
        compiled = f", compiled graphs store {say_bytes(sum(graph.stored_bytes for graph in graphs))}" if graphs else ""
        return f"{passes}{actions}{compiled}{self.products.say()}{'' if self._is_open else ', closed'}"

    def _stored_bytes(self) -> tuple[StoredBytes, ...]:
        if self._final_bytes is not None:
            return self._final_bytes
        return stored_bytes(self._model(), self._activations, self._weights.weights.values())

    def _change(self, plan: Plan) -> None:
        """Use another plan, which the guard chose, from the next forward pass on."""
        self.plan = plan
        self._activations.set_plan(plan)
        if self._compiled is not None:
            self._compiled.plan = plan

    def _parameter_slots(self) -> list[tuple[tuple[str, ...], Role]]:
        model = self._model()
        parameters = list(model.named_parameters()) if model is not None else []
        roles = [role for role in FORMATTED if role is not Role.ACTIVATION]
        return [((name,), role) for role in roles for name, p in parameters if role is not Role.FROZEN or not p.requires_grad]


def start_session(
    plan: Plan,
    model: nn.Module,
    *,
    seed: int = 0,
    make_guard: GuardFactory | None = None,
    chunked_loss: bool = CHUNKED_LOSS,
) -> Session:
    """Apply `plan` to `model` so that tensors are stored packed, and return the session, which is open until it is closed.

    `seed`: of stochastic rounding. `make_guard` creates the session's guard (None: no guard). `chunked_loss` computes the cross entropy of
    large vocabularies in chunks.
    """
    plain = unwrapped(model)
    check_is_not_graphed(plain)
    check_has_none(plain)
    session = Session(plan, model, seed, make_guard=make_guard, chunked_loss=chunked_loss)
    register(plain, session)
    return session


def session_of(model: nn.Module) -> Session | None:
    """Return the open `Session` of `model`; None if it has none, or one that only simulates formats."""
    session = any_session_of(model)
    return session if isinstance(session, Session) else None
