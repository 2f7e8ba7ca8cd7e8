"""`footprint(trace, plan)` predicts the bytes that a training step takes under a plan, by arithmetic on its trace.

The lifetimes of all tensors (plan/byte_intervals.py) are summed tick by tick; the peak is the tick with the most bytes. On CUDA the
allocator rounds every size up, and libraries hold workspaces whose size is known only roughly. DEVICES has these numbers, from which the
bounds follow:

    low         the tensors of the step, to the byte, and nothing else
    expected    low with each size rounded up as the allocator does, and the workspace of matrix products
    high        expected with workspaces of convolutions, free memory that the allocator cannot split (a share for each large tensor), and
                the model's output, which the caller may hold while backward runs; of a compiled step also a tenth of the peak, since
                Inductor may allocate other buffers than predicted (decision 028: up to 9 % in twelve measured steps)

`assign` plans with a fourth size, `bound_bytes`, which measured peaks have kept within (decision 034). It adds to expected

    0.5 MiB for each large tensor               a free block is not split where less than 1 MiB would remain, and all of it counts; not for
                                                tensors below 1 MiB, of a multiple of 2 MiB, or that stay from step to step
    a part in 512 of each tensor                of 1 MiB or more that does not stay: checkpointed GPTs, of even sizes, were 0.15 % above
    three operands of a convolution             of the largest one in float32: cuDNN may copy them
    a part in 32 of each tensor                 of compiled steps, predicted within 3 %

With several processes (plan/distribution.py), low leaves out the largest buffer of an all-gather, and high counts a second one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from itertools import accumulate
from math import prod
from typing import Any

from paredown.errors import CalibrationError, PlanError
from paredown.formats.format import Format
from paredown.plan.byte_intervals import (
    BASELINE,
    DTYPE_BYTES,
    Interval,
    SlotStorage,
    host_bytes,
    intervals,
    model_memory,
    part_bytes,
    slot_storages,
)
from paredown.plan.calibration import Calibration, find_calibration
from paredown.plan.checkpointed_trace import modules_of, outermost, step_under
from paredown.plan.distribution import (
    NOTHING_SENT,
    Communication,
    Distribution,
    communication,
    distributed_intervals,
    distribution_notes,
    distribution_of,
    largest_unit_bytes,
)
from paredown.plan.plan import Plan
from paredown.plan.planned_step import planned_step, unhonoured_offload, unhonoured_recomputation
from paredown.plan.presets import PRESETS
from paredown.plan.step_time import StepTime, predict_step
from paredown.plan.tiled_trace import say_tiles
from paredown.plan.trace import Slot, Trace, cached_on_trace
from paredown.roles import Role
from paredown.sizes import parse_bytes, say_bytes, say_bytes_twice
from paredown.tables import Table

MIB = 1 << 20
SEGMENT = 2 * MIB  # memory that the allocator requests from CUDA comes in multiples of this
COMPILED_SLACK = 10  # high bounds of compiled steps add one part in this many
COMPILED_MARGIN = 32  # `bound_bytes` of compiled steps adds one part in this many
EAGER_MARGIN = 512  # `bound_bytes` of eager steps adds one part in this many of tensors that do not stay allocated
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})
CONVOLUTIONS = frozenset({"convolution"})
SHOWN_PRESETS = ("activations8", "activations4", "activations2")
SHOWN_TIERS = ("safe", "half", "lpmm", "lpmm4")
MODEL_ROLES = (Role.WEIGHT, Role.RESIDUE, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)
# roles of tensors that stay allocated from step to step
STAYING = frozenset({Role.WEIGHT, Role.RESIDUE, Role.FROZEN, Role.MOMENT1, Role.MOMENT2, Role.BUFFER, Role.INPUT})
PRODUCTS = (
    "layers that multiply in 8 bits are counted as unmodified ones: their inputs in the plan's format of activations. "
    "Where it saves codes instead, a value takes 8 bits"
)
LEFT_OUT = {
    "cuda": "the CUDA context (about 0.5 GiB), fragmentation, and what other processes hold",
    "cpu": "the interpreter, libraries, fragmentation, and what other processes hold",
}


@dataclass(frozen=True)
class Allocator:
    """How a device's memory allocator and libraries round up and add bytes, so that predicted memory is true."""

    rounding: int  # every size is rounded up to a multiple of this
    matmul_workspace: int  # held by cuBLAS after the first matrix product
    conv_kept: int  # held by cuDNN after the first convolution
    conv_workspace: int  # the most that convolutions may allocate in addition
    unsplit: int  # a free block is not split if less than this would remain: at most this for each large tensor

    def rounded(self, nbytes: Any, **_: Any) -> Any:
        """Return how many bytes the device allocates for a tensor of `nbytes`, a number or an array."""
        return -(-nbytes // self.rounding) * self.rounding

    def bound(self, nbytes: Any, *, comes_and_goes: Any = True, is_compiled: bool = False) -> Any:
        """Return an upper bound of the bytes that the device allocates for a tensor of `nbytes`.

        `assign` keeps budgets by it. `comes_and_goes` says whether the tensor is allocated anew in each step, `is_compiled` whether
        torch.compile compiled the step.
        """
        is_large = (nbytes >= MIB) & comes_and_goes
        is_odd = is_large & (nbytes % SEGMENT != 0)
        share = nbytes // COMPILED_MARGIN if is_compiled else nbytes // EAGER_MARGIN * is_large * (self.unsplit > 0)
        return self.rounded(nbytes) + is_odd * (self.unsplit // 2) + share


DEVICES = {
    # matmul: twice the 32 MiB of cuBLAS on Hopper, as measured for seven networks beyond their tensors (benchmarks/results/footprint.json)
    "cuda": Allocator(rounding=512, matmul_workspace=64 * MIB, conv_kept=5 * MIB, conv_workspace=256 * MIB, unsplit=MIB),
    # conv_workspace: oneDNN allocated 6 MB for a depthwise 7 x 7 convolution
    "cpu": Allocator(rounding=1, matmul_workspace=0, conv_kept=0, conv_workspace=8 * MIB, unsplit=0),
}


@dataclass(frozen=True)
class Fit:
    """The answer of `Footprint.fits`, true if the step fits; `needs` is its peak in bytes as (low, expected, high)."""

    fits: bool
    needs: tuple[int, int, int]
    budget_bytes: int
    left_out: str

    def __bool__(self) -> bool:
        return self.fits

    def __repr__(self) -> str:
        low, expected, high = self.needs
        verdict = "fits" if self.fits else "does not fit"
        tight = ", tightly" if self.fits and high > self.budget_bytes else ""
        span = f"{say_bytes(low)} to {say_bytes(high)}" if low < high else "exactly"
        budget = say_bytes_twice(self.budget_bytes)
        return f"{verdict}{tight}: {say_bytes(expected)} expected ({span}) of {budget}. Not counted: {self.left_out}."


@dataclass(frozen=True, repr=False)
class Footprint:
    """The result of `footprint`: predicted bytes of a step, by role of tensors, by module and at the peak.

    "Stored" are weights, gradients and optimizer state that stay from step to step (`model_bytes` in total), and activations and
    temporaries that stay from forward to backward.
    """

    trace: Trace
    plan: Plan
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    workspace_bytes: int
    peak_tick: int
    by_role: dict[Role, int]
    at_peak: dict[Role, int]
    notes: tuple[str, ...] = ()
    distribution: Distribution | None = None  # of a step that several processes run; all bytes are those of one process
    communication: Communication = NOTHING_SENT
    _kept: tuple[Interval, ...] = field(default=(), compare=False)
    _at_peak: tuple[Interval, ...] = field(default=(), compare=False)
    _held: tuple[Interval, ...] = field(default=(), compare=False)

    @cached_property
    def bound_bytes(self) -> int:
        """Return the expected peak plus a margin for memory that is not predicted; no measured peak was above it."""
        step, allocator = step_under(self.trace, self.plan), DEVICES[self.trace.device]
        flags = {"is_compiled": step.is_compiled}
        held = (i._replace(nbytes=allocator.bound(i.nbytes, comes_and_goes=i.role not in STAYING, **flags)) for i in self._held)
        return peak_tick(held, step.length)[1] + _workspace(step) + workspace_margin(step)

    @property
    def model_bytes(self) -> int:
        """Return the stored bytes of weights, gradients and optimizer state, which do not depend on the batch."""
        return sum(self.by_role.get(role, 0) for role in MODEL_ROLES)

    @cached_property
    def host_bytes(self) -> int:
        """Return the bytes of packed activations that the plan moves to host memory, which no other figure includes."""
        return host_bytes(planned_step(step_under(self.trace, self.plan), self.plan), self.plan)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Return the paths of modules under activation checkpointing, whose forward pass runs twice in a step."""
        return tuple(outermost(modules_of(self.trace), self.plan.checkpointed)) if self.plan.checkpointed else ()

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Return the stored bytes by module path, the most first; `depth` cuts paths to so many parts."""
        sums: Counter[str] = Counter()
        for interval in self._kept:
            parts = interval.module.split(".")
            sums[".".join(parts[:depth]) if depth is not None else interval.module] += interval.nbytes
        return dict(sums.most_common())

    def by_tick(self) -> tuple[list[int], list[int], list[int]]:
        """Return the bytes in memory after each operation, in three lists: forward, backward and the optimizer's step.

        The largest of all these numbers is `peak_bytes`.
        """
        allocator, step = DEVICES[self.trace.device], planned_step(step_under(self.trace, self.plan), self.plan)
        rounded = (i._replace(nbytes=allocator.rounded(i.nbytes)) for i in self._held)
        totals = [nbytes + self.workspace_bytes for nbytes in _bytes_by_tick(rounded, step.length)[: step.length + 1]]
        return totals[: step.backward_at], totals[step.backward_at : step.length], totals[step.length :]

    def places_at_peak(self) -> dict[tuple[str, Role], int]:
        """Return the bytes at the peak by (module, role), the largest first; sums over modules are `at_peak`."""
        sums: Counter[tuple[str, Role]] = Counter()
        for interval in self._at_peak:
            sums[interval.module, interval.role] += interval.nbytes
        return dict(sums.most_common())

    @cached_property
    def step_time(self) -> StepTime | str:
        """Return the predicted time of the step, or a sentence that says why there is no prediction."""
        if self.plan.multiplies:
            return "calibrations have no products in 8 bits."
        if self.distribution is not None:
            return "the time of communication is not measured."
        calibration, reason = find_calibration(self.trace.device)
        return reason if calibration is None else _time_of(self.trace, self.plan, calibration)

    def fits(self, budget: int | str) -> Fit:
        """Return whether the expected peak is within `budget`: bytes, "8GiB", or "60%" of the baseline's peak."""
        whole = self.baseline.peak_bytes if isinstance(budget, str) and "%" in budget else None
        needs = (self.low_bytes, self.peak_bytes, self.high_bytes)
        allowed = parse_bytes(budget, whole=whole)
        return Fit(self.peak_bytes <= allowed, needs, allowed, LEFT_OUT[self.trace.device])

    @cached_property
    def baseline(self) -> Footprint:
        """Return the footprint of the same step without a plan."""
        return self if self.plan.changes_nothing else self._under(BASELINE)

    def _under(self, plan: Plan) -> Footprint:
        return self if plan == self.plan else _footprint(self.trace, plan, self.distribution)

    @property
    def padding_bytes(self) -> int:
        """Return the bytes in `model_bytes` that are padding: rows of zeros that make `fully_shard`'s shards equal."""
        shared = self.distribution
        return 0 if shared is None or shared.strategy != "fsdp2" else self.model_bytes - self._undivided_bytes // shared.world_size

    @property
    def wide_bytes(self) -> int:
        """Return the bytes by which weights are larger because `fully_shard` cannot store them packed."""
        shared = self.distribution
        if shared is None or shared.strategy != "fsdp2":
            return 0
        return (self._undivided_bytes - model_bytes(self.trace, self.plan)) // shared.world_size

    @cached_property
    def _undivided_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer state if one process stored all rows."""
        assert self.distribution is not None
        return _footprint(self.trace, self.plan, replace(self.distribution, world_size=1)).model_bytes

    def __repr__(self) -> str:
        head, (columns, *rows) = self._table()
        lines = Table(columns, rows, right=range(1, len(columns))).lines()
        return "\n".join([*head, *(f"  {line}" for line in lines), *(f"  note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        head, (columns, *rows) = self._table()
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{'<br>'.join(escape(line) for line in head)}</p>{Table(columns, rows).to_html()}{notes}"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        trace = self.trace
        phase = (
            "forward"
            if self.peak_tick < trace.backward_at
            else "backward"
            if self.peak_tick < trace.length
            else "the optimizer's step"
        )
        peak = f"peak {say_bytes(self.peak_bytes)} ({say_bytes(self.low_bytes)} to {say_bytes(self.high_bytes)}), in {phase}"
        roles = [f"{role.value} {say_bytes(n)}" for role, n in self.by_role.items() if n]
        head = [f"Footprint of {trace.model} on {trace.device}, {trace.dtype}: {peak}", f"  stored: {', '.join(roles)}"]
        head += self._shared()
        head += [f"  activation checkpointing: {', '.join(self.recomputed)}"] if self.recomputed else []
        head += [f"  {text}" for text in say_tiles(self.plan.tiles)]
        head += [f"  in host memory: packed activations, {say_bytes(self.host_bytes)}"] if self.host_bytes else []
        head += [f"  model memory: {', '.join(self._tiers())}"] if trace.optimizer else []
        head.append(f"  step time: {'' if isinstance(self.step_time, StepTime) else 'not predicted, '}{self.step_time}")
        plans = {"baseline": BASELINE, **({} if self.plan.changes_nothing else {"this plan": self.plan})}
        plans |= {name: Plan.preset(name) for name in SHOWN_PRESETS if name in PRESETS}
        rows = [["largest slots", *plans]]
        storages = [slot_storages(planned_step(trace, plan), plan) for plan in plans.values()]
        rows += [[slot.name, *(_cell(slot, by_name.get(slot.name)) for by_name in storages)] for slot in trace.largest]
        peaks = (self._under(plan).peak_bytes for plan in plans.values())
        return head, [*rows, ["peak of the step", *(say_bytes(peak) for peak in peaks)]]

    def _tiers(self) -> list[str]:
        """Return texts such as "half 1.2 GiB": the bytes of weights, gradients and optimizer state under a plan.

        The plans are the baseline, this plan, and each tier, a preset for weights, gradients and optimizer state.
        """
        plans = {"baseline": BASELINE, "this plan": self.plan, **{name: Plan.preset(name) for name in SHOWN_TIERS}}
        sizes = {name: self._model_bytes(plan) for name, plan in plans.items()}
        if sizes["this plan"] == sizes["baseline"]:
            del sizes["this plan"]
        return [f"{name} {say_bytes(size)}" for name, size in sizes.items()]

    def _model_bytes(self, plan: Plan) -> int:
        return model_bytes(self.trace, plan) if self.distribution is None else self._under(plan).model_bytes

    def _shared(self) -> list[str]:
        """Return the printed lines on how several processes share the model; [] for one process."""
        shared, sent = self.distribution, self.communication
        if shared is None:
            return []
        parts = {"all-gather": sent.all_gather, "reduce-scatter": sent.reduce_scatter, "all-reduce": sent.all_reduce}
        parts["all-to-all"] = sent.all_to_all
        texts = [f"{name} {say_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes]
        apart = {"padding": self.padding_bytes, "weights that stay plain": self.wide_bytes}
        lines = [f"  {name}, part of what is stored: {say_bytes(nbytes)}" for name, nbytes in apart.items() if nbytes > 0]
        return [
            f"  each of {shared.world_size} processes ({shared.strategy}) sends in a step: {', '.join(texts) or 'nothing'}",
            *lines,
        ]


def _time_of(trace: Trace, plan: Plan, calibration: Calibration) -> StepTime | str:
    try:
        return predict_step(trace, plan, calibration=calibration)
    except CalibrationError as error:
        return str(error)


def footprint(
    trace: Trace,
    plan: Plan | None = None,
    *,
    world_size: int = 1,
    strategy: str | None = None,
    units: Sequence[str] | None = None,
    reduction: Format | str | None = None,
) -> Footprint:
    """Return the predicted bytes of the traced step under `plan`; if `plan` is None, of the baseline.

    With `world_size` processes and a `strategy` ("ddp", "fsdp2"), the bytes are those of one process, and `communication` has the bytes
    that it sends; the traced batch is that of one process. `units` are the modules that fully_shard wraps beside the model, with wildcards.
    `reduction` is the format in which gradients are sent between processes, with `paredown.optim.reduce_in_8_bits`.
    """
    if not isinstance(trace, Trace) or not isinstance(plan, Plan | None):
        types = f"{type(trace).__name__}, {type(plan).__name__}"
        raise PlanError(
            f"footprint takes a Trace and a Plan, in this order, not {types}: footprint(trace_step(model, batch), plan)."
        )
    (plan or BASELINE).check_stored()
    return _footprint(trace, plan or BASELINE, distribution_of(trace, strategy, world_size, units, reduction))


def _footprint(trace: Trace, plan: Plan, shared: Distribution | None) -> Footprint:
    allocator, given, trace = DEVICES[trace.device], trace, step_under(trace, plan)
    checkpointed = planned_step(trace, plan)
    missing = plan.check(_slots_of(given, *([] if checkpointed is trace else [checkpointed])))
    held = intervals(checkpointed, plan) if shared is None else distributed_intervals(checkpointed, plan, shared)
    rounded = [i._replace(nbytes=allocator.rounded(i.nbytes)) for i in held]
    tick, peak = peak_tick(rounded, trace.length)
    exact = peak_tick(held, trace.length)[1]
    has_conv = any(output.op in CONVOLUTIONS for output in trace.outputs)
    workspace = _workspace(trace)
    at_peak = [i for i in rounded if i.birth <= tick <= i.death]
    large = sum(i.nbytes >= MIB for i in at_peak)
    library_slack = max(allocator.conv_workspace * has_conv, workspace_margin(trace))
    slack = large * allocator.unsplit + library_slack + workspace + trace.returned_bytes
    slack += peak // COMPILED_SLACK if trace.is_compiled else 0
    buffer = largest_unit_bytes(checkpointed, plan, shared) if shared is not None else 0
    kept = tuple(i for i in held if _is_kept(i, trace))
    notes = [*(distribution_notes(trace, shared) if shared is not None else ()), *unhonoured_recomputation(trace, plan)]
    notes += unhonoured_offload(checkpointed, plan)
    notes += [PRODUCTS] if plan.multiplies else []
    return Footprint(
        trace=given,
        plan=plan,
        peak_bytes=peak + workspace,
        low_bytes=exact - buffer,
        high_bytes=peak + workspace + slack + buffer,
        workspace_bytes=workspace,
        peak_tick=tick,
        by_role=_sums(kept),
        at_peak=_sums(at_peak),
        notes=(*notes, *checkpointed.notes, *(f"the plan names {key}, which is no slot of this step" for key in missing)),
        distribution=shared,
        communication=communication(checkpointed, plan, shared) if shared is not None else NOTHING_SENT,
        _kept=kept,
        _at_peak=tuple(at_peak),
        _held=tuple(held),
    )


def _slots_of(trace: Trace, *others: Trace) -> list[tuple[tuple[str, ...], Role]]:
    """Return (names, role) of every tensor that a rule of a plan may match in these traces of a step."""
    steps = [trace, *([trace.unmodified] if trace.unmodified is not None else []), *others]
    names = [(slot.names, slot.role) for step in steps for slot in step.slots]
    names += [(slot.names, Role.RESIDUE) for slot in trace.of(Role.WEIGHT)]  # slots that exist only under a plan
    return [*names, *((slot.names, Role.FROZEN) for slot in trace.of(Role.WEIGHT) if slot.is_frozen)]


def _workspace(trace: Trace) -> int:
    allocator, ops = DEVICES[trace.device], {output.op for output in trace.outputs}
    return allocator.matmul_workspace * bool(ops & MATMULS) + allocator.conv_kept * bool(ops & CONVOLUTIONS)


@cached_on_trace
def workspace_margin(trace: Trace) -> int:
    """Return the bytes that cuDNN may need for copies of a float32 convolution's operands, above the expected peak."""
    calls = (one.arguments for one in trace.operations if one.op == CONVOLUTION_BACKWARD and one.arguments)
    return max(map(_copied_bytes, calls), default=0) if trace.device == "cuda" else 0


def _copied_bytes(arguments: str) -> int:
    """Return the bytes of a convolution's operands in backward, which cuDNN may copy if they are float32; else 0.

    `arguments` is the JSON of the call's arguments.
    """
    (_, grad, _), (dtype, x, _) = (value["t"] for value in json.loads(arguments)[0][:2])
    return DTYPE_BYTES[dtype] * (prod(grad) + 2 * prod(x)) if dtype == "float32" else 0


def library_bytes(trace: Trace) -> int:
    """Return the bytes of cuBLAS and cuDNN workspaces that are part of the expected peak."""
    return _workspace(step_under(trace, BASELINE))


def library_bound(trace: Trace) -> int:
    """Return the bytes of cuBLAS and cuDNN workspaces that are part of `Footprint.bound_bytes`."""
    return library_bytes(trace) + workspace_margin(step_under(trace, BASELINE))


def peak_of(trace: Trace, plan: Plan) -> int:
    """Return the expected peak in bytes under `plan`; formats that can only be simulated count as if stored."""
    return _footprint(trace, plan, None).peak_bytes


def bound_of(trace: Trace, plan: Plan) -> int:
    """Return `Footprint.bound_bytes` of the step under `plan`, a bound that no measured peak exceeded."""
    return footprint(trace, plan).bound_bytes


def model_bytes(trace: Trace, plan: Plan) -> int:
    """Return the bytes of weights, gradients and optimizer state that stay from step to step under `plan`."""
    return sum(i.nbytes for i in model_memory(trace, plan) if i.role in MODEL_ROLES and _is_kept(i, trace))


def peak_tick(held: Iterable[Interval], length: int) -> tuple[int, int]:
    """Return the tick at which the intervals `held` take most bytes, and these bytes; `length` is the step's last tick.

    >>> peak_tick([Interval(Role.INPUT, "", 0, 2, 10), Interval(Role.INPUT, "", 2, 3, 5), Interval(Role.INPUT, "", 3, 4, 9)], 4)
    (2, 15)
    """
    totals = _bytes_by_tick(held, length)
    peak = max(totals)
    return totals.index(peak), peak


def _bytes_by_tick(held: Iterable[Interval], length: int) -> list[int]:
    change = [0] * (length + 3)
    for interval in held:
        change[interval.birth] += interval.nbytes
        change[interval.death + 1] -= interval.nbytes
    return list(accumulate(change))


def _cell(slot: Slot, storage: SlotStorage | None) -> str:
    return "checkpointed" if storage is None else say_bytes(slot_bytes(slot, storage))


def slot_bytes(slot: Slot, storage: SlotStorage) -> int:
    """Return the bytes that a saved tensor takes if it is stored as `storage` says."""
    return sum(part_bytes(slot, part, storage) for part in slot.parts) if storage.packs else slot.nbytes


def _is_kept(interval: Interval, trace: Trace) -> bool:
    """Return whether the bytes of `interval` outlive the phase (forward, backward) in which they are allocated."""
    if interval.role in (Role.ACTIVATION, Role.TEMPORARY):
        return interval.birth <= trace.backward_at <= interval.death
    return interval.role is not Role.GRADIENT or interval.death >= trace.length


def _sums(held: Iterable[Interval]) -> dict[Role, int]:
    sums: Counter[Role] = Counter()
    for interval in held:
        sums[interval.role] += interval.nbytes
    return {role: sums[role] for role in Role if sums[role]}
