"""What simulate mode counts of the values that it rounds, and when it warns that a format stalls training."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paredown import apply
from paredown.formats.format import Format
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.simulate.range_counts import ALWAYS, EVERY, RangeCounts, SlotCounts

INF, NAN = float("inf"), float("nan")
# of e4m3fn: smallest value 2^-9, smallest normal value 2^-6, largest value 448, step 32 there
X = torch.tensor([0.0, -0.0, 2.0**-11, -(2.0**-10) * 0.9, 0.9 * 2.0**-6, 1.0, -448.0, 463.0, 465.0, -1e6, INF, NAN])


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


def counted(x: Tensor, format: str, overflow: str = "saturate", rounding: str = "nearest_even") -> SlotCounts:
    """The counts of a model's input in one forward pass."""
    with apply(Plan.uniform().set("input1", format, overflow=overflow, rounding=rounding), Same(), mode="simulate") as session:
        session_model(session)(x)
        (counts,) = session.counts
    return counts


def session_model(session) -> nn.Module:
    return session._model()


def numbers(row: SlotCounts) -> tuple[int, ...]:
    return row.num_values, row.num_nonzero, row.num_underflows, row.num_flushed, row.num_saturated, row.num_nonfinite


@pytest.mark.parametrize(
    ("format", "overflow", "expected"),
    [
        # the values that are finite and not 0 are eight; three are below 2^-6, two of them become 0; 465 and -1e6 are past 464
        ("e4m3fn", "saturate", (12, 8, 3, 2, 2, 0)),
        ("e4m3fn", "nonfinite", (12, 8, 3, 2, 0, 2)),
        ("bf16", "nonfinite", (12, 8, 0, 0, 0, 0)),
        # ties of 2^-11 and less round to 0; |x| from 127.5 on become 127
        ("int8", "saturate", (12, 8, 3, 3, 4, 0)),
        ("[-100 -1 0 1 460]", "saturate", (12, 8, 3, 3, 4, 0)),
    ],
)
def test_counts_of_values_at_the_ends_of_a_format(format: str, overflow: str, expected: tuple[int, ...]) -> None:
    assert numbers(counted(X, format, overflow)) == expected


def test_values_of_a_block_underflow_where_they_become_zero() -> None:
    x = torch.tensor([[1000.0, 1.0, 100.0, 0.0], [1e-6, 2e-6, 4e-6, 7e-6]])
    row = counted(x, "int4/4@fp32")  # largest code 7: of the first row, steps are 143, and 1 becomes 0; of the second none does
    assert numbers(row) == (8, 7, 1, 1, 0, 0)


def test_the_share_of_the_magnitude_that_is_left() -> None:
    assert counted(torch.tensor([3.0, 1.0, 0.2, -0.2]), "uint2", "saturate").kept == pytest.approx(4 / 4.4)
    assert counted(torch.full((8,), 10.0), "int2", "saturate").kept == pytest.approx(0.1)
    stochastic = counted(torch.full((4096,), 0.1), "int8", rounding="stochastic")
    assert stochastic.num_flushed > 3500 and stochastic.kept == pytest.approx(1.0, abs=0.2)  # seven standard errors


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def train(model: nn.Module, steps: int) -> float:
    """The last loss of a classification that is easy to learn; the mean over the batch makes gradients small."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 16, generator=generator)
    y = x[:, :8].argmax(1)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), torch.zeros(())
    for _ in range(steps):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_a_format_that_stalls_training_is_a_warning() -> None:
    model = net()
    with (
        apply(Plan.uniform(error="e4m3fn"), model, mode="simulate") as session,
        pytest.warns(UserWarning, match="1 error slot loses most of its magnitude, so that training stalls") as seen,
    ):
        assert train(model, 30) > 1.5
        worst = session.counts[0]
        assert worst.role is Role.ERROR and worst.kept == 0 and worst.num_flushed == worst.num_nonzero > 0
    assert len(seen) == 1, "one sentence for each role"
    text = str(seen[0].message)
    assert worst.slot in text and "e4m3fn/32@e8m0" in text and "0.00195" in text


@pytest.mark.parametrize("plan", [Plan.uniform(error="e4m3fn/32@e8m0"), Plan.uniform(error="e5m2", gradient="bf16")])
def test_formats_that_train_are_silent(plan: Plan) -> None:
    model = net()
    with warnings.catch_warnings(), apply(plan, model, mode="simulate") as session:
        warnings.simplefilter("error")
        assert train(model, 30) < 0.6
        assert all(row.kept > 0.9 for row in session.counts)


def test_passes_that_are_counted() -> None:
    model = Same()
    session = apply(Plan.uniform(activation="e4m3fn"), model, mode="simulate")
    for _ in range(2 * EVERY + 1):
        model(torch.ones(4))
    assert [row.num_values for row in session.counts if row.slot == "activation=input1"] == [4 * (ALWAYS + 2)]
    session.set_plan(Plan.uniform(activation="e5m2"))
    assert session.counts == ()
    model(torch.ones(4))
    assert [row.format for row in session.counts] == [Format.parse("e5m2")]


def test_counts_print_as_a_table() -> None:
    rows = RangeCounts([SlotCounts("error=fc:output", Role.ERROR, Format.parse("e4m3fn"), 100, 80, 60, 40, 0, 0, kept=0.25)])
    header, line = str(rows).splitlines()
    assert header.split() == list(RangeCounts.columns)
    assert line.split() == ["error=fc:output", "error", "e4m3fn", "100", "75.00%", "50.00%", "0.00%", "0.00%", "25.0%"]
    assert "no value" in str(RangeCounts())


def test_counting_changes_no_bit() -> None:
    """The last pass that is counted and the first that is not round alike."""
    x = torch.randn(64, 16)
    model = net()
    with apply(Plan.uniform(activation="e4m3fn", weight="int4/8@bf16", rounding="nearest_even"), model, mode="simulate"):
        outputs = [model(x) for _ in range(ALWAYS + 1)]
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])
