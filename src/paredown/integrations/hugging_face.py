"""Train under a plan with Hugging Face's Trainer.

    trainer = Trainer(model=model, args=args, train_dataset=data)       # or a subclass of it
    callback = attach(trainer, plan)                                    # applies the plan, and logs which optimizer will run
    callback = attach(trainer, budget="24GiB")                          # or makes a plan for the trainer's own step first
    trainer.train()                                                     # again, if you like; then evaluate(), save_model(), push_to_hub()
    callback.close()                                                    # decodes all weights: trainer.model is unmodified

Clipping, gradient accumulation, schedulers, evaluation and checkpoints are the trainer's own. Checkpoints hold unpacked weights, which
`from_pretrained` reads, and the codes of weights and moments in the optimizer's file: `trainer.train(resume_from_checkpoint=...)` resumes
with the same bits. Saving decodes packed weights one module at a time, into host memory (`saving.py`). Memory and update statistics
(`monitor.py`) are in `trainer.state.log_history` and reach every logger of `report_to`.

If the plan has formats for optimizer state, the optimizer of paredown.optim with the update rule of `TrainingArguments.optim` replaces the
trainer's (OptimError if there is none); otherwise the trainer's is kept. `callback.optimizer` says which one runs, and why.

An out-of-memory error of `trainer.train()` gets a note: what the peak was made of, the next smaller plan, and advice on the allocator.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import logging
import weakref
from typing import Any, final

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from paredown import optim
from paredown.autograd.module_watch import unwrapped
from paredown.check.guard import Guard
from paredown.check.out_of_memory import LastCall
from paredown.errors import ApplyError, OptimError
from paredown.formats.catalog import SMALL_LEARNING_RATE
from paredown.integrations.monitor import AppliedPlan, unwrap_optimizer
from paredown.integrations.saving import SavesOnCpu
from paredown.integrations.trainer_step import autocast_of, plan_within
from paredown.loss.output_head import CHUNKED_LOSS
from paredown.optim.parameter_state import remove_owner
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.changes import requests_optimizer
from paredown.session.session import Session, session_of
from paredown.simulate.rounded_values import Simulate
from paredown.simulate.simulated_session import SimulatedSession

BETAS = "betas"
# name: (class, its arguments by fields of TrainingArguments); lr is always set
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (lambda: optim.AdamW, {BETAS: ("adam_beta1", "adam_beta2"), "eps": "adam_epsilon"}),
    "lion": (lambda: optim.Lion, {BETAS: ("adam_beta1", "adam_beta2")}),
    "sgd": (lambda: optim.SGD, {}),
    "muon": (lambda: optim.Muon, {"adamw_betas": ("adam_beta1", "adam_beta2"), "adamw_eps": "adam_epsilon"}),
}
# TrainingArguments.optim -> the optimizer above with the same update rule, whatever stores its state
EQUALS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), "adamw"),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit", "adamw_8bit"), "adamw"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw_8bit"), "adamw"),
    **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), "lion"),
    "sgd": "sgd",
}
SGD_ARGUMENTS = ("momentum", "dampening", "nesterov")  # of TrainingArguments.optim_args
log = logging.getLogger("paredown")
# the sessions of `attach`, with the plan and the options that they were made with
_ATTACHED: weakref.WeakKeyDictionary[Session | SimulatedSession, tuple[Plan, dict[str, Any]]] = weakref.WeakKeyDictionary()


@final
class TrainerPlanCallback(AppliedPlan, TrainerCallback, ExportableState):
    """A callback of Hugging Face's Trainer that applies a plan, saves the session's state in checkpoints, and logs memory.

    The session stays open after `train()`, so that a base model that fits the device only when packed is not decoded; `close` ends it.
    `attach` makes a callback. `Trainer(callbacks=[TrainerPlanCallback(plan)], optimizer_cls_and_kwargs=optimizer_of(args))` works too, but
    loggers then run before it and miss its numbers. `seed`, `mode`, `guard` and `chunked_loss` are those of `apply`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int = 0,
        mode: str | Simulate = "store",
        guard: Guard | None = None,
        chunked_loss: bool = CHUNKED_LOSS,
    ) -> None:
        super().__init__(plan, seed=seed, mode=mode, guard=guard, chunked_loss=chunked_loss)
        self.is_simulated, self.has_chunked_loss = mode != "store", chunked_loss
        self.optimizer = "the optimizer is the trainer's."  # a sentence: which optimizer runs, and why
        self.last_call: LastCall | None = None  # of the model, for explanations of out-of-memory errors
        self.sets_optimizer = False  # whether `attach` chose the class of the trainer's optimizer
        self._saving: SavesOnCpu | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Apply the plan to the model when the trainer is made, before it has an optimizer."""
        if getattr(args, "restore_callback_states_from_checkpoint", False):
            raise ApplyError(
                "restore_callback_states_from_checkpoint=True would replace this callback with a second one; it restores its state "
                "itself. Leave the option False."
            )
        self.put_on(model)
        if not self.is_simulated:
            self._saving = SavesOnCpu(unwrapped(model))

    def is_like(self, other: TrainerPlanCallback) -> bool:
        """Return whether this callback and `other` apply the same plan with the same options."""
        return (self.plan, self._options) == (other.plan, other._options)

    def put_on(self, model: Any) -> None:
        """Apply the plan to `model`; an earlier `attach`'s session (applied plan) goes on if it is the same, else it is closed."""
        earlier = session_of(unwrapped(model))
        if earlier is not None and _ATTACHED.get(earlier) == (self.plan, self._options):
            self.go_on_with(earlier, unwrapped(model))
            return
        if earlier is not None and earlier in _ATTACHED:
            earlier.close()
        super().put_on(model)
        assert self.session is not None
        _ATTACHED[self.session] = self.plan, self._options

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Restore the state of the session (the applied plan) if the training resumes from a checkpoint."""
        session = self._open()
        if unwrapped(model) is not session.model:
            raise ApplyError(
                "the trainer trains another model than the one that the plan was applied to: model_init made a new one, or it was "
                "wrapped. Give Trainer a model, and attach the plan last."
            )
        if isinstance(session, Session):
            session.awaits_optimizer = False  # it is made
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        if isinstance(saved, dict) and saved.get("attributes", {}).get("session"):
            session.load_state_dict(saved["attributes"]["session"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **rest: Any) -> None:
        """Add the numbers of the `Monitor` (memory, update statistics) to what the trainer logs at training steps."""
        if logs is None or "loss" not in logs or self._monitor is None:
            return
        values = self._monitor.numbers(optimizer)
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)  # the trainer's copy of `logs`, made before callbacks run

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Print a summary of the session (the applied plan), which stays open for evaluation, saving and more training."""
        if state.is_world_process_zero:
            self.print_summary()

    def close(self) -> None:
        """Close the session (the applied plan): all weights are decoded, the model is unmodified. May be called more than once."""
        self.detach()
        super().close()

    def detach(self) -> None:
        """Remove what this callback added to the model, but leave the session (the applied plan) to another `attach`."""
        if self.last_call is not None:
            self.last_call.close()
        if self._saving is not None:
            self._saving.close()
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None

    def state(self) -> dict[str, Any]:
        """Return the state of the session (the applied plan), which the trainer saves in trainer_state.json."""
        return {
            "args": {},
            "attributes": {"session": self.session.state_dict() if self.session is not None and self.is_open else None},
        }

    def _open(self) -> Session | SimulatedSession:
        if self.session is None or not self.is_open:
            raise ApplyError(
                "there is no open session: close() was called, also by another attach, or trainer.add_callback, which runs too late to "
                "apply a plan. Call paredown.integrations.hugging_face.attach(trainer, plan) before trainer.train(). To train without a "
                "plan, call trainer.remove_callback(TrainerPlanCallback)."
            )
        return self.session


def optimizer_of(args: Any, name: str = "adamw", **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return `optimizer_cls_and_kwargs` for a Trainer: a class of paredown.optim by `name`, with the arguments in TrainingArguments `args`.

    The trainer sets weight decay for each group. SGD takes momentum, dampening and nesterov from `args.optim_args`. Muon's adjust_lr_fn is
    "match_rms_adamw", for which learning rates of AdamW are right; give it adamw_params=paredown.optim.embeddings_and_head(model).
    `options` are more arguments of the optimizer, such as tier="half".
    """
    if name not in OPTIMIZERS:
        raise OptimError(f"optimizer {name!r} is unknown. Allowed: {', '.join(OPTIMIZERS)}.")
    for refused, instead in (
        ("release", "the trainer reads all gradients at once"),
        ("microbatches", "gradient_accumulation_steps"),
    ):
        if options.get(refused) not in (None, False, 1):
            raise OptimError(f"{refused}={options[refused]!r} cannot run in a Trainer: {instead}. Leave it out.")
    optimizer_class, sources = OPTIMIZERS[name]
    read = {
        key: getattr(args, of) if isinstance(of, str) else tuple(getattr(args, part) for part in of) for key, of in sources.items()
    }
    read |= _sgd_arguments(args) if name == "sgd" else {"adjust_lr_fn": "match_rms_adamw"} if name == "muon" else {}
    return optimizer_class(), {"lr": args.learning_rate, **read, **options}


def _sgd_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments for SGD in `args.optim_args`, such as "momentum=0.9,nesterov=true", as the trainer reads them."""
    text = str(getattr(args, "optim_args", None) or "").replace(" ", "") if _optim(args) == "sgd" else ""
    pairs = {pair.partition("=")[0]: pair.partition("=")[2] for pair in text.split(",")}
    return {
        name: pairs[name].lower() in ("true", "1", "yes") if name == "nesterov" else float(pairs[name])
        for name in SGD_ARGUMENTS
        if name in pairs
    }


def _optim(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def attach(
    trainer: Any,
    plan: Plan | None = None,
    *,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    batch: Any = None,
    optimizer: str | None = None,
    verify: bool = False,
    **options: Any,
) -> TrainerPlanCallback:
    """Apply `plan` to a trainer's model, and choose the optimizer of the plan; `options` are those of TrainerPlanCallback.

    `budget`, such as "24GiB", stands for a plan that `assign` makes within it, from a trace of the trainer's own step on its device with
    the longest of its examples; `batch` gives others, as the data collator returns them. `host_budget` is what the plan may store of
    packed activations in the memory of the host, on a GPU.
    `optimizer`: "adamw", "lion", "sgd" or "muon" of paredown.optim; by default the one with the update rule of `TrainingArguments.optim`,
    if the plan requests formats of an optimizer, else the trainer's. An optimizer that the trainer has already is kept.
    `verify`: before the first step, compare gradients of its batch with those of the unmodified model, and raise VerificationError if
    they differ by more than the tolerance.
    The session stays open until `close()` of the returned callback. A second `attach`, to this trainer or another one of the same model,
    continues the session if plan and options are the same; otherwise, and with a budget, it closes the session first.
    """
    _check_attached(trainer, plan, budget)
    if host_budget is not None and budget is None:
        raise ApplyError("host_budget is for the plan of a budget: attach(trainer, budget='24GiB', host_budget='64GiB').")
    if getattr(trainer, "model_init", None) is not None:
        raise ApplyError("model_init makes a new model for every training, without the plan. Give Trainer a model instead.")
    chosen_plan: Any = plan
    if budget is not None:
        _close_earlier(trainer)  # the step of the unmodified model is traced
        has_chunks = bool(options.get("chunked_loss", CHUNKED_LOSS))
        name = _traced_optimizer(trainer, optimizer)
        chosen_plan = plan_within(trainer, budget, name, batch, host_budget=host_budget, has_chunked_loss=has_chunks)
    callback = TrainerPlanCallback(chosen_plan, **options)
    _remove_earlier(trainer, callback)
    chosen, callback.optimizer = _choose_optimizer(trainer, callback, optimizer)
    callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    trainer.callback_handler.callbacks.insert(0, callback)  # before the loggers, so that they log its numbers
    if chosen is not None:
        of_model = {"adamw_params": optim.embeddings_and_head(unwrapped(trainer.model))} if chosen == "muon" else {}
        trainer.optimizer_cls_and_kwargs = optimizer_of(trainer.args, chosen, **of_model)
        callback.sets_optimizer = True
        if isinstance(callback.session, Session):
            callback.session.awaits_optimizer = True
    _log_choices(trainer, callback, callback.plan.reason if budget is not None else "")
    _explain_errors(trainer, callback, _traced_optimizer_name(trainer, chosen))
    if verify:
        _verify_first(trainer, callback)
    return callback


def _close_earlier(trainer: Any) -> None:
    session = session_of(unwrapped(trainer.model))
    if session is not None and session in _ATTACHED:
        session.close()


def _remove_earlier(trainer: Any, callback: TrainerPlanCallback) -> None:
    """Remove callbacks of earlier `attach` calls, and the optimizers they chose unless `callback` goes on with their session."""
    for earlier in [each for each in trainer.callback_handler.callbacks if isinstance(each, TrainerPlanCallback)]:
        trainer.callback_handler.callbacks.remove(earlier)
        earlier.detach()
        if earlier.session is session_of(unwrapped(trainer.model)) and earlier.is_like(callback):
            callback.sets_optimizer = earlier.sets_optimizer
        elif earlier.sets_optimizer:
            _drop_optimizer(trainer)


def _drop_optimizer(trainer: Any) -> None:
    if trainer.optimizer is not None:
        dropped = unwrap_optimizer(trainer.optimizer)
        for parameter in [p for group in dropped.param_groups for p in group["params"]]:
            dropped.let_go(parameter)
            remove_owner(parameter, dropped)
        log.warning("paredown: the plan is another one: %s of the earlier plan is dropped with its state.", type(dropped).__name__)
    trainer.optimizer = trainer.lr_scheduler = trainer.optimizer_cls_and_kwargs = None


def _log_choices(trainer: Any, callback: TrainerPlanCallback, reason: str) -> None:
    """Log `reason` (why `assign` chose the plan), which optimizer runs, and a hint if the learning rate is small."""
    for text in (reason, callback.optimizer, _small_rate_hint(trainer.args.learning_rate, callback.plan)):
        if text and trainer.is_world_process_zero():
            log.warning("paredown: %s", text)


def _choose_optimizer(trainer: Any, callback: TrainerPlanCallback, name: str | None) -> tuple[str | None, str]:
    """Return the paredown.optim optimizer that replaces the trainer's, None if that stays, and a sentence for the log on why.

    `name` is the optimizer that the user requested from `attach`; None: the plan decides.
    """
    optim_name, own = _optim(trainer.args), trainer.optimizer or trainer.optimizer_cls_and_kwargs
    if own is not None:
        class_name = (own[0] if isinstance(own, tuple) else type(own)).__name__
        if name is not None:
            raise OptimError(
                f"the trainer has an optimizer already, {class_name}: leave out optimizer={name!r}, or make the trainer without."
            )
        return None, f"the trainer's own optimizer {class_name} is kept."
    if name is not None:
        optimizer_class, _ = optimizer_of(trainer.args, name)
        return name, f"paredown.optim.{optimizer_class.__name__} replaces optim={optim_name!r}, as optimizer={name!r} requests."
    if callback.is_simulated or not requests_optimizer(unwrapped(trainer.model), callback.plan):
        return None, f"optim={optim_name!r} is kept: the plan requests nothing of the optimizer."
    if optim_name not in EQUALS:
        raise OptimError(
            f"optim={optim_name!r} has no equal in paredown.optim (which has {', '.join(OPTIMIZERS)}), and the plan requests formats "
            "that only those can store. Set TrainingArguments(optim='adamw_torch'), or replace it: attach(trainer, plan, "
            "optimizer='adamw'). To keep it, take a plan for activations only, such as Plan.preset('activations8')."
        )
    equal = EQUALS[optim_name]
    moments = callback.plan.find(("",), Role.MOMENT1).format
    stored = f"moments in {moments}" if moments is not None else "moments in float32, since the plan requests no format for them"
    return equal, f"optim={optim_name!r} runs as paredown.optim.{OPTIMIZERS[equal][0]().__name__}: the same update rule, {stored}."


def _small_rate_hint(learning_rate: float, plan: Plan) -> str:
    """Return a hint if the learning rate is so small that updates of packed weights are lost to rounding; "" otherwise."""
    weight, residue = (plan.find(("",), role).format for role in (Role.WEIGHT, Role.RESIDUE))
    if weight is None or residue is not None or not 0 < learning_rate <= SMALL_LEARNING_RATE:
        return ""
    return (
        f"learning_rate={learning_rate:g} is small for weights in {weight} without a residue: most updates are less than their step, and "
        "they follow float32 with much noise. Plan.preset('fine_tune') follows it closely, in 6.02 bytes a parameter with AdamW."
    )


def _traced_optimizer(trainer: Any, name: str | None) -> Any:
    """Return the trainer's optimizer, or the one requested by `name`, in the form that `trace_step` takes: a name or an instance."""
    if trainer.optimizer is not None:
        return unwrap_optimizer(trainer.optimizer)
    found = _traced_optimizer_name(trainer, name)
    if found is None:
        raise OptimError(
            f"a plan within a budget needs an optimizer whose state is known, and optim={_optim(trainer.args)!r} has no equal in "
            f"paredown.optim (which has {', '.join(OPTIMIZERS)}). Name one, attach(trainer, budget=..., optimizer='adamw'), or pass a plan."
        )
    return found


def _traced_optimizer_name(trainer: Any, name: str | None) -> str | None:
    """Return the name under which `trace_step` knows the trainer's optimizer, or the one requested by `name`; None if none."""
    own = trainer.optimizer_cls_and_kwargs
    equal = own[0].__name__.lower() if name is None and own is not None else name or EQUALS.get(_optim(trainer.args))
    if equal == "sgd":
        momentum = own[1].get("momentum") if own is not None else _sgd_arguments(trainer.args).get("momentum")
        return "sgdm" if momentum else "sgd"
    return equal if equal in (*OPTIMIZERS, "adam") else None


def _explain_errors(trainer: Any, callback: TrainerPlanCallback, optimizer: str | None) -> None:
    """Replace `trainer.train` by a method that explains out-of-memory errors; `optimizer` is the name that `trace_step` takes, or None."""
    train = trainer.train
    call = callback.last_call = LastCall(unwrapped(trainer.model))
    call.traced_as = {"optimizer": optimizer, "device": trainer.args.device.type, "autocast": autocast_of(trainer.args)}
    call.traced_as["chunked_loss"], call.learning_rate = callback.has_chunked_loss, trainer.args.learning_rate

    def explained(*args: Any, **named: Any) -> Any:
        try:
            return train(*args, **named)
        except (MemoryError, RuntimeError) as error:
            if callback.is_open:
                call.explain(error, callback.plan)
            raise

    trainer.train = explained


def _check_attached(trainer: Any, plan: Any, budget: Any) -> None:
    if hasattr(trainer, "callback_handler"):
        if (plan is None) == (budget is None):
            raise ApplyError("attach takes a plan or a budget: attach(trainer, plan), or attach(trainer, budget='24GiB').")
        return
    if isinstance(trainer, Plan) and hasattr(plan, "callback_handler"):
        raise ApplyError("attach takes the trainer first, then the plan: attach(trainer, plan).")
    types = f"{type(trainer).__name__} and {type(plan).__name__}"
    raise ApplyError(
        f"attach takes a transformers.Trainer and a Plan, not {types}: attach(trainer, plan). In a training loop of your own: "
        "paredown.apply(plan, model)."
    )


def _verify_first(trainer: Any, callback: TrainerPlanCallback) -> None:
    """Make the trainer compare gradients on its first batch with those of the unmodified model, right before the first step."""
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
