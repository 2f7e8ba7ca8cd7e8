"""`Launch` calls a Triton kernel again without Triton's binding of arguments, which takes 60 to 80 microseconds.

A `Launch` is a kernel with its grid, its constants and those arguments that do not change. The first call for a device and dtypes goes
through Triton and keeps the compiled kernel, later ones call that directly. All else that Triton specializes on is the same each time:
pointers are multiples of 16 (if one is not, Triton binds), and integers that it specializes on are fixed arguments. Where Triton is
interpreted, has launch hooks (a profiler), or its launcher takes other arguments, every launch goes through Triton. `Direct` spares the
launcher too, which is a Python object around a C function (`compiled_launch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import triton
from torch import Tensor

log = logging.getLogger("paredown")
_is_quick = not triton.knobs.runtime.interpret
BIG = 1 << 31
Key = tuple[int, torch.dtype, torch.dtype]


class Launch:
    """A Triton kernel with its grid, constants and fixed arguments, which is called again without Triton's slow binding.

    A call takes `pointers`, tensors, and `scalars`, floats or integers that the kernel is not specialized for; it does
    `kernel[grid](*pointers, *fixed, *scalars, **constants)`.
    """

    __slots__ = ("_compiled", "_rest", "constants", "fixed", "grid", "kernel")

    def __init__(self, kernel: Any, grid: int, fixed: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.fixed, self.constants = kernel, grid, fixed, constants
        self._compiled: dict[Any, Any] = {}
        self._rest: tuple[Any, ...] = ()

    def __call__(self, pointers: tuple[Tensor | None, ...], scalars: tuple[int | float, ...] = ()) -> None:
        global _is_quick
        assert pointers[0] is not None and pointers[1] is not None
        index = pointers[0].get_device()
        if index >= 0 and index != torch.cuda.current_device():  # a model on several GPUs
            with torch.cuda.device(index):
                self(pointers, scalars)
            return
        address = 0
        for pointer in pointers:
            if pointer is not None:
                address |= pointer.data_ptr()
        if address & 15 or not _is_quick or has_hooks() or any(s >= BIG for s in scalars):
            self.kernel[(self.grid,)](*pointers, *self.fixed, *scalars, **self.constants)
            return
        key = (index, pointers[0].dtype, pointers[1].dtype)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.kernel[(self.grid,)](*pointers, *self.fixed, *scalars, **self.constants)
            self._compiled[key] = compiled
            names = self.kernel.arg_names[len(pointers) + len(self.fixed) + len(scalars) :]
            self._rest = tuple(self.constants[name] for name in names)
            return
        stream = current_stream(index)
        try:
            compiled.run(
                self.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *pointers, *self.fixed, *scalars, *self._rest,
            )  # fmt: skip
        except TypeError:
            log.info("This Triton launches kernels otherwise than 3.6 to 3.9: every launch is bound by Triton, more slowly.")
            _is_quick = False
            self.kernel[(self.grid,)](*pointers, *self.fixed, *scalars, **self.constants)

    def compiled_for(self, index: int, *dtypes: torch.dtype) -> tuple[Any, tuple[Any, ...]] | None:
        """Return the kernel that earlier calls compiled for device `index` and the dtypes of the first two pointers.

        The result is (kernel, constants), or None before the first such call and where launches must go through Triton.
        """
        kernel = self._compiled.get((index, *dtypes)) if _is_quick else None
        return None if kernel is None else (kernel, self._rest)


def compiled_launch(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return a function f that launches a compiled kernel without Triton's checks, and f's arguments after the stream.

    `kernel.run` is a Python object that calls the C function `kernel.run.launch` with what it knows about the kernel, in an order that
    depends on Triton's version, and then the arguments, one by one (3.6) or in a tuple (3.9). A copy of that object with another `launch`
    shows the order. f is `kernel.run` itself where a launch needs scratch memory, which it allocates, or does anything else.
    """
    run, before = kernel.run, (kernel.function, kernel.packed_metadata, None, None, None)
    launch = getattr(run, "launch", None)
    if launch is None or any(getattr(run, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        return run, before
    calls: list[tuple[Any, ...]] = []
    argument, witness = object(), copy(run)
    witness.launch = lambda *args: calls.append(args)
    try:
        witness(1, 1, 1, 0, *before, argument)
    except TypeError:
        return run, before
    if len(calls) != 1 or calls[0][:4] != (1, 1, 1, 0):
        return run, before
    *known, last = calls[0][4:]
    if last is argument:
        return launch, tuple(known)
    return (lambda x, y, z, stream, *args: launch(x, y, z, stream, *known, args), ()) if last == (argument,) else (run, before)


# function, grid, its arguments between the stream and the addresses, those after the addresses
Compiled = tuple[Callable[..., None], int, tuple[Any, ...], tuple[Any, ...]]


def _compiled_launches(launches: list[Launch], key: Key, scalars: tuple[int | float, ...] = ()) -> list[Compiled] | None:
    """Return `launches` as calls of compiled kernels for the device and dtypes in `key`; None if one is not compiled yet."""
    compiled: list[Compiled] = []
    for launch in launches:
        found = launch.compiled_for(*key)
        if found is None:
            return None
        function, before = compiled_launch(found[0])
        compiled.append((function, launch.grid, before, (*launch.fixed, *scalars, *found[1])))
    return compiled


knobs = triton.knobs.runtime
# None in builds of torch without CUDA
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def has_hooks() -> bool:
    """Return whether Triton must call hooks at each launch, which a profiler has set."""
    hook = knobs.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


_empty_on_gpu = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)  # what compiled graphs call: a third of torch.empty's time


def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return what torch.empty_strided returns, in less time, on the device of `like`, which must be a GPU."""
    if _empty_on_gpu is None or current_device() != like.get_device():
        return torch.empty_strided(size, stride, dtype=dtype, device=like.device)
    return _empty_on_gpu(tuple(size), stride, dtype)  # it refuses a torch.Size


class Direct:
    """One or two Triton kernels that together do one job, such as encoding, launched by addresses instead of tensors.

    That saves a call per tensor. `scalars` follow the launches' fixed arguments. Callers try `run`, and if it returns False call `launch`.
    """

    __slots__ = ("_compiled", "launches", "scalars")

    def __init__(self, launches: list[Launch], scalars: tuple[int | float, ...] = ()) -> None:
        self.launches, self.scalars = launches, scalars
        self._compiled: dict[Any, list[Compiled] | None] = {}

    def run(self, key: Key, address: int, addresses: tuple[int | None, ...]) -> bool:
        """Launch the kernels and return True if they are compiled; otherwise return False, and the caller must call `launch`.

        `key`: device and dtypes of the first two pointers. `address`: the addresses that may not be multiples of 16, combined by "or".
        `addresses`: of all tensors, in the kernel's order; None for a missing one.
        """
        compiled, hook, index = self._compiled.get(key), knobs.launch_enter_hook, key[0]
        if compiled is None or address & 15 or (hook is not None and getattr(hook, "calls", True)) or current_device() != index:
            return False
        stream = current_stream(index)
        try:
            for launch, grid, before, rest in compiled:
                launch(grid, 1, 1, stream, *before, *addresses, *rest)
        except TypeError:  # this Triton's launcher takes other arguments: `Launch` finds that out too
            self._compiled[key] = None
            return False
        return True

    def launch(self, key: Key, pointers: tuple[Tensor | None, ...]) -> None:
        """Launch the kernels through Triton, which compiles them if needed, and keep the compiled kernels for `run`."""
        for launch in self.launches:
            launch(pointers, self.scalars)
        assert pointers[0] is not None and pointers[1] is not None
        self._compiled[key] = _compiled_launches(self.launches, (key[0], pointers[0].dtype, pointers[1].dtype), self.scalars)
