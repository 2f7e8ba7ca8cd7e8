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


def _has_hooks() -> bool:
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
