"""The picture of the README is one of the page as it is now, and of the demo's network."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from paredown import footprint
from paredown.cli.demo_verb import TASK
from paredown.cli.subject import SubjectOptions, find_subject
from paredown.study.report.page import render
from paredown.study.report.record import Record
from tests.study.report.made import trained

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """.ci/picture.py."""
    spec = importlib.util.spec_from_file_location("picture", ROOT / ".ci" / "picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_was_made_from_this_page_and_its_record(tool: ModuleType) -> None:
    found = re.search(rb"tEXt" + tool.MADE_FROM.encode() + rb"\0([0-9a-f]{64})", tool.PICTURE.read_bytes())
    assert found is not None, "the picture has no hash"
    data = tool.DATA.read_text(encoding="utf-8")
    assert found[1].decode() == tool.made_from(data), "the page changed: run .ci/picture.py, or make picture for new numbers"
    assert tool.made_from(data.replace('"budget_bytes": ', '"budget_bytes": 1', 1)) != tool.made_from(data)


def test_the_picture_shows_the_network_of_the_demo() -> None:
    study = Record.load(ROOT / "docs" / "pictures" / "report.json").studies[0]
    assert set(re.split("[#,]", TASK)) <= set(re.split("[#,]", study.task)), "make picture"
    baseline = next(row for row in study.kept if row.label == study.written)
    foot = footprint(find_subject(study.task, SubjectOptions(device="cpu")).trace())
    assert baseline.peak_bytes == pytest.approx(foot.peak_bytes, rel=0.01), "make picture"


def test_what_is_kept_for_the_picture_has_the_first_screen(tool: ModuleType) -> None:
    kept = tool.first_screen(render(trained()))
    study, full = kept.studies[0], trained().studies[0]
    assert study.summary() == full.summary()
    assert [(row.label, row.phases) for row in study.kept] == [(row.label, row.phases) for row in full.kept]
    assert (study.budget_bytes, kept.runs[0].device) == (full.budget_bytes, trained().runs[0].device)
    assert not kept.runs[0].curve and not study.kept[0].slots
