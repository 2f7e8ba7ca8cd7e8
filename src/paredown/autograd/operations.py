"""States what the backward of each operation needs of every tensor that autograd saves, a row for each kind of node.

To support the backward of another operation, add a row here; tracing, prediction and sessions read this table.

Autograd nodes expose saved tensors by name: a `ConvolutionBackward0` has `_saved_input` and `_saved_weight`. A row gives the operation
one name on all devices, gives its operands readable names, and states what backward does with each of them:

    ReluBackward0.result is compared with 0 and nothing else        -> one exact bit
    MaxPool2DWithIndicesBackward0.self is read for its shape        -> nothing is stored
    ConvolutionBackward0.input is multiplied with the gradient      -> may be quantized
    ScaledDotProduct...query is in an exponent beside an exact logsumexp -> may be quantized, to no less than 7 significant bits

Floats saved by nodes without a row are stored unmodified: backward may compare them, divide by them or take their logarithm. Floats that
custom functions of the user save may be quantized, to no less than 7 significant bits.

>>> row_of("ReluBackward0").operands["result"].use
<Use.SIGN: 'sign'>
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from math import prod
from typing import Any


class Use(str, Enum):
    """Says what backward needs of a saved tensor: values, a bit of each, integers, the shape, or the exact tensor."""

    VALUE = "value"  # its values, which may be rounded: it is stored in a format
    SIGN = "sign"  # whether it is above 0: one exact bit
    INSIDE = "inside"  # whether it lies strictly between two bounds: one exact bit
    MASK = "mask"  # a boolean, or a float of 0 and one other value: one exact bit
    INDEX = "index"  # integers, exact in the smallest width that their bound allows
    SHAPE = "shape"  # only its shape: nothing is stored
    EXACT = "exact"  # its values unmodified


@dataclass(frozen=True)
class Pin:
    """Sets the least precision in which a tensor may be stored, in significant bits (int8 has 7, e4m3 4, bf16 8)."""

    significant_bits: int
    reason: str


@dataclass(frozen=True)
class Needs:
    """States what backward needs of a saved tensor, and the limits on the format in which it may be stored.

    `is_centered`: backward subtracts a mean from the tensor (norms) or the tensor from 1 (tanh, sigmoid), so its format must resolve small
    differences beside a large mean.
    """

    use: Use = Use.VALUE
    pin: Pin | None = None
    is_centered: bool = False


EXPONENT = Pin(7, "backward exponentiates its errors")
CANCELS = Pin(7, "backward subtracts a sum over the output from its product with the gradient, and little may be left")
CANCELLED = Pin(8, "backward subtracts a sum over it from each gradient of a logit, and little may be left")
UNKNOWN = Pin(7, "nothing is known of how backward uses it")
COMPUTED_WEIGHT = Pin(7, "it is used as a weight")
NONLINEAR = Pin(7, "backward uses it nonlinearly")

ATTENTION_PINS = (EXPONENT, CANCELS, CANCELLED)
PERIODIC = ("sin", "cos")  # operations in which a rounding error is relative to the period, not to the value

STATISTIC, STATE, PARAMETER = "it is a statistic", "it is state of the library", "it is a parameter"
CODES = "it is an operand of a product in 8 bits already"
SCALE = "it scales other tensors, and their operations may save it too"
TILE_INPUT = "the module runs again from it, piece by piece"

MIN_PACKED_NUMEL = 4096  # values; smaller tensors are stored unmodified
# Share of the bytes that could be packed which the smallest tensors together have at most: on a GPU they are stored unmodified, since the
# host takes as long to pack a small tensor as a large one. They are 48 of the 291 saved tensors of a Llama-shaped model and 60 of the 397
# of a selective scan, and the peaks of plans grow by less than 0.1 % of the baseline's (docs/log.md, 2026-11-17).
SMALL_SHARE = 0.0025
SMALL = f"the smallest tensors, {100 * SMALL_SHARE:g} % of the bytes together at most, are stored unmodified on a GPU"
Bound = Callable[[Any], int]
Condition = Callable[[Any], bool]


@dataclass(frozen=True)
class Operand:
    """Describes a tensor that an operation saves: its name, what backward needs of it, and limits on its format."""

    name: str
    use: Use = Use.VALUE
    pin: Pin | None = None
    bound: Bound | None = None  # for the use INDEX: a function of the node that returns a number which all values are below
    reason: str = ""  # for the use EXACT: why the tensor is not quantized
    is_centered: bool = False  # as in `Needs`
    exact_if: Condition | None = None  # a function of the node that returns whether the use is EXACT instead

    def at(self, node: Any) -> Operand:
        """Return this operand, with the use EXACT if the condition `exact_if` holds for the autograd node `node`."""
        return replace(self, use=Use.EXACT) if self.exact_if is not None and self.exact_if(node) else self

    @property
    def is_minor(self) -> bool:
        """Return whether the tensor is a statistic, library state or a parameter, which are never packed."""
        return self.reason in (STATISTIC, STATE, PARAMETER)


@dataclass(frozen=True)
class OperationRow:
    """Describes an operation in the table of operations: its name, and the operands that its node saves."""

    op: str
    operands: dict[str, Operand] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    others: Operand | None = None  # for all saved tensors that `operands` does not name


def _exact(name: str, reason: str) -> Operand:
    return Operand(name, Use.EXACT, reason=reason)


def _plane_of_input(node: Any) -> int:
    """Return the number of pixels in one channel of a max pooling's input; all indices that `node` saved are below it."""
    return prod(node._saved_self.shape[-3 if "3D" in node.name() else -2 :])


def _classes(node: Any) -> int:
    """Return a number above all class targets that a loss node saved, by which the dtype to store them is chosen.

    If ignore_index is negative, the number exceeds 256, so that a signed dtype is chosen.
    """
    classes, ignored = node._saved_self.shape[1 if node._saved_self.dim() > 1 else 0], int(node._saved_ignore_index)
    return max(classes, ignored + 1) if ignored >= 0 else max(classes, (1 << 8) + 1, 1 - ignored)


def _has_low_exponent(node: Any) -> bool:
    """Return whether the backward of a `pow` node divides by its base: the exponent is below 1 or a tensor."""
    exponent = node._saved_exponent
    return not isinstance(exponent, int | float) or exponent < 1


def _divides(name: str) -> Operand:
    return _exact(name, "backward divides by it, and rounding may make it 0")


def _compared(name: str) -> Operand:
    return _exact(name, "backward compares it, and rounding may change the answer")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NORM = {
    "weight": _exact("weight", PARAMETER),
    "bias": _exact("bias", PARAMETER),
    "input": Operand("input", is_centered=True),
    "running_mean": _exact("running_mean", STATISTIC),
    "running_var": _exact("running_var", STATISTIC),
    "result1": _exact("mean", STATISTIC),
    "result2": _exact("inverse_deviation", STATISTIC),  # rstd; names of slots do not change between versions
    "result3": _exact("reserve", STATE),
}
ATTENTION = {
    "query": Operand("query", pin=EXPONENT),
    "key": Operand("key", pin=EXPONENT),
    "value": Operand("value", pin=CANCELS),
    "output": Operand("output", pin=CANCELLED),
    "logsumexp": _exact("logsumexp", STATISTIC),
    "log_sumexp": _exact("logsumexp", STATISTIC),
    "attn_bias": _exact("bias", "backward takes the exponential of a sum that contains it"),
    "attn_mask": _exact("bias", "backward takes the exponential of a sum that contains it"),
}
WEIGHT = Operand("weight", pin=COMPUTED_WEIGHT)
CONV = {"input": Operand("input"), "weight": WEIGHT}
SHAPE_ONLY = {"self": Operand("input", Use.SHAPE)}
POOL = {"self": Operand("input", Use.SHAPE), "result1": Operand("indices", Use.INDEX, bound=_plane_of_input)}
INSIDE = Operand("input", Use.INSIDE)
LOSS = {
    # backward needs its shape only, but needs it first, and its substitute is as large: dropping it raised the peak of a GPT by 1.5 GiB
    "self": _exact("input", "backward uses it first: dropping it would save nothing"),
    "target": Operand("target", Use.INDEX, bound=_classes),
    "total_weight": _exact("total_weight", STATISTIC),
}
LOG_PROBABILITY = _exact("output", "backward takes exp of log-probabilities, and uses them first: packing would save nothing")
RNN = {
    "input": Operand("input"),
    "result0": Operand("output", pin=UNKNOWN),
    "result3": _exact("reserve", STATE),
    "result4": _exact("weight", STATE),
    "weight_buf": _exact("weight", STATE),
}

ROWS: dict[str, OperationRow] = {
    **dict.fromkeys(
        ("Convolution", "ConvolutionOverrideable", "CudnnConvolution", "CudnnConvolutionTranspose", "MkldnnConvolution"),
        OperationRow("conv", CONV),
    ),
    "Addmm": OperationRow("linear", {"mat1": Operand("input"), "mat2": WEIGHT}),
    "Mm": OperationRow("linear", {"self": Operand("input"), "mat2": WEIGHT}),
    "Linear": OperationRow("linear", {"input": Operand("input"), "weight": WEIGHT}),
    "MkldnnLinear": OperationRow("linear", {"input": Operand("input"), "weight": WEIGHT}),
    # backward of a product of 8-bit codes (codec/products.py): what compiled graphs save in place of the codes of its input
    "QuantizeRows": OperationRow("linear", {"input": Operand("input"), "weight": WEIGHT}),
    "RowProduct": OperationRow("linear", others=_exact("codes", CODES)),
    "GroupedMm": OperationRow("grouped_matmul", {"self": Operand("input"), "mat2": WEIGHT}),
    "Bmm": OperationRow("matmul", {"self": Operand("input"), "mat2": Operand("other")}),
    "Baddbmm": OperationRow("matmul", {"batch1": Operand("input"), "batch2": Operand("other")}),
    "Mul": OperationRow("mul", {"self": Operand("input"), "other": Operand("other")}),
    **dict.fromkeys(
        ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "BatchNormWithUpdate"), OperationRow("batch_norm", NORM)
    ),
    "NativeLayerNorm": OperationRow("layer_norm", NORM),
    "NativeGroupNorm": OperationRow("group_norm", NORM),
    "FusedRmsNorm": OperationRow("rms_norm", {"input": Operand("input"), "result1": _exact("inverse_deviation", STATISTIC)}),
    "Relu": OperationRow("relu", {"result": Operand("output", Use.SIGN)}),
    "LeakyRelu": OperationRow("leaky_relu", {"self": Operand("input", Use.SIGN), "result": Operand("output", Use.SIGN)}),
    "Hardtanh": OperationRow("hardtanh", {"self": INSIDE, "result": INSIDE}),
    "Gelu": OperationRow("gelu", {"self": Operand("input")}),
    "Silu": OperationRow("silu", {"self": Operand("input")}),
    "NativeDropout": OperationRow("dropout", {"result1": Operand("mask", Use.MASK)}),
    "FusedDropout": OperationRow("dropout", {"result1": Operand("mask", Use.MASK)}),
    "MaskedFill": OperationRow("masked_fill", {"mask": Operand("mask", Use.MASK)}),
    "Where": OperationRow("where", {"condition": Operand("mask", Use.MASK)}),
    **dict.fromkeys(
        ("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"), OperationRow("max_pool", POOL)
    ),
    **dict.fromkeys(("AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D"), OperationRow("avg_pool", SHAPE_ONLY)),
    **{
        f"ScaledDotProduct{kind}": OperationRow("scaled_dot_product_attention", ATTENTION)
        for kind in _words("FlashAttention EfficientAttention CudnnAttention FlashAttentionForCpu FusedAttentionOverrideable")
    },
    "Pow": OperationRow("pow", {"self": replace(_divides("input"), use=Use.VALUE, exact_if=_has_low_exponent)}),
    "SafeSoftmax": OperationRow("softmax", {"result": Operand("output", pin=NONLINEAR)}),
    "Softmax": OperationRow("softmax", {"result": Operand("output", pin=NONLINEAR)}),
    "LogSoftmax": OperationRow("log_softmax", {"result": LOG_PROBABILITY}),
    "Logsumexp": OperationRow(
        "logsumexp",
        {
            "self": _exact("input", "backward takes the exponential of a sum that contains it"),
            "result": _exact("output", STATISTIC),
        },
    ),
    "NllLoss": OperationRow("nll_loss", LOSS),
    "NllLoss2D": OperationRow("nll_loss", LOSS),
    "Embedding": OperationRow(
        "embedding",
        {"indices": Operand("indices", Use.INDEX, bound=lambda node: int(node._saved_weight_sym_argsize_0))},
    ),
    "CudnnRnn": OperationRow("rnn", RNN),
    "CheckpointFunction": OperationRow("checkpoint", others=_exact("input", "a checkpointed layer runs again from it")),
    "TileInput": OperationRow("tiles", others=_exact("input", TILE_INPUT)),
    "CompiledFunction": OperationRow(
        "compiled", others=_exact("saved", "torch.compile saved it: how backward uses it is not known")
    ),
    "Div": OperationRow("div", {"self": Operand("input"), "other": _divides("other")}),
    "Sqrt": OperationRow("sqrt", {"result": _divides("output")}),
    "Hypot": OperationRow("hypot", {"result": _divides("output")}),
    "Atan2": OperationRow("atan2", {"self": _divides("input"), "other": _divides("other")}),
    "Prod": OperationRow("prod", {"self": _divides("input"), "result": _divides("output")}),
    "Cumprod": OperationRow("cumprod", {"self": _divides("input"), "result": _divides("output")}),
    **{
        name: OperationRow(name.lower(), {"self": _divides("input")})
        for name in ("Log", "Log2", "Log10", "Log1P", "Logit", "Asin", "Acos", "Atanh", "Acosh", "BinaryCrossEntropy")
    },
    **{
        name: OperationRow(name.lower(), {"self": Operand("input", pin=NONLINEAR), "result": Operand("output", pin=NONLINEAR)})
        for name in ("Exp", "Elu", "Mish", "Hardswish", "Glu", "Erf", "Sin", "Cos")
    },
    # Backward multiplies with 1 - y^2 or y (1 - y), which is small where y is near 1, beside other factors of y.
    **{
        name: OperationRow(name.lower(), {"result": Operand("output", pin=NONLINEAR, is_centered=True)})
        for name in ("Tanh", "Sigmoid")
    },
    "Var": OperationRow("var", {"self": Operand("input", pin=NONLINEAR, is_centered=True)}),
    "Addcmul": OperationRow("addcmul", {"tensor1": Operand("input", pin=NONLINEAR), "tensor2": Operand("other", pin=NONLINEAR)}),
    "Dot": OperationRow("matmul", {"self": Operand("input", pin=NONLINEAR), "tensor": Operand("other", pin=NONLINEAR)}),
    "Mv": OperationRow("matmul", {"self": Operand("input", pin=NONLINEAR), "vec": Operand("other", pin=NONLINEAR)}),
    "Addmv": OperationRow("matmul", {"mat": Operand("input", pin=NONLINEAR), "vec": Operand("other", pin=NONLINEAR)}),
    "Addbmm": OperationRow("matmul", {"batch1": Operand("input", pin=NONLINEAR), "batch2": Operand("other", pin=NONLINEAR)}),
    "Rsqrt": OperationRow("rsqrt", {"result": _exact("output", SCALE)}),
    "Reciprocal": OperationRow("reciprocal", {"result": _exact("output", SCALE)}),
    "Std": OperationRow("std", {"self": Operand("input", is_centered=True), "result": _exact("output", SCALE)}),
    "LinalgVectorNorm": OperationRow(
        "norm",
        {
            "self": replace(_compared("input"), use=Use.VALUE, exact_if=lambda n: n._saved_ord != 2),
            "result": _exact("output", SCALE),
        },
    ),
    **{
        name: OperationRow(name.lower(), {"self": _compared("input"), "other": _compared("other"), "result": _compared("output")})
        for name in _words("Threshold Clamp ClampMin ClampMax Maximum Minimum Max Min Amax Amin Median Abs")
    },
    **{
        name: OperationRow(op, {"self": _compared("input"), "result": _compared("output")})
        for name, op in (
            *(("PreluKernel", "prelu"), ("RreluWithNoise", "rrelu")),
            *((name, name.lower()) for name in _words("Hardsigmoid Hardshrink Softshrink")),
        )
    },
}


@cache
def row_of(node_name: str) -> OperationRow:
    """Return the row in the table of operations for autograd nodes of this name; an empty row if there is none."""
    base_name = node_name.removesuffix("0").removesuffix("1").removesuffix("2").removesuffix("Backward")
    return ROWS.get(base_name) or OperationRow(base_name)


def unknown_operand(attribute: str, *, is_float: bool, is_bool: bool, is_custom: bool) -> Operand:
    """Return what backward is assumed to need of a saved tensor whose operation is not in the table of operations.

    `attribute`: autograd's name of the tensor. `is_float`, `is_bool`: its dtype. `is_custom`: whether a custom autograd function saved it.
    """
    if is_float:
        return Operand(attribute, pin=UNKNOWN) if is_custom else _exact(attribute, UNKNOWN.reason)
    return Operand(attribute, Use.MASK if is_bool else Use.INDEX)


# --- layers under activation checkpointing -----------------------------------------------------------------------------------------

CHECKPOINT = "checkpoint"  # the operation in names of slots
RECOMPUTES = Pin(7, "a checkpointed layer runs again from it in backward; a rule that names the slot may use fewer bits")
COMPARES = "the checkpointed layer applies {}: from a rounded input, comparisons would have other results when it runs again"
ROUTES = "the checkpointed layer routes by values ({}): from a rounded input it could choose otherwise when it runs again"


COMPARING = _words(
    "relu leaky_relu rrelu_with_noise _prelu_kernel prelu_kernel threshold hardtanh hardsigmoid hardswish hardshrink softshrink clamp "
    "clamp_min clamp_max max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "fractional_max_pool3d mkldnn_max_pool2d max min amax amin maximum minimum median nanmedian abs sgn"
)
ROUTING = _words("topk sort kthvalue mode masked_select")
SELECTING = "index"  # x[mask] and x[rows]: routing, unless x is a parameter


def is_checkpoint_input(name: str) -> bool:
    """Return whether a slot name belongs to an input of a checkpointed layer.

    >>> is_checkpoint_input("layers.3:checkpoint.input"), is_checkpoint_input("layers.3.fc:input")
    (True, False)
    """
    return name.partition(":")[2].startswith((f"{CHECKPOINT}.", f"{CHECKPOINT}#"))


def input_operand(number: int) -> str:
    """Return the name of a checkpoint's input in slot names, given its `number` from 0: "input", "input2" and so on."""
    return "input" if number == 0 else f"input{number + 1}"


def reason_of_ops(ops: Iterable[str]) -> str:
    """Return why inputs of a checkpointed layer with these operations must be kept exactly; "" if they need not.

    >>> reason_of_ops(["addmm", "relu"])
    'the checkpointed layer applies relu: from a rounded input, comparisons would have other results when it runs again'
    """
    names = set(ops)
    routing, comparing = sorted(names & {*ROUTING, SELECTING}), sorted(names.intersection(COMPARING))
    return ROUTES.format(routing[0]) if routing else COMPARES.format(comparing[0]) if comparing else ""


# --- what the second forward pass of a checkpointed layer saves ---------------------------------------------------------------------

# Smaller tensors of a second forward pass stay unmodified: they exist for the time of one layer's backward, and packing takes host time. Of
# an 8B Llama at 4096 tokens the results of the MLP (112 MiB) and the float32 inputs of norms (64 MiB) are larger, hidden states are not.
MIN_SECOND_PASS_BYTES = 48 << 20
# uses whose stored form depends on the tensor alone; what its values or its node decide stays unmodified
SECOND_PASS_USES = (Use.VALUE, Use.SIGN, Use.MASK, Use.SHAPE)


def is_stored_in_second_pass(op: str, needs: Needs) -> bool:
    """Return whether a tensor that operation `op` saves may be packed when backward runs a checkpointed layer again."""
    return needs.use in SECOND_PASS_USES and needs.pin not in ATTENTION_PINS and op not in PERIODIC and not needs.is_centered


def is_large_in_second_pass(nbytes: int) -> bool:
    """Return whether a storage of `nbytes` is large enough to be packed when backward runs a layer again."""
    return nbytes >= MIN_SECOND_PASS_BYTES


def max_left_bytes(sizes: Collection[int]) -> int:
    """Return the size in bytes up to which the smallest saved tensors stay unmodified on a GPU.

    `sizes`: the bytes of all tensors that could be packed.

    >>> max_left_bytes([1, 1, 1, 2, 3000]), max_left_bytes([5, 5, 3000]), max_left_bytes([100] * 9)
    (2, 0, 0)
    """
    allowed, counts, largest = SMALL_SHARE * sum(sizes), Counter(sizes), 0
    for size in sorted(counts):
        allowed -= size * counts[size]
        if allowed < 0:
            break
        largest = size
    return largest
