"""Launching a kernel again without Triton's binding of arguments, which takes 60 to 80 microseconds for some thirty of them.

A `Launch` is a kernel with its grid, its constants and those arguments that do not change. The first call for a device and dtypes goes
through Triton and keeps the compiled kernel, later ones call that directly. What else Triton compiles for is the same each time: pointers
are multiples of 16 (if one is not, Triton binds), and integers that it looks at are among those that do not change. Where Triton is
interpreted, has launch hooks (a profiler), or its launcher takes other arguments, every launch goes through Triton.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import triton
from torch import Tensor

log = logging.getLogger("paredown")
_is_quick = not triton.knobs.runtime.interpret
BIG = 1 << 31


class Launch:
    """`kernel[grid](*pointers, *fixed, *scalars, **constants)` as one call of pointers and scalars.

    `scalars` are floats, or integers that the kernel is not specialised for.
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
        if index >= 0 and index != torch.cuda.current_device():  # a model that lies on several GPUs
            with torch.cuda.device(index):
                self(pointers, scalars)
            return
        address = 0
        for pointer in pointers:
            if pointer is not None:
                address |= pointer.data_ptr()
        if address & 15 or not _is_quick or _has_hooks() or any(s >= BIG for s in scalars):
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
        stream = torch._C._cuda_getCurrentRawStream(index)
        try:
            compiled.run(
                self.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *pointers, *self.fixed, *scalars, *self._rest,
            )  # fmt: skip
        except TypeError:
            log.info("This Triton launches kernels otherwise than 3.6 to 3.9: every launch is bound by Triton, more slowly.")
            _is_quick = False
            self.kernel[(self.grid,)](*pointers, *self.fixed, *scalars, **self.constants)


class Repeated:
    """Launches again and again with the same pointers but one: they go as numbers, which the launcher need not ask tensors for.

    `pointers`: None stands where `out` goes. The tensors are kept.
    """

    __slots__ = ("_compiled", "_index", "_launches", "_numbers", "_pointers")

    def __init__(self, launches: list[Launch], pointers: tuple[Tensor | None, ...]) -> None:
        self._launches, self._pointers = launches, pointers
        self._numbers = [None if p is None else p.data_ptr() for p in pointers]
        self._index = next(p.get_device() for p in pointers if p is not None)
        self._compiled: dict[torch.dtype, list[tuple[Any, tuple[Any, ...]]]] = {}

    def __call__(self, out: Tensor) -> None:
        compiled, address = self._compiled.get(out.dtype), out.data_ptr()
        if compiled is None or address & 15 or _has_hooks() or torch.cuda.current_device() != self._index:
            self._launch(out)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        numbers = [address if number is None else number for number in self._numbers]
        for grid, (kernel, rest) in zip((launch.grid for launch in self._launches), compiled, strict=True):
            kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *numbers, *rest)

    def _launch(self, out: Tensor) -> None:
        """By way of `Launch`; the next time it is quick, if that found it can be."""
        pointers = tuple(out if p is None else p for p in self._pointers)
        for launch in self._launches:
            launch(pointers)
        assert pointers[0] is not None and pointers[1] is not None
        key = (self._index, pointers[0].dtype, pointers[1].dtype)
        if (
            _is_quick
            and all(key in launch._compiled for launch in self._launches)
            and not any((n or 0) & 15 for n in self._numbers)
        ):
            self._compiled[out.dtype] = [(launch._compiled[key], (*launch.fixed, *launch._rest)) for launch in self._launches]


def _has_hooks() -> bool:
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
