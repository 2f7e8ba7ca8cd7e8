"""A scatter chart with two logarithmic axes as SVG text: labelled points, and a staircase under which no point lies.

Labels are placed one after the other, each where it covers the least of what is there: points, staircase and earlier labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, cos, floor, hypot, log2, log10, pi, sin

WIDTH, HEIGHT = 900, 560
LEFT, RIGHT, TOP, BOTTOM = 78, 30, 84, 64  # margins around the plot
FONT = 13
CHAR_WIDTH = 8.6  # of the widest font that viewers fall back to, on average
INK, PALE, GRID, ACCENT = "#1f2933", "#8a94a0", "#e7eaee", "#0b66c3"
REACHES = (14, 22, 34, 48, 64)  # how far from its point a label may stand, in pixels

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """One labelled point; smaller is better on both axes."""

    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Axes:
    """From values to pixels: powers of two along x, powers of ten up y."""

    points: Sequence[Point]

    @property
    def x_range(self) -> tuple[float, float]:
        """Exponents of two at the left and right edge."""
        return log2(min(p.x for p in self.points)) - 0.25, log2(max(p.x for p in self.points)) + 0.25

    @property
    def y_range(self) -> tuple[float, float]:
        """Exponents of ten at the lower and upper edge."""
        return floor(log10(min(p.y for p in self.points))), ceil(log10(max(p.y for p in self.points)) + 0.04)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of (x, y)."""
        (left, right), (low, high) = self.x_range, self.y_range
        across = (log2(x) - left) / (right - left)
        up = (log10(y) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def undominated(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats on both axes, from left to right."""
    return sorted((p for p in points if not any(_beats(q, p) for q in points)), key=lambda p: p.x)


def _beats(a: Point, b: Point) -> bool:
    return a.x <= b.x and a.y <= b.y and (a.x, a.y) != (b.x, b.y)


def chart(points: Sequence[Point], *, title: str, subtitle: str, x_title: str, y_title: str) -> str:
    """The chart as the text of an SVG file."""
    axes, frontier = Axes(points), undominated(points)
    stairs = _staircase([axes.at(p.x, p.y) for p in frontier])
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in stairs)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 34, title, size=19, weight="600"),
        _text(LEFT, 58, subtitle, colour=PALE),
        *_grid(axes),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_title, anchor="middle"),
        f'<g transform="translate(20 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">{_text(0, 0, y_title, anchor="middle")}</g>',
        f'<polyline points="{path}" fill="none" stroke="{ACCENT}" stroke-opacity="0.35" stroke-width="2"/>',
        *_labels(points, axes, frontier, stairs),
        *(_dot(*axes.at(p.x, p.y), ACCENT if p in frontier else PALE) for p in points),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _staircase(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Right from each corner to below the next, then down to it."""
    stairs = [corners[0]]
    for x, y in corners[1:]:
        stairs += [(x, stairs[-1][1]), (x, y)]
    return stairs


def _grid(axes: Axes) -> Iterator[str]:
    (left, right), (low, high) = axes.x_range, axes.y_range
    for k in range(ceil(left), floor(right) + 1):
        x, _ = axes.at(2.0**k, 10.0**low)
        yield _line((x, TOP), (x, HEIGHT - BOTTOM), GRID)
        yield _text(x, HEIGHT - BOTTOM + 20, f"{2**k:g}", anchor="middle")
    for k in range(int(low), int(high) + 1):
        _, y = axes.at(2.0**left, 10.0**k)
        yield _line((LEFT, y), (WIDTH - RIGHT, y), GRID)
        yield _text(LEFT - 10, y + 4, f"{100 * 10.0**k:g} %", anchor="end")


def _labels(points: Sequence[Point], axes: Axes, frontier: Sequence[Point], stairs: Sequence[tuple[float, float]]) -> Iterator[str]:
    taken = [_around(*axes.at(p.x, p.y), 9) for p in points]
    taken += [_spanning(a, b) for a, b in pairwise(stairs)]
    for p in sorted(points, key=lambda p: p.y):
        at = axes.at(p.x, p.y)
        box = min(_places(at, CHAR_WIDTH * len(p.label)), key=lambda place: _cost(place, at, taken))
        taken.append(box)
        end = (min(max(at[0], box[0]), box[2]), min(max(at[1], box[1]), box[3]))  # the nearest place on the box
        if hypot(end[0] - at[0], end[1] - at[1]) > 16:
            yield _line(at, end, PALE)
        weight = "600" if p in frontier else "400"
        yield _text((box[0] + box[2]) / 2, box[3] - 4, p.label, anchor="middle", weight=weight)


def _places(at: tuple[float, float], width: float) -> Iterator[Box]:
    """Boxes for a label, nearest first, all around its point and within the plot."""
    height = FONT + 4
    for reach in REACHES:
        for turn in range(16):
            x = at[0] + cos(turn * pi / 8) * (reach + width / 2)
            y = at[1] - sin(turn * pi / 8) * (reach + height / 4)
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            if box[0] > LEFT and box[2] < WIDTH - 4 and box[1] > TOP and box[3] < HEIGHT - BOTTOM:
                yield box


def _cost(box: Box, at: tuple[float, float], taken: Sequence[Box]) -> float:
    covered = sum(_overlap(box, other) for other in taken)
    return 50 * covered + hypot((box[0] + box[2]) / 2 - at[0], 2 * ((box[1] + box[3]) / 2 - at[1]))


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _around(x: float, y: float, radius: float) -> Box:
    return (x - radius, y - radius, x + radius, y + radius)


def _spanning(a: tuple[float, float], b: tuple[float, float]) -> Box:
    return (min(a[0], b[0]) - 2, min(a[1], b[1]) - 2, max(a[0], b[0]) + 2, max(a[1], b[1]) + 2)


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" stroke="#ffffff" stroke-width="1.5"/>'


def _line(a: tuple[float, float], b: tuple[float, float], colour: str) -> str:
    return f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, size: int = FONT, anchor: str = "start", weight: str = "400", colour: str = INK) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
