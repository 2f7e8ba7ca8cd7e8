"""The page: one file, nothing of the data is markup, colours that can be read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paredown.errors import ReportError
from paredown.study.report.page import SCRIPTS, asset, drawn, embedded, render, script, style, write
from paredown.study.report.record import Record
from tests.study.report.made import HOSTILE, record, trial

ROLES = (
    "weight",
    "gradient",
    "moment1",
    "moment2",
    "master",
    "residue",
    "activation",
    "error",
    "buffer",
    "input",
    "temporary",
    "libraries",
)


class Elements(HTMLParser):
    """The elements of a page as a browser's parser would see them, scripts and styles as raw text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.raw: dict[str, str] = {}
        self.last: dict[str, str | None] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.last = dict(attrs)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")
        self.last = {}

    def handle_data(self, data: str) -> None:
        kind = "record" if self.last.get("id") == "record" else self.tags[-1] if self.tags else ""
        self.raw[kind] = self.raw.get(kind, "") + data


def test_a_hostile_name_adds_no_element_and_no_attribute() -> None:
    plain, hostile = Elements(render(record())), Elements(render(record(HOSTILE, HOSTILE)))
    assert hostile.tags == plain.tags
    assert [name for name, _ in hostile.attributes] == [name for name, _ in plain.attributes]
    assert not [name for name, _ in hostile.attributes if name.startswith("on")]


def test_the_data_of_a_page_is_the_record() -> None:
    made = record(HOSTILE, HOSTILE)
    text = embedded(drawn(made))
    assert not set("<>&\u2028\u2029") & set(text)
    value = json.loads(text)
    assert value.pop("summaries") == [made.studies[0].summary()]
    assert Record.from_json(value) == made
    assert text in render(made)


def test_a_marker_in_the_data_is_not_filled_in() -> None:
    page = render(Record("{{script}} {{data}}"))
    assert page.count("{{script}} {{data}}") == 3, "in the head, in the heading and in the data"
    assert page.count(script()) == 1


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = render(record())
    links = [value for name, value in Elements(page).attributes if name in ("src", "href", "action", "data", "poster")]
    assert sorted(set(links)) == ["#main", "data:,"]
    assert "@import" not in style()
    assert "url(" not in style().replace("url(#hatch)", "")
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|sendBeacon)\b", script())


def test_scripts_make_text_and_never_markup() -> None:
    words = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "DOMParser",
        'setAttribute("style"',
    )
    assert not [word for word in words if word in script()]


def test_the_policy_allows_this_script_and_this_style_alone() -> None:
    found = Elements(render(record()))
    policy = next(value or "" for name, value in found.attributes if name == "content" and "default-src" in (value or ""))
    for kind in ("script", "style"):
        text = found.raw[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    assert "connect-src 'self'" in unescape(render(record(), live="events"))


def test_a_page_is_small() -> None:
    assert len(render(Record("nothing"))) < 90_000
    assert len(render(record())) < 200_000


def test_a_reader_without_scripts_sees_the_sentences() -> None:
    plain = re.search(r"<noscript>(.*)</noscript>", render(record("a < b")), re.DOTALL)
    assert plain is not None
    assert "<h2>a &lt; b</h2>" in plain[1]
    assert "It has the least error" in plain[1]


def test_no_path_is_in_a_page() -> None:
    page = render(Record.of_trials(str(Path(__file__)), [trial("lpmm", reason=f"{__file__}: no")]))
    assert str(Path(__file__).parent) not in page
    assert str(Path.home()) not in page


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write(record(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(record())
    with pytest.raises(ReportError, match=r"report\.html cannot be written: "):
        write(record(), tmp_path / "no" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_package_carries_its_files() -> None:
    for name in ("page.html", "page.css", *SCRIPTS):
        assert asset(name).strip()
        assert len(asset(name).splitlines()) <= 400


# --- colours: WCAG 2, level AA --------------------------------------------------------------------------------------


def palette(theme: str) -> dict[str, str]:
    """The colours of a theme by name."""
    start = style().index(':root[data-theme="dark"]') if theme == "dark" else 0
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", style()[start : style().index("}", start)]))


def luminance(colour: str) -> float:
    """Relative luminance, by its definition."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Of two colours: 1 to 21."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_lines_can_be_read(theme: str) -> None:
    colours = palette(theme)
    for text in ("ink", "soft", "accent", "bad"):
        for ground in ("bg", "panel"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for role in ROLES:
        assert contrast(colours["ink"], colours[role]) >= 4.5, role
    for line in ("accent", "mark", "soft"):
        assert contrast(colours[line], colours["bg"]) >= 3, line


def test_roles_differ_by_more_than_colour() -> None:
    rows = dict(re.findall(r"(\w+): (null|\"[^\"]*\")", re.search(r"TEXTURES = \{(.*?)\};", script(), re.DOTALL)[1]))
    assert set(rows) == set(ROLES)
    common = ("weight", "gradient", "moment1", "moment2", "activation", "temporary", "input", "residue")
    assert len({rows[role] for role in common}) == len(common)
