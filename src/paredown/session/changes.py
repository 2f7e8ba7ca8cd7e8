"""What was asked for and what was given, slot by slot.

>>> Changes([Change("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot          asked           given           why
attn:query    int4/64@bf16    int8/64@bf16    pinned
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Change:
    """One difference."""

    slot: str
    asked: str
    given: str
    reason: str


class Changes(tuple[Change, ...]):
    """All differences, as a tuple that prints as a table."""

    __slots__ = ()

    def __new__(cls, rows: Iterable[Change] = ()) -> Changes:
        """A tuple of `rows`."""
        return super().__new__(cls, rows)

    def __repr__(self) -> str:
        if not self:
            return "everything is as it was asked for"
        rows = [("slot", "asked", "given", "why"), *(astuple(row) for row in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("    ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows)

    def _repr_html_(self) -> str:
        head = "<tr><th>slot<th>asked<th>given<th>why</tr>"
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in astuple(row))}</tr>" for row in self)
        return f"<table>{head}{body}</table>"


def said_keys(state: Any) -> str:
    """What a state that cannot be loaded is, for the sentence that says so.

    >>> said_keys({"seed": 1}), said_keys(None)
    ("has ['seed']", 'is of type NoneType')
    """
    return f"has {sorted(map(str, state))}" if isinstance(state, Mapping) else f"is of type {type(state).__name__}"
