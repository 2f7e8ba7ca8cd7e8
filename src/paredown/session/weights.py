"""Weights that wait packed between the forward passes of their modules.

    before a module's forward    its packed parameters become plain, decoded into new memory
    after it                     what autograd saved of them is replaced by the promise to decode again, and they wait packed again
    in backward                  each promise decodes; two of the same weight at one time share what was decoded

Under autocast the cast of a weight is made for each call of its module, and gradients of several calls are added as float32; torch's own
cache would keep all casts until the forward pass ends, and add them as bfloat16. The cast of a weight without a gradient has no history
that could be followed and is kept for backward, as ever.

A parameter that somebody still holds after the forward pass (a graph that hooks of others keep, an extension) stays plain until that is
over: it is tried again when its gradient is there, when the model's forward pass ends, and before the next. `changes` names it.

Which parameters can wait packed, and why others stay as they are.
"""


# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paredown.codec.packed import DEVICES
from paredown.errors import CodecError
from paredown.formats.catalog import MIN_DIMS, MIN_NUMEL, is_small
from paredown.formats.format import Format
from paredown.optim.packed_parameter import PackedParameter, WeightView, plain_parameter
from paredown.optim.packed_weight import DTYPES, PLAIN_DTYPES, Weight, pack, strides_of, weight_of
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.changes import Change
from paredown.session.saved_weights import (
    PackedModule,
    WeightCall,
    WeightUse,
    keeps_objects,
    leads_to_weight,
    release_saved_weights,
)
from paredown.trace.autograd_graph import next_number
from paredown.trace.module_watch import Hook

ALONE = 2  # holders of a storage: the tensor, and the object that asks
COMPILED = "torch.compile runs its module, where hooks cannot bring it"
SHARED = "its memory is shared with other tensors, or a graph that waits for its backward holds it"
SCRIPTED = "TorchScript runs its module"
ADDED = "it was added after the plan was applied"
LARGER = "it would not be smaller"


def reason_to_keep_plain(parameter: nn.Parameter, format: Format) -> str | None:
    """Why a parameter cannot wait packed."""
    if type(parameter) is not nn.Parameter:
        return "another session has it" if type(parameter) is PackedParameter else f"it is a {type(parameter).__name__}"
    if parameter.device.type not in DEVICES or parameter.dtype not in DTYPES or parameter.layout is not torch.strided:
        return f"it is {parameter.dtype} in layout {parameter.layout} on {parameter.device}"
    if format.nbytes(parameter.shape) >= parameter.nbytes:
        return LARGER
    if strides_of(parameter) != parameter.stride():
        return "its memory has gaps"
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.nbytes or torch._C._storage_Use_Count(storage._cdata) > ALONE:
        return SHARED
    return None if bool(parameter.detach().isfinite().all()) else "it holds values that are not finite"


def parameters_without_hooks(model: nn.Module, is_compiled: bool) -> dict[int, str]:
    """Parameters (by id) of modules whose hooks do not run."""
    found: dict[int, str] = {}
    for module in model.modules():
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled or (is_compiled and module is model):
            found.update({id(p): COMPILED for p in module.parameters()})
        if isinstance(module, torch.jit.ScriptModule):
            found.update({id(p): SCRIPTED for p in module.parameters()})
    return found


# --- Weights that wait packed between the forward passes of their modules ---

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
SMALL = "packing them would save little, and norms and biases are sensitive"
HELD = "somebody holds it after the forward pass: it waits plain until backward used it"
REPLACED = "this parameter was put there after apply"
GIVEN_BACK = "its dtype or device became one that is not packed: it is plain from then on"
NO_BACKWARD = -1  # the number of the backward pass that runs, where none does


class Weights:
    """The packed weights of one model."""

    def __init__(self, plan: Plan, model: nn.Module, *, is_compiled: bool) -> None:
        self.weights: dict[str, Weight] = {}
        self.small: dict[str, Format] = {}
        self.left: dict[str, tuple[Format, str]] = {}  # name -> what was asked for, and why it stays as it is
        self.pinned: set[str] = set()
        self._plain: set[str] = set()  # names of those that have the dtype that was asked for
        self.held: tuple[str, ...] = ()  # at the end of the last forward pass
        self._plan, self._model, self._is_compiled = plan, weakref.ref(model), is_compiled
        self._holding: dict[Weight, WeightUse] = {}
        self._running, self._lock = threading.local(), threading.RLock()
        self._handles: list[Any] = []
        self._hooks: dict[Weight, list[Hook]] = {}  # of the modules that have it
        self._loading: list[tuple[str, weakref.ref[nn.Parameter], Format]] = []

    def _put_away(self, name: str, parameter: nn.Parameter, format: Format, reason: str | None = None) -> None:
        if parameter.dtype is PLAIN_DTYPES.get(str(format)):
            self._plain.add(name)
            return
        if is_small(parameter.shape):
            self.small[name] = format
            return
        try:
            reason = reason or reason_to_keep_plain(parameter, format)
            if reason is None:
                self.weights[name] = weight = pack(parameter, format, PackedParameter)
                weight.on_use = Used(self)
                self.left.pop(name, None)
                return
        except CodecError as error:
            reason = str(error)
        self.left[name] = format, reason

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        self._forget_released()
        return sum(weight.nbytes for weight in self.weights.values())

    def changes(self) -> Iterator[Change]:
        """What is not as it was asked for."""
        self._forget_released()
        if self.small:
            asked = ", ".join(dict.fromkeys(str(format) for format in self.small.values()))
            what = f"{len(self.small)} parameter{'s' * (len(self.small) > 1)} of fewer than {MIN_DIMS} dimensions or {MIN_NUMEL} values"
            yield Change(what, asked, "as it is", SMALL)
        for name, (format, reason) in self.left.items():
            yield Change(f"weight={name}", str(format), "as it is", reason)
        there = dict(self._named())
        for name, weight in self.weights.items():
            if name in there and there[name] is not weight.parameter:
                other = weight_of(there[name])  # tied to another packed one, or plain
                asked, given = str(weight.packed.format), str(other.packed.format) if other is not None else "as it is"
                if asked != given:
                    yield Change(f"weight={name}", asked, given, REPLACED)
        yield from self._added(there)
        for name in sorted(self.pinned & self.weights.keys()):
            yield Change(f"weight={name}", str(self.weights[name].packed.format), "plain too", COMPILED)
        for name in self.held:
            yield Change(f"weight={name}", str(self.weights[name].packed.format), "plain until backward", HELD)

    def _added(self, there: dict[str, nn.Parameter]) -> Iterator[Change]:
        """Parameters that came after apply."""
        names = {*self._plain, *self.weights, *self.left, *self.small, *(name for name, *_ in self._loading)}
        known = {id(there[name]) for name in names if name in there}  # by id: one may have several names
        for name, parameter in there.items():
            format = self._plan.find((name,), Role.WEIGHT).format
            if format is not None and id(parameter) not in known and weight_of(parameter) is None and not is_small(parameter.shape):
                known.add(id(parameter))
                yield Change(f"weight={name}", str(format), "as it is", ADDED)

    def _forget_released(self) -> None:
        for name, weight in [(name, weight) for name, weight in self.weights.items() if weight.is_released]:
            del self.weights[name]
            self.left[name] = weight.packed.format, GIVEN_BACK

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        model = self._model()
        return iter(()) if model is None else model.named_parameters(remove_duplicate=False)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Pack, and register the hooks; after those of `Watch`, which reads first what was saved."""
        try:
            self._pack()
            self._hook()
        except BaseException:
            self.detach()
            raise

    def _pack(self) -> None:
        model = self._model()
        assert model is not None
        reasons = parameters_without_hooks(model, self._is_compiled)
        for name, parameter in model.named_parameters():
            format = self._plan.find((name,), Role.WEIGHT).format
            if format is not None:
                self._put_away(name, parameter, format, reasons.get(id(parameter)))

    def _hook(self) -> None:
        model = self._model()
        if model is None or not self.weights:
            return
        for module in model.modules():
            weights = [weight for p in module._parameters.values() if p is not None and (weight := weight_of(p)) is not None]
            if weights:
                place = PackedModule(module)  # kept by the hooks alone: it refers to parameters
                hook = Hook(partial(self._enter, place))
                for weight in weights:
                    self._hooks.setdefault(weight, []).append(hook)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
                self._handles.append(module.register_forward_hook(Hook(partial(self._leave, place)), always_call=True))
                self._handles.append(module.register_state_dict_post_hook(Hook(_export)))
        self._handles.append(model.register_forward_pre_hook(Hook(self._begin), prepend=True))
        self._handles.append(model.register_forward_hook(Hook(self._end), always_call=True))
        self._handles.append(model.register_load_state_dict_post_hook(Hook(self._loaded)))

    def detach(self) -> None:
        """Remove the hooks, and give all parameters back."""
        for handle in self._handles + [entry.handle for entry in self._holding.values() if entry.handle is not None]:
            handle.remove()
        self._handles.clear()
        for weight in self.weights.values():
            weight.keep_changes()
            weight.release()
        self.weights, self._holding, self._hooks, self._running = {}, {}, {}, threading.local()

    def _calls(self) -> list[WeightCall]:
        try:
            return self._running.calls
        except AttributeError:
            self._running.calls = calls = list[WeightCall]()
            return calls

    def _enter(self, place: PackedModule, module: nn.Module, args: Any) -> None:
        call = place.call()
        for entry in call.entries:
            self._take(entry)
        self._calls().append(call)

    def _take(self, entry: WeightUse) -> None:
        weight = entry.weight
        with self._lock:  # threads may run the same module
            weight.users += 1
            if not weight.address:
                weight.show()
        entry.look()
        if self._holding and weight in self._holding:
            entry.holders = self._holding[weight].holders

    def _leave(self, place: PackedModule, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._calls()
        if any(call.place is place for call in calls):
            while calls[-1].place is not place:  # calls that ended without their hooks
                self._done(calls.pop(), None)
            self._done(calls.pop(), output)

    def _done(self, call: WeightCall, output: Any) -> None:
        entries = call.entries
        if not entries:
            return
        is_same = not any([entry.weight.keep_changes() for entry in entries])
        hooks = _top_hooks(True)
        is_hooked = hooks is not None and keeps_objects(hooks[0])
        if output is not None and is_same and torch.is_grad_enabled():
            memory = {entry.weight.address: entry.weight for entry in entries}
            is_hooked = call.place.finder.let_go(output, call.first, memory) or is_hooked
            if any([entry.parameter._use_count() > entry.holders[0] for entry in entries]):
                is_hooked = release_saved_weights(output, call.first, memory) or is_hooked  # more was saved than the last time
        if torch.is_autocast_enabled(entries[0].weight.device_type):
            torch.clear_autocast_cache()
        for entry in entries:
            self._drop(entry, is_hooked)
        if not self._holding:
            call.place.ended(call)

    def _drop(self, entry: WeightUse, is_hooked: bool) -> None:
        with self._lock:
            entry.weight.users -= 1
            if entry.weight.users == 0:
                entry.weight.accumulator = None  # which refers to the parameter, that would never be freed
                self._free(entry, is_hooked)

    def _free(self, entry: WeightUse, is_hooked: bool) -> None:
        """Make a parameter wait again, if nobody holds it; `is_hooked`: if nobody holds the object either."""
        tensors, objects = entry.count()
        if tensors > entry.holders[0] or (is_hooked and objects > entry.holders[1]):
            self._hold(entry, is_hooked)
            return
        if self._holding:
            holding = self._holding.pop(entry.weight, None)
            if holding is not None and holding.handle is not None:
                holding.handle.remove()
        entry.weight.hide()

    def _hold(self, entry: WeightUse, is_hooked: bool) -> None:
        """Try again when the gradient is there; of frozen ones in a layer that is computed again, with the next such one and at the end."""
        if entry.weight not in self._holding:
            entry.is_hooked = is_hooked
            held = [weight for weight, other in self._holding.items() if not other.parameter.requires_grad]
            self._holding[entry.weight] = entry
            if entry.parameter.requires_grad:
                entry.handle = entry.parameter.register_post_accumulate_grad_hook(Retry(self, entry.weight))
            elif torch._C._current_graph_task_id() != NO_BACKWARD:
                for weight in held:
                    self.retry(weight)
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self.retry(entry.weight))

    def retry(self, weight: Weight, *, in_backward: bool = False) -> None:
        """Make a parameter wait that somebody held."""
        entry = self._holding.get(weight)
        if entry is None or weight.users:
            return
        if in_backward and entry.is_hooked:  # the engine holds the object too, as long as this hook runs
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.retry(weight))
            return
        with self._lock:
            if weight.users == 0:
                weight.keep_changes()
                self._free(entry, entry.is_hooked)

    # --- the model ----------------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any) -> None:
        calls = self._calls()
        while calls:  # forward passes of this thread that were interrupted
            for entry in calls.pop().entries:
                with self._lock:
                    entry.weight.users -= 1
                    self._hold(entry, is_hooked=True)
        for weight in list(self._holding):
            self.retry(weight)
        if self._loading:
            self._pack_loaded()
        self._running.first, self._running.loose = next_number(), None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        loose: int | None = self._running.loose if hasattr(self._running, "loose") else None
        if output is not None and torch.is_grad_enabled() and (self._holding or loose is not None):
            first = self._running.first if self._holding or loose is None else loose
            release_saved_weights(output, first, {weight.address: weight for weight in self._holding})
        for weight in list(self._holding):
            self.retry(weight)
        if self._holding or self.held:
            self.held = tuple(name for name, weight in self.weights.items() if weight in self._holding)

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        """load_state_dict(assign=True) put other parameters there: they are packed before the next forward pass, when the state is gone."""
        for name, parameter in self._named():
            weight = self.weights.get(name)
            if weight is not None and weight.is_pinned:
                weight.keep_changes()
            if weight is not None and weight.parameter is not parameter and weight_of(parameter) is None:
                del self.weights[name]
                self._loading.append((name, weakref.ref(parameter), weight.packed.format))

    def _pack_loaded(self) -> None:
        loading, self._loading = self._loading, []
        for name, ref, format in loading:
            parameter = ref()
            if parameter is not None:
                self._put_away(name, parameter, format)
                if self.left.get(name) == (format, SHARED):
                    self._loading.append((name, ref, format))  # the state is still there

    # --- outside of modules -------------------------------------------------------------------------------------------

    def used(self, result: Any, first: int, values: list[tuple[Weight, Tensor]]) -> None:
        """Values of packed weights went into `result`, outside of their modules."""
        if torch.is_grad_enabled():
            release_saved_weights(result, first, {value.untyped_storage()._cdata: weight for weight, value in values})
            if getattr(self._running, "loose", 0) is None and leads_to_weight(result):
                self._running.loose = first  # a view, which others may save: it is looked for when the forward pass ends
        for weight, _ in values:
            if any(hook.was_compiled for hook in self._hooks.get(weight, ())) and not weight.is_pinned:
                self._pin(weight)

    def _pin(self, weight: Weight) -> None:
        """torch.compile runs the module, and its hooks do nothing: the weight stays plain."""
        weight.pin()
        self.pinned.update(name for name, other in self.weights.items() if other is weight)

    @contextmanager
    def unpacked(self) -> Generator[None]:
        """All parameters plain; what was changed is encoded again in the end."""
        self._forget_released()
        entries = [WeightUse(p, weight) for weight in self.weights.values() if (p := weight.parameter) is not None]
        for entry in entries:
            self._take(entry)
        try:
            yield
        finally:
            for entry in entries:
                entry.weight.is_checked = False  # compare the values: they may have been written through .data
                entry.weight.keep_changes()
                self._drop(entry, is_hooked=True)


class Used:
    """A session's `Weights.used`, as long as there is one."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weakref.ref(weights)

    def __call__(self, result: Any, first: int, values: list[tuple[Weight, Tensor]]) -> None:
        """Pack the weights again once their values were used."""
        weights = self._weights()
        if weights is not None:
            weights.used(result, first, values)


class Retry:
    """A hook on a parameter: its gradient is there, so that backward needs it no longer."""

    def __init__(self, weights: Weights, weight: Weight) -> None:
        self._weights, self._weight = weakref.ref(weights), weakref.ref(weight)

    def __call__(self, parameter: Tensor) -> None:
        """Try again to pack the weight."""
        weights, weight = self._weights(), self._weight()
        if weights is not None and weight is not None:
            weights.retry(weight, in_backward=True)


def _export(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Plain values in the state of a model; a weight that stands there twice is the same tensor both times."""
    for name in module._parameters:
        value = state.get(prefix + name)
        weight = weight_of(value) if type(value) is WeightView else None
        if weight is not None:
            state[prefix + name] = weight.exported()
        elif type(value) is PackedParameter:
            state[prefix + name] = plain_parameter(value)
