"""Passes that repeat an earlier one: only modules in which a tensor is stored are followed, and all other hooks are taken out.

A pass that is followed in full records what is read at the return of each module (`Recording`). Two passes in a row that recorded the same
give a `Program`: the returns of those modules in which the receiver stores something (`StoredPlaces`), with the way through the graph to
each stored tensor. While the arguments of the model have the same sizes and dtypes, the same parameters need gradients and the receiver
decides by the same plan, passes are replayed: at each of these returns the pass must have created as many nodes as the recorded one, and
the output must have the recorded size.

What if a pass differs? Tensors that were not reported yet stay unmodified, which is always correct, and the rest of the pass is followed
in full (`Replays.stop`); the nodes of modules that were running at that moment stay unmodified too, since it is not known to which of
them a node belongs. If that happens soon, more equal passes are needed for the next program. Every RECHECK passes one is followed in full.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paredown.autograd.graph import ModuleCall, Pass, Saved, next_number, tensors_in
from paredown.autograd.graph_parts import FoundAgain, GraphPart, Report
from paredown.autograd.hooks import HookPlace

RECHECK = 128  # replayed passes of a program, after which one is followed in full
MAX_PROGRAMS = 8  # programs of passes that enter through one module with different arguments
GROWTH = 4  # times as many equal passes are needed for the next program, after one that was replayed less than RECHECK times
is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
HookPlaces = dict[nn.Module, tuple[HookPlace, HookPlace]]  # of the hooks before and after the calls of a module


class Receiver(Protocol):
    """An object that receives saved tensors, and knows which of them it stores."""

    def replay_key(self) -> Any:
        """Return a value that changes whenever the receiver stores other tensors or formats; None if it needs every tensor reported."""
        ...

    def save_again(self, seen: Saved, node: Any, raw: Any, tensor: Tensor, inputs: frozenset[int]) -> None:
        """Receive a saved tensor, with the description that an earlier pass reported for it."""
        ...

    def begin_inside(self, arguments: list[Tensor], outputs: set[int]) -> None:
        """Begin a pass that entered through a module inside of the model.

        `arguments`: the tensors of the call. `outputs`: the storages that earlier passes returned.
        """
        ...

    def begin_replay(self) -> None:
        """Begin a pass of this thread that reports only the tensors that are stored."""
        ...

    def is_left(self, storage: int) -> bool:
        """Return whether tensors in this storage stayed unmodified in the thread's last pass, and will again under the same plan."""
        ...


class Search(NamedTuple):
    """Nodes between module calls that later passes find by searching the graph, since a `GraphPart` cannot find them."""

    reached: frozenset[int]
    calls: tuple[tuple[nn.Module, str, bool, int, dict[str, int]], ...]

    @staticmethod
    def of(numbers: Iterable[int], current: Pass, counts: list[dict[str, int]]) -> Search:
        """Return the search for the nodes with these numbers. `counts`: operations of the running calls before the nodes were reported."""
        first = current.calls[0].first
        calls = zip(current.calls, counts, strict=True)
        running = tuple((call.module, call.path, call.is_plain_leaf, call.first - first, count) for call, count in calls)
        return Search(frozenset(number - first for number in numbers), running)

    def nodes(self, values: Any, first: int) -> list[tuple[int, Any]] | None:
        """Return (number, node) of these nodes in a later pass; None if a node is not found from `values`.

        `first`: the number of the first node of that pass.
        """
        stack: list[Any] = [t.grad_fn for t in tensors_in(values) if t.grad_fn is not None]
        found: dict[int, Any] = {}
        while stack:
            node = stack.pop()
            number = node._sequence_nr()
            if number not in found and number - first in self.reached:
                found[number] = node
                stack.extend([before for before, _ in node.next_functions if before is not None])
        return sorted(found.items()) if len(found) == len(self.reached) else None

    def running_calls(self, first: int) -> list[ModuleCall]:
        """Return the module calls that were running, with node numbers of a later pass. `first`: the number of its first node."""
        running: list[ModuleCall] = []
        for module, path, is_plain_leaf, offset, counts in self.calls:
            running.append(call := ModuleCall(module, path, is_plain_leaf, first + offset))
            call.counts = dict(counts)
        return running


class Reading(NamedTuple):
    """One reading of autograd's graph at the return of a module.

    `storages`: the addresses of the storages of the tensors found, 0 for a tensor that is never stored.
    """

    of_args: bool
    how: GraphPart | Search
    storages: list[int]


class Return(NamedTuple):
    """The return of a module in a recorded pass: the nodes and calls until then, the size of the output, and what was read."""

    module: nn.Module
    num_created: int
    num_called: int
    size: torch.Size | None  # None if the output is not a tensor
    readings: tuple[Reading, ...]


class Recording:
    """A record of what a forward pass reads from autograd's graph at the return of each module."""

    __slots__ = ("has_new_parts", "key", "readings", "returns")

    def __init__(self, key: Any) -> None:
        self.key = key  # `Replays.key` of the pass
        self.returns: list[Return] = []
        self.readings: list[Reading] = []  # readings of the module that is returning
        self.has_new_parts = False  # whether a part of the graph was searched that the next pass does not search

    def add(self, part: GraphPart, tensors: Iterable[FoundAgain], *, of_args: bool = False) -> None:
        """Record that a part of the graph was read, and its tensors.

        `of_args`: it was read from the arguments of a call, not from its output.
        """
        self.readings.append(Reading(of_args, part, [tensor.untyped_storage()._cdata for _, _, _, tensor in tensors]))

    def add_new(self, part: GraphPart | None, found: Report, current: Pass, counts: list[dict[str, int]], *, of_args: bool) -> None:
        """Record that the graph was searched. `part`: how later passes find the same nodes; None if they search again.

        `counts`: operations of the running calls before the nodes were reported. `of_args`: the search began at the arguments of a call.
        """
        nodes, reported = found
        if part is not None:
            self.readings.append(Reading(of_args, part, []))
            self.has_new_parts = True
        elif nodes:
            search = Search.of([number for number, _ in nodes], current, counts)
            self.readings.append(Reading(of_args, search, [_storage_of(saved) for _, saved in reported]))

    def end_call(self, current: Pass, output: Any) -> None:
        """Record the return of the module that was called last."""
        calls, size = current.calls, output.size() if type(output) is Tensor else None
        num_created, readings = next_number() - calls[0].first, tuple(self.readings)
        self.returns.append(Return(calls[-1].module, num_created, len(current.called), size, readings))
        self.readings.clear()

    def outline(self) -> list[Any]:
        """Return a list of what the pass recorded. Forward passes with equal lists can be replayed alike."""
        searches = [reading.how for one in self.returns for reading in one.readings if isinstance(reading.how, Search)]
        return [(one.module, one.num_created, one.size, len(one.readings)) for one in self.returns] + searches


def _storage_of(saved: Saved) -> int:
    """Return the address of a saved activation's storage; 0 for other saved tensors, which are never stored packed."""
    return saved.tensor.untyped_storage()._cdata if saved.kind == "activation" and type(saved.tensor) is Tensor else 0


class Program:
    """The module returns at which stored tensors are read. It is made from a recorded pass and followed in later equal passes."""

    def __init__(self, recording: Recording, paths: list[str], is_left: Callable[[int], bool]) -> None:
        """Make the program of a recorded pass.

        `paths`: of the modules, in the order of their calls. `is_left`: whether tensors in a storage stay unmodified.
        """
        returns = [one._replace(readings=_stored(one.readings, is_left)) for one in recording.returns]
        self.followed = {one.module for one in returns if one.readings} | {returns[-1].module}
        self.returns = [one for one in returns if one.module in self.followed]
        # what is compared and read at each return; the last step belongs to no module
        self.steps = [(one.module, one.num_created, one.size, one.readings) for one in self.returns] + [(None, 0, None, ())]
        self.called = {one.module for one in recording.returns}
        entrance: nn.Module = recording.key[0]
        self.not_called = set(entrance.modules()) - self.called  # modules inside of the entrance that are not called
        self._paths = paths
        self.num_replays = 0

    def times(self, num_returned: int) -> dict[str, int]:
        """Return how often each module had been called at the given number of returns."""
        return Counter(self._paths[: self.returns[num_returned - 1].num_called] if num_returned else [])


def _stored(readings: tuple[Reading, ...], is_left: Callable[[int], bool]) -> tuple[Reading, ...]:
    """Return the readings in which some tensor is stored, without the tensors that stay unmodified.

    `is_left`: whether tensors in a storage stay unmodified.
    """
    kept: list[Reading] = []
    for reading in readings:
        stored = [storage != 0 and not is_left(storage) for storage in reading.storages]
        if any(stored):
            how = reading.how
            kept.append(reading._replace(how=how.keeping(stored)) if isinstance(how, GraphPart) else reading)
    return tuple(kept)


class Replay:
    """The progress of a pass that follows a program: the number of returns so far, and the number of its first node."""

    __slots__ = ("first", "num_returned", "program")

    def __init__(self, program: Program, first: int) -> None:
        self.program, self.num_returned, self.first = program, 0, first


class Replays:
    """Replays forward passes that equal earlier ones, and removes the hooks that this does not need.

    `report_nodes` reports what nodes saved that were found by a search.
    """

    def __init__(self, report_nodes: Callable[[Pass, list[tuple[int, Any]]], Any]) -> None:
        self._report_nodes = report_nodes
        self.receiver: Receiver | None = None  # None: all passes are followed in full
        self._programs: dict[Any, Program] = {}
        # by key: the outline of the last pass, and how many passes before it had the same
        self._last: dict[Any, tuple[list[Any], int]] = {}
        self._num_needed = 1  # how many passes must equal the one before them until a program is made
        self._taken_out: list[HookPlace] = []
        self.entrances = set[nn.Module]()  # modules that passes entered through, or are likely to
        self._lock = threading.Lock()  # passes may begin in several threads

    def report_to(self, receiver: Receiver) -> None:
        """Replay repeated passes from now on, and report the tensors that `receiver` stores."""
        self.receiver = receiver

    def key(self, entrance: nn.Module, arguments: Sequence[Tensor], is_held: tuple[bool, ...], modules: Iterable[nn.Module]) -> Any:
        """Return what two passes must have in common to repeat each other, beside their nodes; None if the pass is followed in full.

        `is_held`: if the pass enters through a module inside of the model, whether each argument is the caller's and not made by earlier
        passes.
        """
        decides_by = self.receiver.replay_key() if self.receiver is not None else None
        if decides_by is None:
            return None
        sizes = tuple([(t.size(), t.dtype, t.requires_grad) for t in arguments])
        casts = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        return entrance, decides_by, sizes, is_held, casts, tuple([module.training for module in modules])

    def begin(self, current: Pass, key: Any, passes: list[Pass], places: HookPlaces) -> None:
        """Begin a forward pass: replay an earlier one if `key` has a program, else record it; do neither if `key` is None."""
        program = self._programs.get(key) if key is not None else None
        if program is not None:
            program.num_replays += 1
        with self._lock:
            if program is None or self.receiver is None or program.num_replays % RECHECK == 0:
                self._put_back()
                current.recording = Recording(key) if key is not None else None
            else:
                self.receiver.begin_replay()
                current.replay = Replay(program, current.calls[0].first)
                if not passes:  # another running pass may be followed in full, and needs its hooks
                    self._take_out(places)
            passes.append(current)

    def record(self, current: Pass, output: Any, places: HookPlaces) -> None:
        """Make a program of a pass that has ended, if the passes before it recorded the same."""
        recording: Recording = current.recording
        assert self.receiver is not None
        recording.end_call(current, output)
        key, outline = recording.key, recording.outline()
        last, num_equal = self._last.get(key, (None, 0))
        num_equal = num_equal + 1 if outline == last else 0
        if key not in self._last and sum(other[0] is key[0] for other in self._last) >= MAX_PROGRAMS:
            self.clear()
        self._last[key] = outline, num_equal
        is_compiled = any(place.hook.was_compiled for both in places.values() for place in both)
        if num_equal < self._num_needed or recording.has_new_parts or is_compiled or current.of_threads or current.hidden_layers:
            self._programs.pop(key, None)
        else:
            self._programs[key] = Program(recording, current.called, self.receiver.is_left)

    def read(self, current: Pass, module: nn.Module, args: Any, output: Any) -> None:
        """Report the stored tensors of a module when it returns in a replayed pass."""
        replay: Replay = current.replay
        found_module, num_created, size, readings = replay.program.steps[replay.num_returned]
        if found_module is not module:
            if module in replay.program.followed:
                self.stop(current)
            return
        if num_created != next_number() - replay.first or size != (output.size() if type(output) is Tensor else None):
            return self.stop(current)
        replay.num_returned += 1
        if not readings:
            return
        is_enabled = is_grad_enabled()  # the module may run under no_grad
        set_grad_enabled(False)
        try:
            for of_args, how, _ in readings:
                if not self._read_again(current, how, args if of_args else output):
                    return self.stop(current)
        finally:
            set_grad_enabled(is_enabled)

    def _read_again(self, current: Pass, how: GraphPart | Search, values: Any) -> bool:
        """Report the tensors that are found in the recorded places from `values`; return False if the graph differs.

        `how`: the part or the search to repeat.
        """
        if type(how) is GraphPart:
            starts = (values.grad_fn,) if type(values) is Tensor else [tensor.grad_fn for tensor in tensors_in(values)]
            tensors, receiver, inputs = how.follow(starts), self.receiver, current.inputs
            if tensors is None or receiver is None:
                return False
            for found in tensors:
                receiver.save_again(*found, inputs)
            return True
        assert isinstance(how, Search)
        nodes = how.nodes(values, current.replay.first)
        if nodes is None:
            return False
        calls, current.calls = current.calls, how.running_calls(current.replay.first)
        self._report_nodes(current, nodes)
        current.calls = calls
        return True

    def stop(self, current: Pass) -> None:
        """Stop replaying a pass that differs from the recorded one, and follow the rest; tensors not yet reported stay unmodified."""
        replay: Replay = current.replay
        current.replay, current.is_unsure = None, True
        current.times = replay.program.times(replay.num_returned)
        current.seen.update(range(current.calls[0].first, next_number()))
        current.unreached = 0
        self.clear()
        if replay.program.num_replays < RECHECK:
            self._num_needed *= GROWTH
        self.put_back()

    def clear(self) -> None:
        """Forget all recorded passes, so that the next ones are followed in full."""
        self._programs.clear()
        self._last.clear()

    # --- hooks ---

    def _take_out(self, places: HookPlaces) -> None:
        """Remove the hooks that no program needs: before modules that all programs call, and after calls that store nothing.

        An entrance is the module through which a pass enters the model. The program of one entrance need not call modules outside of that
        entrance. Entrances keep their hooks.
        """
        if self._taken_out:
            return
        programs = self._programs.values()
        called = set[nn.Module]().union(*(program.called for program in programs)) - self.entrances
        called = called.difference(*(program.not_called for program in programs))
        followed = set[nn.Module].union(*(program.followed for program in programs))
        for module, (before, after) in places.items():
            if module in called:
                self._taken_out += [before] if module in followed else [before, after]
        for place in self._taken_out:
            place.take_out()

    def put_back(self) -> None:
        """Register all hooks again that were taken out."""
        with self._lock:
            self._put_back()

    def _put_back(self) -> None:
        for place in self._taken_out:
            place.put_back()
        self._taken_out.clear()
