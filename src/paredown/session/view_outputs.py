"""Module outputs that are views, replaced by tensors that are not: what an in-place operation on them saves can then be packed.

`InstanceNorm` returns a view of a batch norm's result, and `Linear` with inputs of three or more dimensions a view of a matrix. For an
in-place operation on a view, such as `LeakyReLU(inplace=True)`, autograd creates a `CopySlices` node, which hides the tensors that the
operation saves: no hook reaches them, and they stay in memory unmodified until backward.

    InstanceNorm -> view -> leaky_relu_           CopySlices: its saved output cannot be packed
    InstanceNorm -> UnsafeView -> leaky_relu_     LeakyReluBackward1: its saved output is one bit per value

Nothing but the output of these modules refers to the tensor behind the view, so a tensor with the same memory can take its place, with the
same values and gradients. Views of other operations are left unmodified, since the model may still use the tensor behind them.

`trace_step` uses the same hooks on fake tensors, so that predictions under a plan count what a session stores.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from paredown.autograd.hooks import Hook
from paredown.errors import ApplyError

NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class ViewOutputs:
    """Replaces module outputs that are views by other tensors, so that what in-place operations on them save can be packed.

    Outputs of `Linear` are replaced only if a module of the model works in place. `replaces`: the type of the outputs that are replaced,
    Tensor in a session and FakeTensor in a trace, which has hooks of its own.
    """

    def __init__(self, model: nn.Module, replaces: type[Tensor] = Tensor) -> None:
        self._replaces = replaces
        types = (*NORMS, nn.Linear) if any(getattr(module, "inplace", False) is True for module in model.modules()) else NORMS
        self._modules = [module for module in model.modules() if type(module) in types]  # subclasses may hold their output
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Register the hooks that replace views, before all other hooks of these modules, which then get no view."""
        hook = partial(without_view, self._replaces)
        self._handles = [module.register_forward_hook(Hook(hook), prepend=True) for module in self._modules]

    def detach(self) -> None:
        """Remove the hooks on module outputs."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def without_view(replaces: type[Tensor], module: nn.Module, args: Any, output: Any) -> Tensor | None:
    """Return a tensor that is no view in place of `output`; None if it is not a view of type `replaces`."""
    if type(output) is not replaces or output.grad_fn is None or not output._is_view() or global_hooks._global_forward_hooks:
        return None
    return torch.ops.aten._unsafe_view(output, output.size())


def check_is_not_graphed(model: nn.Module) -> None:
    """Raise ApplyError if torch.cuda.make_graphed_callables has replaced the forward of a module."""
    for path, module in model.named_modules():
        if getattr(vars(module).get("forward"), "__qualname__", "").startswith("make_graphed_callables."):
            name = f"its module {path!r}" if path else "this model"
            raise ApplyError(
                f"{name} went through torch.cuda.make_graphed_callables, whose graph holds saved tensors at fixed addresses, where they "
                "cannot be packed; and torch refuses modules that have hooks, as a session's have. Apply the plan to the model without it, "
                "and capture the whole step by torch.cuda.graph (docs/how_to/cuda_graphs.md)."
            )
