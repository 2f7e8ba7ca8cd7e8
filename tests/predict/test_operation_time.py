"""Operations of traces that are repeated on real tensors and timed: their arguments, their rates, their host time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.plan.calibration import LAUNCH_SHARE, operation_key
from paredown.plan.step_time import predict_step
from paredown.plan.trace import VIEW, Operation
from paredown.predict import operation_time
from paredown.predict.fake.device_ops import RNN_BACKWARD
from paredown.predict.operation_time import (
    CallSeconds,
    distinct,
    estimated_seconds,
    repeated_call,
    time_operations,
    with_operations,
)
from tests.support.calibrations import calibration, traced


def test_a_repeated_call_has_the_shapes_dtypes_and_strides_of_the_first() -> None:
    arguments = [[{"t": ["float32", [3, 4], [1, 3]]}, {"t": ["float32", [4, 5], [5, 1]]}], {}]
    call = repeated_call(Operation("aten.mm.default", "", "forward", arguments=json.dumps(arguments)), "cpu")
    assert call is not None
    result: Any = call()
    assert result.shape == (3, 5) and result.dtype is torch.float32
    cast = [[{"t": ["float32", [6], [1]]}], {"dtype": {"o": "bfloat16"}, "device": None}]
    call = repeated_call(Operation("aten._to_copy.default", "", "forward", arguments=json.dumps(cast)), "cpu")
    assert call is not None
    result = call()
    assert result.dtype is torch.bfloat16 and result.shape == (6,)


def test_what_cannot_be_repeated_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_time, "device_seconds", lambda call, device: (call(), 0.125)[1])
    wrong = Operation("aten.mm.default", "", "forward", arguments='[[{"t":["float32",[3,4],[4,1]]}],{}]')
    foreign = Operation("os.system", "", "forward", arguments='[["true"],{}]')
    trace = replace(traced(), operations=(wrong, foreign, replace(wrong, arguments="")))
    assert len(list(distinct([trace]))) == 2 and set(time_operations([trace], "cpu").timed.values()) == {0.0}
    rates = calibration("cpu")
    with_zero = replace(rates, timed={operation_key(wrong): 0.0})
    assert with_zero.operation_seconds(wrong) == rates.operation_seconds(wrong) and with_zero.num_untimed(trace) == 1


def test_attention_of_gpu_traces_runs_on_real_tensors() -> None:
    by_op = {one.op: one for one in traced("cuda").operations}
    for name in ("attention", "attention_backward"):
        if name in by_op:
            call = repeated_call(by_op[name], "cpu")
            assert call is not None
            result: Any = call()
            shapes = [part.shape for part in (result if isinstance(result, tuple) else (result,))]
            assert shapes == [(2, 2, 16, 16)] * len(shapes)
    assert "attention" in by_op and "attention_backward" in by_op


def tensor(dtype: str, *shape: int) -> dict[str, Any]:
    strides = [int(torch.tensor(shape[i + 1 :]).prod()) for i in range(len(shape))]
    return {"t": [dtype, list(shape), strides]}


@pytest.mark.parametrize(
    ("op", "args", "bound"),
    [
        ("aten.index_add.default", [tensor("float32", 60, 4), 0, tensor("int64", 9), tensor("float32", 9, 4)], 60),
        ("aten.index_select.default", [tensor("float32", 60, 4), -1, tensor("int64", 9)], 4),
        ("aten.gather.default", [tensor("float32", 6, 40), 1, tensor("int64", 6, 2)], 40),
        ("aten.index.Tensor", [tensor("float32", 60, 4), [tensor("int64", 9)]], 60),
        ("aten.index_put.default", [tensor("float32", 4, 60), [None, tensor("int64", 9)], tensor("float32", 4, 9), True], 60),
        ("aten.embedding.default", [tensor("float32", 60, 4), tensor("int64", 9)], 60),
        ("aten.embedding_dense_backward.default", [tensor("float32", 9, 4), tensor("int64", 9), 60, -1, False], 60),
        ("aten.nll_loss_forward.default", [tensor("float32", 9, 5), tensor("int64", 9), None, 1, -100], 5),
    ],
)
def test_indices_are_spread_over_what_they_index(op: str, args: list[Any], bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions to few rows take longer on a GPU than to many: atomic ones to one address run one after the other."""
    bounds: list[int] = []
    draw = torch.randint
    monkeypatch.setattr(torch, "randint", lambda high, *args, **options: (bounds.append(high), draw(high, *args, **options))[1])
    call = repeated_call(Operation(op, "", "forward", arguments=json.dumps([args, {}])), "cpu")
    assert call is not None and call() is not None and bounds == [bound]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_of_gpu_traces_run_on_real_tensors(kind: str) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = getattr(nn, kind)(6, 8, 2, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0].mean(1)

    batch = torch.zeros(3, 5, 6), torch.zeros(3, dtype=torch.long)
    trace = pare.trace_step(Network(), batch, loss=cross_entropy, device="cuda")
    forward, backward = (one for one in trace.operations if not one.op.startswith("aten.") and one.op != VIEW)
    calls = [repeated_call(one, "cpu") for one in (forward, backward)]
    assert calls[0] is not None and calls[1] is not None
    result: Any = calls[0]()
    assert result[0].shape == (5, 3, 16), "dimension 0 is time"
    weights = sum(part.numel() for part in Network().parameters())
    gradients: Any = calls[1]()
    assert gradients[0].shape == (5, 3, 6) and sum(part.numel() for part in gradients[1:]) == weights
    plain = calibration("cuda")
    launched = replace(plain, launched={operation_key(forward): 2.0, operation_key(backward): 3.0})
    host = [predict_step(trace, calibration=one).host_seconds for one in (plain, launched, launched.with_host_speed(2.0))]
    assert host[1] - host[0] == pytest.approx(5.0 - 2e-3), "instead of 1 ms for each"
    rest = host[1] - 5.0
    assert host[2] == pytest.approx(2 * rest + (1 + LAUNCH_SHARE) * 5.0) and 0 < LAUNCH_SHARE < 1, "the driver slows down less"


@pytest.mark.parametrize(("length", "lengths"), [(1000, [32, 16]), (32, [32]), (7, [7])])
def test_device_time_of_a_long_sequence_follows_from_short_ones(
    length: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a GPU that takes 3 s, and 2 s for each position of 2 layers in 2 directions."""
    seen: list[int] = []

    def seconds(call: Any, num_calls: int, sleep_seconds: float) -> float:
        assert num_calls == 1 and sleep_seconds > 0
        return 3.0 + 2.0 * call()[0].shape[0]

    monkeypatch.setattr(operation_time, "cuda_seconds", seconds)
    monkeypatch.setattr(operation_time, "QUEUED_STEPS", 128)
    made = operation_time._recurrent

    def recurrent(x: torch.Tensor, *args: Any, is_backward: bool) -> Any:
        seen.append(x.shape[0])
        return made(x, *args, is_backward=is_backward)

    monkeypatch.setattr(operation_time, "_recurrent", recurrent)
    arguments = json.dumps([[tensor("float32", length, 3, 6), "lstm", 8, 2, 2], {}])
    for op in ("lstm", RNN_BACKWARD):
        seen.clear()
        found = operation_time._recurrent_seconds(Operation(op, "", "forward", arguments=arguments), "cpu")
        assert seen == lengths and found == pytest.approx(3.0 + 2.0 * length)


def test_operations_that_are_not_timed_have_the_rate_of_others_of_their_name() -> None:
    def add(num: int, op: str = "aten.add.Tensor") -> Operation:
        return Operation(op, "", "forward", "float32", nbytes=num, arguments=json.dumps([[tensor("float32", num)], {}]))

    operations = add(100), add(1_000), add(10_000), add(100_000), add(10, "aten.mul.Tensor")
    timed = {operation_key(add(100)): 1.0, operation_key(add(10_000)): 10.0}  # 100 and 1,000 bytes per second
    trace = replace(traced(), operations=operations)
    found = estimated_seconds([trace], timed)
    assert found[operation_key(add(1_000))] == pytest.approx(1_000 / 100_000**0.5), "between them, by logarithms"
    assert found[operation_key(add(100_000))] == pytest.approx(100.0), "beyond them, the rate of the nearest"
    assert len(found) == 2, "nothing of the other name was timed"
    known = replace(calibration("cpu"), timed=timed, estimated=found)
    assert known.operation_seconds(add(1_000)) == found[operation_key(add(1_000))] and known.num_untimed(trace) == 3
    assert pare.Calibration.from_json(known.to_json()) == known


def test_convolutions_have_rates_by_the_size_of_their_kernels() -> None:
    def convolution(channels: int, side: int) -> Operation:
        arguments = json.dumps([[tensor("float32", 2, channels, 8, 8), tensor("float32", 4, channels, side, side)], {}])
        return Operation("aten.convolution.default", "", "forward", "float32", nbytes=1000 * channels, arguments=arguments)

    operations = [convolution(channels, side) for channels in (4, 8) for side in (1, 3)]
    timed = {operation_key(convolution(4, 1)): 1.0, operation_key(convolution(4, 3)): 5.0}
    found = estimated_seconds([replace(traced(), operations=(*operations, convolution(8, 5)))], timed)
    assert [found[operation_key(convolution(8, side))] for side in (1, 3)] == pytest.approx([2.0, 10.0])
    assert operation_key(convolution(8, 5)) in found, "by the rate of all sizes, of which one was timed last"


def test_convolutions_get_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a stand-in moves 10 s with each operation."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(operation_time.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(operation_time, "device_seconds", lambda call, device: 0.125)

    def ranked(op: str, size: int) -> Operation:
        arguments = json.dumps([[tensor("float32", 2, 2), tensor("float32", 2, 2)], {}])
        return Operation(op, "", "forward", "float32", nbytes=size, arguments=arguments.replace("[2, 2]", f"[2, {size}]"))

    convolutions = [ranked("aten.convolution.default", 100 + size) for size in range(6)]
    others = [ranked("aten.add.Tensor", 10 + size) for size in range(3)]
    trace = replace(traced(), operations=(*convolutions, *others))
    made = with_operations(calibration("cpu"), [trace], most_seconds=85.0)
    assert sum(operation_key(one) in made.timed for one in convolutions) == 5
    assert all(operation_key(one) in made.timed for one in others[1:]) and operation_key(others[0]) in made.estimated
    assert operation_key(convolutions[0]) in made.estimated


def test_operations_with_most_work_are_timed_first_and_the_rest_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a stand-in moves 10 s with each operation."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(operation_time.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(operation_time, "device_seconds", lambda call, device: 0.125)
    trace = traced()
    by_key = {operation_key(one): one for one in trace.operations if one.op != VIEW}
    num_names = len({one.op for one in by_key.values()})
    first = time_operations([trace], "cpu", most_seconds=10.0 * num_names + 35.0).timed
    assert len(first) == num_names + 3 and len({by_key[key].op for key in first}) == num_names, "one of each name, and three more"
    seen: set[str] = set()
    others = [by_key[key] for key in first if by_key[key].op in seen or seen.add(by_key[key].op)]
    least = min(one.count * one.nbytes for one in others)
    light = [one for key, one in by_key.items() if key not in first and not one.flops]
    assert len(others) == 3 and all(one.count * one.nbytes <= least for one in light)
    rest = time_operations([trace], "cpu", known=first).timed
    assert not first.keys() & rest.keys() and first.keys() | rest.keys() == by_key.keys()


def test_host_time_of_calls_is_measured_in_empty_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for a GPU: a call takes 6 s of the host, an empty operation 2 s; the host is half as fast in the second group."""
    now, speeds = [0.0], iter([1.0, 2.0, 1.0])
    speed = [1.0]

    def empty(device: str, num_calls: int) -> float:
        assert device == "cuda"
        return 2.0 * speed[0]

    def call() -> None:
        now[0] += 6.0 * speed[0]

    monkeypatch.setattr(operation_time.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(operation_time.torch.cuda, "synchronize", lambda: speed.__setitem__(0, next(speeds)))
    monkeypatch.setattr(operation_time, "empty_operation", empty)
    monkeypatch.setattr(operation_time, "device_seconds", lambda call, device: 0.25)
    monkeypatch.setattr(operation_time, "repeated_call", lambda operation, device: call)
    add = Operation("aten.add.Tensor", "", "forward", nbytes=8, arguments="[[],{}]")
    trace = replace(traced("cuda"), operations=(add,))
    found = time_operations([trace], "cuda")
    assert found == CallSeconds({operation_key(add): 0.25}, {"aten.add.Tensor": 3.0}, {})
    monkeypatch.setattr(operation_time, "_recurrent_seconds", lambda operation, device: 0.5)
    monkeypatch.setattr(operation_time, "LAUNCH_PAUSE", 0.0)
    speed[0], speeds = 1.0, iter([3.0, 1.0, *[2.0] * (operation_time.LAUNCHES - 2)])
    rnn = replace(add, op="lstm")
    seconds = time_operations([replace(trace, operations=(rnn,))], "cuda")
    assert seconds.issued == {} and seconds.launched == {operation_key(rnn): 6.0}, "the least, in seconds"
    speeds = iter([1.0, 2.0, 1.0])
    known = replace(calibration("cuda"), issued={"aten.mul.Tensor": 7.0})
    assert with_operations(known, [trace]).issued == {"aten.mul.Tensor": 7.0, "aten.add.Tensor": 3.0 * known.host.empty_operation}
