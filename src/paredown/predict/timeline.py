"""A `Timeline` records when each storage of a step is allocated and freed, in ticks; every operation of the step is one tick.

A `Timeline` intercepts each operation on (fake) tensors. A storage that it has not seen before becomes an `Allocation`, born at that
tick; a weak reference reports when its last tensor is freed. An allocation is live from `birth` to `death`, both included: a storage
that is freed at a tick was still allocated while the operation of that tick ran.

    tick  op        allocated    freed after it
    7     addmm     h  (4 KiB)
    8     relu      r  (4 KiB)   h               at tick 8 both are live: 8 KiB

It also counts the flops of every operation by torch's formulas (`Operation`), the bytes of all tensors that it reads and writes, and its
arguments as JSON, [positional, keywords]. There a tensor is {"t": [dtype, shape, strides]}, and a dtype, layout or memory format is {"o":
its name}; devices are left out. Views, which run no kernel, are only counted.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paredown.autograd.operation_kinds import flops_of
from paredown.plan.trace import VIEW, Operation
from paredown.predict.fake.cpu_workspaces import CPU_WORKSPACES
from paredown.predict.fake.device_ops import CUDA_WORKSPACES, UNKNOWN_SIZES
from paredown.roles import Role

DEVICE, DETACH = torch.ops.prim.device.default, torch.ops.aten.detach.default  # these two are not counted as ticks
ADD, CAST = torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default
# dropout on the CPU: the mask is allocated empty, then filled
BERNOULLI, RANDOM_BITS = torch.ops.aten.bernoulli_.float, "bernoulli_"
# operations beside views that run no kernel
ALLOCATES = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
WITHOUT_KERNEL = ALLOCATES | {"_unsafe_view"}
WORKSPACES = {"cuda": CUDA_WORKSPACES, "cpu": CPU_WORKSPACES}
MOST_ARGUMENTS = 4096  # characters of JSON
OBJECTS = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(eq=False)
class Allocation:
    """A torch storage that exists during the step: its bytes, its lifetime in ticks, and what allocated it.

    `merges` are the two gradients whose sum it is, if autograd added it up. `cast_of` is the allocation of which it is a copy in another
    dtype, as autocast makes of weights.
    """

    nbytes: int
    birth: int
    op: str
    module: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    death: int | None = None
    used: int = -1  # tick of the last operation that read it
    merges: tuple[Allocation, ...] = ()
    cast_of: Allocation | None = None
    owner: Any = None  # a Role, or the packed data (`StoredPart`) that was decoded into it; None for an output of an operation
    # tensors on this storage, if it has an owner
    views: list[weakref.ref[Tensor]] = field(default_factory=list[weakref.ref[Tensor]])
    uses: list[int] = field(default_factory=list[int])  # for a weight: ticks of the operations that read it
    inputs: list[str] = field(default_factory=list[str])  # the names that it has as the input of modules, if those are checkpointed

    def tensor(self) -> Tensor | None:
        """Return an existing tensor on this storage; None if there is none."""
        return next((tensor for view in self.views if (tensor := view()) is not None), None)

    def happens_in_place(self) -> bool:
        """Return whether real autograd would add two gradients in place here, which fake tensors never do."""
        return any(part.death == self.birth for part in self.merges)


@final
class Timeline(TorchDispatchMode):
    """A torch dispatch mode that records the lifetime of every storage, in ticks; each operation is one tick.

    `where` returns the path of the module whose forward is running. Workspaces that operations allocate on `device` are recorded too.
    """

    def __init__(self, where: Callable[[], str], *, device: str = "cpu") -> None:
        super().__init__()
        self._workspaces = WORKSPACES[device]
        self.current_tick, self.phase, self.last_op, self.last_module = 0, "forward", "", ""
        self.allocations: list[Allocation] = []
        self._operations: dict[Operation, int] = {}  # operation -> number of calls
        self._where = where
        self._live: dict[int, Allocation] = {}
        self._owner: Any = None
        self._is_paused = False
        self._modules: list[tuple[int, str]] = [(-1, "")]  # (first sequence number of autograd nodes, module that made them)
        # sequence number of an autograd node -> first and last tick of its operations in backward
        self.node_ticks: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # function modes see calls of the model alone: an 8B LoRA step is traced in 15 % less time
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is DEVICE or self._is_paused:
            return func(*args, **(kwargs or {}))
        if func is not DETACH:
            self.current_tick += 1
            self.last_op = func._schema.name.removeprefix("aten::")
            self._record_uses(args)
        self.last_module = module = self.module()
        out = func(*args, **(kwargs or {}))
        if func in self._workspaces:
            self._record_workspace(self._workspaces[func](args, out), module)
        if self._owner is None and func is not DETACH:
            self._record_operation(func, args, kwargs or {}, out, module)
        if func in UNKNOWN_SIZES:
            out = UNKNOWN_SIZES[func](args, out)
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, Tensor):
                self._record_output(value, func, args, module)
        return out

    def _record_output(self, value: Tensor, func: Any, args: Any, module: str) -> None:
        allocation = self.find(value)
        if allocation is None:
            allocation = self.add(value, op=self.last_op, module=module)
            if func is ADD and self.phase == "backward":
                terms = (self.find(arg) for arg in args if isinstance(arg, Tensor) and arg.shape == value.shape)
                allocation.merges = tuple(term for term in terms if term is not None)
            if func is CAST:
                allocation.cast_of = self.find(args[0])
        if func is BERNOULLI:
            allocation.op = RANDOM_BITS
        if allocation.owner is not None:
            allocation.views.append(weakref.ref(value))

    def _record_workspace(self, nbytes: int, module: str) -> None:
        if nbytes:
            self.allocations.append(
                Allocation(nbytes, self.current_tick, self.last_op, module, self.phase, (nbytes,), "uint8", death=self.current_tick)
            )

    def _record_uses(self, args: Any) -> None:
        for arg in args:
            for value in arg if isinstance(arg, list | tuple) else (arg,):
                allocation = self.find(value) if isinstance(value, Tensor) else None
                if allocation is not None:
                    allocation.used = self.current_tick
                    if allocation.owner is Role.WEIGHT:
                        allocation.uses.append(self.current_tick)

    def _record_operation(self, func: Any, args: Any, kwargs: Any, out: Any, module: str) -> None:
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in WITHOUT_KERNEL:
            if name not in ALLOCATES:
                self._count(Operation(VIEW, module, self.phase))
            return
        tensors = [value for value in tree_leaves((args, kwargs, out)) if isinstance(value, Tensor)]
        self._count_kernel(str(func), tensors, flops_of(func, args, kwargs, out), _arguments_json(args, kwargs), module)

    def record_kernel(self, name: str, tensors: list[Tensor], flops: int, arguments: Any) -> None:
        """Record that a CUDA kernel ran, for a stand-in on fake tensors; `arguments` serve to repeat the call."""
        self._count_kernel(name, tensors, flops, _arguments_json(arguments, {}), self.module())

    def _count_kernel(self, op: str, tensors: list[Tensor], flops: int, arguments: str, module: str) -> None:
        nbytes = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
        dtype = next((str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()), "")
        self._count(Operation(op, module, self.phase, dtype, flops, nbytes, arguments))

    def _count(self, operation: Operation) -> None:
        self._operations[operation] = self._operations.get(operation, 0) + 1

    def operations(self) -> tuple[Operation, ...]:
        """Return the operations that ran so far, where equal calls are one entry with their number."""
        return tuple(replace(operation, count=count) for operation, count in self._operations.items())

    def module(self) -> str:
        """Return the path of the module to which the current operation belongs.

        In backward, it is the module whose forward created the autograd node that runs.
        """
        if self.phase != "backward":
            path = self._where()
            if path != self._modules[-1][1]:
                self._modules.append((torch._C._autograd._get_sequence_nr(), path))
            return path
        node: Any = torch._C._current_autograd_node()  # None while no node runs
        number = -1 if node is None else node._sequence_nr()
        self.node_ticks[number] = self.node_ticks.get(number, (self.current_tick, 0))[0], self.current_tick
        return self._modules[bisect_right(self._modules, number, key=lambda pair: pair[0]) - 1][1]

    def tick(self) -> int:
        """Advance the time by one tick for an event that is no operation, such as packing, and return that tick."""
        self.current_tick += 1
        return self.current_tick

    def add(self, tensor: Tensor, *, op: str, module: str, owner: Any = None) -> Allocation:
        """Record the storage of a new tensor, and return its allocation.

        `op` and `module` are the operation and the module that allocated it. `owner` is a Role, or the `StoredPart` that is decoded into
        it.
        """
        storage = tensor.untyped_storage()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        allocation = Allocation(
            storage.nbytes(), self.current_tick, op, module, self.phase, shape, dtype, owner=owner or self._owner
        )
        self.allocations.append(allocation)
        self._live[storage._cdata] = allocation
        weakref.finalize(storage, _record_free, weakref.ref(self), storage._cdata).atexit = False  # a weight outlives the step
        return allocation

    def find(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation of a tensor's storage; None if the storage was not recorded."""
        return self._live.get(tensor.untyped_storage()._cdata)

    @contextmanager
    def owned_by(self, owner: Any) -> Generator[None]:
        """Return a context in which new storages are recorded with this `owner`, a Role or a `StoredPart`."""
        before, self._owner = self._owner, owner
        try:
            yield
        finally:
            self._owner = before

    @contextmanager
    def paused(self) -> Generator[None]:
        """Return a context in which operations are not recorded."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def live(self) -> list[Allocation]:
        """Return the allocations that exist now."""
        return list(self._live.values())

    def record_free(self, cdata: int) -> None:
        """Record that a storage is freed now; `cdata` is the address of its C++ object."""
        self._live.pop(cdata).death = self.current_tick


def _record_free(reference: weakref.ref[Timeline], cdata: int) -> None:
    timeline = reference()
    if timeline is not None:
        timeline.record_free(cdata)


def _arguments_json(args: Any, kwargs: Any) -> str:
    """Return an operation's arguments as JSON from which the call can be repeated; "" if that is impossible.

    It is "" if there are values other than tensors, numbers, texts and dtypes, or if the text would be long.
    """
    try:
        text = json.dumps([_json_value(args), {name: _json_value(value) for name, value in kwargs.items()}], separators=(",", ":"))
    except TypeError:
        return ""
    return text if len(text) <= MOST_ARGUMENTS else ""


def _json_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"t": [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride())]}
    if isinstance(value, list | tuple):
        return [_json_value(part) for part in value]
    if isinstance(value, OBJECTS):
        return {"o": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form here")
