"""What a session asks for a model's parameters, and which optimizer has them: the two find each other here, and know nothing else.

All of it is weak: neither a parameter nor an optimizer lives longer because of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.roles import Role

Choice = tuple[Format | None, Rounding]


@dataclass(frozen=True)
class Asked:
    """The name of a parameter in its model, and what the plan gives to its slots."""

    name: str
    choices: Mapping[Role, Choice]


_ASKED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> Asked
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to the optimizer that has it


def ask(parameter: Tensor, asked: Asked | None) -> None:
    """Say what a parameter's slots are to get; None takes it back."""
    if asked is None:
        _ASKED.pop(parameter, None)
    else:
        _ASKED[parameter] = asked


def asked_of(parameter: Tensor) -> Asked | None:
    """What a session asks for this parameter, if one does."""
    return _ASKED.get(parameter)


def own(parameter: Tensor, owner: Any) -> None:
    """`owner` takes the parameter over; the one before, if another, lets it go (`let_go`)."""
    before = owner_of(parameter)
    if before is not None and before is not owner:
        before.let_go(parameter)
    _OWNERS[parameter] = weakref.ref(owner)


def disown(parameter: Tensor, owner: Any) -> None:
    """`owner` gives the parameter up, if it has it."""
    if owner_of(parameter) is owner:
        _OWNERS.pop(parameter, None)


def owner_of(parameter: Tensor) -> Any:
    """The optimizer of paredown that has this parameter, or None."""
    ref = _OWNERS.get(parameter)
    return ref() if ref is not None else None
