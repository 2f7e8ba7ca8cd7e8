"""Values worth trying: each gap of an element with its middle and both float32 neighbours of that, and what is special.

>>> [round(v, 3) for v in gap_probes("uint2").tolist()[:5]]
[0.0, 0.5, 0.5, 0.5, 1.0]
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tests.oracles.exact import Exact, element

ROUNDINGS = ("nearest_even", "toward_zero", "nearest_away", "stochastic")
OVERFLOWS = ("saturate", "nonfinite")
FLOAT32_MAX = torch.finfo(torch.float32).max
SPECIAL = (
    *(0.0, -0.0, float("nan"), float("inf"), -float("inf"), FLOAT32_MAX, -FLOAT32_MAX, 2.0**127, 3 * 2.0**126, -(2.0**127)),
    *(2.0**-149, -(2.0**-149), 3 * 2.0**-149, 2.0**-127, 3 * 2.0**-128, 2.0**-126, -(2.0**-126), 2.0**-126 - 2.0**-149),
    *(1.0, -1.0, 0.5, -0.5, 1.0 - 2.0**-24, 1.0 + 2.0**-23, 1e-3, -1e3, 65504.0, 65520.0, 0.1, -0.3),
)


def listed(text: str) -> list[str]:
    """The words of a text, such as a table of formats."""
    return text.split()


# A spread of elements: each kind, each special, biases at both ends, no mantissa, wide ones; small enough to try in every way.
SPREAD = listed("""
    e3m1b4fns e5m2f e6m9f e4m3b11 e8m7fns e8m3fn e5m10 e1m3 e4m0fn e2m1fn e4m3fn e4m3fnuz
    e5m2 e3m0f e1m0f e2m5ns e5m2b3fnuz e8m1b127f e6m11b32fns bf16 fp32 e8m21fn e8m22 e4m19fnuz
    int1 int2 int3 int5 int8 int12 int16 uint1 uint2 uint4 uint7 uint8 uint16 nf4 e8m0
""")


def gap_probes(text: str, limit: int = 300) -> Tensor:
    """For each gap of the element (a sample of `limit` where there are more): both ends, the middle and its neighbours; float32."""
    exact = element(text)
    pairs = np.array(table_pairs(exact, limit) if exact.table else ladder_pairs(exact, limit), dtype=np.float64)
    middle = ((pairs[:, 0] + pairs[:, 1]) / 2).astype(np.float32)
    with np.errstate(over="ignore"):  # the last neighbour of all is inf
        above, below = (np.nextafter(middle, np.float32(end)) for end in (np.inf, -np.inf))
    ends = pairs.astype(np.float32)
    return torch.from_numpy(np.stack([ends[:, 0], middle, above, below, ends[:, 1]], 1).ravel())


def table_pairs(exact: Exact, limit: int) -> list[tuple[float, float]]:
    """Neighbours in a list of values, the first and the last ones among them."""
    values = [float(v) for v in exact.table]
    return list(pairwise(values))[:limit]


def ladder_pairs(exact: Exact, limit: int) -> list[tuple[float, float]]:
    """Neighbouring magnitudes and their negatives: the first and the last gaps, the one past the end, and others by chance."""
    last, rng = exact.last_rung, random.Random(0)
    if last < limit:
        rungs = list(range(last + 1))
    else:
        edges = {0, 1, 2, last - 2, last - 1, last, 2**exact.mantissa_bits - 1, 2**exact.mantissa_bits}
        rungs = sorted({k for k in edges if k <= last} | {rng.randrange(last) for _ in range(limit // 2)})
    pairs = [(float(exact.rung(k)), float(exact.rung(k + 1))) for k in rungs]
    pairs = [pair for pair in pairs if pair[1] <= FLOAT32_MAX] + [
        (float(exact.rung(last)), min(float(exact.rung(last)) * 2, FLOAT32_MAX))
    ]
    return pairs + [(-b, -a) for a, b in pairs]


def specials() -> Tensor:
    """What is special: zeros, NaN, infinities, the ends of float32 and its subnormals."""
    return torch.tensor(SPECIAL, dtype=torch.float32)


def wide_floats(count: int, seed: int = 0) -> Tensor:
    """Random float32 of every exponent and sign, finite."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed)).int()
    values = bits.view(torch.float32)
    return torch.where(values.isfinite(), values, 1.0)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def words(count: int, seed: int = 0) -> Tensor:
    """Random 32-bit numbers as int64, drawn apart from the package."""
    return torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(seed))
