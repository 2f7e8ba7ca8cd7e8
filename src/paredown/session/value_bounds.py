"""Decides by their values which saved tensors stay unmodified: operands of attention, inputs of norms and others.

Attention. Backward computes P = exp(scale q.k - logsumexp) with the decoded q and k and the exact logsumexp of the forward pass. The
logits are off by about

    error = sqrt(2) * e * scale * max|q| * max|k| / sqrt(d)

with e the relative error of the format (int8: 0.6 %), |.| the norm of a row and d its length: probabilities are off by exp(error), and
gradients with them, without bound as logits grow. Where logits are large, probabilities are 0 or 1, and the gradient of a logit is the
small difference of v times the gradient and its sum over the output: rounding hides it. Above MAX_LOGIT_ERROR the operands and the output
stay unmodified.

Where a row attends to one key, its output is the value of that key. Backward subtracts the exact output from the decoded value, and what
is left is small: the gradients of queries and keys are off by about error / (1 - share), with share = the variance of the output over that
of the values (over tokens: 1 where every row attends to one key, 0 where it attends to many alike). Above MAX_SHARED_ERROR all operands
stay unmodified too. Up to a share of 1/2 this allows what MAX_LOGIT_ERROR does.

Norms. Backward multiplies x - mean by rstd, the inverse standard deviation of a channel, row or group. If a block of the format holds
values of several of them, its step follows the widest, and the differences of their means: a channel whose standard deviation is below
1 / MAX_SPREAD of that would be noise. So would one whose variance is below eps, as that of a constant channel.

Sin and cos. Backward takes the cosine or sine of the decoded input, which is off by as many radians as the input is: about 0.29 steps of
the format, 0.23 % of the largest value of a block for int8. Above MAX_PHASE_ERROR the input stays unmodified. Other
functions of the table are nearly linear where their input is large, and their derivatives are off by less.

Inputs of checkpointed layers. An additive mask has -inf or numbers such as -1e4 beside biases of about 1: a block with one of them would be
decoded as NaN, or its biases as 0. From LARGEST_INPUT on the input stays unmodified.

On a CPU values are read in every forward pass. On a GPU a read synchronizes with the device, so each slot is read once, when it is
first saved; every READ_INTERVAL-th forward pass then copies the values to the host asynchronously, for the decisions of later passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, isnan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paredown.autograd.graph import Saved
from paredown.autograd.operations import ATTENTION_PINS, PERIODIC, Use, is_checkpoint_input
from paredown.codec.recompute import NO_BOUND
from paredown.errors import ApplyError
from paredown.formats.format import Format
from paredown.plan.storage import BLOCK, PINNED, significant_bits
from paredown.plan.trace import index_dtype

MAX_LOGIT_ERROR = 0.05  # standard deviation of a logit's error: probabilities wrong by 5 %
MAX_SHARED_ERROR = 0.1  # random programs at 0.12 to 0.39 had gradients of norms before attention 11 to 27 % off
ROUNDING_ERROR = 0.75  # relative error of rounding, in units of 2^-bits: 0.6 % for int8, measured on normal values in blocks of 64
MAX_SPREAD = 64.0  # of a block, in the smallest standard deviation; a constant channel beside others of 1 has 316 (eps 1e-5)
MAX_PHASE_ERROR = 0.05  # radians: the derivative wrong by 5 %; int8 reaches it where rows have a largest value of 22
LARGEST_INPUT = 2.0**13  # of a checkpointed layer: masks begin at 1e4, activations of trained language models end at some thousands
PHASE_STEPS = 12**-0.5  # standard deviation of a rounding error, in steps
SAMPLE_SIZE = 1 << 20
GROUP_TOKENS = 32  # tokens of which variances are taken first: so many groups that Inductor does not split the reduction
SIGMAS = 6.0  # the range of normal values, in standard deviations
READ_INTERVAL = 8


@dataclass(eq=False, slots=True)
class DeviceReading:
    """Holds numbers that were read from a device, while newer numbers may be on their way to the host.

    `forwards`: the number of the forward pass that last asked for numbers. `pending`: the newer numbers; None if none are copied.
    """

    values: list[float]
    forwards: int
    pending: Tensor | None = None
    copied: Any = None  # the CUDA event recorded after the copy of `pending`


class KnownReason(NamedTuple):
    """Holds a reason to leave a saved tensor unmodified ("" for none), and the format and numbers behind it."""

    reason: str
    reading: DeviceReading
    values: list[float]
    format: Format

    def holds(self, format: Format) -> bool:
        """Return whether this reason is still valid: the format is the same, and no newer numbers were read."""
        return self.reading.pending is None and self.reading.values is self.values and self.format is format


class ValueBounds:
    """Decides by their values which saved tensors must stay unmodified, and keeps the numbers that it measured of them."""

    def __init__(self) -> None:
        self._readings: dict[str, DeviceReading] = {}
        self._known: dict[str, KnownReason] = {}  # on a GPU: valid until new values are read
        self._last: DeviceReading | None = None  # the one that `_read` returned last

    def known_reason(self, name: str, format: Format, forwards: int) -> str | None:
        """Return the known reason to leave tensor `name` unmodified ("" for none); None if its values must be read.

        `forwards`: the number of the forward pass.
        """
        known = self._known.get(name)
        return known.reason if known is not None and forwards % READ_INTERVAL and known.holds(format) else None

    def reason_to_keep(self, saved: Saved, format: Format, forwards: int) -> str:
        """Return why the values of a saved tensor forbid packing it in forward pass number `forwards`; "" if they do not."""
        self._last = None
        reason = self._reason(saved, format, forwards)
        if self._last is not None and saved.tensor is not None and saved.tensor.is_cuda:
            self._known[saved.name] = KnownReason(reason, self._last, self._last.values, format)
        return reason

    def _reason(self, saved: Saved, format: Format, forwards: int) -> str:
        if saved.pin in ATTENTION_PINS:
            return self._logits(saved, format, forwards)
        if saved.op in PERIODIC:
            return self._phase(saved, format, forwards)
        if is_checkpoint_input(saved.name):
            return self._magnitude(saved, forwards)
        return self._statistics(saved, forwards) if saved.is_centered else ""

    def _logits(self, saved: Saved, format: Format, forwards: int) -> str:
        assert saved.tensor is not None
        node = saved.node
        name = saved.name.rpartition(".")[0]
        numbers = self._read(name, lambda: measure_attention(node), saved.tensor.is_cuda, forwards)
        return reason_of_attention(numbers, 1.0, format, saved.tensor.shape[-1])

    def _phase(self, saved: Saved, format: Format, forwards: int) -> str:
        tensor = saved.tensor
        assert tensor is not None
        (largest,) = self._read(saved.name, lambda: largest_of_rows(tensor), tensor.is_cuda, forwards)
        error = PHASE_STEPS * 2.0 ** -significant_bits(format) * largest
        if error <= MAX_PHASE_ERROR:
            return ""
        return f"its rows have values up to {largest:.3g}: quantized the argument of {saved.op} would be off by about {error:.2g} radians"

    def _magnitude(self, saved: Saved, forwards: int) -> str:
        tensor = saved.tensor
        assert tensor is not None
        ends = self._read(saved.name, lambda: torch.stack(torch.aminmax(tensor.detach())).float(), tensor.is_cuda, forwards)
        if all(abs(end) < LARGEST_INPUT for end in ends):
            return ""
        return f"it has values of {ends[0]:.3g} to {ends[1]:.3g}, as masks have, beside which small ones would be lost"

    def _statistics(self, saved: Saved, forwards: int) -> str:
        node, rstd = saved.node, getattr(saved.node, "_saved_result2", None)
        if rstd is None or saved.tensor is None or not blocks_mix_groups(saved.tensor, rstd.numel(), saved.op):
            return ""
        eps = getattr(node, "_saved_eps", None) or getattr(node, "_saved_epsilon", 0.0)  # cuDNN's name; layer norms have none
        measure = partial(extremes, rstd, node._saved_result1)
        ranges = self._read(saved.name, measure, rstd.is_cuda, forwards)
        return reason_of_spread(spread_of_ranges(ranges, eps))

    def _read(self, name: str, measure: Callable[[], Tensor], is_cuda: bool, forwards: int) -> list[float]:
        self._last = reading = self._readings.get(name)
        if reading is None and is_cuda:
            check_is_warm(f"reads values of {name}")
        if reading is None or (not is_cuda and reading.forwards != forwards):
            self._last = reading = self._readings[name] = DeviceReading(measure().reshape(-1).tolist(), forwards)
        elif is_cuda and reading.forwards != forwards:
            update_reading(reading, measure, forwards)
        return reading.values


def depends_on_values(saved: Saved) -> bool:
    """Return whether the values of a saved tensor decide if it may be packed."""
    tensor = saved.tensor
    assert tensor is not None
    if saved.pin in ATTENTION_PINS or saved.op in PERIODIC or (is_checkpoint_input(saved.name) and tensor.numel() > 0):
        return True
    if not saved.is_centered or _lies_in_rows(tensor, saved.op):
        return False
    rstd = getattr(saved.node, "_saved_result2", None)
    return rstd is None or blocks_mix_groups(tensor, rstd.numel(), saved.op)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check_is_warm(what: str) -> None:
    """Raise ApplyError if a CUDA graph is being captured; `what` is the action that must be done once before a capture."""
    if is_capturing():
        raise ApplyError(
            f"a CUDA graph is being captured, and the session {what} for the first time, which a capture forbids. Run three training "
            "steps on a side stream with inputs of the same shapes before the capture (docs/how_to/cuda_graphs.md)."
        )


def reason_of_attention(numbers: Sequence[float], scale: float, format: Format, head_dim: int) -> str:
    """Return why operands of attention must stay unmodified; "" if they may be packed.

    `numbers`: the result of `join_attention_parts`. `scale`: the factor of logits, so that none exceeds scale * max|q| * max|k|
    (Cauchy-Schwarz). `head_dim`: the number of values in a query.
    """
    query, key, of_output, of_value = numbers
    bound = abs(scale * query) * key if abs(query) * key < inf else inf
    share = of_output / of_value if of_value > 0 else 1.0
    share = min(share, 1.0) if share >= 0 else 1.0
    bits = min(significant_bits(format), significant_bits(PINNED))
    error = sqrt(2 / head_dim) * ROUNDING_ERROR * 2.0**-bits * bound
    is_large = not error <= MAX_LOGIT_ERROR
    if not is_large and error / MAX_SHARED_ERROR <= 1 - share:
        return ""
    what = f"its logits are up to {bound:.3g}: quantized they would be off by about {error:.2g}"
    rows = f", and rows attend to few keys (outputs have {share:.0%} of the variance of values), so that backward cancels"
    return what + (", and probabilities by exp of that" if is_large else rows)


def reason_of_spread(spread: float) -> str:
    """Return why a norm's input must stay unmodified; "" if it may be packed. `spread`: what `spread_of_ranges` returned."""
    if spread <= MAX_SPREAD:
        return ""
    return f"blocks hold several channels or rows, whose values spread over {spread:.3g} times the smallest standard deviation"


def measure_attention(node: Any) -> Tensor:
    """Return the four numbers of `join_attention_parts` for an attention node, which decide whether it may be packed."""
    query, scale = node._saved_query, node._saved_scale
    numbers = join_attention_parts(attention_parts(query, node._saved_key, node._saved_value, node._saved_output))
    return torch.cat([numbers[:1] * (query.shape[-1] ** -0.5 if scale is None else scale), numbers[1:]])


def attention_parts(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> tuple[Tensor, ...]:
    """Return six tensors from which `join_attention_parts` computes the bounds of attention.

    These are the norms of all queries and of all keys, and variances and means of the output and of the values over groups of tokens, in
    the first sequences of a batch (SAMPLE_SIZE values or a few more). In a compiled graph each operand takes one kernel.
    """
    norms = (torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).reshape(-1) for t in (query, key))
    moments = (moment for t in (output, value) for moment in torch.var_mean(_in_groups(_sample(t)).float(), dim=-2, correction=0))
    return (*norms, *moments)


def join_attention_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return four numbers for each attention: the largest norms of query and key, mean variances of output and value.

    `parts`: the results of `attention_parts` for each attention, one after the other. The result is 1-D.
    """
    largest = [torch.stack(tuple(parts[i::6])).amax(1) for i in range(2)]
    within = [torch.stack(tuple(parts[i::6])).flatten(1).mean(1) for i in (2, 4)]
    between = [torch.stack(tuple(parts[i::6])).var(dim=-2, correction=0).flatten(1).mean(1) for i in (3, 5)]
    return torch.stack([*largest, *(a + b for a, b in zip(within, between, strict=True))], 1).reshape(-1)


def _in_groups(tensor: Tensor) -> Tensor:
    """Return (..., tokens, values) as (..., groups, GROUP_TOKENS, values), or as one group if GROUP_TOKENS does not divide."""
    num_tokens = tensor.shape[-2]
    return tensor.unflatten(-2, (num_tokens // GROUP_TOKENS, GROUP_TOKENS) if num_tokens % GROUP_TOKENS == 0 else (1, num_tokens))


def _sample(tensor: Tensor) -> Tensor:
    """Return the first sequences of a tensor (batch, heads, tokens, values), about SAMPLE_SIZE values."""
    num_sequences = -(-SAMPLE_SIZE * tensor.shape[0] // max(tensor.numel(), 1)) if tensor.dim() > 2 else tensor.shape[0]
    return tensor[:num_sequences]


def largest_of_rows(tensor: Tensor) -> Tensor:
    """Return the root mean square, over rows, of the largest magnitude in each row; infinity instead of NaN.

    >>> float(largest_of_rows(torch.tensor([[3.0, -4.0], [0.0, 4.0]])))
    4.0
    """
    return tensor.detach().abs().amax(dim=-1).float().square().mean().sqrt().nan_to_num(nan=inf)


def extremes(rstd: Tensor, mean: Tensor) -> Tensor:
    """Return four numbers: the smallest and largest rstd, and the smallest and largest mean, of a norm's channels.

    >>> extremes(torch.tensor([2.0, 1.0]), torch.tensor([0.0, 6.0]))
    tensor([1., 2., 0., 6.])
    """
    return torch.stack([*torch.aminmax(rstd.detach()), *torch.aminmax(mean.detach())]).float()


def ranges_of_statistics(statistics: Sequence[Tensor], length: int = BLOCK) -> Tensor:
    """Return the `extremes` of every `length` channels of many norms, in one 1-D tensor.

    `statistics`: mean and rstd of the first norm, mean and rstd of the second, ...; `length` divides the number of channels of each.
    """
    mean, rstd = (torch.cat([t.reshape(-1) for t in statistics[i::2]]).view(-1, length) for i in range(2))
    return torch.stack([rstd.amin(1), rstd.amax(1), mean.amin(1), mean.amax(1)], 1).reshape(-1)


def spread_of_ranges(ranges: Sequence[float], eps: float) -> float:
    """Return the range of values across channels in units of the smallest standard deviation; inf if a variance is below `eps`.

    `ranges`: the smallest and largest rstd and mean (`extremes`) of the channels of one norm, or of each part of them in turn.

    >>> spread_of_ranges([1.0, 2.0, 0.0, 6.0], eps=0.0)
    2.0
    """
    smallest, largest = min(ranges[0::4]), max(ranges[1::4])
    if any(isnan(number) for number in ranges) or smallest <= 0 or largest * largest * eps > 0.5:  # rstd = (variance + eps)^-0.5
        return inf
    return max(1 / smallest, (max(ranges[3::4]) - min(ranges[2::4])) / SIGMAS) * largest


def blocks_mix_groups(tensor: Tensor, num_groups: int, op: str) -> bool:
    """Return whether a block of 64 values in memory can hold values of several of the `num_groups` channels, rows or groups of a norm."""
    if _lies_in_rows(tensor, op):
        return False  # such norms take rows of the last dimension together, and a block lies in one of them
    if not tensor.is_contiguous():
        return num_groups > 1
    group_len = tensor.shape[2:].numel() if op == "batch_norm" else tensor.numel() // max(num_groups, 1)
    return num_groups > 1 and group_len % BLOCK != 0


def _lies_in_rows(tensor: Tensor, op: str) -> bool:
    """Return whether the norm `op` normalizes rows of the last dimension of `tensor` that consist of whole blocks."""
    return op != "batch_norm" and tensor.dim() > 0 and tensor.stride(-1) == 1 and tensor.shape[-1] % BLOCK == 0


def update_reading(reading: DeviceReading, measure: Callable[[], Tensor], forwards: int) -> bool:
    """Put the numbers of a finished copy from the GPU into `reading`; return whether there were such numbers.

    Then the next copy, of `measure()`, starts if it is due: every READ_INTERVAL passes if none is under way and no CUDA graph is captured.
    `forwards`: the number of the forward pass.
    """
    reading.forwards = forwards
    if torch.cuda.is_current_stream_capturing():
        return False
    is_new = reading.pending is not None and reading.copied.query()
    if is_new and reading.pending is not None:
        reading.values, reading.pending = reading.pending.tolist(), None
    if reading.pending is None and forwards % READ_INTERVAL == 0:
        numbers = measure().reshape(-1)
        reading.pending = torch.empty(numbers.shape, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
        reading.copied = torch.cuda.current_stream().record_event()
    return is_new


# --- masks and indices -------------------------------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """Holds the bounds of a stored mask: the bit of a value is `low < value < high`.

    `values` are the numbers that bits 1 and 0 are decoded as; None if a bit for each value is not enough for backward.
    """

    low: float
    high: float
    values: tuple[float, float] | None


def use_and_detail(saved: Saved, tensor: Tensor) -> tuple[Use, Any]:
    """Return what backward needs of a saved tensor, and a detail of it: mask bounds, an integer dtype or None.

    Two views of one storage share stored data only if need and detail are equal: masks of {0, 1} and of {0, 2} are different.
    """
    if saved.use is Use.INSIDE:
        low = _bound_in(tensor.dtype, saved.node._saved_min_val, up=False)
        high = _bound_in(tensor.dtype, saved.node._saved_max_val, up=True)
        return Use.INSIDE, Bounds(low, high, _inside_and_outside(low, high, tensor.dtype))
    if saved.use is Use.SIGN or (saved.use is Use.MASK and not tensor.is_floating_point()):
        return saved.use, Bounds(0.0, NO_BOUND, (1.0, 0.0))  # the same for every view: one bit, whatever the values
    if saved.use is Use.MASK or (saved.use is Use.VALUE and saved.op == "mul" and not tensor.requires_grad):
        positive = _only_positive_value(tensor)
        if positive is not None or saved.use is Use.MASK:
            return Use.MASK, Bounds(0.0, NO_BOUND, (positive, 0.0) if positive is not None else None)
    # the width follows from a bound that the operation has checked, not from the values of this tensor
    return saved.use, _index_dtype(saved, tensor) if saved.use is Use.INDEX else None


def _inside_and_outside(low: float, high: float, dtype: torch.dtype) -> tuple[float, float] | None:
    """Return one value of `dtype` between two bounds and one outside of them; None if no value lies between."""
    middle = (
        0.0 if low < 0 < high else (low + high) / 2 if isfinite(low + high) else 2 * high - 1 if isfinite(high) else 2 * low + 1
    )
    inside = float(torch.tensor(middle, dtype=dtype))
    return (inside, high if isfinite(high) else low) if low < inside < high else None


def _bound_in(dtype: torch.dtype, bound: float, *, up: bool) -> float:
    """Return a bound in `dtype`; for 16 bits rounded up (`up`) or down, since kernels compare such values in float32."""
    exact = torch.tensor(bound, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
    near = exact.to(dtype)
    if dtype.itemsize == 2 and bool(near.float() < exact if up else near.float() > exact):
        step = 1 if bool(near.signbit()) != up else -1  # away from zero, or toward it
        near = (near.view(torch.int16) + step).view(dtype)
    return float(near)


def _only_positive_value(tensor: Tensor) -> float | None:
    """Return the positive value of a tensor that otherwise holds only 0, such as a dropout mask; None for other tensors.

    Return None on a GPU too, where dropout has a boolean mask and reading values would synchronize with the device. The result is valid for
    this view alone, so the caller makes it a part of the stored form's key. A negative zero counts as another value.
    """
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or not tensor.numel():
        return None
    largest = float(tensor.max())
    is_two_valued = largest > 0 and bool(((tensor == 0) | (tensor == largest)).all()) and not bool(torch.signbit(tensor).any())
    return largest if is_two_valued else None


def _index_dtype(saved: Saved, tensor: Tensor) -> torch.dtype:
    return getattr(torch, index_dtype(saved.bound, str(tensor.dtype).removeprefix("torch.")))
