"""What compiled graphs measure decides as what eager sessions measure, and statistics of norms are exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown import Session, apply
from paredown.formats.format import Format
from paredown.session.compiled import graph_editor
from paredown.session.compiled.graph_decisions import GraphDecision
from paredown.session.value_bounds import (
    attention_parts,
    blocks_mix_groups,
    extremes,
    join_attention_parts,
    ranges_of_statistics,
    reason_of_attention,
    spread_of_ranges,
)
from tests.programs.compiling import compiles_quickly
from tests.session.nets import INT4, INT8, activations, gradients, relative_error, step, weighted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
INT8_FORMAT = Format.parse(INT8)


def decisions(session: Session) -> dict[str, GraphDecision]:
    assert session._compiled is not None
    return session._compiled.decisions


@pytest.mark.parametrize(("size", "tokens"), [(0.3, 5), (30.0, 5), (0.3, 64)])
def test_numbers_of_several_attentions_are_those_of_each(size: float, tokens: int) -> None:
    """Variances over 64 tokens are those within two groups of tokens, and that of their means."""
    torch.manual_seed(0)
    tensors = [[torch.randn(2, 3, tokens, 16) * size * (1 + i) + size for _ in range(4)] for i in range(3)]
    numbers = join_attention_parts([part for of_one in tensors for part in attention_parts(*of_one)]).tolist()
    for i, (query, key, value, output) in enumerate(tensors):
        norms = [max(float(row.double().norm()) for row in t.reshape(-1, 16)) for t in (query, key)]
        variances = [float(t.double().transpose(-2, -1).reshape(-1, tokens).var(1, correction=0).mean()) for t in (output, value)]
        assert numbers[4 * i : 4 * i + 4] == pytest.approx([*norms, *variances], rel=1e-5)
        bound, share = norms[0] * norms[1] / 4, min(variances[0] / variances[1], 1.0)
        is_kept = (error := bound * 0.125**0.5 * 0.75 / 128) > 0.05 or error / 0.1 > 1 - share
        assert bool(reason_of_attention(numbers[4 * i : 4 * i + 4], 0.25, INT8_FORMAT, 16)) is is_kept


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_attention_that_is_not_finite_stays_unmodified(wrong: float) -> None:
    assert reason_of_attention([wrong, 1.0, 0.1, 1.0], 0.25, INT8_FORMAT, 16)
    assert "100% of the variance" in reason_of_attention([1.0, 1.0, wrong, wrong], 0.25, INT8_FORMAT, 16)


def test_ranges_of_many_norms_have_the_spread_of_each() -> None:
    torch.manual_seed(0)
    sizes = (64, 192, 128)
    statistics = [t for size in sizes for t in (torch.randn(1, size, 1, 1), torch.rand(1, size, 1, 1) + 0.1)]
    ranges, first = ranges_of_statistics(statistics).tolist(), 0
    for i, size in enumerate(sizes):
        own = ranges[first : first + 4 * (size // 64)]
        first += 4 * (size // 64)
        mean, deviation = statistics[2 * i].double(), 1 / statistics[2 * i + 1].double()
        expected = max(float(deviation.max()), float(mean.max() - mean.min()) / 6) / float(deviation.min())
        assert spread_of_ranges(own, 1e-5) == pytest.approx(expected, rel=1e-6)
        assert spread_of_ranges(extremes(statistics[2 * i + 1], statistics[2 * i]).tolist(), 1e-5) == spread_of_ranges(own, 1e-5)
    assert first == len(ranges)
    assert spread_of_ranges([1.0, 400.0, 0.0, 0.0], 1e-5) == math.inf == spread_of_ranges([1.0, math.nan, 0.0, 0.0], 0.0)


def test_ranges_of_norms_of_any_width_have_the_spread_of_each() -> None:
    """Widths that 64 does not divide are measured in shorter ranges, all norms of a length by the same kernels."""
    torch.manual_seed(0)
    statistics = [t for size in (24, 72, 8) for t in (torch.randn(size), torch.rand(size) + 0.1)]
    ranges, first = ranges_of_statistics(statistics, 8).tolist(), 0
    for i, size in enumerate((24, 72, 8)):
        own, first = ranges[first : first + size // 2], first + size // 2
        mean, deviation = statistics[2 * i].double(), 1 / statistics[2 * i + 1].double()
        expected = max(float(deviation.max()), float(mean.max() - mean.min()) / 6) / float(deviation.min())
        assert spread_of_ranges(own, 1e-5) == pytest.approx(expected, rel=1e-6)
    assert first == len(ranges)


def test_norms_of_any_width_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm alone takes three kernels; 24 and 40 channels are ranges of 8, 64 are one range."""
    torch.manual_seed(0)
    parts = [part for a, b in ((3, 24), (24, 40), (40, 64)) for part in (nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.SiLU())]
    model = nn.Sequential(*parts).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    session, found, plain = compiled_step(model, x, INT8)
    session.close()
    assert session._compiled is not None
    counts = [check.count for report in session._compiled.reports for check in report.checks]
    assert sorted(counts) == [4, 4 * 3, 4 * 5]
    assert 1e-4 < relative_error(found, plain) < 0.05
    torch.compiler.reset()
    monkeypatch.setattr(graph_editor, "ENOUGH_NUMBERS", 12)  # too few for all ranges: each norm alone
    session, found, plain = compiled_step(model, x, INT8)
    assert session._compiled is not None
    assert [check.count for report in session._compiled.reports for check in report.checks] == [4, 4, 4]
    assert 1e-4 < relative_error(found, plain) < 0.05


def owners_mix(tensor: Tensor, groups: Tensor) -> bool:
    """Whether 64 values that are neighbours in memory have several owners: by counting."""
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    flat = groups.expand(tensor.shape).permute(order).reshape(-1)
    return any(len(flat[i : i + 64].unique()) > 1 for i in range(0, flat.numel(), 64))


def test_blocks_that_mix_rows_or_channels() -> None:
    rows = torch.arange(20).view(4, 5, 1)
    for width in (64, 128, 48):
        plain, turned = torch.zeros(4, 5, width), torch.zeros(5, 4, width).transpose(0, 1)
        for tensor in (plain, turned):
            assert blocks_mix_groups(tensor, 20, "layer_norm") is owners_mix(tensor, rows), (width, tensor.stride())
    channels = torch.arange(8).view(1, 8, 1, 1)
    for tensor in (
        torch.zeros(2, 8, 8, 8),
        torch.zeros(2, 8, 8, 8).contiguous(memory_format=torch.channels_last),
        torch.zeros(2, 8, 5, 5),
    ):
        assert blocks_mix_groups(tensor, 8, "batch_norm") is owners_mix(tensor, channels)


class TanhGelu(nn.Module):
    """GELU by way of tanh, written in PyTorch operations as in Hugging Face's GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def compiled_step(model: nn.Module, x: Tensor, format: str) -> tuple[Session, list[Tensor], list[Tensor]]:
    """A session, the gradients of one compiled step in it, and those of the unmodified eager model."""
    plain = step(model, x)
    model.zero_grad()
    session = apply(activations(format), model)
    with compiles_quickly():
        weighted(session.compile()(x)).backward()
    return session, gradients(model), plain


def test_the_input_of_a_gelu_written_with_tanh_is_packed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), TanhGelu(), nn.Linear(256, 64))
    session, found, plain = compiled_step(model, torch.randn(64, 64), INT8)
    decision = decisions(session)["1:pow.input"]
    assert decision.format is not None and decision.stored_bytes == decision.format.nbytes((64 * 256,))
    assert 1e-4 < relative_error(found, plain) < 0.03


class Attentions(nn.Module):
    """Attentions of one size behind each other; the logits of the first are `scale` times as large."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(64, 192) for _ in range(2)), scale

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            query, key, value = layer(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind()
            x = (
                nn.functional.scaled_dot_product_attention(query * (self.scale if i == 0 else 1.0), key, value)
                .transpose(1, 2)
                .flatten(2)
            )
        return x


@pytest.mark.parametrize(("scale", "num_packed"), [(1.0, 2), (100.0, 1)])
def test_each_of_several_attentions_of_one_size_is_measured(scale: float, num_packed: int) -> None:
    """Their copies of the traced measurement have equal example tensors: the numbers of the last one stood for all of them."""
    torch.manual_seed(0)
    session, _, _ = compiled_step(Attentions(scale), torch.randn(2, 64, 64), INT8)
    formats = {
        name: d.format
        for name, d in decisions(session).items()
        if name.endswith("scaled_dot_product_attention.query") or name.endswith("scaled_dot_product_attention#2.query")
    }
    assert sum(format is not None for format in formats.values()) == num_packed, formats


def test_statistics_of_many_rows_are_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    session, found, plain = compiled_step(model, torch.randn(8192, 64), INT4)
    large: list[Any] = [d for d in decisions(session).values() if d.unmodified_bytes == 8192 * 4]
    assert large and all(d.format is None and d.reason == "it is a statistic" for d in large)
    assert 1e-3 < relative_error(found, plain) < 0.3
