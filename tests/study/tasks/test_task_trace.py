"""One trace of a task's step, wherever it is made; its peak is compared with measured bytes."""

from pathlib import Path

import pytest
import torch

from paredown.assignment.assign import PlanTemplate, make_plans
from paredown.cli.subject import SubjectOptions, find_subject, of_task
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.predict.trace_step import trace_step
from paredown.study.pick.pick import task_step
from paredown.study.priors.prior_files import load
from paredown.study.sweeps.sweep_file import load_sweep
from paredown.study.tasks.evaluate import evaluate
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task_trace import formats_state, predicted_bytes, trace_task
from paredown.study.tasks.training import make_optimizer

DIGITS = "digits#model=mlp,steps=3,optimizer=adamw,lr=0.001"
PLANS = {"baseline": Plan(), "activations8": Plan.preset("activations8"), "lpmm": Plan.preset("lpmm")}


@pytest.mark.parametrize("name", PLANS)
def test_the_command_line_pick_sweeps_and_evaluate_use_one_trace(name: str) -> None:
    task, plan = find_task(DIGITS), PLANS[name]
    trace = trace_task(task, plan, "cpu")
    assert find_subject(DIGITS, SubjectOptions(device="cpu")).trace(plan) == trace
    assert of_task(task, "cpu").trace(plan) == trace
    picked = task_step(task, "cpu", "store", load("stored"))
    assert picked.trace_of is not None and picked.trace_of(plan) == trace
    peak = footprint(trace, plan).peak_bytes
    assert picked.bytes_of(plan) == predicted_bytes(DIGITS, plan, Path(), "cpu") == peak
    assert evaluate(task, plan, device="cpu").predicted_peak_bytes == peak


def test_a_sweep_makes_plans_from_the_trace_that_pick_makes_them_from(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'tasks = ["{DIGITS}"]\ndevice = "cpu"\n[[plans]]\n[[plans]]\nassign = "80%"\n')
    made = [plan for _, plan in load_sweep(file).sweep.pairs]
    assert made == make_plans([PlanTemplate("80%")], trace_task(find_task(DIGITS), made[0], "cpu"))
    assert formats_state(made[0])


def test_the_peak_of_the_baseline_has_the_temporaries_of_the_optimizer_as_a_measured_step_does() -> None:
    task = find_task(DIGITS)
    measured = evaluate(task, Plan(), device="cpu").measured_peak_bytes
    trace = trace_task(task, device="cpu")
    batch = next(task.data.batches(task.batch, seed=0, device=torch.device("cpu")))
    without = trace_step(task.make_model(0), batch, loss=task.loss, optimizer="adamw", device="cpu")
    assert measured is not None
    assert footprint(without).peak_bytes < footprint(trace).peak_bytes <= measured
    assert [output.nbytes for output in trace.outputs if output.op == "optimizer.step"] == [4 * 256 * 256]


def test_a_batch_size_and_an_optimizer_of_the_command_line_replace_those_of_the_task() -> None:
    task = find_task(DIGITS)
    subject = find_subject(DIGITS, SubjectOptions(device="cpu", batch=7, optimizer="lion", autocast="bf16"))
    x, y = next(task.data.batches(7, seed=0, device=torch.device("cpu")))
    expected = trace_step(task.make_model(0), (x, y), loss=task.loss, optimizer="lion", device="cpu", autocast=torch.bfloat16)
    assert subject.trace() == expected


def test_random_states_are_not_changed() -> None:
    task, before = find_task(DIGITS), torch.get_rng_state()
    trace_task(task, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_task_in_channels_last_is_predicted_in_channels_last() -> None:
    """In another layout cuDNN copies the operands of convolutions, which a prediction for CUDA counts."""
    task, plan = find_task("digits#model=resnet18,batch=1024,width=32"), Plan.uniform(activation="int4/64@bf16")
    batch = next(task.data.batches(task.batch, seed=0, device=torch.device("cpu")))
    peaks = []
    for layout in (torch.channels_last, torch.contiguous_format):
        model = task.make_model(0).to(memory_format=layout)
        trace = trace_step(model, batch, loss=task.loss, optimizer=make_optimizer(task.settings, model), device="cuda")
        peaks.append(footprint(trace, plan).peak_bytes)
    assert task.channels_last and peaks[0] < 0.95 * peaks[1], "or this test shows nothing"
    assert footprint(trace_task(task, plan, "cuda"), plan).peak_bytes == peaks[0]
