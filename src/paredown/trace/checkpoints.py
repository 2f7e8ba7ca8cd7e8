"""What torch.utils.checkpoint keeps: the inputs of a layer until backward, and in backward what its second forward pass saves.

A checkpointed layer runs again in backward, from its inputs. Tensors among its positional arguments are kept as saved tensors, which take
hooks like those of autograd's graph: by a `CheckpointFunction` node with use_reentrant=True, otherwise by the frame of the checkpoint,
which its saved-tensor hooks refer to. `Watch` reports them as slots:

    layers.3:checkpoint.input       the input of the checkpointed layer `layers.3`; a second tensor is `layers.3:checkpoint.input2`
    encoder:checkpoint#2.input      of the second checkpoint in the forward of `encoder` whose function passes the input to no module

Backward is that of the layer at the decoded input. Where the layer is smooth, its gradient changes as little as the input. It does not
where the layer compares values: a sign that flips changes a whole gradient, and another choice of an expert sends a token elsewhere, with
other shapes. (Six residual blocks of a norm and an MLP, inputs in int8/64@bf16: gradients differ by 0.45 % with GELU, SiLU or tanh, and
by 3 % with ReLU.) So an input is stored unmodified if

    the layer compares: an operation in it is a ReLU or another function with a kink, max pooling, a maximum or a clamp
    the layer routes: an operation in it sorts or selects by values (top-k, x[mask]), or the class of a module is named so
    no gradient flows to it, as to masks and tables
    no operation of the layer was seen to read it

With use_reentrant=True the layer runs without autograd's graph: its modules, and functions such as F.relu that are their attributes, tell
what it does. A function that is only called in the forward of a module is not seen then.

In backward a checkpoint with use_reentrant=False runs its layer again, and holds every tensor that this pass saves until backward reads it:
of a transformer several times the size of its hidden states, which is the peak of most checkpointed steps. `RecomputedLayer` lets the
owner of a `Watch` store the large ones packed. It describes them in the first forward pass, where autograd's graph shows which operation
saves which tensor, in the order in which the second pass saves them again. In the second pass `SecondPass` encloses the saved-tensor
hooks of the checkpoint: it stores a tensor, and neither the second graph nor the frame of the checkpoint holds the original. Backward gets
what the frame's dictionary returns, and `RecomputedTensors` unpacks there. With use_reentrant=True the second pass is the first one with a
graph, which nothing else holds: `Watch` reads it as that of any forward pass, and `ReentrantSaves` stores the large tensors.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import pooling

from paredown.trace.autograd_graph import NO_SEQUENCE, Pass, Saved, has_storage, kind_of, tensors_in
from paredown.trace.operations import (
    CHECKPOINT,
    COMPARES,
    RECOMPUTES,
    ROUTES,
    SELECTING,
    Use,
    input_operand,
    is_large_in_second_pass,
    is_stored_in_second_pass,
    reason_of_ops,
)

REENTRANT = "CheckpointFunctionBackward"  # node of a checkpoint with use_reentrant=True
NO_GRADIENT = "no gradient flows to it: masks and tables are inputs of that kind"
UNREAD = "no operation of the checkpointed layer was seen to read it"
HIDDEN = (
    "no module of the checkpointed layer takes it as an argument, and use_reentrant=True hides operations: use use_reentrant=False"
)


ROUTER = re.compile(r"router|moe|expert|topk", re.IGNORECASE)  # class names of modules
COMPARING_MODULES = (
    *(
        nn.ReLU,
        nn.LeakyReLU,
        nn.RReLU,
        nn.PReLU,
        nn.Threshold,
        nn.Hardtanh,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardshrink,
        nn.Softshrink,
    ),
    *(pooling._MaxPoolNd, pooling._AdaptiveMaxPoolNd, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
COMPARING_FUNCTIONS = (
    *(torch.relu, F.relu, F.relu6, F.leaky_relu, F.hardtanh, F.hardswish, F.hardsigmoid, F.prelu, F.rrelu),
    *(torch.relu_, F.relu_, F.max_pool1d, F.max_pool2d, F.max_pool3d),
)
SAME_VALUES = ("view", "unsafe_view", "reshape", "t", "transpose", "permute", "to_copy", "clone")
WORDS, DIMENSIONS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])"), re.compile(r"(\d)D")


# --- finding the inputs ------------------------------------------------------------------------------------------------------------


top_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def running_checkpoint() -> Any:
    """The frame of the innermost running checkpoint of this thread with use_reentrant=False; None if there is none."""
    hooks: Any = top_default_hooks(True)
    pack: Any = hooks[0] if hooks is not None else None
    if not getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.") or pack.__module__ != torch.utils.checkpoint.__name__:
        return None
    variables = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    return variables["frame"].cell_contents if "frame" in variables else None


def inputs_of(frame: Any) -> list[tuple[Any, Tensor]]:
    """(handle, tensor) of each tensor that a checkpoint keeps, but for those that other hooks hold or that were modified in place."""
    saver = getattr(frame, "input_saver", None)
    if saver is not None:  # torch 2.11: a node that no graph reaches; the first tensor that it saved is a placeholder
        node: Any = saver.grad_fn
        raws: tuple[Any, ...] = node._raw_saved_tensors[1:]
        return [] if any(raw.unpack_hook is not None for raw in raws) else _read(raws, lambda: node.saved_tensors[1:])
    pairs: list[tuple[Any, Tensor]] = []
    for raw in getattr(frame, "saved_args", ()):
        if isinstance(raw, torch._C._autograd.SavedTensor) and raw.unpack_hook is None:
            pairs += _read((raw,), lambda raw=raw: (raw.unpack(),))
    return pairs


def _read(raws: Iterable[Any], read: Any) -> list[tuple[Any, Tensor]]:
    try:
        return list(zip(raws, read(), strict=True))
    except RuntimeError:  # modified in place since it was saved: backward raises the error
        return []


def key_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensor objects with the same memory, while that is alive."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride()


def describe_input(place: str, number: int, raw: Any, tensor: Tensor, kind: str, reason: str) -> Saved:
    """The description of the input `number` of a checkpoint; `place`: its name up to the operand; `reason`: why it is not quantized."""
    operand = input_operand(number)
    use = Use.EXACT if reason else Use.VALUE
    pin = None if reason else RECOMPUTES
    described = use, kind, pin, None, reason, False
    return Saved(f"{place}{operand}", place.partition(":")[0], CHECKPOINT, operand, *described, "", None, raw, tensor)


# --- what reads them ---------------------------------------------------------------------------------------------------------------


def op_of(node: Any) -> str:
    """The operation of a node, as in aten's names: "max_pool2d_with_indices"."""
    name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    return WORDS.sub("_", DIMENSIONS.sub(r"\1d_", name)).lower().strip("_")


def reason_exact(tensor: Tensor, output: Any, first: int, layer: nn.Module) -> str:
    """Why the input `tensor` of a checkpointed layer is not quantized; "" if it may be. `first`: number of the layer's first node."""
    if not tensor.requires_grad:
        return NO_GRADIENT
    nodes = _nodes(output, first)
    ops = [op_of(node) for node in nodes if not (op_of(node) == SELECTING and _selects_weights(node))]
    routers = _routers_in(layer)
    reason = ROUTES.format(routers[0]) if routers else reason_of_ops(ops)
    return reason or ("" if _is_read(tensor, nodes) else UNREAD)


def _routers_in(layer: nn.Module) -> list[str]:
    """The classes of modules inside `layer` that are named after routing."""
    return [type(module).__name__ for module in layer.modules() if ROUTER.search(type(module).__name__)]


def _nodes(output: Any, first: int) -> list[Any]:
    """The nodes behind `output` from number `first` on."""
    pending: list[Any] = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    nodes: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes and first <= node._sequence_nr() < NO_SEQUENCE:
            nodes[node] = None
            pending += [before for before, _ in node.next_functions]
    return list(nodes)


def _is_read(tensor: Tensor, nodes: Iterable[Any]) -> bool:
    """Whether one of the nodes reads `tensor`."""
    edge = tensor.grad_fn, tensor.output_nr
    return any(edge in node.next_functions for node in nodes)


def _selects_weights(node: Any) -> bool:
    """Whether a node selects rows of a parameter, as a table of position biases."""
    before = node.next_functions[0][0] if node.next_functions else None
    while before is not None and op_of(before) in SAME_VALUES:
        before = before.next_functions[0][0]
    return before is not None and before._sequence_nr() >= NO_SEQUENCE


# --- layers that run without a graph: use_reentrant=True ------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class HiddenLayer:
    """A module that runs under no_grad inside a forward pass with gradients: perhaps the layer of a reentrant checkpoint.

    `inputs`: `key_of` each argument that needs a gradient -> whether a module inside got it.
    """

    module: nn.Module
    path: str
    inputs: dict[tuple[Any, ...], bool]

    @staticmethod
    def of(module: nn.Module, path: str, args: Any) -> HiddenLayer | None:
        """The layer `module` of a checkpoint; None where no argument needs a gradient."""
        is_leaf = next(module.children(), None) is None
        inputs = {key_of(arg): is_leaf for arg in _differentiable(args)}
        return HiddenLayer(module, path, inputs) if inputs else None

    def enter(self, args: Any) -> None:
        """Note that a module inside it is called."""
        self.inputs.update({key: True for arg in _differentiable(args) if (key := key_of(arg)) in self.inputs})

    def reason_exact(self, tensor: Tensor) -> str:
        """Why an input is not quantized; "" if it may be."""
        if not tensor.requires_grad:
            return NO_GRADIENT
        routers, comparing = _routers_in(self.module), _comparing_in(self.module)
        if routers or comparing:
            return ROUTES.format(routers[0]) if routers else COMPARES.format(comparing)
        return "" if self.inputs.get(key_of(tensor), False) else HIDDEN


def _comparing_in(layer: nn.Module) -> str:
    """The class of a module inside `layer` that compares values, or such a function among attributes; "" if there is none."""
    for module in layer.modules():
        if isinstance(module, COMPARING_MODULES):
            return type(module).__name__
        functions = [value for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module | type)]
        name = next((one.__name__ for one in COMPARING_FUNCTIONS for function in functions if function is one), "")
        if name:
            return name
    return ""


def _differentiable(args: Any) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad and has_storage(arg)]


# --- what the second forward pass saves ---------------------------------------------------------------------------------------------

Store = Callable[[Saved], Any]  # stores a saved tensor: an object whose tensor() is the unpacked one, None to leave it unmodified
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class CapturedHooks:
    """Takes hooks in the place of a saved-tensor handle, for tensors that a second forward pass saves."""

    __slots__ = ("_tensor", "packed", "unpack")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.packed = tensor, None
        self.unpack: Callable[[Any], Tensor] | None = None

    def register_hooks(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Keep what `pack` returns."""
        self.packed, self.unpack = pack(self._tensor), unpack


class RecomputedSave:
    """What is stored for one tensor of a second forward pass; torch compares its shape, dtype and device with those of the first."""

    __slots__ = ("device", "dtype", "shape", "stored")

    def __init__(self, stored: Any, tensor: Tensor) -> None:
        self.stored, self.shape, self.dtype, self.device = stored, tensor.shape, tensor.dtype, tensor.device

    def tensor(self) -> Tensor:
        """The unpacked tensor."""
        return self.stored.tensor()


def stored_operand(node: Any) -> Any:
    """What a second forward pass stored for the operand `self` of an operation, by the operation's node; None if it is no such node."""
    raw = getattr(node, "_raw_saved_self", None)
    found = raw.data if raw is not None and raw.unpack_hook is not None else None
    found = found[0] if isinstance(found, tuple) else found  # hooks for packed weights may enclose those of the pass
    return found.stored if type(found) is RecomputedSave else None


class _State:
    """What the dictionaries of one frame share."""

    __slots__ = ("is_compared", "save")

    def __init__(self) -> None:
        self.save: RecomputedSave | None = None  # for the tensor that torch is about to store
        self.is_compared = False  # whether torch compares the passes, and needs no values


class RecomputedTensors(weakref.WeakKeyDictionary[Any, Any]):
    """Handle -> tensor of one backward, as torch.utils.checkpoint stores them; packed tensors are unpacked when they are read."""

    def __init__(self, state: _State) -> None:
        super().__init__()
        self._state = state

    def __setitem__(self, handle: Any, tensor: Any) -> None:
        save, self._state.save = self._state.save, None
        super().__setitem__(handle, tensor if save is None else save)

    def __getitem__(self, handle: Any) -> Any:
        found = super().__getitem__(handle)
        return found if type(found) is not RecomputedSave or self._state.is_compared else found.tensor()


class RecomputedPasses(dict[Any, RecomputedTensors]):
    """Number of a backward -> its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.state = _State()

    def __missing__(self, number: Any) -> RecomputedTensors:
        self[number] = tensors = RecomputedTensors(self.state)
        return tensors


FRAME = ("recompute_fn", "recomputed", "check_recomputed_tensors_match")  # private names of torch 2.11 to 2.13


class RecomputedLayer:
    """A checkpointed layer whose second forward passes store large tensors packed.

    `hooked`: what the operations of its first forward pass saved. `begin` starts a second one, and returns the function that stores.
    """

    def __init__(self, frame: Any, module: nn.Module, hooked: Iterable[Saved], begin: Callable[[], Store]) -> None:
        places = {id(holder): place for place, ref in enumerate(frame.weak_holders) if (holder := ref()) is not None}
        self.saves: list[Saved | None] = [None] * len(frame.weak_holders)  # in the order of saving
        for saved in hooked:
            holder = saved.raw.data[0] if isinstance(saved.raw.data, tuple) else saved.raw.data
            if id(holder) in places and is_stored_in_second_pass(saved.op, saved.needs):
                self.saves[places[id(holder)]] = replace(saved, kind="activation", node=None, raw=None)
        self.modules, self.begin = tuple(module.modules()), begin

    def follow(self, frame: Any) -> None:
        """Store what the second forward pass of this checkpoint saves; of one that saved another number of tensors nothing is stored."""
        is_known = all(hasattr(frame, name) for name in FRAME)
        if not is_known or len(frame.weak_holders) != len(self.saves) or not any(self.saves):
            return
        reference = weakref.ref(frame)  # the frame must not refer to itself: its tensors would outlive backward
        frame.recomputed = RecomputedPasses()
        frame.recompute_fn = partial(self._recompute, reference, frame.recompute_fn)
        frame.check_recomputed_tensors_match = partial(_compare, reference)

    def _recompute(self, reference: weakref.ref[Any], function: Callable[..., Any], *args: Any) -> None:
        frame = reference()
        assert frame is not None
        second = SecondPass(self, frame, args)
        try:
            function(*args)
        finally:
            second.end()


def _compare(reference: weakref.ref[Any], number: Any) -> None:
    """torch's comparison of both forward passes, by shape, dtype and device."""
    frame = reference()
    assert frame is not None
    state: _State = frame.recomputed.state
    state.is_compared = True
    try:
        type(frame).check_recomputed_tensors_match(frame, number)
    finally:
        state.is_compared = False


class SecondPass:
    """Saved-tensor hooks around those of torch.utils.checkpoint, while a layer runs for the second time."""

    def __init__(self, layer: RecomputedLayer, frame: Any, args: Any) -> None:
        self._outer: Any = top_hooks(True)
        self._saves, self._holders, self._state = layer.saves, frame.weak_holders, frame.recomputed.state
        self._place, self._store = 0, layer.begin()
        inputs = frozenset(t.untyped_storage()._cdata for t in args if isinstance(t, Tensor) and has_storage(t))
        self._forward = Pass(inputs, layer.modules, [])  # inputs were packed before, and their decoded copies stay
        # not torch.autograd.graph.saved_tensors_hooks, which would refer to this object as this object to it
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """What is stored in the place of `tensor`, for the second graph; the checkpoint gets it too."""
        place, self._place = self._place, self._place + 1
        save = self._save(place, tensor) if place < len(self._saves) and self._saves[place] is not None else None
        self._state.save = save
        kept = self._outer[0](tensor)
        return kept if save is None else save

    def _save(self, place: int, tensor: Tensor) -> RecomputedSave | None:
        if (
            not has_storage(tensor)
            or not is_large_in_second_pass(tensor.untyped_storage().nbytes())
            or self._holders[place]() is None
        ):
            return None
        saved = self._saves[place]
        assert saved is not None
        if kind_of(tensor, saved.operand, self._forward) != "activation":
            self._saves[place] = None
            return None
        stored = self._store(replace(saved, tensor=tensor))
        return RecomputedSave(stored, tensor) if stored is not None else None

    def unpack(self, kept: Any) -> Tensor:
        """The tensor, where backward runs through the second graph."""
        return kept.tensor() if type(kept) is RecomputedSave else self._outer[1](kept)

    def end(self) -> None:
        """Remove the hooks."""
        hooks: Any = top_hooks(True)
        if hooks is not None and hooks[0] == self.pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        del self._store  # and what it remembers of the pass


class ReentrantSaves:
    """Stores the large tensors that the second forward pass of a layer saves, under a checkpoint with use_reentrant=True."""

    __slots__ = ("_backward", "_store", "num_large", "num_stored")

    def __init__(self, store: Store) -> None:
        self._store, self._backward = store, running_backward()
        self.num_large = self.num_stored = 0

    @property
    def is_running(self) -> bool:
        """Whether the backward that runs the layer again is the one that runs now; one that raised ended without a word."""
        return self._backward == running_backward()

    def __call__(self, saved: Saved) -> None:
        """Store one tensor, if it is large and its operation allows it."""
        tensor = saved.tensor
        if tensor is None or saved.kind != "activation" or not has_storage(tensor):
            return
        if not is_large_in_second_pass(tensor.untyped_storage().nbytes()) or not is_stored_in_second_pass(saved.op, saved.needs):
            return
        stored = self._store(replace(saved, node=None, raw=None))
        self.num_large += 1
        if stored is not None:
            self.num_stored += 1
            save = RecomputedSave(stored, tensor)
            saved.raw.register_hooks(lambda tensor: save, RecomputedSave.tensor)


def running_backward() -> int:
    """The number of the backward that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()
