"""How gradients reach an optimizer: which hook a parameter gets, and what is refused on the way.

release                    used in backward, at once            (Releaser)
a format for gradients     folded into a packed accumulator     (Accumulator)
microbatches, plain        multiplied by 1 / K as they come     (Mean)
otherwise                  torch's p.grad, read at the step
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from paredown.errors import OptimError
from paredown.formats.rounding import Seed
from paredown.optim.entries import Entry, zeros
from paredown.optim.gradients import Accumulator, Mean, PackedGradient, Releaser
from paredown.roles import Role

if TYPE_CHECKING:
    from paredown.optim.driver import Optimizer

RESTARTED = (
    "its gradient was cleared between microbatches ({} of {} were added up), and the others would be lost. Call opt.zero_grad(), which "
    "waits for all of them, in the place of model.zero_grad() or p.grad = None."
)
GRADIENT_ID = 3  # of the random bits of an accumulator: see `reference.py`


def hook_of(optimizer: Optimizer, entry: Entry) -> Accumulator | Mean | Releaser | None:
    """The hook that takes the gradients of a parameter, not yet attached."""
    parameter = entry.parameter
    if optimizer.memory.release:
        return _releaser(optimizer, entry)
    if entry.choices.format(Role.GRADIENT) is not None and not is_averaged_later(parameter) and not isinstance(parameter, DTensor):
        return _accumulator(optimizer, entry)
    if optimizer.microbatches > 1 and not isinstance(parameter, DTensor):
        return Mean(parameter, 1.0 / optimizer.microbatches, _start_of(optimizer, entry), name=entry.name)
    return None


def is_averaged_later(parameter: Tensor) -> bool:
    """Whether processes average this gradient after backward has it, as under DDP."""
    spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return spread and not isinstance(parameter, DTensor)


def _accumulator(optimizer: Optimizer, entry: Entry) -> Accumulator:
    p, format = entry.parameter, entry.choices.format(Role.GRADIENT)
    assert format is not None
    seed = Seed(optimizer.seed, 8 * entry.number + GRADIENT_ID)
    packed = zeros(p.shape, format, p.dtype, p.device)
    entry.gradient = gradient = PackedGradient(packed, seed, weight=1.0 / optimizer.microbatches)  # type: ignore[call-overload]
    me = weakref.ref(optimizer)
    gradient.total.rounding = entry.choices.rounding(Role.GRADIENT)
    gradient.total.before_start = _start_of(optimizer, entry)
    gradient.total.before_unscale = lambda: o._before_unscale() if (o := me()) is not None else None
    return Accumulator(p, gradient, name=entry.name)


def _releaser(optimizer: Optimizer, entry: Entry) -> Releaser:
    if is_averaged_later(entry.parameter):
        raise OptimError(
            "release=True updates before gradients were averaged over processes. Under DistributedDataParallel leave release out; "
            "fully_shard (FSDP2) is the way at scale."
        )
    me, mine = weakref.ref(optimizer), weakref.ref(entry)

    def update(grad: Tensor) -> None:
        optimizer, entry = me(), mine()
        if optimizer is not None and entry is not None:
            optimizer._update_at_once(entry, grad)

    return Releaser(entry.parameter, update, lambda: (e := mine()) is not None and e.updated, name=entry.name)


def _start_of(optimizer: Optimizer, entry: Entry) -> Callable[[], None]:
    """What is called before a sum of gradients begins: with microbatches it begins once for each update."""
    me, mine = weakref.ref(optimizer), weakref.ref(entry)

    def start() -> None:
        optimizer, entry = me(), mine()
        if optimizer is not None and entry is not None and optimizer.microbatches > 1:
            if optimizer._waiting and entry.is_started:
                raise OptimError(RESTARTED.format(optimizer._waiting, optimizer.microbatches))
            entry.is_started = True

    return start
