"""Follows a model's forward pass and reports every tensor that autograd saves, with its name, at the end of the module that saved it.

At the exit of each module the graph is read from the tensors that come out (trace/autograd_graph.py), over the nodes that are
new since the last time, in
the order in which they were made: autograd numbers its nodes, and so a node belongs to the innermost module that was running when its
number was given out. A module without children that makes as many nodes as in its last call is taken to have saved the same, and is not
read again. Nothing is intercepted: the model runs as it would, and saved tensors that somebody else holds through hooks of their own (as
checkpointing does) are left alone.

    layer3.0.conv1:input     the input that `layer3.0.conv1`, a module of torch.nn without children, saved
    encoder.3:mul.other      what a multiplication written in the forward of `encoder.3` saved; a second one is `encoder.3:mul#2.other`
    relu@2:output            the second call of `relu` in one forward pass

It leaves out: nodes that no output of a module reaches, until one does; tensors that custom functions keep other than by
`save_for_backward`.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# What autograd saved is told by attributes whose names begin with an underscore, in torch 2.11 as in 2.13; there are no others.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paredown.trace.autograd_graph import (
    SAVES_NOTHING,
    ModuleCall,
    Pass,
    Saved,
    attributes,
    describe,
    new_nodes,
    next_number,
    saved_of,
    tensors_in,
)
from paredown.trace.operations import Operand, row_of


@dataclass(eq=False, slots=True)
class SavedTrail:
    """One saved tensor of a call that is repeated: how to get to its node from that of the output, and what it was last time."""

    hops: tuple[int, ...]
    node_name: str
    raw: str
    tensor: str
    saved: Saved
    operand: Operand | None  # where what backward needs depends on the node


@dataclass(eq=False, slots=True)
class CallCache:
    """What the last call of a module without children saved: as long as it makes as many nodes, the graph need not be read again."""

    num_nodes: int
    node_name: str
    size: torch.Size
    dtype: torch.dtype
    needs: tuple[bool, ...]  # what an operation saves depends on which of its arguments need a gradient
    trails: list[SavedTrail]


class Watch:
    """Hooks on every module of `model`; `attach()` begins, `detach()` ends."""

    def __init__(
        self,
        model: nn.Module,
        on_saved: Callable[[Saved], None],
        *,
        on_begin: Callable[[], bool] = lambda: True,
        on_end: Callable[[Any], None] = lambda output: None,
        min_numel: int = 0,
    ) -> None:
        self.model, self._min_numel = model, min_numel  # tensors of fewer values are not reported
        self._on_saved, self._on_begin, self._on_end = on_saved, on_begin, on_end
        self._running = threading.local()
        self._passes: list[Pass] = []  # of all threads; without those parts that run in threads of their own
        self.in_threads: set[str] = set()  # modules that were called in threads, and whose forward pass could not be told
        self._paths = {module: (name, is_plain_leaf(module)) for name, module in model.named_modules()}
        self._leaves = {
            name for name, module in model.named_modules() if next(module.children(), None) is None and module is not model
        }
        self._memories: dict[str, CallCache] = {}
        self._handles: dict[nn.Module, list[Any]] = {}
        self._root_hook = Hook()
        self.small: set[str] = set()  # names of activations that were left out for being small, as long as they are collected
        self.collects_small = True
        self.passed_over: frozenset[nn.Module] = frozenset()  # others hold what is inside: looked at in the first pass alone
        self._called: dict[bool, set[nn.Module]] = {True: set(), False: set()}  # in that pass: inside of these, and outside

    @property
    def was_compiled(self) -> bool:
        """Whether torch.compile ran the whole model, which is then not followed."""
        return self._root_hook.was_compiled

    def attach(self, *, follows: bool = True) -> None:
        """Register the hooks; those of the model alone where nothing is to be followed."""
        for module in self._paths:
            is_root = module is self.model
            if isinstance(module, torch.jit.ScriptModule) or not (follows or is_root):
                continue  # scripted modules take no hooks: what they save is found at the exit of their parent
            enter, leave = (self._begin, self._end) if is_root else (self._enter, self._leave)
            hooks = Hook(enter), Hook(leave)
            self._root_hook = hooks[0] if is_root else self._root_hook
            before = module.register_forward_pre_hook(hooks[0], with_kwargs=is_root, prepend=is_root)
            self._handles[module] = [before, module.register_forward_hook(hooks[1], always_call=is_root)]

    def detach(self) -> None:
        """Remove the hooks."""
        self._remove(list(self._handles))
        self._running = threading.local()

    def end_first_pass(self) -> None:
        """All names are known: small ones are not collected any more, and what is passed over needs no hooks inside."""
        self.collects_small = False
        self._remove([module for module in self._handles if module in self._called[True] - self._called[False]])

    def _remove(self, modules: list[nn.Module]) -> None:
        for module in modules:
            for handle in self._handles.pop(module):
                handle.remove()

    def where(self) -> str:
        """The path of the module whose forward is running in this thread, "" in the model itself and between forward passes."""
        now = self._current()
        return now.calls[-1].path if now is not None else ""

    # --- hooks ----------------------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self._current() is not None or not self._on_begin():
            return
        path, is_plain_leaf = self._paths[module]
        held = frozenset(t.untyped_storage()._cdata for t in tensors_in((args, kwargs)))
        self._running.now = Pass(held, self._paths, [ModuleCall(module, path, is_plain_leaf, next_number())])
        self._passes.append(self._running.now)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        now = self._current()
        if now is None or now.calls[0].module is not module:
            return
        if len(now.calls) > 1 and any(call.module is module for call in now.calls[1:]):
            self._leave(module, args, output)
            return
        try:
            if output is not None:  # None: the forward pass raised
                del now.calls[1:]
                self._report(now, output)
        finally:
            self._running.now = None
            self._passes.remove(now)
            self._on_end(output)

    def _enter(self, module: nn.Module, args: Any) -> None:
        now = self._current() or self._branch(module, args)
        if now is None or now.over is not None:
            return
        if self.passed_over and self.collects_small:
            self._called[any(call.module in self.passed_over for call in now.calls)].add(module)
        path, is_plain_leaf = self._paths.get(module) or ("", False)
        now.times[path] = times = now.times.get(path, 0) + 1
        now.calls.append(ModuleCall(module, path if times == 1 else f"{path}@{times}", is_plain_leaf, next_number()))
        if module in self.passed_over and not self.collects_small:
            now.over = module

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        now = self._current()
        if now is None or now.over not in (None, module):
            return
        calls = now.calls
        while len(calls) > 1 and calls[-1].module is not module:  # calls that ended by an exception which the model caught
            calls.pop()
        if len(calls) > 1:
            call = calls[-1]
            call.needs = tuple([arg.requires_grad for arg in args if isinstance(arg, Tensor)])
            memory = self._memories.get(call.path) if not now.is_branch else None
            if (memory or now.over) is not None and call.first - calls[0].first - len(now.seen) != now.unreached:
                self._report(now, args, before=call.first)  # what the parents made before this call
            if now.over is not None:
                now.seen.update(range(call.first, next_number()))
                now.over = None
            elif memory is None or not self._repeat(now, call, memory, output):
                self._report(now, output)
            calls.pop()
        if now.is_branch and len(calls) == 1:
            self._running.now = None

    def _branch(self, module: nn.Module, args: Any) -> Pass | None:
        """The part of a running forward pass that a thread of its own begins by calling `module`.

        Nodes before the arguments belong to the thread that made them. With several forward passes at once it is not known whose this is.
        """
        if not self._passes or not torch.is_grad_enabled():
            return None
        if len(self._passes) > 1:
            self.in_threads.add(self._paths.get(module, ("", False))[0])
            return None
        whole = self._passes[0]
        call = ModuleCall(whole.calls[0].module, whole.calls[0].path, False, next_number())
        stops = frozenset(t.grad_fn for t in tensors_in(args))
        now = Pass(whole.inputs, whole.modules, [call], times=whole.times, is_branch=True, stops=stops)
        now.of_threads = whole.of_threads
        self._running.now = now
        return now

    def _current(self) -> Pass | None:
        return getattr(self._running, "now", None)

    # --- the graph ------------------------------------------------------------------------------------------------------

    def _report(self, now: Pass, values: Any, before: int | None = None) -> None:
        """Report what is new behind `values`, each node under the innermost running call that made it; all were made `before` a number."""
        nodes = new_nodes(values, now)
        now.unreached = (next_number() if before is None else before) - now.calls[0].first - len(now.seen)
        if not nodes:
            return
        if now.is_branch:
            now.of_threads.update(node for _, node in nodes)
        innermost, reported = now.calls[-1], list[tuple[int, Saved]]()
        is_enabled = torch.is_grad_enabled()  # the model may have called this in a part without gradients
        torch._C._set_grad_enabled(False)
        try:
            for number, node in nodes:
                call = innermost if innermost.first <= number else next(c for c in reversed(now.calls) if c.first <= number)
                reported += [(number, saved) for saved in self._report_node(node, now, call)]
        finally:
            torch._C._set_grad_enabled(is_enabled)
        is_leaf = innermost.path.partition("@")[0] in self._leaves and not now.is_branch
        if before is None and self._min_numel and is_leaf and isinstance(values, Tensor):
            self._remember(innermost, nodes, reported, values)

    def _report_node(self, node: Any, now: Pass, call: ModuleCall) -> Iterator[Saved]:
        name = node.name()
        if name in SAVES_NOTHING:
            return
        name = getattr(node, "stands_for", (name,))[0]
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if not (node._raw_saved_tensors if is_custom else attributes(name, type(node), False)):
            return
        row = row_of(name)
        call.counts[row.op] = call.counts.get(row.op, 0) + 1
        for named in saved_of(node, name, self._min_numel > 0):
            if named[2] is None or named[2].numel() >= self._min_numel:
                saved = describe(node, row, named, now, call)
                self._on_saved(saved)
                yield saved
            elif self.collects_small:
                saved = describe(node, row, named, now, call)
                self.small |= {saved.name} if saved.kind == "activation" else set()

    # --- calls that are like the last -----------------------------------------------------------------------------------

    def _remember(self, call: ModuleCall, nodes: list[tuple[int, Any]], reported: list[tuple[int, Saved]], output: Tensor) -> None:
        """Keep what this call of a module without children saved, if all of its nodes were found and all are autograd's own."""
        made = {number: node for number, node in nodes if number >= call.first}
        is_plain = all(not isinstance(node, torch.autograd.function.BackwardCFunction) for node in made.values())
        saved_here = [(number, saved) for number, saved in reported if number >= call.first]
        is_plain = is_plain and all(_is_like_the_last(made[number], saved) for number, saved in saved_here)
        if len(made) != next_number() - call.first or not is_plain:
            self._memories.pop(call.path, None)
            return
        hops = _hops(output.grad_fn, made)
        trails: list[SavedTrail] = []
        for number, saved in saved_here:
            if saved.kind == "activation" and number in hops:
                template = replace(saved, node=None, raw=None, tensor=None)
                attribute, name = saved.attribute, made[number].name()
                operand = row_of(name).operands.get(attribute)
                changes = operand if operand is not None and operand.exact_if is not None else None
                trails.append(SavedTrail(hops[number], name, f"_raw_saved_{attribute}", f"_saved_{attribute}", template, changes))
        self._memories[call.path] = CallCache(
            len(made), output.grad_fn.name() if output.grad_fn else "", output.size(), output.dtype, call.needs, trails
        )

    def _repeat(self, now: Pass, call: ModuleCall, memory: CallCache, output: Any) -> bool:
        """Report what this call saved by what the last one did; False if it is not like it, and nothing was reported."""
        end, last = next_number(), output.grad_fn if isinstance(output, Tensor) else None
        if last is None or end - call.first != memory.num_nodes or call.first - now.calls[0].first - len(now.seen) != now.unreached:
            return False
        if (
            last.name() != memory.node_name
            or output.dtype != memory.dtype
            or output.size() != memory.size
            or call.needs != memory.needs
        ):
            return False
        found = _found(last, memory.trails)
        if found is None:
            return False
        now.seen.update(range(call.first, end))
        is_enabled = torch.is_grad_enabled()  # the model may have called this in a part without gradients
        torch._C._set_grad_enabled(False)
        try:
            for t, node, raw, tensor in found:
                kind = "input" if tensor.untyped_storage()._cdata in now.inputs else "activation"
                described = t.use, kind, t.pin, None, t.reason, t.is_centered
                self._on_saved(Saved(t.name, t.module, t.op, t.operand, *described, t.attribute, node, raw, tensor))
        finally:
            torch._C._set_grad_enabled(is_enabled)
        return True


def _is_like_the_last(node: Any, saved: Saved) -> bool:
    """Whether a saved tensor can be found again by what is known of its node: it has no bound and no place in a list."""
    return saved.kind != "hooked" and saved.bound is None and hasattr(node, f"_raw_saved_{saved.attribute}")


def _hops(start: Any, made: Mapping[int, Any]) -> dict[int, tuple[int, ...]]:
    """For nodes that are `made` in one call, the edges to follow from `start`."""
    found: dict[int, tuple[int, ...]] = {}
    waiting: list[tuple[Any, tuple[int, ...]]] = [(start, ())]
    while waiting:
        node, path = waiting.pop()
        if node is None:
            continue
        number = node._sequence_nr()
        if number in made and number not in found:
            found[number] = path
            waiting.extend((before, (*path, i)) for i, (before, _) in enumerate(node.next_functions))
    return found


def _found(last: Any, trails: list[SavedTrail]) -> list[tuple[Saved, Any, Any, Tensor]] | None:
    """What the trails lead to from the node of an output; None if one leads to something else, or to what somebody hooked."""
    found: list[tuple[Saved, Any, Any, Tensor]] = []
    for trail in trails:
        node = last
        for hop in trail.hops:
            edges = node.next_functions
            node = edges[hop][0] if hop < len(edges) else None
            if node is None:
                return None
        if trail.hops and node.name() != trail.node_name:
            return None
        raw = getattr(node, trail.raw)
        if raw.unpack_hook is not None or (trail.operand is not None and trail.operand.at(node).use is not trail.saved.use):
            return None
        try:
            tensor = getattr(node, trail.tensor)
        except RuntimeError:  # modified in place since it was saved: backward will say so itself
            return None
        if tensor is None:
            return None
        found.append((trail.saved, node, raw, tensor))
    return found


class Hook:
    """A hook that a copy of the model does not take along: copied or pickled, it does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call
        self.was_compiled = False

    def __call__(self, *args: Any) -> Any:
        """The result of the hooked function; None while torch.compile traces, and in a copy."""
        if torch.compiler.is_compiling():
            self.was_compiled = True
            return None
        return self._call(*args) if self._call is not None else None

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def is_plain_leaf(module: nn.Module) -> bool:
    """Whether it is a module of torch.nn without children, whose slots are named after it alone."""
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
