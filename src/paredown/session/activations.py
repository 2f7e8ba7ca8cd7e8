"""Activations that wait packed: what `Watch` reports is put away at once, and made again when backward asks for it.

    backward needs          it waits as                               and comes back as
    value                   codes and scales in the plan's format     decoded, of the same size and strides
                            or nothing, if it follows from another    computed again (`trace/saved_tensors.py`)
    sign, inside, mask      one exact bit a value                     two values that backward takes for the same
    index                   integers of the smallest width            the same integers
    shape                   nothing                                   memory of that shape, not filled
    exact                   itself                                    itself

Parameters, their views and casts, buffers and what the caller brought are never touched. One storage waits once, however many operations
saved it. A cache by address would give another tensor's bytes back once the first is freed and its address used again: the key is the
storage object, which a weak reference keeps from being used again, and the version of its contents.

What the model returns is held by the caller, and goes back to being plain when the forward pass ends: packed it would be there twice.

Whether the operands of an attention may be packed: a bound on what rounding them does to the probabilities.

Backward computes P = exp(scale q.k - logsumexp) with the decoded q and k and the exact logsumexp of the forward pass. The logits are off
by about

    error = sqrt(2) * e * scale * max|q| * max|k| / sqrt(d)

with e the relative error of the format (int8: 0.6 %), |.| the norm of a row and d its length: probabilities are off by exp(error), and
gradients with them, without bound as logits grow. Where logits are large, probabilities are 0 or 1, and the gradient of a logit is the
small difference of v times the gradient and its sum over the output: rounding v hides it. Above LARGEST_ERROR q, k and v stay plain, and
`session.changes` has the number.

On a CPU the norms are read in every forward pass. On a GPU reading them would wait for the device: that happens once for each attention,
when it is saved first; after that the norms of every EVERY-th forward pass are copied to the host in the background, and decide about the
passes that follow.
"""


# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from paredown.codec.packed import encode_flat
from paredown.codec.recompute import NO_BOUND, pack_mask
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from paredown.plan.plan import Plan
from paredown.plan.storage import is_same_level, keeps_enough, resolve_format, significant_bits
from paredown.roles import Role
from paredown.session.stored_tensors import (
    RecomputedValues,
    StoragePiece,
    StoredForm,
    StoredIntegers,
    StoredMask,
    StoredShape,
    StoredValues,
    StoredView,
    decode_steps_of,
)
from paredown.trace.autograd_graph import MIN_PACKED_NUMEL, Saved, tensors_in
from paredown.trace.operations import CANCELS, EXPONENT, Use
from paredown.trace.saved_tensors import SOURCE_OPS, rematerialization_of

LARGEST_ERROR = 0.1  # of a logit, as a standard deviation: probabilities 10 % off
OF_ONE_STEP = 0.75  # relative error of rounding, in units of 2^-bits: 0.6 % for int8, measured on normal values in blocks of 64
EVERY = 8


@dataclass(eq=False, slots=True)
class AttentionNorms:
    """What is known of one attention: the bound on its logits, in which forward pass, and a later one on its way to the host."""

    bound: float
    forwards: int
    coming: Tensor | None = None
    arrived: Any = None  # the CUDA event after the copy


class LogitBounds:
    """The bounds of all attentions of a model, by the module and operation that saved them."""

    def __init__(self) -> None:
        self._seen: dict[str, AttentionNorms] = {}

    def reason_to_keep(self, saved: Saved, format: Format, forwards: int) -> str:
        """Why a query, key or value stays plain under `format` in this forward pass; "" if it may be packed."""
        assert saved.tensor is not None
        bound = self._bound(saved.name.rpartition(".")[0], saved.node, saved.tensor.is_cuda, forwards)
        error = sqrt(2 / saved.tensor.shape[-1]) * OF_ONE_STEP * 2.0 ** -significant_bits(format) * bound
        if error <= LARGEST_ERROR:
            return ""
        return f"its logits are up to {bound:.3g}: in {format} they would be off by about {error:.2g}, and probabilities by exp of that"

    def _bound(self, name: str, node: Any, is_cuda: bool, forwards: int) -> float:
        seen = self._seen.get(name)
        if seen is None or (not is_cuda and seen.forwards != forwards):
            seen = self._seen[name] = AttentionNorms(largest_logit(node).item(), forwards)
        elif is_cuda and seen.forwards != forwards:
            _update(seen, node, forwards)
        return seen.bound


def largest_logit(node: Any) -> Tensor:
    """scale * max|q| * max|k|, which no logit exceeds (Cauchy-Schwarz); infinity where it is not a number."""
    query, key, scale = node._saved_query, node._saved_key, node._saved_scale
    rows = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).max() for t in (query, key)]
    return (rows[0] * rows[1] * (query.shape[-1] ** -0.5 if scale is None else scale)).abs().nan_to_num(nan=inf)


def _update(seen: AttentionNorms, node: Any, forwards: int) -> None:
    """Take over what has arrived on the host; send the next one on its way."""
    seen.forwards = forwards
    if seen.coming is not None and seen.arrived.query():
        seen.bound, seen.coming = float(seen.coming), None
    if seen.coming is None and forwards % EVERY == 0 and not torch.cuda.is_current_stream_capturing():
        seen.coming = torch.empty((), pin_memory=True).copy_(largest_logit(node), non_blocking=True)
        seen.arrived = torch.cuda.current_stream().record_event()


# --- Activations that wait packed ---

LOGITS = (EXPONENT, CANCELS)  # the pins of what attention multiplies
WIDTHS = ((1 << 8, torch.uint8), (1 << 15, torch.int16), (1 << 31, torch.int32))
HOOKED = "somebody else holds it through hooks of their own, such as checkpointing"
REASONS = {"hooked": HOOKED, "weight": "it is a weight", "buffer": "it is a buffer", "input": "the caller holds it"}


@dataclass(frozen=True)
class StorageDecision:
    """What becomes of a slot: `format` None leaves it as it is; `reason` says why that is not what was asked for."""

    asked: Format | None
    format: Format | None
    rounding: Rounding
    overflow: Overflow | None
    reason: str
    tensor_id: int


Observer = Callable[[Saved, StoragePiece, StoredForm], None]


@dataclass
class ForwardStorage:
    """Of the forward pass that is running: what waits already, and which storages stay as they are."""

    waiting: dict[Any, StoredForm] = field(default_factory=dict)
    plain: dict[int, Tensor] = field(default_factory=dict)  # storage -> what keeps it
    names: dict[Any, str] = field(default_factory=dict)  # of what waits: that of its first saver
    # Number of a node -> (the node, what others can be recomputed from). Threads number their nodes independently, so that two nodes may
    # have one number: the entry counts for the node itself alone. Holding it is safe: its saved tensor is packed, and the pass is short.
    sources: dict[int, tuple[Any, StoredView]] = field(default_factory=dict)

    def source(self, node: Any) -> StoredView | None:
        """What is stored of the operand of `node` from which others can be recomputed."""
        found = self.sources.get(node._sequence_nr()) if node is not None else None
        return found[1] if found is not None and found[0] is node else None


class Activations:
    """Packs what one model saves for backward."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.seed, self.forwards = plan, seed, 0
        self.is_sharded = False  # whether parameters are freed between forward and backward
        self.names: set[str] = set()  # of all that was reported
        self.decisions: dict[str, StorageDecision] = {}
        self.left: dict[str, str] = {}  # name -> why it was left alone
        self.returned: frozenset[str] = frozenset()  # what went back to being plain in the last forward pass
        self.min_numel = MIN_PACKED_NUMEL
        self.on_packed: Observer = lambda saved, piece, waiting: None  # is told of everything that is put away
        self._decided: dict[tuple[Any, ...], StorageDecision] = {}
        self._waiting: list[weakref.ref[StoredForm]] = []  # of all forward passes whose backward may come
        self._running = threading.local()
        self._open: list[ForwardStorage] = []  # of the forward passes that are running, in all threads
        self._logits = LogitBounds()
        self._lock = threading.Lock()  # threads of one forward pass share its shelf: one storage is packed once

    @property
    def stored_bytes(self) -> int:
        """Bytes of everything that waits packed now."""
        return sum(waiting.nbytes for waiting in self.waiting())

    def waiting(self) -> list[StoredForm]:
        """Everything that waits now."""
        alive = [waiting for ref in self._waiting if (waiting := ref()) is not None]
        self._waiting = [weakref.ref(waiting) for waiting in alive]
        return alive

    def change(self, plan: Plan) -> None:
        """Another plan, from the next forward pass on."""
        self.plan = plan
        self._decided.clear()

    def begin(self, *, is_sharded: bool) -> None:
        """A forward pass begins."""
        self.forwards += 1
        self.is_sharded = is_sharded
        self.waiting()  # forgets what is gone
        self._running.now = ForwardStorage()
        self._open.append(self._running.now)

    def end(self, output: Any) -> None:
        """It ended: what the caller or the model keeps, or a saved tensor that stays plain holds, goes back to being plain."""
        now: ForwardStorage = self._running.now
        self._running.now = None
        self._open = [shelf for shelf in self._open if shelf is not now]
        held = now.plain
        held.update({t.untyped_storage()._cdata: t for t in tensors_in(output) if type(t) is Tensor and not t.is_inference()})
        for key, waiting in now.waiting.items():
            original = waiting.original()
            if original is not None:
                held.setdefault(key[0], original)
        returned = [key for key, waiting in now.waiting.items() if key[0] in held and waiting.goes_back(held[key[0]])]
        self.returned = frozenset(now.names[key] for key in returned)

    def save(self, saved: Saved) -> None:
        """Replace one saved tensor by what waits for it."""
        tensor = saved.tensor
        self.names.add(saved.name)
        if saved.kind != "activation" or tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
            if saved.name not in self.left and saved.operand != "weight":
                self.left[saved.name] = REASONS.get(saved.kind) or f"it is a {type(tensor).__name__}"
            return
        piece = StoragePiece(tensor)
        now = self._shelf()
        if piece.numel < self.min_numel or piece.address in now.plain:
            return
        with self._lock:
            self._store(saved, tensor, piece, now)

    def _store(self, saved: Saved, tensor: Tensor, piece: StoragePiece, now: ForwardStorage) -> None:
        use, detail = _form(saved, tensor)
        key = (*piece.key, use, detail)
        waiting = now.waiting.get(key)
        if waiting is None or use is Use.VALUE:
            there, waiting = waiting, MAKERS[use](self, saved, piece, waiting, detail)
            if waiting is None:
                now.plain[piece.address] = tensor.detach()
                return
            if waiting is not there:
                now.waiting[key] = waiting
                now.names[key] = saved.name
                self._waiting.append(weakref.ref(waiting))
        if tensor.grad_fn is not saved.node:  # an operation's own output is told as a tensor that nobody else has
            waiting.original = weakref.ref(tensor if tensor._base is None else tensor._base)
        view = StoredView(waiting, *piece.layout())
        if saved.op in SOURCE_OPS and saved.operand in ("input", "output"):
            now.sources[saved.node._sequence_nr()] = saved.node, view
        saved.raw.register_hooks(lambda _: view, StoredView.tensor)
        self.on_packed(saved, piece, waiting)
        if self.left:
            self.left.pop(saved.name, None)

    def _shelf(self) -> ForwardStorage:
        """That of the forward pass that runs in this thread, or of the one pass that this thread runs a part of."""
        own: ForwardStorage | None = getattr(self._running, "now", None)
        return own if own is not None else self._open[-1]

    # --- one function for each use ----------------------------------------------------------------------------------------

    def _values(self, saved: Saved, piece: StoragePiece, there: StoredForm | None, detail: Any) -> StoredForm | None:
        decision = self.decide(saved, piece)
        if decision.format is None:
            return there if there is not None and _keeps_enough(there, saved) else None
        if saved.pin in LOGITS:
            reason = self._logits.reason_to_keep(saved, decision.format, self.forwards)
            if reason:
                self.decisions[saved.name] = replace(decision, format=None, reason=reason)
                return None
        if there is not None and _keeps_enough(there, saved):
            return there
        recomputed = self._recomputed(saved, piece) if there is None else None
        if recomputed is not None:
            return recomputed
        seed = Seed(self.seed, decision.tensor_id, self.forwards)
        packed = encode_flat(piece.flat(), decision.format, decision.rounding, decision.overflow, seed)
        if type(there) is StoredValues:
            there.packed = packed  # an operation after the first needs more of it
            return there
        return StoredValues(piece, packed)

    def _recomputed(self, saved: Saved, piece: StoragePiece) -> StoredForm | None:
        """What follows from a tensor that waits already, if this one does and that is precise enough."""
        recipe = rematerialization_of(piece.tensor)
        now = self._shelf()
        view = now.source(recipe.source) if recipe is not None else None
        if (
            recipe is None
            or view is None
            or type(view.waiting) is not StoredValues
            or view.waiting.packed is None
            or not piece.is_whole
        ):
            return None
        if not _keeps_enough(view.waiting, saved):
            return None
        signs = now.source(recipe.sign)
        if piece.tensor._version != (signs.waiting.version if signs is not None and signs.waiting.is_of(piece) else 0):
            return None  # modified since, without autograd's knowing
        steps = decode_steps_of(recipe, view, signs, piece, keeps_parameters=not self.is_sharded)
        return RecomputedValues(piece, view.waiting, steps) if steps is not None else None

    def _bits(self, saved: Saved, piece: StoragePiece, there: StoredForm | None, detail: Any) -> StoredForm | None:
        bounds: Bounds = detail
        return (
            StoredMask(piece, pack_mask(piece.flat(), bounds.low, bounds.high), bounds.values)
            if bounds.values is not None
            else None
        )

    def _integers(self, saved: Saved, piece: StoragePiece, there: StoredForm | None, detail: Any) -> StoredForm | None:
        width: torch.dtype = detail
        return None if width.itemsize >= piece.tensor.itemsize or piece.tensor.is_floating_point() else StoredIntegers(piece, width)

    def _nothing(self, saved: Saved, piece: StoragePiece, there: StoredForm | None, detail: Any) -> StoredForm | None:
        return StoredShape(piece)

    def _exact(self, saved: Saved, piece: StoragePiece, there: StoredForm | None, detail: Any) -> StoredForm | None:
        self.left.setdefault(saved.name, saved.reason)
        return None

    def decide(self, saved: Saved, piece: StoragePiece) -> StorageDecision:
        """The format of a slot, by the plan and what limits it."""
        numel = piece.numel
        key = (saved.name, numel, piece.tensor.dtype, saved.use, saved.pin, saved.is_centered)
        decision = self._decided.get(key)
        if decision is None:
            asked = self.plan.find((saved.name,), Role.ACTIVATION)
            dtype = str(piece.tensor.dtype).removeprefix("torch.")
            format, reason = resolve_format(asked, saved.needs, dtype=dtype, numel=numel)
            rounding = asked.resolved_rounding if is_same_level(asked.format, format) else Rounding.NEAREST_EVEN
            overflow = asked.overflow if format is asked.format else None
            decision = StorageDecision(asked.format, format, rounding, overflow, reason, crc32(saved.name.encode()))
            self._decided[key] = decision
        self.decisions[saved.name] = decision
        return decision


Maker = Callable[[Activations, Saved, StoragePiece, StoredForm | None, Any], StoredForm | None]
MAKERS: dict[Use, Maker] = {
    Use.VALUE: Activations._values,
    Use.SIGN: Activations._bits,
    Use.INSIDE: Activations._bits,
    Use.MASK: Activations._bits,
    Use.INDEX: Activations._integers,
    Use.SHAPE: Activations._nothing,
    Use.EXACT: Activations._exact,
}


class Bounds(NamedTuple):
    """One bit for each value: whether low < value < high; `values` are what decoding gives for yes and no, None where no two will do."""

    low: float
    high: float
    values: tuple[float, float] | None


def _form(saved: Saved, tensor: Tensor) -> tuple[Use, Any]:
    """What backward needs of this saved tensor, and what else decides its stored form: part of the key under which forms are shared.

    A storage may have several views, of which each is saved for itself. Whatever depends on values is found for the view alone, and so
    it must stand in the key: two views of one storage may hold {0, 1} and {0, 2}, and one may share the other's bits only if both decode
    to the same two values.
    """
    if saved.use is Use.INSIDE:
        low, high = float(saved.node._saved_min_val), float(saved.node._saved_max_val)
        return Use.INSIDE, Bounds(low, high, _inside_and_outside(low, high, tensor.dtype))
    if saved.use is Use.SIGN or (saved.use is Use.MASK and not tensor.is_floating_point()):
        return saved.use, Bounds(0.0, NO_BOUND, (1.0, 0.0))  # for every view: a sign, and a boolean, is one bit whatever the values
    if saved.use is Use.MASK or (saved.use is Use.VALUE and saved.op == "mul" and not tensor.requires_grad):
        one = _one_beside_zero(tensor)
        if one is not None or saved.use is Use.MASK:
            return Use.MASK, Bounds(0.0, NO_BOUND, (one, 0.0) if one is not None else None)
    # the width follows from a bound that the operation has checked, not from the values of this tensor
    return saved.use, _width(saved, tensor) if saved.use is Use.INDEX else None


def _inside_and_outside(low: float, high: float, dtype: torch.dtype) -> tuple[float, float] | None:
    """A value between two bounds, of which one may be infinite, and one that is not."""
    middle = (
        0.0 if low < 0 < high else (low + high) / 2 if isfinite(low + high) else 2 * high - 1 if isfinite(high) else 2 * low + 1
    )
    rounded = torch.tensor([low, middle, high], dtype=dtype)
    return (middle, high if isfinite(high) else low) if rounded[0] < rounded[1] < rounded[2] else None


def _one_beside_zero(tensor: Tensor) -> float | None:
    """The positive value of a float tensor that has no others but 0: the mask of a dropout on the CPU, or a routing weight.

    None for all other tensors, and on a GPU, where dropout has a boolean mask and reading values would wait for the device. The answer is
    about this view: the caller keys the stored form by it. Negative zeros count as other values, since one bit cannot say them.
    """
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or not tensor.numel():
        return None
    largest = float(tensor.max())
    is_two_valued = largest > 0 and bool(((tensor == 0) | (tensor == largest)).all()) and not bool(torch.signbit(tensor).any())
    return largest if is_two_valued else None


def _width(saved: Saved, tensor: Tensor) -> torch.dtype:
    """The smallest integers that hold an index."""
    return next((dtype for bound, dtype in WIDTHS if saved.bound is not None and saved.bound <= bound), tensor.dtype)


def _keeps_enough(waiting: StoredForm, saved: Saved) -> bool:
    """Whether the values that come back are precise enough for another operation that saved them."""
    packed = (
        waiting.packed
        if isinstance(waiting, StoredValues)
        else waiting.source.packed
        if isinstance(waiting, RecomputedValues)
        else None
    )
    return packed is None or keeps_enough(packed.format, saved.needs)
