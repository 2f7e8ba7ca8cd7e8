"""`Calibration` holds the measured costs of operations, packing and checkpointing on one device, from the JSON of `paredown.calibrate`.

The file is `calibration-cuda.json` or `calibration-cpu.json` in the folder that the environment variable PAREDOWN_CACHE names, else in
`paredown` of XDG_CACHE_HOME, else in `~/.cache/paredown`. A file of another device, torch or paredown is not used: `load_calibration`
raises a CalibrationError that names both, and `calibrate` measures again.

REFERENCE has the numbers of one H200. `assign` compares plans by it where nothing was measured; no step time is printed from it.

An operation takes these seconds on the device, unless it was timed itself, or another operation of the same name was:

    max(flops / rate of its kind and dtype, bytes / bandwidth of its kind, seconds of the smallest kernel)

Matrix products have a second rate for sides that are no multiples of 8: cuBLAS takes 7 times as long for 50,257 columns as for 50,264.

The host's seconds are measured at one moment: on a machine with other work they are twice as long in the next minute. `with_host_speed`
multiplies them.

>>> kind_of("aten.addmm.default"), kind_of("aten.native_layer_norm_backward.default"), kind_of("aten.add.Tensor")
('matmul', 'norm_backward', 'elementwise')
>>> round(REFERENCE.operation_seconds(Operation("aten.add.Tensor", "", "forward", "float32", nbytes=3_000_000_000)) * 1e3, 3)
1.0
"""

from __future__ import annotations

import json
import os
import platform
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from importlib import metadata
from math import exp, log
from pathlib import Path
from typing import Any

from paredown.errors import CalibrationError, FormatError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.plan.trace import VIEW, Operation, Trace
from paredown.serial import dump_dataclass, load_json, object_parts, read_dataclass, save_json

VERSION = 4  # of the JSON
FOLDER_VARIABLE = "PAREDOWN_CACHE"
HINT = "Calibrations are written by `paredown calibrate`."
MEASURE = "Run `paredown calibrate` on this device."
# kind of an operation -> parts of its name; the first match counts
KINDS = {
    "attention": ("attention",),
    "conv": ("conv",),
    "matmul": ("mm", "linear", "lstm", "gru", "rnn"),
    "norm_backward": ("norm_backward",),
    "norm": ("norm",),
    "scatter": ("embedding_dense_backward", "scatter", "index_add", "index_put"),
    "softmax": ("softmax", "nll_loss"),
    "reduction": ("sum", "mean", "amax", "var"),
}
ELEMENTWISE = "elementwise"
TO_HOST, TO_DEVICE = "to host memory", "from host memory"  # copies of offloaded tensors, in `bytes_per_second`
COPY_BYTES_PER_SECOND = 25e9  # of calibrations without measured copies: PCIe 4.0 with 16 lanes, less a fifth
UNALIGNED, ALIGNMENT = " unaligned", 8  # suffix of rates of matrix products with a side that is no multiple of this
# How much of a change of the host's speed launches of kernels have: where a step of a small network took 1.8 times as long, calls of an
# LSTM took 1.4 (forward) and 1.5 times (backward) as long, 12 of each, one H200 (docs/log.md, 2026-11-18).
LAUNCH_SHARE = 0.6


@dataclass(frozen=True)
class FormatCost:
    """The measured cost of encoding and decoding tensors in one format, from which step times are predicted.

    Rates are bytes of the unpacked tensor per second; each kernel launch adds `launch_seconds`, each packed tensor `host_seconds`.
    """

    encode_bytes_per_second: float
    decode_bytes_per_second: float
    launch_seconds: float
    host_seconds: float

    def device_seconds(self, nbytes: int) -> float:
        """Return the device seconds to encode and decode a tensor of `nbytes` once each."""
        return 2 * self.launch_seconds + nbytes / self.encode_bytes_per_second + nbytes / self.decode_bytes_per_second


@dataclass(frozen=True)
class HostCost:
    """The seconds of host (CPU) time for each kind of work, such as packing a tensor or calling a module."""

    empty_operation: float  # one addition of one value, called in a loop
    operation: float  # the call of one kernel whose own host time is not in `issued`
    view: float  # one operation without a kernel in forward, and what Python and autograd do for it
    backward_view: float  # one operation without a kernel in backward, where no Python runs
    module_call: float  # one call of a module in forward: Python, autograd and autocast
    gradient: float  # one parameter in backward: its node, its cast and its accumulation
    optimizer_parameter: float  # one parameter in a fused step of torch.optim
    checkpointed_tensor: float  # one tensor that a checkpointed layer saves: hooks of torch.utils.checkpoint in three passes
    watched: float  # one module call, or one saved tensor, in a session that packs some of them
    packed_weight: float
    step: float  # one step of a small network, by which the speed of the host is measured again


@dataclass(frozen=True)
class Calibration:
    """The measured costs of operations, formats and host calls on one device, from which step times are predicted.

    `timed` has the seconds of single operations by `operation_key`, from `calibrate(device, traces=...)`, 0 for operations that cannot be
    repeated. `estimated` has the seconds of operations that were not timed, from rates of timed operations of the same name. `issued` has
    the host seconds of one call, by the name of the operation. `launched` has the host seconds of calls that launch a kernel for every
    position (cuDNN's RNNs), by `operation_key`; that time is the driver's, which grows less than Python's when the host becomes slower.
    """

    device: str
    device_name: str
    torch: str
    paredown: str
    host: HostCost
    kernel_seconds: float
    bytes_per_second: Mapping[str, float] = field(hash=False)
    flops_per_second: Mapping[str, tuple[tuple[float, float], ...]] = field(hash=False)
    formats: Mapping[str, FormatCost] = field(hash=False)
    timed: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    estimated: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    issued: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    launched: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    measured_in_seconds: float = 0.0

    def operation_seconds(self, operation: Operation) -> float:
        """Return the predicted device seconds of one call of the operation."""
        if operation.op == VIEW:
            return 0.0
        if self.timed and operation.arguments:
            key = operation_key(operation)
            if self.timed.get(key):
                return self.timed[key]
            if key in self.estimated:
                return max(self.estimated[key], self.kernel_seconds)
        kind = kind_of(operation.op)
        moved = operation.nbytes / self.bytes_per_second.get(kind, self.bytes_per_second[ELEMENTWISE])
        computed = operation.flops / self._flops_per_second(kind, operation) if operation.flops else 0.0
        return max(moved, computed, self.kernel_seconds)

    def copy_rate(self, kind: str) -> float:
        """Return the bytes per second of copies between device and host; `kind` is TO_HOST or TO_DEVICE."""
        return self.bytes_per_second.get(kind, COPY_BYTES_PER_SECOND)

    def say_copies(self) -> str:
        """Return the rates of copies between device and host memory as text, and whether they were measured."""
        rates = " and ".join(f"{self.copy_rate(kind) / 1e9:.3g} GB/s {kind}" for kind in (TO_HOST, TO_DEVICE))
        return rates if TO_HOST in self.bytes_per_second else f"{rates}, assumed since the calibration has no copies"

    def issue_seconds(self, operation: Operation) -> float:
        """Return the predicted host seconds of one call of the operation; for VIEW, of making one view."""
        if operation.op == VIEW:
            return self.host.backward_view if operation.phase == "backward" else self.host.view
        if self.launched and operation.arguments and (found := self.launched.get(operation_key(operation))) is not None:
            return found
        return self.issued.get(operation.op, self.host.operation)

    def with_host_speed(self, factor: float) -> Calibration:
        """Return this calibration for a host (CPU) on which each call takes `factor` times as long.

        Seconds in `launched` are spent in the GPU's driver and change less, by 0.6 of the difference.
        """
        host = HostCost(*(factor * getattr(self.host, one.name) for one in fields(HostCost)))
        formats = {text: replace(cost, host_seconds=factor * cost.host_seconds) for text, cost in self.formats.items()}
        issued = {name: factor * seconds for name, seconds in self.issued.items()}
        launched = {key: (1 + LAUNCH_SHARE * (factor - 1)) * seconds for key, seconds in self.launched.items()}
        return replace(self, host=host, formats=formats, issued=issued, launched=launched)

    def _flops_per_second(self, kind: str, operation: Operation) -> float:
        tables = self.flops_per_second
        name = f"{kind} {operation.dtype}"
        if kind == "matmul" and f"{name}{UNALIGNED}" in tables and _is_unaligned(operation.arguments):
            name += UNALIGNED
        points = tables.get(name) or tables.get(f"matmul {operation.dtype}") or next(iter(tables.values()))
        return interpolated(points, operation.flops)

    def num_untimed(self, trace: Trace) -> int:
        """Return the number of different operations in a trace whose device time the calibration did not measure."""
        steps = [step for step in (trace, trace.unmodified) if step is not None]
        keys = {operation_key(one) for step in steps for one in step.operations if one.arguments}
        return len(keys - self.timed.keys())

    def format_cost(self, format: Format | None) -> FormatCost:
        """Return the cost of encode and decode in `format`, or in the measured format nearest in bits.

        Use None for a mask of bits; it costs as much as the widest measured format.
        """
        text = str(format)
        if format is None or text in self.formats:
            return self.formats[text] if text in self.formats else self._by_width[-1][1]
        return min(self._by_width, key=lambda row: abs(row[0] - format.element.width))[1]

    @cached_property
    def _by_width(self) -> list[tuple[int, FormatCost]]:
        rows = ((find_format(text).element.width, cost) for text, cost in self.formats.items())
        return sorted(rows, key=lambda row: row[0])

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as a JSON value."""
        return {"version": VERSION, **dump_dataclass(self)}

    @staticmethod
    def from_json(value: Any) -> Calibration:
        """Return the calibration whose `to_json()` is `value`; raise CalibrationError for any other value."""
        names = [one.name for one in fields(Calibration)]
        needed = ("version", "device", "host", "formats")
        parts = object_parts(value, "calibration", names, needed, VERSION, CalibrationError, oldest=VERSION)
        calibration = read_dataclass(Calibration, parts, "calibration", CalibrationError)
        _check(calibration)
        return calibration

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the calibration as JSON to `path` (None: to the cache folder), and return the file's path."""
        target = calibration_path(self.device) if path is None else Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            save_json(target, self.to_json(), CalibrationError, indent=1)
        except (OSError, CalibrationError) as error:
            advice = "Set PAREDOWN_CACHE to a folder that this user may write."
            raise CalibrationError(f"the calibration cannot be written to {target}: {error} {advice}") from None
        return target

    def __str__(self) -> str:
        host, cost = self.host, self.format_cost(None)
        copies = f", {self.say_copies()}" if self.device == "cuda" else ""
        rate = max(point[1] for points in self.flops_per_second.values() for point in points)
        return (
            f"{self.device_name}, torch {self.torch}: {rate / 1e12:.3g} TFLOP/s at most, "
            f"{self.bytes_per_second[ELEMENTWISE] / 1e12:.3g} TB/s{copies}; host {1e6 * host.empty_operation:.1f} us per empty operation, "
            f"{1e6 * host.operation:.1f} per kernel, {1e6 * host.view:.1f} per view ({1e6 * host.backward_view:.1f} in backward), "
            f"{1e6 * host.module_call:.1f} per module, {1e6 * host.gradient:.1f} per gradient, "
            f"{1e6 * cost.host_seconds:.0f} per packed tensor, {1e6 * host.watched:.0f} per module and saved tensor of a session, "
            f"{1e6 * host.checkpointed_tensor:.0f} per tensor that checkpointed layers save; "
            f"{len(self.timed)} operations timed"
        )


@cache
def kind_of(op: str) -> str:
    """Return the kind of an operation from its name: "matmul", "conv", "elementwise" and so on."""
    return next((kind for kind, parts in KINDS.items() if any(part in op for part in parts)), ELEMENTWISE)


def interpolated(points: Sequence[tuple[float, float]], flops: float) -> float:
    """Return the flops per second of an operation of `flops` flops, from measured `points` (flops, flops per second).

    It is interpolated with both axes logarithmic, and constant below the first and above the last point.

    >>> round(interpolated(((1e6, 1e12), (1e8, 1e14)), 1e7) / 1e13, 6), interpolated(((1e6, 1e12), (1e8, 1e14)), 1e10)
    (1.0, 100000000000000.0)
    """
    index = bisect_left(points, flops, key=lambda point: point[0])
    if index in (0, len(points)):
        return points[min(index, len(points) - 1)][1]
    (low, slow), (high, fast) = points[index - 1], points[index]
    share = log(flops / low) / log(high / low)
    return exp((1 - share) * log(slow) + share * log(fast))


@cache
def _is_unaligned(arguments: str) -> bool:
    """Return whether a matrix in `arguments` (the call's JSON) has a side above 8 that is no multiple of 8."""
    tensors = json.loads(arguments)[0] if arguments else []
    shapes = [value["t"][1] for value in tensors if isinstance(value, dict) and "t" in value]
    return any(side > ALIGNMENT and side % ALIGNMENT for shape in shapes if len(shape) > 1 for side in shape[-2:])


def operation_key(operation: Operation) -> str:
    """Return the key of an operation's measured time: a hash of its name and arguments, of 16 characters."""
    return sha256(f"{operation.op} {operation.arguments}".encode()).hexdigest()[:16]


def _check(calibration: Calibration) -> None:
    """Raise CalibrationError if numbers in a file cannot be measured costs, such as a rate of 0."""
    rates = {**calibration.bytes_per_second, "kernel_seconds": calibration.kernel_seconds}
    rates |= {name: min((min(point) for point in points), default=0.0) for name, points in calibration.flops_per_second.items()}
    for text, cost in calibration.formats.items():
        try:
            find_format(text)
        except FormatError as error:
            raise CalibrationError(f"the calibration has a format that does not exist: {error} {MEASURE}") from None
        rates |= {f"{text} {name}": getattr(cost, name) for name in ("encode_bytes_per_second", "decode_bytes_per_second")}
    wrong = [name for name, rate in rates.items() if not rate > 0]
    if wrong or not calibration.formats or ELEMENTWISE not in calibration.bytes_per_second or not calibration.flops_per_second:
        what = f"{wrong[0]} is not above 0" if wrong else "formats, flops_per_second or the bandwidth 'elementwise' are missing"
        raise CalibrationError(f"the calibration cannot be used: {what}. {MEASURE}")


# --- the file ----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder in which calibrations are stored: PAREDOWN_CACHE, or one below the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paredown"


def calibration_path(device: str) -> Path:
    """Return the path of the calibration file for `device`, "cuda" or "cpu"."""
    return cache_folder() / f"calibration-{device}.json"


def versions() -> dict[str, str]:
    """Return the installed versions of torch and paredown; calibrations made with other versions must not be used."""
    return {name: _version(name) for name in ("torch", "paredown")}


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def load_calibration(device: str, device_name: str | None = None, path: Path | None = None) -> Calibration:
    """Return the stored calibration of this device; raise CalibrationError if there is none that can be used.

    `device` is "cuda" or "cpu". `device_name` is the name of this machine's device; if it is None, since the machine has none, a
    calibration made elsewhere is accepted. `path` is the file, or None for the file in the cache folder.
    """
    path = calibration_path(device) if path is None else path
    if not path.exists():
        raise CalibrationError(f"nothing is measured for device {device!r}. {MEASURE}")
    calibration = load_json(path, "calibration", CalibrationError, Calibration.from_json, hint=HINT)
    here = {"device": device, "device_name": device_name or calibration.device_name, **versions()}
    other = [(name, getattr(calibration, name), value) for name, value in here.items() if getattr(calibration, name) != value]
    if other:
        differences = ", ".join(f"{name} {found!r} instead of {value!r}" for name, found, value in other)
        raise CalibrationError(f"the calibration in {path.name} is of {differences}. {MEASURE}")
    return calibration


def present_device_name(device: str) -> str | None:
    """Return the name of this machine's GPU or processor; None if it has none, or if torch is not imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None or (device == "cuda" and not torch.cuda.is_available()):
        return None
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def find_calibration(device: str) -> tuple[Calibration | None, str]:
    """Return (the stored calibration of this device, ""), or (None, the reason) if there is none that can be used."""
    try:
        return load_calibration(device, present_device_name(device)), ""
    except CalibrationError as error:
        return None, str(error)


def _reference() -> Calibration:
    """Return a calibration of one H200 with torch 2.11, used where this device has none; from benchmarks/results."""
    codec = FormatCost(3e12, 3e12, 4e-6, 30e-6)
    sizes = ((1e8, 2e13), (1e10, 4e14), (1e12, 6e14))
    return Calibration(
        device="cuda",
        device_name="NVIDIA H200",
        torch="2.11.0",
        paredown="reference",
        host=HostCost(5e-6, 14e-6, 0.0, 0.0, 0.0, 0.0, 1e-6, 5e-6, 0.0, 200e-6, 5e-3),
        kernel_seconds=2.5e-6,
        bytes_per_second={
            ELEMENTWISE: 3e12,
            "norm": 2.2e12,
            "norm_backward": 1.5e12,
            "scatter": 5e11,
            "softmax": 2e12,
            "reduction": 2e12,
        },
        flops_per_second={
            "matmul bfloat16": sizes,
            "conv bfloat16": ((1e8, 1e13), (1e10, 2.5e14), (1e12, 4e14)),
            "attention bfloat16": ((1e8, 1e13), (1e10, 3e14), (1e12, 4e14)),
            "matmul float32": ((1e8, 5e12), (1e10, 4e13)),
        },
        formats={text: codec for text in ("int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16")},
    )


REFERENCE = _reference()
