"""GPT-2 of Hugging Face, a tiny one: a model that this project did not write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paredown import Plan, apply, trace_step
from paredown.plan.explanation import explain_slots
from tests.session.nets import INT8, activations, assert_same, gradients, relative_error

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=200, n_positions=128, n_embd=64, n_layer=2, n_head=4, **options)
    return transformers.GPT2LMHeadModel(config).train()


def run(plan: Plan | None, *, checkpointed: bool = False, **options: Any) -> tuple[list[Tensor], int, Any]:
    model = tiny(**options)
    if checkpointed:
        model.gradient_checkpointing_enable()
    session = apply(plan, model) if plan is not None else None
    ids = torch.randint(200, (4, 128), generator=torch.Generator().manual_seed(1))
    labels = torch.where(ids < 20, -100, ids)
    torch.manual_seed(2)
    output = model(input_ids=ids, labels=labels, output_hidden_states=True)
    nbytes = session.stored_bytes if session is not None else 0
    output.loss.backward()
    return gradients(model), nbytes, session


@pytest.mark.filterwarnings("ignore")  # its own
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2(attention: str) -> None:
    plain = run(None, attn_implementation=attention)[0]
    assert_same(run(Plan.uniform(activation="fp32"), attn_implementation=attention)[0], plain)
    found, nbytes, session = run(activations(INT8), attn_implementation=attention)
    assert relative_error(found, plain) < 0.03
    assert nbytes > 0
    assert session.stored_bytes == 0


def tiny_llama(reentrant: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, max_position_embeddings=64, **sizes)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
def test_llama_with_packed_checkpoint_inputs(reentrant: bool) -> None:
    """The inputs of the two layers, in 8 bits; the trace of the step has the same slots."""
    ids = torch.randint(100, (4, 32), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    model, plan = tiny_llama(reentrant), Plan.uniform(activation=None).set("*:checkpoint.input", INT8)
    model(**batch).loss.backward()
    plain = gradients(model)
    model.zero_grad()
    with apply(plan, model) as session:
        loss = model(**batch).loss
        assert session.stored_bytes == 2 * (4 * 32 * 64 + 2 * 4 * 32)
        loss.backward()
        assert not session.changes
    assert 0 < relative_error(gradients(model), plain) < 0.01
    rows = explain_slots(trace_step(tiny_llama(reentrant), batch, device="cpu"), plan)
    names = [f"model.layers.{i}:checkpoint.input" for i in range(2)]
    assert [(row.slot, row.nbytes, row.format) for row in rows if "checkpoint" in row.slot] == [(n, 8448, INT8) for n in names]


@pytest.mark.filterwarnings("ignore")
def test_gpt2_checkpointed() -> None:
    plain = run(None, checkpointed=True)[0]
    assert_same(run(Plan.uniform(activation="fp32"), checkpointed=True)[0], plain)
    found, nbytes, _ = run(activations(INT8), checkpointed=True)
    assert relative_error(found, plain) < 0.03
    assert nbytes < run(activations(INT8))[1] / 2
