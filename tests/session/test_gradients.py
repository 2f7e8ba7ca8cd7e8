"""Gradients under a plan: the same bits for an exact one, near for others, right on average under stochastic rounding."""

from __future__ import annotations

from math import sqrt
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paredown import Plan, apply
from paredown.formats.format import Format
from paredown.models import MODELS, OF_TEXT, random_batch
from paredown.models.transformer import token_loss
from tests.session.nets import INT4, INT8, Net, activations, assert_same, gradients, relative_error, rows, step, weighted

NEAR = {INT8: 0.03, "e4m3fn/64@bf16": 0.09, INT4: 0.3, "uint4/64@bf16+bf16": 0.3, "bf16": 0.01}
WITH_DROPOUT = {"vit": {"dropout": 0.1}, "gpt": {"dropout": 0.1}, "lstm": {"dropout": 0.1}}
ALL = [name for name in MODELS if name != "mlp"]


def model_step(name: str, plan: Plan | None, batch: int = 4) -> tuple[list[Tensor], int]:
    """Gradients of a step, and the bytes stored after the forward pass."""
    torch.manual_seed(0)
    model = MODELS[name](**WITH_DROPOUT.get(name, {}))
    session = apply(plan, model) if plan is not None else None
    x, target = random_batch(name, batch)
    logits = model(x)
    nbytes = session.stored_bytes if session is not None else 0
    loss = token_loss(logits, target) if name in OF_TEXT else cross_entropy(logits, target)
    loss.backward()
    assert session is None or session.stored_bytes == 0
    return gradients(model), nbytes


@pytest.mark.parametrize("name", ALL)
def test_an_exact_plan_changes_no_bit(name: str) -> None:
    assert_same(model_step(name, Plan.uniform(activation="fp32"))[0], model_step(name, None)[0])


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_near_and_fewer_bytes_are_stored(name: str) -> None:
    plain, (eight, bytes8), (four, bytes4) = (
        model_step(name, None)[0],
        model_step(name, activations(INT8)),
        model_step(name, activations(INT4)),
    )
    assert 0 < relative_error(eight, plain) < 0.05
    assert relative_error(eight, plain) < relative_error(four, plain) < 0.6
    assert 0 < bytes4 < bytes8


def test_the_preset_of_4_bits_has_half_the_error_of_stochastic_symmetric_blocks() -> None:
    """Squared steps of the two: ranges of 4.1 and 5.2 standard deviations over 15 and 14 steps, times 1/12 and 1/6 (sensitivity.py)."""
    ratios = list[float]()
    for name in ALL:
        plain, preset = model_step(name, None)[0], model_step(name, Plan.preset("activations4"))[0]
        stochastic = model_step(name, activations(INT4, "stochastic"))[0]
        ratios.append(relative_error(preset, plain) / relative_error(stochastic, plain))
    assert median(ratios) == pytest.approx((4.1 / 15) / (5.2 / 14) * sqrt(1 / 2), rel=0.15)


@pytest.mark.parametrize("text", NEAR)
def test_formats(text: str) -> None:
    net, x = Net(lambda net, x: net.b(net.a(x))), rows(256)
    plain = step(net, x)
    session = apply(activations(text), net)
    assert 0 < relative_error(step(net, x), plain) < NEAR[text]
    kept = net(x)
    assert session.stored_bytes == Format.parse(text).nbytes((256 * 64,))
    assert kept.grad_fn is not None


def test_stored_bytes_are_the_arithmetic_of_formats_and_bits() -> None:
    """conv: relu's output and the pool's indices; 8 x 16 x 16 x 4 = 8192 values each."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 2, 1))
    session = apply(activations(INT4), net)
    kept = net(torch.randn(4, 3, 16, 16))
    four, eight = Format.parse(INT4).nbytes((8192,)), Format.parse("uint8/64@bf16+bf16").nbytes((8192,))
    assert (
        session.stored_bytes == 8192 // 8 + four + eight
    )  # signs; the second convolution's input; the sigmoid's output, pinned, with minimums
    assert kept.grad_fn is not None


def test_the_gradient_is_right_on_average() -> None:
    """Linear layers and ReLUs use what they saved linearly, or exactly. z of the mean over seeds, and the mean square of all z.

    The first fails beyond 5.5, 1 in 2.6e7 by chance. The second is 1 up to the sample variance (2 / 60) and the correlation of
    the places of one weight, which share inputs: at most 128 independent ones count for 5.5 * sqrt(2 / 128) = 0.69.
    """
    net = Net(lambda net, x: net.b(net.more[0](net.a(x))), nn.ReLU())
    x = rows()
    exact = torch.cat([g.flatten() for g in step(net, x)]).double()
    found = []
    for seed in range(60):
        session = apply(Plan.uniform(activation="int2/64@bf16", rounding="stochastic"), net, seed=seed)
        found.append(torch.cat([g.flatten() for g in step(net, x)]).double())
        session.close()
    errors = torch.stack(found) - exact
    moving = errors.var(0) > 0
    assert moving.sum() == 64 * 64  # the second weight: its input is what was rounded
    mean, spread = errors.mean(0)[moving], (errors.var(0)[moving] / 60).sqrt()
    assert abs(mean.sum() / errors[:, moving].sum(1).std() * sqrt(60)) < 5.5
    z = mean / spread
    assert abs(z.square().mean() - 1 - 2 / 60) < 0.69
    assert (errors[0, moving].abs() / exact[moving].abs().mean()).mean() > 0.05  # and it is not small in one step


def test_the_check_sees_rounding_that_is_not_right_on_average() -> None:
    net, x = Net(lambda net, x: net.b(net.more[0](net.a(x))), nn.ReLU()), rows()
    exact = torch.cat([g.flatten() for g in step(net, x)]).double()
    with apply(Plan.uniform(activation="int2/64@bf16", rounding="nearest_even"), net):
        first, second = (torch.cat([g.flatten() for g in step(net, x)]).double() for _ in range(2))
    assert torch.equal(first, second)
    assert relative_error([first], [exact]) > 0.2


def test_another_seed_and_another_step_draw_other_bits() -> None:
    net, x = Net(lambda net, x: net.b(net.a(x))), rows()
    plan = activations(INT4, "stochastic")
    with apply(plan, net, seed=1):
        one, two = step(net, x), step(net, x)
    with apply(plan, net, seed=1):
        again = step(net, x)
    with apply(plan, net, seed=2):
        other = step(net, x)
    assert_same(one, again)
    assert not torch.equal(one[2], two[2])
    assert not torch.equal(one[2], other[2])


def test_a_value_past_all_bounds_is_seen_in_the_gradient() -> None:
    """As without a session, for a GradScaler to see it."""
    net, x = Net(lambda net, x: net.b(net.a(x))), rows()
    x[3, 5] = torch.inf
    plain = step(net, x)
    apply(activations(INT8), net)
    found = step(net, x)
    assert not plain[2].isfinite().all()
    assert not found[2].isfinite().all()


def test_another_batch_size_is_no_other_plan() -> None:
    net = Net(lambda net, x: net.b(torch.tanh(net.a(x))))
    plain = [step(net, rows(num)) for num in (100, 300, 64)]
    session = apply(activations(INT8), net)
    for num, expected in zip((100, 300, 64), plain, strict=True):
        assert relative_error(step(net, rows(num)), expected) < 0.02
    assert {change.slot for change in session.changes} == {"a:input", ":tanh.output"}
    assert weighted(net(rows(2))).isfinite()  # 128 values: nothing to pack


class GroupedExperts(nn.Module):
    """Experts of one parameter, each for an eighth of the rows, as those of transformers; `rank`: of a sum that is added."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(8, 96, 64) / 8)
        self.factors = nn.ParameterList(torch.randn(8, *shape) / 8 for shape in ((96, rank), (rank, 64)) if rank)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, 64) -> (rows, 96)."""
        weight = torch.baddbmm(self.weight, *self.factors) if len(self.factors) else self.weight
        ends = torch.arange(1, 9, dtype=torch.int32) * (len(x) // 8)
        return torch.tanh(nn.functional.grouped_mm(self.first(x), weight.mT, offs=ends))


@pytest.mark.parametrize("rank", [0, 4])
def test_operands_of_grouped_products_are_packed(rank: int) -> None:
    """Their inputs, and weights that were computed; a parameter is no activation."""
    model, x = GroupedExperts(rank), torch.randn(512, 64)
    (model(x) ** 2).sum().backward()
    plain = gradients(model)
    model.zero_grad()
    values = 512 * 64 + (8 * 96 * 64 if rank else 0)  # the batch and the model's output are held by the caller
    with apply(activations(INT8), model) as session:
        loss = (model(x) ** 2).sum()
        assert session.stored_bytes == values + values // 64 * 2
        loss.backward()
    assert 0 < relative_error(gradients(model), plain) < 0.03
