"""The demos run from end to end: numbers that agree, a chart that is well-formed and shows every format."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("rich")
EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(script: str, *arguments: str, cwd: Path) -> str:
    """What an example prints into a pipe 80 characters wide; it must not warn."""
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(EXAMPLES.parent / "src")}
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_the_demo_measures_what_it_predicts(tmp_path: Path) -> None:
    text = printed("activations.py", "--steps", "4", cwd=tmp_path)
    assert "\x1b" not in text and "\r" not in text, "a pipe gets plain text"
    rows = re.findall(r"^(as written|\d bits) +([\d.]+) MiB +([\d.]+) MiB +([\d.]+) MiB +[\d.]+% +\d+ ms$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["as written", "8 bits", "4 bits", "2 bits"]
    for _, measured, predicted, _ in rows:
        assert float(measured) == pytest.approx(float(predicted), abs=0.02), "small tensors stay as they are: 0.01 MiB"
    assert all(float(a[1]) > float(b[1]) and float(a[3]) > float(b[3]) for a, b in pairwise(rows)), "fewer bits, fewer bytes"
    for said in ("layer1.0.conv1:input", "Saved: what waits", "Cost: ", "pare.trace_step(model"):
        assert said in text
    assert max(len(line) for line in text[text.index("waiting,") :].splitlines()) <= 80


def test_the_optimizers_take_what_is_predicted_and_nearest_stalls(tmp_path: Path) -> None:
    text = printed("optimizers.py", "--steps", "8", cwd=tmp_path)
    assert "\x1b" not in text and "\r" not in text, "a pipe gets plain text"
    row = r"^(\w[\w ]*?) +(\d+) KiB +(\d+) KiB +([\d.]+) +[\d.]+% +([\d.]+%|-) +([\d.]+%|-) +\d+ ms$"
    rows = {name: rest for name, *rest in re.findall(row, text, re.MULTILINE)}
    assert list(rows) == ["fp32", "half", "lpmm", "nearest", "nearest x4"]
    assert all(measured == predicted for measured, predicted, *_ in rows.values())
    assert int(rows["lpmm"][0]) < 0.3 * int(rows["fp32"][0])
    losses = {name: float(rest[2]) for name, rest in rows.items()}
    assert abs(losses["lpmm"] - losses["fp32"]) < 0.2 * (losses["nearest"] - losses["fp32"]), "nearest loses most updates"
    assert max(len(line) for line in text[text.index("model memory,") :].splitlines()) <= 80


def test_a_terminal_without_rich_gets_a_line_of_percentages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import activations

    monkeypatch.setattr(activations, "find_spec", lambda name: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with activations.progress(["a", "b"], 2) as report:
        report(0, "loss 1")
        report(1, "loss 1")
    assert capsys.readouterr().out == "\ra  50%   b   0%\ra  50%   b  50%\n\n"


def test_the_formats_are_a_table_and_a_chart(tmp_path: Path) -> None:
    text = printed("formats.py", cwd=tmp_path)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text, "a column is cut off"
    for said in ("int4/64@bf16", "uint4/64@bf16+fp32", "demo/formats.svg"):
        assert said in text
    chart = ElementTree.parse(tmp_path / "demo" / "formats.svg").getroot()
    drawn = {node.text for node in chart.iter("{http://www.w3.org/2000/svg}text")}
    assert {"bf16", "e4m3fn", "mxfp4", "nvfp4", "int2_block"} <= drawn


def test_the_frontier_is_what_no_other_point_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from scatter import Point, undominated

    points = [Point(str((x, y)), x, y) for x in range(1, 6) for y in range(1, 6) if x + y >= 6]
    assert [(p.x, p.y) for p in undominated(points)] == [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)]
    assert undominated([*points, Point("best", 1, 1)]) == [Point("best", 1, 1)]
