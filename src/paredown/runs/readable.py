"""What stands in a store may have been written by anybody: whatever cannot be read is a sentence.

>>> with readable("a plan"):
...     {}["format"]
Traceback (most recent call last):
    ...
paredown.errors.StoreError: a plan in the store cannot be read: KeyError: 'format'. It is damaged, or was not written by paredown.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from paredown.errors import ParedownError, StoreError
from paredown.serial import NUMBER, TEXT, WHOLE, Check, brief, check_fields, or_none

ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def readable(what: str) -> Generator[None]:
    """StoreError where `what` is not what it should be."""
    try:
        yield
    except StoreError:
        raise
    except ParedownError as error:
        raise StoreError(f"{what} in the store cannot be read: {error}") from None
    except ODD as error:
        told = f"{type(error).__name__}: {str(error)[:100]}"
        raise StoreError(f"{what} in the store cannot be read: {told}. It is damaged, or was not written by paredown.") from None


CHECKS: dict[str, Check] = {
    **dict.fromkeys(("key", "sweep", "task", "plan", "settings", "state"), TEXT),
    **dict.fromkeys(("worker", "claim", "status", "result"), or_none(TEXT)),
    **dict.fromkeys(("seed", "place", "attempts"), WHOLE),
    **dict.fromkeys(("propensity", "error", "seconds"), or_none(NUMBER)),
}


def check_columns(row: Any) -> None:
    """StoreError where a column holds something of another type, as SQLite lets it, or a number that is not finite."""
    there = {name: check for name, check in CHECKS.items() if hasattr(row, name)}
    check_fields(row, there, "trial in the store", _damaged)


def check_text(value: object, what: str) -> str:
    """`value`, where it is text; StoreError where a column of text holds bytes or a number."""
    if not isinstance(value, str):
        raise _damaged(f"{what} in the store is text, not {brief(value)}.")
    return value


def _damaged(sentence: str) -> StoreError:
    return StoreError(f"{sentence} The store is damaged, or was not written by paredown.")
