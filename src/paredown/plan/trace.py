"""`Trace`: every tensor that one training step stores, as a frozen value that prints as a table and round-trips through JSON.

    Slot      a tensor with a role (weight, gradient, moment, activation, ...), its bytes and its lifetime
    Saver     an operation that saved an activation for backward, and what its backward needs of it
    Part      the times at which a slot is packed, decoded and released, if a plan packs it for one use in backward
    Recomputation  how backward of a compiled step could recompute a slot instead
    Output    memory that an operation allocated, whether or not a slot came of it
    Operation an operation that ran, with its floating point operations and the bytes that it reads and writes
    TokenModule a module that was called once, and the memory of a piece of the sequence if it can run over pieces

A time is a tick: the position of an operation in the step (predict/timeline.py). A lifetime includes both of its ends.

`Trace.load` checks types and ranges of every row and rejects rows that contradict themselves or one another, which `trace_step` never
produces: a tensor that is freed before it is allocated, a part that is released before it is packed, a part for a use that no
operation saved, views of one storage with different sizes, two slots of one role and name, or bytes that differ from shape and dtype.
`footprint` and `assign` rely on these checks.

>>> check_row(Part(Use.VALUE, packed=1, released=99), length=10)
Traceback (most recent call last):
    ...
paredown.errors.TraceError: the part has a time after the end of the step at 10: packed 1, released 99. Trace the step again.
>>> check_row(Part(Use.VALUE, packed=5, released=3), length=10)
Traceback (most recent call last):
    ...
paredown.errors.TraceError: the part contradicts itself: packed 5, released 3; no tensor ends before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from math import prod
from os import PathLike
from typing import Annotated, Any, TypeVar

from paredown.autograd.operations import Needs, Pin, Use
from paredown.errors import TraceError
from paredown.roles import Role
from paredown.serial import COUNT, WHOLE, Check, brief, dump_dataclass, load_json, object_parts, read_dataclass, save_json
from paredown.sizes import FLOAT_BYTES, say_bytes

INDEX_DTYPES = ((1 << 8, "uint8", 1), (1 << 15, "int16", 2), (1 << 31, "int32", 4))  # (exclusive bound, dtype, bytes of a value)
VIEW = "view"  # name of operations without a kernel in `Trace.operations`
VERSION = 2  # of the JSON file; version 2 added the times at which backward needs weights
LARGEST = 10  # slots that repr shows
DEVICES = ("cuda", "cpu")
MAX_TICKS = 1 << 26  # of a step read from a file
MAX_TOTAL_BYTES = 1 << 58  # of all rows and their decoded copies: every sum of them fits in int64, in any format
PHASES = ("forward", "loss", "backward", "step")
Tick = Annotated[int, Check(lambda value: type(value) is int and -1 <= value <= MAX_TICKS + 1, "a tick of the step, or -1,")]
StorageNumber = Annotated[int, WHOLE]  # -1: unknown; below: a tensor that autograd's graph does not hold
Span = tuple[Tick, Tick]
# (fixed bytes, bytes per token); a piece needs the largest sum of these over all pairs
PieceBytes = tuple[tuple[Annotated[int, COUNT], Annotated[int, COUNT]], ...]
Result = TypeVar("Result")
SIZED_BY_SHAPE = (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)


@dataclass(frozen=True)
class Saver:
    """An operation that saved a tensor for backward: its name for the tensor, and what its backward needs of it."""

    name: str
    op: str
    operand: str
    use: Use
    pin: Pin | None = None
    is_centered: bool = False  # its backward subtracts a mean from the tensor

    @property
    def needs(self) -> Needs:
        """Return what the operation's backward needs of the tensor, from the table of operations."""
        return Needs(self.use, self.pin, self.is_centered)


@dataclass(frozen=True)
class Part:
    """The packed data of a saved tensor for one use in backward, such as values or signs, with ticks of its lifetime.

    A tick is the position of an operation in the step. The data is stored from `packed` to `released` and decoded in the spans `decoded`,
    if a plan packs the tensor.
    """

    use: Use
    packed: Tick
    released: Tick
    decoded: tuple[Span, ...] = ()
    bound: int | None = None  # of Use.INDEX: all values are below it
    # the operation that reads the decoded copy writes its result into it; the result has an `Output` of its own
    becomes_result: bool = False
    # the packed values are in host memory between these two ticks, and on the GPU before and after (plan/planned_step.py)
    away: Span | None = None


@dataclass(frozen=True)
class Recomputation:
    """How backward of a compiled step could recompute a saved tensor from other tensors, and at what cost.

    `sources` are the numbers of the storages that the tensor is computed from, which must then be stored unmodified. `op`, `flops` and
    `nbytes` are the matrix product or convolution that would run, and the bytes that it reads and writes; intermediate results take
    `written_bytes`.
    """

    sources: tuple[StorageNumber, ...]
    op: str
    flops: int
    nbytes: int
    written_bytes: int
    first: Tick
    last: Tick


@dataclass(frozen=True)
class Slot:
    """A tensor of a training step in one role, with its bytes and its lifetime in ticks (positions of operations).

    `birth` to `death` is its lifetime in the baseline. If the tensor is packed, the original is freed after `dropped`. `stays` is the
    reason why no plan can pack it, "" if a plan can. A view that is a small part of its storage is a slot of its own; slots of one torch
    storage have the same `storage` number.

    A packed weight is decoded while a module that owns it runs (`running`) and when backward needs it (`parts`). The cast of a weight under
    autocast is a TEMPORARY slot that names the weight in `recomputed_from`.
    """

    name: str
    role: Role
    module: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    birth: Tick
    death: Tick
    numel: int = 0  # how many values are stored when it is packed: those of its storage, or of a small view
    storage: StorageNumber = -1
    dropped: Tick = -1
    savers: tuple[Saver, ...] = ()
    parts: tuple[Part, ...] = ()
    stays: str = ""
    recomputed_from: str = ""  # the slot that its values can be recomputed from, as relu(batch_norm(x)) from x
    # for a weight: when modules that own it run; for the cast of a weight in a checkpointed module: when the cast exists
    running: tuple[Span, ...] = ()
    is_frozen: bool = False  # of a weight: it requires no gradient
    # for a tensor that a second forward pass saves: bytes of temporaries at its birth, if it is packed (plan/checkpointed_trace.py)
    beside_packed: int = 0
    # for an activation that needs a gradient: the names that it has as the input of modules, if those are checkpointed
    inputs: tuple[str, ...] = ()
    recomputation: Recomputation | None = None  # of an activation of a compiled step that backward could recompute

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names under which operations saved the tensor, or its own name if no operation did."""
        return tuple(saver.name for saver in self.savers) or (self.name,)

    @property
    def pin(self) -> Pin | None:
        """Return the strictest lower bound on the precision in which the tensor may be stored, or None."""
        pins = [saver.pin for saver in self.savers if saver.pin is not None]
        return max(pins, key=lambda pin: pin.significant_bits, default=None)

    @property
    def uses(self) -> frozenset[Use]:
        """Return everything that backward needs of the tensor, such as values or signs."""
        return frozenset(part.use for part in self.parts)


@dataclass(frozen=True)
class Output:
    """The memory that an operation of the step allocated, with its lifetime in ticks (positions of operations).

    `slot` names the saved tensor or gradient that the memory belongs to, "" for a temporary. `used` is the tick of the last operation that
    read it, -1 if unknown; a variable of the program may hold the memory longer.
    """

    op: str
    module: str
    phase: str  # "forward", "loss", "backward" or "step"
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    birth: Tick
    death: Tick
    slot: str = ""
    used: Tick = -1
    inputs: tuple[str, ...] = ()  # the same as in `Slot`


@dataclass(frozen=True)
class Operation:
    """A kind of call that runs `count` times in a module and a phase, with the flops and the bytes moved of one call.

    `arguments` is a JSON text from which the call can be repeated (predict/timeline.py), "" if it cannot. Operations that only make views
    run no kernel; all views of a module and a phase are one row, whose `op` is VIEW. Allocations are left out.
    """

    op: str
    module: str
    phase: str
    dtype: str = ""
    flops: int = 0
    nbytes: int = 0
    arguments: str = ""
    count: int = 1


@dataclass(frozen=True)
class TokenModule:
    """A module that a step calls once, and the memory that it takes if it runs over pieces of the sequence.

    `whole` is the reason why it cannot run in pieces, "" if it can. `tokens` is the length of the sequence; `forward` and `backward` are
    its first and last operation (tick) there. `in_forward` and `in_backward` give the bytes inside while pieces run, without its input,
    output and their gradients.
    """

    path: str
    is_linear: bool = False  # a linear layer by itself, which is not tiled unless a rule names it
    whole: str = ""
    tokens: Annotated[int, COUNT] = 0
    forward: Span = (0, 0)
    backward: Span = (0, 0)
    in_forward: PieceBytes = ()
    in_backward: PieceBytes = ()


@dataclass(frozen=True, repr=False)
class Trace:
    """All tensors that one training step stores and allocates, with their lifetimes, and all operations of the step.

    `dtype` is the dtype in which the step computes: that of autocast, or of most parameters. `notes` lists what was assumed or left out.
    `operations` are all operations of forward, loss and backward, from which step time is predicted; a compiled step has none, and no
    `token_modules`.

    torch.compile saves other tensors if a session packs them. So the trace of a compiled step is that of a step with packed activations,
    and `without_packing` is the step with unmodified activations, `in_4_bits` the step with activations in 4 bits or fewer, if it differs.
    The trace of an eager step has `without_packing` if in-place operations on views hide what they save, unless a session packs
    activations. If sessions compute the loss in chunks, the trace is that of a session's step, and `unmodified` is the baseline, which has
    all logits.
    """

    model: str
    batch: tuple[str, ...]
    device: str
    dtype: str
    optimizer: str
    slots: tuple[Slot, ...]
    outputs: tuple[Output, ...]
    length: int
    backward_at: int
    returned_bytes: int = 0  # of the model's output beside its loss, which is freed before backward
    notes: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()
    token_modules: tuple[TokenModule, ...] = ()
    is_compiled: bool = False  # by torch.compile
    without_packing: Trace | None = None  # the step under a plan that packs no activations, where that is another one
    in_4_bits: Trace | None = None  # of a compiled step: the step under a plan that packs all activations in 4 bits or fewer
    unmodified: Trace | None = None  # the step without a session, where sessions compute the loss in chunks

    @cached_property
    def activations(self) -> tuple[Slot, ...]:
        """Return the tensors (slots) that autograd saves for backward."""
        return self.of(Role.ACTIVATION)

    @property
    def kept_activations(self) -> tuple[Slot, ...]:
        """Return the activations that exist when backward begins, without those that second forward passes save."""
        return tuple(slot for slot in self.activations if slot.birth <= self.backward_at)

    def of(self, role: Role) -> tuple[Slot, ...]:
        """Return the tensors of the step (slots) that have this role."""
        return tuple(slot for slot in self.slots if slot.role is role)

    def slot(self, name: str, role: Role | None = None) -> Slot:
        """Return the tensor of the step with this name and role; with `role` None, an activation or a weight."""
        roles = (Role.ACTIVATION, Role.WEIGHT) if role is None else (role,)
        matches = [slot for slot in self.slots if name in slot.names and slot.role in roles]
        if not matches:
            raise TraceError(f"there is no slot {name!r} in the trace; trace.slots has all of them.")
        return matches[0]

    @cached_property
    def largest(self) -> tuple[Slot, ...]:
        """Return the 10 activations of most bytes; of several views of one storage, only one."""
        by_storage = {slot.storage: slot for slot in reversed(self.kept_activations)}
        return tuple(sorted(by_storage.values(), key=lambda slot: -slot.nbytes)[:LARGEST])

    def __repr__(self) -> str:
        slots = {role: self.kept_activations if role is Role.ACTIVATION else self.of(role) for role in Role}
        sums = {role: sum(slot.nbytes for slot in _once(of_role)) for role, of_role in slots.items()}
        roles = ", ".join(f"{role.value} {say_bytes(n)}" for role, n in sums.items() if n)
        width = max((len(slot.name) for slot in self.largest), default=0)
        rows = [f"  {s.name:{width}}  {say_bytes(s.nbytes):>10}  {s.dtype} {s.shape}" for s in self.largest]
        notes = [f"  note: {note}" for note in self.notes]
        head = f"Trace of {self.model} on {self.device}, {self.dtype}, batch {'; '.join(self.batch)}"
        return "\n".join([head, f"  {roles}", f"  largest of {len(self.kept_activations)} saved tensors:", *rows, *notes])

    def to_json(self) -> dict[str, Any]:
        """Return the trace as a JSON value."""
        rows = {name: dump_dataclass(getattr(self, name), skips_defaults=True) for name in ROWS}
        return {"version": VERSION, **{name: dump_dataclass(getattr(self, name)) for name in FIELDS if name not in rows}, **rows}

    @staticmethod
    def from_json(value: Any) -> Trace:
        """Return the trace whose `to_json()` is `value`; raise TraceError, with the reason, for any other value."""
        parts = object_parts(value, "trace", FIELDS, ("version", "model", "slots"), VERSION, TraceError, oldest=VERSION)
        inner = {name: {"version": VERSION, **part} for name in OF_OTHER_STEPS if isinstance(part := parts.get(name), dict)}
        parts = {**parts, **inner}  # files have no version in traces of other steps
        trace = read_dataclass(Trace, parts, "trace", TraceError)
        check_trace(trace)
        return trace

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace to a file, as JSON."""
        save_json(path, self.to_json(), TraceError)

    @staticmethod
    def load(path: str | PathLike[str]) -> Trace:
        """Return the trace that `save` wrote to this file."""
        return load_json(path, "trace", TraceError, Trace.from_json, hint="Traces are written by trace.save(path).")


FIELDS = tuple(field.name for field in fields(Trace))
OF_OTHER_STEPS = ("without_packing", "in_4_bits", "unmodified")
ROWS = ("slots", "outputs", "operations", "token_modules")  # fields that are written without their defaults


def index_dtype(bound: int | None, dtype: str) -> str:
    """Return the narrowest integer dtype for indices that are below `bound`; with `bound` None, `dtype`, their own."""
    return next((name for limit, name, _ in INDEX_DTYPES if bound is not None and bound <= limit), dtype)


def index_bytes(bound: int | None, itemsize: int) -> int:
    """Return the bytes of one saved index below `bound`, in the narrowest dtype; with `bound` None, `itemsize`.

    >>> index_bytes(200, 8), index_bytes(50257, 8), index_bytes(None, 8)
    (1, 4, 8)
    """
    return next((width for limit, _, width in INDEX_DTYPES if bound is not None and bound <= limit), itemsize)


def cached_on_trace(compute: Callable[[Trace], Result]) -> Callable[[Trace], Result]:
    """Return a function like `compute` that computes once for each trace and stores its result on the trace."""
    name = f"_{compute.__name__}"

    @wraps(compute)
    def cached(trace: Trace) -> Result:
        if name not in vars(trace):
            vars(trace)[name] = compute(trace)
        return vars(trace)[name]

    return cached


def _once(slots: tuple[Slot, ...]) -> list[Slot]:
    """Return `slots` with only one of those that share a torch storage, so that shared bytes count once."""
    seen: set[int] = set()
    return [slot for slot in slots if slot.storage == -1 or not (slot.storage in seen or seen.add(slot.storage))]


# --- Checks of a trace that was read from a file ---


def check_trace(trace: Trace) -> None:
    """Raise TraceError if times, sizes or tensors of a trace, such as one read from a file, contradict each other."""
    if trace.device not in DEVICES:
        raise TraceError(f"device of a trace is {' or '.join(DEVICES)}, not {brief(trace.device)}.")
    if trace.length > MAX_TICKS:
        raise TraceError(f"the step has {trace.length} ticks; at most {MAX_TICKS} are supported.")
    if trace.backward_at > trace.length:
        raise TraceError(f"backward begins at {trace.backward_at}, after the step's end at {trace.length}. Trace the step again.")
    check_rows(trace.slots, trace.outputs, trace.length)
    check_token_modules(trace.token_modules, trace.backward_at, trace.length)
    for other in (getattr(trace, name) for name in OF_OTHER_STEPS):
        if other is not None:
            check_trace(other)


def check_token_modules(modules: tuple[TokenModule, ...], backward_at: int, length: int) -> None:
    """Raise TraceError if a module's ticks do not go from forward to backward, or its pieces are too large.

    `backward_at` is the tick at which backward begins, `length` the last tick of the step.
    """
    for module in modules:
        (start, end), (first, last) = module.forward, module.backward
        if not module.whole and not (0 <= start <= end <= backward_at <= first <= last <= length):
            times = f"forward {start} to {end}, backward {first} to {last}"
            raise TraceError(f"the module {brief(module.path)} contradicts itself: {times}. Trace the step again.")
        if any(fixed + more * module.tokens >= MAX_TOTAL_BYTES for fixed, more in (*module.in_forward, *module.in_backward)):
            raise TraceError(f"pieces of the module {brief(module.path)} have too many bytes; fewer than 2^58 are supported.")


def check_row(row: Slot | Output | Part, length: int) -> None:
    """Raise TraceError if an entry of a trace has a tick after `length`, or a lifetime that ends before it begins."""
    kind = type(row).__name__.lower()
    where = f"{kind} {brief(row.name)}" if isinstance(row, Slot) else kind
    for first, begin, last, end in _lifetimes(row):
        times = f"{first} {begin}, {last} {end}"
        if max(begin, end) > length + 1:
            raise TraceError(f"the {where} has a time after the end of the step at {length}: {times}. Trace the step again.")
        if end < begin:
            raise TraceError(f"the {where} contradicts itself: {times}; no tensor ends before it begins.")
    for part in row.parts if isinstance(row, Slot) else ():
        check_row(part, length)


def _lifetimes(row: Slot | Output | Part) -> Iterator[tuple[str, int, str, int]]:
    """Yield each lifetime in an entry of a trace as (word, begin, word, end); the words are for error messages."""
    if isinstance(row, Slot | Output):
        yield "born at", row.birth, "dead at", row.death
    if isinstance(row, Output):
        yield "read until", row.used, "and dead at", max(row.used, row.death)
    if isinstance(row, Slot):
        if row.dropped != -1:
            yield "born at", row.birth, "dropped at", row.dropped
        yield from (("running from", start, "to", end) for start, end in row.running)
    if isinstance(row, Part):
        yield "packed", row.packed, "released", row.released
        yield from (("decoded from", start, "to", end) for start, end in row.decoded)


def check_rows(slots: tuple[Slot, ...], outputs: tuple[Output, ...], length: int) -> None:
    """Raise TraceError if a tensor or allocation of a trace is impossible, or if two of them contradict each other."""
    for row in (*slots, *outputs):
        check_row(row, length)
    total = sum(row.nbytes * _copies(row) for row in (*slots, *outputs))
    if total >= MAX_TOTAL_BYTES:
        raise TraceError(f"the slots and outputs of the trace have {brief(total)} bytes in total; fewer than 2^58 are supported.")
    unknown_phase = next((row.phase for row in outputs if row.phase not in PHASES), None)
    if unknown_phase is not None:
        raise TraceError(f"phase of an output is one of {', '.join(PHASES)}, not {brief(unknown_phase)}.")
    for slot in slots:
        if slot.role in SIZED_BY_SHAPE:
            _check_bytes(slot)
        elif slot.role is Role.ACTIVATION:
            _check_uses(slot)
    _check_names(slots)
    _check_storages(slot for slot in slots if slot.role is Role.ACTIVATION)
    _check_owners(slots)


def _copies(row: Slot | Output) -> int:
    """Return how many copies of a tensor (original, packed or decoded) can be in memory at the same time, at most."""
    return 1 + (len(row.running) + sum(1 + len(part.decoded) for part in row.parts) if isinstance(row, Slot) else 0)


def _check_bytes(slot: Slot) -> None:
    """Raise TraceError if the bytes of a weight, gradient or moment do not follow from its shape and dtype."""
    numel = prod(slot.shape)
    size = numel * FLOAT_BYTES.get(slot.dtype, 0)
    if (size and size != slot.nbytes) or slot.numel not in (0, numel):
        raise _contradiction(slot, f"shape {slot.shape} of {slot.dtype}, {slot.numel} values, {slot.nbytes} bytes")


def _check_uses(slot: Slot) -> None:
    """Raise TraceError if an activation has packed data for a use for which no operation saved it."""
    if slot.numel * FLOAT_BYTES.get(slot.dtype, 1) > slot.nbytes:
        raise _contradiction(slot, f"{slot.numel} values of {slot.dtype} in a storage of {slot.nbytes} bytes")
    packed, saved = ({row.use for row in rows} for rows in (slot.parts, slot.savers))
    if not slot.stays and packed - saved:
        uses = ", ".join(sorted(use.value for use in packed - saved))
        raise _contradiction(slot, f"a part for the use {uses}, which no operation saved")
    if len(packed) < len(slot.parts):
        raise _contradiction(slot, "two parts for one use")
    if Use.VALUE in packed and not slot.stays and slot.dropped == -1:
        raise _contradiction(slot, "a packed part, and no time at which the original is dropped")


def _check_names(slots: tuple[Slot, ...]) -> None:
    """Raise TraceError if two tensors (slots) of one role, or two operations that saved activations, share a name."""
    seen: set[tuple[Role, str]] = set()
    for slot in slots:
        keys = (
            {(slot.role, name) for name in (slot.name, *slot.names)} if slot.role is Role.ACTIVATION else {(slot.role, slot.name)}
        )
        if keys & seen:
            raise _contradiction(slot, "another slot has this role and name")
        seen |= keys if slot.role in (Role.ACTIVATION, *SIZED_BY_SHAPE) else set()


def _check_storages(activations: Iterable[Slot]) -> None:
    """Raise TraceError if two activations with the same storage number differ in bytes or birth."""
    first: dict[int, Slot] = {}
    for slot in activations:
        other = first.setdefault(slot.storage, slot)
        if (other.nbytes, other.birth) != (slot.nbytes, slot.birth):
            sizes = [f"{view.nbytes} bytes from {view.birth}" for view in (slot, other)]
            raise _contradiction(slot, f"storage {slot.storage} has {sizes[0]}, and {sizes[1]} in slot {brief(other.name)}")


def _check_owners(slots: tuple[Slot, ...]) -> None:
    """Raise TraceError if a gradient, or the autocast copy of a weight, names a weight that the trace does not have."""
    weights = {slot.name for slot in slots if slot.role is Role.WEIGHT}
    named = {slot.name for slot in slots if slot.role is Role.GRADIENT}
    named |= {slot.recomputed_from for slot in slots if slot.role is Role.TEMPORARY and slot.recomputed_from}
    if missing := sorted(named - weights):
        raise TraceError(
            f"a gradient or a cast belongs to weight {brief(missing[0])}, which the trace does not have: trace the step again "
            "and save it with trace.save(path)."
        )


def _contradiction(slot: Slot, why: str) -> TraceError:
    return TraceError(
        f"slot {brief(slot.name)} ({slot.role.value}) contradicts itself or another one: {why}. Trace the step again."
    )
