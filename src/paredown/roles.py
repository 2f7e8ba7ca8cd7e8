"""`Role`: the purpose of a tensor in a training step, such as weight, gradient or activation."""

from enum import Enum


class Role(str, Enum):
    """Names the purpose of a tensor in a training step, by the word that plans, traces, JSON and reports use."""

    WEIGHT = "weight"
    FROZEN = "frozen"  # a weight that requires no gradient; only plans use this role, in traces such a weight has the role WEIGHT
    GRADIENT = "gradient"  # the accumulator of a parameter's gradient
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    MASTER = "master"  # a copy of a weight in higher precision
    RESIDUE = "residue"  # the rounding error of a weight, which restores its higher precision
    ACTIVATION = "activation"  # saved by autograd for backward
    ERROR = "error"  # the gradient of an activation
    BUFFER = "buffer"
    INPUT = "input"  # the batch, which the caller holds
    TEMPORARY = "temporary"


FORMATTED = tuple(
    role for role in Role if role not in (Role.BUFFER, Role.INPUT, Role.TEMPORARY)
)  # roles that a plan can assign a format to
ACCUMULATED = (Role.WEIGHT, Role.GRADIENT, Role.MOMENT2)  # sums of many small updates, which rounding to nearest would lose
# roles of the tensors of a parameter that can have a format
OF_PARAMETER: tuple[Role, ...] = (Role.WEIGHT, Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
SECOND_MOMENT_WORDS = ("sq", "square", "sum", "second", "v")  # in the names of state tensors


def weight_role(*, is_frozen: bool) -> Role:
    """Return the role by which a plan's rules match a parameter: FROZEN if it is not trained, else WEIGHT.

    Rules for WEIGHT match frozen parameters too, but rules for FROZEN take precedence.
    """
    return Role.FROZEN if is_frozen else Role.WEIGHT


def role_of_state(name: str) -> Role:
    """Return the role of a tensor of optimizer state: MOMENT2 if its name in the state says so (`exp_avg_sq`), else MOMENT1.

    >>> role_of_state("momentum_buffer").value, role_of_state("exp_avg_sq").value
    ('moment1', 'moment2')
    """
    return Role.MOMENT2 if any(word in name.lower().split("_") for word in SECOND_MOMENT_WORDS) else Role.MOMENT1
