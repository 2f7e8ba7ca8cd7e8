"""Fabric under a plan, as a precision plugin: whatever Fabric sets up has the plan on it.

    fabric = Fabric(plugins=PlanPrecision(plan, "bf16-mixed"))
    model = fabric.setup_module(model)                                          # the plan is at work
    opt = fabric.setup_optimizers(paredown.optim.AdamW(model.parameters(), lr=1e-3))

The plugin stands before another one, by its name in Fabric or a plugin of Fabric's own, which does all the rest. `fabric.setup(model, opt)`
does where the plan is for activations alone; other plans have to be on the model when the optimizer is made. `fabric.save` takes
`plugin.session` among the state.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from torch import nn

from paredown.errors import ApplyError
from paredown.integrations.applied import Applied
from paredown.plan.plan import Plan

ORDER = "With Fabric: model = fabric.setup_module(model), then fabric.setup_optimizers(paredown.optim.AdamW(model.parameters()))."


def _mixed() -> Precision:
    return MixedPrecision("bf16-mixed", "cpu")  # the device is that of the module, once it is there


BY_NAME: Mapping[str, Callable[[], Precision]] = {"32-true": Precision, "bf16-mixed": _mixed}


@final
class PlanPrecision(Applied, Precision):
    """A plan, and the precision plugin that it stands before. `options` are those of `paredown.apply`."""

    def __init__(self, plan: Plan, precision: str | Precision = "32-true", **options: Any) -> None:
        super().__init__(plan, **options)
        if not isinstance(precision, Precision) and precision not in BY_NAME:
            raise ApplyError(
                f"PlanPrecision knows {', '.join(map(repr, BY_NAME))}, not {precision!r}. Give the plugin itself: "
                "PlanPrecision(plan, MixedPrecision('16-mixed', 'cuda', GradScaler()))."
            )
        self._is_named = not isinstance(precision, Precision)
        self.inner: Any = precision if isinstance(precision, Precision) else BY_NAME[precision]()
        self.precision = self.inner.precision
        self._module: Callable[[], nn.Module | None] = lambda: None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Where Fabric sets a module up, the plan goes onto it."""
        if self.session is not None:
            raise ApplyError("this PlanPrecision is on a model already: make a Fabric with a plugin of its own for each.")
        module = self.inner.convert_module(module)
        try:
            self.put_on(module)
        except ApplyError as error:
            raise ApplyError(f"{error} {ORDER}") from None
        self._module = weakref.ref(module)
        return module

    def numbers(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
        """What matters, for `fabric.log_dict`: bytes by role, and more of what the session knows."""
        return self._monitor.numbers(optimizer) if self._monitor is not None else {}

    def teardown(self) -> None:
        """The plain model again."""
        self.inner.teardown()
        self.close()

    # --- as the other plugin does it ------------------------------------------------------------------------------------

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.module_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        module = self._module() if self._is_named else None
        place = next(module.parameters(), None) if module is not None else None
        if place is not None and isinstance(self.inner, MixedPrecision):
            self.inner.device = place.device.type
        return self.inner.forward_context()

    def convert_input(self, data: Any) -> Any:
        return self.inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self.inner.convert_output(data)

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return self.inner.pre_backward(tensor, module)

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        self.inner.backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Any, module: Any) -> Any:
        return self.inner.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        return self.inner.optimizer_step(optimizer, **kwargs)

    def main_params(self, optimizer: Any) -> Any:
        return self.inner.main_params(optimizer)

    def unscale_gradients(self, optimizer: Any) -> None:
        self.inner.unscale_gradients(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
