"""Operations as torch names them, told alike for all their forms, and who is told of them.

A tensor bears a mark that says which value it is to a listener: it stays with the tensor, and views and copies inherit it.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

MARK = "_paredown_value"  # the attribute of a tensor that says what it is, and to whom
MOVES = frozenset(
    (
        *("reshape", "flatten", "contiguous", "clone", "detach", "expand", "repeat", "repeat_interleave", "roll", "flip", "unfold"),
        *("to", "type", "float", "half", "bfloat16", "getitem", "index_select", "gather", "take_along_dim"),
        *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    )
)
READS = frozenset(("get", "set", "delete"))  # attributes of tensors
SAME_OP = {
    **dict.fromkeys(("conv_transpose", "convolution"), "conv"),
    **dict.fromkeys(("mm", "addmm"), "linear"),
    **dict.fromkeys(("bmm", "baddbmm", "einsum", "mv"), "matmul"),
    **dict.fromkeys(("adaptive_avg_pool",), "avg_pool"),
    **dict.fromkeys(("adaptive_max_pool", "max_pool2d_with_indices"), "max_pool"),
    **dict.fromkeys(("feature_dropout", "native_dropout", "alpha_dropout"), "dropout"),
    **{"nll_loss_nd": "nll_loss", "truediv": "div", "_softmax": "softmax"},
}
PRODUCTS = frozenset(("conv", "linear", "matmul"))  # where a group of the mixed-precision paper ends
CHECKS = re.compile("has_torch_function(_unary|_variadic)?")


@dataclass(eq=False, slots=True)
class Source:
    """A value that an operation takes: what it is, and where autograd sends its gradient."""

    value: Any
    edge: tuple[Any, int]  # node of autograd and the number of its output


@dataclass(eq=False, slots=True)
class Operation:
    """One call: its name, what it takes, and the first node of autograd that it may have made."""

    name: str  # of what it makes, without "output"
    op: str
    sources: list[Source]
    weights: list[nn.Parameter]
    first: int
    num_unknown: int = 0  # floats that it takes and that are neither

    def output_name(self, number: int) -> str:
        """The name of its output; those after the first are numbered."""
        return f"{self.name}output{number if number > 1 else ''}"


class Listener(ABC):
    """Who is told."""

    @abstractmethod
    def taken(self, weight: nn.Parameter) -> Tensor:
        """What an operation gets in place of a parameter."""

    @abstractmethod
    def begins(self, operation: Operation) -> None:
        """An operation is about to run."""

    @abstractmethod
    def made(self, operation: Operation, out: Tensor, number: int) -> Any:
        """An output, which may be changed in place; the answer is the value that later operations take."""

    def moved(self, value: Any, out: Tensor, name: str) -> tuple[Any, Tensor]:
        """A view or a copy of a value, with a name of its own if it is a part, such as half of the channels: what it is known as.

        Beside it stands what later operations take.
        """
        return value, out


def mark(tensor: Tensor, listener: Listener, value: Any) -> None:
    """From now on `tensor` is this value to this listener."""
    setattr(tensor, MARK, (listener, value))


def known(tensor: Tensor, listener: Listener) -> Any:
    """What a tensor is to this listener; None where it is nothing, or something to another one."""
    marked = getattr(tensor, MARK, None)
    return marked[1] if marked is not None and marked[0] is listener else None


def leaves(values: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, dict):
        yield from leaves(list(values.values()))


def is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter; asking its type first takes a tenth of the time."""
    return type(tensor) is nn.Parameter or (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter))


def replaced(values: Any, by: Callable[[Any], Tensor], kind: type[Tensor] = nn.Parameter) -> Any:
    """The same nest with something else for its parameters, or for all of its tensors."""
    if isinstance(values, Tensor):
        return by(values) if kind is Tensor or is_weight(values) else values
    if isinstance(values, dict):
        return {key: replaced(value, by, kind) for key, value in values.items()}
    return type(values)([replaced(value, by, kind) for value in values]) if type(values) in (tuple, list) else values


@cache
def op_of(func: Any) -> str:
    """The name of an operation, alike for its forms: conv2d and conv1d are conv, `+`, add and add_ are add.

    >>> [op_of(f) for f in (nn.functional.conv2d, Tensor.__iadd__, Tensor.relu_, nn.functional.avg_pool2d)]
    ['conv', 'add', 'relu', 'avg_pool']
    """
    text = getattr(func, "__name__", "")
    plain = text.strip("_")
    if text.startswith("__") and plain[:1] in "ir" and plain[1:] in ("add", "sub", "mul", "truediv", "matmul", "pow", "div"):
        plain = plain[1:]
    plain = re.sub("[123]d$", "", plain)
    return SAME_OP.get(plain, plain)


@cache
def reopened(func: FunctionType) -> Callable[..., Any]:
    """A function of torch without its first look for modes: called inside of one, its body runs, and what that calls is seen."""
    checks = {name: _no for name in func.__globals__ if CHECKS.fullmatch(name)}
    made = FunctionType(func.__code__, {**func.__globals__, **checks}, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _no(*args: Any) -> bool:
    return False
