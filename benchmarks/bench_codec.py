"""Encode, decode and round_trip beside their peers, as a share of what the device copies: one table, and rows in results/codec.json.

    python benchmarks/bench_codec.py                    # the GPU if there is one, 2 threads of the CPU, and one core
    python benchmarks/bench_codec.py --core             # one core of the CPU alone
    PEERS=folder python benchmarks/bench_codec.py       # unpacked wheels of qtorch and bitsandbytes, where they are not installed
    python benchmarks/bench_codec.py --busy             # encode and decode on a CPU alone, and while another process keeps a core busy

The ceiling is torch's device-to-device copy of a float32 tensor, in the same run. Bytes are what a job has to move: its input read once and
its output written once. Each of our jobs goes through the public functions, which allocate their output at each call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from measure import Row, append, machine, time_call

import paredown as pare
from paredown.codec.backend import find_kernels

PACKAGES = ("torch", "triton", "numpy", "numba", "qtorch", "bitsandbytes")
OURS = "paredown"
BLOCK_FORMATS = (
    "int8/64@bf16",
    "e4m3fn/64@bf16",
    "int4/64@bf16",
    "int2/64@bf16",
    "uint4/64@bf16+fp32",
    "uint8/64@bf16",
    "int8/64@e8m0",
    "e2m1fn/32@e8m0",
    "e3m2fn/32@e8m0",
    "e2m1fn/16@e4m3fn",
    "nf4/64@fp32",
)


@dataclass(frozen=True)
class Case:
    """Something to time: the first of a job is ours, the others are its peers."""

    job: str
    who: str
    bytes_moved: int
    call: Callable[[], object]


# --- GPU --------------------------------------------------------------------------------------------------------------


def gpu_cases(x: torch.Tensor) -> Iterator[Case]:
    """All jobs on one float32 tensor `x`; the caller runs each before asking for the next."""
    numel, y = x.numel(), torch.empty_like(x)
    yield Case("copy fp32", "torch", 8 * numel, lambda: y.copy_(x))
    yield from unblocked_cases(x, y)
    half, rows = x.bfloat16(), x.view(-1, 4096).shape
    for text in BLOCK_FORMATS:
        yield from block_cases(half.view(rows), text)
    yield from bitsandbytes_cases(half)


def unblocked_cases(x: torch.Tensor, y: torch.Tensor) -> Iterator[Case]:
    """float32 to 8 bits, and rounding in place of storing."""
    numel = x.numel()
    for text, kind in (("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        job = f"encode fp32 {text} nearest"
        yield Case(job, OURS, 5 * numel, lambda text=text: pare.encode(x, text))
        yield Case(job, f"torch .to({kind})", 5 * numel, lambda kind=kind: x.to(kind))
        yield Case(
            f"encode fp32 {text} stochastic", OURS, 5 * numel, lambda text=text: pare.encode(x, text, rounding="stochastic", seed=7)
        )
    for rounding in ("nearest", "stochastic"):
        job = f"round_trip fp32 e4m3, format at run time, {rounding}"
        yield Case(job, OURS, 8 * numel, run_time_call(x, y, rounding))
        if quantize := qtorch_quantize():
            yield Case(job, "qtorch float_quantize", 8 * numel, lambda rounding=rounding: quantize(x, 4, 3, rounding))


def run_time_call(x: torch.Tensor, y: torch.Tensor, rounding: str) -> Callable[[], object]:
    """A kernel that finds the element in device memory."""
    kernels = find_kernels()
    assert kernels is not None
    spec = kernels.device_spec(pare.Element.parse("e4m3fn"), pare.Overflow.SATURATE, x.device)
    chosen = pare.Rounding.STOCHASTIC if rounding == "stochastic" else pare.Rounding.NEAREST_EVEN
    return lambda: kernels.round_trip_at_run_time(x, spec, chosen, pare.Seed(7), y)


def block_cases(x: torch.Tensor, text: str) -> Iterator[Case]:
    """bf16 to a block format and back."""
    moved = x.nbytes + pare.Format.parse(text).nbytes(x.shape)
    packed = pare.encode(x, text, overflow="saturate")
    yield Case(f"encode bf16 {text} nearest", OURS, moved, lambda: pare.encode(x, text, overflow="saturate"))
    yield Case(
        f"encode bf16 {text} stochastic",
        OURS,
        moved,
        lambda: pare.encode(x, text, overflow="saturate", rounding="stochastic", seed=7),
    )
    yield Case(f"decode bf16 {text}", OURS, moved, packed.decode)


def bitsandbytes_cases(x: torch.Tensor) -> Iterator[Case]:
    """bitsandbytes' own block formats: 8 bits by a table, and nf4, 64 values to a float32 scale."""
    try:
        from bitsandbytes import functional
    except Exception as error:
        print(f"bitsandbytes is not here: {error}", file=sys.stderr)
        return
    codes, state = functional.quantize_blockwise(x, blocksize=64)
    moved = x.nbytes + codes.nbytes + x.numel() // 16
    yield Case("encode bf16 8 bits by a table/64", "bitsandbytes", moved, lambda: functional.quantize_blockwise(x, blocksize=64))
    yield Case("decode bf16 8 bits by a table/64", "bitsandbytes", moved, lambda: functional.dequantize_blockwise(codes, state))
    codes4, state4 = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    moved = x.nbytes + codes4.nbytes + x.numel() // 16
    yield Case(
        "encode bf16 nf4/64@fp32 nearest",
        "bitsandbytes",
        moved,
        lambda: functional.quantize_4bit(x, blocksize=64, quant_type="nf4"),
    )
    yield Case("decode bf16 nf4/64@fp32", "bitsandbytes", moved, lambda: functional.dequantize_4bit(codes4, state4))


# --- CPU --------------------------------------------------------------------------------------------------------------


def cpu_cases(x: torch.Tensor) -> Iterator[Case]:
    """round_trip of a float32 tensor that does not fit the cache."""
    quantize = qtorch_quantize()
    for rounding, ours in (("nearest", "nearest_even"), ("stochastic", "stochastic")):
        job = f"round_trip fp32 e4m3 {rounding}, CPU"
        yield Case(job, OURS, 2 * x.nbytes, lambda ours=ours: pare.round_trip(x, "e4m3fn", rounding=ours, seed=7))
        if quantize:
            yield Case(job, "qtorch float_quantize", 2 * x.nbytes, lambda rounding=rounding: quantize(x, 4, 3, rounding))
    yield Case(
        "round_trip fp32 e4m3 nearest, CPU", "torch .to(fp8).to(fp32)", 2 * x.nbytes, lambda: x.to(torch.float8_e4m3fn).float()
    )


CORE_FORMATS = ("int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16", "e4m3fn/64@bf16", "nf4/64@fp32", "e4m3fn")


def core_cases(x: torch.Tensor) -> Iterator[Case]:
    """Encode and decode of float32 on one core, beside torch's casts and its own quantized tensors (scales given, in rows of 64)."""
    y, numel = torch.empty_like(x), x.numel()
    yield Case("copy fp32", "torch", 2 * x.nbytes, lambda: y.copy_(x))
    for text in CORE_FORMATS:
        moved = x.nbytes + pare.Format.parse(text).nbytes(x.shape)
        for rounding, ours in (("nearest", "nearest_even"), ("stochastic", "stochastic")):
            job = f"encode fp32 {text} {rounding}, one core"
            yield Case(job, OURS, moved, lambda text=text, ours=ours: pare.encode(x, text, rounding=ours, seed=7))
        packed = pare.encode(x, text)
        yield Case(f"decode fp32 {text}, one core", OURS, moved, packed.decode)
    half, narrow = x.bfloat16(), x.to(torch.float8_e4m3fn)
    yield Case("encode fp32 bf16, one core", "torch .to(bfloat16)", 6 * numel, x.bfloat16)
    yield Case("decode fp32 bf16, one core", "torch .float()", 6 * numel, half.float)
    yield Case("encode fp32 e4m3fn nearest, one core", "torch .to(float8_e4m3fn)", 5 * numel, lambda: x.to(torch.float8_e4m3fn))
    yield Case("decode fp32 e4m3fn, one core", "torch .float()", 5 * numel, narrow.float)
    yield from quantized_cases(x.view(-1, 64))


def quantized_cases(x: torch.Tensor) -> Iterator[Case]:
    """torch's quantized tensors of 8 bits: one scale for the tensor, and one for each row."""
    scales = x.abs().amax(1) / 127
    zeros = torch.zeros(len(scales), dtype=torch.long)
    by_tensor = torch.quantize_per_tensor(x, scales.max().item(), 0, torch.qint8)
    by_row = torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)
    job, moved = "fp32 int8/64@bf16", 5 * x.numel()
    scale = scales.max().item()
    yield Case(
        f"encode {job} nearest, one core",
        "torch.quantize_per_tensor",
        moved,
        lambda: torch.quantize_per_tensor(x, scale, 0, torch.qint8),
    )
    yield Case(
        f"encode {job} nearest, one core",
        "torch.quantize_per_channel",
        moved,
        lambda: torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8),
    )
    yield Case(f"decode {job}, one core", "quantize_per_tensor", moved, by_tensor.dequantize)
    yield Case(f"decode {job}, one core", "quantize_per_channel", moved, by_row.dequantize)


def busy_rows(x: torch.Tensor) -> list[Row]:
    """Encode and decode of a float32 tensor, with and without a process that computes all the time."""
    rows: list[Row] = []
    for text in ("int8/64@bf16", "int4/64@bf16"):
        call = lambda text=text: pare.encode(x, text, seed=7).decode()  # noqa: E731
        job, moved = f"encode and decode fp32 {text}, CPU", 4 * x.nbytes
        rows.append(Row(job, "alone", tuple(x.shape), moved, *time_call(call, "cpu", repeats=9)))
        process = multiprocessing.get_context("spawn").Process(target=compute_forever, daemon=True)
        process.start()
        try:
            rows.append(Row(job, "beside a busy process", tuple(x.shape), moved, *time_call(call, "cpu", repeats=9)))
        finally:
            process.terminate()
            process.join()
        alone, beside = rows[-2].median_seconds, rows[-1].median_seconds
        print(
            f"{job:52s} {1e3 * alone:8.1f} ms alone, {1e3 * beside:8.1f} ms beside a busy process: {beside / alone:.2f}x",
            flush=True,
        )
    return rows


def compute_forever() -> None:
    """Keep a core busy."""
    while True:
        pass


def qtorch_quantize() -> Callable[..., torch.Tensor] | None:
    """QPyTorch's float_quantize (tensor, exponent bits, mantissa bits, rounding), which it compiles when first imported."""
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    try:
        from qtorch.quant import float_quantize
    except Exception as error:
        print(f"qtorch is not here: {error}", file=sys.stderr)
        return None
    return float_quantize


# --- the table --------------------------------------------------------------------------------------------------------


def run(cases: Iterator[Case], shape: tuple[int, ...], device: str) -> list[Row]:
    """Each case timed, and printed with its share of the copy and of each peer's speed."""
    rows: list[Row] = []
    for case in cases:
        row = Row(case.job, case.who, shape, case.bytes_moved, *time_call(case.call, device))
        rows.append(row)
        print(line(row, rows), flush=True)
    return rows


def line(row: Row, rows: list[Row]) -> str:
    """One line of the table; for a peer, how much faster ours was."""
    copies = [r for r in rows if r.job == "copy fp32"]
    share = f"{100 * row.bytes_per_second / copies[0].bytes_per_second:6.1f} % of copy" if copies else " " * 16
    ours = next((r for r in rows if r.job == row.job and r.who == OURS and r is not row), None)
    versus = f"  ours is {row.median_seconds / ours.median_seconds:.1f}x faster" if ours else ""
    return f"{row.job:52s} {row.who:26s} {row.median_seconds * 1e3:9.3f} ms {row.bytes_per_second / 1e12:6.3f} TB/s {share}{versus}"


def main() -> None:
    """Time all of it, print the table and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log2-numel", type=int, default=28, help="values of the GPU's tensor, as a power of two")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--busy", action="store_true", help="only the CPU, alone and beside a busy process")
    parser.add_argument("--core", action="store_true", help="only one core of the CPU")
    options = parser.parse_args()
    if "PEERS" in os.environ:
        sys.path.append(os.environ["PEERS"])
    torch.manual_seed(0)
    if options.busy:
        torch.set_num_threads(2)
        rows = busy_rows(torch.randn(1 << 20))
        if not options.no_save:
            append("codec.json", machine("cpu", PACKAGES, options.commit), rows)
        return
    torch.set_num_threads(1)
    x = torch.randn(1 << 20)
    rows = run(core_cases(x), tuple(x.shape), "cpu")
    if not options.no_save:
        append("codec.json", machine("cpu", PACKAGES, options.commit), rows)
    if options.core:
        return
    if torch.cuda.is_available():
        x = torch.randn(1 << options.log2_numel, device="cuda")
        rows = run(gpu_cases(x), tuple(x.shape), "cuda")
        if not options.no_save:
            append("codec.json", machine("cuda", PACKAGES, options.commit), rows)
    torch.set_num_threads(2)
    x = torch.randn(1 << 22)
    rows = run(cpu_cases(x), tuple(x.shape), "cpu")
    if not options.no_save:
        append("codec.json", machine("cpu", PACKAGES, options.commit), rows)


if __name__ == "__main__":
    main()
