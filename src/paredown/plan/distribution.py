"""Predicts memory and traffic of one of several processes that train a model: DistributedDataParallel (`ddp`), `fully_shard` (`fsdp2`).

With W processes, a parameter of R rows (dimension 0) and row bytes b in its format, and gradients of g bytes a row:

    fsdp2   stored by each process   ceil(R / W) rows of weight, gradient and optimizer state; rows beyond R are padding
            gathered                 a unit (a module under `fully_shard`) is whole while it runs, the model's own parameters all the time
            sent by each process     (W - 1) ceil(R / W) b for each all-gather: one in forward, one in backward for units that reshard
                                     (W - 1) ceil(R / W) g for the reduce-scatter
    ddp     stored by each process   everything, and a bucket of g bytes for each row of a gradient; gradients are not packed
            sent by each process     2 (W - 1) / W of R g for the all-reduce

Sent bytes are those of ring algorithms, which are the least that these operations need. A step is one forward and one backward pass.
Blocks lie in one row, so that the codes of a row do not depend on W. Latency and copies inside of NCCL are left out.

>>> shard_bytes((10, 512), None, 4, itemsize=4), shard_bytes((10, 512), Format.parse("int8/64@bf16"), 4)
(6144, 1584)
>>> Distribution("fsdp2", 4).gathered_bytes(1584)
4752
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from paredown.errors import PlanError
from paredown.formats.catalog import find_format, is_small
from paredown.formats.format import Format
from paredown.plan.byte_intervals import (
    FLOAT32_BYTES,
    Interval,
    ParameterFormats,
    activation_intervals,
    fixed_intervals,
    model_memory,
    parameter_of,
    resolve_parameter_formats,
    slot_storages,
)
from paredown.plan.checkpointed_trace import is_inside, outermost, with_parents
from paredown.plan.plan import Plan
from paredown.plan.trace import Slot, Trace
from paredown.roles import Role
from paredown.sizes import FLOAT_BYTES, say_bytes

STRATEGIES = ("ddp", "fsdp2")
ROOT = ""  # the unit of parameters that are in no other unit
BUCKETS = "DistributedDataParallel"  # the module of its buckets
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # of DistributedDataParallel, by default
BUCKET_NOTE = (
    "DistributedDataParallel stores gradients in buckets beside p.grad: {}; gradient_as_bucket_view=True makes p.grad a view of them and "
    "saves {}. Its gradients are not packed; fully_shard over a mesh of shape (processes, 1) packs them"
)
UNITS_NOTE = "assumes fully_shard on {}; all other parameters belong to the root module and stay gathered for the whole step"


@dataclass(frozen=True)
class Communication:
    """The bytes that one process sends to others in one step: a field for each kind of collective operation."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    all_to_all: int = 0  # of reductions in 8 bits

    @property
    def total(self) -> int:
        """Return the bytes that one process sends in one step, over all collective operations."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all


NOTHING_SENT = Communication()


@dataclass(frozen=True)
class Distribution:
    """The settings of training with several processes, from which a footprint of one process is computed.

    `strategy` is "ddp" or "fsdp2". `units` are the modules that `fully_shard` wraps beside the model, and `reduction` is the format in
    which gradients are sent.
    """

    strategy: str
    world_size: int
    units: tuple[str, ...] = ()
    reduction: Format | None = None  # of gradients between processes (`paredown.optim.reduce_in_8_bits`); None: their dtype

    def gathered_bytes(self, shard: int) -> int:
        """Return the bytes that one process sends in an all-gather in which each process contributes `shard` bytes."""
        return (self.world_size - 1) * shard

    def all_reduced_bytes(self, nbytes: int) -> int:
        """Return the bytes that one process sends in an all-reduce of `nbytes` bytes."""
        return 2 * (self.world_size - 1) * nbytes // self.world_size

    def scratch_bytes(self, chunk: int) -> int:
        """Return the temporary bytes of a low-bit reduction of gradients, if each process sums `chunk` values.

        They hold codes sent and received, decoded values and their sum.
        """
        return 0 if self.reduction is None else 2 * self.world_size * self.reduction.nbytes((1, chunk)) + 2 * FLOAT32_BYTES * chunk

    def unit_of(self, module: str) -> str:
        """Return the path of the module under `fully_shard` that contains `module`; "" if there is none."""
        return next((unit for unit in self.units if is_inside(module, unit)), ROOT)


def distribution_of(
    trace: Trace,
    strategy: str | None,
    world_size: int,
    units: Iterable[str] | None = None,
    reduction: Format | str | None = None,
) -> Distribution | None:
    """Return the checked settings of training with several processes; None if `strategy` is None.

    The arguments are those of `footprint`. If `units` is None, fully_shard is taken to wrap the items of module lists, such as blocks.0.
    """
    if type(world_size) is not int or world_size < 1:
        raise PlanError(f"world_size={world_size!r}: give the number of processes, an integer of at least 1.")
    travels_in = None if reduction is None else find_format(reduction)
    if isinstance(units, str):
        raise PlanError(f"units={units!r}: give a list of names of modules, such as [{units!r}].")
    if strategy is None and (world_size > 1 or units is not None or reduction is not None):
        given = {"world_size": world_size if world_size > 1 else None, "units": units, "reduction": reduction}
        names = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        raise PlanError(f"{names} needs a strategy: {' or '.join(map(repr, STRATEGIES))}.")
    if strategy is None:
        return None
    if strategy not in STRATEGIES:
        raise PlanError(f"strategy={strategy!r} is unknown. Allowed: {', '.join(map(repr, STRATEGIES))}.")
    if strategy == "ddp":
        if units is not None:
            raise PlanError("units are the modules that fully_shard wraps: leave them out, or give strategy='fsdp2'.")
        return Distribution(strategy, world_size, reduction=travels_in)
    modules = [slot.module for slot in trace.of(Role.WEIGHT)]
    found = _listed(modules) if units is None else outermost(with_parents(modules), units, what="unit")
    return Distribution(strategy, world_size, tuple(found), travels_in)


def _listed(modules: Iterable[str]) -> list[str]:
    """Return the outermost modules whose name is a number, which are items of nn.ModuleList and nn.Sequential."""
    paths = [module.split(".") for module in modules]
    ends = [next((i for i, part in enumerate(parts) if part.isdigit()), None) for parts in paths]
    return list(dict.fromkeys(".".join(parts[: end + 1]) for parts, end in zip(paths, ends, strict=True) if end is not None))


# --- one parameter --------------------------------------------------------------------------------------------------------


def shard_shape(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Return the shape of the largest shard of a tensor; all other shards are padded to this shape."""
    return (-(-shape[0] // world_size), *shape[1:]) if shape else ()


def shard_bytes(shape: tuple[int, ...], format: Format | None, world_size: int, *, itemsize: int = FLOAT32_BYTES) -> int:
    """Return the stored bytes of a tensor's largest shard; without a `format`, a value has `itemsize` bytes."""
    shard = shard_shape(shape, world_size)
    if format is not None:
        return format.nbytes(shard)
    numel = 1
    for size in shard:
        numel *= size
    return numel * itemsize


@dataclass(frozen=True)
class _Shards:
    """How `fully_shard` divides and stores all parameters of a trace; the bytes of their shards follow from it."""

    world_size: int
    weights: Mapping[str, Slot]
    formats: Mapping[str, ParameterFormats]

    def bytes_of(self, slot: Slot, format: Format | None) -> int:
        """Return the bytes of one process's shard of a weight or gradient in `format`; None stands for its dtype."""
        return shard_bytes(slot.shape, format, self.world_size, itemsize=FLOAT_BYTES.get(slot.dtype, 1))

    def weight(self, slot: Slot) -> int:
        return self.bytes_of(slot, self.formats[slot.name].weight)


def _shards(trace: Trace, plan: Plan, world_size: int) -> _Shards:
    weights = {slot.name: slot for slot in trace.of(Role.WEIGHT)}
    formats = {name: resolve_parameter_formats(slot, plan) for name, slot in weights.items()}
    for name, one in formats.items():
        if one.weight is not None and one.weight.has_tensor_scale:
            formats[name] = replace(one, weight=None)
    return _Shards(world_size, weights, formats)


# --- the step -------------------------------------------------------------------------------------------------------------


def distributed_intervals(trace: Trace, plan: Plan, shared: Distribution) -> list[Interval]:
    """Return the intervals in which tensors hold memory in one of several processes, under `plan`."""
    model = _fsdp_memory(trace, plan, shared) if shared.strategy == "fsdp2" else _ddp_memory(trace, plan, shared)
    held = activation_intervals(trace.activations, slot_storages(trace, plan))
    return [*fixed_intervals(trace), *model, *held]


def _ddp_memory(trace: Trace, plan: Plan, shared: Distribution) -> Iterator[Interval]:
    yield from model_memory(trace, plan, packs_gradients=False)
    gradients = trace.of(Role.GRADIENT)
    yield Interval(Role.GRADIENT, BUCKETS, 0, trace.length, sum(slot.nbytes for slot in gradients))
    for bucket, at in _buckets(gradients) if shared.reduction is not None else ():
        # temporary memory of a bucket: its chunks, then the decoded sums of all of them
        scratch = bucket + shared.scratch_bytes(-(-bucket // (FLOAT32_BYTES * shared.world_size)))
        yield Interval(Role.TEMPORARY, BUCKETS, at, at, scratch)


def _buckets(gradients: Iterable[Slot]) -> Iterator[tuple[int, int]]:
    """Yield (bytes, time) of each bucket of DistributedDataParallel; backward has filled it at that operation (tick).

    Gradients fill buckets in the order in which backward computes them.
    """
    nbytes, at, limit = 0, 0, FIRST_BUCKET_BYTES
    for slot in sorted(gradients, key=lambda slot: slot.birth):
        nbytes, at = nbytes + slot.nbytes, slot.birth
        if nbytes >= limit:
            yield nbytes, at
            nbytes, limit = 0, BUCKET_BYTES
    if nbytes:
        yield nbytes, at


def _fsdp_memory(trace: Trace, plan: Plan, shared: Distribution) -> Iterator[Interval]:
    shards = _shards(trace, plan, shared.world_size)
    for slot in trace.slots:
        if slot.role is Role.WEIGHT:
            yield Interval(Role.WEIGHT, slot.module, slot.birth, slot.death, shards.weight(slot))
        elif slot.role in (Role.MOMENT1, Role.MOMENT2):
            yield Interval(slot.role, slot.module, slot.birth, slot.death, _moment(slot, plan, shards))
        elif slot.role is Role.TEMPORARY and slot.recomputed_from:
            for start, end in slot.running or ((slot.birth, slot.death),):
                yield Interval(Role.TEMPORARY, slot.module, start, end, slot.nbytes)
    units = _units(trace, shared, shards)
    yield from _gathered(units, trace)
    for unit in units:
        yield from _reduced(unit, trace, shards, shared)
    full_bytes = sum(shards.bytes_of(slot, None) for name, slot in shards.weights.items() if shards.formats[name].is_full)
    for output in trace.outputs:
        if output.phase == "step":  # workspace of torch.optim for the shards that it updates
            nbytes = min(-(-output.nbytes // shared.world_size), full_bytes)
            yield Interval(Role.TEMPORARY, output.module, output.birth, output.death, nbytes)


def _moment(moment: Slot, plan: Plan, shards: _Shards) -> int:
    weight = parameter_of(moment, dict(shards.weights))
    if weight is None or moment.dtype not in FLOAT_BYTES or not moment.shape:
        return moment.nbytes
    if shards.formats[weight.name].is_full:
        return shards.bytes_of(moment, None)
    format = None if is_small(weight.shape) else plan.find((moment.name,), moment.role).format
    return shard_bytes(moment.shape, format, shards.world_size)


@dataclass(frozen=True)
class _Unit:
    """A module under `fully_shard`: its gradients, its parameters' bytes (`values`), and the ticks at which it runs.

    `buffer` is the bytes of the buffer for its all-gather. `forward` and `backward` are its first and last operation (tick) in each, None
    if it does not run there.
    """

    name: str
    gradients: tuple[Slot, ...]
    values: int
    buffer: int
    forward: tuple[int, int] | None
    backward: tuple[int, int] | None


def _units(trace: Trace, shared: Distribution, shards: _Shards) -> list[_Unit]:
    """Return the modules under `fully_shard`, ordered as forward runs them.

    In forward and in backward, a module runs from the first to the last operation inside of it.
    """
    by_name: dict[str, list[Slot]] = defaultdict(list)
    for slot in shards.weights.values():
        by_name[shared.unit_of(slot.module)].append(slot)
    spans: dict[tuple[str, bool], list[tuple[int, int]]] = defaultdict(list)  # by unit, and whether in backward
    for output in trace.outputs:
        if output.phase in ("forward", "backward"):
            spans[shared.unit_of(output.module), output.birth > trace.backward_at].append((output.birth, output.birth))
    gradients = {slot.name: slot for slot in trace.of(Role.GRADIENT)}
    units: list[_Unit] = []
    for name, slots in by_name.items():
        own = tuple(gradients[slot.name] for slot in slots if slot.name in gradients)
        running = [span for slot in slots for span in slot.running]
        backward = [*spans[name, True], *(span for span in running if span[0] > trace.backward_at)]
        backward += [span for slot in slots for part in slot.parts for span in part.decoded]
        backward += [(slot.birth, max(slot.birth, slot.dropped)) for slot in own]
        forward = _hull([*spans[name, False], *(span for span in running if span[0] <= trace.backward_at)])
        sizes = sum(slot.nbytes for slot in slots), sum(shards.weight(slot) for slot in slots) * shards.world_size
        units.append(_Unit(name, own, *sizes, (0, trace.backward_at) if name == ROOT else forward, _hull(backward)))
    return sorted(units, key=lambda unit: unit.forward or (0, 0))


def _hull(spans: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the smallest span (start, end) that contains all `spans`; None if there are none."""
    found = list(spans)
    return (min(start for start, _ in found), max(end for _, end in found)) if found else None


def _gathered(units: list[_Unit], trace: Trace) -> Iterator[Interval]:
    """Yield the intervals in which gathered (whole) parameters, and the buffers of their all-gathers, hold memory.

    FSDP2 frees a module's buffer when it gathers the next module, and in backward it gathers the next module while one runs. The root
    module's own parameters stay whole from forward to the end of backward.
    """
    for i, unit in enumerate(units):
        following, previous = units[i + 1] if i + 1 < len(units) else None, units[i - 1] if i else None
        if unit.forward is not None:
            next_start = following.forward[0] if following is not None and following.forward is not None else trace.backward_at
            yield Interval(Role.TEMPORARY, unit.name, unit.forward[0], max(next_start, unit.forward[0]), unit.buffer)
            last = unit.backward[1] if unit.name == ROOT and unit.backward is not None else unit.forward[1]
            yield Interval(Role.TEMPORARY, unit.name, unit.forward[0], last, unit.values)
        if unit.backward is not None and unit.name != ROOT:
            yield Interval(Role.TEMPORARY, unit.name, *unit.backward, unit.values)
            if previous is not None and previous.name != ROOT:
                yield Interval(Role.TEMPORARY, previous.name, *unit.backward, previous.buffer)


def _reduced(unit: _Unit, trace: Trace, shards: _Shards, shared: Distribution) -> Iterator[Interval]:
    """Yield the intervals in which the gradients of `unit` hold memory before, in and after their reduce-scatter."""
    at = max((max(slot.birth, slot.dropped) for slot in unit.gradients), default=0) + 1
    for slot in unit.gradients:
        formats = shards.formats[slot.name]
        yield Interval(Role.TEMPORARY, slot.module, slot.birth, at, slot.nbytes)
        if formats.residue_bytes:
            residue = shard_bytes(slot.shape, None, shards.world_size, itemsize=1)
            yield Interval(Role.RESIDUE, slot.module, 0, trace.length, residue)
        is_packed = formats.gradient is not None and slot.death >= trace.length
        if not is_packed:
            yield Interval(Role.GRADIENT, slot.module, at, max(slot.death, at), shards.bytes_of(slot, None))
        else:
            yield Interval(Role.TEMPORARY, slot.module, at, at, shards.bytes_of(slot, None))
            yield Interval(Role.GRADIENT, slot.module, 0, trace.length, shards.bytes_of(slot, formats.gradient))
    if unit.gradients:
        whole = sum(shards.bytes_of(slot, None) for slot in unit.gradients) * shards.world_size
        chunk = sum(shard_bytes(slot.shape, None, shards.world_size, itemsize=1) for slot in unit.gradients)
        yield Interval(Role.TEMPORARY, unit.name, at, at, whole + shared.scratch_bytes(chunk))


def communication(trace: Trace, plan: Plan, shared: Distribution) -> Communication:
    """Return the bytes that one process sends in a step under `plan`, by collective operation."""
    gradients = trace.of(Role.GRADIENT)
    if shared.strategy == "ddp":
        return _ddp_communication(gradients, shared)
    shards = _shards(trace, plan, shared.world_size)
    times = {name: 1 if shared.unit_of(slot.module) == ROOT else 2 for name, slot in shards.weights.items()}
    gathered = sum(times[name] * shards.weight(slot) for name, slot in shards.weights.items())
    if shared.reduction is not None:
        return Communication(shared.gathered_bytes(gathered), all_to_all=_exchanged_bytes(gradients, shared, shared.reduction))
    reduced = sum(shards.bytes_of(slot, None) for slot in gradients)
    return Communication(shared.gathered_bytes(gathered), shared.gathered_bytes(reduced))


def _ddp_communication(gradients: Iterable[Slot], shared: Distribution) -> Communication:
    """Return the bytes that one process sends to sum gradients under DistributedDataParallel.

    With a low-bit format for gradients, they are those of an all-to-all of chunks and an all-gather of their sums, without the padding of
    buckets.
    """
    if shared.reduction is None:
        return Communication(all_reduce=shared.all_reduced_bytes(sum(slot.nbytes for slot in gradients)))
    chunk = -(-sum(slot.numel for slot in gradients) // shared.world_size)
    nbytes = shared.gathered_bytes(shared.reduction.nbytes((1, chunk)))
    return Communication(all_gather=nbytes, all_to_all=nbytes)


def _exchanged_bytes(gradients: Iterable[Slot], shared: Distribution, format: Format) -> int:
    """Return the bytes that one process sends if gradients are summed over processes as codes of `format`.

    Each module under `fully_shard` sends the codes of all its gradients together.
    """
    numels: dict[str, int] = defaultdict(int)
    for slot in gradients:
        numels[shared.unit_of(slot.module)] += shard_bytes(slot.shape, None, shared.world_size, itemsize=1)
    return sum(shared.gathered_bytes(format.nbytes((1, numel))) for numel in numels.values())


def largest_unit_bytes(trace: Trace, plan: Plan, shared: Distribution) -> int:
    """Return the bytes of the largest buffer for an all-gather of one module; 0 without `fully_shard`."""
    shards = _shards(trace, plan, shared.world_size)
    sums: dict[str, int] = defaultdict(int)
    for slot in shards.weights.values():
        sums[shared.unit_of(slot.module)] += shards.weight(slot) * shared.world_size
    return max(sums.values(), default=0) if shared.strategy == "fsdp2" else 0


def distribution_notes(trace: Trace, shared: Distribution) -> list[str]:
    """Return sentences for a footprint's notes on how the processes share memory."""
    if shared.strategy == "ddp":
        nbytes = say_bytes(sum(slot.nbytes for slot in trace.of(Role.GRADIENT)))
        return [BUCKET_NOTE.format(nbytes, nbytes)]
    return [UNITS_NOTE.format(", ".join(shared.units) or "none")]
