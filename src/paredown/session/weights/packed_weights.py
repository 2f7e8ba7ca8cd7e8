"""Stores weights packed while their modules do not run.

    before a module's forward    its packed parameters are decoded into new memory
    after it                     the weights that autograd saved are replaced by `DeferredWeight`, and the decoded memory is freed
    in backward                  each `DeferredWeight` decodes; several of the same weight share the decoded tensor while it is alive

A frozen weight of an nn.Linear is not unpacked: `FrozenLinear` (optim/packed_parameter.py) decodes it for the matrix products of forward
and backward, and autograd saves nothing.

Under autocast a weight is cast once for each call of its module, and gradients of several calls are added in float32; torch's own cache
would keep all casts until the forward pass ends, and add the gradients in bfloat16.

A parameter that is still referenced after the forward pass (by a graph with other saved-tensor hooks, by an extension) stays unpacked until
the reference is gone: packing is tried again when its gradient is accumulated, when the model's forward pass ends, and before the next one.
`changes` lists such parameters, and those that cannot be packed at all (`reason_to_keep_plain`).
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.autograd.checkpoints import CHOOSES, router_weights
from paredown.autograd.graph import next_number
from paredown.autograd.hooks import Hook, num_running, patched_attributes
from paredown.errors import CodecError
from paredown.formats.catalog import MIN_DIMS, MIN_NUMEL, is_small
from paredown.formats.format import Format
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import PLAIN_DTYPES, Weight, pack, weight_of
from paredown.optim.sharded import packed_shards
from paredown.optim.sharded.packed_shards import PackedShard
from paredown.plan.plan import Plan
from paredown.roles import weight_role
from paredown.session.changes import ADDED, UNMODIFIED, Change
from paredown.session.weights import unattached_weights
from paredown.session.weights.graph_linears import GraphLinears
from paredown.session.weights.saved_weights import (
    COMPILED,
    Accumulators,
    PackedModule,
    WeightCall,
    export_plain,
    gradient_node,
    hook_of_checkpoint,
    is_frozen_linear,
    keeps_objects,
    leads_to_weight,
    parameters_without_hooks,
    release_saved_weights,
    top_hooks,
)
from paredown.session.weights.unattached_weights import SHARED, reason_to_keep_plain, unattached_weight
from paredown.session.weights.weight_writes import WeightWrites

SMALL = "packing them would save little, and norms and biases are sensitive"
HELD = "it is still referenced after the forward pass: it stays unpacked until backward has used it"
REPLACED = "the parameter was replaced after apply"
FROZEN_LATER = "it was added or frozen after the plan was applied: freeze weights before apply"
RELEASED = "its dtype or device became one that is not packed: it is unpacked from then on"
NO_BACKWARD = -1  # id of the current graph task outside backward


class Weights:
    """Packs the weights of one model, and decodes them by hooks while their modules run."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        is_compiled: bool,
        checkpointed: frozenset[nn.Module] = frozenset(),
        graphs: GraphLinears | None = None,
    ) -> None:
        """Prepare to pack weights as `plan` requests; `attach` packs them.

        `checkpointed`: the modules that `plan.recompute` names. `graphs`: the layers whose weights compiled graphs decode.
        """
        self.weights: dict[str, Weight] = {}  # the packed weights, also those of `shards`
        self.shards: dict[str, PackedShard] = {}  # the packed weights that fully_shard manages
        self.small: dict[str, Format] = {}
        self.not_packed: dict[str, tuple[Format, str]] = {}  # name -> requested format, and why the parameter is not packed
        self.pinned: set[str] = set()
        self._packed_before: dict[str, Format | None] = {}  # name -> requested format, of weights that were packed before apply
        self._plain: set[str] = set()  # names of parameters whose dtype is the requested format already
        self.held: tuple[str, ...] = ()  # names of weights that were still decoded when the last forward pass ended
        self._plan, self._model, self._is_compiled, self._checkpointed = plan, weakref.ref(model), is_compiled, checkpointed
        self._graphs = graphs
        # weights that other code refers to -> whether references to the Python object count, and the handle of the hook that tries again
        self._held: dict[Weight, tuple[bool, Any]] = {}
        self._running, self._lock = threading.local(), threading.RLock()
        self._handles, self._writes = list[Any](), WeightWrites()
        self._hooks: dict[Weight, list[Hook]] = {}  # the pre-hooks of the modules that have the weight
        self._frozen_linears: dict[Weight, list[weakref.ref[nn.Module]]] = {}  # modules without hooks, by their weights
        self._loading: list[tuple[str, weakref.ref[nn.Parameter], Format]] = []  # packed before the next forward pass

    def _stays_plain(self, name: str, parameter: nn.Parameter, format: Format) -> bool:
        """Return whether a parameter stays unpacked, since its dtype is the requested format or it is small; if so, note it."""
        if parameter.dtype is PLAIN_DTYPES.get(str(format)):
            self._plain.add(name)
            return True
        if is_small(parameter.shape):
            self.small[name] = format
            return True
        return False

    def _adopt(self, name: str, weight: Weight, format: Format | None, reason: str | None) -> None:
        """Take over a weight packed before the session; decode it for good if there is a `reason` not to pack it."""
        if reason is not None:
            self.not_packed[name] = weight.format, reason
            weight.release()
            return
        weight.attach(weakref.WeakMethod(self.used), hook_of_checkpoint)
        self.weights[name] = weight
        if self._graphs is None or name in self._graphs.packed_before:
            self._packed_before[name] = format
        self._writes.watch(name, weight)

    def _pack_parameter(self, name: str, parameter: nn.Parameter, format: Format, reason: str | None = None) -> None:
        if self._stays_plain(name, parameter, format):
            return
        try:
            reason = reason or reason_to_keep_plain(parameter, format)
            if reason is None:
                on_use = weakref.WeakMethod(self.used)
                weight = pack(parameter, format, PackedParameter, on_use=on_use, hook_of_checkpoint=hook_of_checkpoint)
                self.weights[name] = weight
                self._writes.watch(name, weight)
                self.not_packed.pop(name, None)
                return
        except CodecError as error:
            reason = str(error)
        self.not_packed[name] = format, reason

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes and scales of all packed weights."""
        self._remove_released()
        return sum(weight.nbytes for weight in self.weights.values())

    def changes(self) -> Iterator[Change]:
        """Yield a `Change` for each weight that is not stored as the plan requests."""
        self._remove_released()
        if self.small:
            asked = ", ".join(dict.fromkeys(str(format) for format in self.small.values()))
            what = f"{len(self.small)} parameter{'s' * (len(self.small) > 1)} of fewer than {MIN_DIMS} dimensions or {MIN_NUMEL} values"
            yield Change(what, asked, UNMODIFIED, SMALL)
        for name, (format, reason) in self.not_packed.items():
            yield Change(f"weight={name}", str(format), UNMODIFIED, reason)
        yield from unattached_weights.kept_formats(self._packed_before, self.weights)
        parameters = dict(self._named())
        for name, weight in self.weights.items():
            if name in parameters and parameters[name] is not weight.parameter:
                other = weight_of(parameters[name])  # None if the new parameter is not packed
                asked, given = str(weight.packed.format), str(other.packed.format) if other is not None else UNMODIFIED
                if asked != given:
                    yield Change(f"weight={name}", asked, given, REPLACED)
        for name, shard in self.shards.items():
            if shard.padding:
                uneven = packed_shards.UNEVEN.format(shard.parameter.shape[0], shard.num_processes, shard.padding)
                yield Change(f"weight={name}", str(shard.weight.packed.format), "packed and padded", uneven)
        yield from self._added(parameters)
        for name in sorted(self.pinned & self.weights.keys()):
            yield Change(f"weight={name}", str(self.weights[name].packed.format), "packed and unpacked", COMPILED)
        yield from self._writes.changes()
        for name in self.held:
            yield Change(f"weight={name}", str(self.weights[name].packed.format), "unpacked until backward", HELD)

    def _added(self, parameters: dict[str, nn.Parameter]) -> Iterator[Change]:
        """Yield a `Change` for each parameter that was added after `apply` and is not packed as requested."""
        names = {*self._plain, *self.weights, *self.not_packed, *self.small, *(name for name, *_ in self._loading)}
        known = {id(parameters[name]) for name in names if name in parameters}  # by id: a parameter may have several names
        for name, parameter in parameters.items():
            format = self._format(name, parameter)
            if format is not None and id(parameter) not in known and weight_of(parameter) is None and not is_small(parameter.shape):
                known.add(id(parameter))
                yield Change(f"weight={name}", str(format), UNMODIFIED, ADDED if parameter.requires_grad else FROZEN_LATER)

    def _format(self, name: str, parameter: nn.Parameter) -> Format | None:
        return self._plan.find((name,), weight_role(is_frozen=not parameter.requires_grad)).format

    def _remove_released(self) -> None:
        for name, weight in [(name, weight) for name, weight in self.weights.items() if weight.is_released]:
            del self.weights[name]
            self.not_packed[name] = weight.packed.format, RELEASED

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the (name, parameter) pairs of all modules; a tied parameter comes once for each of its names."""
        model = self._model()
        sharded = packed_shards.sharded_of_whole(model) if model is not None and self.shards else {}
        for path, module in model.named_modules() if model is not None else ():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                yield name, sharded.get(id(parameter), parameter)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Pack the weights and register the hooks that decode them.

        The session's `Watch` must register its hooks first, since it must see saved tensors before these hooks replace them.
        """
        try:
            self._pack()
            self._register_hooks()
        except BaseException:
            self.detach()
            raise

    def _pack(self) -> None:
        model = self._model()
        assert model is not None
        reasons = parameters_without_hooks(model, self._is_compiled)
        for key in self._graphs.weights if self._graphs is not None else ():
            reasons.pop(key, None)
        reasons |= {id(parameter): CHOOSES for parameter in router_weights(model).values() if not parameter.requires_grad}
        sharded: dict[str, tuple[DTensor, Format]] = {}
        for name, parameter in model.named_parameters():
            format = self._format(name, parameter)
            if (packed := unattached_weight(parameter)) is not None:
                self._adopt(name, packed, format, reasons.get(id(parameter)))
            elif isinstance(parameter, DTensor) and format is not None:
                if reasons.get(id(parameter)) == CHOOSES:
                    self.not_packed[name] = format, CHOOSES
                elif not self._stays_plain(name, parameter, format):
                    sharded[name] = parameter, format
            elif format is not None:
                self._pack_parameter(name, parameter, format, reasons.get(id(parameter)))
        self._pack_shards(sharded)

    def _pack_shards(self, sharded: dict[str, tuple[DTensor, Format]]) -> None:
        """Pack this process's rows of parameters that fully_shard manages; all processes must pack the same parameters."""
        model = self._model()
        if sharded and model is not None:
            packed, refused = packed_shards.pack_shards(sharded, model)
            self.not_packed.update(refused)
            self.shards.update(packed)
            for name, shard in packed.items():
                self.weights[name] = shard.weight
                self._writes.watch(name, shard.weight)

    def _repack_shards(self) -> None:
        """Pack rows of sharded parameters again if load_state_dict(assign=True) or model.to() replaced them."""
        replaced: dict[str, tuple[DTensor, Format]] = {}
        for name, shard in [(name, shard) for name, shard in self.shards.items() if shard.is_replaced]:
            del self.shards[name], self.weights[name]
            packed_shards.forget_gathered(shard.managed)
            replaced[name] = shard.managed.sharded_param, shard.weight.packed.format
        self._pack_shards(replaced)
        for shard in self.shards.values():
            shard.weight.encode()  # now: fully_shard gathers on another CUDA stream, where values of this one may be freed too early

    def _register_hooks(self) -> None:
        model = self._model()
        if model is None or not self.weights:
            return
        for module in model.modules():
            packed = [p for p in module._parameters.values() if p is not None and weight_of(p) is not None]
            weights = [weight for p in packed if not isinstance(p, DTensor) and (weight := weight_of(p)) is not None]
            if packed and not weights:  # fully_shard decodes what it gathers
                self._handles.append(module.register_state_dict_post_hook(Hook(export_plain)))
            if weights:
                self._handles.append(module.register_state_dict_post_hook(Hook(export_plain)))
                if self._graphs is not None:
                    continue
                if is_frozen_linear(module):
                    self._frozen_linears.setdefault(weights[0], []).append(weakref.ref(module))
                else:
                    self._register_hooks_of(module, weights)
        if self._graphs is None or self.shards:
            self._handles.append(model.register_forward_pre_hook(Hook(self._begin), prepend=True))
            self._handles.append(model.register_forward_hook(Hook(self._end), always_call=True))
        if self._graphs is not None:
            self._graphs.attach()
        self._handles.append(model.register_load_state_dict_post_hook(Hook(self._loaded)))
        self._handles += self._writes.attach(model)

    def _register_hooks_of(self, module: nn.Module, weights: list[Weight]) -> None:
        place = PackedModule(module)  # referenced by the hooks only, since it refers to parameters
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            for weight in place.weights():  # now: autograd numbers the node that finding one creates, and `Watch` reads the numbers
                with weight.viewable():
                    gradient_node(weight, place.accumulators)
        hook = Hook(partial(self._enter, place))
        for weight in weights:
            self._hooks.setdefault(weight, []).append(hook)
        self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        self._handles.append(module.register_forward_hook(Hook(partial(self._leave, place)), always_call=True))

    def in_graphs(self, model: nn.Module, head: nn.Module | None) -> Weights:
        """Remove the hooks, which would break compiled graphs; return the `Weights` of a compiled session.

        Weights of frozen linear layers stay packed, except that of the output `head`; other weights are decoded.
        """
        graphs = GraphLinears(model, head, frozenset(self._packed_before))
        self.detach(stay=graphs.weights)
        return Weights(self._plan, model, is_compiled=True, graphs=graphs)

    def check_frozen(self) -> None:
        """Raise ApplyError if a weight that compiled graphs decode is no longer frozen."""
        if self._graphs is not None:
            self._graphs.check()

    def detach(self, packed_base: bool | None = None, stay: Collection[int] = ()) -> None:
        """Remove the hooks and decode the parameters, except those that stay packed.

        `packed_base`: True leaves frozen weights packed, None those that were packed before `apply`. `stay`: ids of others to leave packed.
        """
        if self._graphs is not None:
            self._graphs.detach()
        for handle in self._handles + [handle for _, handle in self._held.values() if handle is not None]:
            handle.remove()
        self._handles.clear()
        model = self._model()
        if self.shards and model is not None:
            packed_shards.reshard(model)
        for name, shard in self.shards.items():
            shard.release()
            del self.weights[name]
        self.shards = {}
        for name, weight in self.weights.items():
            weight.keep_changes()
            stays = (
                unattached_weights.stays_packed(weight, packed_base, name in self._packed_before) or id(weight.parameter) in stay
            )
            (weight.detach if stays else weight.release)()
        if packed_base and model is not None:
            unattached_weights.export_decoded(model)
        self.weights, self._held, self._hooks, self._frozen_linears, self._running = {}, {}, {}, {}, threading.local()

    def _calls(self) -> list[WeightCall]:
        try:
            return self._running.calls
        except AttributeError:
            self._running.calls = calls = list[WeightCall]()
            return calls

    def _enter(self, place: PackedModule, module: nn.Module, args: Any) -> None:
        if any(call.place is place for call in self._calls()) and num_running(module) < 2:
            self._end_interrupted([call for call in self._calls() if call.place is place])
        if self._loading:
            self._pack_loaded()
        call = WeightCall(place, place.weights())
        for weight in call.weights:
            self._unpack(weight, place.accumulators)
        self._calls().append(call)
        if module not in self._checkpointed:
            call.begin_saves()

    def _unpack(self, weight: Weight, accumulators: Accumulators) -> None:
        """Decode a weight before its module runs, and count references to its memory, to notice those that the module adds."""
        with self._lock:  # threads may run the same module
            weight.users += 1
            if not weight.address:
                weight.show()
            if weight.accumulator is None:
                weight.accumulator = gradient_node(weight, accumulators)
            if (weight.users == 1 or weight.is_pinned) and weight not in self._held:
                weight.references = weight.count_references()

    def _leave(self, place: PackedModule, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._calls()
        if calls and (calls[-1].place is place or any(call.place is place for call in calls)):
            while calls[-1].place is not place:  # calls that ended without their forward hook
                self._finish(calls.pop(), None)
            self._finish(calls.pop(), output)

    def _finish(self, call: WeightCall, output: Any) -> None:
        """End a module's call: replace the weights that autograd saved, and free the module's decoded parameters."""
        weights, is_deferred = call.weights, call.end_saves()
        if not weights:
            return
        is_same = not any([weight.keep_changes() for weight in weights])
        hooks = top_hooks(True)
        is_hooked = hooks is not None and keeps_objects(hooks[0])
        is_searched = not is_deferred or any(weight.is_referenced() for weight in weights)
        if output is not None and is_same and is_searched and torch.is_grad_enabled():
            is_hooked = call.place.release(output, call) or is_hooked
        if torch.is_autocast_enabled(weights[0].device_type):
            torch.clear_autocast_cache()
        for weight in weights:
            self._end_use(weight, is_hooked)

    def _end_use(self, weight: Weight, is_hooked: bool) -> None:
        with self._lock:
            weight.users -= 1
            if weight.users == 0:
                weight.accumulator = None  # it refers to the parameter, which would never be freed
                self._free(weight, is_hooked)

    def _free(self, weight: Weight, is_hooked: bool) -> None:
        """Free the decoded values of a weight, unless other code refers to them.

        `is_hooked`: whether saved-tensor hooks of other code may hold the parameter object.
        """
        if weight.is_referenced(by_objects=is_hooked):
            self._hold(weight, is_hooked)
            return
        if self._held:
            _, handle = self._held.pop(weight, (False, None))
            if handle is not None:
                handle.remove()
        weight.hide()

    def _hold(self, weight: Weight, is_hooked: bool) -> None:
        """Leave a weight decoded, since other code refers to it, and try to free it once its gradient is complete.

        Frozen weights of a checkpointed module have no gradient: freeing them is tried at the next call of this method, and when backward
        ends.
        """
        parameter = weight.parameter
        if weight in self._held or parameter is None:
            return
        frozen = [other for other in self._held if (p := other.parameter) is not None and not p.requires_grad]
        handle = None
        if parameter.requires_grad:
            retry = partial(_retry_after_gradient, weakref.WeakMethod(self.retry), weakref.ref(weight))
            handle = parameter.register_post_accumulate_grad_hook(retry)
        self._held[weight] = is_hooked, handle
        if handle is None and torch._C._current_graph_task_id() != NO_BACKWARD:
            for other in frozen:
                self.retry(other)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.retry(weight))

    def retry(self, weight: Weight, *, in_backward: bool = False) -> None:
        """Free a weight's decoded values if the references that prevented this are gone.

        `in_backward`: whether the hook on the weight's gradient calls this method.
        """
        if weight not in self._held or weight.users:
            return
        is_hooked, _ = self._held[weight]
        if in_backward and is_hooked:  # the engine references the object while this hook runs
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.retry(weight))
            return
        with self._lock:
            if weight.users == 0:
                weight.keep_changes()
                self._free(weight, is_hooked)

    def _end_interrupted(self, interrupted: list[WeightCall]) -> None:
        """End those module calls of this thread whose forward hooks did not run because of an exception."""
        for call in reversed(list(interrupted)):
            self._calls().remove(call)
            call.end_saves()
            for weight in call.weights:
                with self._lock:
                    weight.users -= 1
                    self._hold(weight, is_hooked=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._end_interrupted(self._calls())
        for weight in list(self._held):
            self.retry(weight)
        if self.shards:
            self._repack_shards()
        if self._loading:
            self._pack_loaded()
        self._running.first, self._running.loose = next_number(), None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        loose: int | None = self._running.loose if hasattr(self._running, "loose") else None
        if output is not None and torch.is_grad_enabled() and (self._held or loose is not None):
            first = self._running.first if self._held or loose is None else loose
            release_saved_weights(output, first, {weight.address: weight for weight in self._held})
        for weight in list(self._held):
            self.retry(weight)
        if self._held or self.held:
            self.held = tuple(name for name, weight in self.weights.items() if weight in self._held)

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        """Let the next forward pass pack parameters that load_state_dict(assign=True) put in place of packed ones."""
        self._repack_shards()
        for name, parameter in self._named():
            weight = self.weights.get(name) if name not in self.shards else None
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
                self._pack_parameter(name, parameter, format)
                if self.not_packed.get(name) == (format, SHARED):
                    self._loading.append((name, ref, format))  # the state dict still references it

    # --- outside of modules -------------------------------------------------------------------------------------------

    def used(self, result: Any, first: int, values: list[tuple[Weight, Tensor]]) -> None:
        """Replace the decoded weights that autograd saved for an operation outside of the weights' modules.

        `result`: the operation's output. `first`: the sequence number of its first autograd node. `values`: the weights that it read.
        """
        if torch.is_grad_enabled():
            release_saved_weights(result, first, {value.untyped_storage()._cdata: weight for weight, value in values})
            if getattr(self._running, "loose", 0) is None and leads_to_weight(result):
                self._running.loose = first  # a view that later operations may save: the end of the forward pass searches from here
        for weight, _ in values:
            was_compiled = weight.was_compiled or any(hook.was_compiled for hook in self._hooks.get(weight, ()))
            if was_compiled and not weight.is_pinned:
                self._pin(weight)
            for module in [ref() for ref in self._frozen_linears.get(weight, ())]:
                if module is not None and not is_frozen_linear(module):  # it is trained from now on
                    self._register_hooks_of(module, [weight])
                    self._frozen_linears.pop(weight, None)

    def _pin(self, weight: Weight) -> None:
        """Leave a weight decoded for good, because torch.compile runs its module."""
        weight.pin()
        self.pinned.update(name for name, other in self.weights.items() if other is weight)

    @contextmanager
    def keeping_saved(self) -> Generator[None]:
        """Return a context in which weights that autograd saves for backward stay decoded."""
        finish = self._finish
        with patched_attributes(self, _finish=lambda call, output: finish(call, None), _held={}):
            yield

    @contextmanager
    def unpacked(self) -> Generator[None]:
        """Return a context in which packed parameters are decoded; those changed in it are quantized again at its end."""
        self._remove_released()
        shards = {shard.weight for shard in self.shards.values()}  # which are DTensors all the time
        plain = [weight for weight in self.weights.values() if weight not in shards and weight.parameter is not None]
        accumulators: Accumulators = {}  # until all are packed again: a node counts as a reference
        for weight in plain:
            self._unpack(weight, accumulators)
        try:
            yield
        finally:
            for weight in plain:
                weight.is_checked = False  # compare the values: they may have been written through .data
                weight.keep_changes()
                self._end_use(weight, is_hooked=True)


def _retry_after_gradient(retry: weakref.WeakMethod[Any], ref: weakref.ref[Weight], parameter: Tensor) -> None:
    """Free a weight's decoded values, as a hook that runs when backward has used them and accumulated the gradient."""
    method, weight = retry(), ref()
    if method is not None and weight is not None:
        method(weight, in_backward=True)
