"""The table of docs/scaling.md is the one that benchmarks/scaling.py computes."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_is_computed() -> None:
    script, page = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py")), (ROOT / "docs" / "scaling.md").read_text()
    lines = script["table"](script["DECODERS"][0])
    assert len(lines) == 2 + 2 * 5
    assert "\n".join(lines) in page


def test_parameters_are_those_of_llama_3() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"))
    counts = [sum(slot.numel for slot in script["step_of"](decoder).slots) // 4 for decoder in script["DECODERS"]]
    assert counts == [8_030_261_248, 70_553_706_496]
