"""Accelerate: apply, make the optimizer, prepare; the rest of the loop is Accelerate's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paredown as pare
from paredown.integrations.monitor import Monitor

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
PLAN = pare.Plan.preset("lpmm").set("activation", "int4/64@bf16")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))


class Run:
    """A training of four batches under Accelerate."""

    def __init__(self, plan: pare.Plan | None, optimizer: Any = pare.optim.AdamW, **options: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        self.plain = network()
        self.session = pare.apply(plan, self.plain) if plan is not None else None
        self.optimizer = optimizer(self.plain.parameters(), lr=1e-3)
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
        data = DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=64)
        self.model, self.opt, self.data = self.accelerator.prepare(self.plain, self.optimizer, data)
        if self.session is not None:
            self.accelerator.register_for_checkpointing(self.session)
        self.norms: list[float] = []

    def train(self, begin: int = 0, end: int = 4) -> None:
        for step, (x, y) in enumerate(self.data):
            if begin <= step < end:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(cross_entropy(self.model(x), y))
                    if self.accelerator.sync_gradients:
                        self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)))
                    self.opt.step()
                    self.opt.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.accelerator.get_state_dict(self.model).values()]


def is_same(a: Run, b: Run) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.weights(), b.weights(), strict=True))


def test_without_formats_it_is_accelerate_with_torchs_optimizer() -> None:
    ours = Run(pare.Plan())
    ours.train()
    torchs = Run(None, torch.optim.AdamW)
    torchs.train()
    assert is_same(ours, torchs) and ours.norms == torchs.norms


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_saved_states_go_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    whole = Run(PLAN, mixed_precision=precision)
    monitor = Monitor(whole.session, whole.plain)  # type: ignore[arg-type]
    whole.train(end=2)
    whole.accelerator.save_state(str(tmp_path))
    whole.train(begin=2)
    assert monitor.numbers(whole.opt)["memory/activation_gib"] > 0
    assert monitor.numbers(whole.opt).keys() >= {"memory/weight_gib", "memory/optimizer_gib", "updates/flips"}, "wrapped, too"
    later = Run(PLAN, mixed_precision=precision)
    later.accelerator.load_state(str(tmp_path))
    later.train(begin=2)
    assert later.session is not None and later.session.forwards == 4
    assert is_same(whole, later)
    other = Run(PLAN, mixed_precision=precision)
    other.train()
    assert is_same(whole, other)


def test_accumulation_is_accelerates() -> None:
    run = Run(PLAN, gradient_accumulation_steps=2)
    run.train()
    assert run.optimizer.updates == 2 and len(run.norms) == 2 and run.session is not None
    run.session.close()
    assert all(p.untyped_storage().nbytes() for p in run.plain.parameters())
