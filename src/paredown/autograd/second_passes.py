"""Lets large tensors be stored packed that a checkpointed layer saves when backward runs it again.

In backward a checkpoint with use_reentrant=False runs its layer again, and holds every tensor that this pass saves until backward reads it:
in a transformer several times the size of its hidden states, which is the peak of most checkpointed steps. `RecomputedLayer` lets a session
store the large tensors packed. It describes them in the first forward pass, where autograd's graph shows which operation saves which
tensor, in the order in which the second pass saves them again. In the second pass `SecondPass` encloses the saved-tensor hooks of the
checkpoint: it stores a tensor, and neither the second graph nor the frame of the checkpoint holds the original. Backward gets what the
frame's dictionary returns, and `RecomputedTensors` unpacks there. With use_reentrant=True the second pass is the first pass with a graph,
which no hooks of a checkpoint hold: `Watch` reads it like that of any forward pass, and `ReentrantSaves` stores the large tensors.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paredown.autograd.graph import Pass, Saved, has_storage, kind_of
from paredown.autograd.operations import is_large_in_second_pass, is_stored_in_second_pass

Store = Callable[[Saved], Any]  # saved tensor -> an object whose tensor() returns it unpacked, None to leave it unmodified
top_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class CapturedHooks:
    """Stands for autograd's handle of a saved tensor, and records the pack and unpack hooks registered on it.

    A session packs a tensor of a second forward pass through this object, as it packs others through autograd's handles.
    """

    __slots__ = ("_tensor", "packed", "unpack")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.packed = tensor, None
        self.unpack: Callable[[Any], Tensor] | None = None

    def register_hooks(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Call `pack` with the tensor, and keep its result together with `unpack`."""
        self.packed, self.unpack = pack(self._tensor), unpack


class RecomputedSave:
    """Holds the packed form of a tensor that a checkpointed layer saves when backward runs the layer again.

    It has shape, dtype and device, which torch compares with those of the tensor in the first forward pass.
    """

    __slots__ = ("device", "dtype", "shape", "stored")

    def __init__(self, stored: Any, tensor: Tensor) -> None:
        self.stored, self.shape, self.dtype, self.device = stored, tensor.shape, tensor.dtype, tensor.device

    def tensor(self) -> Tensor:
        """Return the decoded tensor."""
        return self.stored.tensor()


def stored_operand(node: Any) -> Any:
    """Return the packed form of the operand `self` that `node` saved when backward ran a layer again; None if not packed."""
    raw = getattr(node, "_raw_saved_self", None)
    found = raw.data if raw is not None and raw.unpack_hook is not None else None
    found = found[0] if isinstance(found, tuple) else found  # hooks for packed weights may enclose those of the pass
    return found.stored if type(found) is RecomputedSave else None


class _State:
    """Holds the state that all `RecomputedTensors` of one checkpoint share."""

    __slots__ = ("is_compared", "save")

    def __init__(self) -> None:
        self.save: RecomputedSave | None = None  # the stored form of the tensor that torch is about to store
        self.is_compared = False  # whether torch compares the passes, and needs no values


class RecomputedTensors(weakref.WeakKeyDictionary[Any, Any]):
    """Replaces torch.utils.checkpoint's dict of recomputed tensors of one backward; reading an item unpacks it if packed."""

    def __init__(self, state: _State) -> None:
        super().__init__()
        self._state = state

    def __setitem__(self, handle: Any, tensor: Any) -> None:
        save, self._state.save = self._state.save, None
        super().__setitem__(handle, tensor if save is None else save)

    def __getitem__(self, handle: Any) -> Any:
        found = super().__getitem__(handle)
        return found if type(found) is not RecomputedSave or self._state.is_compared else found.tensor()


class RecomputedPasses(dict[Any, RecomputedTensors]):
    """Replaces torch.utils.checkpoint's dict of recomputed tensors, whose keys are the numbers of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = _State()

    def __missing__(self, number: Any) -> RecomputedTensors:
        self[number] = tensors = RecomputedTensors(self.state)
        return tensors


FRAME = ("recompute_fn", "recomputed", "check_recomputed_tensors_match")  # private names of torch 2.11 to 2.13


class RecomputedLayer:
    """Makes a checkpointed layer store large saved tensors packed when backward runs the layer again.

    `hooked` describes the tensors that the layer's first forward pass saved. `begin` is called when a second pass starts, and returns the
    function that stores a tensor.
    """

    def __init__(self, frame: Any, module: nn.Module, hooked: Iterable[Saved], begin: Callable[[], Store]) -> None:
        places = {id(holder): place for place, ref in enumerate(frame.weak_holders) if (holder := ref()) is not None}
        self.saves: list[Saved | None] = [None] * len(frame.weak_holders)  # in the order of saving
        for saved in hooked:
            holder = saved.raw.data[0] if isinstance(saved.raw.data, tuple) else saved.raw.data
            if id(holder) in places and is_stored_in_second_pass(saved.op, saved.needs):
                self.saves[places[id(holder)]] = replace(saved, kind="activation", node=None, raw=None)
        self.modules, self.begin = tuple(module.modules()), begin

    def follow(self, frame: Any) -> None:
        """Replace attributes of a checkpoint's `frame`, so that tensors of the second forward pass are packed.

        Do nothing if this checkpoint saved another number of tensors than the first one of the layer.
        """
        is_known = all(hasattr(frame, name) for name in FRAME)
        if not is_known or len(frame.weak_holders) != len(self.saves) or not any(self.saves):
            return
        reference = weakref.ref(frame)  # the frame must not refer to itself: its tensors would outlive backward
        frame.recomputed = RecomputedPasses()
        frame.recompute_fn = partial(self._recompute, reference, frame.recompute_fn)
        frame.check_recomputed_tensors_match = partial(_compare, reference)

    def _recompute(self, reference: weakref.ref[Any], function: Callable[..., Any], *args: Any) -> None:
        frame = reference()
        assert frame is not None
        second = SecondPass(self, frame, args)
        try:
            function(*args)
        finally:
            second.end()


def _compare(reference: weakref.ref[Any], number: Any) -> None:
    """Compare the tensors of a layer's two forward passes by shape, dtype and device as torch does, without unpacking them.

    `reference`: a weak reference to the checkpoint's frame. `number`: the number of the backward pass.
    """
    frame = reference()
    assert frame is not None
    state: _State = frame.recomputed.state
    state.is_compared = True
    try:
        type(frame).check_recomputed_tensors_match(frame, number)
    finally:
        state.is_compared = False


class SecondPass:
    """Registers saved-tensor hooks around those of a checkpoint while backward runs the checkpointed layer again."""

    def __init__(self, layer: RecomputedLayer, frame: Any, args: Any) -> None:
        self._outer: Any = top_default_hooks(True)
        self._saves, self._holders, self._state = layer.saves, frame.weak_holders, frame.recomputed.state
        self._place, self._store = 0, layer.begin()
        inputs = frozenset(t.untyped_storage()._cdata for t in args if isinstance(t, Tensor) and has_storage(t))
        self._forward = Pass(inputs, layer.modules, [])  # inputs were packed before, and their decoded copies stay
        # not torch.autograd.graph.saved_tensors_hooks: it and this object would refer to each other, and outlive backward
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """Store a large saved tensor packed, and return the object that autograd holds in its place."""
        place, self._place = self._place, self._place + 1
        save = self._save(place, tensor) if place < len(self._saves) and self._saves[place] is not None else None
        self._state.save = save
        kept = self._outer[0](tensor)
        return kept if save is None else save

    def _save(self, place: int, tensor: Tensor) -> RecomputedSave | None:
        if (
            not has_storage(tensor)
            or not is_large_in_second_pass(tensor.untyped_storage().nbytes())
            or self._holders[place]() is None
        ):
            return None
        saved = self._saves[place]
        assert saved is not None
        if kind_of(tensor, saved.operand, self._forward) != "activation":
            self._saves[place] = None
            return None
        stored = self._store(replace(saved, tensor=tensor))
        return RecomputedSave(stored, tensor) if stored is not None else None

    def unpack(self, kept: Any) -> Tensor:
        """Return the saved tensor for backward, decoded if it was packed."""
        return kept.tensor() if type(kept) is RecomputedSave else self._outer[1](kept)

    def end(self) -> None:
        """Remove the saved-tensor hooks of this pass."""
        hooks: Any = top_default_hooks(True)
        if hooks is not None and hooks[0] == self.pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        del self._store  # frees what the receiver stored for this pass


class ReentrantSaves:
    """Packs large tensors that a layer under a checkpoint with use_reentrant=True saves when backward runs it again."""

    __slots__ = ("_backward", "_store", "num_large", "num_stored")

    def __init__(self, store: Store) -> None:
        self._store, self._backward = store, running_backward()
        self.num_large = self.num_stored = 0

    @property
    def is_running(self) -> bool:
        """Return whether the backward pass that ran the layer again is still running in this thread."""
        return self._backward == running_backward()

    def __call__(self, saved: Saved) -> None:
        """Store a saved tensor packed if it is large and its operation allows it."""
        tensor = saved.tensor
        if tensor is None or saved.kind != "activation" or not has_storage(tensor):
            return
        if not is_large_in_second_pass(tensor.untyped_storage().nbytes()) or not is_stored_in_second_pass(saved.op, saved.needs):
            return
        stored = self._store(replace(saved, node=None, raw=None))
        self.num_large += 1
        if stored is not None:
            self.num_stored += 1
            save = RecomputedSave(stored, tensor)
            saved.raw.register_hooks(lambda tensor: save, RecomputedSave.tensor)


def running_backward() -> int:
    """Return the number of the backward pass that runs in this thread; -1 if none runs."""
    return torch._C._current_graph_task_id()
