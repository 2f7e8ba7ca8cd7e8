"""Trace the training step of a Hugging Face trainer: its arguments of the model, its device, autocast and optimizer.

    arguments = model_arguments(trainer)         # what compute_loss passes to the model for the longest of up to 1024 examples
    trace = traced_step(trainer, "adamw")
    plan = plan_within(trainer, "24GiB", optimizer="adamw")

`compute_loss` runs up to its first call of the model with gradients enabled, so that trainers with their own arguments, such as those of
TRL, need no code here. GRPO and RLOO generate what they train on: their batch has the longest prompt and `max_completion_length` tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn

from paredown.assignment.assign import NOT_ALLOWED, assign
from paredown.autograd.module_watch import unwrapped
from paredown.errors import ApplyError, BudgetError
from paredown.formats.catalog import SMALL_LEARNING_RATE
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.sizes import parse_bytes, say_bytes

log = logging.getLogger("paredown")
MOST_ROWS = 1024  # examples of which the longest make the batch
LABELS, MASK = "labels", "attention_mask"
OF_TRANSFORMERS = ("every_n_layers", "offload")  # gradient_checkpointing_kwargs that torch's checkpoint does not take
NOT_SEEN = (
    "paredown: what compute_loss of %s passes to the model is not known, since %s. The plan is for the model's own loss on the batch. Pass "
    "attach(trainer, budget=..., batch=...) with the arguments of the model to choose them."
)


def plan_within(
    trainer: Any,
    budget: int | str,
    optimizer: str | None,
    batch: Any = None,
    *,
    host_budget: int | str | None = None,
    has_chunked_loss: bool = False,
) -> Plan:
    """Return the plan that `assign` makes for the trainer's own step, on its device, within `budget` and `host_budget`.

    At learning rates of 5e-5 and less, trained weights keep 24 bits or more. The weights of a reference model are part of the budget.
    """
    trace = traced_step(trainer, optimizer, batch, has_chunked_loss=has_chunked_loss)
    reference = reference_bytes(trainer)
    budget_bytes = parse_bytes(budget, whole=footprint(trace).peak_bytes + reference)
    if reference >= budget_bytes:
        raise BudgetError(
            f"the reference model of {type(trainer).__name__} takes {say_bytes(reference)} of a budget of {say_bytes(budget_bytes)}. Raise "
            "the budget, or train adapters: then the base without adapters is the reference."
        )
    is_small_rate = 0 < trainer.args.learning_rate <= SMALL_LEARNING_RATE
    recompute = False if getattr(trainer.args, "gradient_checkpointing", False) else None
    method = "fine_tune" if is_small_rate else "role"
    try:
        return assign(trace, budget_bytes - reference, method=method, recompute=recompute, host_budget=host_budget)
    except BudgetError as error:
        raise _with_nearest(error, reference) from None


def _with_nearest(error: BudgetError, reference: int) -> BudgetError:
    """Return `error` with a message that names the smallest budget for which `attach` finds a plan.

    `reference` is the bytes of a reference model's weights, which that budget must hold, too.
    """
    if error.smallest_bytes is None:
        return error
    smallest = error.smallest_bytes + reference
    text = str(error).replace(NOT_ALLOWED, "Activation checkpointing is that of the trainer.")
    with_reference = f", {say_bytes(reference)} for the weights of the reference model included" if reference else ""
    made = BudgetError(f"{text} The nearest plan: attach(trainer, budget={smallest}), {say_bytes(smallest)}{with_reference}.")
    made.smallest_bytes = smallest
    return made


def traced_step(trainer: Any, optimizer: str | None, batch: Any = None, *, has_chunked_loss: bool = False) -> Trace:
    """Return the trace of one step of the trainer on `batch`, which its data collator returned, or on its longest examples.

    `optimizer` is the name or object that `trace_step` takes; `has_chunked_loss`: cross entropy runs over some rows at a time.
    """
    model = unwrapped(trainer.model)
    device = trainer.args.device.type
    arguments = model_arguments(trainer, batch)
    options: Any = {
        "optimizer": optimizer,
        "device": device,
        "autocast": autocast_of(trainer.args),
        "chunked_loss": has_chunked_loss,
    }
    with _as_in_training(trainer, model):
        return trace_step(model, arguments, **options)


def autocast_of(args: Any) -> torch.dtype | None:
    """Return the dtype of autocast that TrainingArguments request; None without autocast."""
    return torch.bfloat16 if getattr(args, "bf16", False) else torch.float16 if getattr(args, "fp16", False) else None


def reference_bytes(trainer: Any) -> int:
    """Return the bytes of the weights of a reference model (DPO, GRPO) that the trained model does not share."""
    reference = getattr(trainer, "ref_model", None)
    if not isinstance(reference, nn.Module):
        return 0
    own = {id(p) for p in trainer.model.parameters()}
    return sum(p.numel() * p.element_size() for p in reference.parameters() if id(p) not in own)


@contextmanager
def _as_in_training(trainer: Any, model: nn.Module) -> Generator[None]:
    """Return a context in which the model is in training mode, with activation checkpointing if the trainer enables it."""
    was_training = model.training
    enables = getattr(trainer.args, "gradient_checkpointing", False) and not getattr(model, "is_gradient_checkpointing", True)
    model.train()
    if enables:
        options = dict(trainer.args.gradient_checkpointing_kwargs or {})
        own = {name: options.pop(name) for name in OF_TRANSFORMERS if name in options}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **own)  # type: ignore[operator]
    try:
        yield
    finally:
        if enables:
            model.gradient_checkpointing_disable()  # type: ignore[operator]
        model.train(was_training)


# --- the arguments of the model ---------------------------------------------------------------------------------------


def model_arguments(trainer: Any, batch: Any = None) -> dict[str, Any]:
    """Return the keyword arguments with which one step of the trainer calls the model.

    `batch`: what the data collator returns, by default for the longest examples. An attention mask of ones is left out, since models
    ignore it.
    """
    if batch is None:
        batch = longest_batch(trainer)
    if not isinstance(batch, Mapping):
        raise ApplyError(
            f"the data collator of {type(trainer).__name__} returns a {type(batch).__name__}, not a mapping of tensors, and its step "
            "cannot be traced from that. Pass the arguments of the model: attach(trainer, budget=..., batch={'input_ids': ..., "
            "'labels': ...})."
        )
    found = _recorded_call(trainer, dict(batch))
    if LABELS in batch and LABELS not in found:  # a loss of the trainer's own: the model's has about the same memory
        found[LABELS] = batch[LABELS]
    mask = found.get(MASK)
    if isinstance(mask, Tensor) and bool(mask.all()):
        del found[MASK]
    return found


def longest_batch(trainer: Any) -> Any:
    """Return the data collator's batch of the longest of 1024 examples; for trainers that generate texts, tokens of the full length."""
    dataset = getattr(trainer, "train_dataset", None)
    if dataset is None:
        raise ApplyError("the trainer has no train_dataset to make a batch of: attach(trainer, budget=..., batch={...}).")
    count = trainer.args.per_device_train_batch_size
    if type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "column_names"):
        dataset = trainer._remove_unused_columns(dataset, description="training")
    rows = sorted(islice(iter(dataset), MOST_ROWS), key=_num_tokens, reverse=True)
    if rows and isinstance(rows[0], Mapping) and "prompt" in rows[0] and hasattr(trainer.args, "max_completion_length"):
        return _generated(trainer, [row["prompt"] for row in rows[:count]], count)
    rows = (rows * count)[:count]
    with torch.random.fork_rng(devices=[]):  # a collator may draw masks
        return trainer.data_collator(rows)


def _num_tokens(row: Any) -> int:
    values = row.values() if isinstance(row, Mapping) else row if isinstance(row, list | tuple) else ()
    return sum(value.numel() if isinstance(value, Tensor) else len(value) if hasattr(value, "__len__") else 1 for value in values)


def _generated(trainer: Any, prompts: list[Any], count: int) -> dict[str, Any]:
    """Return arguments of the model for `count` texts of the greatest length, which are the longest prompt and a full completion."""
    ids = trainer._tokenize_prompts(prompts)[0]
    length = max(map(len, ids)) + trainer.args.max_completion_length
    tokens = torch.zeros(count, length, dtype=torch.int64)
    return {"input_ids": tokens, LABELS: tokens.clone(), "use_cache": False, "fused_lm_head": True}


@final
class _Called(Exception):
    """Raised when `compute_loss` calls the model, to end the computation once the arguments are known."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@final
class _Recorder:
    """Stands in for the model that a trainer calls: at a call with gradients enabled it raises `_Called` with the arguments."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._model(*args, **arguments)
        raise _Called(arguments if not args else {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _recorded_call(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that `compute_loss` passes to the model for a batch; if they stay unknown, the batch, with a warning."""
    if "fused_lm_head" in batch:
        return batch
    reason = "it does not call the model"
    try:
        with torch.enable_grad():
            trainer.compute_loss(_Recorder(unwrapped(trainer.model)), trainer._prepare_input(dict(batch)))
    except _Called as call:
        if call.arguments:
            return call.arguments
        reason = "it calls the model with positional arguments"
    except Exception as error:  # a loss that needs more than the model
        reason = f"it raises {type(error).__name__} before it calls the model: {error}"
    log.warning(NOT_SEEN, type(trainer).__name__, reason)
    return batch
