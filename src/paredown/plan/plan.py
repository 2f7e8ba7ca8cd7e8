"""A `Plan` says in which format each tensor of a training step is stored, by rules; a rule is a key and an `Assignment`.

A key is a role, a pattern or the name of a slot (plan/selectors.py). A name beats a pattern, a pattern beats a role, among equals the
last one wins, and slots without a rule are stored unmodified. Rules are sorted in that order, weakest first, so that plans with the same
effect are equal. Plans are immutable: `set` and `without` return new ones.

>>> plan = Plan.uniform(activation="int4/64@bf16", weight="int8/64@e8m0").set("layer3.*:input", "e4m3fn/64@bf16")
>>> plan = plan.set("layer3.0.conv1:input", None)
>>> for name in ("layer1.0.conv1:input", "layer3.0.conv2:input", "layer3.0.conv1:input"):
...     print(name, "->", plan.find((name,), Role.ACTIVATION))
layer1.0.conv1:input -> int4/64@bf16
layer3.0.conv2:input -> e4m3fn/64@bf16
layer3.0.conv1:input -> unmodified
>>> print(plan.explain())
weight: int8/64@e8m0, 8.125 bits a value, stochastic rounding
activation: int4/64@bf16, 4.25 bits a value, rounding to nearest
slots like 'layer3.*:input': e4m3fn/64@bf16, 8.25 bits a value, rounding to nearest
slot 'layer3.0.conv1:input': unmodified
Everything else is unmodified.
>>> plan.check([(("layer1.0.conv1:input",), Role.ACTIVATION), (("layer2.0.conv1:input",), Role.ACTIVATION)])
Traceback (most recent call last):
    ...
paredown.errors.PlanError: pattern 'layer3.*:input' matches no slot. Closest of 2 slot names: 'layer2.0.conv1:input', \
'layer1.0.conv1:input'. Correct it, or leave it out with plan.without('layer3.*:input').
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple, Unpack, cast

from paredown.autograd.operations import CHECKPOINT, RECOMPUTES, Needs
from paredown.errors import PlanError
from paredown.formats.catalog import reason_not_to_store
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding
from paredown.plan.presets import PRESETS, ByRole
from paredown.plan.product_rules import PRODUCT, Products, checked_products, find_product, is_product_key, say_product
from paredown.plan.selectors import (
    MODULES,
    OFFLOADED_SLOTS,
    ROLE_NAMES,
    NamesAndRole,
    Selector,
    SelectorIndex,
    bare_names,
    checked_names,
    checked_tiles,
    closest,
    closest_role,
    first_match,
    index_of,
    say_closest,
)
from paredown.plan.storage import UNMODIFIED, Assignment, FormatLike
from paredown.roles import FORMATTED, Role
from paredown.serial import brief, json_values, load_json, object_parts, save_text
from paredown.tables import Table

# versions of the JSON: 2 added `recompute`, and 1 can be read too. Version 3 has `products`, version 4 `tiles`, version 5 `offload` of
# other slots than inputs of checkpointed layers; only plans that need a newer version than 2 are written with it
VERSION, WITH_PRODUCTS, WITH_TILES, WITH_OFFLOAD = 2, 3, 4, 5
FIELDS = ("version", "reason", "made_for", "recompute", "tiles", "offload", "products", "rules")
MADE_FOR = "made_for", "{'model': 'resnet50', 'batch': 256}"  # name and example
TILED = "in tiles of {} tokens"
CHECKPOINT_INPUTS = (f"*:{CHECKPOINT}*",)  # what `offloading()` moves, and what `true` in a plan's JSON means
OFFLOADED = "in host memory until backward needs it"
SHOWN = 20  # rules that repr prints


class Difference(NamedTuple):
    """A rule in which two plans differ: the assignment in each plan, or None if a plan has no rule with this key."""

    key: str
    mine: Assignment | str | None
    theirs: Assignment | str | None

    def __str__(self) -> str:
        if self.mine == self.theirs:
            return f"{self.key}: {self.mine}, in another order"
        mine, theirs = (side or "no rule" for side in (self.mine, self.theirs))
        return f"{self.key}: {mine} -> {theirs}"


class Differences(tuple[Difference, ...]):
    """The result of `Plan.diff`: the rules in which two plans differ, printed one to a line."""

    def __repr__(self) -> str:
        return "\n".join(str(row) for row in self) or "no difference"


@dataclass(frozen=True, repr=False)
class Plan:
    """Rules that assign format, rounding and overflow mode to the tensors of a training step, with the `reason`.

    `made_for` has the model, batch, device and so on that the plan was made for, as JSON values. `recompute` has paths or patterns of
    modules under activation checkpointing (torch.utils.checkpoint), and names or patterns of slots (saved tensors, "layers.*.mlp.1:input")
    that compiled sessions recompute; slots that cannot be recomputed follow the rules. `offload` has names or patterns of slots whose
    packed values are in host memory until backward needs them, on a GPU (True: inputs of checkpointed layers). `products` says which layers
    multiply 8-bit codes (plan/product_rules.py), which changes forward. `tiles` has pairs of a path or pattern of modules and a number of
    tokens: modules inside run over pieces of the sequence of so many tokens (session/tiles.py).
    """

    rules: tuple[tuple[str, Assignment], ...] = ()
    reason: str = field(default="", hash=False)
    made_for: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    products: Products = ()
    tiles: tuple[tuple[str, int], ...] = ()
    _index: SelectorIndex = field(default=SelectorIndex(()), init=False, compare=False)
    # results of `find`
    _assignments: dict[tuple[tuple[str, ...], Role], Assignment] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        pairs = [(Selector.parse(key), assignment) for key, assignment in _checked(self.rules)]
        pairs.sort(key=lambda pair: pair[0].place)  # stable: among equals the later rule stays later
        object.__setattr__(self, "rules", tuple((str(key), assignment) for key, assignment in pairs))
        object.__setattr__(self, "made_for", json_values(self.made_for, MADE_FOR, PlanError))
        object.__setattr__(self, "recompute", checked_names(self.recompute, MODULES))
        object.__setattr__(self, "products", checked_products(self.products))
        object.__setattr__(self, "tiles", checked_tiles(self.tiles))
        object.__setattr__(self, "_index", index_of(tuple(key for key, _ in pairs)))
        offload: Any = (CHECKPOINT_INPUTS if self.offload else ()) if isinstance(self.offload, bool) else self.offload
        object.__setattr__(self, "offload", checked_names(offload, OFFLOADED_SLOTS))
        if not isinstance(self.reason, str):
            raise PlanError(f"the reason of a plan is text, not {type(self.reason).__name__}.")
        for key, next_key in pairwise(sorted(key for key, _ in self.rules)):
            if key == next_key:
                raise PlanError(f"key {key!r} has two rules; a key has one. Leave one of them out.")

    @property
    def key(
        self,
    ) -> tuple[tuple[tuple[str, Assignment], ...], tuple[str, ...], tuple[str, ...], Products, tuple[tuple[str, int], ...]]:
        """Return everything in the plan that has an effect, as one value; plans with the same effect have equal keys.

        Reasons are left out. Sweeps, reports and other parts of paredown recognize a plan by it.
        """
        return self.rules, self.recompute, self.offload, self.products, self.tiles

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy starts with an empty cache
        return Plan, (self.rules, self.reason, dict(self.made_for), self.recompute, self.offload, self.products, self.tiles)

    @staticmethod
    def uniform(
        *, rounding: Rounding | str | None = None, overflow: Overflow | str | None = None, **formats: Unpack[ByRole]
    ) -> Plan:
        """Return a plan with the same format for all tensors of a role, given as `activation="int8/64@bf16"` and so on.

        `product` is the element of 8-bit products of linear layers. Without any format it is the baseline.
        """
        rules: list[tuple[str, Assignment]] = []
        product = formats.pop("product", None)
        for role, format in cast("dict[str, FormatLike]", formats).items():
            if role not in tuple(Role):
                hint = f" Did you mean {likely!r}?" if (likely := closest_role(role)) else ""
                raise PlanError(f"Plan.uniform: {role!r} is no role.{hint} Allowed: {ROLE_NAMES}, product, rounding, overflow.")
            Selector.parse(role)
            if format is not None:
                rules.append((role, _assignment(role, format, rounding, overflow)))
        return Plan(tuple(rules), products=((PRODUCT, product),) if product is not None else ())

    @staticmethod
    def preset(name: str) -> Plan:
        """Return the plan that has this name in the table PRESETS, such as "activations4"."""
        if not isinstance(name, str) or name not in PRESETS:
            rows = "; ".join(f"{row.name} ({row.note})" for row in PRESETS.values())
            raise PlanError(f"preset {name!r} is unknown. Allowed: {rows}. Plan.uniform(activation=...) takes any format.")
        row = PRESETS[name]
        return replace(Plan.uniform(**row.formats), reason=f"preset {name}: {row.note}")

    def set(
        self, key: str, format: FormatLike, *, rounding: Rounding | str | None = None, overflow: Overflow | str | None = None
    ) -> Plan:
        """Return this plan with a rule for `key` added or replaced; `format` None stores matching tensors unmodified.

        `key` is a role, a name or a pattern. With `product` it chooses layers that multiply 8-bit codes: set("product=layers.*", "e4m3fn").
        """
        if is_product_key(key):
            if rounding is not None or overflow is not None:
                raise PlanError(
                    f"rule {key!r}: products round to nearest and saturate; rounding and overflow are those of stored tensors."
                )
            given = format if format is None else str(format)
            return replace(self, products=(*(rule for rule in self.products if rule[0] != key), (key, given)))
        key = str(Selector.parse(key))
        kept = tuple(rule for rule in self.rules if rule[0] != key)
        return replace(self, rules=(*kept, (key, _assignment(key, format, rounding, overflow))))

    def without(self, key: str) -> Plan:
        """Return this plan without the rule that has this key."""
        key = key if is_product_key(key) else str(Selector.parse(key))
        keys = [rule[0] for rule in (*self.rules, *self.products)]
        if key not in keys:
            hint = f"Closest of {len(keys)}: {closest(key, keys)}." if keys else "The plan has none."
            raise PlanError(f"there is no rule {key!r} to leave out. {hint}")
        rules, products = ([rule for rule in part if rule[0] != key] for part in (self.rules, self.products))
        return replace(self, rules=tuple(rules), products=tuple(products))

    @property
    def changes_nothing(self) -> bool:
        """Return whether the plan is the baseline: it has no rules, 8-bit products, checkpointing or pieces (tiles)."""
        return not self.rules and not self.recompute and not self.products and not self.tiles

    @property
    def quantizes_nothing(self) -> bool:
        """Return whether the plan has no rules and so rounds nothing; it may still checkpoint layers."""
        return not self.rules and not self.products

    @property
    def multiplies(self) -> bool:
        """Return whether some layers may multiply 8-bit codes, which changes forward."""
        return any(element is not None for _, element in self.products)

    def product_of(self, path: str) -> tuple[str | None, bool]:
        """Return (element, is_named) for the 8-bit products of the layer at `path`.

        The element is None if the layer multiplies in its dtype; `is_named` says whether a rule names exactly this layer.

        >>> Plan.preset("fp8").set("product=head", None).product_of("head")
        (None, True)
        """
        return find_product(self.products, path)

    def recomputing(self, *modules: str) -> Plan:
        """Return this plan with activation checkpointing of further modules, given as paths or patterns.

        Names of slots (with a colon) stand for tensors that a compiled step recomputes one by one.

        >>> Plan().recomputing("layers.0", "layers.1")
        Plan(0 rules)
          activation checkpointing: layers.0, layers.1
        """
        return replace(self, recompute=tuple(dict.fromkeys((*self.recompute, *modules))))

    def offloading(self, *slots: str) -> Plan:
        """Return this plan with packed activations stored in host memory until backward needs them, on a GPU.

        `slots` are names or patterns of activations; without any, the inputs of checkpointed layers are stored there.

        >>> Plan.preset("activations8").offloading("layers.*")
        Plan(1 rule)
          activation  int8/64@bf16
          in host memory until backward needs it: layers.*
        >>> Plan.preset("activations8").recomputing("layers.*").offloading().offload
        ('*:checkpoint*',)
        """
        return replace(self, offload=tuple(dict.fromkeys((*self.offload, *(slots or CHECKPOINT_INPUTS)))))

    def tiling(self, *modules: str, length: int) -> Plan:
        """Return this plan with modules, by path or pattern, that run over pieces of `length` tokens of the sequence.

        In these modules, the outermost ones that act on tokens one by one, such as MLPs and norms, run in pieces, and run again so in
        backward.

        >>> Plan().recomputing("layers.*").tiling("layers.*", length=2048)
        Plan(0 rules)
          activation checkpointing: layers.*
          in tiles of 2048 tokens: layers.*
        """
        kept = [rule for rule in self.tiles if rule[0] not in modules]
        return replace(self, tiles=(*kept, *((text, length) for text in modules)))

    @cached_property
    def checkpointed(self) -> tuple[str, ...]:
        """Return the paths and patterns in `recompute` that name modules: those under activation checkpointing."""
        return tuple(text for text in self.recompute if ":" not in text)

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Return the names and patterns in `recompute` that name tensors; none if the plan packs no activations."""
        return tuple(text for text in self.recompute if ":" in text) if self.packs_activations else ()

    def recomputes(self, names: Iterable[str]) -> bool:
        """Return whether backward of a compiled step should recompute the tensor that was saved under `names`.

        >>> plan = Plan.uniform(activation="int8/64@bf16").recomputing("layers.*.mlp.1:input")
        >>> plan.recomputes(("layers.0.mlp.1:input",)), plan.recomputes(("layers.0.mlp.2:input",)), plan.checkpointed
        (True, False, ())
        """
        return first_match(self.recomputed, names) is not None

    def offloads(self, name: str) -> bool:
        """Return whether the plan asks to hold packed values of the activation `name` in host memory.

        >>> Plan().offloading("layers.0.*").offloads("layers.0.mlp.1:input")
        True
        """
        return first_match(self.offload, (name,)) is not None

    @cached_property
    def packs_activations(self) -> bool:
        """Return whether a rule can match activations, so that a session must hook saved tensors."""
        return any(key.role in (None, Role.ACTIVATION) for key in self._index.keys)

    @property
    def activation_formats(self) -> list[Format | None]:
        """Return the formats of all rules that can match activations; None stands for unmodified."""
        pairs = ((Selector.parse(key), assignment.format) for key, assignment in self.rules)
        return [format for key, format in pairs if key.role in (None, Role.ACTIVATION)]

    def find(self, names: Sequence[str], role: Role) -> Assignment:
        """Return the format, rounding and overflow mode that the plan requests for a tensor with these names."""
        key = (names if isinstance(names, tuple) else (names,) if isinstance(names, str) else tuple(names), role)
        assignment = self._assignments.get(key)
        if assignment is None:
            self._assignments[key] = assignment = self._search(*key)
        return assignment

    def needs_of(self, name: str, needs: Needs) -> Needs:
        """Return `needs`, what backward needs of the activation `name`, without bounds that this plan removes.

        A rule that names the input of a checkpointed layer removes the lower bound on its precision (`Needs.pin`).

        >>> from paredown.autograd.operations import RECOMPUTES
        >>> named = Plan((("*:checkpoint.input", Assignment.parse("int4/64@bf16")),))
        >>> named.needs_of("layers.3:checkpoint.input", Needs(pin=RECOMPUTES)).pin is None
        True
        """
        if needs.pin != RECOMPUTES:
            return needs
        best = self._index.best((name,), Role.ACTIVATION)
        text = self._index.keys[best].name if best is not None else None
        return replace(needs, pin=None) if text is not None and CHECKPOINT in text.rpartition(":")[2] else needs

    def _search(self, names: tuple[str, ...], role: Role) -> Assignment:
        role = Role(role)
        best = self._index.best(bare_names(names, role), role) if role in FORMATTED else None
        return UNMODIFIED if best is None else self.rules[best][1]

    def check(self, slots: Iterable[NamesAndRole]) -> list[str]:
        """Return the keys of rules that name tensors which the step does not have; raise PlanError for worse mistakes.

        These are a pattern that matches nothing, and a plan all of whose named tensors are missing. Each of `slots` is (names under which
        operations saved a tensor, its role). A rule for a role that no tensor has is no error.
        """
        known = [(bare_names(names, Role(role)), Role(role)) for names, role in slots if role in FORMATTED]
        missing = self._index.unmatched(known)
        for key in missing:
            if key.is_pattern:
                advice = f"Correct it, or leave it out with plan.without({str(key)!r})."
                raise PlanError(f"pattern {str(key)!r} matches no slot. {say_closest(key, known)} {advice}")
        if missing and len(missing) == sum(key.name is not None for key in self._index.keys):
            made_for = f" The plan was made for {json.dumps(self.made_for, sort_keys=True)}." if self.made_for else ""
            which = f"slot {str(missing[0])!r}" if len(missing) == 1 else f"{len(missing)} slots, {str(missing[0])!r} the first,"
            raise PlanError(
                f"the plan names {which} and the model has no such slot. {say_closest(missing[0], known)}{made_for} "
                "Correct the names, take a plan of this model, or leave those rules out with plan.without(key)."
            )
        return [str(key) for key in missing]

    def check_stored(self) -> None:
        """Raise PlanError for a rule whose format cannot store tensors, such as int8 without a scale.

        Call it in store mode only: simulate mode rounds values without storing them, and takes formats without a scale.

        >>> Plan.uniform(frozen="nf4/64@bf16").check_stored()
        >>> Plan.uniform(frozen="int8").check_stored()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        paredown.errors.PlanError: rule 'frozen': int8 has no scale: it can only store values from -127 to 127...
        """
        for selector, (key, assignment) in zip(self._index.keys, self.rules, strict=True):
            role = Role.WEIGHT if selector.role is None and ":" not in key else selector.role or Role.ACTIVATION
            if assignment.format is None or role is Role.ERROR:  # errors exist in simulate mode only
                continue
            reason = reason_not_to_store(assignment.format, role.value)
            if reason is not None:
                raise PlanError(
                    f"rule {key!r}: {reason}. Simulate mode takes any format, since it rounds values and stores nothing."
                )

    def unmatched(self, slots: Iterable[NamesAndRole]) -> list[str]:
        """Return the names and patterns in the plan's rules that match none of the tensors `slots`: (names, role)."""
        return [str(key) for key in self._index.unmatched([(bare_names(names, Role(role)), Role(role)) for names, role in slots])]

    def diff(self, other: Plan) -> Differences:
        """Return the rules in which this plan (first) and `other` (second) differ; none if both have the same effect.

        Reasons are not compared.
        """
        mine, theirs = dict(self.rules), dict(other.rules)
        shared = [key for key in mine if key in theirs]
        moved = {a for a, b in zip(shared, (key for key in theirs if key in mine), strict=True) if a != b}
        rows: list[Difference] = []
        for ours, others in zip(self._effects(), other._effects(), strict=True):
            keys = [key for key in {**ours, **others} if key in moved or ours.get(key) != others.get(key)]
            rows += [Difference(key, ours.get(key), others.get(key)) for key in keys]
        return Differences(rows)

    def _effects(self) -> list[dict[str, Assignment | str]]:
        """Return the plan's settings for `diff`: for each kind of rule, a dict from key to assignment or text."""
        words = {text: ("slot", "recomputed") if ":" in text else ("module", "checkpointed") for text in self.recompute}
        return [
            dict(self.rules),
            {f"{kind} {text}": word for text, (kind, word) in words.items()},
            {key: element or "unmodified" for key, element in self.products},
            {f"module {text}": TILED.format(length) for text, length in self.tiles},
            {f"slot {text}": OFFLOADED for text in self.offload},
        ]

    def explain(self) -> str:
        """Return the plan in words, one line for each rule; a later line takes precedence over an earlier one."""
        lines = [self.reason] if self.reason else []
        rules = zip(self._index.keys, self.rules, strict=True)
        lines += [f"{key.say()}: {assignment.say(key.role or Role.ACTIVATION)}" for key, (_, assignment) in rules]
        lines += [say_product(*rule) for rule in self.products]
        lines += self._recomputed_lines()
        return "\n".join([*lines, f"Everything{' else' * (not self.changes_nothing)} is unmodified."])

    def __repr__(self) -> str:
        if self.changes_nothing:
            return "Plan(): everything unmodified"
        products = [(key, element or "unmodified") for key, element in self.products]
        width = max((len(key) for key, _ in (*self.rules[:SHOWN], *products)), default=0)
        lines = [f"  {key:{width}}  {assignment}" for key, assignment in (*self.rules[:SHOWN], *products)]
        more = [f"  ... {len(self.rules) - SHOWN} more"] if len(self.rules) > SHOWN else []
        more += [f"  {line}" for line in self._recomputed_lines()]
        count = len(self.rules) + len(self.products)
        return "\n".join([f"Plan({count} rule{'s' * (count != 1)})", *lines, *more])

    def _repr_html_(self) -> str:
        rules = zip(self._index.keys, self.rules[:SHOWN], strict=False)
        rows = [(str(key), assignment.say(key.role or Role.ACTIVATION)) for key, (_, assignment) in rules]
        rows += [(f"{len(self.rules) - SHOWN} more", "")] if len(self.rules) > SHOWN else []
        rows += [(key, say_product(key, element).partition(": ")[2]) for key, element in self.products]
        rows += [(names, what) for what, _, names in (line.partition(": ") for line in self._recomputed_lines())]
        return Table(("slots", "format"), rows).to_html(self.reason)

    def _recomputed_lines(self) -> list[str]:
        slots = [text for text in self.recompute if ":" in text]
        parts = {"activation checkpointing": self.checkpointed, "recomputed in compiled sessions": slots}
        lengths = dict.fromkeys(length for _, length in self.tiles)
        parts |= {TILED.format(length): tuple(text for text, of in self.tiles if of == length) for length in lengths}
        parts[OFFLOADED] = self.offload
        return [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value; a rule is [key, {format, rounding, overflow}].

        A plan with newer settings (8-bit products, `tiles`, `offload`) has a newer version number, so that older programs refuse it.
        """
        rules = [[key, assignment.to_json()] for key, assignment in self.rules]
        is_old = self.offload in ((), CHECKPOINT_INPUTS)  # then older versions can read it
        version = WITH_OFFLOAD if not is_old else WITH_TILES if self.tiles else WITH_PRODUCTS if self.products else VERSION
        head = {"version": version, "reason": self.reason, "made_for": dict(self.made_for)}
        offload = {"offload": is_old or list(self.offload)} if self.offload else {}
        products = {"products": [list(rule) for rule in self.products]} if self.products else {}
        tiles = {"tiles": [list(rule) for rule in self.tiles]} if self.tiles else {}
        return {**head, "recompute": list(self.recompute), **tiles, **offload, **products, "rules": rules}

    @staticmethod
    def from_json(value: Any) -> Plan:
        """Return the plan that `to_json` wrote as `value`; raise PlanError for a value that it does not write."""
        parts = object_parts(value, "plan", FIELDS, ("version", "rules"), WITH_OFFLOAD, PlanError)
        rules = parts["rules"]
        if not isinstance(rules, list) or not all(isinstance(rule, list) and len(rule) == 2 for rule in rules):
            raise PlanError(f"the rules of a plan are a list of [key, {{format, rounding, overflow}}]; this is {brief(rules)}.")
        parsed = tuple((key, _from_json(key, assignment)) for key, assignment in rules)
        names = ("reason", "made_for", "recompute", "offload", "products", "tiles")
        return Plan(parsed, **{name: parts[name] for name in names if name in parts})

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file as JSON, one line for each rule; equal plans give equal files."""
        value = self.to_json()
        rules = ",\n".join(f"    {json.dumps(rule)}" for rule in value.pop("rules"))
        head = "".join(f"  {json.dumps(name)}: {json.dumps(part, sort_keys=True)},\n" for name, part in value.items())
        tail = f"[\n{rules}\n  ]" if rules else "[]"
        save_text(path, f'{{\n{head}  "rules": {tail}\n}}\n', PlanError)

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Return the plan that `save` wrote to this file."""
        return load_json(path, "plan", PlanError, Plan.from_json, hint="Plans are written by plan.save(path).")


def _checked(rules: Any) -> tuple[tuple[str, Assignment], ...]:
    """Return the rules as a tuple of (key, Assignment); raise PlanError if they are of other types."""
    pairs: tuple[Any, ...] = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Assignment)):
            raise PlanError(
                f"a rule is a pair (key, Assignment), not {brief(pair)}; Plan.uniform(...).set(key, format) takes text."
            )
    return pairs


def _assignment(key: str, *parts: Any) -> Assignment:
    """Return the assignment of format, rounding and overflow mode (`parts`); a PlanError names the rule's `key`."""
    try:
        return Assignment.parse(*parts)
    except PlanError as error:
        raise PlanError(f"rule {brief(key)}: {error}") from None


def _from_json(key: str, value: Any) -> Assignment:
    if not isinstance(value, dict) or "format" not in value or not value.keys() <= {"format", "rounding", "overflow"}:
        raise PlanError(f"rule {brief(key)}: expected format, and optionally rounding and overflow, not {brief(value)}.")
    return _assignment(key, value["format"], value.get("rounding"), value.get("overflow"))


def combine_presets(names: Iterable[str]) -> Plan:
    """Return one plan with the rules of several presets; raise PlanError if two presets have rules for the same role.

    >>> [key for key, _ in combine_presets(("half", "activations8")).rules]
    ['weight', 'gradient', 'moment1', 'moment2', 'activation']
    """
    plans = [Plan.preset(name) for name in names]
    rules, products = tuple(rule for plan in plans for rule in plan.rules), tuple(rule for plan in plans for rule in plan.products)
    return Plan(rules, "; ".join(plan.reason for plan in plans), products=products)
