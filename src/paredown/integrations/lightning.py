"""Train under a plan with Lightning's Trainer (`PareCallback`) or Fabric (`PlanPrecision`).

    callback = PareCallback(plan)
    trainer = Trainer(callbacks=[callback], gradient_clip_val=1.0)
    trainer.fit(module, data)        # configure_optimizers returns paredown.optim.AdamW(self.parameters(), lr=...)

    callback.close()                 # decodes all weights: the module is unmodified

The plan is applied before `configure_optimizers`. The session stays open when fitting ends, so that a base model that fits the device only
when packed is not decoded: `fit` again, `validate` and `save_checkpoint` work, until `callback.close()`. Checkpoints hold unpacked
weights, decoded one module at a time into host memory, the optimizer's codes and the session's state, so that `ckpt_path=` resumes with
the same bits. Memory and update statistics (`monitor.py`) go through
`log_dict` to every logger.

Fabric applies a plan through a precision plugin, to every module that it sets up:

    fabric = Fabric(plugins=PlanPrecision(plan, "bf16-mixed"))
    model = fabric.setup_module(model)                                          # applies the plan
    opt = fabric.setup_optimizers(paredown.optim.AdamW(model.parameters(), lr=1e-3))

The plugin wraps another precision plugin, given as an object or by its name in Fabric, which handles precision. `fabric.setup(model, opt)`
works for plans of activations only; other plans have to be applied before the optimizer is made. To save the session, pass
`plugin.session` in the state of `fabric.save`.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportPrivateUsage=false

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.pytorch import Callback
from torch import Tensor, nn

from paredown.autograd.hooks import patched_attributes
from paredown.autograd.module_watch import unwrapped
from paredown.check.guard import Guard
from paredown.check.out_of_memory import add_explanation
from paredown.errors import ApplyError
from paredown.integrations.monitor import AppliedPlan
from paredown.integrations.saving import SavesOnCpu
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.session.session import Session


@final
class PareCallback(AppliedPlan, Callback):
    """A callback of Lightning's Trainer that applies a plan when `trainer.fit` begins; the plan stays applied until `close()`.

    `seed`, `mode`, `guard` and `chunked_loss` are those of `apply`. `module` names the part of the LightningModule that
    `training_step` calls ("net" for `self.net(x)`); by default it is the only child with parameters, else the whole module. With a
    `trace` of the step, out-of-memory errors get an explanation (`out_of_memory.py`). `verify`: before the first step, compare
    gradients of its batch with those of the unmodified model, and raise VerificationError if they differ by more than the
    tolerance; `training_step` runs a few times for that, and its logs are dropped.
    """

    def __init__(
        self, plan: Plan, *, module: str | None = None, trace: Trace | None = None, verify: bool = False, **options: Any
    ) -> None:
        if unknown := options.keys() - {"seed", "mode", "guard", "chunked_loss"}:
            raise ApplyError(
                f"PareCallback has no option {sorted(unknown)[0]!r}. Allowed: seed, mode, guard, chunked_loss, module, trace, verify."
            )
        super().__init__(plan, **options)
        self.module, self._verifies = module, verify
        self._saving: SavesOnCpu | None = None
        guard: Guard | None = options.get("guard")
        self.trace = trace or (guard.trace if guard is not None else None)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Apply the plan before optimizers are configured and checkpoints are loaded, unless it is applied to this module."""
        if stage != "fit":
            return
        part = called_part(pl_module, self.module)
        if self.is_open and self.session is not None and self.session.model is not unwrapped(part):
            self.close()
        if not self.is_open:
            self.put_on(part)
        if self._saving is not None:
            self._saving.close()
        if isinstance(self.session, Session):
            self._saving = SavesOnCpu(pl_module, trainer.strategy, "lightning_module_state_dict")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Compare gradients with those of the unmodified model before the first step, if `verify` was requested."""
        if not self._verifies:
            return
        self._verifies = False
        if not pl_module.automatic_optimization:
            raise ApplyError(
                "verify=True cannot run a training_step that steps its optimizers itself. Call paredown.verify(model, batch, plan) before "
                "trainer.fit instead."
            )
        num_taken = len(inspect.signature(pl_module.training_step).parameters)

        def step(part: Any) -> Tensor:
            with trainer.precision_plugin.train_step_context():
                return _loss_of_step(pl_module.training_step(*(part, batch_idx)[:num_taken]))

        nothing: Any = lambda *_, **__: None  # noqa: E731
        with patched_attributes(pl_module, log=nothing, log_dict=nothing):
            self.verify(called_part(pl_module, self.module), batch, step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the numbers of the `Monitor` (memory, updates) at the steps at which the trainer logs."""
        if self.session is not None and self.is_open and not self.session.forwards:
            raise ApplyError(
                "training_step did not call the part of the module that the plan was applied to, so that nothing was packed. Name the "
                "part that it calls: PareCallback(plan, module='net') where it calls self.net(x)."
            )
        if self._monitor is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._monitor.numbers(trainer.optimizers[0] if trainer.optimizers else None))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Add an explanation to an out-of-memory error; the plan stays applied, since decoding could need more memory."""
        add_explanation(exception, self.trace, self.plan)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Print a summary of the session (the applied plan) after fitting; it stays open for validation and more fitting."""
        if stage == "fit" and trainer.is_global_zero:
            self.print_summary()

    def close(self) -> None:
        """Close the session (the applied plan): all weights are decoded, the model is unmodified. May be called more than once."""
        if self._saving is not None:
            self._saving.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the session (the applied plan), for checkpoints."""
        return self.session.state_dict() if self.session is not None and self.is_open else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the session (the applied plan); Lightning calls this after `setup` when a run resumes."""
        if self.session is not None and self.is_open and state_dict:
            self.session.load_state_dict(state_dict)


def _loss_of_step(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ApplyError(f"training_step returned no loss for the first batch, but {type(output).__name__}: verify=True needs one.")
    return loss


def called_part(module: nn.Module, name: str | None) -> nn.Module:
    """Return the part of a LightningModule that the plan is applied to: `name`, else the only child with parameters, else all of it."""
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            parts = ", ".join(repr(part) for part, _ in module.named_children()) or "none"
            raise ApplyError(f"{type(module).__name__} has no part {name!r}. It has {parts}.") from None
    parts = [part for part in module.children() if any(True for _ in part.parameters())]
    has_parameters = any(True for _ in module.parameters(recurse=False))
    return parts[0] if len(parts) == 1 and not has_parameters else module


# --- Fabric ----------------------------------------------------------------------------------------------------------

ORDER = "With Fabric: model = fabric.setup_module(model), then fabric.setup_optimizers(paredown.optim.AdamW(model.parameters()))."


def _mixed() -> Precision:
    return MixedPrecision("bf16-mixed", "cpu")  # forward_context sets the device of the module


BY_NAME: Mapping[str, Callable[[], Precision]] = {"32-true": Precision, "bf16-mixed": _mixed}


def _of_inner(name: str) -> Any:
    """Return a method that calls the wrapped plugin's method called `name`."""
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


@final
class PlanPrecision(AppliedPlan, Precision):
    """A precision plugin of Fabric that applies a plan, and leaves precision to another plugin."""

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
        """Convert the module's precision with the other plugin, apply the plan to it, and return it."""
        if self.is_open:
            raise ApplyError("this PlanPrecision is applied to a model already: make a Fabric with its own plugin for each model.")
        module = self.inner.convert_module(module)
        try:
            self.put_on(module)
        except ApplyError as error:
            raise ApplyError(f"{error} {ORDER}") from None
        self._module = weakref.ref(module)
        return module

    def numbers(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
        """Return memory and update statistics of the run by name, for `fabric.log_dict`."""
        return self._monitor.numbers(optimizer) if self._monitor is not None else {}

    def teardown(self) -> None:
        """Close the session (the applied plan), which restores the unmodified model."""
        self.inner.teardown()
        self.close()

    # --- delegated to the wrapped plugin ----------------------------------------------------------------------------------

    tensor_init_context, module_init_context = _of_inner("tensor_init_context"), _of_inner("module_init_context")
    convert_input, convert_output = _of_inner("convert_input"), _of_inner("convert_output")
    pre_backward, backward, post_backward = _of_inner("pre_backward"), _of_inner("backward"), _of_inner("post_backward")
    optimizer_step, main_params = _of_inner("optimizer_step"), _of_inner("main_params")
    unscale_gradients = _of_inner("unscale_gradients")
    state_dict, load_state_dict = _of_inner("state_dict"), _of_inner("load_state_dict")

    def forward_context(self) -> AbstractContextManager[Any]:
        module = self._module() if self._is_named else None
        place = next(module.parameters(), None) if module is not None else None
        if place is not None and isinstance(self.inner, MixedPrecision):
            self.inner.device = place.device.type
        return self.inner.forward_context()
