"""Hugging Face's Trainer under plans, with its own defaults: clipping, accumulation, schedules, checkpoints, loggers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paredown as pare
from paredown.errors import ApplyError, BudgetError, OptimError, PlanError, VerificationError
from paredown.session.eager.stored_tensors import StoredValues

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

from paredown.integrations import trainer_step  # noqa: E402
from paredown.integrations.hugging_face import TrainerPlanCallback, attach, optimizer_of  # noqa: E402
from paredown.models.lora import add_lora  # noqa: E402

PLAN = pare.Plan.preset("lpmm").set("activation", "int4/64@bf16")


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(128, (64,), generator=generator) for _ in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_in(folder: Path, model: Any = None, callbacks: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 3}
    trainer_options = {
        name: options.pop(name) for name in ("optimizers", "optimizer_cls_and_kwargs", "eval_dataset") if name in options
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **{**defaults, **quiet, **options})
    return transformers.Trainer(model=model or tiny(), args=args, train_dataset=data(), callbacks=callbacks, **trainer_options)


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different, different


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_without_formats_it_is_the_trainer_with_torchs_optimizer(optimizer: str | None, tmp_path: Path) -> None:
    plain = trainer_in(tmp_path / "a", optim="adamw_torch", weight_decay=0.1)
    plain.train()
    pared = trainer_in(tmp_path / "b", optim="adamw_torch", weight_decay=0.1)
    attach(pared, pare.Plan(), optimizer=optimizer)
    pared.train()
    assert isinstance(pared.optimizer.optimizer, torch.optim.AdamW if optimizer is None else pare.optim.AdamW)
    assert_equal(state(pared.model), state(plain.model))


RUNS_AS = {"adamw_torch_fused": "AdamW", "adamw_bnb_8bit": "AdamW", "paged_adamw_32bit": "AdamW", "lion_8bit": "Lion", "sgd": "SGD"}


@pytest.mark.parametrize("optim", RUNS_AS)
def test_an_optimizer_with_an_equal_runs_as_it_and_that_is_logged(
    optim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_in(tmp_path, optim=optim, optim_args="momentum=0.75, nesterov=true" if optim == "sgd" else None)
    callback = attach(trainer, PLAN)
    optimizer_class, arguments = trainer.optimizer_cls_and_kwargs
    assert optimizer_class is getattr(pare.optim, RUNS_AS[optim])
    assert optim != "sgd" or arguments == {"lr": 1e-3, "momentum": 0.75, "nesterov": True}
    said = f"optim='{optim}' runs as paredown.optim.{RUNS_AS[optim]}: the same update rule, moments in int8"
    assert said in callback.optimizer and said in caplog.text
    callback.close()


@pytest.mark.parametrize("optim", ["adafactor", "rmsprop"])
def test_an_optimizer_without_an_equal_is_kept_or_refused(optim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = trainer_in(tmp_path, optim=optim)
    with pytest.raises(OptimError, match=rf"optim='{optim}' has no equal.*adamw, lion, sgd.*optimizer='adamw'.*activations8"):
        attach(refused, PLAN)
    assert pare.apply(PLAN, refused.model).forwards == 0, "the refused plan left no session"
    kept = trainer_in(tmp_path, optim=optim, max_steps=1)
    attach(kept, pare.Plan.preset("activations8"))
    kept.train()
    assert type(kept.optimizer.optimizer).__name__.lower() == optim
    assert f"optim='{optim}' is kept: the plan requests nothing of the optimizer" in caplog.text
    replaced = trainer_in(tmp_path, optim=optim)
    assert f"paredown.optim.Lion replaces optim='{optim}'" in attach(replaced, PLAN, optimizer="lion").optimizer
    own = trainer_in(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}))
    with pytest.raises(OptimError, match="has an optimizer already, SGD: leave out optimizer='adamw'"):
        attach(own, PLAN, optimizer="adamw")


def test_changes_before_during_and_after_training_with_frozen_weights(tmp_path: Path) -> None:
    model = tiny()
    model.transformer.h[0].requires_grad_(False)
    during: list[Any] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            during.append(callback.session.changes)

    trainer = trainer_in(tmp_path, model, callbacks=[Look()], max_steps=2)
    callback = attach(trainer, PLAN)
    before = callback.session.changes
    trainer.train()
    after = callback.session.changes
    small = [row for row in before if "their state is float32" in row.reason]
    assert len(small) == 1 and set(small) <= set(during[-1])
    for rows in (before, *during, after):
        assert not [row for row in rows if "make one" in row.reason or "moment" in row.slot or "gradient=" in row.slot]
    callback.close()
    assert after == during[-1] == callback.session.changes, "of the open session, and of the closed one: those that it had"


def test_a_plan_at_work_in_a_trainer_with_its_defaults(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Logger(transformers.TrainerCallback):  # as those of TensorBoard, W&B and MLflow
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            seen.append(dict(logs))

    trainer = trainer_in(tmp_path, callbacks=[Logger()], gradient_accumulation_steps=2, max_steps=3)
    callback = attach(trainer, PLAN)
    session = callback.session
    assert session is not None
    assert not any(p.untyped_storage().nbytes() for p in trainer.model.parameters() if p.numel() >= 4096)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, pare.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0] and len(optimizer.param_groups) == 2
    assert (optimizer.updates, session.forwards) == (3, 6)
    assert callback.is_open and not any(p.untyped_storage().nbytes() for p in trainer.model.parameters() if p.numel() >= 4096)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 3 and logged == [{**row, "step": i + 1} for i, row in enumerate(r for r in seen if "loss" in r)]
    num_values = sum(p.numel() for p in trainer.model.parameters())
    for row in logged:
        assert row["grad_norm"] > 0
        assert 1.0 < row["memory/weight_gib"] * 2**30 / num_values < 1.1
        assert 2.0 < row["memory/optimizer_gib"] * 2**30 / num_values < 2.2
        assert 1.0 < row["memory/gradient_gib"] * 2**30 / num_values < 1.1
        assert row["memory/activation_gib"] > 0
        assert 0 <= row["updates/underflow"] < 1 and 0 < row["updates/flips"] < 1


@pytest.mark.parametrize("logger", ["tensorboard", "wandb", "mlflow"])
def test_loggers_write_the_numbers_down(logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries themselves, without a network: what they leave on the disk has the names."""
    pytest.importorskip(logger, reason=f"{logger} is not installed")
    settings = {
        "TENSORBOARD_LOGGING_DIR": tmp_path / "logs",
        "WANDB_MODE": "offline",
        "WANDB_DIR": tmp_path,
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    trainer = trainer_in(tmp_path / "out", report_to=[logger], max_steps=2)
    attach(trainer, PLAN)
    trainer.train()
    if logger == "wandb":
        __import__("wandb").finish()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    written = b"".join(str(path).encode() + path.read_bytes() for path in files)
    for name in (b"memory/weight_gib", b"memory/activation_gib", b"updates/underflow"):
        assert name in written, name


@pytest.mark.parametrize("prints", [True, False])
def test_the_summary_is_printed_at_the_end(prints: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_in(tmp_path, max_steps=2)
    callback = attach(trainer, PLAN)
    callback.prints_summary = prints
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("paredown: Session of GPT2LMHeadModel: 2 forward passes")]
    assert len(starts) == prints
    if prints:
        names = [line.split("  ")[1] for line in lines[starts[0] + 1 : starts[0] + 6]]
        assert names == ["activations", "weights", "optimizer state", "gradients", "peak memory"]


def test_clipping_is_that_of_the_trainer(tmp_path: Path) -> None:
    """SGD without momentum moves by lr times the clipped gradient: all together by lr x max_grad_norm at most."""
    plan = pare.Plan.uniform(gradient="int8/64@bf16")
    trainer = trainer_in(tmp_path, max_steps=1, max_grad_norm=0.125, lr_scheduler_type="constant", learning_rate=0.5)
    before = state(trainer.model)
    attach(trainer, plan, optimizer="sgd")
    trainer.train()
    names = [name for name in before if name != "lm_head.weight"]  # tied to the embedding
    moved = sum((trainer.model.state_dict()[name] - before[name]).square().sum() for name in names).sqrt()
    assert trainer.state.log_history[0]["grad_norm"] > 0.2
    assert moved.item() == pytest.approx(0.5 * 0.125, rel=1e-3)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path, guarded: bool) -> None:
    def guard() -> Any:
        batch = {name: torch.stack([row[name] for row in data()[:4]]) for name in ("input_ids", "labels")}
        return pare.Guard(pare.trace_step(tiny(), batch, optimizer="adamw", device="cpu")) if guarded else None

    whole = trainer_in(tmp_path / "whole", save_strategy="steps", save_steps=2)
    attach(whole, PLAN, guard=guard())
    whole.train()
    later = trainer_in(tmp_path / "later")
    callback = attach(later, PLAN, guard=guard())
    session = callback.session
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert session is not None and session.forwards == 4
    assert_equal(state(later.model), state(whole.model))
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (whole, later)]
    assert losses[0] == losses[1]


def test_checkpoints_and_saved_models_are_plain(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    attach(trainer, PLAN)
    during: list[dict[str, Tensor]] = []
    trainer.add_callback(
        type("Look", (transformers.TrainerCallback,), {"on_save": lambda *a, **k: during.append(state(k["model"]))})
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    for folder in ("checkpoint-2", "model"):
        read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert_equal(state(read), during[0])
        assert type(read.transformer.wte.weight) is torch.nn.Parameter


def test_an_optimizer_of_ones_own_stays(tmp_path: Path) -> None:
    model = tiny()
    session = pare.apply(pare.Plan.preset("half"), model)
    optimizer = pare.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = trainer_in(tmp_path, model, optimizers=(optimizer, None), max_steps=2)
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer and optimizer.updates == 2
    session.close()


def test_as_a_callback_with_an_optimizer_class(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), learning_rate=2e-3, adam_beta2=0.95, use_cpu=True, report_to=[])
    found = optimizer_of(args, tier="half")
    assert found == (pare.optim.AdamW, {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "tier": "half"})
    callback = TrainerPlanCallback(PLAN)
    trainer = trainer_in(tmp_path, callbacks=[callback], max_steps=1, optimizer_cls_and_kwargs=optimizer_of(args, "lion"))
    assert callback.session is not None
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, pare.optim.Lion)
    assert "updates/flips" in trainer.state.log_history[0]


def test_weights_without_a_residue_and_a_small_learning_rate_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, rate, says in (("lpmm", 1e-5, True), ("half", 5e-5, True), ("lpmm", 6e-5, False), ("fine_tune", 1e-5, False)):
        caplog.clear()
        attach(trainer_in(tmp_path, learning_rate=rate), pare.Plan.preset(name)).close()
        assert ("preset('fine_tune')" in caplog.text and f"learning_rate={rate:g} is small" in caplog.text) == says, (name, rate)


def test_muon_updates_hidden_matrices_and_resumes(tmp_path: Path) -> None:
    """Embeddings, the head that is tied to them, biases and norms by AdamW; a resumed run ends with the bits of an unbroken one."""
    ends: list[dict[str, Tensor]] = []
    for resumes in (False, True):
        trainer = trainer_in(tmp_path, save_strategy="steps", save_steps=2)
        callback = attach(trainer, pare.Plan.preset("half"), optimizer="muon")
        assert "paredown.optim.Muon replaces" in callback.optimizer
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumes else None)
        ends.append(state(trainer.model))
        groups = trainer.optimizer.optimizer.param_groups
        named = {id(p): name for name, p in trainer.model.named_parameters()}
        hidden = [named[id(p)] for group in groups if group["rule"] == "muon" for p in group["params"]]
        assert hidden == [
            f"transformer.h.{i}.{part}.weight"
            for i in range(2)
            for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        ]
        assert sum(len(group["params"]) for group in groups) == len(named)
    assert_equal(ends[1], ends[0])


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    late = trainer_in(tmp_path)
    late.add_callback(TrainerPlanCallback(PLAN))
    with pytest.raises(ApplyError, match=r"runs too late.*attach\(trainer, plan\)"):
        late.train()
    with pytest.raises(ApplyError, match="takes a Plan, not str"):
        attach(late, "lpmm")  # type: ignore[arg-type]
    with pytest.raises(ApplyError, match=r"takes a transformers.Trainer and a Plan, not GPT2LMHeadModel and Plan.*paredown.apply"):
        attach(late.model, PLAN)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ApplyError, match="model_init makes a new model"):
        attach(transformers.Trainer(model_init=tiny, args=args), PLAN)
    with pytest.raises(OptimError, match=r"'adam' is unknown\. Allowed: adamw, lion, sgd"):
        optimizer_of(args, "adam")
    with pytest.raises(OptimError, match="microbatches=4 cannot run in a Trainer: gradient_accumulation_steps"):
        optimizer_of(args, microbatches=4)
    with pytest.raises(ApplyError, match="Leave the option False"):
        attach(trainer_in(tmp_path, restore_callback_states_from_checkpoint=True), PLAN)


def test_evaluation_and_the_best_model_under_autocast(tmp_path: Path) -> None:
    """The last step is ruinous, so that the best checkpoint is an earlier one: it comes back as it was saved."""
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_in(tmp_path, eval_dataset=data()[:8], max_steps=2, bf16=True, lr_scheduler_type="constant", **best)
    attach(trainer, PLAN)

    class Ruin(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **rest: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 if state.global_step == 0 else 1.0

    trainer.add_callback(Ruin)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-1")
    assert_equal(state(trainer.model), state(read))


def test_a_smaller_batch_is_found_and_the_error_is_explained(tmp_path: Path) -> None:
    """Trainer lowers the batch when memory runs out: a second optimizer is made under the same session."""

    class Short(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Tensor:
            if len(inputs["input_ids"]) > self.room:
                model(**inputs)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(model, inputs, *rest, **more)

    args = {"max_steps": 2, "per_device_train_batch_size": 8, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    for finds in (True, False):
        folder = transformers.TrainingArguments(str(tmp_path), auto_find_batch_size=finds, save_strategy="no", **args)
        trainer = Short(model=tiny(), args=folder, train_dataset=data())
        trainer.room = 4
        callback = attach(trainer, PLAN)
        if finds:
            trainer.train()
            assert trainer.state.train_batch_size <= 4 and trainer.state.global_step == 2
            continue
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer.train()
        assert "grew most" in caught.value.__notes__[0]
        callback.close()
        assert all(p.untyped_storage().nbytes() for p in trainer.model.parameters())


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1, "bf16": True}], ids=["defaults", "smoothed bf16"])
def test_verify_checks_the_first_batch_and_changes_no_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = trainer_in(tmp_path / "a", **options)
    attach(plain, PLAN)
    plain.train()
    checked, calls = trainer_in(tmp_path / "b", **options), list[int]()
    inner = checked.compute_loss
    checked.compute_loss = lambda *args, **named: (calls.append(1), inner(*args, **named))[1]
    attach(checked, PLAN, verify=True)
    checked.train()
    assert_equal(state(checked.model), state(plain.model))
    assert len(calls) == 4 + 4, "baseline twice, exact plan, plan; then four steps"
    assert "training_step" not in vars(checked)
    stored = [[row["memory/activation_gib"] for row in of.state.log_history if "loss" in row] for of in (plain, checked)]
    assert stored[0] == stored[1], "what verify stored is no part of the run"


def test_verify_ends_a_training_whose_gradients_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredValues, "_unpacked", lambda self: torch.zeros(self.numel, dtype=self.dtype))
    trainer = trainer_in(tmp_path)
    pared = attach(trainer, PLAN, verify=True)
    before = state(trainer.model)
    with pytest.raises(VerificationError, match="off under the exact plan"):
        trainer.train()
    assert not pared.is_open
    assert_equal(state(trainer.model), before)


def test_attach_takes_a_trainer_and_a_plan_in_this_order(tmp_path: Path) -> None:
    model, plan = torch.nn.Linear(2, 2), pare.Plan.preset("lpmm")
    with pytest.raises(
        ApplyError, match=r"attach takes a transformers.Trainer and a Plan, not Linear and Plan: .*apply\(plan, model\)"
    ):
        attach(model, plan)
    with pytest.raises(ApplyError, match="attach takes the trainer first, then the plan"):
        attach(plan, trainer_in(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_over_a_frozen_base_in_4_bits(checkpointing: bool, tmp_path: Path) -> None:
    """The adapters are those of an unmodified Trainer over a base with the rounded values, with the trainer's own optimizer."""
    options: dict[str, Any] = {"optim": "adamw_torch", "gradient_checkpointing": checkpointing}
    plain = tiny()
    add_lora(plain, 4)
    model = copy.deepcopy(plain)
    for p in {p for p in plain.parameters() if not p.requires_grad and p.ndim > 1}:
        p.data.copy_(pare.round_trip(p.detach(), "nf4/64@bf16"))
    trainer_in(tmp_path / "a", plain, **options).train()
    pared = trainer_in(tmp_path / "b", model, **options)
    callback = attach(pared, pare.Plan.preset("frozen4"))
    pared.train()
    assert type(pared.optimizer.optimizer) is torch.optim.AdamW
    assert not [row for row in callback.session.changes if "fewer than" not in row.slot]
    assert_equal(state(model), state(plain))


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["the model's loss", "the trainer's loss"])
def test_a_plan_within_a_budget_has_the_batch_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """Of the examples the longest, in a batch of the trainer's size; a loss of the trainer's own is traced as the model's."""
    trainer = trainer_in(tmp_path, max_steps=1, **options)
    trainer.train_dataset = [{name: row[name][: 8 + i] for name in row} for i, row in enumerate(data())]  # 8 to 39 tokens
    trainer.data_collator = transformers.DataCollatorForSeq2Seq(padded(), padding=True)
    batch = trainer.data_collator(trainer.train_dataset[-4:])
    trace = pare.trace_step(tiny().train(), dict(batch), optimizer="adamw", device="cpu")
    callback = attach(trainer, budget="60%")
    assert callback.plan.made_for["batch"] == list(trace.batch) and "input_ids: (4, 39) int64" in trace.batch
    assert pare.footprint(trace, callback.plan).fits("60%")
    assert "runs as paredown.optim.AdamW" in callback.optimizer
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_plan_within_a_budget_may_use_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`assign` decides what is stored there, and refuses a host budget on a CPU."""
    trainer, given = trainer_in(tmp_path, max_steps=1), list[Any]()
    with pytest.raises(ApplyError, match="host_budget is for the plan of a budget"):
        attach(trainer, pare.Plan(), host_budget="1GiB")
    with pytest.raises(PlanError, match="host_budget is for eager steps on a GPU"):
        attach(trainer, budget="60%", host_budget="1GiB")
    plan = pare.Plan.preset("activations8").offloading("transformer.h.0*")
    monkeypatch.setattr(trainer_step, "assign", lambda *_, **options: given.append(options["host_budget"]) or plan)
    callback = attach(trainer, budget="60%", host_budget="1GiB")
    assert given == ["1GiB"] and callback.plan.offload == plan.offload
    callback.close()


def padded() -> Any:
    """A tokenizer that only pads."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")


def test_a_chunked_loss_is_part_of_the_plan_within_a_budget(tmp_path: Path) -> None:
    """All logits of 16 Ki classes do not fit; in chunks they do."""
    config = transformers.GPT2Config(vocab_size=16384, n_positions=64, n_embd=16, n_layer=1, n_head=2, use_cache=False)
    whole, chunked = (trainer_in(tmp_path, transformers.GPT2LMHeadModel(config), per_device_train_batch_size=16) for _ in range(2))
    with pytest.raises(BudgetError, match=r"no plan .* fits 96.00 MiB"):
        attach(whole, budget="96MiB", chunked_loss=False)
    attach(chunked, budget="96MiB").close()
