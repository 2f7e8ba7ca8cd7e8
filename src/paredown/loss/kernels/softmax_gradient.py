"""`softmax_gradient` computes the losses of a chunk's rows, and overwrites its logits by their gradient.

With the terms of `chunked_cross_entropy.Rows`, own = (1 - e) w_y and smooth = e / V (0 if y is the ignored index), with
L = log sum_c exp z_c and S = sum_c w_c:

    loss = own (L - z_y) + smooth (S L - sum_c w_c z_c)
    z_c <- scale ((own + smooth S) exp(z_c - L) - own [c = y] - smooth w_c)

z = f(x) of the logits x that are in memory: products and tanh, c tanh(b tanh(a x)) for SCALES = (a, b, c), such as a soft cap; then

    x_c <- f'(x_c) times what z_c would get

One program has one row. All arithmetic is float32.

    row 0   z_0 z_1 z_2 z_3 | z_4 z_5 z_6 z_7      TILE = 4: first all tiles for L, with a running maximum and sum in each lane;
            ^ lane 0          ^ lane 0             then all tiles again, each replaced by its gradient
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # values
NUM_WARPS = 8
LOWEST = tl.constexpr(-3.0e38)  # finite: the running maximum of lanes that have no value yet


@triton.jit
def transformed(x, SCALES: tl.constexpr, NUM_TANH: tl.constexpr):
    """Return f(x) and f'(x) for a transform f of logits: c tanh(b tanh(a x)) for SCALES (a, b, c), a x for (a,)."""
    z = x * SCALES[0]
    slope = tl.full(x.shape, SCALES[0], tl.float32)
    for i in tl.static_range(1, NUM_TANH + 1):
        t = tl.exp(-2.0 * tl.abs(z))
        tanh = tl.where(z < 0.0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
        slope = slope * (SCALES[i] * (1.0 - tanh * tanh))
        z = tanh * SCALES[i]
    return z, slope


@triton.jit
def update_sum(peak, total, z):
    """Return `peak` and `total` after adding the values `z`: the maximum so far, and the sum of exp(value - maximum)."""
    new = tl.maximum(peak, z)
    return new, total * tl.exp(peak - new) + tl.exp(z - new)


@triton.jit
def gradient_of(z, log_sum, factor):
    """Return `factor` times the softmax of the values `z`; `log_sum` is the log-sum-exp of their whole row."""
    return factor * tl.exp(z - log_sum)


@triton.jit
def softmax_gradient(
    logits_ptr,
    target_ptr,
    weights_ptr,
    weights_sum_ptr,
    scales_ptr,
    losses_ptr,
    num_classes,
    row_stride,
    ignore_index,
    own,
    smooth,
    scale,
    HAS_SMOOTH: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr,
    NUM_TANH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the loss of one row of logits, and overwrite the row by its gradient if HAS_GRADIENT."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    columns = tl.arange(0, TILE)
    target = tl.load(target_ptr + row)
    is_used = target != ignore_index
    target = tl.where(is_used, target, 0)
    own = tl.where(is_used, own, 0.0)
    smooth = tl.where(is_used, smooth, 0.0)
    if HAS_WEIGHTS:
        own *= tl.load(weights_ptr + target)
    weights_sum = tl.load(weights_sum_ptr) if HAS_WEIGHTS else num_classes.to(tl.float32)
    x_target = tl.load(logits_ptr + target + tl.arange(0, 1)).to(
        tl.float32
    )  # before the reductions, and so before any thread writes
    z_target, _slope_of_target = transformed(x_target, SCALES, NUM_TANH)
    z_target = tl.sum(z_target, 0)

    peak = tl.full((TILE,), LOWEST, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE,), tl.float32)
    for start in range(0, num_classes, TILE):
        at = start + columns
        z, _slope_of_first = transformed(
            tl.load(logits_ptr + at, mask=at < num_classes, other=0.0).to(tl.float32), SCALES, NUM_TANH
        )
        z = tl.where(at < num_classes, z, -float("inf"))
        peak, total = update_sum(peak, total, z)
        if HAS_SMOOTH:
            weight = tl.load(weights_ptr + at, mask=at < num_classes, other=0.0) if HAS_WEIGHTS else 1.0
            weighted += weight * tl.where(at < num_classes, z, 0.0)
    most = tl.max(peak, 0)
    log_sum = most + tl.log(tl.sum(total * tl.exp(peak - most), 0))
    loss = own * (log_sum - z_target)
    if HAS_SMOOTH:
        loss += smooth * (weights_sum * log_sum - tl.sum(weighted, 0))
    tl.store(losses_ptr + row, tl.where(is_used, loss, 0.0))

    if HAS_GRADIENT:
        if HAS_SCALES:
            scale = tl.load(scales_ptr + row)
        own = own * scale
        smooth = smooth * scale
        factor = own + smooth * weights_sum
        for start in range(0, num_classes, TILE):
            at = start + columns
            z, slope = transformed(tl.load(logits_ptr + at, mask=at < num_classes, other=0.0).to(tl.float32), SCALES, NUM_TANH)
            gradient = gradient_of(z, log_sum, factor)
            if HAS_SMOOTH:
                weight = tl.load(weights_ptr + at, mask=at < num_classes, other=0.0) if HAS_WEIGHTS else 1.0
                gradient -= smooth * weight
            gradient = tl.where(at == target, gradient - own, gradient) * slope
            tl.store(logits_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < num_classes)


def losses_and_gradient_(
    logits: Tensor,
    target: Tensor,
    numbers: tuple[int, float, float],
    weights: tuple[Tensor, Tensor] | None,
    scale: Tensor | float | None,
    scales_of_logits: tuple[float, ...] = (1.0,),
) -> Tensor:
    """Return the losses (num_rows,) of `logits`, and overwrite `logits` by their gradient times `scale`.

    If `scale` is None, logits stay unmodified. The values of a row of `logits` must be contiguous. `numbers` are the ignored index, 1 minus
    the label smoothing, and that smoothing / number of classes; `weights`: a weight for each class, and their sum. A tensor `scale` has
    one float32 value for each row. `scales_of_logits`: (a, b, c) for a transform of logits c tanh(b tanh(a x)), (a,) for a x.
    """
    num_rows, num_classes = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    scales = scale.contiguous() if isinstance(scale, Tensor) else None
    with torch.cuda.device_of(logits):
        softmax_gradient[(num_rows,)](
            logits,
            target,
            *(weights if weights is not None else (losses, losses)),
            scales if scales is not None else losses,
            losses,
            num_classes,
            logits.stride(0),
            *numbers,
            scale if isinstance(scale, float) else 1.0,
            HAS_SMOOTH=numbers[2] > 0,
            HAS_WEIGHTS=weights is not None,
            HAS_GRADIENT=scale is not None,
            HAS_SCALES=scales is not None,
            SCALES=scales_of_logits,
            NUM_TANH=len(scales_of_logits) - 1,
            TILE=min(TILE, triton.next_power_of_2(num_classes)),
            num_warps=NUM_WARPS,
        )
    return losses
