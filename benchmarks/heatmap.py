"""Heat maps as SVG, with nothing but text: a cell for each number, one path for each colour.

Colours go from white over yellow and red to black; a missing number is a grey dot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
STOPS = ((255, 255, 255), (254, 224, 139), (244, 109, 67), (165, 0, 38), (30, 0, 10))
NUM_COLOURS = 32
FONT = "font-family='sans-serif' font-size='{}'"
LEFT, TOP, LEGEND = 150, 30, 60
LEAST = 400  # pixels right of LEFT, for title and legend


@dataclass(frozen=True)
class Map:
    """What a heat map shows: values from 0 to `top`, what is above is drawn as `top`."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Array
    top: float
    groups: Sequence[str] = ()  # of neighbouring columns: their labels stand below, and those of columns do not
    unit: str = ""


def colour(share: float) -> str:
    """Of a number from 0 to 1.

    >>> colour(0.0), colour(1.0)
    ('#ffffff', '#1e000a')
    """
    place = min(max(share, 0.0), 1.0) * (len(STOPS) - 1)
    at = min(int(place), len(STOPS) - 2)
    mixed = [round(a + (b - a) * (place - at)) for a, b in zip(STOPS[at], STOPS[at + 1], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def draw(of: Map, *, cell: tuple[int, int] = (8, 14)) -> str:
    """The picture."""
    wide, high = cell
    width, bottom = LEFT + max(wide * len(of.columns), LEAST) + 20, TOP + high * len(of.rows)
    below = 46 if of.groups else 12 + int(6 * max(len(name) for name in of.columns))
    parts = [text(LEFT, 18, of.title, size=13)]
    parts += [text(LEFT - 6, TOP + high * i + high - 3, name, anchor="end") for i, name in enumerate(of.rows)]
    parts += _cells(of, wide, high)
    parts += _group_labels(of, wide, bottom) if of.groups else _column_labels(of, wide, bottom)
    parts += _legend(of, bottom + below)
    return picture(width, bottom + below + LEGEND - 20, parts)


def _cells(of: Map, wide: int, high: int) -> list[str]:
    """Cells of one colour in one path, missing ones as dots."""
    paths: dict[str, list[str]] = defaultdict(list)
    dots: list[str] = []
    for (i, j), value in np.ndenumerate(of.values):
        x, y = LEFT + wide * j, TOP + high * i
        if np.isnan(value):
            dots.append(f"M{x + wide / 2 - 1:g} {y + high / 2:g}h2")
            continue
        step = round(min(max(value / of.top, 0.0), 1.0) * NUM_COLOURS) / NUM_COLOURS
        paths[colour(step)].append(f"M{x} {y}h{wide}v{high}h-{wide}z")
    filled = [f"<path fill='{fill}' d='{''.join(found)}'/>" for fill, found in paths.items()]
    lines = f"<path stroke='#999' stroke-width='2' d='{''.join(dots)}'/>" if dots else ""
    frame = (
        f"<rect x='{LEFT}' y='{TOP}' width='{wide * len(of.columns)}' height='{high * len(of.rows)}' fill='none' stroke='#888'/>"
    )
    return [*filled, lines, frame]


def _column_labels(of: Map, wide: int, bottom: int) -> list[str]:
    places = [LEFT + wide * j + wide / 2 + 3 for j in range(len(of.columns))]
    turned = [f"transform='rotate(-90 {x:g} {bottom + 5})'" for x in places]
    return [text(x, bottom + 5, name, anchor="end", more=t) for x, name, t in zip(places, of.columns, turned, strict=True)]


def _group_labels(of: Map, wide: int, bottom: int) -> list[str]:
    """A label under each run of equal groups, and lines between them."""
    starts = [j for j in range(len(of.groups)) if j == 0 or of.groups[j] != of.groups[j - 1]]
    ends = [*starts[1:], len(of.groups)]
    lines = "".join(f"M{LEFT + wide * j} {TOP}V{bottom + 4}" for j in starts[1:])
    labels = [
        text(LEFT + wide * (a + b) / 2, bottom + 16, of.groups[a], anchor="middle") for a, b in zip(starts, ends, strict=True)
    ]
    return [f"<path stroke='#888' stroke-width='0.7' d='{lines}'/>", *labels]


def _legend(of: Map, y: int) -> list[str]:
    steps = [(LEFT + 8 * k, colour(k / 20)) for k in range(21)]
    boxes = [f"<rect x='{x}' y='{y}' width='8' height='10' fill='{fill}'/>" for x, fill in steps]
    ends = [text(LEFT - 6, y + 9, "0", anchor="end"), text(LEFT + 174, y + 9, f"{of.top:g} or more: {of.unit}")]
    return [*boxes, *ends]


def text(x: float, y: float, said: str, *, size: int = 10, anchor: str = "start", more: str = "") -> str:
    """A line of text."""
    return f"<text x='{x:g}' y='{y:g}' {FONT.format(size)} text-anchor='{anchor}' {more}>{escape(said)}</text>"


def picture(width: float, height: float, parts: Sequence[str]) -> str:
    """The whole file."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:g}' height='{height:g}' viewBox='0 0 {width:g} {height:g}'>"
    return "\n".join([head, f"<rect width='{width:g}' height='{height:g}' fill='#fff'/>", *filter(None, parts), "</svg>\n"])
