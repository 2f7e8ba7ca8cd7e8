"""Rows of texts as a table: aligned columns for a terminal, HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


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
