"""`find_subject(text)` returns the training step (model, batch, loss, optimizer) that an argument names, `read_plan(text)` the plan.

    digits#model=vit,steps=200        a task: its own model, data, loss and optimizer (docs/tasks.md)
    resnet50#width=64,picture=224     a model of paredown.models on random pictures or tokens
    file.py:function, module:function a Task, (model, batch), (model, batch, loss), or a model alone, which then needs --input
    folder or config.json             a model of transformers or diffusers with the shapes of its config; nothing is downloaded, no code
                                      of it runs

A trace needs shapes only, so another batch size is the same batch with another first dimension.

A plan is a preset, several presets for different roles, a file, formats by role, or `baseline` (no rules):

>>> len(read_plan("lpmm+activations4").rules)
5

>>> read_plan("activation=int4/64@bf16,weight=int8/64@e8m0").rules[0][0]
'weight'
>>> read_plan("activation4")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
paredown.errors.PlanError: there is no plan 'activation4': give a file, a preset (activations8, ...), or role=format,... Closest: ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paredown.assignment.assign import assign
from paredown.cli.application import SubjectOptions
from paredown.cli.output import BASELINE
from paredown.errors import PlanError, TaskError, TraceError
from paredown.integrations.diffusers_config import read_diffusers_config, sample_loss
from paredown.integrations.hugging_face_config import CONFIG_BATCH, NAME, check_counts, find_config, is_of_diffusers, read_config
from paredown.loss.output_head import CHUNKED_LOSS
from paredown.models import LENGTH, MODELS, OF_TEXT, PICTURE, random_batch
from paredown.models.lora import add_lora
from paredown.models.transformer import token_loss
from paredown.plan.footprint import peak_of
from paredown.plan.plan import Plan, combine_presets
from paredown.plan.presets import PRESETS
from paredown.plan.selectors import closest
from paredown.plan.trace import Trace
from paredown.predict.fake.fake_step import LOSS_EXAMPLE, NO_LOSS, missing_loss
from paredown.predict.trace_step import trace_step
from paredown.sizes import parse_bytes
from paredown.study.tasks import lookup
from paredown.study.tasks.task import RULES, Task
from paredown.study.tasks.task_trace import formats_state, resized, trace_task

BATCH = 32
OPTIMIZER = "adamw"


@dataclass(frozen=True, eq=False)
class Subject:
    """The training step that a command line names: the arguments of `trace_step`, and its task, if it has one."""

    name: str
    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None = None
    optimizer: Any = OPTIMIZER
    autocast: torch.dtype | None = None
    device: str | None = None
    task: Task | None = None
    compiled: bool = False
    chunked_loss: bool = CHUNKED_LOSS
    _traces: dict[tuple[int, bool], Trace] = field(default_factory=dict[tuple[int, bool], Trace])
    assumed: tuple[str, ...] = ()  # texts on sizes of the batch that were assumed, with the options that set them
    adapted: tuple[str, ...] = ()  # paths of layers with a LoRA adapter

    @property
    def batch_size(self) -> int:
        """Return the number of examples in the batch: the first dimension of its first tensor."""
        return next((len(t) for t in tree_leaves(self.batch) if isinstance(t, Tensor) and t.ndim), 0)

    def trace(self, plan: Plan | None = None, batch_size: int | None = None) -> Trace:
        """Return the trace of this step, from which bytes under `plan` (None: without a plan) are predicted.

        `batch_size` replaces the step's own. A task's trace depends on the plan, which decides which optimizer runs.
        """
        has_state_formats = self.task is not None and formats_state(plan or Plan())  # only traces of tasks depend on the plan
        key = self.batch_size if batch_size is None else batch_size, has_state_formats
        if key not in self._traces:
            with _trace_errors(f"{self.name}: one step cannot be traced", self._missing_loss()):
                self._traces[key] = self._new_trace(plan, key[0])
        return self._traces[key]

    def _missing_loss(self) -> str:
        """Return a hint if no loss was given although the batch seems to have targets; "" otherwise."""
        if self.loss is not None or not isinstance(self.batch, tuple) or len(self.batch) < 2:
            return ""
        return f" {missing_loss(len(self.batch), f'return (model, batch, loss), such as {LOSS_EXAMPLE}')}"

    def _new_trace(self, plan: Plan | None, batch_size: int) -> Trace:
        """Trace the step with `batch_size` examples: a task's, with the optimizer that `plan` needs, or that of a model alone."""
        where: dict[str, Any] = {"device": self.device, "compiled": self.compiled, "chunked_loss": self.chunked_loss}
        if self.task is None:
            batch, step = resized(self.batch, self.batch_size, batch_size), {"loss": self.loss, "autocast": self.autocast}
            return trace_step(self.model, batch, optimizer=self.optimizer, **step, **where)
        task = (
            self.task if self.autocast == self.task.autocast else replace(self.task, autocast=self.autocast)
        )  # its traces are cached
        optimizer = None if self.optimizer == task.settings.optimizer else self.optimizer
        return trace_task(task, plan, batch_size=batch_size, optimizer=optimizer, **where)

    def peak_bytes(self, plan: Plan, batch_size: int | None = None) -> int:
        """Return the predicted peak bytes of the step under a plan."""
        return peak_of(self.trace(plan, batch_size), plan)

    def plan_within(self, budget: str, **options: Any) -> Plan:
        """Return the plan that `assign` makes for this step and `budget`, such as "8GiB"; `options` are those of `assign`."""
        budget_bytes = parse_bytes(budget, whole=self.peak_bytes(Plan()))
        if self.peak_bytes(Plan()) > budget_bytes:
            made = assign(self.trace(Plan.preset("lpmm")), budget_bytes, **options)
            if self.peak_bytes(made) <= budget_bytes:
                return made
        return assign(self.trace(), budget_bytes, **options)


@contextmanager
def _trace_errors(what: str, hint: str = "") -> Generator[None]:
    """Return a context in which errors of the user's model become a TraceError that begins with `what` and ends with `hint`."""
    try:
        yield
    except TaskError:
        raise
    except TraceError as error:
        fault = str(error).partition(f" {NO_LOSS}")[0] if hint else str(error)  # `hint` has the advice for the command line
        raise TraceError(f"{what}: {fault}{hint}") from error
    except Exception as error:
        raise TraceError(f"{what}: {type(error).__name__}: {error}.{hint}") from error


def find_subject(text: str, changes: SubjectOptions) -> Subject:
    """Return the training step that `text` names, with the `changes` that options of the command line request."""
    head, _, tail = text.strip().partition("#")
    head = head.strip()
    if (config := find_config(head)) is not None:
        subject = _of_config(config, tail, changes)
    elif ":" in head and head.partition(":")[0] not in lookup.WITH_FILE:
        subject = _of_user_code(head, lookup.parse_options(tail), changes)
    elif head in MODELS:
        options = {**_length_of(head, changes.input), **lookup.parse_options(tail)}
        subject = replace(_of_model(head, options), assumed=_assumed_of_model(head, options))
    else:
        subject = of_task(_task(text, head))
    return _changed(subject if changes.lora is None else _with_lora(subject, changes), changes)


def _of_config(config: Path, tail: str, changes: SubjectOptions) -> Subject:
    """Return the step of the model that the file `config`, a config.json of transformers or diffusers, describes.

    `tail` is the text of options after the # of the argument; `changes` has the options that begin with --.
    """
    if is_of_diffusers(config):
        model, step, assumed = read_diffusers_config(config, lookup.parse_options(tail), changes.input)
        return Subject(type(model).__name__, model, step, sample_loss, assumed=(_assumed_batch(CONFIG_BATCH), *assumed))
    model, batch = read_config(config, lookup.parse_options(tail), changes.input)
    return Subject(config.parent.name or config.name, model, batch, assumed=_assumed_tokens(batch, tail, changes))


def _with_lora(subject: Subject, changes: SubjectOptions) -> Subject:
    """Return the step with the LoRA adapters that `changes` request; a config's batch is then 1, unless --batch sets it."""
    if subject.task is not None:
        raise TaskError(
            f"{subject.name} is a task, which makes its own model: --lora needs a config.json, a model, or file.py:function."
        )
    assert changes.lora is not None
    try:
        adapted = tuple(add_lora(subject.model, changes.lora, changes.lora_targets))
    except ValueError as error:
        raise TaskError(f"{subject.name}: {error}") from None
    if changes.batch is not None or _assumed_batch(CONFIG_BATCH) not in subject.assumed:
        return replace(subject, adapted=adapted)
    assumed = (_assumed_batch(1), *(text for text in subject.assumed if text != _assumed_batch(CONFIG_BATCH)))
    return replace(subject, adapted=adapted, batch=resized(subject.batch, subject.batch_size, 1), assumed=assumed)


def _assumed_batch(num: int) -> str:
    return f"batch {num} (--batch sets it)"


def _assumed_tokens(batch: Mapping[str, Tensor], tail: str, changes: SubjectOptions) -> tuple[str, ...]:
    """Return texts that name the batch size, and the length unless an option sets it, assumed for a Hugging Face config.

    `tail` is the text of options after the # of the argument; `changes` has the options that begin with --.
    """
    is_given = changes.input is not None or "length" in lookup.parse_options(tail)
    lengths = [f"length {batch['input_ids'].shape[1]} (--input tokens:N sets it)"] if "input_ids" in batch and not is_given else []
    return (_assumed_batch(CONFIG_BATCH), *lengths)


def _assumed_of_model(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return texts that name the sizes assumed for the built-in model `name`: batch, and length or picture, unless in `options`."""
    key, size = ("length", f"length {LENGTH}") if name in OF_TEXT else ("picture", f"pictures of {PICTURE} x {PICTURE}")
    batch = () if "batch" in options else (_assumed_batch(BATCH),)
    return (*batch, *(() if key in options else (f"{size} (#{key}=N sets it)",)))


def find_any_task(text: str) -> Task:
    """Return the task that `text` names: a built-in one, or one that a function of a file or of an importable module returns."""
    head, _, tail = text.strip().partition("#")
    kind, _, function = head.strip().rpartition(":")
    if not kind or ".py:" in head or head.partition(":")[0] in lookup.WITH_FILE:
        return _task(text, head.strip())
    task = lookup.call_user_function(kind, function, lookup.parse_options(tail))
    if not isinstance(task, Task):
        raise TaskError(
            f"{text}: {function} returned {type(task).__name__}; to train, it must return a paredown.Task (docs/tasks.md)."
        )
    return task


def of_task(task: Task, device: str | None = None) -> Subject:
    """Return the training step of a task, to be traced for the type of `device` ("cuda:1": cuda); None: the default device."""
    torch.manual_seed(0)
    batch = next(task.data.batches(task.batch, seed=0, device=torch.device("cpu")))
    kind = None if device is None else device.partition(":")[0]
    return Subject(task.name, task.make_model(0), batch, task.loss, task.settings.optimizer, task.autocast, kind, task)


def _task(text: str, head: str) -> Task:
    known = head.partition(":")[0] in (*lookup.WITH_FILE, *lookup.WITHOUT_FILE) or ".py:" in head
    if not known:
        lookup.check_has_function(head)
        _check_is_no_config(head)
        likely = closest(head, (*lookup.WITHOUT_FILE, *lookup.WITH_FILE, *MODELS))
        raise TaskError(
            f"{head!r} is neither a task nor a model. Closest: {likely}. Allowed: {', '.join(lookup.WITHOUT_FILE)}, images:FILE, "
            f"text:FILE, {', '.join(MODELS)}, file.py:function, module:function, or a folder with a Hugging Face config.json."
        )
    return lookup.find_task(text)


def _check_is_no_config(head: str) -> None:
    """Raise TaskError if `head` looks like a Hugging Face config (a path, or a name on the hub) that is not on this machine."""
    path = Path(head)
    if path.is_dir():
        raise TaskError(f"the folder {head} has no {NAME}. To train on its pictures: images:{head}.")
    if path.suffix == ".json":
        more = "" if path.name == NAME else f" A config of a Hugging Face model is named {NAME}."
        raise TaskError(f"{head}: {f'there is no such file.{more}' if not path.exists() else more.strip()}")
    if "/" in head:
        raise TaskError(
            f"there is no folder {head}, and nothing is downloaded: save {NAME} of the Hugging Face model in a folder, and give its path."
        )


def _changed(subject: Subject, changes: SubjectOptions) -> Subject:
    optimizer = changes.optimizer or subject.optimizer
    if isinstance(optimizer, str) and optimizer not in (*RULES, "adam"):
        raise TaskError(f"optimizer {optimizer!r} is unknown. Allowed: {', '.join(RULES)}.")
    if changes.batch is not None:
        batch = resized(subject.batch, subject.batch_size, changes.batch)
        subject = replace(subject, batch=batch, assumed=tuple(text for text in subject.assumed if not text.startswith("batch ")))
    return replace(
        subject,
        optimizer=optimizer,
        autocast=subject.autocast if changes.autocast is None else lookup.autocast_dtype(changes.autocast),
        device=changes.device,
        compiled=changes.compiled,
        chunked_loss=subject.chunked_loss if changes.chunked_loss is None else changes.chunked_loss,
        _traces={},
    )


def _length_of(name: str, input: str | None) -> dict[str, Any]:
    """Return {"length": N} if the built-in model `name` reads text and `input`, the value of --input, is tokens:N; {} otherwise."""
    kind, _, number = (input or "").partition(":")
    return {"length": int(number[:9])} if name in OF_TEXT and kind == "tokens" and number.isdigit() else {}


def _of_model(name: str, options: Mapping[str, Any]) -> Subject:
    sizes = {"picture": options.get("picture", PICTURE), "length": options.get("length", LENGTH)}
    keywords = {key: value for key, value in options.items() if key not in ("picture", "length", "batch")}
    keywords |= {"picture": sizes["picture"]} if name == "vit" else {"context": sizes["length"]} if name == "gpt" else {}
    check_counts(keywords, f"model {name!r}")
    try:
        with torch.device("meta"):
            model = MODELS[name](**keywords)
    except Exception as error:
        raise TaskError(f"model {name!r} cannot be built with {dict(options)}: {error}.") from None
    loss = token_loss if name != "unet" else nn.functional.cross_entropy  # of logits (num, classes, height, width)
    return Subject(name, model, random_batch(name, options.get("batch", BATCH), **sizes), loss)


def _of_user_code(head: str, options: Mapping[str, Any], changes: SubjectOptions) -> Subject:
    file, _, function = head.rpartition(":")
    if file.endswith(".py") and not Path(file).is_file():
        raise TaskError(f"{file}: there is no such file.")
    made = lookup.call_user_function(Path(file) if file.endswith(".py") else file, function, options)
    if isinstance(made, Task):
        return of_task(made)
    if isinstance(made, nn.Module):
        return Subject(head, made, *_random_batch_and_loss(made, changes), assumed=(_assumed_batch(BATCH),))
    if isinstance(made, tuple) and 2 <= len(made) <= 4 and isinstance(made[0], nn.Module):
        return Subject(head, *made)
    allowed = "a paredown.Task, a model, (model, batch), (model, batch, loss) or (model, batch, loss, optimizer)"
    raise TaskError(f"{function} returned {type(made).__name__}; it must return {allowed}.")


def _random_batch_and_loss(model: nn.Module, changes: SubjectOptions) -> tuple[Any, Callable[..., Tensor]]:
    """Return a batch of the shape of --input with labels for the model's logits (..., num_classes), and cross entropy as its loss."""
    if changes.input is None:
        raise TaskError(
            "the function returned a model and no batch: give the shape of one example, such as --input 3x224x224 or tokens:1024."
        )
    x, shapes = example(changes.input, changes.batch or BATCH), list[tuple[int, ...]]()

    def note_shape(output: Any, _: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise TaskError(
                f"the model returns {type(output).__name__}, not a tensor: return (model, batch, loss) from the function."
            )
        shapes.append(tuple(output.shape))
        return output.float().sum()

    with _trace_errors(f"the model does not take examples of {changes.input}"):
        trace_step(model, (x, torch.empty(1)), loss=note_shape, device="cpu")
    return (x, torch.zeros(shapes[0][:-1], dtype=torch.int64)), token_loss


def example(text: str, num: int) -> Tensor:
    """Return a batch of `num` examples for a shape as text: `3x224x224` floats, or `tokens:1024`.

    >>> example("3x8x8", 2).shape, example("tokens:16", 2).dtype
    (torch.Size([2, 3, 8, 8]), torch.int64)
    """
    kind, sign, rest = text.partition(":")
    sizes = (rest if sign else kind).lower().split("x")
    if (sign and kind != "tokens") or not all(size.isascii() and size.isdigit() and int(size[:9]) > 0 for size in sizes):
        raise TaskError(f"input {text!r} cannot be parsed; write the shape of one example, such as 3x224x224, or tokens:1024.")
    shape = (num, *(int(size[:9]) for size in sizes))
    return torch.zeros(shape, dtype=torch.int64) if sign else torch.empty(shape, device="meta")


# --- the plan that an argument names ---------------------------------------------------------------------------------


def read_plan(text: str) -> Plan:
    """Return the plan that an argument names: a preset, presets joined by +, a file, or formats by role."""
    if text == BASELINE:
        return Plan()
    if text and all(name in PRESETS for name in text.split("+")):
        return combine_presets(text.split("+")) if "+" in text else Plan.preset(text)
    if "=" in text and not Path(text).exists():
        return _by_role(text)
    if not Path(text).is_file():
        names = (*PRESETS, BASELINE)
        raise PlanError(
            f"there is no plan {text!r}: give a file, a preset ({', '.join(names)}), or role=format,... Closest: {closest(text, names)}."
        )
    return Plan.load(text)


def _by_role(text: str) -> Plan:
    formats: dict[str, str] = {}
    for part in text.split(","):
        role, sign, format = (piece.strip() for piece in part.partition("="))
        if not sign or not format or role in formats:
            raise PlanError(
                f"{part!r} in plan {text!r} cannot be parsed: write role=format, each role once, such as activation=int4/64@bf16."
            )
        formats[role] = format
    return Plan.uniform(**formats)  # type: ignore[arg-type]


def name_of(text: str) -> str:
    """Return the name of a plan for tables: the argument `text` itself, without the folder if it is a file."""
    return text if "=" in text or text in PRESETS else Path(text).name
