"""What users do after `train()` of a trainer under a plan: more training, evaluation, saving, another plan. The session stays open."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import paredown as pare
from paredown.errors import ApplyError, BudgetError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

from paredown.integrations.hugging_face import attach  # noqa: E402
from paredown.integrations.saving import decoded_on_cpu  # noqa: E402
from paredown.models.lora import add_lora  # noqa: E402
from tests.integrations.test_hugging_face import PLAN, assert_equal, data, state, tiny, trainer_in  # noqa: E402

FROZEN4 = pare.Plan.preset("frozen4")


def adapted(*, rounded: bool = False) -> Any:
    """A model with adapters over a frozen base; `rounded`: the base has the values that nf4 stores, by `round_trip`."""
    model = tiny()
    add_lora(model, 4)
    for p in {p for p in model.parameters() if rounded and not p.requires_grad and p.ndim > 1}:
        p.data.copy_(pare.round_trip(p.detach(), "nf4/64@bf16"))
    return model


def plain_bytes(model: Any) -> int:
    """Bytes of the memory of frozen weights that are not packed."""
    return sum(p.untyped_storage().nbytes() for p in model.parameters() if p.numel() >= 4096 and not p.requires_grad)


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_train_evaluate_save_and_train_again_over_a_base_that_stays_packed(options: dict[str, Any], tmp_path: Path) -> None:
    """The same calls of an unmodified trainer over the rounded base have the same losses and the same adapters."""
    ends: list[Any] = []
    for is_pared in (False, True):
        trainer = trainer_in(
            tmp_path, adapted(rounded=not is_pared), eval_dataset=data()[:8], max_steps=2, optim="adamw_torch", **options
        )
        pared = attach(trainer, FROZEN4) if is_pared else None
        found: list[Any] = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            found += [losses(trainer), trainer.evaluate()["eval_loss"], trainer.predict(data()[:4]).predictions.tolist()]
            assert pared is None or (pared.is_open and plain_bytes(trainer.model) == 0), "nothing was decoded for good"
        trainer.save_model(str(tmp_path / f"saved{is_pared}"))
        ends.append((found, state(trainer.model), torch_file(tmp_path / f"saved{is_pared}")))
        if pared is not None:
            assert plain_bytes(trainer.model) == 0
            pared.close()
            assert plain_bytes(trainer.model) > 0 and "save_pretrained" not in vars(trainer.model)
            assert trainer.evaluate()["eval_loss"] == found[-2], "the closed session leaves the same values"
    assert ends[0][0] == ends[1][0]
    assert_equal(ends[1][1], ends[0][1])
    assert_equal(ends[1][2], ends[0][2])


def torch_file(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_second_training_continues_the_optimizer_and_the_random_bits(tmp_path: Path) -> None:
    """Two trainings of two steps at a constant learning rate are four steps of a loop on the same batches."""
    plan = PLAN.set("activation", "int4/64@bf16", rounding="stochastic")
    trainer = trainer_in(tmp_path, without_dropout(tiny()), lr_scheduler_type="constant", max_steps=2)
    pared = attach(trainer, plan)
    batches: list[dict[str, torch.Tensor]] = []
    trainer.model.register_forward_pre_hook(lambda model, args, named: batches.append(dict(named)), with_kwargs=True)
    trainer.train()
    trainer.train()
    session = pared.session
    assert session is not None and (session.forwards, trainer.optimizer.optimizer.updates) == (4, 4)

    loop = without_dropout(tiny()).train()
    pare.apply(plan, loop)
    decayed = trainer.get_decay_parameter_names(loop)  # the trainer has them in a group of their own, and so another order
    groups = [[p for name, p in loop.named_parameters() if (name in decayed) == is_decayed] for is_decayed in (True, False)]
    optimizer = pare.optim.AdamW(
        [{"params": group, "weight_decay": 0.0} for group in groups], lr=1e-3, betas=(0.9, 0.999), eps=1e-8
    )
    for inputs in batches:
        loop(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(loop.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(state(trainer.model), state(loop))


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_a_second_attach_goes_on_with_the_same_plan(tmp_path: Path) -> None:
    """Of the same trainer, and of another one for the same model: the base is not decoded, and the optimizer is kept."""
    trainer = trainer_in(tmp_path, adapted(), max_steps=1)
    first = attach(trainer, FROZEN4)
    trainer.train()
    second = attach(trainer, FROZEN4)
    assert second.session is first.session and not first.is_open and second.is_open
    trainer.train()
    other = trainer_in(tmp_path, trainer.model, max_steps=1)
    third = attach(other, pare.Plan.preset("frozen4"))
    other.train()
    assert third.session is first.session and third.session is not None and third.session.forwards == 3
    assert plain_bytes(trainer.model) == 0
    third.close()
    assert plain_bytes(trainer.model) > 0


def test_no_training_goes_on_without_the_plan_after_its_session_was_closed_elsewhere(tmp_path: Path) -> None:
    """By an attach that then found no plan, and by the callback of another trainer of the model."""
    trainer = trainer_in(tmp_path, max_steps=1)
    attach(trainer, budget="90%")
    with pytest.raises(BudgetError):
        attach(trainer, budget="1%")
    with pytest.raises(ApplyError, match="no open session"):
        trainer.train()
    attach(trainer, PLAN)
    other = trainer_in(tmp_path, trainer.model, max_steps=1)
    attach(other, PLAN).close()
    with pytest.raises(ApplyError, match="no open session"):
        trainer.train()


@pytest.mark.parametrize("closes", [False, True])
def test_a_second_attach_of_another_plan(closes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_in(tmp_path, max_steps=1)
    first = attach(trainer, PLAN)
    trainer.train()
    before = state(trainer.model)
    if closes:
        first.close()
        with pytest.raises(ApplyError, match=r"no open session: close\(\) was called"):
            trainer.train()
    second = attach(trainer, pare.Plan.preset("fine_tune"))
    assert "AdamW of the earlier plan is dropped with its state" in caplog.text and not first.is_open
    wanted = {name: value if value.numel() < 4096 else value.bfloat16().float() for name, value in before.items()}
    assert_equal(state(trainer.model), wanted)
    trainer.train()
    assert second.is_open and trainer.optimizer.optimizer.updates == 1
    assert len([row for row in trainer.callback_handler.callbacks if row is first or row is second]) == 1
    third = attach(trainer, budget="95%")
    trainer.train()
    third.close()


def test_the_best_model_of_adapters_comes_back_over_a_packed_base(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_in(tmp_path, adapted(), eval_dataset=data()[:8], max_steps=2, lr_scheduler_type="constant", **best)
    pared = attach(trainer, FROZEN4)

    class Ruin(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **rest: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 if state.global_step == 0 else 10.0

    trainer.add_callback(Ruin)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1") and plain_bytes(trainer.model) == 0
    saved = torch_file(tmp_path / "checkpoint-1")
    assert_equal({name: value for name, value in state(trainer.model).items() if name in saved}, saved)
    pared.close()


def test_state_dicts_on_the_cpu_are_those_of_the_model_and_tied_weights_one_tensor() -> None:
    model = tiny()
    with pare.apply(pare.Plan.preset("lpmm"), model):
        wanted = state(model)
        with decoded_on_cpu(model):
            found = model.state_dict()
        assert_equal(dict(found), wanted)
        assert found["lm_head.weight"] is found["transformer.wte.weight"]
        assert {value.device.type for value in found.values()} == {"cpu"}
    assert not [module for module in model.modules() if module._state_dict_hooks]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_of_the_model_saves_itself(copied: Any, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_steps=1)
    pared = attach(trainer, PLAN)
    made = copied(trainer.model)
    trainer.train()
    made.save_pretrained(tmp_path / "copy")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "copy")
    assert_equal(state(read), state(made))
    assert not torch.equal(read.transformer.wte.weight, state(trainer.model)["transformer.wte.weight"])
    pared.close()


@pytest.mark.gpu
def test_saving_decodes_one_module_at_a_time_on_the_gpu(tmp_path: Path) -> None:
    """The peak while a model is saved, and while it trains and ends, has less than a quarter of its decoded weights more."""
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=1024, n_layer=8, n_head=8, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    add_lora(model, 4)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    trainer = trainer_in(tmp_path, model, use_cpu=False, max_steps=1, per_device_train_batch_size=1)
    pared = attach(trainer, FROZEN4)
    trainer.train()
    pared.session.summary()
    stored = torch.cuda.memory_allocated()
    assert stored < whole / 2
    torch.cuda.reset_peak_memory_stats()
    trainer.save_model(str(tmp_path / "saved"))
    assert torch.cuda.max_memory_allocated() - stored < whole / 4
    pared.close()
