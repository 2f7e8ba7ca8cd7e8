"""`session.compile()`: gradients, exact masks, names, stored bytes and resumed runs inside the graphs of torch.compile, on the CPU.

Kernels are compiled without vector instructions, which takes half the time; tests/codec/test_graph_codec.py compiles the codec with them.
Random numbers are those of eager mode (`fallback_random`), so that eager mode is the reference of networks with dropout too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from paredown import Guard, Plan, Session, apply, trace_step
from paredown.codec.packed import encode
from paredown.errors import ApplyError
from paredown.formats.format import Format
from tests.session.nets import INT4, INT8, Net, activations, assert_same, gradients, pictures, relative_error, rows, step, weighted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
NEAR = {INT8: 0.03, INT4: 0.3}  # as in test_gradients.py: a few times the relative error of the format, 0.6 % and 10 %
FUSED = 1e-5  # float32 sums in another order


@pytest.fixture(scope="module", autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    limits = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    with inductor_config.patch({"cpp.simdlen": 1, "fallback_random": True}), torch._dynamo.config.patch(limits):
        yield
    torch._dynamo.reset()


class Residual(nn.Module):
    """Convolutions, batch norms, ReLUs and a residual connection, in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm1, self.relu = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv, self.norm2, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 8)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.stem(x)))
        h = self.relu(h + self.norm2(self.conv(h)))
        return self.head(h.mean((2, 3)))


class Block(nn.Module):
    """A transformer block of width 64 with 4 heads, dropout, and a batch norm over the tokens at its end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ln1, self.q, self.k, self.v, self.out = nn.LayerNorm(64), *(nn.Linear(64, 64) for _ in range(4))
        self.ln2, self.up, self.gelu, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (layer(h).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.drop(self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        x = x + self.down(self.gelu(self.up(self.ln2(x))))
        return self.norm(x.flatten(0, 1))


@dataclass
class Run:
    """A compiled step under a plan, and the same step of the unmodified eager model."""

    net: nn.Module
    session: Session
    compiled: Any
    x: Tensor
    plain: list[Tensor]
    found: list[Tensor]
    bytes_before_backward: int


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A network and its input."""
    if name == "block":
        return Block(), rows(128 * 64).view(4, 32, 64, 64)[:, :, 0]
    return Residual(), pictures(4, side=16).contiguous(memory_format=torch.channels_last)


def autocast(name: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=name.endswith("bf16"))


@lru_cache
def run_of(name: str, format: str | None) -> Run:
    """One step of a network with all activations in `format`."""
    net, x = network(name)
    with autocast(name):
        plain = step(copy.deepcopy(net), x)
    session = apply(activations(format), net)
    compiled = session.compile()
    torch.manual_seed(3)
    with autocast(name):
        y = compiled(x)
    stored = session.stored_bytes
    weighted(y).backward()
    assert session.stored_bytes == 0 and y.grad_fn is not None
    return Run(net, session, compiled, x, plain, gradients(net), stored)


RUNS = [("residual", INT8), ("residual", INT4), ("residual bf16", INT8), ("residual bf16", INT4), ("block", INT8), ("block", INT4)]


@pytest.mark.parametrize(("name", "format"), RUNS)
def test_gradients_are_near_those_of_the_unmodified_eager_model(name: str, format: str) -> None:
    run = run_of(name, format)
    assert 1e-4 < relative_error(run.found, run.plain) < NEAR[format]


@pytest.mark.parametrize(("name", "format"), RUNS)
def test_stored_bytes_are_those_of_the_formats_and_masks(name: str, format: str) -> None:
    """residual: two signs and inputs of norms, 16384 values each; block: attention, the norm's input and the activation's."""
    run = run_of(name, format)
    eight, four = ("uint8/64@bf16+bf16", "uint4/64@bf16+bf16") if name != "block" else ("int8/64@bf16", "int4/64@bf16")
    expected = Format.parse(eight if format == INT8 else four).nbytes((16384,)) * 2 + 16384 // 8 * 2
    if name != "block":
        assert run.bytes_before_backward == expected
    decisions = [d for report in run.session._compiled.reports for d in report.decisions]  # type: ignore[union-attr]
    masks = sum(report.mask_bytes for report in run.session._compiled.reports)  # type: ignore[union-attr]
    numels = {d: d.unmodified_bytes // (2 if name.endswith("bf16") else 4) for d in decisions}
    assert run.bytes_before_backward == masks + sum(d.format.nbytes((numels[d],)) for d in decisions if d.format is not None)
    assert masks == (8192 // 8 if name == "block" else 2 * 16384 // 8)


def test_a_plan_without_activations_changes_no_bit_of_a_compiled_model() -> None:
    net, x = network("residual")
    expected = step(torch.compile(net), x)
    assert_same(run_of("residual", None).found, expected)
    assert run_of("residual", None).bytes_before_backward == 0
