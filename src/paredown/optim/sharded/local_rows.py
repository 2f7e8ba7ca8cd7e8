"""`local` returns the rows of a sharded tensor (DTensor) that this process has."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this process stores if `tensor` is a DTensor; otherwise return the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def distributed_like(rows: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor over `rows`, without a copy, distributed like `like`; if `like` is no DTensor, return `rows`."""
    return DTensor(rows, like._spec, requires_grad=False) if isinstance(like, DTensor) else rows  # type: ignore[call-arg]
