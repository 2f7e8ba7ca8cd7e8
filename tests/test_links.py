"""Links of all Markdown files lead somewhere: relative paths exist, and anchors are headings of the page that they name.

Headings become anchors as in mkdocs; the part of docs/cli.md that the site generates has no links from elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "src", "benchmarks", "tests", "examples")
FILES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.md"))])
CODE = re.compile(r"^```.*?^```$|^(?: {4}).*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
EXTERNAL = ("https://", "http://", "mailto:")


def anchor(heading: str) -> str:
    """A heading's anchor, as Python-Markdown makes it."""
    text = re.sub(r"`|\*|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(text: str) -> set[str]:
    """All anchors of a page; a repeated heading has _1, _2, ... behind it."""
    found: set[str] = set()
    for heading in HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        name, count = anchor(heading), 0
        while (name if not count else f"{name}_{count}") in found:
            count += 1
        found.add(name if not count else f"{name}_{count}")
    return found


def broken(file: Path, text: str) -> list[str]:
    """Links of `text`, as if it stood in `file`, that lead nowhere."""
    found: list[str] = []
    for target in LINK.findall(CODE.sub("", text)):
        path, _, fragment = target.partition("#")
        page = (file.parent / path) if path else file
        if target.startswith(EXTERNAL):
            continue
        if not page.exists() or (
            fragment
            and page.suffix == ".md"
            and fragment not in anchors(text if page == file else page.read_text(encoding="utf-8"))
        ):
            found.append(target)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(file: Path) -> None:
    assert not broken(file, file.read_text(encoding="utf-8"))


def test_pages_of_the_site_link_within_it() -> None:
    docs = ROOT / "docs"
    outside = [
        (page.name, target)
        for page in docs.glob("**/*.md")
        for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if not target.startswith(EXTERNAL) and docs not in (page.parent / target).resolve().parents
    ]
    assert not outside


def test_every_page_but_history_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")}
    history = {page for page in pages if page == "log.md" or page.startswith("decisions/")}
    assert {page for page in pages if re.search(rf": {re.escape(page)}$", listed, re.M)} == pages - history


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Two words\n\n## `code`, and more: 3 %\n\n## Two words\n")
    text = "[a](page.md) [b](page.md#two-words) [c](page.md#code-and-more-3) [d](page.md#two-words_1) [e](https://example.org/x)\n"
    assert broken(tmp_path / "other.md", text + "`[f](gone.md)`\n```\n[g](gone.md)\n```\n") == []
    assert broken(tmp_path / "other.md", "[a](gone.md) ![b](no.png) [c](page.md#three)") == ["gone.md", "no.png", "page.md#three"]
    assert broken(page, "# One\n[a](#one) [b](#two)") == ["#two"]
