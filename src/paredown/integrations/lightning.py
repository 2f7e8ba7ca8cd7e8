"""Lightning's Trainer under a plan.

    trainer = Trainer(callbacks=[PareCallback(plan)], gradient_clip_val=1.0)
    trainer.fit(module, data)        # configure_optimizers returns paredown.optim.AdamW(self.parameters(), lr=...)

The plan is applied before `configure_optimizers`, and the session closed when fitting ends. Checkpoints hold plain weights, the optimizer's
codes and the session's state, so that `ckpt_path=` goes on with the same bits. Numbers that matter go through `log_dict` to every logger.
Fabric has a plugin (`fabric.py`).
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import inspect
from typing import Any, final

from lightning.pytorch import Callback
from torch import Tensor, nn

from paredown.errors import ApplyError
from paredown.integrations.applied import Applied
from paredown.integrations.shortage import add_explanation
from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.session.guard import Guard
from paredown.session.verify import replaced


@final
class PareCallback(Applied, Callback):
    """A plan at work while `trainer.fit` runs. `seed`, `mode` and `guard` are those of `apply`.

    `module` names the part of the LightningModule that `training_step` calls ("net" for `self.net(x)`); unless given it is the only part
    with parameters, or all of it. With a `trace` of the step, an error for lack of memory says which role grew and which plan is next.
    `verify`: before the first step, compare gradients of its batch with those of the unmodified model, and raise VerificationError where
    they are off; `training_step` runs a few times for that, and what it logs then is dropped.
    """

    def __init__(
        self, plan: Plan, *, module: str | None = None, trace: Trace | None = None, verify: bool = False, **options: Any
    ) -> None:
        if unknown := options.keys() - {"seed", "mode", "guard"}:
            raise ApplyError(
                f"PareCallback has no option {sorted(unknown)[0]!r}. Allowed: seed, mode, guard, module, trace, verify."
            )
        super().__init__(plan, **options)
        self.module, self._verifies = module, verify
        guard: Guard | None = options.get("guard")
        self.trace = trace or (guard.trace if guard is not None else None)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before optimizers are configured and checkpoints are read."""
        if stage != "fit" or self.session is not None:
            return
        self.put_on(called_part(pl_module, self.module))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Verifies once, where that was asked for."""
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
        with replaced(pl_module, log=nothing, log_dict=nothing):
            self.verify(called_part(pl_module, self.module), batch, step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs as often as the trainer does."""
        if self.session is not None and not self.session.forwards:
            raise ApplyError(
                "training_step did not call the part of the module that the plan was applied to, so that nothing was packed. Name the "
                "part that it calls: PareCallback(plan, module='net') where it calls self.net(x)."
            )
        if self._monitor is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._monitor.numbers(trainer.optimizers[0] if trainer.optimizers else None))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """What ran out of memory is told why."""
        add_explanation(exception, self.trace, self.plan)
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The plain model again."""
        if stage == "fit":
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep of it."""
        return self.session.state_dict() if self.session is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Comes after `setup`, when a run goes on."""
        if self.session is not None and state_dict:
            self.session.load_state_dict(state_dict)


def _loss_of_step(output: Any) -> Tensor:
    """The loss of what a training_step returned."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ApplyError(f"training_step returned no loss for the first batch, but {type(output).__name__}: verify=True needs one.")
    return loss


def called_part(module: nn.Module, name: str | None) -> nn.Module:
    """The part of a LightningModule whose calls are followed."""
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            parts = ", ".join(repr(part) for part, _ in module.named_children()) or "none"
            raise ApplyError(f"{type(module).__name__} has no part {name!r}. It has {parts}.") from None
    parts = [part for part in module.children() if any(True for _ in part.parameters())]
    own = any(True for _ in module.parameters(recurse=False))
    return parts[0] if len(parts) == 1 and not own else module
