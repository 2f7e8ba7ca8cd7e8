"""Why a tensor exists."""

from enum import Enum


class Role(str, Enum):
    """What a tensor is for in a training step; its text is the word that plans, traces and reports use."""

    WEIGHT = "weight"
    GRADIENT = "gradient"  # the accumulator of a parameter's gradient
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    MASTER = "master"  # a wider copy of a weight
    RESIDUE = "residue"  # what rounding left over
    ACTIVATION = "activation"  # saved for backward
    ERROR = "error"  # the gradient of an activation
    BUFFER = "buffer"
    INPUT = "input"  # what the caller brings and keeps
    TEMPORARY = "temporary"


FORMATTED = tuple(
    role for role in Role if role not in (Role.BUFFER, Role.INPUT, Role.TEMPORARY)
)  # those that a plan may give a format
ACCUMULATED = (Role.WEIGHT, Role.GRADIENT, Role.MOMENT2)  # sums of many small changes, which rounding to nearest would lose
