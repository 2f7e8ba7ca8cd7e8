"""Whom a rule of a plan speaks of: the text in front of a rule is a `Selector`.

    activation                        every slot of a role
    layer3.*:input                    a pattern: * is any text (dots and colons too), ? one character, [ab] one of these
    weight=layer3.*                   a pattern, of one role alone
    layer3.0.conv1:input              a slot by its name
    gradient=layer3.0.conv1.weight    a slot by its role and name

A gradient, a moment, a master copy and a residue bear the name of their weight, an error that of its activation. So a name
without a role is that of the weight or the activation, and a pattern without a role speaks of them all. Where several rules speak
of a slot, a name beats a pattern, a pattern beats a role, and among equals the one written last wins.

>>> Selector.parse("weight=layer3.*").rank(("layer3.0.conv1.weight",), Role.WEIGHT).name
'PATTERN'
>>> Selector.parse("activations")
Traceback (most recent call last):
    ...
paredown.errors.PlanError: key 'activations' is no role: did you mean 'activation'? A parameter of that name is 'weight=activations'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from paredown.errors import PlanError
from paredown.roles import FORMATTED, Role
from paredown.serial import brief

NamesAndRole = tuple[tuple[str, ...], Role]  # the names of all its savers, and its role
WILDCARDS = "*?["
ROLE_NAMES = ", ".join(role.value for role in FORMATTED)
NAMED_ALONE = (Role.WEIGHT, Role.ACTIVATION)  # whose slots a name without a role means
SHAPES = "a role (activation), a slot (layer3.0.conv1:input), a pattern (layer3.*:input), or a role before either (weight=layer3.*)"


class SelectorRank(IntEnum):
    """How closely a key speaks of a slot; the highest rank decides."""

    NONE = 0
    ROLE = 1
    PATTERN = 2
    NAME = 3


@dataclass(frozen=True)
class Selector:
    """A role, a pattern or the name of a slot; `str(key)` gives its text back."""

    role: Role | None
    name: str | None  # None: the role as a whole

    @staticmethod
    def parse(text: str) -> Selector:
        """The key that `text` spells; PlanError says what is wrong with it."""
        if not isinstance(text, str) or not text or text != text.strip():
            raise PlanError(f"key {brief(text)} is none: a key is {SHAPES}, without spaces around it.")
        text = text.value if isinstance(text, Role) else text
        head, equals, name = text.partition("=")
        if equals:
            return Selector(_role(text, head), _name(text, name))
        if text in tuple(Role):
            return Selector(_role(text, text), None)
        likely = closest_role(text) if not any(letter in ".:" + WILDCARDS for letter in text) else None
        if likely:
            raise PlanError(f"key {text!r} is no role: did you mean {likely!r}? A parameter of that name is 'weight={text}'.")
        return Selector(None, text)

    def __str__(self) -> str:
        return "=".join(part for part in (self.role and self.role.value, self.name) if part)

    @property
    def is_pattern(self) -> bool:
        """Whether it may speak of several slots by name."""
        return self.name is not None and any(letter in WILDCARDS for letter in self.name)

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands among the rules of a plan: roles in their order, then patterns, then names."""
        if self.role is not None and self.name is None:
            return SelectorRank.ROLE, FORMATTED.index(self.role)
        return (SelectorRank.PATTERN if self.is_pattern else SelectorRank.NAME), 0

    def rank(self, names: Sequence[str], role: Role) -> SelectorRank:
        """How closely it speaks of the slot of this role whose savers have these names."""
        if self.role is not None and self.role is not role:
            return SelectorRank.NONE
        if self.name is None:
            return SelectorRank.ROLE
        if self.name in names and (self.role is not None or role in NAMED_ALONE):  # a name may hold a [, so names come first
            return SelectorRank.NAME
        if self.is_pattern and any(fnmatchcase(name, self.name) for name in names):
            return SelectorRank.PATTERN
        return SelectorRank.NONE

    def say(self) -> str:
        """In words: "weight slots like 'layer3.*'"."""
        if self.name is None:
            return str(self)
        role = f"{self.role.value} " if self.role else ""
        return f"{role}slots like {self.name!r}" if self.is_pattern else f"{role}slot {self.name!r}"


class SelectorIndex:
    """The keys of a plan, the one written last at the end, ready to be asked: plans may name a thousand slots one by one."""

    def __init__(self, keys: Iterable[Selector]) -> None:
        self.keys = tuple(keys)
        self._loose = [place for place, key in enumerate(self.keys) if key.name is None or key.is_pattern]
        self._named: dict[str | None, list[int]] = {}
        for place, key in enumerate(self.keys):
            self._named.setdefault(key.name, []).append(place)
        self._found: dict[tuple[tuple[str, ...], Role], int | None] = {}

    def best(self, names: tuple[str, ...], role: Role) -> int | None:
        """The place of the key that decides for a slot, None where none speaks of it; the second time from a dict."""
        if (names, role) not in self._found:
            self._found[names, role] = self._best(names, role)
        return self._found[names, role]

    def _best(self, names: tuple[str, ...], role: Role) -> int | None:
        places = {*self._loose, *(place for name in names for place in self._named.get(name, ()))}
        ranks = [(self.keys[place].rank(names, role), place) for place in places]
        rank, place = max(ranks, default=(SelectorRank.NONE, 0))
        return place if rank else None

    def __reduce__(self) -> tuple[Any, ...]:
        return index_of, (self.keys,)  # without what it remembers

    def unanswered(self, slots: Sequence[NamesAndRole]) -> list[Selector]:
        """The names and patterns that speak of none of the slots."""
        by_name: dict[str, list[NamesAndRole]] = {}
        for slot in slots:
            for name in slot[0]:
                by_name.setdefault(name, []).append(slot)
        named = [key for key in self.keys if key.name is not None]
        candidates = [slots if key.is_pattern else by_name.get(key.name or "", ()) for key in named]
        return [key for key, few in zip(named, candidates, strict=True) if not any(key.rank(*slot) for slot in few)]


@lru_cache(maxsize=64)
def index_of(keys: tuple[Selector, ...]) -> SelectorIndex:
    """One for all plans with the same keys: plans that are compared often differ in formats alone."""
    return SelectorIndex(keys)


def slot_key(name: str, role: Role) -> str:
    """The text of the key that speaks of one slot alone, whatever its name looks like.

    >>> slot_key("fc:input", Role.ACTIVATION), slot_key("fc.weight", Role.MOMENT1), slot_key("weight", Role.WEIGHT)
    ('fc:input', 'moment1=fc.weight', 'weight=weight')
    """
    if role in NAMED_ALONE and "=" not in name and any(letter in ".:" for letter in name):
        return name
    return f"{role.value}={name}"


def bare_names(names: Iterable[str], role: Role) -> tuple[str, ...]:
    """The names of a slot, also where they are written as keys: gradient=fc.weight is fc.weight."""
    return tuple(name.removeprefix(f"{role.value}=") for name in names)


def closest_role(text: str) -> str | None:
    """The role that `text` nearly spells."""
    return next(iter(get_close_matches(text.lower(), [role.value for role in FORMATTED], 1, 0.75)), None)


def closest(text: str, names: Iterable[str]) -> str:
    """The three of `names` that are most like `text`, quoted."""
    return ", ".join(repr(name) for name in get_close_matches(text, list(names), 3, 0.0))


def say_closest(key: Selector, slots: Iterable[NamesAndRole]) -> str:
    """A sentence that names the slots whose names are most like the key's."""
    names = {name: None for names, role in slots if key.role in (None, role) for name in names}  # in order, each once
    of_role = f"{key.role.value} " if key.role else ""
    if not names:
        return f"There is no {of_role}slot at all."
    return f"Closest of {len(names)} {of_role}slot name{'s' * (len(names) > 1)}: {closest(key.name or '', names)}."


def _role(text: str, part: str) -> Role:
    if part in FORMATTED:
        return Role(part)
    if part in tuple(Role):
        raise PlanError(
            f"key {text!r}: buffers, inputs and temporaries are counted and never given a format. Roles with one: {ROLE_NAMES}."
        )
    likely = closest_role(part)
    hint = f" Did you mean {likely!r}?" if likely else ""
    raise PlanError(
        f"key {text!r}: {part!r} is no role.{hint} Allowed before '=': {ROLE_NAMES}. "
        f"A slot whose own name has an '=' is written with its role: 'activation={text}'."
    )


def _name(text: str, part: str) -> str:
    if not part:
        raise PlanError(f"key {text!r} has no name after '='. Write {text + '*'!r} for all of the role by name, or {text[:-1]!r}.")
    return part
