"""Which memory a step takes, when it is born and when it is freed: every operation of a step is one tick of an integer clock.

A `Timeline` sees each operation on (fake) tensors. A storage that it has not seen before is an `Allocation`, born at that tick; a
weak reference tells when the last tensor on it is gone. An allocation is there from `birth` to `death`, both included: what dies at a
tick was still there while the operation of that tick ran.

    tick  op        born         dies after it
    7     addmm     h  (4 KiB)
    8     relu      r  (4 KiB)   h               at tick 8 both are there: 8 KiB
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paredown.roles import Role
from paredown.trace.device_ops import SCRATCH, UNKNOWN_SIZES

DEVICE, DETACH = torch.ops.prim.device.default, torch.ops.aten.detach.default  # they take no time
ADD, CAST = torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default
BERNOULLI, RANDOM_BITS = torch.ops.aten.bernoulli_.float, "bernoulli_"  # dropout on the CPU: memory that is made empty, then filled


@dataclass(eq=False)
class Allocation:
    """One storage: from where, how large, from when to when.

    `merges`: the sums that autograd makes where two gradients meet. `cast_of`: what it is another dtype of, as autocast makes of weights.
    """

    nbytes: int
    birth: int
    op: str
    module: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    death: int | None = None
    used: int = -1  # the last operation that took it
    merges: tuple[Allocation, ...] = ()
    cast_of: Allocation | None = None
    owner: Any = None  # what it belongs to, when it is more than the output of an operation
    views: list[weakref.ref[Tensor]] = field(default_factory=list[weakref.ref[Tensor]])  # tensors on it, if it has an owner
    uses: list[int] = field(default_factory=list[int])  # of a weight: when operations took it

    def tensor(self) -> Tensor | None:
        """A tensor that lies on it, if any is left."""
        return next((tensor for view in self.views if (tensor := view()) is not None), None)

    def happens_in_place(self) -> bool:
        """Whether autograd adds onto one of the two, which it does when nobody else holds that one; a fake tensor is always added apart."""
        return any(part.death == self.birth for part in self.merges)


@final
class Timeline(TorchDispatchMode):
    """Follows all storages while it is entered. `where` names the module whose forward is running; `is_cuda`: what CUDA's operations
    take for themselves counts too."""

    def __init__(self, where: Callable[[], str], *, is_cuda: bool = False) -> None:
        super().__init__()
        self._is_cuda = is_cuda
        self.now, self.phase, self.last_op, self.last_module = 0, "forward", "", ""
        self.allocations: list[Allocation] = []
        self._where = where
        self._live: dict[int, Allocation] = {}
        self._owner: Any = None
        self._modules: list[tuple[int, str]] = [(-1, "")]  # nodes from this sequence number on were made in this module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return func(*args, **(kwargs or {}))
        if func is not DETACH:
            self.now += 1
            self.last_op = func._schema.name.removeprefix("aten::")
            self._note_uses(args)
        self.last_module = module = self.module()
        out = func(*args, **(kwargs or {}))
        if self._is_cuda and func in SCRATCH:
            self._take(SCRATCH[func](args), module)
        if func in UNKNOWN_SIZES:
            out = UNKNOWN_SIZES[func](args, out)
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, Tensor):
                self._see(value, func, args, module)
        return out

    def _see(self, value: Tensor, func: Any, args: Any, module: str) -> None:
        known = self.find(value)
        if known is None:
            known = self.add(value, op=self.last_op, module=module)
            if func is ADD and self.phase == "backward":
                found = (self.find(arg) for arg in args if isinstance(arg, Tensor) and arg.shape == value.shape)
                known.merges = tuple(part for part in found if part is not None)
            if func is CAST:
                known.cast_of = self.find(args[0])
        if func is BERNOULLI:
            known.op = RANDOM_BITS
        if known.owner is not None:
            known.views.append(weakref.ref(value))

    def _take(self, nbytes: int, module: str) -> None:
        """Memory of this operation alone."""
        if nbytes:
            self.allocations.append(
                Allocation(nbytes, self.now, self.last_op, module, self.phase, (nbytes,), "uint8", death=self.now)
            )

    def _note_uses(self, args: Any) -> None:
        for arg in args:
            for value in arg if isinstance(arg, list | tuple) else (arg,):
                found = self.find(value) if isinstance(value, Tensor) else None
                if found is not None:
                    found.used = self.now
                    if found.owner is Role.WEIGHT:
                        found.uses.append(self.now)

    def module(self) -> str:
        """The module that an operation belongs to now: in backward, that whose forward made the node that runs."""
        if self.phase != "backward":
            path = self._where()
            if path != self._modules[-1][1]:
                self._modules.append((torch._C._autograd._get_sequence_nr(), path))
            return path
        node: Any = torch._C._current_autograd_node()  # None between nodes
        number = -1 if node is None else node._sequence_nr()
        return self._modules[bisect_right(self._modules, number, key=lambda pair: pair[0]) - 1][1]

    def tick(self) -> int:
        """Let time pass for something that is no operation."""
        self.now += 1
        return self.now

    def add(self, tensor: Tensor, *, op: str, module: str, owner: Any = None) -> Allocation:
        """Take note of the storage of `tensor`, which is new."""
        storage = tensor.untyped_storage()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        made = Allocation(storage.nbytes(), self.now, op, module, self.phase, shape, dtype, owner=owner or self._owner)
        self.allocations.append(made)
        self._live[storage._cdata] = made
        weakref.finalize(storage, _dies, weakref.ref(self), storage._cdata).atexit = False  # a weight outlives the step
        return made

    def find(self, tensor: Tensor) -> Allocation | None:
        """The allocation that `tensor` lies on."""
        return self._live.get(tensor.untyped_storage()._cdata)

    @contextmanager
    def owned_by(self, owner: Any) -> Generator[None]:
        """What is allocated meanwhile belongs to `owner`."""
        before, self._owner = self._owner, owner
        try:
            yield
        finally:
            self._owner = before

    def live(self) -> list[Allocation]:
        """What is there now."""
        return list(self._live.values())

    def dies(self, cdata: int) -> None:
        """Take note that a storage is gone."""
        self._live.pop(cdata).death = self.now


def _dies(timeline: weakref.ref[Timeline], cdata: int) -> None:
    there = timeline()
    if there is not None:
        there.dies(cdata)
