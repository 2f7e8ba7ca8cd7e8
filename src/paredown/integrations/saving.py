"""Save a model with packed weights, without decoding all of them on its device at once.

    with decoded_on_cpu(model):
        state = model.state_dict()           # ordinary tensors; packed weights are decoded module by module, and moved to host memory
    saving = SavesOnCpu(model)               # from now on model.save_pretrained(...) runs inside of that context
    saving.close()
    saving = SavesOnCpu(model, strategy, "lightning_module_state_dict")     # the same for a method of another object

Otherwise `state_dict()` decodes all weights on the device of the parameters, as in the unmodified model. A base model that fits the device
only when packed cannot be saved like that, nor can its adapters: PEFT makes the state dict of the whole model, and takes the adapters from
it. `push_to_hub` calls `save_pretrained`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from paredown.autograd.hooks import Hook
from paredown.optim.packed_weight import weight_of

SAVE = "save_pretrained"


@contextmanager
def decoded_on_cpu(model: nn.Module) -> Generator[None]:
    """Return a context in which state dicts of `model` contain packed weights decoded in host memory; tied weights stay tied."""
    moved: dict[int, Tensor] = {}  # by id of the parameter: a weight under two names is the same tensor under both
    handles = [module.register_state_dict_post_hook(Hook(partial(_move, moved))) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _move(moved: dict[int, Tensor], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Move the decoded weights in `state`, a state dict of `module` under the prefix `prefix`, to host memory.

    `moved` keeps them by the ids of their parameters, so that tied weights stay tied. torch calls this as a hook of `state_dict()`.
    """
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if type(value) is Tensor and weight_of(parameter) is not None:
            if id(parameter) not in moved:
                moved[id(parameter)] = value.cpu()
            state[prefix + name] = moved[id(parameter)]


@final
class SavesOnCpu:
    """Replaces the method `owner.name`, which saves `model`, until `close`: packed weights are decoded in host memory.

    By default the method is `save_pretrained` of the model itself. Copies of the owner have their own, unreplaced method.
    """

    def __init__(self, model: nn.Module, owner: Any = None, name: str = SAVE) -> None:
        self._model, self._name = model, name
        self._owner: Any = model if owner is None else owner
        self._inner: Callable[..., Any] | None = getattr(self._owner, name, None)
        if self._inner is not None:
            vars(self._owner)[name] = self

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the replaced method while packed weights are decoded in host memory, and return its result."""
        assert self._inner is not None
        with decoded_on_cpu(self._model):
            return self._inner(*args, **named)

    def close(self) -> None:
        """Restore the owner's own method for saving."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)  # in copies: the method of the copy
