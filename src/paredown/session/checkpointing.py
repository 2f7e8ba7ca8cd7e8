"""Activation checkpointing of the modules in `plan.recompute`: torch's non-reentrant checkpointing, switched on by module hooks.

From a module's forward pre-hook to its forward hook, the saved-tensor hooks of torch.utils.checkpoint replace each saved tensor by an empty
placeholder. When backward needs the first of them, the module runs again with the random state and autocast settings of its first call;
the hooks of this file do nothing in that second call. Class, parameter names and state_dict of the model do not change. No hooks for
packing are registered on the placeholders: they would replace those of checkpointing and silently disable it (docs/decisions/005).

Batch norms update their running statistics once per batch: not in the second call.

`SecondPasses` packs the large tensors (`autograd/second_passes.py` selects them) that these modules, and those that the model checkpoints
itself, save when they run again. The operands of a product are decoded one after the other, inside the operation that reads them: each
decoded copy is multiplied in place and becomes the result.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator

from paredown.autograd.graph import Saved
from paredown.autograd.hooks import Hook, patched_attributes
from paredown.autograd.operations import is_checkpoint_input
from paredown.autograd.second_passes import CapturedHooks, Store, stored_operand
from paredown.errors import ApplyError, PlanError
from paredown.plan.checkpointed_trace import is_of, outermost
from paredown.plan.plan import Plan
from paredown.session.eager.activations import Activations
from paredown.session.eager.forward_passes import ForwardStorage
from paredown.session.eager.recomputed_values import RecomputedValues
from paredown.session.eager.stored_tensors import StoredValues, StoredView

DETERMINISM, KEEPS_RANDOM_STATE, DEBUG, EARLY_STOP = "default", True, False, True


class CheckpointedModules:
    """Runs the modules that `plan.recompute` names under torch.utils.checkpoint, by hooks on these modules."""

    def __init__(
        self, plan: Plan, model: nn.Module, around_second_call: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Find the modules that `plan.recompute` names; raise ApplyError if the model lacks one.

        Backward runs them again in the context `around_second_call()`.
        """
        paths = dict(model.named_modules())
        try:
            matches = outermost(paths, plan.checkpointed)
            self.paths = tuple(path for match in matches for path in callable_paths(match, paths[match]))
        except PlanError as error:
            raise ApplyError(f"{error} Correct it, or use a plan that was made for this model.") from None
        self.modules = [paths[path] for path in self.paths]
        self._handles: list[Any] = []
        self._local = threading.local()
        self._around_second_call = around_second_call

    def has(self, name: str) -> bool:
        """Return whether the saved tensor `name` belongs to a checkpointed module, so that it is not kept for backward."""
        return not is_checkpoint_input(name) and any(is_of(name, path) for path in self.paths)

    def attach(self) -> None:
        """Register the checkpointing hooks.

        The pre-hook runs before all others, so that the recomputation gets the original arguments.
        """
        for module in self.modules:
            enter, leave = Hook(self._enter), Hook(self._leave)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))

    def detach(self) -> None:
        """Remove the checkpointing hooks; backward of existing graphs still runs the modules again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self._local, "is_second_call", False):
            return
        named = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        running = _checkpoint_without_reentrant_generator(
            partial(_called_again, module, len(args), named),
            KEEPS_RANDOM_STATE,
            lambda: (nullcontext(), _ReusableContext(lambda: self._second_call(module))),
            DETERMINISM,
            DEBUG,
            EARLY_STOP,
            *args,
            *(kwargs[name] for name in named),
            **{name: value for name, value in kwargs.items() if name not in named},
        )
        next(running)
        self._calls().append((module, running))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._calls()
        if getattr(self._local, "is_second_call", False) or not calls or calls[-1][0] is not module:
            return
        next(calls.pop()[1], None)  # finishes the generator, which removes the saved-tensor hooks of checkpointing

    @contextmanager
    def paused(self) -> Generator[None]:
        """Return a context in which forward passes of this thread run without checkpointing."""
        with patched_attributes(self._local, is_second_call=True):
            yield

    def _calls(self) -> list[tuple[nn.Module, Generator[None, None, None]]]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        return self._local.calls

    @contextmanager
    def _second_call(self, module: nn.Module) -> Generator[None]:
        """Return a context for a checkpointed module's second call: no checkpointing, and frozen batch norms."""
        before = getattr(self._local, "is_second_call", False)
        self._local.is_second_call = True
        try:
            with frozen_statistics(module), self._around_second_call():
                yield
        finally:
            self._local.is_second_call = before


def _called_again(module: nn.Module, num_args: int, named: Sequence[str], /, *values: Any, **kwargs: Any) -> Any:
    """Call `module` with `num_args` of `values` as positional arguments, the others as the keywords `named`.

    torch.utils.checkpoint saves positional tensors with autograd, so that they can be packed; keyword arguments it only refers to.
    """
    return module(*values[:num_args], **dict(zip(named, values[num_args:], strict=True)), **kwargs)


def callable_paths(path: str, module: nn.Module) -> Iterator[str]:
    """Yield the path of a module; if it has no forward, like nn.ModuleList, the paths of its children instead."""
    if type(module).forward is not nn.Module.forward:
        yield path
        return
    for name, part in module.named_children():
        yield from callable_paths(f"{path}.{name}", part)


class _ReusableContext:
    """Makes a context anew whenever it is entered, since each backward of a retained graph runs a module again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._open.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


@contextmanager
def frozen_statistics(module: nn.Module) -> Generator[None]:
    """Return a context in which batch norms of `module` do not update running statistics, for a repeated batch."""
    norms = [
        part for part in module.modules() if isinstance(part, _NormBase | _BatchNorm) and part.track_running_stats and part.training
    ]
    before = [(part.momentum, part._buffers.get("num_batches_tracked")) for part in norms]
    for part in norms:
        part.momentum, part._buffers["num_batches_tracked"] = 0.0, None  # running <- 1 x running + 0 x batch
    try:
        yield
    finally:
        for part, (momentum, count) in zip(norms, before, strict=True):
            part.momentum, part._buffers["num_batches_tracked"] = momentum, count


def repeated_layers_of(model: nn.Module) -> tuple[str, ...]:
    """Return paths of a model's layers (items of ModuleLists, uniform Sequentials); raise ApplyError if it has none."""
    lists = [path for path, module in model.named_modules() if _is_list_of_layers(module)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    paths = [f"{path}.{name}".lstrip(".") for path in outer for name, _ in model.get_submodule(path).named_children()]
    layers = tuple(path for path in paths if next(model.get_submodule(path).parameters(), None) is not None)
    if not layers:
        raise ApplyError(
            f"{type(model).__name__} has no list of layers to checkpoint: neither an nn.ModuleList, nor an nn.Sequential of modules of one "
            "class. Name modules in a plan: Plan().recomputing('encoder.*')."
        )
    return layers


def _is_list_of_layers(module: nn.Module) -> bool:
    children = list(module.children())
    is_uniform = len({type(child) for child in children}) == 1 and next(children[0].children(), None) is not None
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and is_uniform)


# --- what second forward passes save -------------------------------------------------------------------------------------------------


class SecondPasses:
    """Packs the tensors that checkpointed layers save when backward runs them again, by the same rules as tensors saved in forward."""

    def __init__(self, activations: Activations) -> None:
        self._activations = activations

    def begin(self) -> Store:
        """Return a function that stores the saved tensors of one layer while backward runs it again."""
        return partial(self._store, SecondPassStorage())

    def _store(self, storage: SecondPassStorage, saved: Saved) -> StoredOperand | None:
        assert saved.tensor is not None
        captured = CapturedHooks(saved.tensor)
        with torch.no_grad(), self._activations.storing_in(storage):
            self._activations.save(replace(saved, raw=captured))
        if captured.packed is None or captured.unpack is None:
            return None
        return StoredOperand(captured.packed, captured.unpack, saved.tensor, is_factor=saved.op == "mul")


class SecondPassStorage(ForwardStorage):
    """Holds the packed tensors of one checkpointed layer while backward runs the layer again."""

    is_in_backward = True

    def source(self, node: Any) -> StoredView | None:
        """Return the packed tensor that the autograd node `node` saved in this layer; None if there is none."""
        stored = stored_operand(node)
        return stored.view if isinstance(stored, StoredOperand) else None


class StoredOperand:
    """Holds a packed tensor that a checkpointed layer saved when backward ran the layer again, and decodes it."""

    __slots__ = ("_is_factor", "device", "dtype", "unpack", "view")

    def __init__(self, view: StoredView, unpack: Callable[[StoredView], Tensor], tensor: Tensor, *, is_factor: bool) -> None:
        self.view, self.unpack, self._is_factor = view, unpack, is_factor
        self.dtype, self.device = tensor.dtype, tensor.device

    @property
    def is_decoded_alone(self) -> bool:
        """Return whether the decoded values belong to this saved tensor alone, so that they may be overwritten."""
        form = self.view.form
        return form.num_views == 1 and form.plain_values is None and isinstance(form, StoredValues | RecomputedValues)

    def tensor(self) -> Tensor:
        """Return the decoded tensor; for an operand of an elementwise product a `Factor`, decoded when read."""
        return Factor.of(self) if self._is_factor and self.is_decoded_alone else self.unpack(self.view)


@final
class Factor(Tensor):
    """Stands, as a tensor subclass, for a packed operand of an elementwise product, and is decoded when it is read.

    Backward of a product unpacks both operands at once. When a `Factor` is multiplied by a gradient of the same layout, the result
    overwrites the decoded copy, so that three tensors exist instead of five.
    """

    operand: StoredOperand

    @staticmethod
    def of(operand: StoredOperand) -> Factor:
        """Return a tensor that decodes `operand` when it is used."""
        size, stride, *_ = operand.view.layout
        layout: dict[str, Any] = {"strides": stride, "dtype": operand.dtype, "device": operand.device}
        factor: Factor = Tensor._make_wrapper_subclass(Factor, size, **layout)  # type: ignore[attr-defined]
        factor.operand = operand
        return factor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Factor.of(args[0].operand)
        if func is torch.ops.aten.mul.Tensor and [type(arg) for arg in args] == [Tensor, Factor]:
            gradient, decoded = args[0], args[1].decoded()
            is_equal = (gradient.size(), gradient.stride(), gradient.dtype) == (decoded.size(), decoded.stride(), decoded.dtype)
            return decoded.mul_(gradient) if is_equal else gradient * decoded
        plain = tree_map_only(Factor, Factor.decoded, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def decoded(self) -> Tensor:
        """Return the decoded values in new memory."""
        return self.operand.unpack(self.operand.view)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Factor({tuple(self.shape)}, {self.dtype})"
