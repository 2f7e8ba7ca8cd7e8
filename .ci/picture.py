"""Take the picture of the report for the README. Needs Chromium and Pillow.

    make picture        runs the demo, keeps what the first screen of its page shows in docs/pictures/report.json, and draws that
    .ci/picture.py      draws docs/pictures/report.json again, after a change of the page

The picture has a hash of what it was made from in its metadata; tests/study/report/test_picture.py compares it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from paredown.study.report.page import asset, script, style, write
from paredown.study.report.record import Record

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
DATA, PICTURE = PICTURES / "report.json", PICTURES / "report.png"
MADE_FROM = "made from"  # the name of the hash in the metadata
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, SCALE, COLOURS = 1000, 2, 64
EMBEDDED = re.compile(r'<script type="application/json" id="record">(.*?)</script>', re.DOTALL)


def main() -> None:
    """Keep the first screen of a page, if one is given, and draw it."""
    for page in sys.argv[1:]:
        first_screen(Path(page).read_text(encoding="utf-8")).save(DATA)
    draw(Record.load(DATA))


def first_screen(page: str) -> Record:
    """Return the record of a page without what its first screen does not show."""
    found = EMBEDDED.search(page)
    if found is None:
        raise SystemExit("this is no page of paredown: it has no record.")
    value = json.loads(found[1])
    del value["summaries"]
    record = Record.from_json(value)
    study = record.studies[0]
    shown = {study.written, study.picked}
    marks = tuple(replace(mark, words=()) for mark in study.marks if mark.label in shown)
    kept = tuple(replace(row, slots=(), by_role={}) for row in study.kept if row.label in shown)
    first = replace(study, marks=marks, picks=(), ties=(), kept=kept, notes=())
    runs = tuple(replace(run, curve=()) for run in record.runs if run.plan in shown)
    return Record(record.title, studies=(first,), runs=runs)


def made_from(data: str) -> str:
    """Return the hash of the page's sources and of the record in `data`: the same on all machines, in all browsers."""
    record = Record.from_json(json.loads(data))
    parts = [asset("page.html"), style(), script(), *(study.summary() for study in record.studies), data]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def draw(record: Record) -> None:
    """Write the picture: the page from its top to the end of the first chart."""
    from PIL import Image, PngImagePlugin
    from playwright.sync_api import sync_playwright

    browser = next(path for path in map(shutil.which, BROWSERS) if path)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write(record, Path(folder) / "report.html")
        running = playwright.chromium.launch(executable_path=browser, args=options)
        page = running.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light", device_scale_factor=SCALE)
        page.goto((Path(folder) / "report.html").as_uri())
        height = page.locator("#step").evaluate("node => node.getBoundingClientRect().bottom")
        taken = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        running.close()
    about = PngImagePlugin.PngInfo()
    about.add_text(MADE_FROM, made_from(DATA.read_text(encoding="utf-8")))
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True, pnginfo=about)


if __name__ == "__main__":
    main()
