"""GPT-2 of Hugging Face, a tiny one: a model that this project did not write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paredown import Plan, apply
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


@pytest.mark.filterwarnings("ignore")
def test_gpt2_checkpointed() -> None:
    plain = run(None, checkpointed=True)[0]
    assert_same(run(Plan.uniform(activation="fp32"), checkpointed=True)[0], plain)
    found, nbytes, _ = run(activations(INT8), checkpointed=True)
    assert relative_error(found, plain) < 0.03
    assert nbytes < run(activations(INT8))[1] / 2
