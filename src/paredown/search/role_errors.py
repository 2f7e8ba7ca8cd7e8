"""What rounding a slot does to gradients, before anything was measured: the role table.

A squared error, relative for each parameter, as `Sensitivities` have it: the row of the operation times 4^-bits, bits being the significant
ones of the format's element, and more where it is rounded stochastically. It does not grow with the size of the tensor: the input of a
linear layer enters the gradient of that layer's weight alone, however long it is, so that at equal error the larger tensor is the
better one to lower.

The rows of activations are medians over six networks of `paredown.models` after 60 steps, one slot in int8 at a time
(docs/decisions/013). They lie close together: what sets slots apart is what was pinned before, the size, and `probe`.

>>> slot_error([Saver("fc:input", "linear", "input", Use.VALUE)], Format.parse("int8/64@bf16")) == 0.55 * 4.0**-7
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, default_rounding
from paredown.plan.given import significant_bits
from paredown.plan.ops import Use
from paredown.plan.slots import Saver
from paredown.roles import Role

STOCHASTIC = 2.5  # times the error of rounding to nearest
OTHER = 1.0  # an operation without a row
OF_OPS: Mapping[str, float] = MappingProxyType(
    {
        "conv": 0.6,
        "linear": 0.55,
        "matmul": 0.6,
        "mul": 0.65,
        "batch_norm": 1.1,
        "layer_norm": 0.5,
        "group_norm": 0.5,
        "rms_norm": 0.5,
        "gelu": 0.55,
        "silu": 0.55,
        "scaled_dot_product_attention": 0.15,  # of each operand; its errors grow with the logits, for which it is pinned
    }
)
# Backward subtracts a sum over the output from the gradient of every logit, and after some training little is left (1 to 8 in 2 bits).
OF_OPERANDS: Mapping[tuple[str, str], float] = MappingProxyType({("scaled_dot_product_attention", "output"): 3.0})
# Of parameters, and not measured: a weight's rounding enters every forward pass from then on, a moment's the next updates.
OF_ROLES: Mapping[Role, float] = MappingProxyType({Role.WEIGHT: 16.0, Role.MOMENT1: 4.0, Role.MOMENT2: 4.0, Role.GRADIENT: 1.0})
RESIDUE_BITS = 8  # that a residue adds to its weight


def slot_error(savers: Iterable[Saver], format: Format) -> float:
    """The predicted error of an activation in `format`: those of the operations that need its values, added."""
    rows = [OF_OPERANDS.get((saver.op, saver.operand)) or OF_OPS.get(saver.op, OTHER) for saver in savers if saver.use is Use.VALUE]
    is_stochastic = default_rounding(format.element.width, is_sum=False) is Rounding.STOCHASTIC
    return sum(rows) * 4.0 ** -significant_bits(format) * (STOCHASTIC if is_stochastic else 1.0)


def parameter_error(formats: Mapping[Role, Format]) -> float:
    """The predicted error of a parameter with its gradient and moments in these formats."""
    residue = RESIDUE_BITS * (Role.RESIDUE in formats)
    bits = {role: significant_bits(format) + residue * (role is Role.WEIGHT) for role, format in formats.items()}
    return sum(OF_ROLES.get(role, 0.0) * 4.0**-count for role, count in bits.items())
