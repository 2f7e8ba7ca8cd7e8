"""A model whose tensors have shapes and no memory, for the time of a trace.

Parameters and buffers give place to fake tensors on the CPU of the same sizes and strides: tied ones stay tied, models on the meta
device get tensors like any other. Whatever the forward pass does to its modules meanwhile (counters, caches, hooks, recurrent layers
that keep lists of their weights) is undone at the end, also after an error.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from paredown.errors import TraceError
from paredown.plan.watch import Hook

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
PACKED = "PackedParameter"  # a weight that waits packed in a session: it has all that a trace asks for
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


class Fakes:
    """Makes fake tensors for real ones, the same one for the same tensor."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while one is made
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the original, which is kept so that the id stays its own

    def of(self, tensor: Tensor) -> Tensor:
        """A fake on the CPU for `tensor`; the tensor itself if it is one of these."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        there = self._made.get(id(tensor))
        if there is None:
            self._made[id(tensor)] = there = (tensor, self._make(tensor))
        return there[1]

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise TraceError(f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}; a trace follows dense tensors alone.")
        with torch.device("cpu"), self.mode, self.around():
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)

    def batch(self, batch: Any) -> Any:
        """The same nest of containers with fake tensors."""
        return tree_map_only(Tensor, self.of, batch)


def check_model(model: nn.Module) -> None:
    """TraceError where the parameters of `model` are not plain tensors."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"the model is a torch.nn.Module, not {type(model).__name__}: trace_step(model, batch, ...).")
    if type(model).__name__ in WRAPPERS:
        raise TraceError(f"the model is wrapped in {type(model).__name__}: trace what is inside, trace_step(model.module, ...).")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = type(tensor)
        if kind in (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer):
            raise TraceError(f"{name!r} has no shape yet: run the model once on a batch, then trace it.")
        if kind.__name__ == "DTensor":
            raise TraceError(
                f"{name!r} is a DTensor: trace the model before fully_shard or distribute_tensor, with one rank's batch."
            )
        if not (kind in (Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, FakeTensor) or kind.__name__ == PACKED):
            raise TraceError(f"{name!r} is a {kind.__name__}, not a plain tensor: trace the model as it was before.")


@contextmanager
def faked(model: nn.Module, fakes: Fakes) -> Generator[None]:
    """`model` with fake parameters and buffers, and without hooks of paredown's own."""
    modules = list(model.modules())
    before = [_state_of(module) for module in modules]
    randomness = torch.get_rng_state(), random.getstate()
    try:
        for module in modules:
            for tensors in cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers)):
                tensors.update({name: fakes.of(t) for name, t in tensors.items() if t is not None})
            for hooks in (getattr(module, name) for name in HOOKS):
                for key in [key for key, hook in hooks.items() if isinstance(hook, Hook)]:
                    del hooks[key]
            module._compiled_call_impl = None  # a compiled module runs as it was written
        yield
    finally:
        for module, state in zip(modules, before, strict=True):
            _restore(module, *state)
        torch.set_rng_state(randomness[0])
        random.setstate(randomness[1])


def _state_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of a module, and copies of those that are containers."""
    attributes = dict(vars(module))
    return attributes, {name: value.copy() for name, value in attributes.items() if isinstance(value, dict | list | set)}


def _restore(module: nn.Module, attributes: dict[str, Any], copies: dict[str, Any]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in attributes]:
        del now[name]
    now.update(attributes)
    for name, copy in copies.items():
        held = attributes[name]
        if isinstance(held, list):
            held[:] = copy
        elif not _same(held, copy):
            held.clear()
            held.update(copy)


def _same(held: Any, copy: Any) -> bool:
    """Whether a dict or set holds the very things that it did, in the same order."""
    if isinstance(held, set):
        return held == copy
    return len(held) == len(copy) and all(a == b and held[a] is copy[b] for a, b in zip(held, copy, strict=True))
