"""`paredown::chunked_loss` is an operator of torch for compiled graphs: an output head and its cross entropy together.

It computes what `chunked_cross_entropy` computes, with the same chunks. Its results are new tensors: the loss, the factor of the gradients,
and the gradients of hidden states, weight and bias, which backward multiplies by the factor and by the incoming gradient: operations that
Inductor fuses with their readers. With reduction "none" backward calls `paredown::chunked_gradients`, which computes the logits of each
chunk a second time. To torch.compile both are opaque: no tensor of all logits exists in its graphs.

Arguments that are not tensors travel as one text.

>>> settings = OperatorSettings("float32", "cpu", (True, True, False)).text
>>> hidden, weight, target = torch.eye(3)[:2], torch.eye(3), torch.tensor([0, 2])
>>> loss, factor, of_hidden, of_weight, of_bias = chunked_loss(hidden, weight, None, target, None, settings)
>>> loss, factor, of_weight.shape, of_bias.shape
(tensor(1.0514), tensor(0.5000), torch.Size([3, 3]), torch.Size([0]))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paredown.loss.chunked_cross_entropy import (
    ChunkSettings,
    CrossEntropy,
    Elementwise,
    Linear,
    Problem,
    accumulation_dtype,
    reduced_loss,
    rows_of_chunk,
    run_chunks,
)

NAME = "chunked_loss"
TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weights"


@dataclass(frozen=True)
class OperatorSettings:
    """The settings of a loss in chunks as one value, which `text` turns into an argument of an operator of torch.

    `dtype`: of matrix products. `device`: a type such as "cuda". `needs`: whether hidden, weight and bias need gradients.
    """

    dtype: str
    device: str
    needs: tuple[bool, bool, bool]
    calls: tuple[tuple[str, Any], ...] = ()
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def text(self) -> str:
        """The settings as one text, which operators of torch can take as an argument."""
        return json.dumps(asdict(self))

    @staticmethod
    @lru_cache(maxsize=64)
    def parse(text: str) -> OperatorSettings:
        """Return the settings from which the property `text` made this text."""
        fields = json.loads(text)
        fields["needs"], fields["calls"] = tuple(fields["needs"]), tuple((name, value) for name, value in fields["calls"])
        return OperatorSettings(**fields)

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of matrix products, as a torch.dtype."""
        return getattr(torch, self.dtype)

    def problem(self, target: Tensor, class_weights: Tensor | None, num_classes: int) -> Problem:
        """Return a `Problem`, the arguments of the loss without gradients: target (num_rows,), class weights and settings."""
        options = CrossEntropy(class_weights, self.ignore_index, self.reduction, self.label_smoothing)
        num_rows = rows_of_chunk(num_classes, self.product_dtype, self.device)
        transform = Elementwise(self.calls) if self.calls else None
        return Problem(target, options, ChunkSettings(self.product_dtype, transform, num_rows, device=self.device))


def compute_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weights: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the factor by which gradients must be multiplied, and the gradients of `hidden`, `weight`, `bias`.

    `hidden` is (num_rows, size), `weight` (num_classes, size). `settings`: the text of `OperatorSettings`. Gradients not needed are empty.
    """
    parsed = OperatorSettings.parse(settings)
    problem = parsed.problem(target, class_weights, weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        if parsed.reduction == "none":
            losses, total = run_chunks(Linear(hidden, weight, bias, problem, (False,) * 3), problem, None)
            return losses, torch.ones_like(total), *_filled((None,) * 3, hidden)
        linear = Linear(hidden, weight, bias, problem, parsed.needs)
        loss, factor = reduced_loss(linear, problem, has_gradients=any(parsed.needs))
    return loss, factor, *_filled(linear.gradients, hidden)


def compute_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    grad: Tensor,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias; each is empty if it is not needed.

    `grad`: the gradient of each row's loss, (num_rows,). `settings`: the text of `OperatorSettings`.
    """
    parsed = OperatorSettings.parse(settings)
    problem = parsed.problem(target, class_weights, weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        linear = Linear(hidden, weight, bias, problem, parsed.needs)
        run_chunks(linear, problem, grad[:, None])
    return _filled(linear.gradients, hidden)


def _filled(gradients: Sequence[Tensor | None], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with empty tensors in place of None, which operators cannot return, on the device of `hidden`."""
    of_hidden, of_weight, of_bias = (hidden.new_empty(0) if g is None else g for g in gradients)
    return of_hidden, of_weight, of_bias


chunked_loss = torch.library.custom_op(
    f"paredown::{NAME}",
    compute_loss,
    mutates_args=(),
    schema=f"({TENSORS}, str settings) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
chunked_gradients = torch.library.custom_op(
    "paredown::chunked_gradients",
    compute_gradients,
    mutates_args=(),
    schema=f"({TENSORS}, Tensor grad, str settings) -> (Tensor, Tensor, Tensor)",
)
SCRATCH: dict[str, Callable[..., tuple[Tensor, ...]]] = {NAME: compute_loss, "chunked_gradients": compute_gradients}


# --- shapes, for tracing --------------------------------------------------------------------------------------------------------------


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: OperatorSettings
) -> tuple[Tensor, Tensor, Tensor]:
    needs = settings.needs if bias is not None else (*settings.needs[:2], False)
    shapes = [t.shape if t is not None and is_needed else (0,) for t, is_needed in zip((hidden, weight, bias), needs, strict=True)]
    dtypes = [
        settings.product_dtype if needs[0] else hidden.dtype,
        weight.dtype if needs[1] else hidden.dtype,
        accumulation_dtype(bias.dtype) if bias is not None and needs[2] else hidden.dtype,
    ]
    of_hidden, of_weight, of_bias = (hidden.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    return of_hidden, of_weight, of_bias


@chunked_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, class_weights: Any, settings: str) -> tuple[Tensor, ...]:
    parsed, empty = OperatorSettings.parse(settings), hidden.new_empty(0)
    number = hidden.new_empty((), dtype=_loss_dtype(parsed))
    if parsed.reduction == "none":
        losses = hidden.new_empty(target.shape, dtype=number.dtype)
        return losses, number, empty, hidden.new_empty(0), hidden.new_empty(0)
    return number, torch.empty_like(number), *_empty_gradients(hidden, weight, bias, parsed)


@chunked_gradients.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, class_weights: Any, grad: Tensor, settings: str
) -> tuple[Tensor, ...]:
    return _empty_gradients(hidden, weight, bias, OperatorSettings.parse(settings))


def _loss_dtype(settings: OperatorSettings) -> torch.dtype:
    """Return the dtype of the loss: float64 if the transform in `settings` casts logits to it, otherwise float32."""
    casts = [value for name, value in settings.calls if name == "to"]
    return accumulation_dtype(getattr(torch, casts[-1] if casts else settings.dtype))


# --- gradients ------------------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, class_weights, settings = inputs
    ctx.settings, ctx.dtypes = settings, [t.dtype if t is not None else None for t in (hidden, weight, bias)]
    ctx.set_materialize_grads(False)
    is_by_row = OperatorSettings.parse(settings).reduction == "none"
    ctx.save_for_backward(*((hidden, weight, bias, target, class_weights) if is_by_row else output[1:]))


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    settings, saved = OperatorSettings.parse(ctx.settings), ctx.saved_tensors
    if grad is None:
        return (None,) * 6
    if settings.reduction == "none":
        gradients = chunked_gradients(*saved, grad, ctx.settings)
    else:
        factor = (grad * saved[0])[None]  # of one dimension: a number would be rounded to the dtype of the gradient
        gradients = [(gradient * factor).to(gradient.dtype) for gradient in saved[1:]]
    rows = zip(gradients, ctx.dtypes, settings.needs, strict=True)
    return *(g.to(dtype) if dtype is not None and is_needed else None for g, dtype, is_needed in rows), None, None, None


chunked_loss.register_autograd(_backward, setup_context=_save)
