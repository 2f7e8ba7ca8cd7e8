"""Hugging Face's Trainer under a plan.

    trainer = Trainer(model=model, args=args, train_dataset=data)       # or a subclass of it
    pared = attach(trainer, plan)                                       # applies the plan, and gives the trainer paredown's optimizer
    trainer.train()                                                     # closes the session at its end: trainer.model is plain

Clipping, gradient accumulation, schedulers, evaluation and checkpoints are the trainer's own. Checkpoints hold plain weights, which
`from_pretrained` reads, and the codes of weights and moments in the optimizer's file: `trainer.train(resume_from_checkpoint=...)` goes on
with the same bits. The numbers that matter (`monitor.py`) are in `trainer.state.log_history` and reach every logger of `report_to`.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportPrivateUsage=false

from __future__ import annotations

from typing import Any, final

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from paredown import optim
from paredown.errors import ApplyError, OptimError
from paredown.integrations.monitor import AppliedPlan
from paredown.plan.plan import Plan
from paredown.session.guard import Guard
from paredown.session.session import Session, unwrapped
from paredown.simulate.rounded_values import Simulate
from paredown.simulate.simulated_session import SimulatedSession

BETAS = "betas"
# name: the class, and the arguments of a trainer that it takes; lr is always one of them
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (lambda: optim.AdamW, {BETAS: ("adam_beta1", "adam_beta2"), "eps": "adam_epsilon"}),
    "lion": (lambda: optim.Lion, {BETAS: ("adam_beta1", "adam_beta2")}),
    "sgd": (lambda: optim.SGD, {}),
}


@final
class TrainerPlanCallback(AppliedPlan, TrainerCallback, ExportableState):
    """Applies a plan when the trainer is made, keeps the session's state in checkpoints, logs, and closes the session at the end.

    `attach` is the usual way to it. In `Trainer(callbacks=[TrainerPlanCallback(plan)],
    optimizer_cls_and_kwargs=optimizer_of(args))` it works as
    well, except that loggers come before it and do not get its numbers. `seed`, `mode` and `guard` are those of `apply`.
    """

    def __init__(self, plan: Plan, *, seed: int = 0, mode: str | Simulate = "store", guard: Guard | None = None) -> None:
        super().__init__(plan, seed=seed, mode=mode, guard=guard)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """The plan goes onto the model before an optimizer is made for it."""
        if getattr(args, "restore_callback_states_from_checkpoint", False):
            raise ApplyError(
                "restore_callback_states_from_checkpoint=True would make a second PareCallback in place of this one, which goes on by "
                "itself: leave it False."
            )
        self.put_on(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """A run that goes on finds the session's state in the trainer's."""
        session = self._open()
        if unwrapped(model) is not session._model():
            raise ApplyError(
                "the trainer trains another model than the one that the plan was applied to: model_init made a new one, or something "
                "wrapped it. Give Trainer a model, and attach the plan last."
            )
        kept = (state.stateful_callbacks or {}).get(type(self).__name__)
        if isinstance(kept, dict) and kept.get("attributes", {}).get("session"):
            session.load_state_dict(kept["attributes"]["session"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **rest: Any) -> None:
        """Adds the numbers to the logs of training steps."""
        if logs is None or "loss" not in logs or self._monitor is None:
            return
        found = self._monitor.numbers(optimizer)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)  # the trainer's own copy, made before callbacks are called

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The plain model again."""
        self.close()

    def state(self) -> dict[str, Any]:
        """What the trainer keeps of it in trainer_state.json."""
        return {"args": {}, "attributes": {"session": self.session.state_dict() if self.session is not None else None}}

    def _open(self) -> Session | SimulatedSession:
        if self.session is None:
            raise ApplyError(
                "there is no session: a training closes it at its end, and trainer.add_callback comes too late to apply a plan. Call "
                "paredown.integrations.hugging_face.attach(trainer, plan) before trainer.train()."
            )
        return self.session


def optimizer_of(args: Any, name: str = "adamw", **options: Any) -> tuple[Any, dict[str, Any]]:
    """`optimizer_cls_and_kwargs` of a Trainer: paredown's optimizer with the learning rate, betas and eps of its arguments.

    Weight decay is the trainer's, group by group. `options` are more arguments of the optimizer, such as tier="half".
    """
    if name not in OPTIMIZERS:
        raise OptimError(f"optimizer {name!r} is unknown. Allowed: {', '.join(OPTIMIZERS)}.")
    for refused, instead in (
        ("release", "the trainer reads all gradients at once"),
        ("microbatches", "gradient_accumulation_steps"),
    ):
        if options.get(refused) not in (None, False, 1):
            raise OptimError(f"{refused}={options[refused]!r} cannot run in a Trainer: {instead}. Leave it out.")
    found, taken = OPTIMIZERS[name]
    read = {key: getattr(args, of) if isinstance(of, str) else tuple(getattr(args, one) for one in of) for key, of in taken.items()}
    return found(), {"lr": args.learning_rate, **read, **options}


def attach(trainer: Any, plan: Plan, *, optimizer: str = "adamw", verify: bool = False, **options: Any) -> TrainerPlanCallback:
    """Apply `plan` to a trainer's model, and give it paredown's optimizer unless it has one already. `options` as for PareCallback.

    `verify`: before the first step, compare gradients of its batch with those of the unmodified model, and raise VerificationError where
    they are off.
    """
    if getattr(trainer, "model_init", None) is not None:
        raise ApplyError("model_init makes a new model for every training, without the plan. Give Trainer a model instead.")
    callback = TrainerPlanCallback(plan, **options)
    callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    trainer.callback_handler.callbacks.insert(0, callback)  # before the loggers, which see its numbers then
    if trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None:
        trainer.optimizer_cls_and_kwargs = optimizer_of(trainer.args, optimizer)
    if verify:
        _verify_first(trainer, callback)
    return callback


def _verify_first(trainer: Any, callback: TrainerPlanCallback) -> None:
    """Put a verification in front of the first training step of a trainer."""
    before, inner = vars(trainer).get("training_step"), trainer.training_step

    def first(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        del trainer.training_step
        if before is not None:
            trainer.training_step = before
        count = rest[0] if rest else named.get("num_items_in_batch")

        def step(part: Any) -> Any:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(unwrapped(model), trainer._prepare_inputs(dict(part)), num_items_in_batch=count)

        model.train()
        callback.verify(model, dict(inputs), step)
        return inner(model, inputs, *rest, **named)

    trainer.training_step = first
