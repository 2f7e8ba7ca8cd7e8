"""Prints tables: aligned columns of text in a terminal, an HTML table in a notebook.

`Table` prints column names and rows of text. `TableRows` is a tuple of records (dataclasses) that prints as such a table;
`session.changes`, `session.actions` and explanations of plans are of this kind.

>>> print(Table(("plan", "peak"), [("baseline", "1.25 MiB"), ("lpmm", "612 KiB")], right={1}))
plan          peak
baseline  1.25 MiB
lpmm       612 KiB
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from html import escape
from typing import Any, ClassVar, Self, TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True)
class Table:
    """Prints rows of text in named columns; `right` has the indices of columns that are aligned right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()

    def lines(self) -> list[str]:
        """Return the line of column names and a line for each row, padded to the same widths, without trailing spaces."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            "  ".join(
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_html(self, caption: str = "") -> str:
        """Return the table as HTML, with `caption` above it."""
        head, *body = [[escape(cell) for cell in row] for row in (self.columns, *self.rows)]
        rows = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}</tr>" for row in body)
        above = f"<caption>{escape(caption)}</caption>" if caption else ""
        return f"<table>{above}<tr>{''.join(f'<th>{cell}' for cell in head)}</tr>{rows}</table>"


class TableRows(tuple[Record, ...]):
    """Holds records in a tuple, and prints as a table of them.

    A subclass declares the names of its columns, and the text that is printed if there are no rows.
    """

    __slots__ = ()
    columns: ClassVar[Sequence[str]]
    if_empty: ClassVar[str] = ""

    def __new__(cls, rows: Iterable[Record] = ()) -> Self:
        """Create a tuple of `rows`."""
        return super().__new__(cls, rows)

    def cells(self, row: Any) -> tuple[str, ...]:
        """Return the text in each column for the record `row`; by default the columns are the fields of a dataclass."""
        return tuple(map(str, astuple(row)))

    def _table(self) -> Table:
        return Table(self.columns, [self.cells(row) for row in self])

    def __repr__(self) -> str:
        return str(self._table()) if self or not self.if_empty else self.if_empty

    def _repr_html_(self) -> str:
        return self._table().to_html()
