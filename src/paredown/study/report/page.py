"""`render(record)`: one self-contained HTML page of a record; it loads no other files and uses no network.

The page embeds the record as JSON, escaped so that no text can close the script element. One script draws it with text nodes only, so
names of tasks, plans and slots are never parsed as markup. The Content-Security-Policy allows this script and style by hash, nothing else.

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
from paredown.sizes import say_bytes
from paredown.study.report.record import Record, scrub
from paredown.study.tasks.trial import say_step
from paredown.tables import Table

SCRIPTS = ("words.js", "tips.js", "labels.js", "frontier.js", "memory.js", "step.js", "tables.js", "curves.js", "page.js")
MARKER = re.compile(r"\{\{(\w+)\}\}")
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})
PLAIN_ROWS = 40  # plans in the table for browsers without JavaScript


def render(record: Record, *, live: str = "") -> str:
    """Return the HTML page of a record; `live` is the path of the event stream if the page is served, "" for a file."""
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
    """Return the JSON that the page's script draws: the record, with a sentence that summarizes each study."""
    return {**record.to_json(), "summaries": [scrub(study.summary()) for study in record.studies]}


def write(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, whole or not at all."""
    save_text(path, render(record), ReportError)


def embedded(value: dict[str, Any]) -> str:
    """Return the JSON value of a record as text that is safe inside of a <script> element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(ESCAPES)


def policy(*, is_live: bool) -> str:
    """Return the Content-Security-Policy: the page's own script and style, and for a live page connections to its server."""
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
    """Return tables of the plans of each study as HTML, for browsers without JavaScript; `value` is what `drawn` returns."""
    parts = ["<p>The charts of this page need JavaScript. The plans as tables:</p>"]
    for study, summary in zip(value["studies"], value["summaries"], strict=True):
        parts.append(f"<h2>{escape(study['task'])}</h2><p>{escape(summary)}</p><p>{escape(study['reason'])}</p>")
        parts.append(_plain_table(study).to_html() if study["marks"] else "")
    return "".join(parts)


def _plain_table(study: dict[str, Any]) -> Table:
    """Return a table with peaks and errors of the plans of a study, and posterior means where they differ from measured errors."""
    marks, metric = study["marks"], study["metric"]
    has_posterior = any(mark["error"] != mark["measured"] for mark in marks if mark["error"] is not None)
    keys = {f"measured {metric}": "measured", "posterior mean": "error"} if has_posterior else {metric: "error"}
    has_times = any(mark["step_source"] for mark in marks)
    rows = [
        (
            mark["label"],
            say_bytes(mark["nbytes"]),
            *(_number(mark[key]) for key in keys.values()),
            *([say_step(mark["step_seconds"], mark["step_ratio"])] if has_times else []),
        )
        for mark in marks[:PLAIN_ROWS]
    ]
    return Table(("plan", "peak", *keys, *(["step time"] if has_times else [])), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
