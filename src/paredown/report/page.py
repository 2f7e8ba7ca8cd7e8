"""`render(record)`: one HTML file that needs nothing else, neither files nor the network.

The record stands in it as JSON, escaped so that no text of it can end the script element, and one script draws it with text nodes alone:
names of tasks, plans and slots are never read as markup. The policy in its head allows this script and this style, by their hashes, and
nothing else.

>>> page = render(Record("</script><script>alert(1)</script>"))
>>> page.count("<script"), "alert(1)</script>" in page
(2, False)
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from paredown.errors import ReportError
from paredown.report.record import Record
from paredown.sizes import say_bytes

SCRIPTS = ("words.js", "frontier.js", "memory.js", "tables.js", "curves.js", "page.js")
MARKER = re.compile(r"\{\{(\w+)\}\}")
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})
PLAIN_ROWS = 40


def render(record: Record, *, live: str = "") -> str:
    """The page of a record; `live`: where a served page hears of new records."""
    value = record.to_json()
    parts = {
        "policy": escape(policy(is_live=bool(live))),
        "title": escape(value["title"]),
        "style": style(),
        "live": escape(live),
        "plain": in_plain(value),
        "data": embedded(value),
        "script": script(),
    }
    return MARKER.sub(lambda found: parts[found[1]], asset("page.html"))


def write(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, whole or not at all."""
    to = Path(path)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        part.write_text(render(record), encoding="utf-8")
        part.replace(to)
    except OSError as error:
        raise ReportError(f"{to.name} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)


def embedded(value: dict[str, Any]) -> str:
    """A record's JSON as it may stand inside of a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(ESCAPES)


def policy(*, is_live: bool) -> str:
    """What the page may do: run its script, use its style, and, where it is served, listen to its server."""
    allowed = [
        f"script-src '{_hash(script())}'",
        f"style-src '{_hash(style())}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(["default-src 'none'", *allowed, *(["connect-src 'self'"] if is_live else [])])


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@lru_cache(maxsize=1)
def script() -> str:
    """The scripts as one, with names of their own."""
    return '"use strict";\n(() => {\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();\n"


@lru_cache(maxsize=1)
def style() -> str:
    """The style."""
    return asset("page.css")


def asset(name: str) -> str:
    """A file that the package carries."""
    return (files("paredown.report") / "static" / name).read_text(encoding="utf-8")


def in_plain(value: dict[str, Any]) -> str:
    """The plans as a table without drawings, for readers without scripts; `value` is the record's JSON."""
    parts = ["<p>The drawings of this page need JavaScript. In short:</p>"]
    for study in value["studies"]:
        parts.append(f"<h2>{escape(study['task'])}</h2><p>{escape(study['reason'])}</p>")
        rows = [
            f"<tr><td>{escape(mark['label'])}<td>{say_bytes(mark['nbytes'])}<td>{_number(mark['error'])}"
            for mark in study["marks"][:PLAIN_ROWS]
        ]
        parts.append(f"<table><tr><th>plan<th>peak<th>{escape(study['metric'])}{''.join(rows)}</table>" if rows else "")
    return "".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
