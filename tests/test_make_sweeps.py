"""The sweeps behind the priors: the committed files are those that the script writes, and rates are chosen when all were tried."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paredown.plan.plan import Plan
from paredown.sweeps.store import Store
from paredown.sweeps.sweep import EndedTrial, Sweep
from paredown.tasks.trial import Status, Trial

ROOT = Path(__file__).parent.parent
SWEEPS = ROOT / "benchmarks" / "sweeps"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, writing into a folder of the test's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import make_sweeps  # type: ignore[import-not-found]

    monkeypatch.setattr(make_sweeps, "FOLDER", tmp_path)
    yield make_sweeps
    sys.modules.pop("make_sweeps", None)


def test_the_committed_sweeps_are_those_of_the_script(make: Any, tmp_path: Path) -> None:
    make.write_rates()
    make.write_sweeps(make.read_rates(SWEEPS))
    found = {path.name: path.read_text() for path in tmp_path.glob("*.toml")}
    assert found == {path.name: path.read_text() for path in SWEEPS.glob("*.toml")}


def test_a_task_whose_rate_is_not_known_moves_no_other(make: Any, tmp_path: Path) -> None:
    """Image sets stay with the complete rows, superclasses in their half."""
    rates = make.read_rates(SWEEPS)
    left_out = {
        text for text in rates if "sumlast18" in text and ("images:cifar10.npz" in text or text.endswith("superclass=2,width=16"))
    }
    assert len(left_out) == 2
    make.write_sweeps({text: rate for text, rate in rates.items() if text not in left_out})
    for path in tmp_path.glob("*.toml"):
        lines = (SWEEPS / path.name).read_text().splitlines()
        wanted = [
            line for line in lines if not line.startswith("    ") or make.without_rate(json.loads(line.strip(" ,"))) not in left_out
        ]
        assert path.read_text().splitlines() == wanted


def finish(store: Store, errors: dict[str, float], without: Sequence[str] = ()) -> None:
    """Finish all trials but those of some tasks."""
    for claim in store.claim("w", len(errors), without=without):
        text = claim.spec.task
        store.finish("w", EndedTrial(claim, Trial(text, claim.spec.plan, 0, Status.DONE, error=errors[text], loss=1.0)))


def test_rates_are_chosen_when_all_of_a_task_were_tried(make: Any, tmp_path: Path) -> None:
    """Of the first task one rate waits; of the second the middle one was best."""
    texts = [f"images:{data}.npz#batch=4,lr={rate},steps=5" for data in ("a", "b") for rate in (0.1, 0.2, 0.3)]
    errors = dict(zip(texts, (0.5, 0.4, 0.1, 0.3, 0.2, 0.4), strict=True))
    with Store(tmp_path / "t.db") as store:
        store.add("rates_stored", Sweep("rates_stored", tuple(texts), (Plan(),), (0,)).draw())
        finish(store, errors, without=texts[2:3])
        assert make.choose(store) == {"images:b.npz#batch=4": 0.2}
        finish(store, errors)
        assert make.choose(store) == {"images:a.npz#batch=4": 0.3, "images:b.npz#batch=4": 0.2}
