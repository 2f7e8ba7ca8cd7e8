"""`render(record)` returns a report as one self-contained HTML page, which loads no other files and uses no network.

The page embeds the record as JSON, escaped so that no text can close the script element. A script draws the record with text nodes only,
so names of tasks, plans and slots are never parsed as markup. The Content-Security-Policy allows only this script and style, by hash.

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
from typing import Any

from paredown.errors import ReportError
from paredown.serial import save_text
from paredown.study.report.record import Record, scrub

SCRIPTS = ("words.js", "tips.js", "labels.js", "frontier.js", "memory.js", "step.js", "tables.js", "curves.js", "page.js")
MARKER = re.compile(r"\{\{(\w+)\}\}")
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(record: Record, *, live: str = "") -> str:
    """Return the HTML page of a record, a report's content; `live` is the path of the event stream of a served page, or ""."""
    value = drawn(record)
    parts = {
        "policy": escape(policy(is_live=bool(live))),
        "title": escape(value["title"]),
        "style": style(),
        "live": escape(live),
        "plain": in_plain(value),
        "data": embedded(value),
        "script": script(),
    }
    return MARKER.sub(lambda match: parts[match[1]], asset("page.html"))


def drawn(record: Record) -> dict[str, Any]:
    """Return the JSON that the page's script draws: the record, with a sentence on each of its studies (parts on a task)."""
    return {**record.to_json(), "summaries": [scrub(study.summary()) for study in record.studies]}


def write(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the report page of `record` to a file; if that fails, no partial file is left."""
    save_text(path, render(record), ReportError)


def embedded(value: dict[str, Any]) -> str:
    """Return the JSON value of a record as text that is safe inside of a <script> element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(ESCAPES)


def policy(*, is_live: bool) -> str:
    """Return a Content-Security-Policy that allows the page's own script and style, and a live page connections to its server."""
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
    """Return the page's scripts, joined inside of one function, so that they define no global names."""
    return '"use strict";\n(() => {\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();\n"


@lru_cache(maxsize=1)
def style() -> str:
    """Return the page's style sheet."""
    return asset("page.css")


def asset(name: str) -> str:
    """Return the text of the file `name` in the package's folder static/."""
    return (files("paredown.study.report") / "static" / name).read_text(encoding="utf-8")


def in_plain(value: dict[str, Any]) -> str:
    """Return a summary of each task's part as HTML for browsers without JavaScript; `value` is what `drawn` returns."""
    parts = ["<p>The charts and tables of this page need JavaScript.</p>"]
    for study, summary in zip(value["studies"], value["summaries"], strict=True):
        parts.append(f"<h2>{escape(study['task'])}</h2><p>{escape(summary)}</p><p>{escape(study['reason'])}</p>")
    return "".join(parts)
