"""Fixtures of the tests in a browser; where playwright or Chromium is missing, these tests are counted skips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.study.report.made import record
from tests.study.report.tabs import CHROMIUM, OPTIONS, Tab, opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of a file."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield made
        made.close()


@pytest.fixture
def tab(browser: Any, tmp_path: Path) -> Iterator[Tab]:
    """The page of a record that has every part, as a file."""
    made = opened(browser, record(), tmp_path)
    yield made
    asked = [url for url in made.asked if not url.startswith("data:")]
    made.close()
    assert asked == [(tmp_path / "report.html").as_uri()], "the page loads nothing else"
