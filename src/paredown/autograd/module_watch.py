"""`Watch` follows a model's forward pass and reports every tensor that autograd saves, with its slot name.

When a module returns, the autograd graph is read backward from its outputs (autograd/graph.py), and the nodes that were not read
before are visited in the order of their creation. Autograd numbers its nodes; a node belongs to the innermost module that was running
when its number was assigned. Where a pass has created as many nodes as the last one, they are assumed to have saved the same tensors: the
graph is not searched again (autograd/graph_parts.py). Nothing is intercepted: the model runs unmodified. Saved tensors that hooks of other
code hold (as checkpointing does) are reported without their values, and are not read; the inputs of checkpoints are reported
(autograd/checkpoints.py).

    layer3.0.conv1:input     the input that `layer3.0.conv1`, a module of torch.nn without children, saved
    encoder.3:mul.other      an operand of a multiplication in the forward of `encoder.3`; of a second one, `encoder.3:mul#2.other`
    relu@2:output            the second call of `relu` in one forward pass
    encoder.3:checkpoint.input   the input that torch.utils.checkpoint keeps of the layer `encoder.3` (autograd/checkpoints.py)

`model(x)` is one forward pass. With `follow_submodules`, `model.decoder(model.encoder(x))` is two: each outermost call of a module is one.
Operations that lead from the output of one pass to an argument of another are read with the second (autograd/pass_chains.py).

Not reported: what nodes saved that do not lead to the output of a module, until they do; tensors that custom functions store other than by
`save_for_backward`; tensors that in-place operations on views save (`in_place_on_views` has the modules of such operations).
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# Autograd exposes saved tensors only by attributes that begin with an underscore, in torch 2.11 as in 2.13.

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from paredown.autograd.checkpoints import HiddenLayer, running_checkpoint
from paredown.autograd.graph import ModuleCall, Pass, Saved, is_around, is_plain_leaf, next_number, passed_over, tensors_in
from paredown.autograd.graph_parts import needs_of
from paredown.autograd.hooks import Hook, call_always, num_running, patched_attributes
from paredown.autograd.pass_chains import Between, PassChain
from paredown.autograd.saved_reports import SavedAgain, SavedReports
from paredown.autograd.second_passes import ReentrantSaves, Store, running_backward, top_default_hooks

is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled

BeginInside = Callable[[list[Tensor], set[int]], None]


@final
class Watch(SavedReports):
    """Follows the forward passes of a model by hooks, and calls `on_saved` for every tensor that autograd saves.

    `attach()` registers the hooks, `detach()` removes them. Tensors of fewer than `min_numel` values are not reported.

    `on_begin` is called when a forward pass of the model begins and returns whether to follow it; `on_end` gets its output. `on_enter` gets
    the path and the arguments of each submodule that is called. `on_saved_again`, if set, is called instead of `on_saved` for a tensor that
    an operation saved in an earlier pass too: with the earlier description, the node, handle, tensor and `Pass.inputs`.
    """

    def __init__(
        self,
        model: nn.Module,
        on_saved: Callable[[Saved], None],
        *,
        on_begin: Callable[[], bool] = lambda: True,
        on_end: Callable[[Any], None] = lambda output: None,
        on_enter: Callable[[str, Any], None] | None = None,
        min_numel: int = 0,
    ) -> None:
        super().__init__(model, on_saved, min_numel)
        self.model, self._on_begin, self._on_end, self._on_enter = model, on_begin, on_end, on_enter
        self._running = threading.local()
        self._passes: list[Pass] = []  # running forward passes of all threads, without branches in other threads
        self.in_threads: set[str] = set()  # modules that a thread called while several forward passes ran: not followed
        self._paths = {module: (name, is_plain_leaf(module)) for name, module in model.named_modules()}
        self._segments: dict[nn.Module, dict[tuple[str, bool], Any]] = {}  # by the module whose call began the pass
        self._parameters = [module._parameters for module in self._paths]
        self.entrance = model  # module whose call began the last pass
        self._needs: list[bool] = []  # which parameters required a gradient in the last pass, on which depends what is saved
        self._handles: dict[nn.Module, list[Any]] = {}
        self.follows_submodules = False  # set by `follow_submodules`
        # called when a submodule's call begins a pass, with those of its arguments that are made of outputs of earlier passes, and the
        # storages of these outputs
        self.on_begin_inside: BeginInside | None = None
        self._root_hook = Hook()
        self._known_entrances = set[nn.Module]()  # modules that began passes of which the first has ended
        self.passed_over: frozenset[nn.Module] = frozenset()  # checkpointed modules, followed inside in the first pass only
        # modules called in the first pass: inside of checkpointed modules (True), and outside (False)
        self._called: dict[bool, set[nn.Module]] = {True: set(), False: set()}
        self._unfollowed = set[nn.Module]()  # submodules of checkpointed modules, whose hooks were removed after the first pass

    @property
    def was_compiled(self) -> bool:
        """Return whether torch.compile has traced the whole model, in which case hooks see no calls of modules."""
        return self._root_hook.was_compiled

    def attach(self, *, follows: bool = True) -> None:
        """Register hooks on all modules; with `follows=False`, only on the model itself."""
        for module in self._paths:
            # scripted modules take no hooks: what they save is read when their parent returns
            if not isinstance(module, torch.jit.ScriptModule) and (follows or module is self.model):
                self._attach_to(module)

    def _attach_to(self, module: nn.Module) -> None:
        is_root = module is self.model
        enter, leave = (self._begin, self._end) if is_root else (self._enter, self._leave)
        hooks = Hook(enter), Hook(leave)
        self._root_hook = hooks[0] if is_root else self._root_hook
        before = module.register_forward_pre_hook(hooks[0], with_kwargs=True, prepend=is_root)
        after = module.register_forward_hook(hooks[1], always_call=is_root)
        self._handles[module] = [before, after]

    def detach(self) -> None:
        """Remove the hooks from all modules."""
        self._remove(list(self._handles))
        self._running = threading.local()

    def end_first_pass(self) -> None:
        """Remove hooks that are not needed after the first forward pass, and stop reporting small tensors.

        The first pass that begins with a call of another module still reports small tensors.
        """
        self.collects_small = False
        self._known_entrances.add(self.entrance)
        found = (self._called[True] - self._called[False]) & self._handles.keys()
        self._unfollowed |= found
        self._remove(list(found))
        self._called = {True: set(), False: set()}

    def follow_for(
        self,
        on_saved_again: SavedAgain,
        on_begin_inside: BeginInside,
        *,
        passed_over: frozenset[nn.Module],
        on_recomputation: Callable[[], Store],
    ) -> None:
        """Follow forward passes that begin with a call of any module, and call these functions of a session.

        `on_saved_again` is called for tensors that an operation saved in an earlier pass too, `on_begin_inside` when the call of a
        submodule begins a pass, and `on_recomputation` when backward runs a layer again that the model itself checkpoints. `passed_over`:
        the modules that the session checkpoints.
        """
        self.on_saved_again, self.on_begin_inside, self.passed_over = on_saved_again, on_begin_inside, passed_over
        self.checkpoints.store_by(on_recomputation)
        self.follow_submodules()

    def follow_submodules(self) -> None:
        """From now on, also follow forward passes that call a submodule alone, such as model.encoder(x)."""
        self.follows_submodules = True

    @contextmanager
    def paused(self) -> Generator[None]:
        """Return a context in which forward passes are not followed, so that no saved tensors are reported."""
        with patched_attributes(self, _on_begin=lambda: False):
            yield

    def passing_over(self) -> AbstractContextManager[None]:
        """Return a context in which the forward pass of this thread does not record calls of modules."""
        return passed_over(getattr(self._running, "current", None))

    @contextmanager
    def reporting_to(self, on_saved: Callable[[Saved], None]) -> Generator[None]:
        """Return a context in which all saved tensors are reported to the function `on_saved` instead."""
        with patched_attributes(self, _on_saved=on_saved, on_saved_again=None):
            yield

    def leave_out(self, names: Collection[str], max_bytes: int) -> None:
        """Stop reporting tensors with these slot names for which packing would free at most `max_bytes` bytes."""
        self._left_out, self._max_left_bytes = frozenset(names), max_bytes
        self._forget()

    def _forget(self) -> None:
        """Discard the records of earlier passes, so that the next pass is read by a search of autograd's graph."""
        self._segments = {}

    def _remove(self, modules: list[nn.Module]) -> None:
        for module in modules:
            for handle in self._handles.pop(module):
                handle.remove()

    def where(self) -> str:
        """Return the path of the module whose forward is running in this thread; "" for the model itself, or if no forward runs."""
        current = self._current()
        return current.calls[-1].path if current is not None else ""

    # --- hooks ---

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._end_interrupted(module)
        if not torch.is_grad_enabled() or self._current() is not None or not self._on_begin():
            return
        self._begin_pass(module, (args, kwargs))

    def _begin_pass(self, entrance: nn.Module, values: Any) -> Pass:
        """Begin a forward pass of this thread with the call of the module `entrance`, and return the pass.

        `values`: the arguments of the call.
        """
        with torch._C.DisableTorchFunctionSubclass():  # so that packed parameters run no Python
            needs = [p.requires_grad for parameters in self._parameters for p in parameters.values() if p is not None]
        if needs != self._needs:
            self._forget()
            self._needs = needs
        self.entrance, self.collects_small = entrance, entrance not in self._known_entrances
        path, is_plain_leaf = self._paths[self.model]
        arguments = list(tensors_in(values))
        between = None if entrance is self.model else self._chain().before(arguments)
        held = between.held if between is not None else frozenset(t.untyped_storage()._cdata for t in arguments)
        self._running.current = current = Pass(held, self._paths, [ModuleCall(self.model, path, is_plain_leaf, next_number())])
        current.segments = self._segments.setdefault(entrance, {})
        current.checkpoints.add(running_checkpoint())  # a checkpoint around the model: the caller holds its inputs
        self._passes.append(current)
        if between is not None:
            self._begin_inside(current, between)
        return current

    def _begin_inside(self, current: Pass, between: Between) -> None:
        """Report what operations between two calls of submodules saved, when the second call begins.

        `current`: the forward pass that the second call begins. `between`: the autograd nodes of these operations.
        """
        if self.on_begin_inside is not None:
            self.on_begin_inside(between.arguments, between.outputs)
        if between.nodes:
            calls, (path, is_plain_leaf) = current.calls, self._paths[self.model]
            current.calls = [ModuleCall(self.model, path, is_plain_leaf, 0)]
            self._report_nodes(current, between.nodes)
            current.calls = calls

    def _chain(self) -> PassChain:
        """Return the record of this thread's calls of submodules; it is created when it is first needed."""
        chain: PassChain | None = getattr(self._running, "chain", None)
        if chain is None:
            self._running.chain = chain = PassChain(self._owns)
        return chain

    def _owns(self, tensor: Tensor) -> bool:
        return any(tensor is p for parameters in self._parameters for p in parameters.values())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        current = self._current()
        if current is None or current.entrance is not None or current.calls[0].module is not module:
            return
        if len(current.calls) > 1 and any(call.module is module for call in current.calls[1:]):
            self._leave(module, args, output)
            return
        try:
            if output is not None:  # None: the forward pass raised
                del current.calls[1:]
                self._report_again(current, output)
        finally:
            self._end_pass(current, output)

    def _end_pass(self, current: Pass, output: Any) -> None:
        """End this thread's forward pass, which returned `output`; None means that it raised."""
        self._running.current = None
        self._passes.remove(current)
        self._on_end(output)

    def _end_interrupted(self, called: nn.Module) -> None:
        """End the forward pass of this thread if the module with which the pass began no longer runs.

        `called`: the module whose call is beginning now.
        """
        current = self._current()
        entrance = self.model if current is None or current.entrance is None else current.entrance
        if current is None or current.is_branch or num_running(entrance) > (entrance is called):
            return
        if current.entrance in self._handles:
            call_always(entrance, self._handles[entrance][1], is_on=False)
        self._end_pass(current, None)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        current: Pass | None = getattr(self._running, "current", None)
        if current is None or current.over is not None or current.saves is not None or current.entrance is module:
            current = self._pass_of(module, args)
            if current is None:
                return
        if self.collects_small:
            self._note_call(current, module)
        path, is_plain_leaf = self._paths.get(module) or ("", False)
        current.times[path] = times = current.times.get(path, 0) + 1
        path = path if times == 1 else f"{path}@{times}"
        if self._on_enter is not None and current.saves is None:
            self._on_enter(path, (*args, *kwargs.values()))
        if not is_grad_enabled():
            self._enter_hidden(current, module, path, args)
        current.calls.append(call := ModuleCall(module, path, is_plain_leaf, next_number()))
        current.is_repeated = False
        if top_default_hooks(True) is not None and current.saves is None:
            self.checkpoints.find(current, (*args, *kwargs.values()))
            # The inside of a checkpointed layer is reported once: hooks of torch.utils.checkpoint hold all that is saved there
            current.is_repeated = call.is_checkpointed and self._min_numel > 0 and path in self.checkpoints.reported
        if current.is_repeated or (self.passed_over and not self.collects_small and module in self.passed_over):
            current.over = module
        elif self._unfollowed and path.partition("@")[0] in self.checkpoints.reported:
            # in this pass the layer runs without the checkpoint that it had in the first
            self._follow_again(module)

    def _note_call(self, current: Pass, module: nn.Module) -> None:
        inside = any(call.module in self.passed_over or call.is_checkpointed for call in current.calls)
        self._called[inside].add(module)

    def _pass_of(self, module: nn.Module, args: Any) -> Pass | None:
        """Return the forward pass that a call of `module` belongs to or begins; None if the call is not recorded."""
        if getattr(self._current(), "entrance", None) is module:
            self._end_interrupted(module)
        current: Pass | None = self._current() or self._second_pass(module, args) or self._branch(module, args)
        if current is not None and current.entrance is module:
            current.depth += 1
        current = current or self._enter_submodule(module, args)
        if current is None or current.over is None:
            return current
        if current.is_repeated:  # slots of later calls keep their names
            path = (self._paths.get(module) or ("", False))[0]
            current.times[path] = current.times.get(path, 0) + 1
        return None

    def _follow_again(self, module: nn.Module) -> None:
        """Register the hooks on submodules of a checkpointed layer again, as the layer runs without its checkpoint now.

        The hooks were removed while the hooks of the checkpoint replaced all that the layer saved.
        """
        again = [part for part in module.modules() if part in self._unfollowed]
        self._unfollowed.difference_update(again)
        for part in again:
            self._attach_to(part)

    # --- passes that begin with a call of a submodule ---

    def _enter_submodule(self, module: nn.Module, args: Any) -> Pass | None:
        """Begin a forward pass with a call of a submodule alone, and return the pass; None if the call begins none.

        Calls in backward begin no pass: there a checkpointed layer runs again. The first `ModuleCall` of the pass is one of the model.
        """
        if not self.follows_submodules or not is_grad_enabled() or running_backward() >= 0 or module not in self._handles:
            return None
        if self.was_compiled or any(is_around(other, module) for other in self._passes) or not self._on_begin():
            return None
        current = self._begin_pass(module, args)
        current.entrance, current.depth = module, 1
        call_always(module, self._handles[module][1], is_on=True)
        return current

    def _leave_submodule(self, current: Pass, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward pass that began with this call of a submodule; if `output` is None, the call raised."""
        current.depth -= 1
        if current.depth:
            return self._return(current, module, args, output)
        try:
            if output is not None:
                self._chain().end_pass(output, current.calls[0].first)
                self._return(current, module, args, output)
                del current.calls[1:]
        finally:
            if module in self._handles:
                call_always(module, self._handles[module][1], is_on=False)
            self._end_pass(current, output)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        current: Pass | None = getattr(self._running, "current", None)
        if current is None:
            return
        leave = self._leave_submodule if current.entrance is module else self._return
        leave(current, module, args, output)

    def _return(self, current: Pass, module: nn.Module, args: Any, output: Any) -> None:
        """Report the tensors that autograd saved in a call of a module, at the end of the call."""
        calls, over = current.calls, current.over
        if over is not None and over is not module:
            return
        while len(calls) > 1 and calls[-1].module is not module:  # calls that ended by an exception which the model caught
            calls.pop()
        if len(calls) > 1:
            call = calls[-1]
            call.needs = needs_of(args)
            if over is None:
                self._report_again(current, output)
            else:
                if call.first - calls[0].first - len(current.seen) != current.unreached:
                    self._report_again(current, args, before=call.first)  # nodes that the parents created before this call
                current.seen.update(range(call.first, next_number()))
                current.over = None
            self._end_call(current, call, output)
        if current.is_branch and len(calls) == 1:
            self._running.current = None
            if current.saves is not None and current.saves.num_large and not current.saves.num_stored:
                self.checkpoints.reentrant[module] = False  # the plan stores none of them

    def _end_call(self, current: Pass, call: ModuleCall, output: Any) -> None:
        if call.checkpoint is not None:
            for saved in self.checkpoints.inputs(current, call, output):
                self._report_input(saved)
            self.checkpoints.follow(current, call)
        if current.hidden is not None and current.hidden.module is call.module:
            current.hidden = None
        current.calls.pop()

    def _branch(self, module: nn.Module, args: Any) -> Pass | None:
        """Begin and return a pass for a call of `module` in a worker thread of a forward pass; None if none is running.

        Nodes before the arguments belong to the thread that created them. If several forward passes run, it is not known to which of them
        the call belongs, and the result is None.
        """
        if not self._passes or not torch.is_grad_enabled():
            return None
        around = [other for other in self._passes if is_around(other, module)]
        if not around:
            return None
        if len(around) > 1:
            self.in_threads.add(self._paths.get(module, ("", False))[0])
            return None
        whole = around[0]
        call = ModuleCall(whole.calls[0].module, whole.calls[0].path, False, next_number())
        stops = frozenset(t.grad_fn for t in tensors_in(args))
        current = Pass(whole.inputs, whole.modules, [call], times=whole.times, is_branch=True, stops=stops)
        current.of_threads = whole.of_threads
        self._running.current = current
        return current

    def _second_pass(self, module: nn.Module, args: Any) -> Pass | None:
        """Begin and return a pass if backward runs `module` again, the layer of a use_reentrant=True checkpoint; else None."""
        if (
            not self.checkpoints.reentrant.get(module)
            or running_backward() < 0
            or not is_grad_enabled()
            or top_default_hooks(True) is not None
        ):
            return None
        assert self.checkpoints.on_recomputation is not None
        held = frozenset(t.untyped_storage()._cdata for t in tensors_in(args))
        current = Pass(held, self._paths, [ModuleCall(self.model, "", False, next_number())], is_branch=True)
        current.saves = ReentrantSaves(self.checkpoints.on_recomputation())
        self._running.current = current
        return current

    def _current(self) -> Pass | None:
        current: Pass | None = getattr(self._running, "current", None)
        if current is not None and current.saves is not None and not current.saves.is_running:  # backward raised
            self._running.current = current = None
        return current

    # --- inputs of checkpoints ---

    def _enter_hidden(self, current: Pass, module: nn.Module, path: str, args: Any) -> None:
        """Record a module that is called under no_grad: the layer of a use_reentrant=True checkpoint, or a module inside it."""
        if current.hidden is not None:
            current.hidden.enter(args)
            return
        self._report(current, args, before=next_number())  # the checkpoint before this one: its input can be freed now
        current.hidden = HiddenLayer.of(module, path, args)
        if current.hidden is not None:
            current.hidden_layers[next_number() - 1] = current.hidden


WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def is_wrapped_by_compile(model: nn.Module) -> bool:
    """Return whether `model` is what torch.compile returned, also inside DistributedDataParallel or DataParallel."""
    return hasattr(model, "_orig_mod") or (isinstance(model, WRAPPERS) and is_wrapped_by_compile(model.module))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's model inside DistributedDataParallel, DataParallel or torch.compile."""
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod  # type: ignore[assignment]
    return model
