"""Decides whether a module can run over pieces of a sequence: whether each output token depends on one input token.

The tokens of an input (batch, tokens, features) are its dimension -2. `reason_to_run_whole` runs the module twice without gradients, on a
few tokens whose count is a prime that divides no size of a parameter, so that a dimension of this size has the tokens. Each operation that
gets such a tensor must be in one of the tables below, and must not read across the dimension:

    elementwise     the tokens are the same dimension of all operands and of the result
    views           the values of a token stay together: a view that merges tokens with features, or takes some of them, does not
    DIMENSION       softmax, sums, means, sorts: not over the tokens
    NORMS           the normalized dimensions come after the tokens
    PRODUCTS        the sum of a matrix product does not run over the tokens

Attention, convolutions over the sequence, batch norms and routers with capacities fail; so does random sampling, whose bits would come in
another order. Both runs must call the same operations with the same numbers: a module that divides by the number of tokens does not.

>>> reason_to_run_whole(nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.empty(1, 5, 8))
''
>>> reason_to_run_whole(nn.Softmax(dim=1), torch.empty(1, 5, 8))
'_softmax mixes tokens'
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paredown.autograd.operation_kinds import VIEWS

MIXES, MERGES, UNKNOWN = "{} mixes tokens", "{} merges tokens with other dimensions", "{} is not known to treat tokens one by one"
RANDOM = "{} draws random bits, which pieces of the sequence would draw in another order"
BY_COUNT, MADE = "{} gets other numbers with another number of tokens", "{} makes a tensor of as many values as tokens"
IN_PLACE, RETURNS = "{} writes into the module's input", "it does not return one tensor with the tokens of its input"
FAILS = "it does not run on {} tokens: {}"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MERGING = _names("view _unsafe_view reshape")
TOKEN_VIEWS = (VIEWS | _names("chunk contiguous lift_fresh")) - _names("as_strided diagonal view_as_real view_as_complex getitem")
ELEMENTWISE = _names("clone _to_copy copy_ fill_ zero_ prelu _prelu_kernel zeros_like ones_like full_like")
# filled by another operation, perhaps by an unseen kernel
EMPTY = _names("empty empty_like new_empty empty_strided new_empty_strided")
CONSTANTS = _names("zeros ones full new_zeros new_ones new_full expand")  # tensors with as many values as tokens, all equal
DIMENSION = _names("""
    sum mean var std var_mean std_mean amax amin argmax argmin prod any all max min logsumexp linalg_vector_norm norm _softmax _log_softmax
    softmax log_softmax _safe_softmax cumsum cumprod sort topk glu cat stack unbind
""")
NORMS = _names("native_layer_norm rms_norm _fused_rms_norm")
MIXING = _names("""
    convolution native_batch_norm _batch_norm_with_update _native_batch_norm_legit cudnn_batch_norm native_group_norm roll flip scatter_add
    index_add _fft_r2c _fft_c2c
""")
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_softmax", "_safe_softmax")  # how names begin
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "linear": 0, "addbmm": 1}  # where the first operand is among the arguments
DEVICE = torch.ops.prim.device.default  # fake tensors ask for it
PRIMES = (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)
MANY = -2  # place of the tokens in a tensor that has them in several dimensions, or merged with another


def reason_to_run_whole(module: nn.Module, example: Tensor, call: Callable[[Tensor], Any] | None = None) -> str:
    """Return the reason why `module` cannot run over pieces of a sequence, naming the operation; "" if it can.

    `example`: an input of the same dtype, device and feature size. `call`: the function that calls the module, if not `module` itself.
    """
    sizes = {size for p in module.parameters() for size in p.shape} | {example.shape[-1]}
    counts = [prime for prime in PRIMES if not any(size and size % prime == 0 for size in sizes)]
    if len(counts) < 2:
        return FAILS.format("a prime number of", "all primes that are tried divide a size of its parameters")
    runs: list[list[Any]] = []
    for count in counts[:2]:
        probe = example.new_zeros((1,) * (example.dim() - 2) + (count, example.shape[-1]))
        ops = TokenOps(count, probe)
        try:
            with torch.no_grad(), ops:
                out = (call or module)(probe)
        except Exception as error:
            return ops.reason or FAILS.format(count, f"{type(error).__name__}: {error}".splitlines()[0])
        if ops.reason or ops.empty:
            return ops.reason or UNKNOWN.format(ops.empty)
        if not (isinstance(out, Tensor) and out is not probe and ops.place(out) == out.dim() - 2 and out.dim() == probe.dim()):
            return RETURNS
        runs.append(ops.calls)
    differing = next((first[0] for first, second in zip(*runs, strict=False) if first != second), "")
    return BY_COUNT.format(differing or runs[0][0][0]) if differing or len(runs[0]) != len(runs[1]) else ""


class MixesTokens(Exception):
    """Raised by `TokenOps` to end the run of a module at the first operation that reads across tokens."""


@final
class TokenOps(TorchDispatchMode):
    """Finds, as a dispatch mode, the first operation that reads across tokens; `reason` describes it.

    The module runs on the input `probe`, with a prime number `count` of tokens by which dimensions of tokens are recognized. `calls`:
    the operations on tensors with tokens, and their arguments. `empty`: the operation that allocated memory for tokens without writing
    to it, "" if none did.
    """

    def __init__(self, count: int, probe: Tensor) -> None:
        super().__init__()
        self.reason, self.empty, self.calls = "", "", list[Any]()
        self._count, self._input = count, probe.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return func(*args, **(kwargs or {}))
        arguments = (args, kwargs or {})
        places = [self.place(value) for value in tree_leaves(arguments) if isinstance(value, Tensor)]
        out = func(*args, **(kwargs or {}))
        results = [self.place(value) for value in tree_leaves(out) if isinstance(value, Tensor)]
        if not self.reason and any(place is not None for place in (*places, *results)):
            self.reason = self._reason(func, arguments, places, (out, results))
            if self.reason:
                raise MixesTokens(self.reason)  # the rest of the module need not run
        return out

    def place(self, tensor: Tensor) -> int | None:
        """Return which dimension of a tensor runs over tokens: None if none does, MANY if it is not just one."""
        found = [place for place, size in enumerate(tensor.shape) if size and size % self._count == 0]
        return None if not found else found[0] if len(found) == 1 and tensor.shape[found[0]] == self._count else MANY

    def _reason(self, func: Any, arguments: Any, places: list[int | None], returned: tuple[Any, list[int | None]]) -> str:
        """Return why an operation reads across tokens; "" if it does not.

        `func`, `arguments`: the operation and its (args, kwargs). `places`: the dimension of tokens in each tensor among them, as `place`
        gives it. `returned`: the result, and the dimensions of tokens in its tensors.
        """
        name, (out, results) = func._schema.name.rpartition("::")[2], returned
        is_view = name in TOKEN_VIEWS
        self.calls.append((name, [self._plain(value, by_size=is_view or name in CONSTANTS) for value in tree_leaves(arguments)]))
        if name in MIXING or name.startswith(ATTENTION[:3]):
            return MIXES.format(name)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return RANDOM.format(name)
        if MANY in places or MANY in results:
            return (MERGES if name in MERGING else MIXES).format(name)
        if name in EMPTY:
            self.empty = self.empty or name
            return ""
        if all(place is None for place in places):
            return "" if name in CONSTANTS else MADE.format(name)
        named = {part.name: value for part, value in zip(func._schema.arguments, arguments[0], strict=False)} | arguments[1]
        if func._schema.is_mutable and arguments[0][0].untyped_storage()._cdata == self._input:
            return IN_PLACE.format(name)
        if not results:
            return UNKNOWN.format(name)
        if None in results:
            return MIXES.format(name)
        known = is_view or name in ELEMENTWISE or torch.Tag.pointwise in func.tags
        if not (known or name in DIMENSION or name in NORMS or name in PRODUCTS):
            return UNKNOWN.format(name)
        return "" if _keeps_tokens(func, name, named, (out, self.place)) else MIXES.format(name)

    def _plain(self, value: Any, *, by_size: bool) -> Any:
        if isinstance(value, Tensor):
            return tuple("tokens" if size == self._count else size for size in value.shape)
        return "tokens" if by_size and value == self._count and not isinstance(value, bool) else str(value)


def mixes(reason: str) -> bool:
    """Return whether `reason` (of `reason_to_run_whole`) is that the module reads across tokens, as attention does."""
    return reason.endswith((MIXES[2:], MERGES[2:]))


@final
class OperationNames(TorchDispatchMode):
    """Finds, as a dispatch mode, the first operation that is known to read across tokens, such as attention.

    `mixing` is its name, "" if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixing = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if not self.mixing and (name in MIXING or name.startswith(ATTENTION)):
            self.mixing = name
        return func(*args, **(kwargs or {}))


def _keeps_tokens(func: Any, name: str, named: dict[str, Any], returned: tuple[Any, Callable[[Tensor], int | None]]) -> bool:
    """Return whether an operation in this module's tables computes each token of its result from that token alone.

    `named`: its arguments by name. `returned`: its result, and the function `TokenOps.place`.
    """
    out, place = returned
    tensors = [value for value in tree_leaves(named) if isinstance(value, Tensor)]
    first = tensors[0]
    if name in PRODUCTS:
        left, right = tensors[PRODUCTS[name]], tensors[PRODUCTS[name] + 1]
        return _is_outer(left, right, (place(left), place(right)), is_transposed=name == "linear")
    if name in NORMS:
        return place(first) is not None and (place(first) or 0) < first.dim() - len(named["normalized_shape"])
    if name in DIMENSION:
        dims = named.get("dim", 0 if name in ("cat", "stack", "unbind") else -1 if name in ("sort", "topk", "glu") else None)
        ndim = max(value.dim() for value in tensors) + (name == "stack")
        dims = [dims] if isinstance(dims, int) else dims
        return bool(dims) and not any(value is not None and dim % ndim == value for dim in dims for value in map(place, tensors))
    if name in MERGING:
        return _values_after(first, place(first)) == _values_after(out, place(out))
    if name in TOKEN_VIEWS:
        return True  # a view that takes some of the tokens has no dimension of their count
    pairs = [(value, place(value)) for value in (*tensors, *tree_leaves(out)) if isinstance(value, Tensor)]
    return len({value.dim() - found for value, found in pairs if found is not None}) == 1


def _is_outer(left: Tensor, right: Tensor, places: tuple[int | None, int | None], *, is_transposed: bool) -> bool:
    """Return whether a matrix product does not sum over tokens; `is_transposed`: whether its right operand is transposed.

    `places`: the dimension of tokens in `left` and in `right`; None if there is none.
    """
    of_left, of_right = places
    summed = (left.dim() - 1, right.dim() - (1 if is_transposed else 2))
    if of_left is not None and of_right is not None:  # a batch of products, one for each token
        return left.dim() == right.dim() == 3 and of_left == of_right == 0
    return of_left != summed[0] and of_right != summed[1]


def _values_after(tensor: Tensor, place: int | None) -> int:
    return prod(tensor.shape[(place or 0) + 1 :])
