"""The code for GPUs on a machine without one: CPU tensors that this library takes for CUDA tensors, and launches by address.

Triton's kernels run in its interpreter. The first launch of a kernel returns a `Compiled`, as Triton does on a GPU, and later launches
call the function of its `Launcher` with addresses instead of tensors, in the order of the kernel's arguments: a wrong address, offset or
order of arguments gives wrong values, as on a GPU. `LAUNCHED` has the kernels that were launched so. What is not emulated: streams, several
devices, the allocator, copies to the host, and that work is asynchronous.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from paredown.codec.kernels import flat, launch, masks, rows
from paredown.session import value_bounds
from paredown.session.eager import slot_decisions, stored_tensors

CACHES = {
    rows: ("encodes", "decodes", "round_trips"),
    flat: ("encodes", "decodes", "_recomputes"),
    masks: ("_mask_launch",),
}  # of launches


class Launcher:
    """The launcher of a compiled kernel, as in Triton 3.6: a Python object that calls a function with more arguments."""

    def __init__(self, kernel: Any, dtypes: dict[str, torch.dtype]) -> None:
        self.kernel, self.dtypes = kernel, dtypes

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        """What a launch through Triton's binder calls, without scratch memory."""
        self.launch(x, y, z, stream, function, False, False, None, None, *args)

    def launch(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        """Launch by addresses; `args`: two flags, two scratch memories, metadata, three hooks, then all arguments of the kernel."""
        assert (y, z, *args[:4]) == (1, 1, False, False, None, None)
        assert function == FUNCTION and args[4:8] == (METADATA, None, None, None)
        names = self.kernel.arg_names
        assert len(args) == 8 + len(names), (len(args) - 8, names)
        given = dict(zip(names, args[8:], strict=True))
        given.update({name: at_address(given[name], dtype) for name, dtype in self.dtypes.items()})
        LAUNCHED.append(self.kernel)
        self.kernel[(x,)](**given)


FUNCTION, METADATA = 7, (4, 1, 0)  # a handle of a function on the GPU, and a kernel's metadata
LAUNCHED: list[Any] = []  # kernels that were launched by address


class Compiled:
    """A kernel that was launched once."""

    function, packed_metadata = FUNCTION, METADATA

    def __init__(self, kernel: Any, dtypes: dict[str, torch.dtype]) -> None:
        self.run = Launcher(kernel, dtypes)


def at_address(address: int | Tensor, dtype: torch.dtype) -> Tensor:
    """16 bytes at an address; the interpreter reads and writes what follows it too."""
    if isinstance(address, Tensor):
        return address
    assert type(address) is int and address % 16 == 0, address  # what the kernels are compiled for
    return alias(address, dtype)


def alias(address: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * 16).from_address(address), dtype=dtype)  # one size for all dtypes at an address


def without_memory(arg: Any) -> Any:
    """A tensor that does not keep its memory alive: the interpreter holds its arguments in a reference cycle after a launch."""
    return alias(arg.data_ptr(), arg.dtype) if isinstance(arg, Tensor) and arg.numel() else arg


class Emulated:
    """A kernel of Triton's interpreter whose launches return a `Compiled`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def launched(*args: Any, **constants: Any) -> Compiled:
            self.kernel[grid](*map(without_memory, args), **constants)
            tensors = {name: arg for name, arg in zip(self.arg_names, args, strict=False) if isinstance(arg, Tensor)}
            return Compiled(self.kernel, {name: tensor.dtype for name, tensor in tensors.items()})

        return launched


def emulate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take CPU tensors for CUDA tensors until the end of a test."""
    made = launch.Launch.__init__

    def make(self: Any, kernel: Any, *args: Any) -> None:
        made(self, Emulated(kernel), *args)

    monkeypatch.setattr(launch.Launch, "__init__", make)
    monkeypatch.setattr(launch, "_is_quick", True)
    monkeypatch.setattr(launch, "_empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(slot_decisions, "IN_ONE_PASS", ("cpu",))
    monkeypatch.setattr(stored_tensors, "memory_in_use", lambda index: (0, 1 << 40))
    monkeypatch.setattr(stored_tensors, "current_stream", lambda index: 0)
    monkeypatch.setattr(value_bounds, "READ_INTERVAL", 1 << 30)  # later values are copied to pinned memory
    for module, names in CACHES.items():
        for name in names:  # launches of this test alone
            monkeypatch.setattr(module, name, lru_cache(getattr(module, name).__wrapped__))
