"""Where forward passes enter a model: the model itself, the user's model inside of wrappers, and modules that are called directly.

model(x)                              one pass, which enters through the model
model.decoder(model.encoder(x))       two passes: each outermost call of a module is one
"""

from __future__ import annotations

from torch import nn

from paredown.trace.autograd_graph import Pass


def is_around(running: Pass, module: nn.Module) -> bool:
    """Whether a call of `module` in another thread may belong to a pass that is running: it is inside of what the pass entered through."""
    entrance = running.entrance
    return entrance is None or (module is not entrance and any(part is module for part in entrance.modules()))


def likely_entrances(model: nn.Module) -> set[nn.Module]:
    """The modules that code around a model calls directly, as far as that can be guessed: children, also those in a ModuleList or -Dict.

    The forward of nn.Sequential calls all its children.
    """
    if type(model) is nn.Sequential:
        return set()
    found = set[nn.Module]()
    for child in model.children():
        found |= likely_entrances(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else {child}
    return found


def is_plain_leaf(module: nn.Module) -> bool:
    """Whether `module` is a module of torch.nn without children: its slots are named by module and operand, without the operation."""
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def is_wrapped_by_compile(model: nn.Module) -> bool:
    """Whether `model` is a wrapper that torch.compile returned, also inside DistributedDataParallel or DataParallel."""
    return hasattr(model, "_orig_mod") or (isinstance(model, WRAPPERS) and is_wrapped_by_compile(model.module))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, DataParallel or torch.compile, so that slots keep their names."""
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod  # type: ignore[assignment]
    return model
