"""The demos run from end to end: numbers that agree, a chart that is well-formed and shows every format."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.scripts import run_script

pytest.importorskip("rich")
EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(script: str, *arguments: str, cwd: Path, apart: bool = False) -> str:
    """What an example prints into a pipe 80 characters wide; it must not warn."""
    ran = run_script(EXAMPLES / script, *arguments, cwd=cwd, apart=apart, COLUMNS="80")
    assert ran.status == 0, ran.err
    assert not ran.err
    return ran.out


@pytest.mark.full
def test_the_demo_measures_what_it_predicts(tmp_path: Path) -> None:
    text = printed("activations.py", "--steps", "4", cwd=tmp_path, apart=True)
    assert "\x1b" not in text and "\r" not in text, "a pipe gets plain text"
    rows = re.findall(r"^(baseline|\d bits) +([\d.]+) MiB +([\d.]+) MiB +([\d.]+) MiB +[\d.]+% +\d+ ms$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["baseline", "8 bits", "4 bits", "2 bits"]
    for _, measured, predicted, _ in rows:
        assert float(measured) == pytest.approx(float(predicted), abs=0.02), "small tensors are unmodified: 0.01 MiB"
    assert all(float(a[1]) > float(b[1]) and float(a[3]) > float(b[3]) for a, b in pairwise(rows)), "fewer bits, fewer bytes"
    for said in ("layer1.0.conv1:input", "Saved: activations", "Cost: ", "pare.trace_step(model"):
        assert said in text
    assert max(len(line) for line in text[text.index("stored,") :].splitlines()) <= 80


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


def test_a_cnn_within_a_budget(tmp_path: Path) -> None:
    text = printed("cnn.py", "--steps", "2", "--budget", "50%", cwd=tmp_path)
    sizes = re.search(r"baseline: ([\d.]+) MiB.*\nwithin 50%: ([\d.]+) MiB predicted", text)
    assert sizes and float(sizes[2]) <= float(sizes[1]) / 2 + 0.05
    assert (tmp_path / "plan.json").is_file()


def test_a_gpt_in_one_go_and_in_two_has_the_same_bits(tmp_path: Path) -> None:
    assert printed("gpt.py", "--steps", "4", cwd=tmp_path).endswith("resumed at step 2: the same bits\n")


def test_a_fine_tune_is_read_back(tmp_path: Path) -> None:
    for library in ("transformers", "accelerate"):
        pytest.importorskip(library)
    text = printed("hugging_face.py", "--steps", "5", cwd=tmp_path)
    sizes = re.search(r"predicted peak: ([\d.]+) MiB of the baseline, ([\d.]+) MiB under the plan", text)
    assert sizes and float(sizes[2]) < 0.6 * float(sizes[1])
    assert re.search(r"^step 5: loss [\d.]+, optimizer [\d.]+ MiB$", text, re.MULTILINE)
    assert text.endswith("from_pretrained gives the same weights\n")


def test_a_format_study_has_a_row_for_each(tmp_path: Path) -> None:
    text = printed("format_study.py", "--steps", "1", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^\w.* (\d+\.\d{3})$", text, re.MULTILINE)]
    assert len(losses) == 7 and losses[0] != losses[5], "4 bits change the first loss"


def test_a_sweep_without_ray_says_so_and_elsewhere_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    if not find_spec("ray"):
        assert "pip install 'paredown[ray]'" in printed("ray_sweep.py", cwd=tmp_path)
    words = ("ray_sweep.py", "--engine", "inline", "--steps", "3")
    text = printed(*words, cwd=tmp_path)
    assert "6 trials were run\ndigits: 6 of 6 finished" in text and text.count("error 0.") == 6
    assert "0 trials were run" in printed(*words, cwd=tmp_path), "the store has all of them"


def test_examples_are_short_and_say_what_they_show() -> None:
    for name in ("cnn", "gpt", "hugging_face", "sft", "format_study", "ray_sweep"):
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert len(lines) < 80 and lines[0].startswith('"""A ') and lines[0].endswith('"""')
