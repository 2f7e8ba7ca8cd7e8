"""Train in the memory you have: number formats for the tensors of a training step.

Names are loaded when first used, so that `import paredown` is quick and needs torch and numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paredown.codec.packed import PackedTensor, encode, round_trip
    from paredown.errors import CodecError, FormatError, ParedownError
    from paredown.formats.catalog import CATALOG
    from paredown.formats.element import Element
    from paredown.formats.format import Format
    from paredown.formats.rounding import Overflow, Rounding, Seed

__version__ = "0.1.0"
__all__ = [
    "CATALOG",
    "CodecError",
    "Element",
    "Format",
    "FormatError",
    "Overflow",
    "PackedTensor",
    "ParedownError",
    "Rounding",
    "Seed",
    "__version__",
    "encode",
    "round_trip",
]

_NAMES_OF = {
    "paredown.codec.packed": ("PackedTensor", "encode", "round_trip"),
    "paredown.errors": ("CodecError", "FormatError", "ParedownError"),
    "paredown.formats.catalog": ("CATALOG",),
    "paredown.formats.element": ("Element",),
    "paredown.formats.format": ("Format",),
    "paredown.formats.rounding": ("Overflow", "Rounding", "Seed"),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paredown' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)  # the next look-up finds it
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
