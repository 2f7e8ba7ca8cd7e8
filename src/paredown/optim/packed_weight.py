"""`Weight` has the codes of a packed parameter, and switches the parameter between packed and plain (decoded).

    packed     p is a `PackedParameter` of the same size, strides, dtype and device, without memory; codes and scales are in `weight.packed`
    plain      p is an ordinary nn.Parameter whose memory holds the decoded values; so it is while one of its modules runs

It is the same Python object in both states, so that modules and optimizers keep their references: `Weight._swap` gives it other data and
another class, and no other code does. Codes are in logical order, (rows, cols) with rows = dimension 0, whatever the strides of the
parameter. A format without a block ("bf16") is stored as codes too: `packed.codes.view(torch.bfloat16)` is the (rows, cols) tensor. The
parameter holds its weight; the weight has a weak reference to it.

Code that writes the codes calls `changed()` after. `store(values)` encodes with rounding to nearest, in place, so that references to the
codes stay valid; for another device or shape `packed` becomes a new object. `write(values)` defers encoding until codes or values are read
or another weight is written, so that several in-place functions in a row on one parameter round once. Code that reads the codes to change
them calls `gather()` before, since the plain parameter may have been written. Values of a dtype or device that the codec does not support
(float64, meta) are not packed: the parameter becomes plain with these values and leaves the session.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paredown.codec.packed import DEVICES, DTYPES, PackedTensor, decoder, encode
from paredown.formats.format import Format

KEY = "_paredown_weight"  # in the __dict__ of a parameter
PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NO_MEMORY = (
    "this weight is stored packed and has no memory to read from. paredown decodes it for its modules and for functions of torch; "
    "for other code, work inside `with session.unpacked():`, or on a copy: p.detach().clone()."
)
MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "it was saved at version {}, and is at version {} at the time of backward. Clone the tensor before the in-place operation."
)
_LAST: list[weakref.ref[Weight]] = []  # at most one: the weight with deferred values (`write`)
PackHook = Callable[[Tensor], Any]
OnUse = Callable[[Any, int, "list[tuple[Weight, Tensor]]"], None]
OnWrite = Callable[["Weight", Tensor], Callable[[], None] | None]
SAMPLED = 1 << 13  # values of the first rows, on which rounding errors are measured


class NoMemory(Tensor):
    """The class of the tensor without memory that is the data of a packed parameter; its storage counts as 0 bytes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.untyped_storage:
                return torch.UntypedStorage(0, device=args[0].device)
            return func(*args, **(kwargs or {}))


class Weight:
    """The codes in which one parameter is stored, with methods that give the parameter decoded memory or take it away."""

    __slots__ = (
        "__weakref__", "_decode", "_exported", "_is_contiguous", "_packed", "_packed_class", "_ref", "_shared", "accumulator",
        "address", "device_type", "dtype", "empty", "hook_of_checkpoint", "in_graphs", "is_checked", "is_pinned", "on_use", "on_write",
        "places", "references", "residue", "rounding_error", "seen", "size", "stride", "users", "version", "was_compiled", "written",
    )  # fmt: skip

    def __init__(
        self,
        parameter: nn.Parameter,
        packed: PackedTensor,
        packed_class: type[Tensor],
        *,
        on_use: weakref.WeakMethod[OnUse] | None = None,
        hook_of_checkpoint: Callable[[], PackHook | None] | None = None,
    ) -> None:
        """Store `parameter` in the codes `packed`; `packed_class` is the parameter's class while it has no memory.

        A session passes two functions. `on_use` is called after functions outside of modules, with the result, the sequence number of the
        first new autograd node, and the decoded values. `hook_of_checkpoint` returns the pack hook of the checkpoint that currently runs.
        """
        self.on_use, self.hook_of_checkpoint = on_use, hook_of_checkpoint
        self.on_write: OnWrite | None = None  # called with values before they are encoded; what it returns is called after
        self.residue: Tensor | None = None  # 8 more bits that an optimizer stores: zeroed when other code writes values
        self.written: Tensor | None = None  # values whose encoding is deferred
        self.version = 0  # incremented with every change of the values
        self.users = 0  # modules whose forward is running
        self.references = 0, 0  # to the decoded parameter before its use, as `count_references` returns them
        self.address = 0  # of the storage of the decoded parameter, 0 while it is packed
        self.seen = 0  # `_version` of the parameter when it was decoded
        self.accumulator: Any = None  # the node of the parameter's gradient, while a module uses it
        self.is_pinned = False  # whether it always has decoded memory besides its codes (compiled models)
        self.in_graphs = False  # whether compiled graphs read the codes, which are then written at once
        self.is_checked = False  # whether its modules are known not to write it through .data, which autograd does not count
        self.was_compiled = False  # whether torch.compile traced a function of it
        self.rounding_error: float | None = None  # |rounded - original| / |original| when it was packed; None: not measured
        self.places: set[Any] = set()  # verified sequences of operations from it to a saved cast or view of it
        self._ref, self._packed_class = weakref.ref(parameter), packed_class
        self._exported: tuple[int, int, weakref.ref[Tensor] | None] = (-1, 0, None)
        self._shared: dict[torch.dtype, tuple[int, StorageWeakRef]] = {}
        self._take(parameter, packed)

    def _take(self, like: Tensor, packed: PackedTensor) -> None:
        """Replace the codes by `packed`, and note the size, strides, dtype and device of `like`, which the parameter has."""
        self._packed, self.dtype, self.size = packed, like.dtype, like.size()
        self.empty = empty_like(like)  # a tensor of its size, strides, dtype and device, without memory
        self.device_type = like.device.type
        self.stride, self._is_contiguous = self.empty.stride(), self.empty.is_contiguous()
        self._decode = _decoder(packed)

    def __reduce__(self) -> Any:
        return type(None), ()  # copies of a parameter are not packed

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter that is stored in these codes; None after user code has deleted it."""
        return self._ref()

    @property
    def packed(self) -> PackedTensor:
        """The codes and scales, in the order of the parameter's dimensions, whatever its strides are."""
        if self.written is not None:
            self.encode()
        return self._packed

    @property
    def is_attached(self) -> bool:
        """Whether a session has packed this parameter and still owns it."""
        return self.on_use is not None

    def attach(self, on_use: weakref.WeakMethod[OnUse], hook_of_checkpoint: Callable[[], PackHook | None]) -> None:
        """Make a session the owner of this parameter; `__init__` describes the session's two functions."""
        self.on_use, self.hook_of_checkpoint = on_use, hook_of_checkpoint

    def detach(self) -> None:
        """End the ownership of a session, as when it is closed; the parameter stays packed."""
        self.on_use = self.hook_of_checkpoint = self.on_write = self.accumulator = None
        self.users, self.is_pinned = 0, False
        self.hide()

    @property
    def is_plain(self) -> bool:
        """Whether the parameter has decoded memory at this moment."""
        return self.address != 0

    @property
    def is_released(self) -> bool:
        """Whether the parameter has left these codes: it is an ordinary nn.Parameter, or belongs to another `Weight`."""
        parameter = self.parameter
        return parameter is not None and weight_of(parameter) is not self

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return self._packed.format

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return self.packed.nbytes

    # --- values -------------------------------------------------------------------------------------------------------

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the decoded values in new memory, with the parameter's strides, in `dtype` (None: the parameter's)."""
        if self.written is not None:
            self.encode()
        if torch.is_inference_mode_enabled():  # the result may be used outside of inference mode
            with torch.inference_mode(False):
                return self.decode(dtype)
        wanted = dtype or self.dtype
        # decoded as bfloat16 directly: float32 values are rounded once, as by .to()
        made = wanted if wanted is torch.bfloat16 and self.dtype is torch.float32 else self.dtype
        with torch._C.DisableTorchFunctionSubclass():
            out = torch.empty_like(self.empty) if made is self.dtype else torch.empty_like(self.empty, dtype=made)
        if self._is_contiguous:
            self._decode(out)
        else:
            rows = torch.empty_like(out, memory_format=torch.contiguous_format)
            self._decode(rows)
            out.copy_(rows)
        return out if made is wanted else out.to(wanted)

    def shared(self, dtype: torch.dtype) -> Tensor:
        """Return the decoded values in `dtype`, only for reading: callers get the same memory as long as one of them keeps it."""
        version, ref = self._shared.get(dtype, (-1, None))
        if ref is not None and version == self.version:
            alive: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if alive is not None:  # pyright: ignore[reportUnnecessaryComparison]
                empty = torch.empty(0, dtype=dtype, device=self.packed.device)
                return empty.set_(alive, 0, self.size, self.stride)  # type: ignore[call-overload]
        made = self.decode(dtype)
        self._shared[dtype] = self.version, StorageWeakRef(made.untyped_storage())
        return made

    def check_version(self, version: int) -> None:
        """Raise autograd's error for a saved tensor that was modified, if the values have changed since version `version`."""
        if self.version != version:
            raise RuntimeError(MODIFIED.format(version, self.version))

    def exported(self) -> Tensor:
        """Return the decoded values, for copies of the model's state: the same tensor while it is alive and unchanged."""
        version, count, ref = self._exported
        made = ref() if ref is not None and version == self.version else None
        if made is None or made._version != count:
            made = self.decode()
            self._exported = self.version, made._version, weakref.ref(made)
        return made

    def write(self, values: Tensor) -> None:
        """Replace the values by a tensor of the same shape and dtype.

        They are encoded when the codes are next read, and must not be changed until then.
        """
        if self.address or self.in_graphs:
            self.store(values)
            return
        last = _LAST.pop()() if _LAST else None
        if last is not None and last is not self and last.written is not None:
            last.encode()
        _LAST.append(weakref.ref(self))
        self.changed()
        self.written = values

    def encode(self) -> None:
        """Encode the values that `write` has kept, if there are any."""
        values = self.written
        if values is not None:
            self.store(values)

    def store(self, values: Tensor) -> None:
        """Replace the values by `values`, rounded to nearest; the parameter takes over their dtype, device and shape."""
        self.written = None
        if not _can_be_packed(values):
            self.release(values)
            self.version += 1
            return
        if self._store(values) and not self.address:
            self.hide()
        self.changed()

    def _store(self, values: Tensor) -> bool:
        """Replace the values by `values`, encoded; return whether the parameter's size, strides, dtype or device change with it."""
        values = values.detach()
        with torch.no_grad(), outside_inference_mode():
            values = values if values.dtype in DTYPES else values.to(self.dtype)
            if self._has(values):  # a checkpoint whose codes were loaded before: encoding again could change scales
                return False
            report = self.on_write(self, values) if self.on_write is not None else None
            packed = encode(values, self._packed.format, order="logical")
            is_same = (values.size(), values.device) == (self.size, self._packed.device)
            if is_same:
                self._packed.parts.copy_(packed.parts)
            if self.residue is not None and self.residue.device == values.device:
                self.residue.zero_()
        is_other = not is_same or values.dtype is not self.dtype or strides_of(values) != self.stride
        if is_other:
            self._take(values, replace(self._packed, dtype=values.dtype) if is_same else packed)
        if report is not None:
            report()
        return is_other

    def unencoded(self) -> Tensor | None:
        """Return values that may differ from the codes: those of `write`, or of the decoded parameter; None if there are none."""
        parameter = self.parameter
        return self.written if self.written is not None or parameter is None or not self.address else parameter.detach()

    def update_errors(self, values: Tensor) -> tuple[float, float]:
        """Return two errors of replacing the values by `values`: |change| / |values|, and |rounding error| / |change|.

        Both are measured on the first rows; the result is (1, 0) if shape, dtype or device differ from the parameter's.
        """
        if not self._is_like(values):
            return 1.0, 0.0
        with torch.no_grad(), outside_inference_mode():
            num_rows = _num_sampled_rows(self.size)
            new = values.detach()[:num_rows].contiguous()
            rounded, new = encode(new, self.format, order="logical").decode().float(), new.float()
            change, error = _distance(new, _first_rows(self._packed, num_rows)), float(torch.linalg.vector_norm(rounded - new))
            norm = float(torch.linalg.vector_norm(new))
        return change / norm if norm else 1.0, error / change if change else 0.0

    def _has(self, values: Tensor) -> bool:
        """Return whether `values` equal the decoded values bit for bit, in the same shape, dtype, device and strides."""
        if not self._is_like(values) or strides_of(values) != self.stride:
            return False
        if values.dim() and self.format.block is not None and not same_bits(_first_rows(self._packed, 1).decode(), values[:1]):
            return False
        return same_bits(self.decode(), values)

    def _is_like(self, values: Tensor) -> bool:
        """Return whether `values` have the shape, dtype and device of the parameter, and at least one value."""
        mine = self.size, self.dtype, self._packed.device
        return (values.size(), values.dtype, values.device) == mine and self.size.numel() > 0

    def changed(self) -> None:
        """Record that the codes have changed, as by an optimizer; if the parameter has decoded memory, decode it again."""
        self.version += 1
        self.written = None
        if self.address:  # in use: the new values and a new `_version` have to be visible
            parameter = self.parameter
            if parameter is not None:
                if self.is_pinned:
                    parameter.detach().copy_(self.decode())
                else:
                    self.show()
                    torch.autograd.graph.increment_version(parameter)
                self.seen = parameter._version

    # --- the parameter ------------------------------------------------------------------------------------------------

    def _swap(self, data: Tensor, kind: type[Tensor]) -> Any:
        """Set .data and the class of the parameter, and return it; return None if user code has deleted it.

        While a module runs, only the class nn.Parameter itself is an ordinary parameter to all code: functions of torch would call the
        `__torch_function__` of another class, and those that check for the exact type would take a slower path or refuse. Afterwards the
        parameter has no memory, and its class keeps code from reading it (decision 009).
        """
        parameter: Any = self._ref()
        if parameter is not None:
            parameter.__class__ = nn.Parameter  # `PackedParameter` would encode the data
            parameter.data = data
            parameter.__class__ = kind
        return parameter

    def show(self) -> None:
        """Make the parameter an ordinary nn.Parameter with decoded values in new memory, which modules need when they run."""
        values = self.decode()
        parameter = self._swap(values, nn.Parameter)
        assert parameter is not None
        self.address, self.seen = values.untyped_storage()._cdata, parameter._version

    def hide(self) -> None:
        """Make the parameter a packed one without memory; views and saved tensors of its decoded memory stay valid."""
        if not self.is_released:
            self._swap(self.empty, self._packed_class)
        self.address = 0

    @contextmanager
    def viewable(self) -> Generator[None]:
        """Return a context in which autograd can make views of the packed parameter, which builds for CUDA refuse outside of it."""
        self._swap(torch.empty((), dtype=self.dtype, device=self.packed.device).expand(self.size), self._packed_class)
        yield
        self.hide()

    def count_references(self) -> tuple[int, int]:
        """Return the number of references to the C++ tensor of the parameter, and to its Python object."""
        parameter: Any = self._ref()
        return (parameter._use_count(), sys.getrefcount(parameter)) if parameter is not None else (0, 0)

    def is_referenced(self, *, by_objects: bool = False) -> bool:
        """Return whether other code has kept references to the decoded parameter since its module began to run.

        `by_objects`: count references to the Python object, too, not only to the C++ tensor.
        """
        (tensors, objects), (tensors_before, objects_before) = self.count_references(), self.references
        return tensors > tensors_before or (by_objects and objects > objects_before)

    def keep_changes(self) -> bool:
        """Encode the decoded parameter if other code has written to it since `show`; return whether other code has."""
        parameter = self._ref()
        if parameter is None or not self.address:
            return False
        is_other = parameter._version != self.seen or parameter.untyped_storage()._cdata != self.address
        if not is_other and (self.is_pinned or not self.is_checked):
            is_other = not same_bits(parameter.detach(), self.decode())  # .data was written, which autograd does not count
            self.is_checked = not is_other
        if is_other and not _can_be_packed(parameter.data):
            self.version += 1
            self.release()
        elif is_other:
            self._store(parameter.data)
            self.version += 1
            self.address, self.seen = parameter.untyped_storage()._cdata, parameter._version
        return is_other

    def gather(self) -> bool:
        """Encode the decoded parameter if other code has written to it, also by .data; return whether other code has.

        Code that reads the codes in order to change them must call this before.
        """
        if not self.address:
            return False
        self.is_checked = False  # compare values, since .data may have been written
        is_other = self.keep_changes()
        parameter = self.parameter
        if is_other and parameter is not None and not self.is_released:
            parameter.data.copy_(self.decode())  # the rounded values, or the next call would see a difference
        return is_other

    def pin(self) -> None:
        """Keep the parameter decoded from now on, at the same address, in addition to its codes, for compiled models."""
        self.users += 1
        if not self.address:
            self.show()
        self.is_pinned = True

    def release(self, values: Tensor | None = None) -> None:
        """Make the parameter an ordinary nn.Parameter for good, with `values`, or with the decoded values for None."""
        parameter = self.parameter
        if parameter is not None and not self.is_released:
            if values is not None:
                self._swap(values.detach(), nn.Parameter)
            elif not self.address:
                self.show()
            del vars(parameter)[KEY]
        self.address = 0


def weight_of(parameter: Tensor) -> Weight | None:
    """Return the `Weight` that holds the codes of a packed parameter; None for other tensors."""
    return vars(parameter).get(KEY)


def pack(parameter: nn.Parameter, format: Format, packed_class: type[Tensor], **hooks: Any) -> Weight:
    """Pack a parameter in `format`, rounded to nearest, and return the `Weight` that holds its codes.

    Views and saved tensors of its old memory stay valid. `packed_class` and `hooks` are arguments of `Weight`.
    """
    with torch.no_grad(), outside_inference_mode():
        packed = encode(parameter.detach(), format, order="logical")
        weight = Weight(parameter, packed, packed_class, **hooks)
        values = parameter.detach()[: _num_sampled_rows(packed.shape)].float()
        norm = float(torch.linalg.vector_norm(values))
        weight.rounding_error = _distance(values, _first_rows(packed, len(values))) / norm if norm else 0.0
    vars(parameter)[KEY] = weight
    weight.hide()
    return weight


def empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that has the size, dtype, device and strides of `tensor`, or of a dense copy of it."""
    with outside_inference_mode():
        empty = torch.empty_like(tensor, requires_grad=False)
    empty.untyped_storage().resize_(0)
    empty = Tensor._make_subclass(NoMemory, empty)
    if hasattr(torch._C, "_set_storage_access_error_msg"):  # in builds for CUDA: extensions that read from it raise this
        torch._C._set_storage_access_error_msg(empty, NO_MEMORY)
    else:
        torch._C._set_throw_on_mutable_data_ptr(empty)  # pyright: ignore[reportAttributeAccessIssue]
    return empty


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy of `tensor`: its own, or contiguous ones if it has gaps or overlaps."""
    return torch.empty_like(tensor, device="meta").stride()


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are ordinary even if the caller is in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _num_sampled_rows(shape: torch.Size) -> int:
    """Return how many rows of a tensor of this shape to measure rounding errors on: about SAMPLED values, at least 1 row."""
    return max(SAMPLED * shape[0] // max(shape.numel(), 1), 1)


def _distance(values: Tensor, packed: PackedTensor) -> float:
    return float(torch.linalg.vector_norm(packed.decode().float() - values))


def _first_rows(packed: PackedTensor, num_rows: int) -> PackedTensor:
    first = packed.mapped(lambda part: part[:num_rows] if part.dim() else part)  # one scale of all scales has no rows
    return replace(first, shape=torch.Size((min(num_rows, packed.shape[0]), *packed.shape[1:])))


def _can_be_packed(values: Tensor) -> bool:
    """Return whether values of this dtype, device and layout can be packed: real and dense, on a CPU or GPU."""
    is_real = values.dtype in DTYPES or not (values.is_floating_point() or values.is_complex())
    return is_real and values.device.type in DEVICES and values.layout is torch.strided


def _decoder(packed: PackedTensor) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes `packed` into a contiguous tensor of the same shape."""
    dtype = PLAIN_DTYPES.get(packed.format.element.name) if packed.format.block is None else None
    if dtype is None:
        return decoder(packed)
    values = packed.codes.view(dtype).view(packed.shape)
    return lambda out: out.copy_(values)


def decode_into(packed: PackedTensor, out: Tensor) -> None:
    """Write the values of `packed` into a contiguous tensor of its shape."""
    _decoder(packed)(out)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, NaN and signs of zeros included."""
    integers = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return a.size() == b.size() and a.dtype is b.dtype and torch.equal(a.view(integers), b.view(integers))
