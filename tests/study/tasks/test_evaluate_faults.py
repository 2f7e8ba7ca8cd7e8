"""Trials that diverge, are stopped or run out of memory are results; exceptions of the user propagate; wrong arguments are errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, Trial, apply, evaluate
from paredown.check.out_of_memory import is_out_of_memory
from paredown.errors import PlanError, TaskError
from paredown.study.tasks.data import Data, Examples
from paredown.study.tasks.task import OptimizerSettings
from paredown.study.tasks.trial import Status
from tests.study.tasks.made import examples, make_task, net, run


def test_a_run_that_diverges_is_a_trial() -> None:
    trial = run(make_task(settings=OptimizerSettings("sgdm", 1e6, schedule="constant")), Plan.preset("activations4"))
    assert trial.status is Status.DIVERGED and trial.error is None
    assert trial.reason.startswith("the training loss is ")
    assert 1 <= len(trial.curve) < 12
    assert Trial.from_json(json.loads(json.dumps(trial.to_json(), allow_nan=False))) == trial


def test_a_test_loss_that_is_not_finite_has_diverged() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if self.training else self.inner(x) * math.nan

    trial = run(make_task(lambda seed: Late(), steps=3))
    assert trial.status is Status.DIVERGED
    assert trial.reason.startswith("on the test split") and "loss nan" in trial.reason


class Dead(nn.Module):
    """Learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 0.0


def test_a_hopeless_run_stops_early_and_is_judged() -> None:
    x, y = torch.randn(128, 16), torch.arange(128) % 4
    data = Examples(x, y[torch.randperm(128)], x[:64], y[:64])
    stuck = make_task(lambda seed: Dead(), data=data, steps=120)
    trial = run(stuck)
    assert trial.status is Status.STOPPED
    assert trial.reason.startswith("hopeless: the mean training loss of steps 31 to 60 of 120 is 1.386")
    assert trial.curve[-1][0] == 60 and trial.error == pytest.approx(0.75)
    assert run(replace(stuck, stops_early=False)).status is Status.DONE


class Broken(nn.Module):
    """Raises in a training step; a trace does not see it."""

    def __init__(self, fail: Callable[[], Any], at: int = 3) -> None:
        super().__init__()
        self.inner, self.fail, self.left = net(0), fail, at

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):  # type: ignore[attr-defined]
            self.left -= 1
            if self.left == 0:
                self.fail()
        return self.inner(x)


def fails(error: BaseException) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


NO_MEMORY: dict[str, tuple[Callable[[], Any], str]] = {
    "CUDA's": (
        fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 7 bytes, process 123 has")),
        "out of memory after 2 of 12 steps, requested 2.50 GiB more",
    ),
    "Python's": (fails(MemoryError()), "out of memory after 2 of 12 steps"),
    "a CPU's, for real": (
        lambda: torch.empty(2**60, dtype=torch.uint8),
        f"out of memory after 2 of 12 steps, requested {2**60} bytes more",
    ),
    "a library's": (
        fails(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")),
        "out of memory after 2 of 12 steps",
    ),
}


ALIKE = ("Python's", "a library's")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in NO_MEMORY])
def test_no_memory_is_a_trial(name: str) -> None:
    fail, reason = NO_MEMORY[name]
    trial = run(make_task(lambda seed: Broken(fail)), Plan.preset("activations4"))
    assert (trial.status, trial.reason) == (Status.OUT_OF_MEMORY, reason)
    assert trial.error is None and trial.predicted_peak_bytes is not None and len(trial.curve) == 2
    assert run(make_task(steps=2)).status is Status.DONE, "the next trial runs"


def test_other_errors_are_no_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("error", [ValueError("of the user"), RuntimeError("mat1 and mat2"), KeyboardInterrupt()])
def test_what_the_user_raises_passes_and_the_model_is_plain_again(error: BaseException) -> None:
    made: list[nn.Module] = []

    def make(seed: int) -> nn.Module:
        made.append(Broken(fails(error)))
        return made[-1]

    with pytest.raises(type(error)):
        run(make_task(make), Plan.preset("lpmm"))
    apply(Plan.preset("activations4"), made[-1]).close()  # would be refused if there still were a session
    assert run(make_task(steps=4)).measured_peak_bytes is not None, "the profiler was ended"


class Short(Data):
    """Ends after two batches."""

    num_train, num_test, num_answers = 64, 64, 4  # type: ignore[assignment]

    def batches(self, batch: int, *, seed: int, device: torch.device) -> Any:
        x, y = examples().x_train, examples().y_train
        return iter([(x[:batch], y[:batch])] * 2)

    def tests(self, batch: int, *, device: torch.device) -> Any:
        return examples().tests(batch, device=device)


def test_data_that_ends_is_told() -> None:
    with pytest.raises(TaskError, match="task 'blobs': its data gave 2 batches and it has 12 steps"):
        run(make_task(data=Short()))


# --- what is asked wrongly --------------------------------------------------------------------------------------------


def test_a_plan_for_another_model_is_refused() -> None:
    for key in ("layer1.0.conv1:input", "layer3.*:input"):
        with pytest.raises(PlanError, match=r"task 'blobs': .*no s"):
            run(make_task(), Plan().set(key, "int4/64@bf16"))


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((Plan(), make_task()), {}, "the task first, then the plan"),
        ((make_task(), "lpmm"), {}, "a Task, or its name, and a Plan, not Task and str"),
        ((3, Plan()), {}, "not int and Plan"),
        (("digit", Plan()), {}, "task 'digit' is unknown"),
        ((make_task(), Plan()), {"seed": -1}, "seed is -1"),
        ((make_task(), Plan()), {"seed": 0.5}, "seed is 0.5"),
        ((make_task(), Plan()), {"device": "mps"}, "device 'mps' is not available on this machine. Allowed: cpu"),
        ((make_task(), Plan()), {"device": "cuda:99"}, "device 'cuda:99' is not available on this machine. Allowed: cpu"),
        ((make_task(), Plan()), {"device": "gpu"}, "device 'gpu' is not available on this machine"),
        (
            (make_task(settings=OptimizerSettings("sgdm", 0.1, {"beta": 3})), Plan()),
            {},
            "optimizer 'sgdm' cannot be made of lr, momentum, beta",
        ),
    ],
)
def test_arguments_that_make_no_trial(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        evaluate(*arguments, **options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"loss": torch.nn.MSELoss}, "loss is the class MSELoss"), ({"loss": "mse"}, "loss is str"),
     ({"make_model": torch.nn.Linear(2, 2)}, "make_model is Linear; pass a function of a seed that returns a new model")],
)  # fmt: skip
def test_what_is_no_function_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        make_task(**changes)  # type: ignore[arg-type]
