"""Traces of steps with activation checkpointing: the recomputation runs the operations and dtypes of the forward pass, and the bytes
that forward leaves for backward are those of a real step on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role

WIDTH, NUM = 32, 256
BATCH = (torch.ones(NUM, WIDTH), torch.zeros(NUM, dtype=torch.long))
RNG_STATE_BYTES = 5056  # of the CPU, which every checkpoint stores
INSIDE = ("gelu", "native_dropout")  # operations of checkpointed blocks alone
DTYPES = [None, torch.bfloat16]
Call = Callable[[nn.Sequential, Tensor], Tensor]


def each(**options: Any) -> Call:
    """Every block in a checkpoint of its own."""

    def call(blocks: nn.Sequential, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, **options)
        return x

    return call


def nested(blocks: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint(lambda x: each(use_reentrant=False)(blocks, x), x, use_reentrant=False)


def to_the_end(blocks: nn.Sequential, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return each(use_reentrant=False)(blocks, x)


def own_autocast(blocks: nn.Sequential, x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return blocks(x)

    return checkpoint(run, x, use_reentrant=False)


def selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


MODES: dict[str, Call] = {
    "reentrant": each(use_reentrant=True),
    "non_reentrant": each(use_reentrant=False),
    "without_rng_state": each(use_reentrant=False, preserve_rng_state=False),
    "without_check": each(use_reentrant=False, determinism_check="none"),
    "selective": each(use_reentrant=False, context_fn=selective),
    "no_early_stop": to_the_end,
    "nested": nested,
    "sequential": lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=False),
    "sequential_reentrant": lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=True),
    "own_autocast": own_autocast,
}
# recomputations for each two runs of an operation: the outer checkpoint of `nested` stops early, before its second block;
# the last segment of `sequential` has no checkpoint
RECOMPUTED = {"nested": 3, "sequential": 1, "sequential_reentrant": 1}


class Network(nn.Module):
    """Two blocks that `call` runs, between two layers without a checkpoint."""

    def __init__(self, call: Call, p: float = 0.1) -> None:
        super().__init__()
        self.call = call
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        wide = 4 * WIDTH
        blocks = [nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(p), nn.Linear(wide, WIDTH)) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.blocks, self.first(x)))


def operations(trace: Trace, names: tuple[str, ...], *, in_backward: bool) -> Counter[Any]:
    """(operation, shape, dtype) of what the named operations allocated in forward, or in backward."""
    outputs = [o for o in trace.outputs if o.op in names and (o.phase == "backward") == in_backward]
    return Counter((o.op, o.shape, o.dtype) for o in outputs)


def stored_bytes(trace: Trace) -> int:
    """Bytes of saved and held tensors and of casts of weights, each storage once."""
    slots = [slot for slot in trace.slots if slot.role in (Role.ACTIVATION, Role.TEMPORARY)]
    return sum({(slot.storage if slot.storage != -1 else slot.name): slot.nbytes for slot in slots}.values())


def real_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that a real forward pass on the CPU leaves allocated for backward."""
    forward()  # the first pass allocates what later ones reuse
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        value = forward()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sum(event.nbytes() for event in events if event.name() == "[memory]") - value.untyped_storage().nbytes()


@pytest.mark.parametrize("autocast", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", MODES)
def test_the_recomputation_runs_the_operations_and_dtypes_of_forward(mode: str, device: str, autocast: torch.dtype | None) -> None:
    trace = trace_step(Network(MODES[mode]), BATCH, loss=cross_entropy, device=device, autocast=autocast)
    forward = operations(trace, INSIDE, in_backward=False)
    expected = Counter({key: count // 2 * RECOMPUTED.get(mode, 2) for key, count in forward.items()})
    assert operations(trace, INSIDE, in_backward=True) == expected
    dtype = torch.bfloat16 if mode == "own_autocast" else autocast or torch.float32
    made = {name for op, _, name in forward if op == "gelu"}
    assert made == {str(dtype).removeprefix("torch.")}
    assert (device == "cuda") == any(op == "native_dropout" for op, _, _ in forward)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
def test_stored_bytes_are_those_of_a_real_step(reentrant: bool, autocast: torch.dtype | None) -> None:
    model = Network(each(use_reentrant=reentrant), p=0.0)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return cross_entropy(model(BATCH[0]), BATCH[1])

    real = real_bytes(forward) - 2 * RNG_STATE_BYTES
    for device in ("cpu", "cuda"):
        trace = trace_step(model, BATCH, loss=cross_entropy, device=device, autocast=autocast)
        assert stored_bytes(trace) == pytest.approx(real, rel=0.03)


def test_casts_of_weights_are_freed_after_each_recomputation() -> None:
    model = Network(each(use_reentrant=False))
    trace = trace_step(model, BATCH, loss=cross_entropy, device="cuda", autocast=torch.bfloat16)
    shapes = {(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)}
    casts = [
        o for o in trace.outputs if o.op == "_to_copy" and o.phase == "backward" and o.dtype == "bfloat16" and o.shape in shapes
    ]
    assert len(casts) == 4
    blocks = sorted(casts, key=lambda o: o.birth)
    assert max(o.death for o in blocks[:2]) < min(o.birth for o in blocks[2:])


def test_torch_is_left_unchanged() -> None:
    kind, state = torch.autocast, torch.utils.checkpoint._get_autocast_kwargs
    before = kind.__init__, kind.__exit__, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    trace_step(Network(MODES["non_reentrant"]), BATCH, loss=cross_entropy, device="cuda", autocast=torch.bfloat16)
    assert (kind.__init__, kind.__exit__, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == before
    assert torch.utils.checkpoint._get_autocast_kwargs is state
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


# --- Hugging Face ----------------------------------------------------------------------------------------------------------------

IDS = torch.zeros(2, 64, dtype=torch.long)


def language_model(kind: str, **options: Any) -> nn.Module:
    """A small Llama or GPT-2 with gradient checkpointing."""
    transformers = pytest.importorskip("transformers")
    shared = {"vocab_size": 64, "attn_implementation": "sdpa", "bos_token_id": None, "eos_token_id": None, "use_cache": False}
    if kind == "llama":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, **shared))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **shared))
    model.gradient_checkpointing_enable(**options)
    return model.train()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_hugging_face_trace_with_their_switch(kind: str, reentrant: bool, autocast: torch.dtype | None) -> None:
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model = language_model(kind, **options)
    batch = {"input_ids": IDS, "labels": IDS}

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return model(**batch).loss

    real = real_bytes(forward) - 2 * RNG_STATE_BYTES
    names = ("silu",) if kind == "llama" else ("tanh",)
    for device in ("cpu", "cuda"):
        trace = trace_step(model, batch, device=device, autocast=autocast)
        forward_ops = operations(trace, names, in_backward=False)
        assert forward_ops and operations(trace, names, in_backward=True) == forward_ops
        assert stored_bytes(trace) == pytest.approx(real, rel=0.1 if device == "cpu" else 0.25)  # dropout masks: bytes on CUDA
