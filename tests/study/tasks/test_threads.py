"""Threads that suit the sizes: one for small tensors, what torch would take for large ones, and the user's choice stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paredown.plan.plan import Plan
from paredown.study.sweeps.sweep import TrialSpec
from paredown.study.tasks import threads
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.threads import CHOSEN_BY_USER, VALUES_PER_THREAD, num_threads, suited_threads

SMALL = "digits#model=mlp,steps=2"


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch with four threads that nobody chose."""
    for name in CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [
        ([], 8, 1),
        ([10], 8, 1),
        ([VALUES_PER_THREAD - 1], 8, 1),
        ([3 * VALUES_PER_THREAD], 8, 3),
        ([3 * VALUES_PER_THREAD], 2, 2),
        ([3 * VALUES_PER_THREAD, *[1] * 1000], 8, 2),  # the large one takes the time: a little less than 3
    ],
)
def test_threads_follow_the_sizes(sizes: list[int], most: int, wanted: int) -> None:
    assert num_threads(sizes, most=most) == wanted


def test_a_small_task_takes_one_thread_and_leaves_the_rest_as_it_was(four_threads: None) -> None:
    with suited_threads(find_task(SMALL), "cpu"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


def test_a_large_task_takes_all(four_threads: None) -> None:
    with suited_threads(find_task("digits#model=mlp,width=4096,steps=2"), "cpu"):
        assert torch.get_num_threads() == 4


def test_a_gpu_and_the_users_choice_change_nothing(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with suited_threads(find_task(SMALL), "cuda:0"):
        assert torch.get_num_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    with suited_threads(find_task(SMALL), "cpu"):
        assert torch.get_num_threads() == 4


def test_a_step_that_cannot_be_traced_changes_nothing(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no trace")

    monkeypatch.setattr(threads, "trace_task", fails)
    with suited_threads(find_task(SMALL), "cpu"):
        assert torch.get_num_threads() == 4


def test_trials_of_sweeps_run_with_them(four_threads: None, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    from paredown.study.sweeps import runner

    seen: list[int] = []
    real = runner.evaluate

    def watched(*values: object, **options: object) -> object:
        seen.append(torch.get_num_threads())
        return real(*values, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "evaluate", watched)
    runner.TaskFolder(tmp_path)(TrialSpec(SMALL, Plan(), 0, runner_settings()))  # type: ignore[arg-type]
    assert seen == [1] and torch.get_num_threads() == 4


def runner_settings() -> object:
    """Settings of a trial on the CPU."""
    from paredown.study.sweeps.sweep import TrialSettings

    return TrialSettings(device="cpu")
