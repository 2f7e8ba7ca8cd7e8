"""The chart of memory and error in a real browser: where marks and labels stand, tooltips; and tables on narrow screens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paredown.sizes import say_bytes
from paredown.study.report.record import Record
from tests.study.report.made import ROWS, picked, record, trial
from tests.study.report.tabs import Tab, opened

sync_api = pytest.importorskip("playwright.sync_api")


def record_of(**measured: float) -> Record:
    """The record of a pick whose trials measured these errors; the posterior means are those of ROWS."""
    found = picked()
    points = tuple(replace(point, measured=measured.get(point.label, point.measured)) for point in found.frontier.points)
    return Record.of_pick(replace(found, frontier=replace(found.frontier, points=points)))


def error_at(tab: Tab, y: float) -> float:
    """The error at a height of the window, by the grid lines of the chart and the numbers beside them."""
    lines = tab.page.locator("#frontier-chart line.grid")
    heights = [lines.nth(i).bounding_box()["y"] for i in range(lines.count())]
    texts = [text for text in tab.page.locator("#frontier-chart text").all_text_contents() if text.endswith(" %")]
    values = [float(text.removesuffix(" %")) / 100 for text in texts]
    assert len(values) == len(heights) >= 2
    return values[0] + (y - heights[0]) * (values[-1] - values[0]) / (heights[-1] - heights[0])


def test_marks_stand_at_the_errors_that_plans_are_picked_by_and_filled_ones_were_tried(browser: Any, tmp_path: Path) -> None:
    measured = {"baseline": 0.027, "activations8": 0.017, "lpmm": ROWS["lpmm"][1]}
    tab = opened(browser, record_of(**measured), tmp_path)
    middle = "n => { const box = n.getBoundingClientRect(); return box.top + box.height / 2; }"
    for label, (_, mean, _, _) in ROWS.items():
        group = tab.page.locator(f'[data-label="{label}"]')
        assert error_at(tab, group.locator("circle.dot").evaluate(middle)) == pytest.approx(mean, abs=1e-4)
        assert group.locator("circle.filled").count() == (label in measured)
    assert all(name in tab.text("#frontier-legend") for name in ("tried in trials", "predicted from other tasks, not tried"))
    tab.page.press("#budget", "End")
    statistics = tab.page.text_content("#statistics-said").replace("\u00a0", " ")
    assert "posterior mean of the error 2.00 %, between 1.84 % and 2.16 %; 2.70 % measured in 1 trial" in statistics, (
        "the two are apart"
    )
    tab.close()


def test_the_axes_fit_the_plans_that_matter_and_the_others_are_counted_at_the_edge(browser: Any, tmp_path: Path) -> None:
    errors = {"baseline": 0.05, "activations8": 0.05, "activations4": 0.06, "low": 0.9}
    trials = [trial(label, seed, error=error + 0.001 * seed) for label, error in errors.items() for seed in (0, 1)]
    trials += [trial("lpmm", error=0.06, measured_peak_bytes=2**30)]
    labels = {label: ROWS[label][0] for label in ROWS}
    tab = opened(browser, Record.of_trials("t", trials, labels=labels), tmp_path)
    ticks = [text for text in tab.page.locator("#frontier-chart text").all_text_contents() if text.endswith(" %")]
    assert max(float(tick.removesuffix(" %")) for tick in ticks) < 20, "one bad plan does not squeeze the others"
    assert "At the edge: 1 plan with more error than the chart shows, 1 plan with more memory." in tab.text("#frontier-caption")
    assert tab.page.locator("#frontier-chart [data-label] path.dot").count() == 2
    chart, far = (tab.page.locator(name).bounding_box() for name in ("#frontier-chart svg", '[data-label="lpmm"] .dot'))
    assert chart["x"] < far["x"] < chart["x"] + chart["width"]
    tab.close()


def test_the_legend_of_trials_has_no_posterior(browser: Any, tmp_path: Path) -> None:
    tab = opened(browser, Record.of_trials("t", [trial("baseline"), trial("lpmm")]), tmp_path)
    assert "tried in trials" in tab.text("#frontier-legend")
    assert "posterior" not in tab.page.content().partition('<script type="application/json"')[0]
    tab.close()


def crowded() -> Record:
    """A pick with marks all around the baseline, and left and right of the picked plan."""
    found = picked()
    full, low = found.full_bytes, next(point for point in found.frontier.points if point.label == "low")
    near = [(int(full * (0.97 - 0.03 * i)), 0.0215 + 0.0007 * (i % 3)) for i in range(8)]
    near += [(low.predicted_bytes + int(0.03 * i * full), 0.0315 + 0.0004 * (i % 4)) for i in range(-2, 6)]
    points = [replace(low, label=f"plan {i}", predicted_bytes=nbytes, mean=mean) for i, (nbytes, mean) in enumerate(near)]
    points = tuple(replace(point, on_front=False) for point in points)
    return Record.of_pick(replace(found, frontier=replace(found.frontier, points=(*found.frontier.points, *points))))


@pytest.mark.parametrize("width", [1280, 390])
def test_labels_cover_no_marks(browser: Any, tmp_path: Path, width: int) -> None:
    tab = opened(browser, crowded(), tmp_path, viewport={"width": width, "height": 844})
    box_of = "nodes => nodes.map((n) => n.getBoundingClientRect()).map((b) => [b.left, b.top, b.right, b.bottom])"
    labels = tab.page.locator("#frontier-chart text.halo")
    for key in ("End", "PageDown", "PageDown", "PageDown"):
        tab.page.press("#budget", key)
        texts = labels.evaluate_all(box_of)
        marks = tab.page.locator("#frontier-chart :is(.dot, .ring)").evaluate_all(box_of)
        assert len(marks) > len(crowded().studies[0].marks)
        assert len(texts) == len({tab.picked(), "baseline"})
        chart = tab.page.locator("#frontier-chart").bounding_box()
        for left, top, right, bottom in texts:
            assert chart["x"] <= left <= right <= chart["x"] + chart["width"]
            assert not [m for m in marks if left < m[2] and m[0] < right and top < m[3] and m[1] < bottom], (key, left, top)
    tab.close()


def test_marks_have_tooltips_for_the_mouse(tab: Tab) -> None:
    assert tab.page.locator("svg title").count() == 0, "native tooltips need a mouse, and patience"
    tip = tab.page.locator("[role=tooltip]")
    assert not tip.is_visible()
    for selector, texts in (
        ('[data-label="baseline"] .filled', ("baseline", "2.10 % in 1 trial", "2.00 %", "1.84 % to 2.16 %")),
        ("#memory-bars .tile >> nth=0", ("baseline, weight", say_bytes(record().studies[0].kept[0].by_role["weight"]))),
    ):
        tab.page.locator(selector).last.hover()
        sync_api.expect(tip).to_be_visible()
        assert all(text in tab.text("[role=tooltip]") for text in texts)
        assert tab.page.locator('[aria-describedby="tip"]').count() == 1
    tab.page.locator("#curves-charts").scroll_into_view_if_needed()
    on_line = "n => { const at = n.getPointAtLength(9).matrixTransform(n.getScreenCTM()); return [at.x, at.y + 2]; }"
    tab.page.mouse.move(*tab.page.locator("#curves-charts .line").last.evaluate(on_line))
    sync_api.expect(tip).to_contain_text("seed")
    box = tip.bounding_box()
    tab.page.mouse.move(box["x"] + 5, box["y"] + 5)
    tab.page.wait_for_timeout(200)  # longer than the tooltip stays without a pointer on it
    assert tip.is_visible()
    tab.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_marks_have_tooltips_for_the_keyboard(tab: Tab) -> None:
    tip, focused = (
        tab.page.locator("[role=tooltip]"),
        lambda: tab.page.evaluate("document.activeElement.getAttribute('aria-label')"),
    )
    tab.page.focus("#budget")
    tab.page.keyboard.press("Shift+Tab")
    sizes = {mark.label: mark.nbytes for mark in record().studies[0].marks}
    for label in sorted(sizes, key=lambda label: sizes[label]):
        assert focused() == label
        assert tip.is_visible()
        assert tab.text("[role=tooltip]").startswith(label)
        assert say_bytes(sizes[label]) in tab.text("[role=tooltip]")
        tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("Enter")
    assert tab.picked() == "baseline"
    assert focused() == "baseline", "focus stays on the mark when the chart is drawn again"
    assert tip.is_visible()
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.id") == "budget", "a chart is one tab stop"
    assert not tip.is_visible()


@pytest.mark.parametrize("share", [0.5, 1.4, 9.0])
def test_a_page_of_memory_alone_has_the_verdict_and_the_budget(browser: Any, tmp_path: Path, share: float) -> None:
    study = record().studies[0]
    budget = int(share * (study.full_bytes or 0))
    bare = replace(study, marks=(), picks=(), picked="", budget_bytes=budget, reason="A verdict on this step.")
    tab = opened(browser, replace(record(), studies=(bare,)), tmp_path)
    assert tab.text("#memory-words") == "A verdict on this step."
    assert f"budget {say_bytes(budget)}" in tab.text("#memory-bars")
    bars, line = tab.page.locator("#memory-bars svg").bounding_box(), tab.page.locator("#memory-bars line.budget")
    assert line.count() == (share < 2), "a budget far above all peaks is named only"
    if line.count():
        baseline = next(row for row in study.kept if row.label == "baseline")
        tiles = tab.page.locator('[data-key^="bar:baseline:"]').evaluate_all(
            "nodes => nodes.map((n) => n.getBoundingClientRect().width)"
        )
        expected = bars["x"] + budget / baseline.peak_bytes * sum(tiles)
        assert line.bounding_box()["x"] == pytest.approx(expected, abs=3)
        assert line.bounding_box()["x"] < bars["x"] + bars["width"]
    tab.close()


# --- tables on narrow screens ----------------------------------------------------------------------------------------


def test_a_phone_shows_every_column_of_every_table(browser: Any, tmp_path: Path) -> None:
    tab = opened(browser, record(), tmp_path, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for summary in tab.page.locator("details:visible > summary").all():
        summary.click()
    cells = """nodes => nodes.filter((n) => n.offsetParent).map((n) => [n.innerText, n.getBoundingClientRect()])
        .map(([text, box]) => [text, box.left, box.right])"""
    found = tab.page.locator("tbody :is(th, td), thead button").evaluate_all(cells)
    assert len(found) > 100
    assert [cell for cell in found if cell[1] < 0 or cell[2] > 390] == []
    assert tab.page.evaluate("[...document.querySelectorAll('.scroll')].filter((n) => n.scrollWidth > n.clientWidth).length") == 0
    mark = next(mark for mark in record().studies[0].marks if mark.label == "lpmm")
    row = tab.page.locator("#plans-rows tr:has(th:text-is('lpmm')) td:visible")
    shown = row.evaluate_all("nodes => nodes.map((n) => [getComputedStyle(n, '::before').content.slice(1, -1), n.innerText])")
    shown = {name: text.replace("\u00a0", " ") for name, text in shown}
    assert shown["predicted peak"] == say_bytes(mark.predicted_bytes or 0) != shown["measured peak"] == say_bytes(mark.nbytes)
    assert shown["measured error"] == "2.40 %"
    assert {"interval", "trials", "Pareto front"} < set(shown)
    tab.page.locator("#plans-rows th button", has_text="predicted peak").tap()
    labels = tab.page.locator("#plans-rows tbody th").all_inner_texts()
    sizes = {mark.label: mark.nbytes for mark in record().studies[0].marks}
    assert [label.split()[-1] for label in labels] == sorted(sizes, key=lambda label: sizes[label])
    tab.close()


def test_the_first_column_stays_in_view(browser: Any, tmp_path: Path) -> None:
    tab = opened(browser, record(), tmp_path, viewport={"width": 640, "height": 844})
    tab.page.click("#plans summary")
    region = tab.page.locator(".scroll:has(#plans-rows)")
    region.evaluate("n => { n.scrollLeft = 10000; }")
    assert region.evaluate("n => n.scrollLeft") > 50, "this table is wider than its place"
    box, name = region.bounding_box(), tab.page.locator("#plans-rows tbody th").first.bounding_box()
    assert box["x"] <= name["x"] <= box["x"] + 2
    tab.close()
