"""Heat maps are SVG that can be read, with every number in its place and missing ones as dots."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from heatmap import LEFT, TOP, Dots, Map, colour, draw, draw_dots

SVG = "{http://www.w3.org/2000/svg}"


def cells(text: str) -> dict[tuple[int, int], str]:
    """Colours by the corner of a cell."""
    found: dict[tuple[int, int], str] = {}
    for path in ElementTree.fromstring(text).iter(f"{SVG}path"):
        for x, y in re.findall(r"M(\d+) (\d+)h\d+v", path.get("d", "")):
            found[int(x), int(y)] = path.get("fill", "")
    return found


def test_every_number_has_its_colour() -> None:
    values = np.array([[0.0, 0.5, 1.0], [2.0, np.nan, 0.25]])
    text = draw(Map("A & B", ["first", "<second>"], ["x", "y", "z"], values, top=1.0, unit="lost"), cell=(10, 20))
    found = cells(text)
    assert found == {
        (LEFT, TOP): colour(0.0), (LEFT + 10, TOP): colour(0.5), (LEFT + 20, TOP): colour(1.0),
        (LEFT, TOP + 20): colour(1.0), (LEFT + 20, TOP + 20): colour(0.25),
    }  # fmt: skip
    said = [part.text for part in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert {"A & B", "first", "<second>", "x", "z", "1 or more: lost"} <= set(said)


def test_groups_are_named_once() -> None:
    text = draw(Map("t", ["r"], ["a", "b", "c"], np.zeros((1, 3)), 1.0, ["low", "low", "high"]))
    said = [part.text for part in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert said.count("low") == said.count("high") == 1 and "a" not in said


def test_dots_lie_by_their_numbers() -> None:
    series = {"one": [(5.0, 0.2, 0.1, "p"), (6.0, 0.4, 0.1, "q")], "two": [(5.0, 0.1, 0.0, "r")]}
    tree = ElementTree.fromstring(draw_dots(Dots("t", "bits", "lost", series, top=0.5)))
    places = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in tree.iter(f"{SVG}circle")]
    (x1, y1), (x2, y2), _, (x3, y3), _ = places
    assert x1 == x3 < x2 and y2 < y1 < y3, "larger numbers lie higher"
    assert abs((y1 - y2) - 2 * (y3 - y1)) < 0.5
