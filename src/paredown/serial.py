"""Reads and writes JSON files, and checks versions, field names and values, with one wording for all errors.

A JSON file can hold anything: numbers of thousands of digits, NaN, lists nested a thousand deep; its path can name a directory.
`read_json` returns the value of a file or raises the given ParedownError, and `load_json` the object that a `from_json` makes of it;
`save_json` writes one, and `replaced_file` any file: whole or not at all. `object_parts` checks version and field names;
`check_fields` checks values against a table of `Check`s. `brief` quotes any value in a message, also values that `repr` fails on.

>>> brief([1, 2]), brief(10**6000), brief([10**6000])
('[1, 2]', 'a whole number of about 6001 digits', 'a list of 1')
>>> from paredown.errors import PlanError
>>> check_fields({"seed": 10**400}, {"seed": WHOLE}, "trial", PlanError)
Traceback (most recent call last):
    ...
paredown.errors.PlanError: seed of a trial is a whole number of at most 64 bits, not a whole number of about 401 digits.

`dump_dataclass` and `read_dataclass` convert dataclasses to JSON and back by the types of their fields: str, int from 0 to 2^53 (the
integers that JavaScript represents exactly), finite float, bool, enumerations by value, Any, `X | None`, `Annotated[X, Check]`, tuples and
NamedTuples as lists, mappings and dataclasses as objects; inside of another value, classes with `to_json` and `from_json` by these. A field
with a default can be missing; an unknown field is an error. Errors name the path of the value:

>>> read_dataclass(tuple[int, ...], [1, -2], "sizes")
Traceback (most recent call last):
    ...
paredown.errors.ReportError: sizes[1]: a whole number from 0 to 2^53 is needed here; this is -2.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from paredown.errors import ParedownError, ReportError

MOST_BYTES = 1 << 28  # the largest JSON file that is read
BITS = 63  # of integers, without the sign: what SQLite, PostgreSQL, numpy and torch store
LARGEST = 1e300  # the largest number that is summed up, so that sums stay finite; stands for infinity, which JSON does not have
PART = re.compile(r"\.\d+-[0-9a-f]{8}\.part")  # the name of a temporary file: process id and random digits
STALE_SECONDS = 3600  # a temporary file that was not written to for so long is of a writer that was killed
SHOWN = 80  # characters of a value in a message
SHOWN_BITS = 133  # of an integer that is quoted in full: 40 digits

Raises = Callable[[str], ParedownError]
PathText = str | PathLike[str]
Loaded = TypeVar("Loaded")


class Check(NamedTuple):
    """Holds a test that a value in a file must pass, and a text on allowed values for error messages."""

    holds: Callable[[Any], bool]
    expected: str


def json_values(value: Any, of: tuple[str, str], raises: Raises) -> dict[str, Any]:
    """Return a copy of the dict `value`, written as JSON and read back; raise an error if JSON cannot hold it.

    `of`: what messages call the value, and an example of an allowed value. `raises`: the class of the error.
    """
    try:
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise raises(f"{of[0]} must be JSON: {error}. Use text, finite numbers, lists and dicts.") from None
    if not isinstance(copied, dict):
        raise raises(f"{of[0]} is a dict, such as {of[1]}, not {brief(value)}.")
    return copied


def is_whole(value: object) -> bool:
    """Return whether `value` is an integer of at most 64 bits, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << BITS) <= value < 1 << BITS


def is_count(value: Any) -> bool:
    """Return whether `value` is an integer from 0 to 2^63 - 1."""
    return is_whole(value) and value >= 0


def is_number(value: object, largest: float = sys.float_info.max) -> bool:
    """Return whether `value` is a finite number of at most `largest` in absolute value (by default the largest float64)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= largest


def is_text(value: object) -> bool:
    """Return whether `value` is a str."""
    return isinstance(value, str)


WHOLE = Check(is_whole, "a whole number of at most 64 bits")
COUNT = Check(is_count, "a whole number from 0 up to 2^63 - 1")
NUMBER = Check(is_number, "a finite number")
SUMMED = Check(lambda value: is_number(value, LARGEST), "a finite number of at most 1e300")
FROM_0 = Check(lambda value: is_number(value, LARGEST) and value >= 0, "a finite number from 0 up")
TEXT = Check(is_text, "text")


def or_none(check: Check) -> Check:
    """Return a check that allows None and whatever `check` allows."""
    return Check(lambda value: value is None or check.holds(value), f"{check.expected}, or None")


FromZero = Annotated[float, FROM_0]
FromZeroOrNone = Annotated[float | None, or_none(FROM_0)]


def check_fields(values: Any, checks: Mapping[str, Check], what: str, error: Raises) -> None:
    """Raise `error` for the first field of a dict or object that fails its check; the message calls the object `what`."""
    for name, check in checks.items():
        value = values[name] if isinstance(values, Mapping) else getattr(values, name)
        if not check.holds(value):
            raise error(f"{name} of a {what} is {check.expected}, not {brief(value)}.")


def object_parts(
    value: Any, what: str, names: Collection[str], needed: Collection[str], newest: int, error: Raises, *, oldest: int = 1
) -> dict[str, Any]:
    """Return a JSON object's fields except "version"; raise `error` for a wrong version, missing or unknown fields.

    `what`: what messages call the object. `names`: the fields that it may have. `needed`: those that it must have. A version in it must be
    from `oldest` to `newest`.

    >>> from paredown.errors import PlanError
    >>> object_parts({"version": 1, "a": 2}, "pair", ("a", "b"), ("a",), 1, PlanError)
    {'a': 2}
    """
    version = value.get("version", newest) if isinstance(value, Mapping) else newest
    if type(version) is not int or not oldest <= version <= newest:
        advice = (
            "Write it again with this paredown." if type(version) is int and version < oldest else "Update paredown to read it."
        )
        raise error(f"the {what} is of version {brief(version)}; this paredown reads {oldest} to {newest}. {advice}")
    if not isinstance(value, Mapping) or not value.keys() >= set(needed):
        raise error(f"the JSON of a {what} is an object with {', '.join(sorted(needed))}; this is {brief(value)}.")
    unknown = [name for name in value if name != "version" and name not in names]
    if unknown:
        raise error(f"field {brief(unknown[0])} is unknown in a {what} of version {newest}. Allowed: {', '.join(names)}.")
    return {name: part for name, part in value.items() if name != "version"}


def read_json(path: PathText, what: str, error: Raises, *, hint: str = "", name: str = "", most_bytes: int = MOST_BYTES) -> Any:
    """Return the value of a JSON file; raise `error` if the file cannot be read or is not JSON.

    `what`: what messages call the file. `hint`: advice in the message on a file that is not JSON. `name`: shown in place of the path.
    """
    data = read_bytes(path, what, error, name=name, most_bytes=most_bytes)
    return parse_json(data, what, error, hint=hint, name=name or str(path))


def parse_json(text: str | bytes, what: str, error: Raises, *, hint: str = "", name: str = "this text") -> Any:
    """Parse a JSON text and return its value; raise `error` if the text is not JSON.

    The message says that `name` is no `what`, such as "plan.json is no plan", and ends with the advice `hint`.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{name} is no {what}: it is not JSON ({str(reason)[:SHOWN]}). {hint}".rstrip()) from None


def load_json(
    path: PathText,
    what: str,
    error: Raises,
    from_json: Callable[[Any], Loaded],
    *,
    hint: str = "",
    name: str = "",
    most_bytes: int = MOST_BYTES,
) -> Loaded:
    """Read a JSON file and return `from_json` of its value; the message of every error begins with the path, or with `name`.

    The other arguments are those of `read_json`.
    """
    value = read_json(path, what, error, hint=hint, name=name, most_bytes=most_bytes)
    try:
        return from_json(value)
    except ParedownError as reason:
        advice = "" if isinstance(value, dict) else hint
        raise error(f"{name or path}: {reason} {advice}".rstrip()) from None


def save_json(path: PathText, value: Any, error: Raises, *, indent: int | None = None) -> None:
    """Write a JSON value and a line feed to a file; raise ValueError for NaN and infinity, which JSON does not have."""
    save_text(path, json.dumps(value, allow_nan=False, indent=indent) + "\n", error)


def save_text(path: PathText, text: str, error: Raises) -> None:
    """Write `text` to a file as UTF-8, all of it or nothing; raise `error` with the reason if the file cannot be written."""
    data = text.encode()
    with replaced_file(path, error) as part:
        part.write_bytes(data)


@contextmanager
def replaced_file(path: PathText, error: Raises) -> Generator[Path]:
    """Yield a path for a temporary file beside `path`, which replaces `path` if the block ends without an exception.

    The temporary file is flushed to the disk before it is renamed, and has the permissions of the file that it replaces. If `path`
    is a symbolic link, the file that it points to is replaced. Devices and pipes (/dev/stdout) are written directly. An OSError
    becomes `error` with advice. Temporary files that killed writers left in the folder are removed when they are an hour old.
    """
    target = _link_target(path, error)
    part = target.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            yield target
            return
        _remove_stale(target.parent)
        yield part
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        if target.is_file():
            part.chmod(target.stat().st_mode & 0o7777)
        part.replace(target)
    except OSError as reason:
        why = reason.strerror or type(reason).__name__
        raise error(f"{path} cannot be written: {why}. {_advice(reason.errno, Path(path))}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove temporary files that are so old that their writers, here or on other machines, must have been killed."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):  # another writer may remove it first
            if PART.fullmatch(path.name) and time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def _link_target(path: PathText, error: Raises) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError as reason:  # a zero byte or a lone surrogate in the path
        raise error(f"{brief(str(path))} cannot be the path of a file: {reason}.") from None


def _advice(number: int | None, path: Path) -> str:
    """Return a sentence that says what to do about a file that could not be written. `number` is the errno of the OSError."""
    if path.is_dir():
        return "It is a folder: give the path of a file."
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = "The file that had this name is unmodified" if path.exists() else "No part of it is left"
        return f"{what}. Free space on its disk, or give a path on another one."
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}: create it, or give a path in one that exists."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"A new file is written and renamed, and this user may not create one in {path.parent}: give a path in another folder."
        )
    return "Give another path."


def read_bytes(path: PathText, what: str, error: Raises, *, name: str = "", most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file; raise `error` if it is missing, a directory, unreadable or larger than `most_bytes`.

    `what`: what messages call the file. `name`: shown in place of the path.
    """
    try:
        size = Path(path).stat().st_size
        data = Path(path).read_bytes() if size <= most_bytes else b""
    except OSError as reason:
        why = reason.strerror or type(reason).__name__
        raise error(f"{name or path} cannot be read: {why}. Give the path of a {what} that this user may read.") from None
    except ValueError as reason:  # a zero byte or a lone surrogate in the path
        raise error(f"{brief(name or str(path))} cannot be the path of a {what}: {reason}.") from None
    if size > most_bytes:
        raise error(f"{name or path} has {size} bytes; a {what} of more than {most_bytes} bytes is not read.")
    return data


def brief(value: object) -> str:
    """Return `repr(value)` cut to SHOWN characters, or a description of a value that `repr` cannot print."""
    if isinstance(value, int) and value.bit_length() > SHOWN_BITS:
        return f"a whole number of about {value.bit_length() * 30103 // 100000 + 1} digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits inside; nested too deep
        size = f" of {len(value)}" if isinstance(value, list | tuple | dict) else ""
        return f"{NAMES.get(type(value), f'a value of type {type(value).__name__}')}{size}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


NAMES: Mapping[type, str] = {list: "a list", tuple: "a tuple", dict: "an object"}


# --- dataclasses to JSON and back ------------------------------------------------------------------------------------

LARGEST_IN_JAVASCRIPT = 2**53


PLAIN: Mapping[Any, Check] = {
    str: Check(lambda value: type(value) is str, "text"),
    int: Check(lambda value: type(value) is int and 0 <= value <= LARGEST_IN_JAVASCRIPT, "a whole number from 0 to 2^53"),
    float: SUMMED,
    bool: Check(lambda value: type(value) is bool, "true or false"),
    Any: Check(lambda value: True, "any JSON value"),
}


class _Refused(Exception):
    """Raised for a value that has another type than its field; the message begins with the path of the field."""


def read_dataclass(kind: Any, value: Any, where: str, error: Raises = ReportError) -> Any:
    """Return a JSON value converted to the type `kind`; raise `error` with the path of the first wrong value.

    `where`: the start of that path, such as the name of the whole value.
    """
    try:
        return _read_object(kind, value, where) if is_dataclass(kind) else _reader(kind)(value, where)
    except _Refused as reason:
        raise error(str(reason)) from None


def read_versioned(kind: Any, value: Any, what: str, version: int, error: Raises, *, oldest: int = 1) -> Any:
    """Return an instance of the dataclass `kind`, made from the JSON object `value`; raise `error` if a field is wrong.

    The object's version must be from `oldest` to `version`. `what`: what messages call the object.
    """
    needed = {"version", *(row.name for row in fields(kind) if row.default is MISSING and row.default_factory is MISSING)}
    parts = object_parts(value, what, [row.name for row in fields(kind)], needed, version, error, oldest=oldest)
    return read_dataclass(kind, parts, what, error)


Reader = Callable[[Any, str], Any]  # (value, path) -> the value converted, or _Refused


@lru_cache(maxsize=256)
def _reader(kind: Any) -> Reader:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN or origin is Annotated:
        return partial(_checked, PLAIN[kind] if kind in PLAIN else inner[1])
    if origin is UnionType:  # X | None
        read = _reader(next(part for part in inner if part is not NoneType))
        return lambda value, where: None if value is None else read(value, where)
    if origin is tuple:
        return partial(_read_list, _reader(inner[0])) if inner[-1] is Ellipsis else partial(_read_tuple, [*map(_reader, inner)], "")
    if origin is Mapping:
        return partial(_read_mapping, _reader(inner[1]))
    if hasattr(kind, "from_json"):
        return partial(_read_by_method, kind)
    if is_dataclass(kind):
        return partial(_read_object, kind)
    if issubclass(kind, Enum):
        allowed = {member.value: member for member in kind}
        check = Check(lambda value: isinstance(value, str) and value in allowed, f"one of {', '.join(allowed)}")
        return lambda value, where: allowed[_checked(check, value, where)]
    read_fields = partial(_read_tuple, list(_field_readers(kind).values()), f" of {', '.join(kind._fields)}")
    return lambda value, where: kind(*read_fields(value, where))


def _checked(check: Check, value: Any, where: str) -> Any:
    _need(check.holds(value), where, check.expected, value)
    return value


def _read_list(read: Reader, value: Any, where: str) -> tuple[Any, ...]:
    _need(isinstance(value, list), where, "a list", value)
    return tuple([read(part, f"{where}[{i}]") for i, part in enumerate(value)])


def _read_tuple(readers: Sequence[Reader], names: str, value: Any, where: str) -> tuple[Any, ...]:
    _need(isinstance(value, list) and len(value) == len(readers), where, f"a list{names or f' of {len(readers)}'}", value)
    return tuple(read(part, f"{where}[{i}]") for i, (read, part) in enumerate(zip(readers, value, strict=True)))


def _read_mapping(read: Reader, value: Any, where: str) -> dict[str, Any]:
    _need(isinstance(value, dict) and all(type(key) is str for key in value), where, "an object", value)
    return {key: read(part, f"{where}.{brief(key)}") for key, part in value.items()}


def _read_by_method(kind: Any, value: Any, where: str) -> Any:
    try:
        return kind.from_json(value)
    except ParedownError as reason:
        raise _Refused(f"{where}: {reason}") from None


def _read_object(kind: Any, value: Any, where: str) -> Any:
    _need(isinstance(value, dict), where, "an object", value)
    readers = _field_readers(kind)
    for name in value.keys() - readers.keys():
        raise _Refused(f"{where}: field {brief(name)} is unknown. Allowed: {', '.join(readers)}.")
    for row in fields(kind):
        if row.default is MISSING and row.default_factory is MISSING and row.name not in value:
            raise _Refused(f"{where}: {row.name} is missing.")
    return kind(**{name: readers[name](part, f"{where}.{name}") for name, part in value.items()})


@lru_cache(maxsize=64)
def _field_readers(kind: Any) -> dict[str, Reader]:
    hints = get_type_hints(kind, include_extras=True)
    names = [row.name for row in fields(kind)] if is_dataclass(kind) else kind._fields
    return {name: _reader(hints[name]) for name in names}


def _need(holds: bool, where: str, needed: str, value: Any) -> None:
    if not holds:
        raise _Refused(f"{where}: {needed} is needed here; this is {brief(value)}.")


def dump_dataclass(value: Any, *, skips_defaults: bool = False) -> Any:
    """Return the JSON value that `read_dataclass` reads back; with `skips_defaults`, fields that have their default are left out."""

    def dump(part: Any) -> Any:
        return part.to_json() if hasattr(part, "from_json") else dump_dataclass(part, skips_defaults=skips_defaults)

    if type(value) in PLAIN or value is None:
        return value
    if isinstance(value, tuple | list):
        return [dump(part) for part in value]
    if is_dataclass(value):
        parts = [(row.name, getattr(value, row.name), row.default) for row in fields(value)]
        return {name: dump(part) for name, part, default in parts if not skips_defaults or part != default}
    if isinstance(value, Mapping):
        return {str(key): dump(part) for key, part in value.items()}
    return value.value if isinstance(value, Enum) else value
