"""`chunked_cross_entropy` computes the loss of a linear layer's logits in chunks of rows: all logits never exist.

The logits of row i are z = f(h_i W^T + b), with an elementwise f such as soft-capping. With p = softmax(z), target y, class weights w (1 if
there are none), label smoothing e, V classes and S = sum_c w_c:

    loss_i      = -(1 - e) w_y log p_y - (e / V) sum_c w_c log p_c                       0 where y is ignore_index
    d loss/dz_c = ((1 - e) w_y + (e / V) S) p_c - (1 - e) w_y [c = y] - (e / V) w_c
    "mean"      = sum_i loss_i / sum_i w_y, over the rows that are not ignored

Forward computes a chunk's logits, its loss, and at once its gradients: those of `hidden` in the dtype of the matrix products, those of
`weight` summed over chunks in the dtype of `weight` (float32 under autocast; each chunk's product accumulates in float32), those of `bias`
in float32. Backward multiplies them by the incoming gradient, in place if the graph is freed. With reduction "none" the incoming gradient
differs by row: forward computes losses alone, and backward computes the chunks' logits a second time.

Softmax and loss are float32 (float64 for float64 logits). Where KERNEL_DEVICES has the device, one kernel replaces a chunk's logits by
their gradient (loss/kernels/softmax_gradient.py), and computes an f of products and tanh in float32. Chunks hold 128 MiB
of logits on CUDA, 32 MiB elsewhere.

>>> hidden, weight, target = torch.eye(3)[:2], torch.eye(3), torch.tensor([0, 2])
>>> chunked_cross_entropy(hidden, weight, target)
tensor(1.0514)
>>> torch.nn.functional.cross_entropy(hidden @ weight.T, target)
tensor(1.0514)
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of

CHUNK_BYTES = {"cuda": 128 * 2**20}  # of one chunk's logits, by device type
OTHER_CHUNK_BYTES = 32 * 2**20
ROW_MULTIPLE = 128  # chunks of more rows are a multiple of this: whole tiles of matrix products
# Zero rows pad the weight to a multiple of so many classes, by device type: GPT-2 has 50,257 classes, and cuBLAS is slower for products
# of such sizes. torch.compile pads them too.
ROW_ALIGNMENT = {"cuda": 64}
SECOND = "a loss in chunks has no second derivative, which create_graph=True requests: use apply(plan, model, chunked_loss=False)."
NO_BACKWARD = -1  # id of the current graph task outside backward
KERNEL_DEVICES = {"cuda": True}  # device types on which the kernel runs
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT16_SUM = 1024.0  # of the scales of all rows in float16: smaller sums underflow, larger ones overflow


@dataclass(frozen=True)
class CrossEntropy:
    """The options of a cross entropy, as torch.nn.functional's; `class_weights` stands for its argument `weight`."""

    class_weights: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class Elementwise:
    """A transform of logits that consists of casts, products with numbers, and tanh, such as soft-capping.

    Its gradient is computed without autograd, which is not available inside operators.
    `calls`: ("to", the name of a dtype), ("mul", a number), ("div", a number) and ("tanh", None), in order.

    >>> Elementwise((("div", 5.0), ("tanh", None), ("mul", 5.0)))(torch.tensor([1.0, 100.0]))
    tensor([0.9869, 5.0000])
    """

    calls: tuple[tuple[str, Any], ...]

    @property
    def scales(self) -> tuple[float, ...] | None:
        """The numbers (a, b, ..., c) of the transform z -> c tanh(... b tanh(a z)); None if a call casts to float64.

        >>> Elementwise((("div", 4.0), ("to", "float32"), ("tanh", None), ("mul", 3.0), ("mul", 2.0))).scales
        (0.25, 6.0)
        """
        found = [1.0]
        for name, value in self.calls:
            if (name, value) == ("to", "float64"):
                return None
            if name == "tanh":
                found.append(1.0)
            elif name != "to":
                found[-1] = found[-1] / value if name == "div" else found[-1] * value
        return tuple(found)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the transformed logits."""
        for name, value in self.calls:
            logits = ELEMENTWISE[name](logits, value)
        return logits

    def gradient(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient for `logits`, the input of this transform, given the `gradient` for its output."""
        results = [logits]  # the logits before the first call, and the result of each call
        for name, value in self.calls:
            results.append(ELEMENTWISE[name](results[-1], value))
        while len(results) > 1:
            (name, value), result = self.calls[len(results) - 2], results.pop()
            factor = 1 - result.square() if name == "tanh" else value
            gradient = (
                gradient.to(results[-1].dtype) if name == "to" else ELEMENTWISE["div" if name == "div" else "mul"](gradient, factor)
            )
        return gradient


ELEMENTWISE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "to": lambda x, dtype: x.to(getattr(torch, dtype)),
    "mul": lambda x, factor: x * factor,
    "div": lambda x, divisor: x / divisor,
    "tanh": lambda x, _: x.tanh(),
}
# functions of tensors that make such calls
CASTS = frozenset(("float", "half", "bfloat16", "double", "to"))
SCALES = frozenset(("mul", "multiply", "div", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__"))


def elementwise_call(name: str, number: Any, dtype: torch.dtype) -> tuple[str, Any]:
    """Return the entry of `Elementwise.calls` for the function `name` with argument `number` and a result of `dtype`."""
    if name in CASTS:
        return "to", str(dtype).removeprefix("torch.")
    return ("tanh", None) if name == "tanh" else ("div" if "div" in name else "mul", number)


def without_last_casts(calls: Sequence[tuple[str, Any]], dtype: torch.dtype) -> Elementwise | None:
    """Return `calls` as a transform, without final casts to float32, which the loss makes itself; None if no call is left.

    `dtype`: that of the logits before the calls.
    """
    wide = [dtype is torch.float64]  # whether logits are float64 before each call
    for name, value in calls:
        wide.append(value == "float64" if name == "to" else wide[-1])
    count = len(calls)
    while count and calls[count - 1] == ("to", "float32") and not wide[count - 1]:
        count -= 1
    return Elementwise(tuple(calls[:count])) if count else None


@dataclass(frozen=True)
class ChunkSettings:
    """The settings of a loss in chunks: dtype of products, transform of logits, rows in a chunk; None: the default.

    `dtype`: that of the matrix products. `transform`: an elementwise function of the logits, such as soft-capping. `num_rows`: the number
    of rows in a chunk. `loss_dtype`: that of the result outside autocast. `device`: the type of device that a trace is for, which fake
    tensors do not have.
    """

    dtype: torch.dtype | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    num_rows: int | None = None
    loss_dtype: torch.dtype | None = None
    device: str | None = None


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    options: CrossEntropy | None = None,
    settings: ChunkSettings | None = None,
) -> Tensor:
    """Return the cross entropy of `linear(hidden, weight, bias)` and `target` without computing all logits at once.

    It differs from torch's by rounding alone. Matrix products are in the autocast dtype where autocast is enabled, and the loss is then
    float32; otherwise both have the dtype of the logits, unless `settings` has another one.
    `adapter`: (input, weight) of a second linear layer of low rank, whose output is added to the logits, as LoRA's.
    """
    options, settings = options or CrossEntropy(), settings or ChunkSettings()
    check_arguments(hidden, weight, target, options)
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach() if bias is not None else None
        adapter = (adapter[0].detach(), adapter[1].detach()) if adapter is not None else None
    device = settings.device or hidden.device.type
    dtype = settings.dtype or product_dtype(hidden, device)
    loss_dtype = settings.loss_dtype or _dtype_after(settings.transform, dtype)
    num_rows = settings.num_rows or rows_of_chunk(weight.shape[0], dtype, device)
    problem = Problem(target.reshape(-1), options, ChunkSettings(dtype, settings.transform, num_rows, loss_dtype, device))
    rows = adapter[0].reshape(-1, adapter[0].shape[-1]) if adapter is not None else None
    tensors = hidden.reshape(-1, hidden.shape[-1]), weight, bias, rows, adapter[1] if adapter is not None else None
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = ChunkedCrossEntropy.apply(problem, *tensors)  # type: ignore[assignment]
    loss = loss.reshape(target.shape) if options.reduction == "none" else loss
    return loss if torch.is_autocast_enabled(hidden.device.type) else loss.to(loss_dtype)


def check_arguments(hidden: Tensor, weight: Tensor, target: Tensor, options: CrossEntropy) -> None:
    """Raise ValueError if the shapes and dtypes do not fit each other, or `options` has a value that is not allowed."""
    if options.reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {options.reduction!r} is unknown. Allowed: 'mean', 'sum' and 'none'.")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, not {options.label_smoothing}.")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1] or target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden has shape (..., size), weight (classes, size) and target (...); they are {tuple(hidden.shape)}, {tuple(weight.shape)} "
            f"and {tuple(target.shape)}. Flatten hidden and target to the same rows."
        )
    if target.dtype is not torch.int64:
        raise ValueError(f"target has class indices, torch.int64, not {target.dtype}: class probabilities need all logits.")


def _dtype_after(transform: Callable[[Tensor], Tensor] | None, dtype: torch.dtype) -> torch.dtype:
    return transform(torch.empty(0, dtype=dtype)).dtype if transform is not None else dtype


def product_dtype(hidden: Tensor, device: str) -> torch.dtype:
    """Return the dtype of a matrix product with `hidden`: autocast's where that is enabled, except for float64."""
    is_cast = torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if is_cast else hidden.dtype


def rows_of_chunk(num_classes: int, dtype: torch.dtype, device: str) -> int:
    """Return how many rows of logits are computed at a time, so that a chunk fits the memory allowed on the device type.

    >>> rows_of_chunk(128256, torch.bfloat16, "cuda")
    512
    """
    rows = CHUNK_BYTES.get(device, OTHER_CHUNK_BYTES) // (num_classes * dtype.itemsize)
    return rows // ROW_MULTIPLE * ROW_MULTIPLE or max(1, rows)


@dataclass(frozen=True)
class Problem:
    """The arguments of one loss for which no gradient is computed: target, options and settings."""

    target: Tensor
    options: CrossEntropy
    settings: ChunkSettings

    @property
    def scales(self) -> tuple[float, ...] | None:
        """The numbers (a, b, ..., c) of the logits' transform z -> c tanh(... b tanh(a z)); None if kernels cannot compute it."""
        transform = self.settings.transform
        if transform is None:
            return (1.0,)
        return transform.scales if isinstance(transform, Elementwise) else None

    @property
    def is_fused(self) -> bool:
        """Whether one kernel computes losses and gradients of a chunk: on CUDA, if the transform consists of products and tanh."""
        is_covered = self.scales is not None and self.settings.dtype in KERNEL_DTYPES
        return is_covered and KERNEL_DEVICES.get(self.settings.device or "", False) and find_spec("triton") is not None


class Rows:
    """Computes the losses of rows of logits and their gradients, a chunk of rows at a time.

    A row's loss is the negative sum of `own` times the log probability of its target and `smooth` times those of all classes.
    """

    def __init__(self, problem: Problem, num_classes: int, dtype: torch.dtype) -> None:
        options, target = problem.options, problem.target
        self._target, self._ignore_index, self._dtype = target, options.ignore_index, dtype
        self._scales = problem.scales or (1.0,)
        self._own, self._smooth = 1 - options.label_smoothing, options.label_smoothing / num_classes
        self.weights = options.class_weights.to(dtype) if options.class_weights is not None else None
        self.weights_sum = self.weights.sum() if self.weights is not None else torch.tensor(float(num_classes))
        is_used = target != options.ignore_index
        weights = is_used if self.weights is None else self.weights[torch.where(is_used, target, 0)] * is_used
        self.total = weights.sum(dtype=dtype)
        if problem.is_fused and not hasattr(target, "fake_mode"):  # kernels do not check addresses; gather does
            is_class = ((target >= 0) & (target < num_classes)) | ~is_used
            torch.ops.aten._assert_async.msg(is_class.all(), f"a target is no class: classes are 0 to {num_classes - 1}")

    def _terms(self, part: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return, for each row of a chunk, the target, `own`, `smooth`, and whether the row counts, each as (num_rows, 1).

        Rows whose target is ignored do not count; `smooth` is None without label smoothing.
        """
        target = self._target[part, None]
        is_used = target != self._ignore_index
        target, used = torch.where(is_used, target, 0), is_used.to(self._dtype)
        own = self._own * (used if self.weights is None else self.weights[target] * used)
        return target, own, used * self._smooth if self._smooth else None, is_used

    def losses(self, log_probs: Tensor, part: slice) -> Tensor:
        """Return the loss of each row of a chunk from its log probabilities; `part` are the rows' indices."""
        target, own, smooth, is_used = self._terms(part)
        losses = -own * log_probs.gather(1, target)
        if smooth is not None:
            mean = log_probs.sum(1, keepdim=True) if self.weights is None else log_probs @ self.weights[:, None]
            losses -= smooth * mean
        return losses.masked_fill_(~is_used, 0.0)[:, 0]

    def fused_(self, logits: Tensor, part: slice, scale: Tensor | float | None) -> Tensor:
        """Return the losses of the rows `part` by one kernel, which overwrites `logits` by `scale` times their gradient.

        If `scale` is None, logits stay unmodified.
        """
        if hasattr(logits, "fake_mode"):  # a trace: the kernel allocates nothing but the losses
            logits.mul_(1.0)
            return torch.empty(len(logits), dtype=self._dtype)
        from paredown.loss.kernels.softmax_gradient import losses_and_gradient_  # needs Triton

        weights = (self.weights, self.weights_sum) if self.weights is not None else None
        numbers = (self._ignore_index, self._own, self._smooth)
        return losses_and_gradient_(logits, self._target[part].contiguous(), numbers, weights, scale, self._scales)

    def gradient_(self, log_probs: Tensor, part: slice, scale: Tensor | float) -> Tensor:
        """Return `scale` times the gradient of the losses of the rows `part` for their logits, in the memory of `log_probs`."""
        target, own, smooth, _ = self._terms(part)
        own, smooth = own * scale, smooth * scale if smooth is not None else None
        gradient = log_probs.exp_().mul_(own if smooth is None else own + smooth * self.weights_sum)
        gradient.scatter_add_(1, target, -own)
        if smooth is not None:
            gradient -= smooth if self.weights is None else smooth * self.weights
        return gradient


def values_in(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a weight in `dtype`, that of matrix products; a packed weight is decoded directly into it."""
    packed = weight_of(weight) if isinstance(weight, PackedParameter) else None
    return weight.to(dtype) if packed is None else packed.decode(dtype)


class Linear:
    """The output layer in a loss by chunks: it computes logits of some rows at a time, and adds up its gradients."""

    adapter: Linear | None = None

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, needs: tuple[bool, ...]) -> None:
        dtype = problem.settings.dtype
        self._hidden, self._weight = hidden.to(dtype), values_in(weight, dtype)
        self._bias = bias.to(dtype) if bias is not None else None
        self.dtype, self._transform = self._hidden.dtype, None if problem.is_fused else problem.settings.transform
        alignment = ROW_ALIGNMENT.get(problem.settings.device or "", 1)
        self.num_classes, num_added = len(weight), -len(weight) % alignment
        if num_added:
            self._weight = pad(self._weight, (0, 0, 0, num_added))
            self._bias = pad(self._bias, (0, num_added)) if self._bias is not None else None
        self.of_hidden = torch.empty_like(self._hidden) if needs[0] else None
        self._of_weight = torch.zeros_like(self._weight, dtype=weight.dtype) if needs[1] else None
        self.of_bias = torch.zeros_like(bias, dtype=accumulation_dtype(bias.dtype)) if bias is not None and needs[2] else None

    @property
    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias; None for those that were not requested."""
        of_weight = self._of_weight[: self.num_classes] if self._of_weight is not None else None
        return self.of_hidden, of_weight, self.of_bias

    @staticmethod
    def of(tensors: Sequence[Any], problem: Problem, needs: Sequence[bool]) -> Linear:
        """Return the layer of these tensors (hidden, weight, bias, an adapter's); `needs`: which of them need a gradient."""
        hidden, weight, bias, rows, adapter_weight = tensors
        linear = Linear(hidden, weight, bias, problem, tuple(needs[:3]))
        if rows is not None:
            linear.adapter = Linear(rows, adapter_weight, None, problem, (*needs[3:5], False))
        return linear

    @property
    def all_gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, weight, bias, and the adapter's input and weight; None if not requested."""
        return *self.gradients, *(self.adapter.gradients[:2] if self.adapter is not None else (None, None))

    def logits(self, part: slice, *, tracks: bool) -> tuple[Tensor, Tensor]:
        """Return the logits of the rows `part`, before and after the transform.

        `tracks`: whether `add_gradients` will go back through the transform. Without a transform the logits have the columns of the padded
        weight; the columns behind `num_classes` are zero.
        """
        rows, weight = self._hidden[part], self._weight.t()
        logits = rows @ weight if self._bias is None else torch.addmm(self._bias, rows, weight)
        if self.adapter is not None:
            logits.addmm_(self.adapter._hidden[part], self.adapter._weight.t())
        if self._transform is None:
            return logits, logits
        logits = logits[:, : self.num_classes]
        if isinstance(self._transform, Elementwise):
            return logits, self._transform(logits)
        with torch.set_grad_enabled(tracks):
            return logits.requires_grad_(tracks), self._transform(logits)

    def add_gradients(self, part: slice, logits: tuple[Tensor, Tensor], gradient: Tensor) -> None:
        """Add what the rows `part` contribute to the layer's gradients; `gradient` is that of their logits after the transform."""
        before, after = logits
        gradient = gradient.to(after.dtype)
        if isinstance(self._transform, Elementwise):
            gradient = self._transform.gradient(before, gradient)
        elif after is not before:
            (gradient,) = torch.autograd.grad(after, before, gradient)
        self._add_products(part, gradient)
        if self.adapter is not None:
            self.adapter._add_products(part, gradient)

    def _add_products(self, part: slice, gradient: Tensor) -> None:
        num_columns = gradient.shape[1]
        if self.of_hidden is not None:
            torch.mm(gradient, self._weight[:num_columns], out=self.of_hidden[part])
        if self._of_weight is not None:
            of_weight = self._of_weight[:num_columns]
            if of_weight.dtype is gradient.dtype:
                of_weight.addmm_(gradient.t(), self._hidden[part])
            else:
                of_weight += gradient.t() @ self._hidden[part]
        if self.of_bias is not None:
            self.of_bias += gradient[:, : self.num_classes].sum(0, dtype=self.of_bias.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The autograd function of the loss in chunks; unless reduction is "none", forward computes the gradients, too.

    Its tensors are rows (num_rows, size), weight (num_classes, size), bias, and an adapter's rows and weight, or None.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, *tensors: Any) -> Tensor:
        """Return the loss in float32 (float64 for float64 logits): a number, or one per row."""
        ctx.problem, ctx.dtypes = problem, [t.dtype if t is not None else None for t in tensors]
        if problem.options.reduction == "none":
            ctx.save_for_backward(*tensors)
            return run_chunks(Linear.of(tensors, problem, (False,) * 5), problem, None)[0]
        needs = ctx.needs_input_grad[1:]
        linear = Linear.of(tensors, problem, needs)
        loss, ctx.factor = reduced_loss(linear, problem, has_gradients=any(needs))
        ctx.gradients = linear.all_gradients
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of hidden states, weight, bias and adapter, multiplied by `grad`."""
        if torch.is_grad_enabled():  # create_graph=True: the gradients were computed in forward and have no graph
            raise RuntimeError(SECOND)
        if ctx.problem.options.reduction == "none":
            linear = Linear.of(ctx.saved_tensors, ctx.problem, ctx.needs_input_grad[1:])
            run_chunks(linear, ctx.problem, grad[:, None])
            gradients = zip(linear.all_gradients, ctx.dtypes, strict=True)
            return None, *(g.to(dtype) if g is not None else None for g, dtype in gradients)
        if ctx.gradients is None:
            raise RuntimeError(
                "backward through a chunked loss a second time: its gradients were freed. Call backward(retain_graph=True) the first time."
            )
        autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        is_kept = torch._C._current_graph_task_id() == NO_BACKWARD or autograd._get_current_graph_task_keep_graph()
        gradients = ctx.gradients
        if not is_kept:
            ctx.gradients = None
        factor = (grad * ctx.factor)[None]  # of one dimension: a number would be rounded to the dtype of the gradient
        return None, *(_scaled(g, factor, d, is_kept) for g, d in zip(gradients, ctx.dtypes, strict=True))


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None, is_kept: bool) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return (gradient * factor).to(dtype) if is_kept else gradient.mul_(factor).to(dtype)


def run_chunks(linear: Linear, problem: Problem, scale: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Compute the losses of all rows, a chunk of rows at a time; return them and the sum of the targets' class weights.

    Unless `scale` is None, gradients are added to `linear`. `scale`: a factor of the gradients, a number or (num_rows, 1).
    """
    dtype = accumulation_dtype(_dtype_after(problem.settings.transform, linear.dtype))
    rows, losses, is_fused = Rows(problem, linear.num_classes, dtype), list[Tensor](), problem.is_fused
    for part in _parts(len(problem.target), problem.settings.num_rows or 1):
        logits = linear.logits(part, tracks=scale is not None)
        values = logits[1].detach()[:, : linear.num_classes]
        own_scale = scale[part] if isinstance(scale, Tensor) else scale
        if is_fused:
            losses.append(rows.fused_(values, part, own_scale))
            values = logits[1]
        else:
            log_probs = torch.log_softmax(values, 1, dtype=dtype)
            losses.append(rows.losses(log_probs, part))
            values = rows.gradient_(log_probs, part, own_scale) if own_scale is not None else values
            del log_probs
        if scale is not None:
            linear.add_gradients(part, logits, values)
        del logits, values  # to free them before the next chunk's logits are computed
    return torch.cat(losses) if losses else problem.target.new_zeros(0, dtype=dtype), rows.total


def reduced_loss(linear: Linear, problem: Problem, *, has_gradients: bool) -> tuple[Tensor, Tensor]:
    """Return the sum or mean of all losses, and the factor by which the gradients in `linear` must still be multiplied."""
    scale = scale_of_rows(problem, len(problem.target)) if has_gradients else None
    losses, total = run_chunks(linear, problem, scale)
    divisor = total if problem.options.reduction == "mean" else torch.ones_like(total)
    factor = 1 / (divisor * (scale or 1.0))
    return losses.sum() / divisor, factor.masked_fill(divisor == 0, 0.0)  # all rows ignored: torch's gradients are 0


def _parts(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_rows, size))


def accumulation_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which losses are computed for logits of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def scale_of_rows(problem: Problem, num_rows: int) -> float:
    """Return a factor that keeps gradients from overflowing in float16 until they are divided by it again; 1 elsewhere."""
    if problem.settings.dtype is not torch.float16 or num_rows <= FLOAT16_SUM:
        return 1.0
    return 2.0 ** -ceil(log2(num_rows / FLOAT16_SUM))
