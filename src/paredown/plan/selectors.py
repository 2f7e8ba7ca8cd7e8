"""A `Selector` says which slots (tensors of a step) a rule of a plan matches; it is parsed from the rule's key.

    activation                        every slot of a role
    layer3.*:input                    a pattern: * is any text (dots and colons too), ? one character, [ab] one of these
    weight=layer3.*                   a pattern, restricted to one role
    frozen                            the weights that require no gradient, which the role weight matches too; frozen beats weight
    layer3.0.conv1:input              a slot by its name
    gradient=layer3.0.conv1.weight    a slot by its role and name

A gradient, a moment, a master weight and a residue have the name of their weight, an error the name of its activation. So a name without
a role matches the weight or the activation only, and a pattern without a role matches all of them. Where several rules match a slot, a
name beats a pattern, a pattern beats a role, and among equals the last one wins.

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

NamesAndRole = tuple[tuple[str, ...], Role]  # the names that operations gave to a saved tensor (slot), and its role
WILDCARDS = "*?["
ROLE_NAMES = ", ".join(role.value for role in FORMATTED)
MATCHED_BY_NAME = (Role.WEIGHT, Role.FROZEN, Role.ACTIVATION)  # roles that a name without a role matches
KEY_FORMS = (
    "a role (activation), a slot (layer3.0.conv1:input), a pattern (layer3.*:input), or a role before either (weight=layer3.*)"
)


class SelectorRank(IntEnum):
    """How specifically the key of a plan's rule matches a tensor; of all rules that match, the highest rank decides."""

    NONE = 0
    ROLE = 1
    PATTERN = 2
    NAME = 3


@dataclass(frozen=True)
class Selector:
    """The condition of a plan's rule: it matches all tensors of a role, of a name pattern, or one tensor by name."""

    role: Role | None
    name: str | None  # None: the role as a whole

    @staticmethod
    def parse(text: str) -> Selector:
        """Return the selector for a rule's key such as "weight=layer3.*"; raise PlanError for an invalid key."""
        if not isinstance(text, str) or not text or text != text.strip():
            raise PlanError(f"key {brief(text)} is not valid: a key is {KEY_FORMS}, without spaces around it.")
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
        """Return whether the selector's name has wildcards."""
        return self.name is not None and any(letter in WILDCARDS for letter in self.name)

    @property
    def place(self) -> tuple[int, int]:
        """Return the sort key of the rule in printed plans: rules for roles first, then patterns, then names."""
        if self.role is not None and self.name is None:
            return SelectorRank.ROLE, FORMATTED.index(self.role)
        return (SelectorRank.PATTERN if self.is_pattern else SelectorRank.NAME), 0

    def rank(self, names: Sequence[str], role: Role) -> SelectorRank:
        """Return how specifically this selector matches a tensor with these names and role; NONE if it does not."""
        if self.role not in (None, role) and (self.role, role) != (Role.WEIGHT, Role.FROZEN):
            return SelectorRank.NONE
        if self.name is None:
            return SelectorRank.ROLE
        if self.name in names and (self.role is not None or role in MATCHED_BY_NAME):  # before patterns: a name may contain a [
            return SelectorRank.NAME
        if self.is_pattern and any(fnmatchcase(name, self.name) for name in names):
            return SelectorRank.PATTERN
        return SelectorRank.NONE

    def say(self) -> str:
        """Return the selector in words for messages, such as "weight slots like 'layer3.*'"."""
        if self.name is None:
            return str(self)
        role = f"{self.role.value} " if self.role else ""
        return f"{role}slots like {self.name!r}" if self.is_pattern else f"{role}slot {self.name!r}"


class SelectorIndex:
    """Finds quickly which of a plan's rules decides for a tensor; `keys` are the selectors of the rules."""

    def __init__(self, keys: Iterable[Selector]) -> None:
        self.keys = tuple(keys)
        self._unnamed = [place for place, key in enumerate(self.keys) if key.name is None or key.is_pattern]
        self._named: dict[str | None, list[int]] = {}
        for place, key in enumerate(self.keys):
            self._named.setdefault(key.name, []).append(place)
        self._best_places: dict[tuple[tuple[str, ...], Role], int | None] = {}

    def best(self, names: tuple[str, ...], role: Role) -> int | None:
        """Return the index in `keys` of the rule that decides for a tensor; None if no rule matches it."""
        if (names, role) not in self._best_places:
            self._best_places[names, role] = self._best(names, role)
        return self._best_places[names, role]

    def _best(self, names: tuple[str, ...], role: Role) -> int | None:
        places = {*self._unnamed, *(place for name in names for place in self._named.get(name, ()))}
        ranks = [(self.keys[place].rank(names, role), place) for place in places]
        rank, place = max(ranks, default=(SelectorRank.NONE, 0))
        return place if rank else None

    def __reduce__(self) -> tuple[Any, ...]:
        return index_of, (self.keys,)  # without its cache

    def unmatched(self, slots: Sequence[NamesAndRole]) -> list[Selector]:
        """Return the selectors with a name or pattern that match none of the tensors `slots`: (names, role)."""
        by_name: dict[str, list[NamesAndRole]] = {}
        for slot in slots:
            for name in slot[0]:
                by_name.setdefault(name, []).append(slot)
        named = [key for key in self.keys if key.name is not None]
        candidates = [slots if key.is_pattern else by_name.get(key.name or "", ()) for key in named]
        return [key for key, near in zip(named, candidates, strict=True) if not any(key.rank(*slot) for slot in near)]


@lru_cache(maxsize=64)
def index_of(keys: tuple[Selector, ...]) -> SelectorIndex:
    """Return the `SelectorIndex` of `keys`; it is cached, since many plans have the same selectors."""
    return SelectorIndex(keys)


def slot_key(name: str, role: Role) -> str:
    """Return the key of a rule that matches only the tensor with this name and role, whatever characters the name has.

    >>> slot_key("fc:input", Role.ACTIVATION), slot_key("fc.weight", Role.MOMENT1), slot_key("weight", Role.WEIGHT)
    ('fc:input', 'moment1=fc.weight', 'weight=weight')
    """
    if role in MATCHED_BY_NAME and role is not Role.FROZEN and "=" not in name and any(letter in ".:" for letter in name):
        return name
    return f"{role.value}={name}"


def first_match(texts: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first of `texts` (names or patterns) that matches one of `names`; None if none does.

    >>> first_match(("head:input", "layers.*"), ("layers.0.mlp:input",))
    'layers.*'
    """
    return next((text for text in texts for name in names if name == text or fnmatchcase(name, text)), None)


def bare_names(names: Iterable[str], role: Role) -> tuple[str, ...]:
    """Return names of tensors without a role's prefix: gradient=fc.weight becomes fc.weight for the role gradient."""
    return tuple(name.removeprefix(f"{role.value}=") for name in names)


def closest_role(text: str) -> str | None:
    """Return the name of the role that is similar to a misspelled `text`; None if no role is similar."""
    return next(iter(get_close_matches(text.lower(), [role.value for role in FORMATTED], 1, 0.75)), None)


def closest(text: str, names: Iterable[str]) -> str:
    """Return the three names that are most similar to `text`, quoted, for an error message."""
    return ", ".join(repr(name) for name in get_close_matches(text, list(names), 3, 0.0))


def say_closest(key: Selector, slots: Iterable[NamesAndRole]) -> str:
    """Return a sentence for an error message with the tensor names that are most similar to a rule's key."""
    names = {name: None for names, role in slots if key.role in (None, role) for name in names}  # in order, each once
    role_word = f"{key.role.value} " if key.role else ""
    if not names:
        return f"The model has no {role_word}slots."
    return f"Closest of {len(names)} {role_word}slot name{'s' * (len(names) > 1)}: {closest(key.name or '', names)}."


def _role(text: str, part: str) -> Role:
    if part in FORMATTED:
        return Role(part)
    if part in tuple(Role):
        raise PlanError(
            f"key {text!r}: buffers, inputs and temporaries are counted but have no format. Roles with a format: {ROLE_NAMES}."
        )
    likely = closest_role(part)
    hint = f" Did you mean {likely!r}?" if likely else ""
    raise PlanError(
        f"key {text!r}: {part!r} is no role.{hint} Allowed before '=': {ROLE_NAMES}. "
        f"A slot whose name contains an '=' is written with its role: 'activation={text}'."
    )


def _name(text: str, part: str) -> str:
    if not part:
        raise PlanError(f"key {text!r} has no name after '='. Write {text + '*'!r} or {text[:-1]!r} for all slots of the role.")
    return part


# --- modules -----------------------------------------------------------------------------------------------------------------------


MODULES = "recompute is a list of modules by path or pattern, such as ['layers.0', 'layers.1']"
OFFLOADED_SLOTS = "offload is a list of slots by name or pattern, such as ['layers.0.*'], or true: inputs of checkpointed layers"


def checked_names(names: Any, what: str) -> tuple[str, ...]:
    """Return `names` (of tensors or modules, or patterns) as a tuple; raise PlanError for other types."""
    texts: tuple[Any, ...] = tuple(names) if isinstance(names, tuple | list) else (names,)
    if isinstance(names, str) or not all(isinstance(text, str) and text for text in texts):
        raise PlanError(f"{what}, not {brief(names)}.")
    return texts


def checked_tiles(rules: Any) -> tuple[tuple[str, int], ...]:
    """Return rules (path or pattern of modules, tokens of a piece) as tuples; raise PlanError for other values."""
    given: list[Any] = list(rules) if isinstance(rules, list | tuple) else [rules]
    for rule in given:
        is_pair = isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str) and rule[0] and ":" not in rule[0]
        if not (is_pair and type(rule[1]) is int and rule[1] > 0):
            raise PlanError(
                "a rule for tiles is a module by path or pattern and a number of tokens above 0, such as ('model.layers.*', 2048), "
                f"not {brief(rule)}."
            )
    pairs: list[tuple[str, int]] = [(rule[0], rule[1]) for rule in given]
    if len({text for text, _ in pairs}) < len(pairs):
        raise PlanError(f"tiles: {brief([text for text, _ in pairs])} names a module twice; each has one number of tokens.")
    return tuple(pairs)
