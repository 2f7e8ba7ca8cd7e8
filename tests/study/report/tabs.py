"""A page in a real browser, for tests: Chromium, as Debian has it, driven by playwright."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from paredown.study.report.page import write
from paredown.study.report.record import Record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root


class Tab:
    """A page, and what it said on the console."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, "offline": url.startswith("file:"), **options}
        )
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.goto(url)

    def text(self, selector: str) -> str:
        """What a reader sees there, blanks alike."""
        return self.page.inner_text(selector).replace("\u00a0", " ")

    def picked(self) -> str:
        """The label on the chart."""
        found = [
            self.page.locator("#frontier-chart text").nth(i).text_content()
            for i in range(self.page.locator("#frontier-chart text").count())
        ]
        return next((text.removeprefix("picked: ") for text in found if text.startswith("picked: ")), "")

    def close(self) -> None:
        """Nothing was said, and nothing but the page was asked for."""
        self.context.close()
        assert self.said == []


def opened(browser: Any, made: Record, folder: Path, **options: Any) -> Tab:
    """The page of a record, as a file."""
    write(made, folder / "report.html")
    return Tab(browser, (folder / "report.html").as_uri(), **options)
