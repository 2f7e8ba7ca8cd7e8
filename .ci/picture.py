"""Take the picture of the report for the README: `make demo`, then `.venv/bin/python .ci/picture.py`. Needs Chromium and Pillow."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1100, "height": 815}


def main() -> None:
    """The first screen of demo/report.html, in 128 colours."""
    browser = next(path for path in map(shutil.which, BROWSERS) if path)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=options)
        page = running.new_page(viewport=SIZE, color_scheme="light")
        page.goto((ROOT / "demo" / "report.html").as_uri())
        page.wait_for_timeout(800)  # until the chart is drawn
        taken = page.screenshot()
        running.close()
    picture = Image.open(io.BytesIO(taken)).convert("RGB").quantize(128)
    picture.save(ROOT / "docs" / "pictures" / "report.png", optimize=True)


if __name__ == "__main__":
    main()
