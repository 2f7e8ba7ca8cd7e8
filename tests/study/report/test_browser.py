"""The page in a real browser: Chromium, as Debian has it, driven by playwright. Where either is missing, counted skips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paredown import Plan
from paredown.sizes import parse_bytes, say_bytes
from paredown.study.report.page import write
from paredown.study.report.record import Record
from paredown.study.tasks.trial import Status
from tests.study.report.made import HOSTILE, ROWS, picked, record, trace, trained, trial
from tests.study.report.tabs import Tab, opened

sync_api = pytest.importorskip("playwright.sync_api")
SIZES = ("B", "KiB", "MiB")


def test_the_page_shows_what_was_picked_and_why(tab: Tab) -> None:
    found = picked()
    assert tab.picked() == found.label == "low"
    assert f"Within {say_bytes(found.budget_bytes)} (50 % of the baseline): “low”, predicted peak" in tab.text("#words")
    assert "about 3.1 %" in tab.text("#words")
    statistics = tab.page.text_content("#statistics-said") or ""
    assert found.reason in statistics
    assert "May be as good: “lpmm”" in statistics
    assert "it was not tried" in statistics


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_first_screen_is_a_sentence_and_a_picture_in_plain_words(browser: Any, tmp_path: Path, size: tuple[int, int]) -> None:
    made = trained()
    tab = opened(browser, made, tmp_path, viewport={"width": size[0], "height": size[1]})
    assert tab.text("#lead") == made.studies[0].summary()
    assert "\u00b1" in tab.text("#lead") and "standard error" in tab.text("#fine")
    chart = tab.page.locator("#step-chart svg").bounding_box()
    assert chart["y"] + chart["height"] <= size[1], "the picture is on the first screen"
    shown = "".join(map(tab.text, ("header", "#step", "#frontier"))).lower()
    assert [word for word in ("posterior", "prior", "interval", "pareto", "deviation") if word in shown] == []
    tab.page.click("#statistics summary")
    assert "intervals are one standard error" in tab.text("#statistics")
    tab.close()


def test_the_statistics_of_a_pick_are_one_click_away(tab: Tab) -> None:
    words = ("posterior", "prior", "interval", "pareto", "deviation")
    shown = "".join(map(tab.text, ("header", "#step", "#frontier"))).lower()
    assert [word for word in words if word in shown] == []
    tab.page.click("#statistics summary")
    assert "posterior mean of the error" in tab.text("#statistics")


def test_memory_over_a_step_has_predicted_lines_measured_peaks_and_the_budget(browser: Any, tmp_path: Path) -> None:
    made = trained()
    study, tab = made.studies[0], opened(browser, made, tmp_path)
    lines = tab.page.locator("#step-chart line.grid")
    ticks = [text for text in tab.page.locator("#step-chart text.soft").all_text_contents() if text.split("\u00a0")[-1] in SIZES]
    heights = [lines.nth(i).bounding_box()["y"] for i in range(lines.count())]
    sizes = [parse_bytes(text.replace("\u00a0", " ")) for text in ticks[: len(heights)]]
    per_pixel = (sizes[-1] - sizes[0]) / (heights[0] - heights[-1])
    at = lambda y: sizes[0] + (heights[0] - y) * per_pixel  # noqa: E731
    tops = "n => { const b = n.getBoundingClientRect(); return [b.top, b.bottom]; }"
    texts = (tab.page.text_content("#step-chart") or "").replace("\u00a0", " ")
    for kind, label in (("before", "baseline"), ("after", "low")):
        row = next(row for row in study.kept if row.label == label)
        mark = next(mark for mark in study.marks if mark.label == label)
        top, _ = tab.page.locator(f"#step-chart .outline.{kind}").evaluate(tops)
        assert at(top) == pytest.approx(row.peak_bytes, abs=3 * per_pixel)
        top, bottom = tab.page.locator(f"#step-chart .peak.{kind}").evaluate(tops)
        assert at((top + bottom) / 2) == pytest.approx(mark.measured_bytes, abs=3 * per_pixel)
        assert f"peak {say_bytes(mark.measured_bytes)}" in texts
        assert f"predicted: {say_bytes(row.peak_bytes)}" in texts
    top, _ = tab.page.locator("#step-chart line.budget").evaluate(tops)
    assert at(top) == pytest.approx(study.budget_bytes, abs=3 * per_pixel)
    assert say_bytes(study.budget_bytes) in (tab.page.get_attribute("#step-chart svg", "aria-label") or "").replace("\u00a0", " ")
    tab.close()


def test_a_page_without_a_budget_invents_none(browser: Any, tmp_path: Path) -> None:
    made = Record.of_trials("t", [trial("baseline"), trial("lpmm")]).with_footprints(trace(), {"baseline": Plan()})
    tab = opened(browser, made, tmp_path)
    assert tab.picked() == "" and tab.text("#budget-said") == "none given"
    assert tab.page.locator("line.budget, text:has-text('budget')").count() == 0
    tab.page.press("#budget", "ArrowLeft")
    assert tab.page.locator("#frontier-chart line.budget").count() == 1, "the reader's own"
    tab.page.click("#asked")
    assert tab.page.locator("line.budget").count() == 0
    tab.close()


def test_plans_that_beat_the_picked_one_are_not_on_the_line_and_the_page_says_why(browser: Any, tmp_path: Path) -> None:
    found = picked(share=0.9)
    points = {point.label: replace(point, measured=point.mean, num_trials=1, step_ratio=2.0) for point in found.frontier.points}
    own = points["activations8"]
    close = {"mean": own.mean - 0.0001, "predicted_bytes": own.predicted_bytes - 10, "measured_bytes": own.predicted_bytes - 10}
    others = [
        replace(own, label="slower", step_ratio=3.0, **close),
        replace(own, label="untried", plan=ROWS["low"][0], num_trials=0, measured=None, **close),
        replace(own, label="chance", **close),
        replace(own, label="no better", predicted_bytes=own.predicted_bytes - 10, measured_bytes=None, mean=own.mean + 0.001),
    ]
    frontier = replace(found.frontier, points=(*points.values(), *others))
    made = Record.of_pick(replace(found, frontier=frontier, plan=own.plan, label=own.label))
    tab, on_front = opened(browser, made, tmp_path), {mark.label for mark in made.studies[0].marks if mark.on_front}
    assert "activations8" in on_front and not on_front & {"slower", "untried", "chance"}
    words = tab.text("#words")
    assert "3 plans with less memory and less error are not taken" in words
    assert "“slower” has slower steps, 3.0x against 2.0x" in words
    assert "“untried” was not tried, its error is only predicted" in words
    assert "“chance” differs by less than chance does" in words
    assert "no better" not in words
    tab.close()


def test_a_measured_peak_above_the_budget_is_said(tab: Tab) -> None:
    tab.page.press("#budget", "PageUp")
    assert tab.picked() == "activations8"
    assert "Its measured peak is 4.00 KiB above this budget." in tab.text("#words")
    tab.page.press("#budget", "ArrowRight")
    assert "above" not in tab.text("#words")


def test_a_difference_within_the_bands_is_called_so(tab: Tab) -> None:
    marks = {mark.label: mark for mark in record().studies[0].marks}
    written = marks["baseline"]
    for label in ("low", "activations8"):
        mark = marks[label]
        is_overlapping = mark.low <= written.high and written.low <= mark.high
        assert tab.picked() == label
        assert ("the intervals overlap" in (tab.page.text_content("#statistics-said") or "")) == is_overlapping
        tab.page.press("#budget", "PageUp")


def test_every_section_is_there(tab: Tab) -> None:
    names = [
        tab.page.locator("section:visible h2").nth(i).inner_text() for i in range(tab.page.locator("section:visible h2").count())
    ]
    expected = ["Memory over one training step", "Memory against error", "Memory at the peak", "Slots", "Trials", "Training curves"]
    assert names == [*expected, "Guard actions", "Asked and given", "Provenance"]
    assert tab.page.locator("nav a").count() == len(names)
    tab.page.click("#contents summary")
    tab.page.click("nav a >> nth=3")
    assert tab.page.evaluate("location.hash") == "#slots" and not tab.page.locator("#nav").is_visible()
    assert "abc123" in tab.text("#made")
    assert "its error rose" in tab.text("#guards")
    assert "the caller holds it" in tab.text("#given")


def test_keys_move_the_budget_and_the_pick(tab: Tab) -> None:
    tab.page.focus("#budget")
    before = tab.text("#budget-said")
    tab.page.keyboard.press("ArrowRight")
    assert tab.text("#budget-said") != before
    tab.page.keyboard.press("End")
    assert tab.picked() == "baseline"
    assert "“baseline”" in tab.text("#words")
    tab.page.keyboard.press("Home")
    assert tab.picked() == ""
    assert "No plan fits" in tab.text("#words")
    assert "no plan fits" in (tab.page.get_attribute("#budget", "aria-valuetext") or "")
    for label in ("low", "activations8", "baseline"):
        tab.page.keyboard.press("PageUp")
        assert tab.picked() == label
    tab.page.keyboard.press("PageUp")
    assert tab.picked() == "baseline", "there is none beyond"
    tab.page.keyboard.press("PageDown")
    assert tab.picked() == "activations8"
    assert tab.page.evaluate("document.activeElement.id") == "budget", "focus stays where it was"


def test_the_mouse_moves_the_budget_and_the_pick(tab: Tab) -> None:
    tab.page.locator("#budget").scroll_into_view_if_needed()
    box = tab.page.locator("#budget").bounding_box()
    y = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + 0.2 * box["width"], y)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] - 4, y, steps=5)
    tab.page.mouse.up()
    assert tab.picked() == "baseline"
    tab.page.click("#asked")
    assert tab.picked() == "low"
    tab.page.locator('[data-label="activations8"] circle').last.click()
    assert tab.picked() == "activations8"


def test_the_slots_are_those_of_the_picked_plan(tab: Tab) -> None:
    assert "Under low:" in tab.text("#slots-caption")
    tab.page.press("#budget", "End")
    assert "Under baseline:" in tab.text("#slots-caption")
    tab.page.press("#budget", "Home")
    tab.page.press("#budget", "PageUp")
    tab.page.fill("#slots-search", "2.2")
    tab.page.select_option("#slots-role", "activation")
    rows = tab.page.locator("#slots-rows tbody tr")
    assert rows.count() >= 1
    assert all("2.2" in rows.nth(i).inner_text() and "activation" in rows.nth(i).inner_text() for i in range(rows.count()))


def test_bars_are_drawn_to_one_scale(tab: Tab) -> None:
    kept = {row.label: row.peak_bytes for row in record().studies[0].kept}
    widths = {
        label: tab.page.locator(f'[data-key^="bar:{label}:"]').evaluate_all(
            "nodes => nodes.reduce((sum, n) => sum + n.width.baseVal.value, 0)"
        )
        for label in ("low", "baseline")
    }
    assert widths["low"] / widths["baseline"] == pytest.approx(kept["low"] / kept["baseline"], rel=0.01)
    assert tab.page.locator("#memory-bars text", has_text="low, picked").count() == 1


def test_any_plan_can_be_compared_with_the_baseline(tab: Tab) -> None:
    tab.page.select_option("#memory-plan", "activations8")
    assert "Under activations8:" in tab.text("#slots-caption")
    assert say_bytes(record().studies[0].kept[-1].peak_bytes) in tab.text("#memory-bars")
    assert tab.picked() == "low", "looking at a plan does not pick it"
    tab.page.press("#budget", "End")
    assert tab.page.input_value("#memory-plan") == "baseline", "the budget leads again"


def test_tables_are_put_in_order_by_keyboard(tab: Tab) -> None:
    head = tab.page.locator("#trials-rows th button", has_text="predicted")
    head.focus()
    tab.page.keyboard.press("Enter")
    column = lambda: [tab.page.locator("#trials-rows tbody tr").nth(i).locator("th, td").first.inner_text() for i in range(3)]  # noqa: E731
    sizes = {run.plan: run.predicted_bytes or 0 for run in record().runs}
    assert column() == sorted(sizes, key=lambda label: sizes[label])
    tab.page.keyboard.press("Enter")
    assert column() == sorted(sizes, key=lambda label: -sizes[label])
    assert tab.page.locator('#trials-rows th[aria-sort="descending"]').count() == 1


def test_what_was_opened_stays_open(tab: Tab) -> None:
    for details in ("#given-all", "#plans"):
        tab.page.click(f"{details} summary")
    tab.page.press("#budget", "PageUp")
    assert tab.page.locator("details[open]").count() == 2
    assert tab.page.locator("#given-rows tbody tr").count() == 2


def test_every_control_has_a_name(tab: Tab) -> None:
    controls = "button, input, select, [role=img], [role=region], [role=progressbar]"
    is_bare = "(n) => !(n.getAttribute('aria-label') || n.textContent.trim() || (n.labels && n.labels.length))"
    bare = tab.page.evaluate(f"[...document.querySelectorAll('{controls}')].filter({is_bare}).map((n) => n.id || n.tagName)")
    assert bare == []


def test_the_baseline_is_called_so_whatever_its_label(browser: Any, tmp_path: Path) -> None:
    labels = {"a32 full": trial("baseline").plan}
    made = Record.of_trials("t", [trial("baseline"), trial("lpmm")], labels=labels).with_footprints(trace(), labels)
    tab = opened(browser, made, tmp_path)
    for place in ("#frontier-chart", "#memory-bars", "#curves-charts", "#trials-rows"):
        assert "baseline (a32 full)" in (tab.page.text_content(place) or "")
    tab.close()


def test_the_slider_shows_step_times(browser: Any, tmp_path: Path) -> None:
    """Of each plan as the budget moves: measured, predicted, or not known."""
    points = {point.label: point for point in picked().frontier.points}
    times = {"low": (0.0123, 1.23, "measured"), "activations8": (None, 1.5, "prior")}
    rows = [
        replace(points[label], step_seconds=seconds, step_ratio=ratio, step_source=source)
        for label, (seconds, ratio, source) in times.items()
    ]
    frontier = replace(picked().frontier, points=(*rows, points["baseline"]))
    tab = opened(browser, Record.of_pick(replace(picked(), frontier=frontier)), tmp_path)
    assert (tab.page.get_attribute("#budget", "aria-valuetext") or "").endswith("low; step time 1.23x the baseline's, 12.3\u00a0ms")
    assert "each step 1.2x as long" in tab.text("#words")
    tab.page.press("#budget", "PageUp")
    assert (tab.page.get_attribute("#budget", "aria-valuetext") or "").endswith("activations8; step time 1.50x the baseline's")
    assert "each step about 1.5x as long" in tab.text("#words")
    tab.page.press("#budget", "PageUp")
    assert tab.picked() == "baseline" and "each step" not in tab.text("#words")
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_and_can_be_changed(browser: Any, tmp_path: Path, scheme: str) -> None:
    tab = opened(browser, record(), tmp_path, color_scheme=scheme)
    ground = lambda: tab.page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    colours = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
    assert ground() == colours.pop(scheme)
    tab.page.click("#theme")
    assert ground() == next(iter(colours.values()))
    tab.close()


def test_a_phone_needs_no_scrolling_sideways(browser: Any, tmp_path: Path) -> None:
    write(
        record("a task with a rather long name, and_one_word_that_is_longer_than_any_line_of_a_phone_could_ever_be"),
        tmp_path / "report.html",
    )
    tab = Tab(browser, (tmp_path / "report.html").as_uri(), viewport={"width": 360, "height": 740}, has_touch=True)
    for details in ("#rules", "#plans"):
        tab.page.click(f"{details} summary")
    width, wide = tab.page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
    assert wide <= width
    small = tab.page.evaluate(
        "[...document.querySelectorAll('main svg text')].filter((n) => parseFloat(getComputedStyle(n).fontSize) < 11).length"
    )
    assert small == 0
    tab.close()


def test_a_hostile_name_stays_text(browser: Any, tmp_path: Path) -> None:
    labels = [replace(one, task=HOSTILE, reason=HOSTILE, device=HOSTILE) for one in picked().trials]
    made = replace(record(HOSTILE, HOSTILE), notes=(HOSTILE,), versions={HOSTILE: HOSTILE}, commit=HOSTILE).with_trials(
        labels, {HOSTILE: picked().plan}
    )
    tab = opened(browser, made, tmp_path)
    assert tab.page.title() == HOSTILE
    assert tab.text("h1") == HOSTILE
    assert HOSTILE in tab.text("#trials")
    assert tab.page.locator("img, main script").count() == 0
    tab.close()


def awkward() -> dict[str, Record]:
    """Records that have little, or values at the edge."""
    lone = Record.of_trials("t", [trial("lpmm", predicted_peak_bytes=0, measured_peak_bytes=0, error=0.0)])
    none = Record.of_trials("t", [trial("lpmm", status=Status.DIVERGED, error=None)])
    sizes = Record.of_trials(
        "t", [trial("lpmm", predicted_peak_bytes=10), trial("baseline", predicted_peak_bytes=2**50, error=1e-9)]
    )
    curve = Record.of_trials("t", [trial("lpmm", curve=((1, 1.0), (2, 1.0))), trial("baseline", curve=((1, -5.0), (2, 1e9)))])
    plans = replace(Record.of_pick(picked()), runs=())
    nothing = Record.of_pick(replace(picked(), plan=None, label="", budget_bytes=1, reason="nothing fits"))
    runs = Record("t").with_trials([trial("lpmm"), trial("baseline")])  # without a study
    found = {
        "empty": Record("t"),
        "runs": runs,
        "lone": lone,
        "none": none,
        "sizes": sizes,
        "curve": curve,
        "plans": plans,
        "nothing": nothing,
    }
    return found | {"kept": replace(record(), studies=(replace(record().studies[0], marks=(), picks=(), picked=""),))}


@pytest.mark.parametrize("name", awkward())
def test_awkward_records_are_drawn_without_complaint(browser: Any, tmp_path: Path, name: str) -> None:
    tab = opened(browser, awkward()[name], tmp_path)
    if tab.page.locator("#budget").count():
        for key in ("Home", "End", "PageDown", "PageUp", "ArrowLeft"):
            tab.page.press("#budget", key)
    drawn = tab.page.content()
    assert "NaN" not in drawn
    assert "undefined" not in tab.text("body")
    tab.close()


def test_a_live_sweep_updates_the_page(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from paredown.study.report.server import Server, open_source
    from paredown.study.sweeps.store import Store
    from paredown.study.sweeps.sweep import EndedTrial
    from tests.support.trials import PLANS, done, draw

    with Store(tmp_path / "trials.db") as store:
        store.add("s", draw(f"noop:{HOSTILE}", seeds=(0, 1), plans=PLANS))
        with Server(open_source(tmp_path / "trials.db"), seconds=0.05) as server:
            tab = Tab(browser, server.url)
            sync_api.expect(tab.page.locator("#live")).to_have_text("live")
            assert "0 of 4 trials finished" in tab.text("#progress")
            for num, claim in enumerate(store.claim("w", 4), 1):
                nbytes = 1000 if claim.spec.plan.rules else 2000
                trial = replace(done(claim.spec), predicted_peak_bytes=nbytes)
                store.finish("w", EndedTrial(claim, trial, host=f"saurus{num % 2}"))
                sync_api.expect(tab.page.locator("#progress")).to_contain_text(f"{num} of 4 trials finished")
                assert tab.page.locator("#trials-rows tbody tr").count() == num
                if num == 1:
                    tab.page.locator("#trials-rows th button", has_text="seed").focus()
                    tab.page.keyboard.press("Enter")
                if num == 2:
                    assert tab.page.evaluate("document.activeElement.textContent") == "seed", "focus stays in a table"
                    assert tab.page.locator("#trials-rows th[aria-sort=ascending]").inner_text().startswith("seed")
                    assert tab.text("#budget-said") == "none given"
                    tab.page.focus("#budget")
                    tab.page.keyboard.press("ArrowLeft")
                    chosen = tab.text("#budget-said").split(",")[0]
            assert tab.text("#budget-said").split(",")[0] == chosen, "what the reader chose is kept"
            assert tab.page.evaluate("document.activeElement.id") == "budget"
            assert tab.page.locator("img").count() == 0
            assert tab.page.title() == "Sweep s"
            assert "finished (UTC)" in tab.text("#trials-rows thead") and "saurus" not in tab.page.content()
            assert {row.split("\t")[-2] for row in tab.text("#trials-rows tbody").splitlines()} == {"host 1", "host 2"}
            assert "Note: mean of 2 seeds, standard error 0.50 points." in (tab.page.text_content("#statistics-said") or "")
            tab.close()
