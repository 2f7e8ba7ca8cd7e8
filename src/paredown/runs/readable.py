"""What stands in a store may have been written by anybody: whatever cannot be read is a sentence.

>>> with readable("a plan"):
...     {}["format"]
Traceback (most recent call last):
    ...
paredown.errors.StoreError: a plan in the store cannot be read: KeyError: 'format'. It is damaged, or was not written by paredown.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from paredown.errors import ParedownError, StoreError

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


CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("key", "sweep", "task", "state"), lambda value: isinstance(value, str)),
    "seed": lambda value: isinstance(value, int),
    **dict.fromkeys(("propensity", "error"), lambda value: value is None or isinstance(value, int | float)),
}


def check_columns(row: Any) -> None:
    """ValueError where a column holds something of another type, as SQLite lets it."""
    for name, check in CHECKS.items():
        if hasattr(row, name) and not check(getattr(row, name)):
            raise ValueError(f"{name} is {getattr(row, name)!r}")
