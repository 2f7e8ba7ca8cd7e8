"""Decode, then go on: a norm and an activation are applied to decoded values on their way to memory, in one pass on a GPU.

    y = f((x - mean[s]) * deviation[s] * weight[c] + bias[c])      after a norm; c = (i // inner) % channels, the channel of value i
                                                                   s = c, or s = i // channels where rows were normalised
    y = f(x)                                                       after none

in float32, with f the identity, GELU, SiLU, or a ReLU whose signs are known exactly.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paredown.codec import backend
from paredown.codec.masks import unpack_mask
from paredown.codec.packed import PackedTensor


class Norm:
    """Statistics and parameters of a norm: flat float32 tensors. `deviation` is the inverse of the standard deviation.

    Parameters are not copied: if one was modified in place when it is needed, what was computed from it cannot be computed again.
    """

    __slots__ = ("bias", "by_row", "channels", "deviation", "inner", "mean", "versions", "weight")

    def __init__(
        self,
        channels: int,
        inner: int,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        deviation: Tensor,
        *,
        by_row: bool = False,
    ) -> None:
        self.channels, self.inner, self.by_row = channels, inner, by_row  # inner: values of a channel that lie next to each other
        self.weight, self.bias, self.mean, self.deviation = weight, bias, mean, deviation
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [t._version for t in (self.weight, self.bias) if t is not None]

    def check(self) -> None:
        """Refuse what was modified since."""
        if self._versions() != self.versions:
            raise RuntimeError(
                f"a weight or bias of a norm over {self.channels} values was modified in place between forward and backward, but what "
                "followed from it is computed again in backward. Step the optimizer after backward, or give the norm's input no format."
            )


@dataclass(eq=False, slots=True)
class Steps:
    """What follows decoding: a norm, then an activation ("", "gelu", "gelu_tanh", "silu", or "relu" by the signs in `bits`)."""

    norm: Norm | None = None
    activation: str = ""
    bits: Tensor | None = None


def recompute(packed: PackedTensor | Tensor, steps: Steps, dtype: torch.dtype) -> Tensor:
    """The flat values that follow from packed (or plain) flat ones."""
    if steps.norm is not None:
        steps.norm.check()
    kernels = backend.find_kernels() if packed.device.type == "cuda" else None
    if kernels is not None and isinstance(packed, PackedTensor) and kernels.covers_recompute(packed.format):
        return kernels.recompute(packed, steps, dtype)
    values = packed.decode(torch.float32) if isinstance(packed, PackedTensor) else packed.to(torch.float32, copy=True)
    if steps.norm is not None:
        _norm_(values, steps.norm)
    return _activated(values, steps).to(dtype)


def _norm_(x: Tensor, norm: Norm) -> None:
    """In place: a second copy of an activation would stand at the peak of a step."""
    rows = x.view(-1, norm.channels, norm.inner)
    shape = (-1, 1, 1) if norm.by_row else (1, -1, 1)
    rows.sub_(norm.mean.view(shape)).mul_(norm.deviation.view(shape))
    if norm.weight is not None:
        rows.mul_(norm.weight.view(1, -1, 1))
    if norm.bias is not None:
        rows.add_(norm.bias.view(1, -1, 1))


def _activated(x: Tensor, steps: Steps) -> Tensor:
    if steps.activation == "relu":
        assert steps.bits is not None
        return unpack_mask(steps.bits, torch.empty_like(x), inside=1.0, outside=0.0).mul_(x)
    if steps.activation == "silu":
        return functional.silu(x)
    if steps.activation in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if steps.activation == "gelu_tanh" else "none")
    return x
