"""Steps whose shapes and decisions depend on values: real ones where they are known, assumed ones that the trace names elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, footprint
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step

WIDTH = 64


class Parts(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self._forward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), forward

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.last(self._forward(self.first(x), *rest)).square().mean()


def traced(forward: Callable[..., Tensor], *rest: Tensor) -> Trace:
    """A trace of a batch without values."""
    return trace_step(Parts(forward), (torch.empty(256, WIDTH, device="meta"), *rest), optimizer="sgd")


def outputs_of(trace: Trace, op: str) -> list[tuple[int, ...]]:
    return [output.shape for output in trace.outputs if output.op == op and output.phase == "forward"]


def is_assumed(trace: Trace) -> bool:
    return any("assumed values" in note for note in trace.notes)


def test_sizes_follow_from_values_of_the_batch() -> None:
    mask = torch.arange(256) % 4 == 1
    trace = traced(lambda h, mask: h[mask], mask)
    assert (64, WIDTH) in outputs_of(trace, "index") and not is_assumed(trace)


def test_sizes_follow_from_values_that_a_small_model_computes() -> None:
    source = torch.Generator().manual_seed(0)
    x, model = torch.randn(256, WIDTH, generator=source), Parts(lambda h: h[h[:, 0] > 0])
    count = int((model.first(x)[:, 0] > 0).sum())
    trace = trace_step(model, (x,), optimizer="sgd")
    assert outputs_of(trace, "index") == [(count, WIDTH)] and not is_assumed(trace)


def test_a_mask_that_is_written_piece_by_piece_keeps_its_values() -> None:
    def forward(h: Tensor) -> Tensor:
        mask = torch.zeros(256, dtype=torch.bool)
        mask[10:20] = True
        return h[mask.logical_or(torch.arange(256) >= 250)]

    trace = traced(forward)
    assert (16, WIDTH) in outputs_of(trace, "index") and not is_assumed(trace)


@pytest.mark.parametrize(
    "forward",
    [
        lambda h: h if h.sum() > 0 else -h,
        lambda h: h * h.max().item(),
        lambda h: h[h[:, 0] > 0],
        lambda h: h * torch.from_numpy(h.detach().numpy()).mean(),
    ],
)
def test_values_of_activations_are_assumed_and_the_trace_says_so(forward: Callable[..., Tensor]) -> None:
    assert is_assumed(traced(forward))


def test_experts_get_as_many_tokens_together_as_in_a_real_step() -> None:
    def forward(h: Tensor) -> Tensor:
        _, chosen = h[:, :8].topk(2)
        out = torch.zeros_like(h)
        for expert in range(8):
            rows, _ = torch.where(chosen == expert)
            out = out.index_add(0, rows, h[rows])
        return out

    shares = [shape[0] for shape in outputs_of(traced(forward), "index")]
    assert sum(shares) == 512 and max(shares) < 100


def test_a_checkpoint_recomputes_with_the_same_sizes() -> None:
    def forward(h: Tensor) -> Tensor:
        selected: Any = torch.utils.checkpoint.checkpoint(lambda h: torch.relu(h[h[:, 0] > 0]), h, use_reentrant=False)
        return selected

    assert is_assumed(traced(forward))


def test_a_mask_of_ones_is_dropped_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    ids = torch.randint(256, (2, 128))
    ones, half = torch.ones_like(ids), torch.ones_like(ids)
    half[:, 64:] = 0
    peaks: list[int] = []
    for extra in ({}, {"attention_mask": ones}, {"attention_mask": half}):
        batch = {"input_ids": ids, "labels": ids, **extra}
        trace = trace_step(model, batch, optimizer="sgd", device="cuda", autocast=torch.bfloat16)
        peaks.append(footprint(trace, Plan.uniform()).peak_bytes)
    assert peaks[1] == peaks[0] + ids.nbytes < peaks[2] - 128 * 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_are_traced_in_every_dtype(dtype: torch.dtype) -> None:
    def forward(h: Tensor) -> Tensor:
        offsets = torch.arange(64, 257, 64, dtype=torch.int32)
        experts = torch.ones(4, WIDTH, WIDTH, dtype=dtype)
        return torch.nn.functional.grouped_mm(h.to(dtype), experts, offs=offsets).float()

    assert outputs_of(traced(forward), "_grouped_mm") == [(256, WIDTH)]
