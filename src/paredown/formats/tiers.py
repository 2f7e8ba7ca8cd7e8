"""Tiers: how low the tensors go that a model itself takes, by role. One row each; presets of plans and optimizers read the same rows.

    bytes a parameter: weights, moments, gradient accumulator, scales          SGD with momentum, Lion     AdamW
    (torch, all fp32)                                                          12                          16
    safe    bf16 and 8 more bits of it, 8-bit moments and accumulator          5.06                        6.09
    half    bf16, stochastic; the rest as in `safe`                            4.06                        5.09
    lpmm    8 bits for all, no wider copy of anything                          3.08                        4.11
    lpmm4   8-bit weights and accumulator, 4-bit moments                       2.58                        3.11

Weights and accumulators are sums of many small changes, and so is the second moment: they are rounded stochastically unless a plan or
a keyword says otherwise (`roles.ACCUMULATED`), for rounding to nearest would lose every change under half a step.

A parameter of fewer than MIN_DIMS dimensions or MIN_NUMEL values is small: it stays plain in every tier, with float32 moments, and a
bfloat16 one gets 8 more bits (RESIDUE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

MIN_DIMS = 2
MIN_NUMEL = 4096

_MOMENTS8 = {"moment1": "int8/64@bf16", "moment2": "uint8/64@bf16", "gradient": "int8/64@bf16"}
_MOMENTS4 = {"moment1": "int4/64@bf16", "moment2": "uint4/64@bf16", "gradient": "int8/64@bf16"}

TIERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "full": {},
        "safe": {"weight": "bf16", "residue": "int8", **_MOMENTS8},
        "half": {"weight": "bf16", **_MOMENTS8},
        "lpmm": {"weight": "int8/64@e8m0", **_MOMENTS8},
        "lpmm4": {"weight": "int8/64@e8m0", **_MOMENTS4},
    }
)


def is_small(shape: Sequence[int]) -> bool:
    """Whether a parameter of `shape` keeps a plain weight, a plain gradient and float32 moments, whatever is asked for.

    Little is saved on it, and norms and biases are the most sensitive.

    >>> is_small((4096,)), is_small((63, 65)), is_small((64, 64))
    (True, True, False)
    """
    return len(shape) < MIN_DIMS or prod(shape) < MIN_NUMEL
