"""`ForwardCalls` names every output of an operation in a forward pass, and calls an `OperationListener` with it.

    layer3.0.conv1:output     the output of `layer3.0.conv1`, a module of torch.nn without children
    encoder.3:add.output      a sum in the forward of `encoder.3`; the second one is `encoder.3:add#2.output`
    relu@2:output             of the second call of `relu` in one forward pass

These are the names that `Watch` gives to outputs that operations save. An operation is one call of torch below Python: functions that are
written in Python (multi-head attention) are followed inside, and cross entropy counts as log_softmax and nll_loss. Views, copies and casts
compute no new value: their results are the value of their input. Operations in compiled and scripted parts cannot be followed. Modules that
checkpointing runs again in backward are followed module by module, each call counted as the first of its module.

Operations have one name for all variants (`op_of`). A tensor carries a mark, an attribute with its listener and value: views and copies
inherit it.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss
from torch.overrides import TorchFunctionMode

from paredown.autograd.graph import is_plain_leaf, next_number
from paredown.autograd.hooks import Hook

MARK = "_paredown_value"  # the attribute of a tensor with (listener, value)
MOVES = frozenset(
    (
        *("reshape", "flatten", "contiguous", "clone", "detach", "expand", "repeat", "repeat_interleave", "roll", "flip", "unfold"),
        *("to", "type", "float", "half", "bfloat16", "getitem", "index_select", "gather", "take_along_dim"),
        *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    )
)
READS = frozenset(("get", "set", "delete"))  # accesses to attributes of tensors
SAME_OP = {
    **dict.fromkeys(("conv_transpose", "convolution"), "conv"),
    **dict.fromkeys(("mm", "addmm"), "linear"),
    **dict.fromkeys(("bmm", "baddbmm", "einsum", "mv"), "matmul"),
    **dict.fromkeys(("adaptive_avg_pool",), "avg_pool"),
    **dict.fromkeys(("adaptive_max_pool", "max_pool2d_with_indices"), "max_pool"),
    **dict.fromkeys(("feature_dropout", "native_dropout", "alpha_dropout"), "dropout"),
    **{"nll_loss_nd": "nll_loss", "truediv": "div", "_softmax": "softmax"},
}
PRODUCTS = frozenset(("conv", "linear", "matmul"))  # operations that end a tensor group of the mixed-precision paper
CHECKS = re.compile("has_torch_function(_unary|_variadic)?")
# Methods that print or copy a tensor, or start another pass: no operations of the model
NOT_OF_THE_MODEL = frozenset((Tensor.__repr__, Tensor.__format__, Tensor.backward, Tensor.register_hook, Tensor.__deepcopy__))
NO_BACKWARD = -1
CROSS_ENTROPY = torch._C._nn.cross_entropy_loss


@dataclass(eq=False, slots=True)
class OperandSource:
    """One input of an operation: what a listener has attached to it, and the autograd edge along which its gradient flows."""

    value: Any
    edge: tuple[Any, int]  # autograd node, and the number of its output


@dataclass(eq=False, slots=True)
class ForwardOperation:
    """One call of an operation in a forward pass: name, inputs, parameters, and the number of its first autograd node."""

    name: str  # of its outputs, without "output" at the end
    op: str
    sources: list[OperandSource]
    weights: list[nn.Parameter]
    first: int
    num_unknown: int = 0  # float inputs that are neither values nor weights

    def output_name(self, number: int) -> str:
        """Return the name by which plans refer to an output of this operation; `number` counts outputs from 1."""
        return f"{self.name}output{number if number > 1 else ''}"


class OperationListener(ABC):
    """The interface of objects that `ForwardCalls` calls before and after every operation of a forward pass."""

    @abstractmethod
    def taken(self, weight: nn.Parameter) -> Tensor:
        """Return the tensor that operations must use in place of this parameter, such as a rounded copy."""

    @abstractmethod
    def begins(self, operation: ForwardOperation) -> None:
        """Process an operation that will run next; its `name` is not known yet."""

    @abstractmethod
    def made(self, operation: ForwardOperation, out: Tensor, number: int) -> Any:
        """Process `out`, which an operation returned as its output `number` (from 1), and return an object to attach to it.

        `out` may be changed in place.
        """

    def moved(self, value: Any, out: Tensor, name: str) -> tuple[Any, Tensor]:
        """Process `out`, a view or copy of a tensor to which `value` is attached; return the object and tensor to use for it.

        A slice has a `name`, by which plans refer to it; for a tensor with all elements `name` is empty.
        """
        return value, out


def mark(tensor: Tensor, listener: OperationListener, value: Any) -> None:
    """Attach an object to a tensor, which `mark_of` later returns to the same `listener`."""
    setattr(tensor, MARK, (listener, value))


def mark_of(tensor: Tensor, listener: OperationListener) -> Any:
    """Return the object that `mark` has attached to a tensor for this `listener`; None if there is none."""
    marked = getattr(tensor, MARK, None)
    return marked[1] if marked is not None and marked[0] is listener else None


def tensors_in_nest(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in `values`, which may be nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in_nest(value)
    elif isinstance(values, dict):
        yield from tensors_in_nest(list(values.values()))


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter."""
    return type(tensor) is nn.Parameter or (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter))


def replace_tensors(values: Any, by: Callable[[Any], Tensor], kind: type[Tensor] = nn.Parameter) -> Any:
    """Return nested containers with `by(tensor)` in place of each parameter, or of each tensor if `kind` is Tensor."""
    if isinstance(values, Tensor):
        return by(values) if kind is Tensor or is_weight(values) else values
    if isinstance(values, dict):
        return {key: replace_tensors(value, by, kind) for key, value in values.items()}
    return type(values)([replace_tensors(value, by, kind) for value in values]) if type(values) in (tuple, list) else values


@cache
def op_of(func: Any) -> str:
    """Return an operation's name, the same for all variants: "conv" for conv1d and conv2d, "add" for `+`, add and add_.

    >>> [op_of(f) for f in (nn.functional.conv2d, Tensor.__iadd__, Tensor.relu_, nn.functional.avg_pool2d)]
    ['conv', 'add', 'relu', 'avg_pool']
    """
    text = getattr(func, "__name__", "")
    name = text.strip("_")
    if text.startswith("__") and name[:1] in "ir" and name[1:] in ("add", "sub", "mul", "truediv", "matmul", "pow", "div"):
        name = name[1:]
    name = re.sub("[123]d$", "", name)
    return SAME_OP.get(name, name)


@cache
def without_mode_check(func: FunctionType) -> Callable[..., Any]:
    """Return a copy of a torch function written in Python, without the checks that hide its inside from modes.

    A TorchFunctionMode then sees the functions that it calls.
    """
    checks = {name: lambda *_: False for name in func.__globals__ if CHECKS.fullmatch(name)}
    unchecked = FunctionType(func.__code__, {**func.__globals__, **checks}, func.__name__, func.__defaults__, func.__closure__)
    unchecked.__kwdefaults__ = func.__kwdefaults__
    return unchecked


# --- following a forward pass ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Frame:
    """A module whose forward is running, with the number of times that each operation was called in it so far."""

    path: str
    is_plain_leaf: bool
    counts: dict[str, int] = field(default_factory=dict)

    def prefix(self, op: str) -> str:
        """Count a call of the operation `op`, and return the beginning of its outputs' names, such as "encoder.3:add#2."."""
        self.counts[op] = count = self.counts.get(op, 0) + 1
        if self.is_plain_leaf and len(self.counts) == 1 and count == 1:
            return f"{self.path}:"
        return f"{self.path}:{op}." if count == 1 else f"{self.path}:{op}#{count}."


@final
class ForwardCalls(TorchFunctionMode):
    """A TorchFunctionMode that calls a listener for each operation of a forward pass, and names the operation's outputs."""

    def __init__(self, model: nn.Module, listener: OperationListener) -> None:
        super().__init__()
        self._paths = {module: (name, is_plain_leaf(module)) for name, module in model.named_modules()}
        self._model, self._listener = model, listener
        self._running = threading.local()
        self._handles: list[Any] = []

    # --- the running module ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register hooks that record which module is running."""
        for module in self._paths:
            if module is not self._model and not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_pre_hook(Hook(self._enter)))
                self._handles.append(module.register_forward_hook(Hook(self._leave), always_call=True))

    def detach(self) -> None:
        """Remove the hooks that record which module is running."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def following(self, path: str = "") -> Generator[None]:
        """Return a context that calls the listener for operations outside of the model; names begin with `path`."""
        self.start(path)
        try:
            yield
        finally:
            self.stop()

    def start(self, path: str = "") -> None:
        """Begin to call the listener for each operation, as a forward pass begins, which may be inside of another one."""
        outer = self._running.frames if self.is_running else None
        if outer is None:
            self.__enter__()
            self._running.open, self._running.outer = list[Any](), list[Any]()
        self._running.outer.append((outer, getattr(self._running, "times", None)))
        self._running.frames = [Frame(path, not path and is_plain_leaf(self._model))]
        self._running.times = dict[str, int]()

    def stop(self) -> None:
        """End what the last `start` has begun: the innermost forward pass is over."""
        self._running.frames, self._running.times = self._running.outer.pop()
        if not self.is_running:
            self.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Return a context in which the listener is not called."""
        frames, self._running.frames = getattr(self._running, "frames", None), None
        try:
            yield
        finally:
            self._running.frames = frames

    @property
    def is_running(self) -> bool:
        """Whether this thread is inside a forward pass whose operations the listener gets."""
        return getattr(self._running, "frames", None) is not None

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.is_running and torch._C._current_graph_task_id() != NO_BACKWARD:
            self.start()  # a checkpointed module that runs again in backward
            self._running.checkpointed = module
        if self.is_running:
            path, is_leaf = self._paths.get(module) or ("", False)
            self._running.times[path] = times = self._running.times.get(path, 0) + 1
            self._running.frames.append(Frame(path if times == 1 else f"{path}@{times}", is_leaf))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.is_running and len(self._running.frames) > 1:
            self._running.frames.pop()
            if len(self._running.frames) == 1 and getattr(self._running, "checkpointed", None) is module:
                self._running.checkpointed = None
                self.stop()

    # --- operations -----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_running or func in NOT_OF_THE_MODEL:
            return func(*args, **kwargs)
        if isinstance(func, FunctionType) and func not in self._running.open:
            return self._follow_inside(func, args, kwargs)
        if func is CROSS_ENTROPY and (cross_entropy := _split_cross_entropy(*args, **kwargs)) is not None:
            with self:
                return cross_entropy()
        op = op_of(func)
        return func(*args, **kwargs) if op in READS or op == "" else self._run(func, op, args, kwargs)

    def _follow_inside(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        self._running.open.append(func)
        try:
            with self:
                return without_mode_check(func)(*args, **kwargs)
        finally:
            self._running.open.pop()

    def _run(self, func: Any, op: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        tensors = [t for t in tensors_in_nest((args, kwargs)) if t.is_floating_point()]
        if not tensors:
            return func(*args, **kwargs)
        if op in MOVES:
            return self._moved(self._call(func, args, kwargs, tensors), op, tensors)
        versions = [_version(t) for t in tensors]
        values = [(t, mark_of(t, self._listener)) for t in tensors]
        sources = [OperandSource(value, (t.grad_fn, t.output_nr)) for t, value in values if value is not None]
        weights = [cast("nn.Parameter", t) for t in tensors if is_weight(t)]
        frame, num_unknown = self._running.frames[-1], len(tensors) - len(sources) - len(weights)
        operation = ForwardOperation("", op, sources, weights, next_number(), num_unknown)
        self._listener.begins(operation)
        out = self._call(func, args, kwargs, tensors)
        storages = {_storage(t) for t, version in zip(tensors, versions, strict=True) if _version(t) == version}
        if tensors[0].is_inference() and _is_in_place(func.__name__):
            storages.discard(_storage(tensors[0]))  # inference tensors have no version counter
        outputs = [t for t in tensors_in_nest(out) if t.is_floating_point() and _storage(t) not in storages]
        if not outputs or is_weight(outputs[0]):
            return self._moved(out, op, tensors)
        operation.name = frame.prefix(op)
        for number, tensor in enumerate(outputs, 1):
            mark(tensor, self._listener, self._listener.made(operation, tensor, number))
        return out

    def _moved(self, out: Any, op: str, tensors: list[Tensor]) -> Any:
        """Return `out`, a view or copy of one of `tensors`, or several, after attaching to it the object of that tensor."""
        source = next((t for t in tensors if mark_of(t, self._listener) is not None), None)
        return out if source is None else replace_tensors(out, lambda tensor: self._part(tensor, source, op), Tensor)

    def _part(self, tensor: Tensor, source: Tensor, op: str) -> Tensor:
        if not tensor.is_floating_point() or tensor is source:
            return tensor
        is_part = 0 < tensor.numel() < source.numel()
        name = f"{self._running.frames[-1].prefix(op)}output" if is_part else ""
        value, tensor = self._listener.moved(mark_of(source, self._listener), tensor, name)
        mark(tensor, self._listener, value)
        return tensor

    def _call(self, func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor]) -> Any:
        if any(is_weight(t) for t in tensors) and not func.__name__.endswith("_"):
            args, kwargs = replace_tensors(args, self._listener.taken), replace_tensors(kwargs, self._listener.taken)
        return func(*args, **kwargs)


def _split_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Callable[[], Tensor] | None:
    """Return a function that computes cross entropy as log_softmax and nll_loss; None for class probabilities or smoothing."""
    if target.is_floating_point() or label_smoothing > 0:
        return None
    name = ("none", "mean", "sum")[int(reduction)]
    return lambda: nll_loss(
        log_softmax(x, 0 if x.dim() == 1 else 1), target, weight, ignore_index=int(ignore_index), reduction=name
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
