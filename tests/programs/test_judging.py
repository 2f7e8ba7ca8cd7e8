"""The parts of the tester: it sees gradients that are wrong, programs repeat, and small ones come of large ones."""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch

from paredown import Role, encode
from paredown.session import value_bounds
from tests.programs.judging import (
    EXACT,
    INT8,
    ROUNDED,
    changes,
    differences,
    distances,
    drawn,
    faults_of_exact,
    faults_of_rounded,
    too_far,
)
from tests.programs.operations import BY_NAME, OPERATIONS
from tests.programs.programs import NESTED, THREADS, Line, Options, Program, chain, draw
from tests.programs.running import Noise, Outcome, run
from tests.programs.shrinking import shrunk

LINEAR = Line("linear", "v0", ("x",), 0, 0, 1, 0.5)
SINE = Line("sin", "v1", ("v0",), 0, 1, 1, 0.5)
SMALL = Program(1, (LINEAR, SINE), Options())


def scaled_gradients(outcome: Outcome, factor: float, name: str) -> Outcome:
    """The outcome with one gradient multiplied."""
    gradients = [{key: g * factor if key == name else g for key, g in step.items()} for step in outcome.gradients]
    return Outcome(outcome.losses, gradients)


def test_the_table_has_operations_of_all_kinds() -> None:
    assert len(OPERATIONS) == len(BY_NAME) > 60
    assert {row.form for row in OPERATIONS} == {"rows", "sequence", "image"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_operations_run(dtype: str) -> None:
    """Each row alone, after a layer; rows that a type does not go with are few."""
    second = replace(SINE, operation="cos", inputs=("x",))
    refused: list[str] = []
    for row in OPERATIONS:
        line = Line(row.name, "v2", ("v0", "v1", "x")[: row.num_inputs], 0, 2, 3, 0.75)
        try:
            assert run(Program(1, (LINEAR, second, line), Options(dtype=dtype))).is_sane, row.name
        except (RuntimeError, UserWarning):
            refused.append(row.name)
    assert len(refused) <= 12, refused


def test_one_number_is_one_program() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_no_program_ends_the_process_of_an_unmodified_run() -> None:
    """Number 11170 has a group norm of an image in channels_last by a permutation: torch 2.13 needs a gradient of such an input."""
    program = draw(11170)
    assert {"norm of channels", "norm, silu, conv"} <= {line.operation for line in program.lines}
    assert program.options.needs_input_gradient


def test_programs_are_of_all_structures() -> None:
    programs = [draw(number) for number in range(100)]
    assert {NESTED, THREADS} < {program.options.structure for program in programs}
    assert {2, 18} <= {len(program.lines) for program in programs}


def test_equal_runs_have_no_differences() -> None:
    assert differences(run(SMALL), run(SMALL)) == []


def test_a_difference_of_one_bit_is_seen() -> None:
    expected = run(SMALL)
    assert differences(expected, scaled_gradients(expected, 1 + 2**-20, "block0.m0.weight")) == [
        f"step {step}: block0.m0.weight" for step in range(3)
    ]


def test_a_missing_gradient_is_seen() -> None:
    expected = run(SMALL)
    without = Outcome(expected.losses, [{"block0.m0.weight": step["block0.m0.weight"]} for step in expected.gradients])
    assert "step 0: block0.m0.bias is in one of them only" in differences(expected, without)


def test_a_distance_is_relative_to_the_gradient() -> None:
    expected = run(SMALL)
    off = distances(expected, scaled_gradients(expected, 1.5, "block0.m0.bias"))
    assert off["step 1: block0.m0.bias"] == pytest.approx(0.5)
    assert off["step 1: block0.m0.weight"] == 0


def test_gradients_that_are_too_far_off_are_told() -> None:
    expected = run(SMALL)
    assert not too_far(SMALL, expected, scaled_gradients(expected, 1.05, "block0.m0.weight"), INT8)
    assert set(too_far(SMALL, expected, scaled_gradients(expected, 1.45, "block0.m0.weight"), INT8)) == {
        f"step {step}: block0.m0.weight" for step in range(3)
    }


@pytest.mark.parametrize("name", ROUNDED)
def test_a_gradient_of_zero_is_too_far_off_in_any_format(name: str) -> None:
    expected, rounded = run(SMALL), ROUNDED[name]
    assert too_far(SMALL, expected, scaled_gradients(expected, 0.0, "block0.m0.weight"), rounded)
    assert not too_far(SMALL, expected, run(SMALL, rounded.plan), rounded)


@pytest.mark.parametrize("name", ["e4m3fn", "uint4"])
def test_floors_follow_from_the_error_of_one_tensor(name: str) -> None:
    rounding = ROUNDED[name].plan.find(("",), Role.ACTIVATION)
    assert rounding.format is not None
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    decoded = encode(x, rounding.format, rounding=rounding.resolved_rounding, seed=1).decode()
    error = float((decoded - x).square().mean().sqrt() / x.square().mean().sqrt())
    assert ROUNDED[name].floor == pytest.approx(error * 18**0.5, rel=0.02)


def test_a_gradient_that_is_not_a_number_is_too_far_off() -> None:
    expected = run(SMALL)
    assert too_far(SMALL, expected, scaled_gradients(expected, torch.nan, "block0.m0.weight"), INT8)


def test_noise_moves_ill_conditioned_gradients_further() -> None:
    expected = run(SMALL)
    steep = Program(
        1, (LINEAR, *(replace(SINE, operation="pow 3", output=f"v{n}", inputs=(f"v{n - 1}",)) for n in (1, 2, 3))), Options()
    )
    calm = changes(SMALL, expected, 2**-8)["step 0: block0.m0.weight"]
    assert 0 < calm < changes(steep, run(steep), 2**-8)["step 0: block0.m0.weight"]


def test_noise_in_gradients_leaves_forward_exact_and_moves_sums_that_cancel() -> None:
    """The gradient of a bias before a batch norm is a sum over rows, which is 0; that of one after it is not."""
    norm, after = replace(SINE, operation="batch norm 1d"), Line("bias", "v2", ("v1",), 0, 2, 1, 0.5)
    program = Program(1, (LINEAR, norm, after), Options())
    expected, moved = run(program), run(program, noise=Noise(2**-8, is_in_gradients=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(expected.losses, moved.losses, strict=True))
    bias = {name: moved.gradients[0][name].norm() for name in ("block0.m0.bias", "block0.m2")}
    assert bias["block0.m0.bias"] > 100 * expected.gradients[0]["block0.m0.bias"].norm()
    assert distances(expected, moved)["step 0: block0.m2"] < 0.05


def test_seeds_of_noise_differ() -> None:
    expected = run(SMALL)
    moved = {
        distances(expected, run(SMALL, noise=Noise(2**-8, seed, is_in_values=True)))["step 0: block0.m0.bias"] for seed in range(3)
    }
    assert len(moved) == 3


@pytest.mark.parametrize(
    ("bounds", "operations"),
    [
        (("MAX_LOGIT_ERROR", "MAX_SHARED_ERROR"), ("linear", "custom square", "softmax over rows", "causal attention")),
        (("MAX_SHARED_ERROR",), ("mul of itself", "group norm", "causal attention")),
        (("MAX_SPREAD",), ("sub", "linear", "batch norm 1d", "layer norm")),
    ],
)
def test_errors_of_saved_tensors_that_do_not_go_together_are_told(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[str, ...], operations: tuple[str, ...]
) -> None:
    """Without the session's bounds on logits and on statistics gradients are too far off, and noise does not excuse that."""
    program = Program(1, tuple(chain(operations, 0)), Options(needs_input_gradient=True))
    expected = run(program)
    assert not faults_of_rounded(program, expected, INT8)
    for bound in bounds:
        monkeypatch.setattr(value_bounds, bound, inf)
    assert faults_of_rounded(program, expected, INT8)


def test_values_that_stay_alive_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            result = value * 2
            kept.append(result)
            return result

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    monkeypatch.setattr("tests.programs.names.Square", Keeps)
    program = Program(1, (LINEAR, replace(SINE, operation="custom keeps")), Options())
    monkeypatch.setitem(BY_NAME, "custom keeps", replace(BY_NAME["custom square"], name="custom keeps", text="Square.apply({a})"))
    assert run(program).leftovers == ["3 values are alive after the last backward"]
    assert faults_of_exact(program, run(SMALL))


def test_shrinking_keeps_the_line_at_fault() -> None:
    program, _ = drawn(16)
    wanted = program.lines[len(program.lines) // 2].operation
    small = shrunk(program, lambda other: wanted in {line.operation for line in other.lines})
    assert [line.operation for line in small.lines] == [wanted]
    assert small.options == Options()


def test_a_program_prints_as_python() -> None:
    text = str(draw(3))
    assert "class Model(nn.Module):" in text
    compile(text, "program 3", "exec")


def test_exact_sessions_are_compared() -> None:
    program, expected = drawn(3)
    assert faults_of_exact(program, expected) == []
    other = run(replace(program, number=4), EXACT)
    assert differences(expected, other)
