"""Makes the tables that a session prints: changes, guard actions and the explanation of every tensor.

`Changes`: the slots that are not stored as the plan requests, with the requested format (asked), the one used (given) and the reason.

>>> Changes([Change("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot        asked         given         why
attn:query  int4/64@bf16  int8/64@bf16  pinned

`Actions`: what a guard did, in order; each row has the step, the slot, its format before and after, and the reason.

>>> Actions([Action(30, "attn:query", "int8/64@bf16", "unmodified", "its largest value rose from 3 to 61")])
step  slot        from          to          why
30    attn:query  int8/64@bf16  unmodified  its largest value rose from 3 to 61

`Explanation`: all slots, with the reason of each one's current format: the plan, a pin, a tensor that stays alive, a guard.

>>> quantized = SlotExplanation("fc:input", "int4/64@bf16", "int4/64@bf16", "quantized by the plan")
>>> Explanation([quantized, SlotExplanation("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot        asked         now           why
fc:input    int4/64@bf16  int4/64@bf16  quantized by the plan
attn:query  int4/64@bf16  int8/64@bf16  pinned

`Summary`: bytes by role against the baseline, and what is not stored as requested, in at most ten lines.

>>> pinned = Changes([Change("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
>>> Summary("Encoder", "8 forward passes", (StoredBytes("activations", 2**20, 2**22),), "not measured on a CPU", pinned)
Session of Encoder: 8 forward passes
  activations  1.00 MiB instead of 4.00 MiB, 25 %
  peak memory  not measured on a CPU
Not stored as requested: 1 row of session.changes
  attn:query -> int8/64@bf16: pinned
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from paredown.autograd.operations import CODES
from paredown.errors import ApplyError
from paredown.formats.catalog import MIN_DIMS, MIN_NUMEL, is_small
from paredown.formats.format import Format
from paredown.optim.packed_weight import Weight
from paredown.optim.parameter_state import Choice, RequestedFormats, owner_of, request_of
from paredown.optim.sharded.local_rows import local
from paredown.optim.sharded.packed_shards import sharded_of_whole
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.roles import FORMATTED, Role, weight_role
from paredown.session.eager.activations import Activations
from paredown.session.eager.slot_decisions import REASONS
from paredown.sizes import say_bytes
from paredown.tables import TableRows

UNMODIFIED = "unmodified"
COMPILED_CHECKPOINTS = "torch.compile runs the model, and chooses itself what backward recomputes"
EAGER_SLOTS = "only compiled sessions recompute single tensors: call session.compile()"
CHECKPOINTED = "checkpointed"
QUANTIZED = "quantized by the plan"
HELD = "the caller or the model holds it when the forward pass ends"
BESIDE_ORIGINAL = "beside the original"
HIDDEN = (
    "an in-place operation on a view: autograd hides what it saves, so that it is not packed. "
    "Use inplace=False, or clone() before the operation"
)
THE_STEP, THE_PROBE = "the step", "the probe"  # in the slot column of actions that concern no slot
ACTION_COLUMNS = ("step", "slot", "from", "to", "why")
EXPLANATION_COLUMNS = ("slot", "asked", "now", "why")
NO_ROWS = (
    "no activation and no weight is packed, or there was no forward pass yet; "
    "session.plan.explain() has the formats requested of optimizers"
)


ADDED = "it was added after the plan was applied"
STATE = (Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
NO_OPTIMIZER = "no optimizer of paredown.optim has these parameters yet: make one, such as paredown.optim.AdamW(model.parameters())"
NO_MOMENT = "{} has no such moment with these arguments"
KEYWORDS = "the optimizer was created with a tier or a format of its own for it, which the plan does not change"
SMALL = "their state is float32 and their gradients are not packed: both are small, and norms and biases are sensitive to rounding"
REPLICATED = (
    "it is not sharded: several processes average its gradient after backward, DistributedDataParallel in buckets, which are not packed; "
    "fully_shard over a mesh of shape (processes, 1) packs gradients"
)


@dataclass(frozen=True)
class Change:
    """Says that a slot (a tensor of the step) is stored in the format `given`, while the plan requests `asked`."""

    slot: str
    asked: str
    given: str
    reason: str


class Changes(TableRows[Change]):
    """Lists, as `session.changes`, a `Change` for each tensor that is not stored as requested; prints as a table."""

    __slots__ = ()
    columns = ("slot", "asked", "given", "why")
    if_empty = "everything is as requested"


def beside_original(format: str) -> str:
    """Return the text for a tensor that is packed in `format` although its original stays in memory too."""
    return f"{format} {BESIDE_ORIGINAL}"


def describe_state(state: Any) -> str:
    """Return a description of `state`, which is not the state_dict of a session, for an error message.

    >>> describe_state({"seed": 1}), describe_state(None)
    ("has ['seed']", 'is of type NoneType')
    """
    return f"has {sorted(map(str, state))}" if isinstance(state, Mapping) else f"is of type {type(state).__name__}"


@dataclass(frozen=True)
class Action:
    """Records what a guard did during training: from step `step` on, `slot` has the format `after`, not `before`."""

    step: int
    slot: str
    before: str
    after: str
    why: str

    def to_json(self) -> list[Any]:
        """Return the fields of this action as a JSON list, in their order."""
        return list(astuple(self))


class Actions(TableRows[Action]):
    """Lists, as `session.actions`, all changes of formats that a guard made; prints as a table."""

    __slots__ = ()
    columns = ACTION_COLUMNS
    if_empty = "nothing was done"


@dataclass(frozen=True)
class SlotExplanation:
    """States requested format, format in use and the reason for one tensor of the step (`session.explain()`)."""

    slot: str
    asked: str
    now: str
    why: str


class Explanation(TableRows[SlotExplanation]):
    """Lists a row for each tensor of the step; `session.explain()` returns it, and it prints as a table."""

    __slots__ = ()
    columns = EXPLANATION_COLUMNS
    if_empty = NO_ROWS

    def of(self, slot: str) -> SlotExplanation:
        """Return the row of the tensor with the slot name `slot`; raise KeyError if there is none."""
        row = next((row for row in self if row.slot == slot), None)
        if row is None:
            raise KeyError(f"{slot} is no slot of this session, which has {len(self)} slots; print the explanation for their names")
        return row


def activation_changes(
    plan: Plan, activations: Activations, is_checkpointed: Callable[[str], bool], in_place_on_views: Collection[str]
) -> list[Change]:
    """Return a `Change` for each activation that an eager session does not store as the plan requests.

    `is_checkpointed` returns whether the slot of a given name is inside a checkpointed module, which saves nothing. `in_place_on_views` has
    the paths of modules that work in place on a view, where no hook reaches the saved tensors.
    """
    rows, explained = list[Change](), activations.restored | activations.not_freed.keys()
    for name, decision in activations.decisions.items():
        if decision.format != decision.asked and name not in explained:
            rows.append(Change(name, str(decision.asked), str(decision.format or UNMODIFIED), decision.reason))
    others = {
        name: (UNMODIFIED, reason)
        for name, reason in activations.not_packed.items()
        if reason not in (REASONS["weight"], REASONS["buffer"], CODES) and not is_checkpointed(name)
    }
    others.update({name: (UNMODIFIED, HELD) for name in sorted(activations.restored)})
    for name, reason in sorted(activations.not_freed.items()):
        decision = activations.decisions.get(name)
        format = decision.format if decision is not None else None
        others[name] = beside_original(str(format or "packed")), reason
    others.update({f"{path}:in_place": (UNMODIFIED, HIDDEN) for path in sorted(in_place_on_views)})
    requested = {name: plan.find((name,), Role.ACTIVATION).format for name in others}
    return [
        *rows,
        *(Change(name, str(requested[name]), *given) for name, given in others.items() if requested[name] is not None),
    ]


def recompute_changes(plan: Plan, compiled_paths: Iterable[str], *, is_eager: bool) -> list[Change]:
    """Return a `Change` for each module or tensor that is saved although the plan recomputes it.

    These are the modules `compiled_paths`, which torch.compile runs, and in eager mode the single tensors that `plan.recompute` names.
    """
    rows = [Change(path, CHECKPOINTED, "saved", COMPILED_CHECKPOINTS) for path in compiled_paths]
    slots = [text for text in plan.recompute if ":" in text] if is_eager else []
    return [*rows, *(Change(text, "recomputed", "saved", EAGER_SLOTS) for text in slots)]


def requests_without_tensor(plan: Plan, slots: Collection[tuple[tuple[str, ...], Role]]) -> list[tuple[str, str]]:
    """Return (slot, format) pairs that the plan requests for tensors that a session never stores, such as master weights.

    A pair such as ("master", format) is a request for a whole role. One of the model's `slots` (names, role) gets a pair of its own if the
    plan requests another format for it than for its role.
    """
    rows: list[tuple[str, str]] = []
    for role in (role for role in FORMATTED if role in (Role.MASTER, Role.ERROR)):
        whole = plan.find(("",), role).format
        rows += [(role.value, str(whole))] if whole is not None else []
        for (name,) in [names for names, of in slots if of is role]:
            format = plan.find((name,), role).format
            rows += [(f"{role.value}={name}", str(format))] if format is not None and format != whole else []
    return rows


def explain_session(plan: Plan, activations: Activations, changes: Changes, actions: Actions, slots: Container[str]) -> Explanation:
    """Return the result of `session.explain()`: a row for each activation in `slots`, then one for each other change."""
    rows = [row for row in _activations(plan, activations, actions) if row.slot in slots]
    explained = {row.slot for row in rows}
    rows += [
        SlotExplanation(change.slot, change.asked, change.given, change.reason)
        for change in changes
        if change.slot not in explained
    ]
    return Explanation(rows)


def _activations(plan: Plan, activations: Activations, actions: Actions) -> Iterator[SlotExplanation]:
    by_slot: dict[str, list[Action]] = defaultdict(list)
    for action in actions:
        if action.slot not in (THE_STEP, THE_PROBE):
            by_slot[action.slot].append(action)
    for name, decision in activations.decisions.items():
        asked = plan.find((name,), Role.ACTIVATION).format
        current, why = str(decision.format or UNMODIFIED), decision.reason
        if name in activations.restored:
            current, why = UNMODIFIED, HELD
        if name in activations.not_freed:
            current, why = beside_original(current), activations.not_freed[name]
        if not why:
            why = "the plan requests no format" if asked is None else QUANTIZED
        later = [f"step {action.step}: {action.before} to {action.after}, {action.why}" for action in by_slot[name]]
        yield SlotExplanation(name, str(asked or UNMODIFIED), current, "; ".join([why, *later]))


# --- the summary -------------------------------------------------------------------------------------------------------------------

NUM_REASONS = 3  # in a summary; session.changes has all
REASON_LENGTH = 110  # letters


@dataclass(frozen=True)
class StoredBytes:
    """Counts the bytes of one kind of tensor, such as "activations", in the session and in the unmodified model.

    `stored` are on the model's device, `on_host` in host memory; the unmodified model stores `baseline`.
    """

    name: str
    stored: int
    baseline: int
    on_host: int = 0

    def __str__(self) -> str:
        share = f", {100 * self.stored / self.baseline:.0f} %" if self.baseline else ""
        on_host = f", and {say_bytes(self.on_host)} in host memory" if self.on_host else ""
        return f"{say_bytes(self.stored)} instead of {say_bytes(self.baseline)}{share}{on_host}"


@dataclass(frozen=True)
class Summary:
    """Holds the result of `session.summary()`: stored bytes against the baseline, and what is not stored as requested."""

    model: str
    state: str
    stored: tuple[StoredBytes, ...]
    peak: str
    changes: Changes
    packing_share: float | None = None  # the share of a step's time that packing took; None if it was not measured
    nothing: str = ""  # the first line of the summary if nothing is packed

    def lines(self) -> list[str]:
        """Return the lines of the printed summary."""
        cells = [*((row.name, str(row)) for row in self.stored), ("peak memory", self.peak)]
        width = max(len(name) for name, _ in cells)
        time = "" if self.packing_share is None else f", packing activations took {100 * self.packing_share:.0f} % of their time"
        lines = [self.nothing] if self.nothing else []
        lines += [f"Session of {self.model}: {self.state}{time}", *(f"  {name.ljust(width)}  {text}" for name, text in cells)]
        changes = [change for change in self.changes if change.asked != change.given]  # the others are products in 8 bits
        if not changes:
            return [*lines, "Everything is stored as requested"]
        rows = "1 row" if len(changes) == 1 else f"{len(changes)} rows"
        return [*lines, f"Not stored as requested: {rows} of session.changes", *self._reasons(changes)]

    def _reasons(self, changes: Iterable[Change]) -> Iterator[str]:
        """Yield a line for each of the most frequent reasons in `changes`, the most important first."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for change in changes:
            groups[change.given, change.reason].append(change.slot)
        ranked = sorted(groups.items(), key=lambda item: (_rank(*item[0], item[1][0]), -len(item[1])))
        shown = ranked if len(groups) <= NUM_REASONS else ranked[: NUM_REASONS - 1]
        for (given, reason), slots in shown:
            others = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
            yield f"  {slots[0]}{others} -> {given}: {shorten(reason, REASON_LENGTH, placeholder=' ...')}"
        rest = sum(len(slots) for _, slots in ranked[len(shown) :])
        if rest:
            yield f"  {rest} more for {len(groups) - len(shown)} other reasons"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def _rank(given: str, reason: str, slot: str) -> int:
    """Return the place of a `Change` in a summary: 0 if memory is not freed, 1 if nothing is packed, 3 if small, else 2."""
    if reason == HIDDEN or given.endswith(BESIDE_ORIGINAL):
        return 0
    return 3 if " of fewer than " in slot else 1 if given in (UNMODIFIED, "nothing") else 2


def stored_bytes(model: nn.Module | None, activations: Activations, weights: Iterable[Weight]) -> tuple[StoredBytes, ...]:
    """Return the bytes of activations, packed weights, optimizer state and gradients, with the plan and without it.

    If `model` is None, since the model was deleted, only the activations are counted.
    """
    most = activations.largest
    rows = [StoredBytes("activations", *most)] if most.baseline else []
    if model is None:
        return tuple(rows)
    plain = sum(local(p).numel() * p.element_size() for p in model.parameters())
    saved = sum(weight.size.numel() * weight.dtype.itemsize - weight.nbytes for weight in weights)
    rows += [StoredBytes("weights", plain - saved, plain)] if saved else []
    return (*rows, *_state_bytes(model))


def peak_memory(model: nn.Module | None, plan: Plan, trace: Trace | None) -> str:
    """Return a text on peak memory: predicted by `trace` with and without the plan and, on a GPU, measured."""
    devices = sorted({str(p.device) for p in model.parameters() if p.device.type == "cuda"}) if model is not None else []
    texts = [f"{say_bytes(torch.cuda.max_memory_allocated(device))} allocated on {device}" for device in devices]
    if trace is not None:
        peaks = [say_bytes(footprint(trace, of).peak_bytes) for of in (plan, None)]
        texts.insert(0, f"{peaks[0]} predicted instead of {peaks[1]}")
    return ", ".join(texts) or "not measured on a CPU; session.summary(trace) compares predictions"


def _state_bytes(model: nn.Module) -> list[StoredBytes]:
    """Return the bytes of optimizer state and gradients, for parameters that an optimizer of paredown.optim updates."""
    totals = {"optimizer state": [0, 0], "gradients": [0, 0]}
    for parameter in model.parameters():
        owner = owner_of(parameter)
        entry = owner.entry_of(parameter) if owner is not None else None
        state = owner.state.get(parameter) if owner is not None else None
        if owner is None or entry is None or not state:
            continue
        num_bytes = local(parameter).numel() * parameter.element_size()
        moments = owner.rule_for(owner.param_groups[entry.group]).roles
        stored = sum(value.nbytes for name, value in state.items() if isinstance(value, Tensor) and not name.startswith("weight."))
        gradient = entry.gradient.nbytes if entry.gradient is not None else 0 if owner.memory.release else num_bytes
        for name, pair in (("optimizer state", (stored, len(moments) * num_bytes)), ("gradients", (gradient, num_bytes))):
            totals[name] = [total + part for total, part in zip(totals[name], pair, strict=True)]
    return [StoredBytes(name, *pair) for name, pair in totals.items() if any(pair)]


# --- optimizer state and gradients ---------------------------------------------------------------------------------------------


def requests_optimizer(model: nn.Module, plan: Plan) -> bool:
    """Return whether a plan has formats for trained parameters or their state, which need an optimizer of paredown.optim."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and not is_small(parameter.shape)]
    return any(plan.find((name,), role).format is not None for name in trained for role in (Role.WEIGHT, *STATE))


def state_changes(model: nn.Module, plan: Plan, *, awaits_optimizer: bool = False) -> Iterator[Change]:
    """Yield a `Change` for each optimizer moment, weight residue and gradient that is not stored as the plan requests.

    `awaits_optimizer`: whether an integration creates an optimizer of paredown.optim later, which will follow the plan.
    """
    sharded = sharded_of_whole(model)
    trained = [(name, sharded.get(id(p), p)) for name, p in model.named_parameters() if p.requires_grad]
    requested = [(name, p, role, plan.find((name,), role).format) for name, p in trained for role in STATE]
    requested = [row for row in requested if row[3] is not None]
    is_made = any(owner_of(p) is not None for _, p, _, _ in requested)
    if requested and not is_made and not awaits_optimizer:
        for role in STATE:
            formats = list(dict.fromkeys(str(format) for _, _, of, format in requested if of is role))
            if formats:
                yield Change(role.value, ", ".join(formats), UNMODIFIED, NO_OPTIMIZER)
        return
    yield from _absent_moments([(p, role, str(format)) for _, p, role, format in requested])
    small = {name for name, p, _, _ in requested if is_small(p.shape)}
    if small:
        what = f"{len(small)} parameter{'s' * (len(small) > 1)} of fewer than {MIN_DIMS} dimensions or {MIN_NUMEL} values"
        yield Change(what, "formats", "float32", SMALL)
    for name, p, role, format in requested:
        used = None if name in small or not is_made else _used_instead(p, role, format)
        if used is not None:
            yield Change(f"{role.value}={name}", str(format), *used)


def _absent_moments(requested: Sequence[tuple[Tensor, Role, str]]) -> Iterator[Change]:
    """Yield a `Change` for each optimizer moment that the plan requests, if the model's optimizers store none of them."""
    owners = {owner for p, _, _ in requested if (owner := owner_of(p)) is not None}
    used = {role for owner in owners for group in owner.param_groups for role in owner.rule_for(group).roles}
    formats = {role: format for _, role, format in requested if role in (Role.MOMENT1, Role.MOMENT2)}
    if owners and not used & formats.keys():
        names = ", ".join(sorted({type(owner).__name__ for owner in owners}))
        yield from (Change(role.value, format, "nothing", NO_MOMENT.format(names)) for role, format in formats.items())


def _used_instead(parameter: Tensor, role: Role, requested: Format | None) -> tuple[str, str] | None:
    """Return (format in use, reason) if a parameter's moment, residue or gradient (`role`) is not stored as `requested`.

    Return None if it is.
    """
    owner = owner_of(parameter)
    if owner is None:
        return UNMODIFIED, NO_OPTIMIZER
    entry = owner.entry_of(parameter)
    if entry is not None and request_of(parameter) is None and entry.choices.format(role) is None:
        return UNMODIFIED, ADDED
    given = entry.choices.format(role) if entry is not None else requested
    if given != requested and role in owner.rule.roles:
        return str(given or UNMODIFIED), KEYWORDS
    if role is not Role.GRADIENT or entry is None or entry.gradient is not None:
        return None
    if owner.memory.release:
        return "nothing", "release=True uses each gradient in backward and frees it"
    if entry.choices.format(Role.GRADIENT) is None:
        return UNMODIFIED, "the optimizer was created with gradient=None for it"
    return UNMODIFIED, REPLICATED


def requested_formats_of(model: nn.Module, plan: Plan) -> list[tuple[nn.Parameter, RequestedFormats]]:
    """Return each parameter with the formats that `plan` requests for it; raise an error if its optimizer cannot use them."""
    rows: list[tuple[nn.Parameter, RequestedFormats]] = []
    checked: set[Any] = set()
    for name, parameter in model.named_parameters():
        assigned = {role: plan.find((name,), role) for role in (Role.WEIGHT, *STATE)}
        assigned[Role.WEIGHT] = plan.find((name,), weight_role(is_frozen=not parameter.requires_grad))
        choices: dict[Role, Choice] = {role: (a.format, a.rounding_in(role)) for role, a in assigned.items()}
        if any(format is not None for format, _ in choices.values()):
            rows.append((parameter, RequestedFormats(name, choices)))
            owner = owner_of(parameter)
            if owner is not None and owner not in checked and owner.has_started:
                raise ApplyError(
                    f"{type(owner).__name__} of paredown.optim has {name} and has state already ({owner.updates} updates), which is not "
                    "stored in the plan's formats. Apply the plan before the first step and before load_state_dict(); or apply it "
                    "without that optimizer, make a new one, and load export_state() of the old one into it."
                )
            if owner is not None:
                checked.add(owner)
                owner.check_request(parameter, rows[-1][1])
    return rows
