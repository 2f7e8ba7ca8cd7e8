"""TRL's trainers and PEFT's adapters under plans: SFT, DPO and the loss step of GRPO, on a two-layer Llama of random weights.

One file, since importing TRL takes seconds. Nothing is downloaded: the tokenizer is made from 64 words.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paredown as pare
from paredown.errors import ApplyError, BudgetError, OptimError
from tests.support.memory import peak_bytes, saved_bytes

trl = pytest.importorskip("trl", reason="trl is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed, which TRL needs")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

from paredown.integrations.hugging_face import attach  # noqa: E402
from tests.integrations.test_hugging_face import assert_equal, state  # noqa: E402

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
NF4 = "nf4/64@bf16"
ADAPTERS = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
TRAINERS = ("sft", "dpo", "grpo")
SFT_QUICKLY = ("sft", *(pytest.param(kind, marks=pytest.mark.full) for kind in TRAINERS[1:]))


@pytest.fixture(autouse=True)
def quiet() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **more, **changes}))


def texts(count: int, length: int) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    return [" ".join(WORDS[3 + int(i)] for i in torch.randint(61, (length,), generator=generator)) for _ in range(count)]


def distinct_words(completions: list[str], **rest: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def trainer_in(folder: Path, kind: str = "sft", model: Any = None, lora: dict[str, Any] | None = ADAPTERS, **options: Any) -> Any:
    """A trainer with two steps, of two batches each, and activation checkpointing, which is TRL's default."""
    model = model if model is not None else tiny()
    defaults = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    defaults |= {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    arguments = {"args": {**defaults, **options}, "rows": texts(32, 20)}
    own = {"model": model, "processing_class": tokenizer(), "peft_config": peft.LoraConfig(**lora) if lora else None}
    return {"sft": _sft, "dpo": _dpo, "grpo": _grpo}[kind](str(folder), own, **arguments)


def _sft(folder: str, own: dict[str, Any], args: dict[str, Any], rows: list[str]) -> Any:
    return trl.SFTTrainer(args=trl.SFTConfig(folder, **args), train_dataset=datasets.Dataset.from_dict({"text": rows}), **own)


def _dpo(folder: str, own: dict[str, Any], args: dict[str, Any], rows: list[str]) -> Any:
    spaced = [f" {row}" for row in rows]
    pairs = datasets.Dataset.from_dict({"prompt": rows[:16], "chosen": spaced[16:], "rejected": spaced[:16][::-1]})
    reference = {} if own["peft_config"] or hasattr(own["model"], "peft_config") else {"ref_model": copy.deepcopy(own["model"])}
    return trl.DPOTrainer(args=trl.DPOConfig(folder, **args), train_dataset=pairs, **own, **reference)


def _grpo(folder: str, own: dict[str, Any], args: dict[str, Any], rows: list[str]) -> Any:
    prompts = datasets.Dataset.from_dict({"prompt": rows[:16]})
    settings = trl.GRPOConfig(folder, num_generations=2, max_completion_length=8, **args)
    return trl.GRPOTrainer(args=settings, reward_funcs=distinct_words, train_dataset=prompts, **own)


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"bf16": True},  # autocast; over a bf16 base PEFT's adapters are float32
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "packing": {"packing": True, "max_length": 32},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, "defaults") for kind in TRAINERS), *(pytest.param("sft", name, marks=pytest.mark.full) for name in [*OPTIONS][1:])],
)
def test_adapters_over_a_base_in_4_bits_are_those_over_its_rounded_values(kind: str, options: str, tmp_path: Path) -> None:
    """Bit for bit, with activation checkpointing and gradient accumulation; an unmodified trainer has the rounded base."""
    base = tiny().to(torch.bfloat16 if options == "bf16" else torch.float32)
    rounded, more = copy.deepcopy(base), OPTIONS[options]
    for p in rounded.parameters():
        if p.numel() >= 4096:
            p.data.copy_(pare.round_trip(p.detach(), NF4))
    plain = trainer_in(tmp_path / "a", kind, rounded, **more)
    plain.train()
    pared = trainer_in(tmp_path / "b", kind, base, **more)
    callback = attach(pared, pare.Plan.preset("frozen4"))
    callback.prints_summary = False
    packed = [p for name, p in pared.model.named_parameters() if "lora" not in name and p.numel() >= 4096]
    assert len(packed) == 2 * 5 + 2 and not any(p.untyped_storage().nbytes() for p in packed)
    pared.train()
    assert_equal(state(pared.model), state(plain.model))
    assert losses(pared) == losses(plain) and len(losses(plain)) == 2
    assert type(pared.optimizer.optimizer) is type(plain.optimizer.optimizer)
    assert not [row for row in callback.session.changes if "fewer than" not in row.slot]


@pytest.mark.parametrize("kind", SFT_QUICKLY)
def test_activations_in_8_bits_change_no_loss_of_the_first_step_and_little_after(kind: str, tmp_path: Path) -> None:
    """Forward passes are exact; the adapters of two steps differ by the error of their gradients."""
    plain = trainer_in(tmp_path / "a", kind)
    before = state(plain.model)
    plain.train()
    pared = trainer_in(tmp_path / "b", kind)
    callback = attach(pared, pare.Plan.preset("activations8"))
    callback.prints_summary = False
    pared.train()
    assert losses(pared)[0] == losses(plain)[0]
    assert losses(pared)[1] == pytest.approx(losses(plain)[1], abs=1e-3)
    assert max(row.get("memory/activation_gib", 0.0) for row in pared.state.log_history) > 0
    moved = {name: (after - before[name]).norm() for name, after in plain.model.state_dict().items() if "lora_B" in name}
    assert len(moved) == 14 and all(size > 0 for size in moved.values())
    off = {name: (pared.model.state_dict()[name] - plain.model.state_dict()[name]).norm() for name in moved}
    assert all(off[name] < 0.25 * moved[name] for name in moved), {name: off[name] / moved[name] for name in moved}


@pytest.mark.parametrize("kind", SFT_QUICKLY)
@pytest.mark.parametrize("preset", ["lpmm", pytest.param("fine_tune", marks=pytest.mark.full)])
def test_all_parameters_train_under_packed_state(kind: str, preset: str, tmp_path: Path) -> None:
    """The head's packed weight is read by TRL's loss and not by its module: it gets its gradient."""
    trainer = trainer_in(tmp_path, kind, lora=None, optim="adamw_torch")
    callback = attach(trainer, pare.Plan.preset(preset))
    callback.prints_summary = False
    before = state(trainer.model)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, pare.optim.AdamW) and trainer.optimizer.optimizer.updates == 2
    after = trainer.model.state_dict()
    assert not [name for name in before if torch.equal(before[name], after[name])]
    callback.close()
    assert all(p.untyped_storage().nbytes() for p in trainer.model.parameters())


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.full)])
def test_a_resumed_fine_tuning_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    plan = (
        pare.Plan.preset("frozen4").set("activation", "int8/64@bf16").set("moment1", "int8/64@bf16").set("moment2", "uint8/64@bf16")
    )
    ends: list[Any] = []
    for resumes in (False, True):
        trainer = trainer_in(tmp_path, kind, save_strategy="steps", save_steps=1, max_steps=2)
        attach(trainer, plan).prints_summary = False
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1") if resumes else None)
        ends.append((state(trainer.model), losses(trainer)))
    assert_equal(ends[1][0], ends[0][0])
    assert ends[0][1] == ends[1][1]


def test_saved_adapters_are_plain_peft_adapters(tmp_path: Path) -> None:
    """During training, over a packed base, and after it; PEFT alone loads them on the base that was trained on."""
    trainer = trainer_in(tmp_path, save_strategy="steps", save_steps=2)
    callback = attach(trainer, pare.Plan.preset("frozen8"))
    callback.prints_summary = False
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    base = tiny()
    for p in base.parameters():
        if p.numel() >= 4096:
            p.data.copy_(pare.round_trip(p.detach(), "int8/64@bf16"))
    tokens = torch.arange(24).reshape(2, 12)
    trainer.model.eval()
    with torch.no_grad():
        wanted = trainer.model(input_ids=tokens).logits
        for folder in ("checkpoint-2", "end"):
            read = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / folder).eval()
            assert torch.equal(read(input_ids=tokens).logits, wanted), folder
            assert {type(p) for p in read.parameters()} == {torch.nn.Parameter}
    assert not torch.equal(wanted, base.eval()(input_ids=tokens).logits)


@pytest.mark.parametrize("loss_type", ["nll", "chunked_nll"])
def test_the_chunked_loss_of_trl_is_left_with_a_row(loss_type: str, tmp_path: Path) -> None:
    """TRL 1.16 computes both in tiles of logits, in a forward that does not call the head; before 1.15 there are all logits for "nll"."""
    plain = trainer_in(tmp_path / "a", model=tiny(vocab_size=8192), loss_type=loss_type, max_steps=1)
    plain.train()
    pared = trainer_in(tmp_path / "b", model=tiny(vocab_size=8192), loss_type=loss_type, max_steps=1)
    callback = attach(pared, pare.Plan(), chunked_loss=True)
    callback.prints_summary = False
    pared.train()
    assert_equal(state(pared.model), state(plain.model))
    (row,) = callback.session.changes
    assert row.slot == "base_model.model.lm_head" and row.given == "unmodified" and "forward is that of TRL" in row.reason


def tokens_of(num: int, length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(num * length).reshape(num, length) % 60
    return {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False, **more}


def test_traces_count_the_loss_of_trl(tmp_path: Path) -> None:
    """The bytes that autograd's hooks see in a real step, and no logits; the loss itself saves hidden states and three numbers a token."""
    model = trainer_in(tmp_path, model=tiny(vocab_size=9000), gradient_checkpointing=False).model
    batch = tokens_of(4, 20, fused_lm_head=True)
    trace = pare.trace_step(model, batch, optimizer="adamw", device="cpu")
    inputs = (value for value in batch.values() if isinstance(value, Tensor))
    real_bytes = saved_bytes(lambda: model(**batch).loss, (*model.parameters(), *model.buffers(), *inputs))
    num_tokens = 4 * 19  # scored: each row but its last token
    of_entropy = num_tokens  # a bool of each token, saved for the gradient of the entropy, which is freed with the output
    assert real_bytes == pare.footprint(trace).by_role[pare.Role.ACTIVATION] + of_entropy
    slots = {slot.name: slot.nbytes for slot in trace.slots if "ChunkedLogProb" in slot.name}
    assert sorted(slots.values()) == sorted([num_tokens * 64 * 4, num_tokens * 8, num_tokens * 4, num_tokens * 4])
    model(**batch).loss.backward()


@pytest.mark.parametrize("checkpoints", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_peak_of_a_step_is_the_predicted_one(checkpoints: bool, tmp_path: Path) -> None:
    """Of the loss in tiles, over a base in 4 bits, with packed activations: what torch's profiler measures, to within 1 %."""
    model = trainer_in(tmp_path, model=tiny(hidden_size=128, intermediate_size=512, vocab_size=9000)).model.train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    plan = pare.Plan.preset("frozen4").set("activation", "int8/64@bf16")
    batch = tokens_of(8, 60, fused_lm_head=True)
    predicted = pare.footprint(pare.trace_step(model, batch, device="cpu"), plan).peak_bytes
    with pare.apply(plan, model) as session:
        model(**batch).loss.backward()
        model.zero_grad()
        held = session.weight_bytes + sum(p.untyped_storage().nbytes() for p in model.parameters())
        measured = held + peak_bytes(lambda: model(**batch).loss.backward(), tmp_path)
    assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("autocast", [pytest.param(None, marks=pytest.mark.full), torch.bfloat16])
def test_on_cuda_the_loss_of_trl_takes_one_tile_of_logits(autocast: torch.dtype | None, tmp_path: Path) -> None:
    """Its kernels change a tile in place; the CPU's operations make float32 copies of it. Tiles have the dtype of autocast."""
    model = trainer_in(tmp_path, model=tiny(vocab_size=40_000), gradient_checkpointing=False).model
    trace = pare.trace_step(model, tokens_of(4, 20, fused_lm_head=True), device="cuda", autocast=autocast)
    tile = 4 * 19 * 32768 * (4 if autocast is None else 2)
    large = [output for output in trace.outputs if output.nbytes > tile // 4 and output.shape[0] == 4 * 19]
    assert [output.nbytes for output in large] == [tile, tile], "one in forward, one in backward"
    on_cpu = pare.trace_step(model, tokens_of(4, 20, fused_lm_head=True), device="cpu", autocast=autocast)
    assert pare.footprint(on_cpu).at_peak[pare.Role.TEMPORARY] > 2.5 * pare.footprint(trace).at_peak[pare.Role.TEMPORARY]
    from trl.kernels import chunked_logprob

    assert chunked_logprob._forward_tile.__module__ == chunked_logprob.__name__, "the trace has restored TRL's functions"


# --- budgets --------------------------------------------------------------------------------------------------------------------------


def sizes_of(kind: str) -> tuple[int, int]:
    """Rows and tokens of the longest batch: DPO has two rows for each pair, and GRPO adds the longest completion to a prompt."""
    return {"sft": (4, 21), "dpo": (8, 41), "grpo": (4, 28)}[kind]


def wide() -> Any:
    """A model whose weights take more memory than TRL's tile of logits."""
    return tiny(hidden_size=256, intermediate_size=1024)


@pytest.mark.parametrize("kind", SFT_QUICKLY)
def test_a_plan_is_made_for_the_trainers_own_step(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within the budget for a batch of the longest rows, with the activation checkpointing that the trainer enables later."""
    trainer = trainer_in(tmp_path, kind, wide(), max_steps=1)
    assert not trainer.model.is_gradient_checkpointing
    callback = attach(trainer, budget="90%")
    callback.prints_summary = False
    assert not trainer.model.is_gradient_checkpointing and callback.plan.rules and callback.plan.reason in caplog.text
    assert callback.plan.made_for["batch"][0] == f"input_ids: {sizes_of(kind)} int64"
    trainer.train()
    assert trainer.state.global_step == 1 and callback.is_open, "until close()"
    again = trainer_in(tmp_path, kind, wide()).model
    again.gradient_checkpointing_enable()
    trace = pare.trace_step(again.train(), tokens_of(*sizes_of(kind), fused_lm_head=True), optimizer="adamw", device="cpu")
    peaks = [pare.footprint(trace, plan).peak_bytes for plan in (None, callback.plan)]
    assert peaks[1] <= callback.plan.made_for["budget_bytes"] == peaks[0] * 90 // 100


def test_a_budget_that_no_plan_fits_names_the_nearest_that_one_does(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    with pytest.raises(
        BudgetError, match=r"no plan .* fits 1\.00 MiB.*the smallest needs .*checkpointing is that of the trainer"
    ) as caught:
        attach(trainer, budget="1MiB")
    nearest = caught.value.smallest_bytes
    assert nearest is not None and f"attach(trainer, budget={nearest})" in str(caught.value)
    with pytest.raises(BudgetError):
        attach(trainer, budget=nearest - 1)
    attach(trainer, budget=nearest).close()


def test_a_loss_that_cannot_run_up_to_the_model_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_in(tmp_path, model=wide())

    def compute_loss(model: Any, inputs: Any, **more: Any) -> Tensor:
        raise KeyError("teacher")

    trainer.compute_loss = compute_loss
    attach(trainer, budget="90%").close()
    assert any("since it raises KeyError before it calls the model: 'teacher'" in text for text in caplog.messages)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_out_of_memory_is_explained_with_the_loss_that_ran(is_chunked: bool, tmp_path: Path) -> None:
    model = tiny(vocab_size=9000)
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=1)
    rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(8)]
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    callback = attach(trainer, pare.Plan.preset("activations8"), chunked_loss=is_chunked)
    raise_in(model.model.layers[1], torch.OutOfMemoryError(MESSAGE))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    callback.close()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    trace = pare.trace_step(model, batch, optimizer="adamw", device="cpu", chunked_loss=is_chunked)
    peak = pare.footprint(trace, pare.Plan.preset("activations8")).peak_bytes
    assert f" of {pare.sizes.say_bytes(peak)} at the predicted peak" in caught.value.__notes__[0]


def test_at_small_learning_rates_trained_weights_keep_24_bits(tmp_path: Path) -> None:
    found = []
    for rate in (1e-5, 1e-3):
        trainer = trainer_in(tmp_path, lora=None, model=wide(), learning_rate=rate)
        callback = attach(trainer, budget="62%")
        plan = callback.plan
        callback.close()
        found.append({bool(plan.find((name,), pare.Role.RESIDUE).format) for name, p in trainer.model.named_parameters() if p.dim() > 1
                      if plan.find((name,), pare.Role.WEIGHT).format is not None})  # fmt: skip
        assert plan.made_for["method"] == ("fine_tune" if rate == 1e-5 else "role")
    assert found[0] == {True}


def test_the_weights_of_a_reference_model_are_part_of_the_budget(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, "dpo", lora=None)
    held = sum(p.numel() * p.element_size() for p in trainer.ref_model.parameters())
    with pytest.raises(BudgetError, match=r"the reference model of DPOTrainer takes .* of a budget of .*train adapters"):
        attach(trainer, budget=held)
    with pytest.raises(BudgetError, match=r"for the weights of the reference model included"):
        attach(trainer, budget=held + 2**20)


def test_arguments_of_attach_that_contradict(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, optim="adafactor")
    for arguments in ({}, {"plan": pare.Plan(), "budget": "1GiB"}):
        with pytest.raises(ApplyError, match="attach takes a plan or a budget"):
            attach(trainer, **arguments)
    with pytest.raises(OptimError, match=r"a plan within a budget needs an optimizer whose state is known.*'adafactor'"):
        attach(trainer, budget="1GiB")
    with pytest.raises(ApplyError, match=r"returns a list, not a mapping of tensors.*batch="):
        attach(trainer, budget="1GiB", batch=[1], optimizer="adamw")
    callback = attach(trainer, budget="1GiB", batch=tokens_of(2, 16), optimizer="adamw")
    assert callback.plan.made_for["batch"][0] == "input_ids: (2, 16) int64"
    callback.close()


# --- out of memory --------------------------------------------------------------------------------------------------------------------

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.20 GiB is free. Of the allocated "
    "memory 19.00 GiB is allocated by PyTorch, and 3.10 GiB is reserved by PyTorch but unallocated."
)


def raise_in(layer: torch.nn.Module, error: BaseException) -> None:
    def fail(module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # not while GRPO generates
            handle.remove()
            raise error

    handle = layer.register_forward_hook(fail)


@pytest.mark.parametrize("kind", SFT_QUICKLY)
def test_out_of_memory_in_train_is_explained_without_a_context(kind: str, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, kind, wide())
    callback = attach(trainer, pare.Plan.preset("activations8"))
    raise_in(trainer.model.base_model.model.model.layers[1], torch.OutOfMemoryError(MESSAGE))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    about, advice = caught.value.__notes__
    assert about.startswith("paredown: temporary grew most, to ") and "The next plan down is 'frozen" in about
    assert "\nAt the peak: temporary " in about and "weight " in about
    assert (
        advice.startswith("paredown: 3.10 GiB of 24.00 GiB is reserved by torch and not allocated")
        and "expandable_segments" in advice
    )
    callback.close()
    assert all(p.untyped_storage().nbytes() for p in trainer.model.parameters())
