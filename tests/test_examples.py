"""The demo runs from end to end, and its chart is well-formed and shows every format."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("rich")
EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_demo_prints_a_table_and_draws_it(tmp_path: Path) -> None:
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(EXAMPLES.parent / "src")}
    command = [sys.executable, "-W", "error", str(EXAMPLES / "formats.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "…" not in done.stdout, "a column is cut off"
    for text in ("int4/64@bf16", "uint4/64@bf16+fp32", "demo/formats.svg"):
        assert text in done.stdout
    chart = ElementTree.parse(tmp_path / "demo" / "formats.svg").getroot()
    drawn = {node.text for node in chart.iter("{http://www.w3.org/2000/svg}text")}
    assert {"bf16", "e4m3fn", "mxfp4", "nvfp4", "int2_block"} <= drawn


def test_the_frontier_is_what_no_other_point_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from scatter import Point, undominated

    points = [Point(str((x, y)), x, y) for x in range(1, 6) for y in range(1, 6) if x + y >= 6]
    assert [(p.x, p.y) for p in undominated(points)] == [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)]
    assert undominated([*points, Point("best", 1, 1)]) == [Point("best", 1, 1)]
