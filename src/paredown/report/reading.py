"""Dataclasses to JSON and back, by the types of their fields: a sentence that names the place where a value is something else.

Text, whole numbers from 0 to 2^53 (what JavaScript counts exactly), finite numbers, true and false, None where the type allows it,
tuples as lists, mappings of texts, NamedTuples as lists, dataclasses as objects. A field with a default may be missing; an unknown
one is an error.

>>> read(tuple[int, ...], [1, -2], "sizes")
Traceback (most recent call last):
    ...
paredown.errors.ReportError: sizes[1]: a whole number from 0 to 2^53 is needed here; this is -2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from paredown.errors import ReportError
from paredown.serial import SUMMED, Check, brief

LARGEST = 2**53


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


PLAIN: Mapping[Any, Check] = {
    str: Check(lambda value: type(value) is str, "text"),
    int: Check(_is_whole, "a whole number from 0 to 2^53"),
    float: SUMMED,
    bool: Check(lambda value: type(value) is bool, "true or false"),
}


def read(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`; ReportError names the place in `where`."""
    if kind in PLAIN:
        check, needed = PLAIN[kind]
        return value if check(value) else _refuse(where, needed, value)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # X | None
        return None if value is None else read(next(part for part in inner if part is not NoneType), value, where)
    if origin is tuple:
        return _read_tuple(inner, value, where)
    if origin is Mapping:
        _need(isinstance(value, dict), where, "an object", value)
        return {read(str, key, where): read(inner[1], part, f"{where}.{brief(key)}") for key, part in value.items()}
    if is_dataclass(kind):
        return _read_object(kind, value, where)
    names, hints = kind._fields, _hints(kind)
    _need(isinstance(value, list) and len(value) == len(names), where, f"a list of {', '.join(names)}", value)
    return kind(*(read(hints[name], part, f"{where}.{name}") for name, part in zip(names, value, strict=True)))


def _read_tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _need(isinstance(value, list), where, "a list", value)
    if inner[-1] is Ellipsis:
        return tuple([read(inner[0], part, f"{where}[{i}]") for i, part in enumerate(value)])
    _need(len(value) == len(inner), where, f"a list of {len(inner)}", value)
    return tuple(read(kind, part, f"{where}[{i}]") for i, (kind, part) in enumerate(zip(inner, value, strict=True)))


def _read_object(kind: Any, value: Any, where: str) -> Any:
    _need(isinstance(value, dict), where, "an object", value)
    rows, hints = fields(kind), _hints(kind)
    names = [row.name for row in rows]
    for name in value.keys() - set(names):
        raise ReportError(f"{where}: field {brief(name)} is unknown. Allowed: {', '.join(names)}.")
    for row in rows:
        if row.default is MISSING and row.default_factory is MISSING and row.name not in value:
            raise ReportError(f"{where}: {row.name} is missing.")
    return kind(**{name: read(hints[name], part, f"{where}.{name}") for name, part in value.items()})


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def dump(value: Any) -> Any:
    """The JSON value that `read` takes."""
    if is_dataclass(value):
        return {row.name: dump(getattr(value, row.name)) for row in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): dump(part) for key, part in value.items()}
    return [dump(part) for part in value] if isinstance(value, tuple | list) else value


def _need(holds: bool, where: str, needed: str, value: Any) -> None:
    if not holds:
        _refuse(where, needed, value)


def _refuse(where: str, needed: str, value: Any) -> None:
    raise ReportError(f"{where}: {needed} is needed here; this is {brief(value)}.")
