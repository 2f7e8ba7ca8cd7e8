"""`Rounding`, `Overflow` and `Seed` are the arguments of `encode` that no format has.

They say how values are rounded and clamped, and from what random bits; a format describes *decoding*.

Stochastic rounding rounds up with a probability equal to the fractional part, so that the expected value is the exact one.
The random bits are a pure function of (seed, tensor, step, element index): there is no generator state to save,
a resumed run draws the same bits, and so does every shard or replica of a tensor.

    x = i * 0x9E3779B9 + k0;   x = (x ^ x >> 16) * 0x7FEB352D;   h(i) = (x ^ x >> 15 ^ k1) * 0x846CA68B        (modulo 2^32)

The multipliers are those of the mixer "lowbias32" (C. Wellons, hash-prospector, public domain); its last step, which changes the
lower 16 bits alone, is left out: rounding reads a number from the top, and below the 16th bit a pattern weighs less than 2^-16 of a
step. (k0, k1) are two independent hashes of (seed, tensor, step). A value costs 3 multiplications and 4 other
operations, which a GPU overlaps with reading and writing memory.

>>> Seed(7).keys() == Seed(7, step=1).keys()
False
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from paredown.errors import CodecError

MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
INDEX_STEP = 0x9E3779B9
KEY_SALTS = (0x9E3779B9, 0x85EBCA6B)  # initial values of k0 and k1
HIGH_INDEX = 0xC2B2AE35  # the high word of an index is multiplied by this and mixed into k1
WORD = 0xFFFFFFFF


class Rounding(str, Enum):
    """A rule that decides to which of its two neighbours in a format a value is rounded.

    All rules, except for tables of values, round the magnitude: -x becomes the negative of what x becomes.
    """

    NEAREST_EVEN = "nearest_even"  # the closer one; half-way, the one whose code is even (in e8m0 the larger, as in ml_dtypes)
    TOWARD_ZERO = "toward_zero"  # the smaller magnitude
    NEAREST_AWAY = "nearest_away"  # the closer one; half-way, the larger magnitude
    STOCHASTIC = "stochastic"  # the larger magnitude with a probability equal to the fractional part


FEW_BITS = 8  # narrower elements have large rounding errors, which must not add up from step to step


def default_rounding(width: int, *, is_sum: bool) -> Rounding:
    """Return the default rounding of weights, gradients and optimizer state in an element of `width` bits.

    `is_sum`: the tensor accumulates many small changes. Activations are rounded to nearest (plan/storage.py).
    """
    return Rounding.STOCHASTIC if width < FEW_BITS or is_sum else Rounding.NEAREST_EVEN


class Overflow(str, Enum):
    """What encoding does with values past the largest one of a format: clamp them to it, or make them infinite or NaN."""

    SATURATE = "saturate"  # the largest value, infinity too; NaN stays NaN
    NONFINITE = "nonfinite"  # infinity or NaN, whichever the element has


@dataclass(frozen=True)
class Seed:
    """Where the random bits of stochastic rounding come from: a user's seed, a tensor's id, a step and a first index.

    `first_index` lets a shard draw the bits that its elements have in the whole tensor. `step` may be a tensor of one int32
    on the device, which a kernel reads when it runs: a captured graph then draws new bits at every replay.
    """

    value: int = 0
    tensor: int = 0
    step: Any = 0
    first_index: int = 0

    def __post_init__(self) -> None:
        if {type(self.value), type(self.tensor), type(self.step)} == {int} and self.first_index == 0:
            return  # the usual case, quickly
        numbers = {"value": self.value, "tensor": self.tensor, "first_index": self.first_index, "step": self.step}
        wrong = {name: n for name, n in numbers.items() if not hasattr(n, "__index__")}
        if hasattr(self.step, "numel") and self.step.numel() != 1:
            wrong["step"] = self.step
        if not wrong and self.first_index < 0:
            wrong["first_index"] = self.first_index
        if wrong:
            raise CodecError(
                f"a seed is whole numbers, first_index at least 0, step one number or a tensor of one; these are not: {wrong}."
            )

    def keys(self) -> tuple[int, int]:
        """Return two 32-bit keys, hashes of seed, tensor and step, from which each element's random bits are computed."""
        k0, k1 = self.base_keys()
        step = int(self.step)
        return mix(k0 ^ (step & WORD)), mix(k1 ^ (step & WORD))

    def base_keys(self) -> tuple[int, int]:
        """Return the two keys without the step, for kernels that read the step from device memory and add it themselves."""
        return _base_keys(int(self.value), int(self.tensor))


@lru_cache(maxsize=4096)
def _base_keys(value: int, tensor: int) -> tuple[int, int]:
    k0, k1 = KEY_SALTS
    for part in (value, value >> 32, tensor, tensor >> 32):
        k0, k1 = mix(k0 ^ (part & WORD)), mix(k1 ^ (part & WORD))
    return k0, k1


def signed(word: int) -> int:
    """Return the int32 with the same bits as `word`, an unsigned integer of 32 bits.

    >>> signed(0xFFFFFFFE), signed(2)
    (-2, 2)
    """
    return word - (word >> 31 << 32)


def mix(x: int) -> int:
    """Return a 32-bit hash of a 32-bit integer, by which keys are made; different integers have different hashes.

    >>> len({mix(i) for i in range(1000)})
    1000
    """
    x = (x + KEY_SALTS[0]) & WORD
    x = ((x ^ (x >> 16)) * MULTIPLIER_1) & WORD
    x = ((x ^ (x >> 15)) * MULTIPLIER_2) & WORD
    return x ^ (x >> 16)
