"""Measures the seconds of calls on a device (`device_seconds`), and the rates of matrix products, elementwise operations and codecs.

On CUDA the device first sleeps, so that all calls are queued before the first one runs: the time between two events is then that of the
kernels alone, also where the host is slower than the device. On the CPU each call is timed, and the least counts.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from paredown.codec.packed import encode_flat
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from paredown.plan.calibration import ELEMENTWISE, TO_DEVICE, TO_HOST, UNALIGNED
from paredown.plan.storage import Assignment

CYCLES_PER_SECOND = 2e9  # about, of a GPU's clock
SLEEP_SECONDS = 1e-3  # longer than the host needs to issue the calls of one group
SEED = Seed(0, 0, 0)
CALLS, GROUP_SECONDS = 6, 4e-3  # most calls in a group between two events; fewer of long calls, which need no mean
GROUPS = 3
LARGE = {"cuda": 1 << 26, "cpu": 1 << 18}  # values of a tensor that does not fit the caches
SMALL = {"cuda": 1 << 14, "cpu": 1 << 12}
PRODUCTS = {"cuda": (256, 1024, 2048, 4096, 8192), "cpu": (64, 256, 512)}  # rows and columns of square matrices
ROWS = {"cuda": (8192, 1024), "cpu": (256, 256)}
FLOAT_DTYPES = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32, torch.bfloat16)}


def device_seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds that one `call()` takes on the device, after calls that warm it up."""
    call()
    if device == "cpu":
        call()
        return min(_cpu_seconds(call) for _ in range(GROUPS))
    num_calls = num_calls_of(cuda_seconds(call, 1))
    return median(cuda_seconds(call, num_calls) for _ in range(GROUPS))


def num_calls_of(seconds: float) -> int:
    """Return how many calls to time together if one takes `seconds`: fewer of long calls.

    >>> [num_calls_of(seconds) for seconds in (1e-5, 1e-3, 0.1)]
    [6, 4, 1]
    """
    return max(1, min(CALLS, round(GROUP_SECONDS / max(seconds, 1e-9))))


def _cpu_seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def cuda_seconds(call: Callable[[], object], num_calls: int, sleep_seconds: float = SLEEP_SECONDS) -> float:
    """Return the GPU's seconds for one `call()`, the mean over `num_calls` that were issued while the GPU slept.

    `sleep_seconds` must be longer than the host takes to issue all calls.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(sleep_seconds * CYCLES_PER_SECOND))
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / num_calls


def empty_operation(device: str, num_calls: int) -> float:
    """Return the host seconds of one small operation (an addition of one value), the mean over `num_calls`."""
    x = torch.ones(1, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(num_calls):
        x + x  # pyright: ignore[reportUnusedExpression]
    return (time.perf_counter() - begun) / num_calls


def bandwidths(device: str) -> dict[str, float]:
    """Return the measured bytes per second of each kind of memory-bound operation, and of copies to the host."""
    rows, width = ROWS[device]
    x = torch.randn(LARGE[device], device=device, dtype=torch.bfloat16)
    table = torch.randn(rows, width, device=device)
    weight, moved = torch.ones(width, device=device), 2 * table.numel() * 4
    normed, mean, rstd = torch.native_layer_norm(table, [width], weight, weight, 1e-5)
    indices = torch.randint(rows, (rows,), device=device)
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        ELEMENTWISE: (3 * x.numel() * 2, lambda: x + x),
        "norm": (moved, lambda: torch.native_layer_norm(table, [width], weight, weight, 1e-5)),
        "norm_backward": (
            moved * 3 // 2,
            lambda: torch.ops.aten.native_layer_norm_backward(
                normed, table, [width], mean, rstd, weight, weight, [True, True, True]
            ),
        ),
        "softmax": (moved, lambda: functional.log_softmax(table, -1)),
        "reduction": (moved // 2, lambda: table.sum(0)),
        "scatter": (moved, lambda: torch.ops.aten.embedding_dense_backward(table, indices, rows, -1, False)),
    }
    if device == "cuda":
        on_host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        calls[TO_HOST] = x.nbytes, lambda: on_host.copy_(x, non_blocking=True)
        calls[TO_DEVICE] = x.nbytes, lambda: x.copy_(on_host, non_blocking=True)
    return {kind: nbytes / device_seconds(call, device) for kind, (nbytes, call) in calls.items()}


def smallest_kernel(device: str) -> float:
    """Return the device seconds of a kernel on a few values, the least that any operation takes."""
    x = torch.ones(SMALL[device], device=device)
    return device_seconds(lambda: x.add_(1.0), device)


def flop_rates(device: str) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return the measured flops per second of matrix products, 3 x 3 convolutions and attention, by kind and dtype.

    Each is a list of pairs (flops, flops per second) at rising sizes.
    """
    rates: dict[str, tuple[tuple[float, float], ...]] = {}
    for dtype in FLOAT_DTYPES[device]:
        name = str(dtype).removeprefix("torch.")
        rates[f"matmul {name}"] = tuple(_products(device, dtype))
        rates[f"matmul {name}{UNALIGNED}"] = tuple(_products(device, dtype, beyond=1))
        rates[f"conv {name}"] = tuple(_convolutions(device, dtype))
        rates[f"attention {name}"] = tuple(_attention(device, dtype))
    return rates


def _products(device: str, dtype: torch.dtype, beyond: int = 0) -> Iterator[tuple[float, float]]:
    """Yield (flops, flops per second) of growing matrix products, with `beyond` more columns in the result."""
    for size in PRODUCTS[device][: -1 if dtype is torch.float32 and device == "cuda" else None]:
        a, b = torch.randn(size, size, device=device, dtype=dtype), torch.randn(size, size + beyond, device=device, dtype=dtype)
        flops = 2.0 * size * size * (size + beyond)
        yield flops, flops / device_seconds(lambda: a @ b, device)  # noqa: B023


def _convolutions(device: str, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    shapes = ((4, 64, 14), (32, 64, 28), (128, 128, 28)) if device == "cuda" else ((1, 16, 8), (2, 32, 14))
    for num, channels, side in shapes:
        x = torch.randn(num, channels, side, side, device=device, dtype=dtype).to(memory_format=torch.channels_last)
        weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype).to(memory_format=torch.channels_last)
        flops = 2.0 * x.numel() * channels * 9
        yield flops, flops / device_seconds(lambda: functional.conv2d(x, weight, padding=1), device)  # noqa: B023


def _attention(device: str, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for num, length in ((2, 128), (8, 1024)) if device == "cuda" else ((1, 32), (1, 128)):
        q = torch.randn(num, 8, length, 64, device=device, dtype=dtype)
        flops = 4.0 * num * 8 * length * length * 64
        yield flops, flops / device_seconds(lambda: functional.scaled_dot_product_attention(q, q, q), device)  # noqa: B023


def codec_seconds(text: str, device: str) -> tuple[float, float, float]:
    """Return (encoded bytes per second, decoded bytes per second, seconds of a launch) for the format `text`.

    Bytes are those of the bf16 tensor that is encoded.
    """
    small, large = (torch.randn(num, device=device, dtype=torch.bfloat16) for num in (SMALL[device], LARGE[device]))
    format = Format.parse(text)
    launch = min(_encode_decode(small, format, device))
    seconds = _encode_decode(large, format, device)
    encoded, decoded = (large.numel() * 2 / max(part - launch, part / 2) for part in seconds)
    return encoded, decoded, launch


def _encode_decode(x: Tensor, format: Format, device: str) -> tuple[float, float]:
    how = Assignment(format).resolved_rounding, None, SEED
    packed = encode_flat(x, format, *how)
    return device_seconds(lambda: encode_flat(x, format, *how), device), device_seconds(packed.decode, device)
