"""`verify(model, batch, plan)` compares gradients under a plan with those of the baseline, parameter by parameter.

    the unmodified step, twice     the baseline; if its two results differ, the tolerance of both plans is widened by that difference; tiles
                                   widen it by that of sums in another order
    the exact plan                 the plan with every format replaced by fp32: each slot is stored, viewed, shared and decoded as under the
                                   plan, without quantization error. It must give the gradients of the baseline bit for bit
    the plan                       must be within a tolerance that follows from the formats of its slots. Where weights are packed, it is
                                   compared with gradients of the weights before packing, and the first two with the rounded weights
    products in 8 bits             are part of all runs but the one that the plan is compared with, whose products are the model's. The
                                   tolerance counts the rounding of input, weight and gradient of each layer
    packed weights                 their values must be within SAFETY times the error that their formats explain

Each run starts with the same random state and the same buffers. The error of a parameter is |g - baseline| / (s sqrt(numel)), where s is
the root mean square of its baseline gradient, or that of all parameters of its module where that is larger: the bias of a convolution
before a batch norm has a gradient that is zero but for rounding.

The tolerance is SAFETY sqrt(sum over slots of e^2) with e of `expected_error`, since errors of slots are independent and their squares add
up. The largest error of a parameter was 0.2 to 2.2 sqrt(sum e^2) on eleven networks of `paredown.models`, in int8 and int4. With many
slots in few bits it exceeds 1: `Verification.verdict` then says that it is too coarse to be useful.

Rounded weights, and rounded operands of products, change the forward pass too: which values pass a ReLU or win in a pooling window, and
with them the gradient, by far more than their own size. The largest error of a gradient where weights have random errors of that size is
measured, and SAFETY_OF_RANDOM times it is one more term of the sum.

If a plan exceeds its tolerance, the slots at fault are found by runs that store only some slots: halves, then halves of halves.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import hypot, inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paredown.autograd.module_watch import is_wrapped_by_compile, unwrapped
from paredown.check.guard_steps import count_examples, first_examples
from paredown.check.probe import restored_state
from paredown.check.probe_passes import nodes_behind
from paredown.check.verification import EXACT, OFF, PLAN, Compared, Fault, FaultSearch, Verification, expected_error
from paredown.errors import ApplyError
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.plan.plan import Plan
from paredown.plan.selectors import Selector
from paredown.predict.fake.fake_step import Arguments, loss_of, signature_errors
from paredown.roles import Role, weight_role
from paredown.session.eager.recomputed_values import RecomputedValues
from paredown.session.eager.stored_tensors import StoredForm, StoredIntegers, StoredMask, StoredShape, StoredValues
from paredown.session.open_sessions import any_session_of
from paredown.session.session import Session, start_session

SAFETY = 3.0
NOISE = 8.0  # the tolerance includes this many times the difference of two unmodified steps
ORDER_OF_SUMS = 2.0  # tiles sum gradients in another order, which counts as a difference of this many times the dtype's precision
NUM_DRAWS = 2  # draws of random errors of weights
# rounded weights changed gradients by 0.6 to 1.0 times as much as random errors did: five networks, four formats, three seeds
SAFETY_OF_RANDOM = 2.0
MIN_SCALE = 1e-3  # errors are relative to at least this share of the root mean square of the model's gradient
MAX_RUNS = 96  # most runs that store some of the slots, in total
MAX_FAULTS = 8
STORED = (Role.ACTIVATION, Role.WEIGHT, Role.FROZEN)  # roles of rules that a forward and backward pass depend on
LOSSLESS: dict[type[StoredForm], str] = {
    StoredMask: "one exact bit a value",
    StoredIntegers: "exact integers",
    StoredShape: "its shape alone",
}
ROUNDED_WEIGHTS = (
    "weights were packed before verify was called: gradients are compared with those of the rounded weights, and the rounding errors of "
    "weights with those that their formats explain"
)
PRODUCTS = "products in 8 bits: gradients are compared with those of the model without them, and the exact plan with the step that has them"
RANDOM = "by which random errors of weights, as large as those of their formats, change the gradients of the unmodified model"
ZERO = "all gradients of this batch are zero without the plan, so that equal ones show nothing: use another batch"
NOTHING = "nothing of this step is stored packed under the plan: the gradients are those of the unmodified model for that reason"
OUTSIDE = "packed weights, products in 8 bits, or modules under activation checkpointing"
REENTRANT = "CheckpointFunctionBackward"  # torch.autograd.grad silently gives no gradients inside such a checkpoint
Step = Callable[[Any], Tensor]
Gradients = list[Tensor | None]


def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    autocast: torch.dtype | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Verification:
    """Return how far gradients under `plan` are from those of the unmodified model, and the saved tensors at fault.

    `batch`, `loss` and `autocast` are those of `trace_step`; an autocast context around the call applies too. If the model has a session,
    leave `plan` out: the session's plan is verified. `tolerance` replaces the largest relative error that follows from the formats. `seed`
    is that of stochastic rounding. The model's weights, gradients, buffers, hooks, mode and random states are afterwards the same as
    before.
    """

    def step(part: Any) -> Tensor:
        arguments = Arguments.of(dict(part) if isinstance(part, Mapping) else part, loss)
        device = next((p.device.type for p in model.parameters()), "cpu")
        with torch.autocast(device, autocast) if autocast is not None else nullcontext():
            with signature_errors(unwrapped(model), arguments, "verify"):
                output = unwrapped(model)(*arguments.args, **arguments.keywords)
            return loss(output, *arguments.targets) if loss is not None else loss_of(output)

    return verify_step(model, batch, step, plan, tolerance=tolerance, seed=seed)


def verify_step(
    model: nn.Module, batch: Any, step: Step, plan: Plan | None = None, *, tolerance: float | None = None, seed: int = 0
) -> Verification:
    """Return the result of `verify` for a loss that `step(batch)` computes, such as a library's training step.

    If the unmodified step runs out of memory, the first half of the batch is used, then the first quarter, and so on.
    """
    session = _checked(model, plan, tolerance)
    count = whole = count_examples(batch)
    notes = {"compiled": "the model inside torch.compile was run without compiling it"} if is_wrapped_by_compile(model) else {}
    while True:
        try:
            with _session(session, plan, unwrapped(model), seed) as opened:
                result = VerificationRuns(opened[0], unwrapped(model), partial(step, batch), opened[1]).verification(tolerance)
            break
        except torch.OutOfMemoryError:
            if count < 2:
                raise ApplyError(
                    f"the unmodified step, which gradients are compared with, runs out of memory with one of {whole} examples. "
                    "Verify a smaller model of the same layers, or verify on the CPU."
                ) from None
        count //= 2
        batch = first_examples(batch, count)
        notes["memory"] = f"the unmodified step runs out of memory with {whole} examples: {count} were compared"
    return replace(result, notes=(*notes.values(), *result.notes))


def _checked(model: nn.Module, plan: Plan | None, tolerance: float | None) -> Session | None:
    if not isinstance(model, nn.Module) or not (plan is None or isinstance(plan, Plan)):
        types = f"{type(model).__name__} and {type(plan).__name__}"
        raise ApplyError(
            f"verify takes a model, a batch and a Plan, not {types}: verify(model, batch, Plan.preset('activations8'))."
        )
    if tolerance is not None and not 0 <= tolerance < inf:
        raise ApplyError(f"tolerance is {tolerance!r}; it must be a relative error of gradients, such as 0.05, or None.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ApplyError(
            "no parameter of the model requires a gradient: there is nothing to compare. Call requires_grad_() on some."
        )
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ApplyError(
            "the model is sharded (fully_shard), and torch.autograd.grad returns no gradients of shards: verify it before it is sharded."
        )
    session = any_session_of(unwrapped(model))
    if session is not None and not isinstance(session, Session):
        raise ApplyError(
            "the model has a session in simulate mode, which rounds the forward pass too: its gradients are those of another function. "
            "Close it, and verify a plan for store mode."
        )
    if session is None and plan is None:
        raise ApplyError("verify needs a plan where the model has no session: verify(model, batch, Plan.preset('activations8')).")
    if session is not None and plan is not None and plan.diff(session.plan):
        raise ApplyError(
            f"the model has a session with another plan ({session!r}): leave the plan out to verify that one, or call its close() first."
        )
    return session


@contextmanager
def _session(
    opened: Session | None, plan: Plan | None, model: nn.Module, seed: int
) -> Generator[tuple[Session, Mapping[str, Tensor]]]:
    """Return a context with a session of the model, `opened` or else a new one, and copies of weights to be packed."""
    if opened is not None:
        yield opened, {}
        return
    assert plan is not None
    rules = tuple(rule for rule in plan.rules if Selector.parse(rule[0]).role in (None, *STORED))  # others are for optimizers
    packed = {
        name: p
        for name, p in model.named_parameters()
        if plan.find((name,), weight_role(is_frozen=not p.requires_grad)).format is not None
    }
    copies = {name: p.detach().clone() for name, p in packed.items()}
    try:
        with start_session(replace(plan, rules=rules), model, seed=seed) as session:
            yield session, copies
    finally:
        for name, copy in copies.items():
            packed[name].data.copy_(copy)


class VerificationRuns:
    """The runs of one training step that `verify` compares: unmodified, and with saved tensors stored packed."""

    def __init__(
        self, session: Session, model: nn.Module, step: Callable[[], Tensor], originals: Mapping[str, Tensor] | None = None
    ) -> None:
        """Prepare the runs; `originals` has the values of packed weights before they were packed, if known."""
        self.session, self.model, self.step = session, model, step
        self.originals = {name: values for name, values in (originals or {}).items() if name in session.runs.packed_weights}
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.baseline: Gradients = []  # with the decoded values of packed weights: those of the exact plan, bit for bit
        # with the weights before packing and without products in 8 bits; None where there is neither, or the weights are gone
        self.original: Gradients | None = None
        self.products = session.products if session.products.elements else None
        self.scales: list[float] = []
        self.formats: dict[str, str] = {}  # stored slot -> its format under the plan
        self.errors: dict[str, float] = {}  # stored slot -> the expected relative error of its values

    def verification(self, tolerance: float | None) -> Verification:
        """Return the result of three runs: the unmodified step, all formats replaced by fp32, and the plan.

        `tolerance` is the largest allowed relative error; None: what the formats explain.
        """
        with self.session.runs.restored() as self._rewind:
            self._measure_baseline()
            noise = max(self._distances(self._unmodified(), is_exact=True), default=0.0)
            exact = self._distances(self.stored(is_exact=True), is_exact=True)
            errors = self._distances(self.stored(records_formats=True))
            moved = self._error_of_random_weights()
            expected = sqrt(sum(error * error for error in (*self.errors.values(), *self._product_errors().values())))
            bound = hypot(SAFETY * expected, SAFETY_OF_RANDOM * moved)
            eps = ORDER_OF_SUMS * max(torch.finfo(p.dtype).eps for p in self.parameters) if self.session.plan.tiles else 0.0
            widened = NOISE * max(noise, eps)
            limits = {True: widened, False: (bound if tolerance is None else tolerance) + widened}
            rows = [Compared.of(*row, limits[True], limits[False]) for row in zip(self.names, exact, errors, strict=True)]
            worst = {True: max(exact, default=0.0), False: max(errors, default=0.0)}
            faults, notes = self._faults([is_exact for is_exact in (True, False) if worst[is_exact] > limits[is_exact]], limits)
        rows = [row for row, g in zip(rows, self.baseline, strict=True) if g is not None or row.error or row.exact_error]
        off = self._weights_off()
        notes += [ROUNDED_WEIGHTS] if self.session.runs.packed_weights and not self.originals else []
        notes += [PRODUCTS] if self.products is not None else []
        plan, packed = self.session.plan, self.session.runs.packed_weights
        notes += [] if any(self.scales) else [ZERO]
        notes += [NOTHING] if plan.rules and not (self.formats or packed or self.products or plan.recompute) else []
        return Verification(
            type(self.model).__name__,
            rows=(*rows, *(Compared(fault.slot, 0.0, fault.error, OFF) for fault in off)),
            at_fault=(*off, *faults),
            exact_tolerance=limits[True],
            tolerance=limits[False],
            reason=self._reason(expected, moved, noise, tolerance),
            notes=tuple(notes),
        )

    # --- runs -----------------------------------------------------------------------------------------------------------

    def stored(self, names: Collection[str] | None = None, *, is_exact: bool = False, records_formats: bool = False) -> Gradients:
        """Return the gradients with only the saved tensors `names` stored as the plan says; None: all of them.

        With `is_exact`, they are stored in float32. With `records_formats`, their formats and expected errors are recorded.
        """
        observer = (lambda saved, _, form: self._record_format(saved.name, form)) if records_formats else None
        with self.session.runs.storing(names, is_exact=is_exact, on_packed=observer):
            return self._gradients()

    def _error_of_random_weights(self) -> float:
        """Return the largest gradient error if weights have random errors as large as rounding causes."""
        weights = self.session.runs.packed_weights
        errors = {name: expected_error(weights[name].format, Rounding.NEAREST_EVEN) for name in self.originals}
        seeds = iter(range(NUM_DRAWS * sum(1 for _ in self.model.parameters())))
        for slot, error in self._product_errors().items():
            name = f"{slot.removeprefix('product=')}.weight"
            errors[name] = hypot(errors.get(name, 0.0), sqrt(2 / 3) * error)
        distances = [0.0]

        def disturbed(name: str, p: Tensor) -> Tensor:
            values = self.originals.get(name, p.detach()).float()
            generator = torch.Generator(values.device).manual_seed(next(seeds))
            noise = torch.randn(values.shape, generator=generator, device=values.device)
            return values + errors[name] * values.square().mean().sqrt() * noise

        for _ in range(NUM_DRAWS if errors else 0):
            distances += self._distances(self._unmodified(disturbed, errors))
        return max(distances)

    def _product_errors(self) -> dict[str, float]:
        """Return the expected relative error of each layer that multiplies 8-bit codes, by rounding its operands."""
        multiplied = self.products.multiplied if self.products is not None else {}
        formats = {path: Format.parse(f"{element}/64@fp32") for path, element in multiplied.items()}
        return {f"product={path}": sqrt(3) * expected_error(format, Rounding.NEAREST_EVEN) for path, format in formats.items()}

    def _weights_off(self) -> list[Fault]:
        """Return a `Fault` for each packed weight that differs from its original by more than its format explains."""
        found: list[Fault] = []
        for name, weight in self.session.runs.packed_weights.items():
            error = weight.rounding_error
            if error is not None and not error <= SAFETY * expected_error(weight.format, Rounding.NEAREST_EVEN):
                found.append(Fault(f"weight={name}", str(weight.format), error, error, name, PLAN))
        return found

    def _unmodified(self, values: Callable[[str, Tensor], Tensor] | None = None, names: Collection[str] = ()) -> Gradients:
        """Return the gradients without stored tensors; `values(name, parameter)` replaces the weights `names`.

        Products in 8 bits are left out only if `values` is given.
        """
        products = self.products.paused() if values is not None and self.products is not None else nullcontext()
        with self.session.runs.unmodified(), products, self._having(values, names) if values is not None else nullcontext():
            return self._gradients()

    @contextmanager
    def _having(self, values: Callable[[str, Tensor], Tensor], names: Collection[str]) -> Generator[None]:
        parameters = {name: p for name, p in self.model.named_parameters() if name in names}
        decoded = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            for name, p in parameters.items():
                p.data.copy_(values(name, p))
            yield
        finally:
            for name, p in parameters.items():
                p.data.copy_(decoded[name])

    def _gradients(self) -> Gradients:
        self._rewind()  # the same random bits in every run
        torch.clear_autocast_cache()
        with restored_state(self.model), _python_random_state(), torch.enable_grad():
            loss = self.step()
            if not self.baseline and any(node.name() == REENTRANT for node in nodes_behind(loss)):
                raise ApplyError(
                    "the model uses torch.utils.checkpoint with use_reentrant=True, which computes gradients in backward() only, not in "
                    "torch.autograd.grad. Set use_reentrant=False."
                )
            gradients: Gradients = list(torch.autograd.grad(loss, self.parameters, allow_unused=True))  # None where unused
        return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]

    def _record_format(self, name: str, form: StoredForm) -> None:
        decision = self.session.runs.decision_of(name)
        if isinstance(form, StoredValues | RecomputedValues) and decision is not None and decision.format is not None:
            self.formats[name] = str(decision.format)
            self.errors[name] = expected_error(decision.format, decision.rounding)
        else:
            self.formats.setdefault(name, LOSSLESS.get(type(form), type(form).__name__))

    # --- distances ------------------------------------------------------------------------------------------------------

    def _measure_baseline(self) -> None:
        self.baseline = self._unmodified()
        is_other = self.originals or self.products is not None
        self.original = self._unmodified(lambda name, _: self.originals[name], self.originals) if is_other else None
        norms = [0.0 if g is None else _norm(g) for g in self.original or self.baseline]
        if not all(map(isfinite, norms)):
            raise ApplyError(
                "the gradients of this batch are not finite without the plan: there is nothing to compare with. Use another batch."
            )
        sizes = [p.numel() for p in self.parameters]
        modules = [name.rpartition(".")[0] for name in self.names]
        sums: dict[str, tuple[float, int]] = {}
        for module, norm, size in zip(modules, norms, sizes, strict=True):
            energy, count = sums.get(module, (0.0, 0))
            sums[module] = energy + norm * norm, count + size
        least = MIN_SCALE * sqrt(sum(energy for energy, _ in sums.values()) / max(sum(sizes), 1))
        self.scales = [
            sqrt(size) * max(norm / sqrt(max(size, 1)), sqrt(sums[module][0] / max(sums[module][1], 1)), least)
            for module, norm, size in zip(modules, norms, sizes, strict=True)
        ]

    def _distances(self, gradients: Gradients, *, is_exact: bool = False) -> list[float]:
        """Return the relative error of each gradient against the baseline; it is 0 for equal bits.

        With `is_exact`, the baseline is the step with rounded weights and products in 8 bits, as under the plan; otherwise the step with
        neither of them.
        """
        baseline = self.baseline if is_exact or self.original is None else self.original
        return [_distance(g, base, scale) for g, base, scale in zip(gradients, baseline, self.scales, strict=True)]

    # --- slots at fault -------------------------------------------------------------------------------------------------

    def _faults(self, off: Iterable[bool], limits: Mapping[bool, float]) -> tuple[list[Fault], list[str]]:
        """Return the saved tensors whose storage makes gradients wrong, and notes for the user.

        `off` lists the plans whose gradients exceed their tolerance in `limits`: True stands for the plan with all formats replaced by
        fp32, False for the plan itself. Tensors that are wrong under the first are left out of the search under the second.
        """
        faults, notes, runs = list[Fault](), list[str](), FaultSearch(MAX_RUNS)
        for is_exact in off:
            rest = [slot for slot in self.formats if slot not in {fault.slot for fault in faults}]
            groups, is_outside = runs.minimal_groups(rest, self._test(is_exact=is_exact, limit=limits[is_exact]))
            faults += self._group([], is_exact=is_exact) if is_outside else []
            for group in groups:
                faults += self._group(group, is_exact=is_exact)
                if len(group) > 1:
                    first = ", ".join(group[:3]) + ", ..." * (len(group) > 3)
                    notes.append(f"{len(group)} slots are off together, and no fewer of them: {first}")
        if runs.is_spent:
            notes.append(f"the search for the slots at fault ended after {MAX_RUNS} steps: there may be fewer, or others")
        return faults, notes

    def _test(self, *, is_exact: bool, limit: float) -> Callable[[Sequence[str]], bool]:
        return lambda names: max(self._distances(self.stored(names, is_exact=is_exact), is_exact=is_exact), default=0.0) > limit

    def _group(self, group: Sequence[str], *, is_exact: bool) -> list[Fault]:
        """Return a `Fault` for each saved tensor of `group`, a set that makes gradients wrong.

        If the set is empty, gradients are wrong with no tensor stored, and the only `Fault` says so.
        """
        errors = self._distances(self.stored(group, is_exact=is_exact), is_exact=is_exact)
        error, parameter = max(zip(errors, self.names, strict=True))
        under = EXACT if is_exact else PLAN
        if len(group) < 2:
            slot = group[0] if group else OUTSIDE
            return [Fault(slot, self.formats.get(slot, ""), error, error, parameter, under)]
        alone = {
            slot: max(self._distances(self.stored([slot], is_exact=is_exact), is_exact=is_exact))
            for slot in group[: 4 * MAX_FAULTS]
        }
        worst = sorted(alone, key=lambda slot: -alone[slot])[:MAX_FAULTS]
        return [Fault(slot, self.formats[slot], error, alone[slot], parameter, under) for slot in worst]

    def _reason(self, expected: float, moved: float, noise: float, tolerance: float | None) -> str:
        if tolerance is not None:
            text = f"tolerance={tolerance:g} was given"
        elif not expected and not moved:
            text = "no slot has a format with quantization error, so that the plan is exact too"
        else:
            parts = [self._bound_of_slots(expected)] if expected else []
            parts += [f"{SAFETY_OF_RANDOM:g} x {moved:.2g}, {RANDOM}"] if moved else []
            text = "the bound of " + ", and ".join(parts)
        text += "; tiles sum gradients in another order" if self.session.plan.tiles else ""
        return (
            text
            if not noise
            else f"{text}; the unmodified model differs from itself by {noise:.2g}, of which {NOISE:g} x are added"
        )

    def _bound_of_slots(self, expected: float) -> str:
        errors = {**self.errors, **self._product_errors()}
        coarsest = max(errors, key=lambda name: errors[name])
        format = self.formats.get(coarsest, "products in 8 bits")
        formats = f"{format} and finer formats" if len(set(errors.values())) > 1 else format
        slots = f"{len(errors)} slot{'s' * (len(errors) != 1)}"
        return (
            f"{formats} over {slots}, {SAFETY:g} x {expected:.2g}, the root of the sum of squared errors that are expected of them, "
            f"the largest {errors[coarsest]:.2g}"
        )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _distance(gradient: Tensor | None, baseline: Tensor | None, scale: float) -> float:
    if gradient is None or baseline is None:
        return 0.0 if gradient is baseline else inf
    if torch.equal(gradient, baseline):
        return 0.0
    difference = _norm(gradient - baseline)
    return difference / scale if isfinite(difference) and scale > 0 else inf


@contextmanager
def _python_random_state() -> Generator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
