"""`time_operations` measures device seconds of the operations of traces: it repeats each on tensors of its shapes, dtypes and strides.

Floats are random, since matrix products of zeros draw less power and run faster. Integers are random: indices below the size of the
dimension that they index, since additions to few rows take longer than to many; others below the smallest dimension of the call's
matrices, so that they are valid as targets. A call that cannot be repeated, or that does not fit the memory, has 0 seconds: its time is
predicted by rates.

Operations that are not timed for lack of time are estimated from timed ones of the same name and dtype (and size of a convolution's
kernel), by bytes per second or by floating point operations: DenseNet-121 has hundreds that differ in the number of channels alone.
Convolutions, for which cuDNN tries its algorithms, get half of the time.

The host time of calls is measured too: by name, since shapes change it little, and as a multiple of the time of an empty operation that is
called right after, since the speed of the host changes while others use it. On the CPU the time of a call is that of the device.

One call of cuDNN's RNNs launches kernels for every position. Its host time is measured in seconds for these shapes, as the least of
several. Its device time follows from two sequences that are so short that all of their launches are queued before the first one runs:

    seconds(length) = seconds(short) + (length - short) * (seconds(short) - seconds(half)) / (short - half)

torch's profiler is used nowhere: it stays attached to the driver when it has ended, and later launches of the process take longer (an empty
operation 8.6 us instead of 6.2, one H200, torch 2.11).
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown.plan.calibration import Calibration, interpolated, kind_of, operation_key
from paredown.plan.trace import Operation, Trace
from paredown.predict.device_time import cuda_seconds, device_seconds, empty_operation
from paredown.predict.fake.device_ops import ATTENTION, ATTENTION_BACKWARD, RNN_BACKWARD

MOST_OPERATIONS = 2000  # most operations that are timed, of all traces together
DEFAULT_BOUND = 2  # exclusive bound of integers in calls without matrices
FLOPS_PER_BYTE = 100  # roughly what GPUs compute in 16 bits while they move a byte
CONVOLUTION_SHARE = 0.5  # most of the measuring time that convolutions may take
RNNS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
}
ISSUES, ISSUED_CALLS, EMPTY_CALLS = 3, 4, 50  # groups of calls whose host time is measured, and empty operations after each
LAUNCHES, LAUNCH_PAUSE = 12, 0.1  # calls of an RNN whose host time is measured, and seconds between them
# positions times layers and directions of a short sequence: with a few kernels each, fewer launches than the 1024 that can be queued
QUEUED_STEPS = 128
QUEUE_SLEEP = 20e-3  # seconds in which the host issues the launches of a short sequence


class CallSeconds(NamedTuple):
    """The measured seconds of operations, from which a `Calibration` is made.

    `timed` has the device seconds by `operation_key`, 0 if a call cannot be repeated. `issued` has the host time by the name of the
    operation, as a multiple of that of an empty operation; `launched` has the host seconds of calls of cuDNN's RNNs, by `operation_key`.
    """

    timed: dict[str, float]
    issued: dict[str, float]
    launched: dict[str, float]


def with_operations(calibration: Calibration, traces: Sequence[Trace], *, most_seconds: float = inf) -> Calibration:
    """Return the calibration with measured times of all operations in `traces` that it does not have yet.

    After `most_seconds` no further measurement begins.
    """
    found = time_operations(traces, calibration.device, known=calibration.timed, most_seconds=most_seconds)
    timed, empty = {**calibration.timed, **found.timed}, calibration.host.empty_operation
    estimated = {**calibration.estimated, **estimated_seconds(traces, timed)}
    issued = {**{name: empty * ratio for name, ratio in found.issued.items()}, **calibration.issued}
    launched = {**calibration.launched, **found.launched}
    return replace(calibration, timed=timed, estimated=estimated, issued=issued, launched=launched)


def time_operations(traces: Iterable[Trace], device: str, *, known: Container[str] = (), most_seconds: float = inf) -> CallSeconds:
    """Return the measured seconds of each different operation in `traces`, except those whose key is in `known`.

    Keys are those of `operation_key`. After `most_seconds` no further measurement begins.
    """
    now = begun = time.perf_counter()
    timed, ratios, launched = dict[str, float](), dict[str, list[float]](), dict[str, float]()
    convolving, is_convolution = 0.0, False
    missing = [one for one in distinct(traces) if operation_key(one) not in known]
    for operation in _largest_of_each_name_first(missing)[:MOST_OPERATIONS]:
        before, now = now, time.perf_counter()
        convolving += (now - before) * is_convolution
        if now - begun > most_seconds:
            break
        is_convolution = kind_of(operation.op) == "conv"
        if not is_convolution or convolving <= CONVOLUTION_SHARE * most_seconds:
            key = operation_key(operation)
            timed[key], host = _seconds(operation, device) or (0.0, None)
            if host is not None and _is_recurrent(operation):
                launched[key] = host
            elif host is not None:
                ratios.setdefault(operation.op, []).append(host)
    return CallSeconds(timed, {name: median(values) for name, values in ratios.items()}, launched)


def _largest_of_each_name_first(operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations in the order in which to time them: first the largest of each name.

    One host time counts for all operations of a name, so that each name should be timed early.
    """
    by_work = sorted(operations, key=lambda one: one.count * _work(one), reverse=True)
    first = {one.op: one for one in reversed(by_work)}
    return sorted(by_work, key=lambda one: first[one.op] is not one)


def _work(operation: Operation) -> float:
    """Return the size of a call in bytes: those that it moves, or if they are more, its flops converted to bytes."""
    return max(operation.nbytes, operation.flops / FLOPS_PER_BYTE)


def estimated_seconds(traces: Iterable[Trace], timed: Mapping[str, float]) -> dict[str, float]:
    """Return estimated seconds of the operations that were not timed, from similar ones that were, by `operation_key`.

    `timed` has the measured seconds by that key. Similar operations have the same name and dtype; the rate is interpolated between the two
    that are nearest in size. Convolutions have separate rates for each size of their kernels: those of 1 x 1 are limited by memory, those
    of 3 x 3 by computing.
    """
    rates: dict[tuple[str, ...], dict[float, float]] = {}
    operations = [one for one in distinct(traces) if _work(one)]
    for one in operations:
        seconds = timed.get(operation_key(one))
        for key in _alike(one) if seconds else ():
            rates.setdefault(key, {})[_work(one)] = _work(one) / (seconds or 1.0)
    points = {key: sorted(by_work.items()) for key, by_work in rates.items()}
    found: dict[str, float] = {}
    for one in operations:
        key = next((key for key in _alike(one) if key in points), None)
        if key is not None and operation_key(one) not in timed:
            found[operation_key(one)] = _work(one) / interpolated(points[key], _work(one))
    return found


def _alike(operation: Operation) -> list[tuple[str, ...]]:
    """Return the keys under which operations of about the same rate are collected, the narrow key first.

    A key has the name, the dtype and, for a convolution, the size of the kernel.
    """
    name = operation.op, operation.dtype
    if kind_of(operation.op) != "conv":
        return [name]
    sizes = [tuple(shape[2:]) for _, shape, _ in _tensors(json.loads(operation.arguments)) if len(shape) > 2]
    return [(*name, str(min(sizes, key=prod))), name] if sizes else [name]


def _is_recurrent(operation: Operation) -> bool:
    return operation.op in RNNS or operation.op == RNN_BACKWARD


def _empty_operations(call: Callable[[], object]) -> float:
    """Return the host time of `call()` as a multiple of that of an empty operation."""
    return median(_host_seconds(call, ISSUED_CALLS) / empty_operation("cuda", EMPTY_CALLS) for _ in range(ISSUES))


def _least_host_seconds(call: Callable[[], object]) -> float:
    """Return the host seconds of the quickest of several calls.

    There are pauses between them, since a busy moment of a shared host makes all calls in it longer.
    """
    least = inf
    for _ in range(LAUNCHES):
        time.sleep(LAUNCH_PAUSE)
        call()
        least = min(least, _host_seconds(call, 1))
    return least


def _host_seconds(call: Callable[[], object], num_calls: int) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - begun) / num_calls


def _recurrent_seconds(operation: Operation, device: str) -> float:
    """Return the device seconds of a call of an RNN, extrapolated from two short sequences.

    In a call with a long sequence, the device would wait for the host between kernels. Each is the least of several measurements, since a
    busy host may issue the kernels too late.
    """
    (x, *others), _ = json.loads(operation.arguments)
    (dtype, (length, *sizes), strides), (num_layers, directions) = x["t"], others[-2:]
    short, seconds = min(length, max(2, QUEUED_STEPS // (num_layers * directions))), list[float]()
    for num in (short, short // 2) if short < length else (length,):
        sequence = _tensor(dtype, [num, *sizes], strides, device=device, bound=1)
        call = _recurrent(sequence, *others, is_backward=operation.op == RNN_BACKWARD)
        call()
        seconds.append(min(cuda_seconds(call, 1, QUEUE_SLEEP) for _ in range(ISSUES)))
    beyond = max(seconds[0] - seconds[-1], 0.0) * (length - short) / max(short - short // 2, 1)
    return seconds[0] + beyond


def distinct(traces: Iterable[Trace]) -> Iterator[Operation]:
    """Yield each different operation of `traces`, and of the variants of the step that they contain, once."""
    seen: set[str] = set()
    for trace in traces:
        for step in (trace, trace.without_packing, trace.unmodified):
            for operation in step.operations if step is not None else ():
                if operation.arguments and not (operation_key(operation) in seen or seen.add(operation_key(operation))):
                    yield operation


def _seconds(operation: Operation, device: str) -> tuple[float, float | None] | None:
    """Return the measured (device seconds, host time) of a call; None if it cannot be repeated here.

    The host time is a multiple of that of an empty operation; for RNNs it is in seconds, and on the CPU it is None.
    """
    try:
        call = repeated_call(operation, device)
        if call is None:
            return None
        if device == "cpu":
            return device_seconds(call, device), None
        if _is_recurrent(operation):
            return _recurrent_seconds(operation, device), _least_host_seconds(call)
        return device_seconds(call, device), _empty_operations(call)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, KeyError):
        call = None  # its tensors are freed below
    gc.collect()
    return None


def repeated_call(operation: Operation, device: str) -> Callable[[], object] | None:
    """Return a function that calls a traced operation again, on new tensors; None if it is not one of torch's."""
    args, kwargs = json.loads(operation.arguments)
    bound = max(_index_bound(operation.op, args), 1)
    values, named = _values(args, device, bound), _values(kwargs, device, bound)
    if operation.op in (ATTENTION, ATTENTION_BACKWARD):
        return _attention(values, is_backward=operation.op == ATTENTION_BACKWARD)
    if _is_recurrent(operation):
        return _recurrent(*values, is_backward=operation.op == RNN_BACKWARD)
    namespace, _, rest = operation.op.partition(".")
    name, _, overload = rest.partition(".")
    if namespace != "aten" or not name:
        return None
    if "device" in named:
        named["device"] = torch.device(device)
    function = getattr(getattr(torch.ops.aten, name), overload or "default")
    return lambda: function(*values, **named)


def _attention(values: list[Any], *, is_backward: bool) -> Callable[[], object]:
    query, key, value, causal, *bias = values
    query, key, value = (tensor.requires_grad_(is_backward) for tensor in (query, key, value))
    options: dict[str, Any] = {"is_causal": causal and not bias, "attn_mask": bias[0] if bias else None}
    if key.shape[1] != query.shape[1]:
        options["enable_gqa"] = True
    if not is_backward:
        return lambda: functional.scaled_dot_product_attention(query, key, value, **options)
    out = functional.scaled_dot_product_attention(query, key, value, **options)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)


def _recurrent(x: Tensor, kind: str, width: int, num_layers: int, directions: int, *, is_backward: bool) -> Callable[[], object]:
    layer = RNNS[kind](x.shape[-1], width, num_layers, bidirectional=directions == 2).to(x.device, x.dtype)
    if not is_backward:
        return lambda: layer(x)
    out, _ = layer(x.requires_grad_())
    grad, inputs = torch.randn_like(out), (x, *layer.parameters())
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _index_bound(op: str, args: list[Any]) -> int:
    """Return a number that the integers among a call's arguments must be below, since they index a dimension."""
    name = op.removeprefix("aten.").partition(".")[0].strip("_")
    if name == "embedding_dense_backward":
        return args[2]  # rows of the table
    shape = next(_tensors(args), ("", [], []))[1]
    if name == "embedding":
        return shape[0]
    if name in ("index", "index_put", "unsafe_index", "unsafe_index_put", "index_put_impl"):
        return min(side for side, index in zip(shape, args[1], strict=False) if index is not None)
    return shape[args[1]] if name.startswith(("index_", "scatter", "gather")) else _smallest_side(args)


def _smallest_side(args: Any) -> int:
    """Return the smallest size of a dimension among a call's float tensors, without those of one dimension."""
    sides = [side for dtype, shape, _ in _tensors(args) if len(shape) > 1 and "float" in dtype for side in shape]
    return max(min(sides, default=DEFAULT_BOUND), 1)


def _tensors(value: Any) -> Iterator[tuple[str, list[int], list[int]]]:
    if isinstance(value, dict):
        if "t" in value:
            yield value["t"]
    elif isinstance(value, list):
        for part in value:
            yield from _tensors(part)


def _values(value: Any, device: str, bound: int) -> Any:
    """Return a call's arguments from their JSON `value`, with new random tensors; integers are below `bound`."""
    if isinstance(value, list):
        return [_values(part, device, bound) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"t"}:
        return _tensor(*value["t"], device=device, bound=bound)
    if value.keys() == {"o"}:
        return getattr(torch, value["o"])
    return {name: _values(part, device, bound) for name, part in value.items()}


def _tensor(dtype: str, shape: list[int], strides: list[int], *, device: str, bound: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    num = 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    if kind.is_floating_point:
        flat = torch.randn(num, device=device, dtype=torch.float32 if kind.itemsize < 2 else kind).to(kind)
    elif kind is torch.bool:
        flat = torch.rand(num, device=device) < 0.5
    else:
        flat = torch.randint(bound, (num,), device=device, dtype=kind)
    return flat.as_strided(shape, strides)
