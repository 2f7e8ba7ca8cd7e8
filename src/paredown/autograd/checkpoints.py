"""Finds the layer inputs that torch.utils.checkpoint keeps until backward, and decides which may be quantized.

A checkpointed layer runs again in backward, from its inputs. Tensors among its positional arguments are kept as saved tensors, which take
hooks like those of autograd's graph: by a `CheckpointFunction` node with use_reentrant=True, otherwise by the frame of the checkpoint,
which its saved-tensor hooks refer to. `Watch` (module_watch.py) reports them under these slot names:

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

What the second forward pass of a checkpointed layer saves: autograd/second_passes.py.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import pooling

from paredown.autograd.graph import NO_SEQUENCE, ModuleCall, Pass, Saved, has_storage, kind_of, nodes_behind, saved_of
from paredown.autograd.operations import (
    CHECKPOINT,
    COMPARES,
    RECOMPUTES,
    ROUTES,
    SELECTING,
    Use,
    input_operand,
    reason_of_ops,
)
from paredown.autograd.second_passes import RecomputedLayer, Store, top_default_hooks

REENTRANT = "CheckpointFunctionBackward"  # node of a checkpoint with use_reentrant=True
NO_GRADIENT = "no gradient flows to it: masks and tables are inputs of that kind"
UNREAD = "no operation of the checkpointed layer was seen to read it"
HIDDEN = (
    "no module of the checkpointed layer takes it as an argument, and use_reentrant=True hides operations: use use_reentrant=False"
)


ROUTER = re.compile(r"router|moe|expert|topk", re.IGNORECASE)  # class names of modules
ROUTES_ITSELF = re.compile(r"router|topk", re.IGNORECASE)  # class names of modules whose own weight scores the experts
ROUTER_NAMES = ("gate", "router")  # of linear layers in modules that ROUTER matches
ADAPTED = ".base_layer"  # what PEFT adds to the path of a layer
CHOOSES = "it scores experts: from a rounded weight, tokens would go to others"
COMPARING_MODULES = (
    *(nn.ReLU, nn.LeakyReLU, nn.RReLU, nn.PReLU, nn.Threshold),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink),
    *(pooling._MaxPoolNd, pooling._AdaptiveMaxPoolNd, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
COMPARING_FUNCTIONS = (
    *(torch.relu, F.relu, F.relu6, F.leaky_relu, F.hardtanh, F.hardswish, F.hardsigmoid, F.prelu, F.rrelu),
    *(torch.relu_, F.relu_, F.max_pool1d, F.max_pool2d, F.max_pool3d),
)
SAME_VALUES = ("view", "unsafe_view", "reshape", "t", "transpose", "permute", "to_copy", "clone")
WORDS, DIMENSIONS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])"), re.compile(r"(\d)D")


# --- finding the inputs ------------------------------------------------------------------------------------------------------------


def running_checkpoint() -> Any:
    """Return the frame (torch's record) of the innermost checkpoint with use_reentrant=False that runs in this thread, or None."""
    hooks: Any = top_default_hooks(True)
    pack: Any = hooks[0] if hooks is not None else None
    if not getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.") or pack.__module__ != torch.utils.checkpoint.__name__:
        return None
    variables = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    return variables["frame"].cell_contents if "frame" in variables else None


def inputs_of(frame: Any) -> list[tuple[Any, Tensor]]:
    """Return (handle, tensor) for each input that torch.utils.checkpoint keeps of a layer, and that may be packed.

    A handle is autograd's `SavedTensor`, which takes hooks. `frame`: the object in which torch.utils.checkpoint keeps the checkpoint's
    state.
    """
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
    """Return a key that is equal for tensors with the same memory and layout, as long as the memory is allocated."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride()


def describe_input(place: str, number: int, raw: Any, tensor: Tensor, kind: str, reason: str) -> Saved:
    """Return a description (`Saved`) of input `number` of a checkpoint, counted from 0, as for other saved tensors.

    `place`: the start of its slot name, such as "layers.3:checkpoint.". `raw`: autograd's handle (`SavedTensor`) of the input. `kind`: what
    `kind_of` returned for it. `reason`: why it must not be quantized; "" if it may be.
    """
    operand = input_operand(number)
    use = Use.EXACT if reason else Use.VALUE
    pin = None if reason else RECOMPUTES
    described = use, kind, pin, None, reason, False
    return Saved(f"{place}{operand}", place.partition(":")[0], CHECKPOINT, operand, *described, "", None, raw, tensor)


# --- what reads them ---------------------------------------------------------------------------------------------------------------


def op_of(node: Any) -> str:
    """Return the name of the aten operation that an autograd node belongs to, such as "max_pool2d_with_indices"."""
    name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    return WORDS.sub("_", DIMENSIONS.sub(r"\1d_", name)).lower().strip("_")


def reason_exact(tensor: Tensor, output: Any, first: int, layer: nn.Module) -> str:
    """Return why the checkpoint input `tensor` must stay exact, such as a comparison in the layer; "" if it need not.

    `output`: the layer's output. `first`: the sequence number of the layer's first autograd node.
    """
    if not tensor.requires_grad:
        return NO_GRADIENT
    nodes = nodes_behind(output, first)
    ops = [op_of(node) for node in nodes if not (op_of(node) == SELECTING and _selects_weights(node))]
    routers = _routers_in(layer)
    reason = ROUTES.format(routers[0]) if routers else reason_of_ops(ops)
    return reason or ("" if _is_read(tensor, nodes) else UNREAD)


def _routers_in(layer: nn.Module) -> list[str]:
    """Return the class names of submodules of `layer` that are named after routing, such as "MoE" or "Router"."""
    return [type(module).__name__ for module in layer.modules() if ROUTER.search(type(module).__name__)]


def router_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights by which a model chooses experts, by name; if they were rounded, tokens would go to other experts.

    >>> class SparseMoeBlock(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.up_proj = nn.Linear(64, 8, bias=False), nn.Linear(64, 256)
    >>> list(router_weights(nn.Sequential(SparseMoeBlock())))
    ['0.gate.weight']
    """
    modules = dict(model.named_modules())
    found: dict[str, nn.Parameter] = {}
    for path, module in modules.items():
        parent, _, name = path.removesuffix(ADAPTED).rpartition(".")
        is_gate = name in ROUTER_NAMES and type(module) is nn.Linear and bool(ROUTER.search(type(modules[parent]).__name__))
        if is_gate or ROUTES_ITSELF.search(type(module).__name__):
            found |= {name: p for name, p in module.named_parameters(prefix=path, recurse=False) if p.ndim > 1}
    return found


def _is_read(tensor: Tensor, nodes: Iterable[Any]) -> bool:
    edge = tensor.grad_fn, tensor.output_nr
    return any(edge in node.next_functions for node in nodes)


def _selects_weights(node: Any) -> bool:
    """Return whether an indexing node selects rows of a parameter, such as a table of position biases."""
    before = node.next_functions[0][0] if node.next_functions else None
    while before is not None and op_of(before) in SAME_VALUES:
        before = before.next_functions[0][0]
    return before is not None and before._sequence_nr() >= NO_SEQUENCE


# --- layers that run without a graph: use_reentrant=True ------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class HiddenLayer:
    """Records a module that runs under no_grad in a training step, like the layer of a use_reentrant=True checkpoint.

    `inputs` maps the `key_of` each argument that needs a gradient to whether a submodule was seen to get this argument.
    """

    module: nn.Module
    path: str
    inputs: dict[tuple[Any, ...], bool]

    @staticmethod
    def of(module: nn.Module, path: str, args: Any) -> HiddenLayer | None:
        """Return the record of a module that starts to run under no_grad; None if none of its arguments requires a gradient."""
        is_leaf = next(module.children(), None) is None
        inputs = {key_of(arg): is_leaf for arg in _differentiable(args)}
        return HiddenLayer(module, path, inputs) if inputs else None

    def enter(self, args: Any) -> None:
        """Record which inputs of the layer are among `args`, the arguments of a submodule that the layer calls."""
        self.inputs.update({key: True for arg in _differentiable(args) if (key := key_of(arg)) in self.inputs})

    def reason_exact(self, tensor: Tensor) -> str:
        """Return why the checkpoint input `tensor` must not be quantized, such as a comparison in the layer; "" if it may be.

        `output`: the layer's output. `first`: the sequence number of the layer's first autograd node.
        """
        if not tensor.requires_grad:
            return NO_GRADIENT
        routers, comparing = _routers_in(self.module), _comparing_in(self.module)
        if routers or comparing:
            return ROUTES.format(routers[0]) if routers else COMPARES.format(comparing)
        return "" if self.inputs.get(key_of(tensor), False) else HIDDEN


def _comparing_in(layer: nn.Module) -> str:
    """Return the name of a module or function in `layer` that compares values, such as ReLU; "" if there is none."""
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


# --- the checkpoints of a model --------------------------------------------------------------------------------------------------------


class Checkpoints:
    """Finds the inputs that checkpointed layers keep for backward, and describes them, so that `Watch` can report them."""

    def __init__(self) -> None:
        self.reports_inputs = True
        self.reported: set[str] = set()  # paths of layers whose saved tensors were reported once
        self.on_recomputation: Callable[[], Store] | None = None  # starts the second forward pass of a checkpointed layer
        self._recomputed: dict[str, RecomputedLayer] = {}  # layers of other checkpoints, by the path of their call
        self.reentrant: dict[nn.Module, bool] = {}  # layers of reentrant checkpoints -> whether to follow their second passes
        self.in_second_passes: set[str] = set()  # slot names of the tensors that these layers saved in the first step
        self._reasons_exact: dict[tuple[str, bool], str] = {}  # (slot of an input, whether it needs a gradient) -> reason

    def store_by(self, on_recomputation: Callable[[], Store]) -> None:
        """Set the function `on_recomputation`, which is called when backward begins to run a checkpointed layer again.

        It must return a function that packs tensors, which is called with each tensor that the layer saves in this run.
        """
        self.on_recomputation = on_recomputation

    @property
    def lacks_second_passes(self) -> bool:
        """Return whether it is not known yet what layers under use_reentrant=True save, since backward has not run them."""
        return bool(self.reentrant) and not self.in_second_passes

    def find(self, current: Pass, args: Any) -> None:
        """Note in the forward pass `current` that a checkpoint runs, when the first module in it is called with `args`.

        Do nothing if no checkpoint runs, or if the running one was noted before.
        """
        frame = running_checkpoint()
        if frame is None or frame in current.checkpoints or not self.reports_inputs:
            return
        current.checkpoints.add(frame)
        call, parent = current.calls[-1], current.calls[-2]
        keys = {key_of(tensor) for tensor in args if isinstance(tensor, Tensor) and has_storage(tensor)}
        is_passed_on = any(key_of(tensor) in keys for _, tensor in inputs_of(frame) if has_storage(tensor))
        call.checkpoint = frame, f"{call.path}:{CHECKPOINT}." if is_passed_on else _place_in(parent)

    def inputs(self, current: Pass, call: ModuleCall, output: Any) -> list[Saved]:
        """Return a description of each input of a checkpoint, when the first module that was called in it returns.

        `call`: the call of that module. `output`: what the module returned.
        """
        assert call.checkpoint is not None
        frame, place = call.checkpoint
        inputs = [(raw, tensor) for raw, tensor in inputs_of(frame) if has_storage(tensor)]
        return self._described(current, place, inputs, lambda tensor: reason_exact(tensor, output, call.first, call.module))

    def follow(self, current: Pass, call: ModuleCall) -> None:
        """Make a checkpoint pack the tensors that its layer saves when backward runs the layer again.

        `call`: the first call of a module in the checkpoint.
        """
        assert call.checkpoint is not None
        frame = call.checkpoint[0]
        if self.on_recomputation is not None and call.is_checkpointed:
            if call.path not in self._recomputed or current.hooked:
                self._recomputed[call.path] = RecomputedLayer(frame, call.module, current.hooked, self.on_recomputation)
            self._recomputed[call.path].follow(frame)
        current.hooked.clear()
        self.reported.add(call.path)

    def reentrant_inputs(self, node: Any, current: Pass, call: ModuleCall) -> list[Saved]:
        """Return descriptions of the inputs that a checkpoint with use_reentrant=True saved in its autograd node `node`.

        `call`: the module call in which the checkpoint ran.
        """
        layer = current.hidden_layers.get(node._sequence_nr())
        place = f"{layer.path}:{CHECKPOINT}." if layer is not None else _place_in(call)
        if layer is not None and self.on_recomputation is not None:
            self.reentrant.setdefault(layer.module, True)
        saved = [(raw, tensor) for _, raw, tensor in saved_of(node, REENTRANT, False) if tensor is not None and has_storage(tensor)]
        return self._described(current, place, saved, layer.reason_exact if layer is not None else lambda tensor: HIDDEN)

    def _described(
        self, current: Pass, place: str, inputs: list[tuple[Any, Tensor]], reason_of: Callable[[Tensor], str]
    ) -> list[Saved]:
        described: list[Saved] = []
        for number, (raw, tensor) in enumerate(inputs):
            key = f"{place}{number}", tensor.requires_grad
            if key not in self._reasons_exact:
                self._reasons_exact[key] = reason_of(tensor)
            kind = kind_of(tensor, CHECKPOINT, current)
            described.append(describe_input(place, number, raw, tensor, kind, self._reasons_exact[key]))
        return described


def _place_in(call: ModuleCall) -> str:
    """Return the start of slot names for inputs of the next checkpoint in a module's forward: "encoder:checkpoint#2.".

    The checkpoint is counted in `call`, the running call of that module.
    """
    call.counts[CHECKPOINT] = count = call.counts.get(CHECKPOINT, 0) + 1
    return f"{call.path}:{CHECKPOINT}." if count == 1 else f"{call.path}:{CHECKPOINT}#{count}."
