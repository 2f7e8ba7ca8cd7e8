"""Texts and names use the words of the field: phrases that the glossary replaces do not come back.

Left out: the log, the decisions and the changelog, which are records of their time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# what is discarded, and what to write
DISCARDED = {
    r"told": "names, reports, records, describes",
    r"waits": "is stored, is packed; for processes: blocks until",
    r"as it is": "unmodified",
    r"as they are": "unmodified",
    r"as written": "baseline, unmodified",
    r"computed again": "recomputed; checkpointed",
    r"put away": "packed",
    r"made again": "decoded, recomputed",
    r"whom": "which",
    r"shel(?:f|ved)": "stored tensors",
    r"room": "memory, space",
}
PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(DISCARDED)})(?![\w-])", re.IGNORECASE)
RECORDS = ("docs/log.md", "docs/decisions/")
# names of version 0.1 that still work
OLD_NAMES = re.compile(r"[\"']as_written[\"']|def as_written\(|Footprint\.as_written")


def texts() -> list[Path]:
    """Sources, pages, examples and benchmarks."""
    folders = ("src/paredown", "docs", "examples", "benchmarks")
    found = [path for folder in folders for end in ("py", "md", "html", "js") for path in (ROOT / folder).rglob(f"*.{end}")]
    kept = [path for path in found if not str(path.relative_to(ROOT)).startswith(RECORDS)]
    return sorted([*kept, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def discarded_in(text: str) -> list[str]:
    """Lines with a discarded phrase; names of variables count, with underscores for spaces."""
    lines = enumerate(text.splitlines(), 1)
    kept = ((number, OLD_NAMES.sub("", line)) for number, line in lines)
    return [f"{number}: {line.strip()[:120]}" for number, line in kept if PATTERN.search(line.replace("_", " "))]


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_discarded_phrase(path: Path) -> None:
    assert not discarded_in(path.read_text(encoding="utf-8"))


def test_the_search_finds_planted_phrases() -> None:
    assert discarded_in("a tensor that waits packed") and discarded_in("is_computed_again = True") and discarded_in("As it is.")
    assert not discarded_in("a threshold, a bathroom, an awaited result and the assets")
