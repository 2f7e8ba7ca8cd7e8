"""Compile the Triton kernels for compute capability 9.0 where there is no GPU: `python -m tests.support.compile_kernels`.

The interpreter accepts kernels that Triton's compiler refuses: dtypes that do not match, conversions that a GPU lacks. Here a driver that
announces an H200 lets Triton compile each launch down to machine code, by its own ptxas, and nothing is launched. One line is printed for
each job of JOBS: its name and what was compiled, or the error.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITY, WARP = 90, 32


class CompilingDriver:
    """What Triton asks of the driver of a GPU when it compiles."""

    def get_current_target(self) -> GPUTarget:
        """The target of kernels."""
        return GPUTarget("cuda", CAPABILITY, WARP)

    def get_current_device(self) -> int:
        """The number of the device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The stream of launches that are not made."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


def compile_only() -> list[str]:
    """Let launches compile and not run from now on; returns a list that gets the name of each kernel that was compiled."""
    compiled: list[str] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        compiled.append(self.__name__)
        return run(self, *args, grid=grid, warmup=True, **constants)

    triton.runtime.driver.set_active(CompilingDriver())
    JITFunction.run = warm_up
    from paredown.codec.kernels import launch

    launch._is_quick = False  # every launch goes through Triton
    return compiled


def products(element: str) -> None:
    """The kernels that quantize operands of products."""
    from paredown.codec.kernels import products as kernels

    x = torch.ones(48, 256, dtype=torch.bfloat16)
    codes, _ = kernels.quantize_rows(x, element)
    kernels.quantize_columns(x, torch.ones(48), element)
    kernels.transposed(codes)


def codec(format: str, rounding: str) -> None:
    """Encode, decode and round trip."""
    from paredown.codec.kernels import rows
    from paredown.codec.reference import Encoding
    from paredown.formats.format import Format
    from paredown.formats.rounding import Overflow, Rounding, Seed

    how, x = Rounding(rounding), torch.ones(3, 130, dtype=torch.bfloat16)
    parsed = Format.parse(format)
    overflow = Overflow.SATURATE if parsed.block else Overflow.NONFINITE
    encoding = Encoding(parsed, how, overflow, Seed(1))
    parts = rows.encode_rows(x, encoding, None)
    rows.decode_rows(parts, encoding, torch.empty_like(x))
    rows.round_trip_rows(x, encoding, None, torch.empty_like(x))


def masks() -> None:
    """Masks of ReLU and its likes."""
    from paredown.codec.kernels import masks as kernels

    x, bits = torch.ones(5000, dtype=torch.bfloat16), torch.zeros(625, dtype=torch.uint8)
    kernels.pack_mask(x, 0.0, 1.0, bits)
    kernels.unpack_mask(bits, x, 1.0, 0.0)
    kernels.apply_mask(x, bits, torch.empty_like(x))


def recompute(activation: str, *, by_row: bool) -> None:
    """Decode, normalize, activate."""
    from paredown.codec import kernels
    from paredown.codec.packed import encode
    from paredown.codec.recompute import DecodeSteps, Norm

    x, numbers = torch.ones(8 * 64), torch.ones(64)
    norm = Norm(64, 1, numbers, numbers, numbers[:8] if by_row else numbers, numbers[:8] if by_row else numbers, by_row=by_row)
    bits = torch.zeros(64, dtype=torch.uint8) if activation == "relu" else None
    kernels.recompute(encode(x, "int8/64@bf16"), DecodeSteps(norm, activation, bits), torch.empty(512, dtype=torch.bfloat16))


def update(rule: str, tier: str) -> None:
    """One update of an optimizer."""
    from paredown.optim import kernels
    from tests.optim.made import HYPERS, TIERS, unit

    one = unit(rule, TIERS[tier], 7, 80)
    kernels.update_one(one, one.how(rule), HYPERS[rule], 2, 6, None)


def sums_of_squares() -> None:
    """The norm of packed gradients."""
    from paredown.codec.packed import encode
    from paredown.optim.kernels import square_sums

    square_sums([encode(torch.ones(64, 128), "int8/64@bf16", order="logical")])


def loss(scales: tuple[float, ...], smoothing: float) -> None:
    """The gradient of the cross entropy."""
    from paredown.loss.kernels.softmax_gradient import losses_and_gradient_

    logits, target = torch.ones(4, 1000, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    losses_and_gradient_(logits, target, (-100, 1.0 - smoothing, smoothing / 1000), None, torch.ones(4), scales)


CODECS = (
    ("int8/64@bf16", "stochastic"),
    ("int4/64@e8m0", "nearest_even"),
    ("uint2/64@bf16+bf16", "stochastic"),
    ("e4m3fn/64@fp32", "stochastic"),
    ("e2m1fn/16@e4m3fn", "nearest_even"),
    ("nf4/64@fp32", "nearest_even"),
    ("e5m2", "stochastic"),
)
UPDATES = (("adamw", "lpmm"), ("adamw", "half"), ("adamw", "lpmm4"), ("sgdm", "lpmm"), ("lion", "lpmm"))
JOBS: dict[str, Callable[[], None]] = {
    **{f"products {element}": lambda element=element: products(element) for element in ("e4m3fn", "int8")},
    **{f"codec {format} {how}": lambda format=format, how=how: codec(format, how) for format, how in CODECS},
    "masks": masks,
    **{
        f"recompute {activation} {by_row=}": lambda activation=activation, by_row=by_row: recompute(activation, by_row=by_row)
        for activation, by_row in (("relu", False), ("gelu", True), ("silu", False))
    },
    **{f"update {rule} {tier}": lambda rule=rule, tier=tier: update(rule, tier) for rule, tier in UPDATES},
    "sums of squares": sums_of_squares,
    "loss": lambda: loss((1.0,), 0.1),
    "loss with soft caps": lambda: loss((0.5, 30.0), 0.0),
}


@triton.jit
def widened(x_ptr, TILE: tl.constexpr):
    """A kernel that the compiler refuses: it reads int8 as float32, which is wider."""
    at = tl.arange(0, TILE)
    tl.store(x_ptr + at, tl.load(x_ptr + at).to(tl.int8).to(tl.float32, bitcast=True))


def main() -> None:
    """Run the jobs, and one that must fail."""
    warnings.simplefilter("ignore", UserWarning)  # Triton 3.9 announces the default of fusion in 3.10
    compiled = compile_only()
    for name, job in {**JOBS, "broken": lambda: widened[(1,)](torch.ones(16), TILE=16)}.items():
        before = len(compiled)
        try:
            job()
            error = ""
        except Exception as failure:  # whatever the compiler raises
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps([name, compiled[before:], error]), flush=True)


if __name__ == "__main__":
    main()
