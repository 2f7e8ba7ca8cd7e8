"""What a guard did, in order: every row a step, a slot, what it was, what it became, and why.

>>> Actions([Action(30, "attn:query", "int8/64@bf16", "as it is", "its largest value rose from 3 to 61")])
step  slot        from          to        why
30    attn:query  int8/64@bf16  as it is  its largest value rose from 3 to 61
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from html import escape
from typing import Any

THE_STEP, THE_PROBE = "the step", "the probe"  # rows that speak of no slot
HEAD = ("step", "slot", "from", "to", "why")


@dataclass(frozen=True)
class Action:
    """One thing that was done."""

    step: int
    slot: str
    before: str
    after: str
    why: str

    def to_json(self) -> list[Any]:
        """The JSON value."""
        return list(astuple(self))


class Actions(tuple[Action, ...]):
    """All of them, as a tuple that prints as a table."""

    __slots__ = ()

    def __new__(cls, rows: Iterable[Action] = ()) -> Actions:
        """A tuple of `rows`."""
        return super().__new__(cls, rows)

    def __repr__(self) -> str:
        return in_columns([HEAD, *(tuple(map(str, astuple(row))) for row in self)]) if self else "nothing was done"

    def _repr_html_(self) -> str:
        return in_html([HEAD, *(tuple(map(str, astuple(row))) for row in self)])


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, padded so that columns stand below each other.

    >>> print(in_columns([("slot", "format"), ("a:input", "int8")]))
    slot     format
    a:input  int8
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def in_html(rows: Sequence[Sequence[str]]) -> str:
    """The same as a table of HTML, the first row as its head."""
    head, *body = [[escape(cell) for cell in row] for row in rows]
    lines = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}</tr>" for row in body)
    return f"<table><tr>{''.join(f'<th>{cell}' for cell in head)}</tr>{lines}</table>"
