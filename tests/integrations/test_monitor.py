"""The numbers for loggers, against storages and by hand; and what is said when memory runs out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import paredown as pare
from paredown.integrations.monitor import GIB, Monitor, numbers

PARTS = ("weight", "gradient", "optimizer")


def bytes_of(found: dict[str, float]) -> dict[str, int]:
    return {part: round(found[f"memory/{part}_gib"] * GIB) for part in PARTS}


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.ones(128, 256)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def test_bytes_as_written() -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256))
    opt = torch.optim.AdamW(model.parameters())
    step(model, opt)
    num_values = sum(p.numel() for p in model.parameters())
    counters = 4 * 4  # one float32 for each parameter
    assert bytes_of(numbers(None, opt)) == {
        "weight": 4 * num_values,
        "gradient": 4 * num_values,
        "optimizer": 8 * num_values + counters,
    }
    assert "updates/flips" not in numbers(None, opt) and "guard/actions" not in numbers(None, opt)


def test_bytes_under_a_plan_are_those_of_its_formats() -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256))
    with pare.apply(pare.Plan.preset("lpmm"), model) as session:
        opt = pare.optim.AdamW(model.parameters())
        step(model, opt)
        found = numbers(session, opt)
        kept = opt.state_dict()  # puts the weights beside the state: still counted once
        assert bytes_of(numbers(session, opt)) == bytes_of(found) and kept
    shapes, small = [(64, 256), (256, 64)], 64 + 256  # biases stay as they are
    taken = {
        text: sum(pare.Format.parse(text).nbytes(shape) for shape in shapes)
        for text in ("int8/64@e8m0", "int8/64@bf16", "uint8/64@bf16")
    }
    factors = 4 * len(shapes)  # what clipping changes
    assert bytes_of(found)["weight"] == taken["int8/64@e8m0"] + 4 * small
    assert bytes_of(found)["gradient"] == taken["int8/64@bf16"] + factors + 4 * small
    assert bytes_of(found)["optimizer"] == taken["int8/64@bf16"] + taken["uint8/64@bf16"] + 8 * small
    rows = opt.diagnostics()
    mean = sum(row.underflow * row.num_values for row in rows) / sum(row.num_values for row in rows)
    assert found["updates/underflow"] == pytest.approx(mean)


def test_a_monitor_keeps_the_most_that_waited() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    with pare.apply(pare.Plan.preset("activations8"), model) as session:
        monitor, waiting = Monitor(session, model), []
        for rows in (64, 256, 128):
            loss = model(torch.randn(rows, 256)).square().mean()
            waiting.append(session.stored_bytes)
            loss.backward()
            del loss
        assert session.stored_bytes == 0
        assert round(monitor.numbers()["memory/activation_gib"] * GIB) == max(waiting) == waiting[1]
        assert monitor.numbers()["memory/activation_gib"] == 0, "since it was asked last"
        monitor.close()


def test_a_guard_is_counted() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    trace = pare.trace_step(model, (torch.empty(64, 256), torch.empty(64, 256)), loss=mse_loss, optimizer="sgd", device="cpu")
    with pare.apply(pare.Plan.preset("activations8"), model, guard=pare.Guard(trace)) as session:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        assert numbers(session, opt)["guard/actions"] == 0
        (model(torch.randn(64, 256)).square().mean() * float("inf")).backward()
        opt.step()
        assert numbers(session, opt)["guard/actions"] == len(session.actions) > 0


def test_a_simulated_session_has_what_there_is() -> None:
    model = nn.Linear(8, 8)
    with pare.apply(pare.Plan.uniform(activation="e4m3fn"), model, mode="simulate") as session:
        assert set(numbers(session, torch.optim.SGD(model.parameters()))) == {f"memory/{part}_gib" for part in PARTS}
