"""What the text of a random program may call beside torch: changes of shape, custom autograd functions, threads, complex and gated parts.

Every value of a program has 8192 numbers in one of three forms: rows (64, 128), sequences (4, 16, 128) and images (4, 32, 8, 8).
"""

# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# torch declares backward(ctx, *grad_outputs), and calls it with as many as there are.

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def rows(value: Tensor) -> Tensor:
    """As (64, 128)."""
    return value.reshape(64, 128)


def sequence(value: Tensor) -> Tensor:
    """As (4, 16, 128)."""
    return value.reshape(4, 16, 128)


def image(value: Tensor) -> Tensor:
    """As (4, 32, 8, 8)."""
    return value.reshape(4, 32, 8, 8)


def image_last(value: Tensor) -> Tensor:
    """As (4, 32, 8, 8) in the memory format channels_last."""
    return image(value).contiguous(memory_format=torch.channels_last)


def heads(value: Tensor) -> Tensor:
    """A sequence as (4, 4 heads, 16, 32), a view."""
    return value.reshape(4, 16, 4, 32).transpose(1, 2)


def merged(value: Tensor) -> Tensor:
    """Heads as a sequence again."""
    return value.transpose(1, 2).reshape(4, 16, 128)


def in_threads(*calls: Callable[[], Any], is_pool: bool = False) -> list[Any]:
    """The results of `calls`, each of which runs in a thread of its own, one after the other or at once.

    Autograd numbers the nodes of every thread from 0 on. `is_pool` has the threads go on from the number of this one, as threads may that
    did something before: the branches then have numbers in common, and such as nodes of this thread could have.
    """
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    number = node_number() if is_pool else 0

    def work(place: int) -> None:
        try:
            while node_number() < number:
                pass
            results[place] = calls[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def node_number() -> int:
    """The number of a node that this thread makes."""
    node = (torch.zeros((), requires_grad=True) + 0).grad_fn
    assert node is not None
    return node._sequence_nr()


class Square(Function):
    """x^2, from its saved input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Save the input."""
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """2 x g."""
        (value,) = ctx.saved_tensors
        return 2 * value * grad


class Logistic(Function):
    """Sigmoid, from its saved output."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Save the output."""
        result = value.sigmoid()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """s (1 - s) g."""
        (result,) = ctx.saved_tensors
        return result * (1 - result) * grad


class Gate(Function):
    """`value` where `gate` is positive, doubled; saves a float mask of 0 and 2, and a boolean mask."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gate: Tensor) -> Tensor:
        """Save both masks."""
        mask = 2 * (gate > 0).to(value.dtype)
        ctx.save_for_backward(mask, gate > 1)
        return value * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The mask times g; and g where the gate is above 1."""
        mask, above = ctx.saved_tensors
        return grad * mask, grad * above


class Rounded(Function):
    """Rounded to eighths, with the gradient of the identity (a straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Save nothing."""
        return (value * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """g."""
        return grad


class Doubled(Function):
    """Twice its input, in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Mark the input as modified."""
        ctx.mark_dirty(value)
        return value.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """2 g."""
        return 2 * grad


def rotary(value: Tensor) -> Tensor:
    """A sequence whose pairs of channels are turned by angles of their positions, in complex numbers."""
    pairs = torch.view_as_complex(value.float().reshape(4, 16, 64, 2))
    positions, rates = torch.arange(16.0, device=value.device), torch.arange(1.0, 65.0, device=value.device) / 64
    angles = positions[:, None] * rates
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).reshape(4, 16, 128).to(value.dtype)


def experts(value: Tensor, gate: Tensor, outputs: list[Tensor]) -> Tensor:
    """The mean of `outputs` by routing weights: views of one tensor, each of 0 and a value of its own."""
    weights = torch.stack([(place + 1) * (gate > place / 4).to(value.dtype) for place in range(len(outputs))])
    return sum((weights[place] * output for place, output in enumerate(outputs)), value) / len(outputs)
