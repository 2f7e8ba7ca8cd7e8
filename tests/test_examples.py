"""The examples run from end to end at the size of a CPU, as programs; in `make test-all` their notebooks run as well, cell by cell."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import run_script
from tests.test_site import SITE

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDED = {
    "hugging_face": ("transformers", "accelerate"),
    "sft": ("trl", "peft"),
    "diffusion": ("diffusers", "peft"),
    "sweep": ("sqlalchemy", "typer"),
}


def printed(name: str, *arguments: str, cwd: Path) -> str:
    """What an example prints into a pipe; it must not warn."""
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    ran = run_script(EXAMPLES / f"{name}.py", *arguments, cwd=cwd)
    assert ran.status == 0, ran.err
    assert name in {"hugging_face", "sft"} or not ran.err  # what attach decides is logged
    return ran.out


def losses(text: str) -> list[float]:
    """The losses in the lines of a training."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", text, re.MULTILINE)]


def test_a_cnn_within_a_budget(tmp_path: Path) -> None:
    text = printed("cnn", "--budget", "50%", cwd=tmp_path)
    sizes = re.search(r"baseline: ([\d.]+) MiB.*\nwithin 50%: ([\d.]+) MiB predicted", text)
    assert sizes and float(sizes[2]) <= float(sizes[1]) / 2 + 0.05
    assert (tmp_path / "plan.json").is_file() and losses(text)[-1] < losses(text)[0]


def test_segmentation_takes_fewer_bytes_with_fewer_bits_and_learns(tmp_path: Path) -> None:
    text = printed("segmentation", cwd=tmp_path)
    sizes = [float(size) for size in re.findall(r"([\d.]+) MiB at the peak", text)]
    assert len(sizes) == 3 and sizes == sorted(sizes, reverse=True) and sizes[1] < 0.6 * sizes[0]
    assert losses(text)[-1] < losses(text)[0]


def test_a_vit_with_rules_by_the_names_of_timm(tmp_path: Path) -> None:
    text = printed("vit", cwd=tmp_path)
    sizes = re.search(r"peak: ([\d.]+) MiB unmodified, ([\d.]+) under the plan", text)
    assert sizes and float(sizes[2]) < 0.6 * float(sizes[1])
    assert losses(text)[-1] < losses(text)[0]


def test_a_gpt_in_one_go_and_in_two_has_the_same_bits(tmp_path: Path) -> None:
    assert printed("gpt", cwd=tmp_path).endswith("resumed at step 10: the same bits\n")


def test_a_fine_tune_is_read_back(tmp_path: Path) -> None:
    text = printed("hugging_face", cwd=tmp_path)
    sizes = re.search(r"predicted peak: ([\d.]+) MiB of the baseline, ([\d.]+) MiB under the plan", text)
    assert sizes and float(sizes[2]) < 0.6 * float(sizes[1])
    assert len(losses(text)) == 3
    assert text.endswith("from_pretrained gives the same weights\n")


def test_the_base_of_a_diffusion_transformer_is_small(tmp_path: Path) -> None:
    text = printed("diffusion", cwd=tmp_path)
    sizes = re.search(r"weights: ([\d.]+) MiB instead of ([\d.]+)", text)
    assert sizes and float(sizes[1]) < 0.25 * float(sizes[2])
    assert len(losses(text)) == 2


def test_a_format_study_has_a_row_for_each(tmp_path: Path) -> None:
    text = printed("format_study", cwd=tmp_path)
    found = [float(loss) for loss in re.findall(r"^\w.* (\d+\.\d{3})$", text, re.MULTILINE)]
    assert len(found) == 7 and found[5] > found[0], "4 bits lose"


@pytest.mark.full  # two processes import all that they use
def test_two_workers_share_a_sweep(tmp_path: Path) -> None:
    text = printed("sweep", cwd=tmp_path)
    assert "ended with 0 and 0" in text and "6 of 6 finished" in text and text.count("error 0.") == 6


def test_an_example_without_its_packages_says_so_and_fails(tmp_path: Path) -> None:
    if find_spec("diffusers"):
        pytest.skip("diffusers is there")
    ran = run_script(EXAMPLES / "diffusion.py", cwd=tmp_path)
    assert ran.status == 1 and ran.err.startswith("Skipped: this example needs diffusers")


def test_examples_are_short_have_two_sizes_and_say_what_they_show() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SITE.EXAMPLES)
    for name in SITE.EXAMPLES:
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert len(lines) <= 120 and lines[0].startswith('"""A ') and lines[0].endswith(".")
        assert any(f"python {name}.py" in line for line in lines) and any("--size" in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("name", SITE.EXAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs_cell_by_cell(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher", "-f", "kernel.json"])  # as in Jupyter
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in SITE.notebook(name)["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], name, "exec"), namespace)
