"""`time_operations`: device seconds of the operations of traces, each distinct call repeated on tensors of its shapes, dtypes and strides.

Floats are random, since matrix products of zeros draw less power and run faster; integers are random below the smallest dimension of the
call's matrices, so that they are valid as indices and as targets. A call that cannot be repeated, or that does not fit the memory, has 0
seconds: its time is predicted by rates.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Container, Iterable, Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paredown.calibrate.device_time import device_seconds
from paredown.plan.calibration import operation_key
from paredown.trace.device_ops import ATTENTION, ATTENTION_BACKWARD
from paredown.trace.trace import Operation, Trace

MOST_OPERATIONS = 2000  # of all traces together
DEFAULT_BOUND = 2  # of integers in calls without matrices
FLOPS_PER_BYTE = 100  # roughly, of GPUs in 16 bits


def time_operations(
    traces: Iterable[Trace], device: str, *, known: Container[str] = (), most_seconds: float = inf
) -> dict[str, float]:
    """Seconds of each distinct operation of the traces, by `operation_key`, without those `known`; no new one after `most_seconds`."""
    begun, timed = time.perf_counter(), dict[str, float]()
    missing = [one for one in distinct(traces) if operation_key(one) not in known]
    for operation in sorted(missing, key=_work, reverse=True)[:MOST_OPERATIONS]:
        if time.perf_counter() - begun > most_seconds:
            break
        timed[operation_key(operation)] = _seconds(operation, device) or 0.0
    return timed


def _work(operation: Operation) -> float:
    """What decides the order: bytes that all calls move, or their floating point operations over those that a device does for a byte."""
    return operation.count * max(operation.nbytes, operation.flops / FLOPS_PER_BYTE)


def distinct(traces: Iterable[Trace]) -> Iterator[Operation]:
    """One operation of each key, of traces and of the steps that they hold."""
    seen: set[str] = set()
    for trace in traces:
        for step in (trace, trace.without_packing, trace.unmodified):
            for operation in step.operations if step is not None else ():
                if operation.arguments and not (operation_key(operation) in seen or seen.add(operation_key(operation))):
                    yield operation


def _seconds(operation: Operation, device: str) -> float | None:
    try:
        call = repeated_call(operation, device)
        return device_seconds(call, device) if call is not None else None
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        gc.collect()
        return None


def repeated_call(operation: Operation, device: str) -> Callable[[], object] | None:
    """A function that runs the operation again on new tensors; None for what only stands for a kernel."""
    args, kwargs = json.loads(operation.arguments)
    bound = _smallest_side(args)
    if "embedding_dense_backward" in operation.op:
        bound = args[2]  # rows of the table
    values, named = _values(args, device, bound), _values(kwargs, device, bound)
    if operation.op in (ATTENTION, ATTENTION_BACKWARD):
        return _attention(values, is_backward=operation.op == ATTENTION_BACKWARD)
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


def _smallest_side(args: Any) -> int:
    """The smallest dimension of float tensors with two or more dimensions."""
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
    """The arguments that `_arguments_json` of trace/timeline.py wrote, with new tensors."""
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
