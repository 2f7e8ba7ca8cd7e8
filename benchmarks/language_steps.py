"""The training steps of bench_language.py: models from configs with random weights, and the ways to run them, ours and the peers'.

`lora`: a Llama of 8B parameters in bfloat16, 1 x 4096 tokens, with adapters of rank 16 by PEFT, in bfloat16, on all linear layers but the
output head, and with checkpointing by gradient_checkpointing_enable(). `lora-32k`, `lora-110k` and `lora-150k`: the same model and more
tokens, checkpointed by the plan, with its layers in tiles and the inputs of layers in host memory; the longer two within 24 GiB. `full`: a
Llama of 1.2B parameters in bfloat16, all of them trained, 4 x 2048 tokens, the same checkpointing. `gpt2`: GPT-2 with 124M parameters under
bf16 autocast, 16 x 1024 tokens, without checkpointing.

Peers replace the loss by Liger's fused linear cross entropy (`-all`: the norms, the rotary embedding and SwiGLU by Liger's kernels, too).
QLoRA is bitsandbytes' nf4 in blocks of 64 for all linear layers but the output head, which is bfloat16, as is the embedding. On a CPU,
where Liger's kernels do not run, peers have the unmodified loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_session import gpt2, texts
from torch import Tensor, nn

import paredown as pare
from paredown.optim import AdamW

PEERS = Path(__file__).parent.parent / "peers"
INT8, INT4, NF4 = "int8/64@bf16", "int4/64@bf16", "nf4/64@bf16"
RANK = 16
LAYERS = "*.layers.*"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256,
}  # fmt: skip
LLAMA_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
TINY_LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 8192,
}  # fmt: skip
TINY_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 8192, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Way:
    """How a step runs. A way without `formats` has no session: it is a peer's, or unmodified."""

    name: str
    formats: Mapping[str, str] | None = None  # role or key of a rule -> format, beside the tier
    tier: str | None = None
    optimizer: str = "torch"  # torch's fused AdamW, "paredown", or "adamw8bit" of bitsandbytes
    releases: bool = False  # gradients, during backward
    liger: str = ""  # "loss", or "all" kernels
    base: str = "bf16"  # or "nf4", "nf4-double": quantized by bitsandbytes
    is_compiled: bool = False
    offloads: bool = False  # packed inputs of checkpointed layers, to host memory
    recomputes: bool = False  # layers by the plan, where the job has no checkpointing of its own
    tile: int | None = None  # tokens of a piece of the sequence, of layers that the plan checkpoints

    @property
    def is_peer(self) -> bool:
        """Whether other libraries run in it."""
        return bool(self.liger)

    def plan(self) -> pare.Plan | None:
        """The plan of our ways; activations under 8 bits are rounded stochastically."""
        if self.formats is None:
            return None
        plan = pare.Plan.preset(self.tier) if self.tier else pare.Plan.uniform()
        for role, text in self.formats.items():
            is_coarse = role == "activation" and pare.Format.parse(text).element.width < 8
            plan = plan.set(role, text, rounding="stochastic" if is_coarse else None)
        plan = plan.recomputing(LAYERS) if self.recomputes else plan
        plan = plan.tiling(LAYERS, length=self.tile) if self.tile is not None else plan
        return plan.offloading() if self.offloads else plan


@dataclass(frozen=True)
class Job:
    """A model and a batch."""

    name: str
    ways: tuple[Way, ...]
    shape: tuple[int, int]  # examples, tokens of each
    make: Callable[[bool], nn.Module]  # whether it is quick -> the model on the default device
    has_adapters: bool = False
    has_checkpointing: bool = True
    has_autocast: bool = False
    limit_bytes: int | None = None  # of the whole process
    limit_steps: int = 20  # within this limit

    def tokens(self, *, is_quick: bool) -> tuple[int, int]:
        """Examples and tokens of each, tiny ones if the run is quick."""
        return (2, 64) if is_quick else self.shape

    def way(self, name: str) -> Way:
        """The way of that name."""
        return next(way for way in self.ways if way.name == name)


def llama(sizes: Mapping[str, Any], is_quick: bool) -> nn.Module:
    """A Llama in bfloat16, without a key-value cache, made on the default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**sizes, **TINY_LLAMA} if is_quick else sizes
    rotary = {"rope_type": "default", "rope_theta": 5e5}
    options: dict[str, Any] = {"use_cache": False, "max_position_embeddings": 131_072, "attn_implementation": "sdpa"}
    config = LlamaConfig(**shape, **options, pad_token_id=None, rope_parameters=rotary)  # type: ignore[arg-type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def gpt2_124m(is_quick: bool) -> nn.Module:
    """GPT-2."""
    return gpt2(**TINY_GPT2) if is_quick else gpt2()


OURS: dict[str, Any] = {"formats": {"activation": INT8}}
INPUTS = {
    "activation=*:checkpoint.input": INT8
}  # alone: what second forward passes save stays unmodified, which takes less host time
LORA_WAYS = (
    Way("peft-liger", liger="loss"),
    Way("peft-liger-all", liger="all"),
    Way("paredown", **OURS),
    Way("paredown-offload", **OURS, offloads=True),
    Way("paredown-inputs-offload", INPUTS, offloads=True),
    Way("paredown-frozen8", {**INPUTS, "frozen": INT8}),
    Way("qlora", liger="loss", base="nf4"),
    Way("qlora-double", liger="loss", base="nf4-double"),
    Way("paredown-nf4", {**INPUTS, "frozen": NF4}),
    Way("paredown-int4", {**INPUTS, "frozen": INT4}),
)
LONG_WAYS = (
    Way("paredown-nf4", {**INPUTS, "frozen": NF4}, recomputes=True),
    Way("paredown-nf4-tiles-offload", {**INPUTS, "frozen": NF4}, recomputes=True, tile=4096, offloads=True),
)
FULL_WAYS = (
    Way("liger-adamw8bit", liger="loss", optimizer="adamw8bit"),
    Way("lpmm", **OURS, tier="lpmm", optimizer="paredown"),
    Way("lpmm-release", **OURS, tier="lpmm", optimizer="paredown", releases=True),
    Way("lpmm-inputs-release", INPUTS, tier="lpmm", optimizer="paredown", releases=True),
    Way("half-release", **OURS, tier="half", optimizer="paredown", releases=True),
    Way("fine_tune", **OURS, tier="fine_tune", optimizer="paredown"),
    Way("fine_tune-release", **OURS, tier="fine_tune", optimizer="paredown", releases=True),
)
GPT2_WAYS = (
    Way("eager"),
    Way("compiled", is_compiled=True),
    Way("int4", {"activation": INT4}),
    Way("int4-lpmm", {"activation": INT4}, tier="lpmm", optimizer="paredown"),
    Way("compiled-int4", {"activation": INT4}, is_compiled=True),
    Way("compiled-int4-lpmm", {"activation": INT4}, tier="lpmm", optimizer="paredown", is_compiled=True),
)
JOBS = {
    job.name: job
    for job in (
        Job("lora", LORA_WAYS, (1, 4096), partial(llama, LLAMA_8B), has_adapters=True),
        Job("lora-32k", LONG_WAYS, (1, 32_768), partial(llama, LLAMA_8B), has_adapters=True, has_checkpointing=False),
        *(
            Job(
                f"lora-{tokens // 1024}k",
                LONG_WAYS[1:],
                (1, tokens),
                partial(llama, LLAMA_8B),
                has_adapters=True,
                has_checkpointing=False,
                limit_bytes=24 * 2**30,
                limit_steps=1,
            )
            for tokens in (112_640, 153_600)
        ),
        Job("full", FULL_WAYS, (4, 2048), partial(llama, LLAMA_1B)),
        Job("full-8GiB", FULL_WAYS[1:3], (4, 2048), partial(llama, LLAMA_1B), limit_bytes=8 * 2**30),
        Job("gpt2", GPT2_WAYS, (16, 1024), gpt2_124m, has_checkpointing=False, has_autocast=True),
    )
}


# --- peers ------------------------------------------------------------------------------------------------------------


def import_peers() -> None:
    """Let PEFT, Liger and bitsandbytes be imported from the folder peers/, if it is there."""
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.insert(0, str(PEERS))


def with_liger(model: nn.Module, kernels: str) -> None:
    """Replace the loss of a Llama by Liger's, or also its other parts."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

    others = kernels == "all"
    apply_liger_kernel_to_llama(rope=others, rms_norm=others, swiglu=others, fused_linear_cross_entropy=True, model=model)


def with_adapters(model: nn.Module) -> nn.Module:
    """PEFT's adapters, in the dtype of the base."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def quantize_by_bitsandbytes(model: nn.Module, *, is_double: bool, targets: Collection[str] = TARGETS) -> None:
    """Replace the linear layers whose paths end with `targets`, one after the other, by nf4; of a Llama the output head stays."""
    from bitsandbytes.nn import Linear4bit  # type: ignore[import-not-found]

    options = {"compute_dtype": torch.bfloat16, "compress_statistics": is_double, "quant_type": "nf4", "device": "meta"}
    for path, old in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if type(old) is nn.Linear and name in targets:
            new = Linear4bit(old.in_features, old.out_features, bias=False, **options)
            new.bias = old.bias
            kind = type(new.weight)
            quantized = {"requires_grad": False, "compress_statistics": is_double, "quant_type": "nf4", "module": new}
            new.weight = kind(old.weight.detach(), **quantized).to(old.weight.device)
            setattr(model.get_submodule(parent), name, new)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what PEFT asks for


def optimizer_of(way: Way, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if way.optimizer == "paredown":
        return AdamW(trained, lr=1e-4, release=way.releases)
    if way.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]

        return AdamW8bit(trained, lr=1e-4)
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


# --- a step that runs -------------------------------------------------------------------------------------------------


def made(job: Job, way: Way, device: str, *, is_quick: bool) -> nn.Module:
    """The model of a way on `device`, with adapters and checkpointing, before a plan is applied."""
    with torch.device(device):
        model = job.make(is_quick)
    if way.base != "bf16":
        quantize_by_bitsandbytes(model, is_double=way.base == "nf4-double")
    if way.liger and device == "cuda":
        with_liger(model, way.liger)
    model = with_adapters(model) if job.has_adapters else model
    if job.has_checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@dataclass
class Step:
    """One training step as a call that returns the loss; `stack` holds the session."""

    job: Job
    way: Way
    device: str
    is_quick: bool
    model: nn.Module = field(init=False)
    session: Any = field(init=False, default=None)
    stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = made(self.job, self.way, self.device, is_quick=self.is_quick)
        plan = self.way.plan()
        if plan is not None:
            self.session = self.stack.enter_context(pare.apply(plan, self.model, chunked_loss=True))
        compiled = self.session.compile if self.session is not None else partial(torch.compile, self.model)
        self.network = compiled() if self.way.is_compiled else self.model
        self.base_bytes = self.allocated() - self.adapter_bytes() if self.job.has_adapters and self.device == "cuda" else None
        self.optimizer = optimizer_of(self.way, self.model)
        self.batch = self.tokens(*self.job.tokens(is_quick=self.is_quick))

    def tokens(self, size: int, length: int) -> dict[str, Tensor]:
        """Random tokens, which are their own labels."""
        config: Any = self.model.config
        batch = texts(size, self.device, length=length, vocabulary=config.vocab_size)
        assert isinstance(batch, dict)
        return batch

    def __call__(self) -> Tensor:
        """A whole step."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def backward(self) -> Tensor:
        """Forward and backward."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.job.has_autocast):
            loss = self.network(**self.batch).loss
        loss.backward()
        return loss.detach()

    def allocated(self) -> int:
        """Bytes on the GPU, without cuBLAS's workspaces; 0 on a CPU."""
        if self.device != "cuda":
            return 0
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        return torch.cuda.memory_allocated()

    def adapter_bytes(self) -> int:
        """Bytes of the adapters."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return sum(p.numel() * p.element_size() for p in trained)

    def model_bytes(self) -> int | None:
        """Weights, optimizer state and gradients in their stored formats, between backward and the optimizer's step."""
        self()
        loss = self.backward()
        found = self.allocated() - sum(t.numel() * t.element_size() for t in (*self.batch.values(), loss))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return found if self.device == "cuda" else None


# --- predictions ------------------------------------------------------------------------------------------------------


def traced(job: Job, way: Way, *, is_quick: bool) -> pare.Trace:
    """The trace of the step on a GPU, from a model on the meta device; with a plan, its loss is in chunks."""
    model = made(job, way, "meta", is_quick=is_quick)
    size, length = job.tokens(is_quick=is_quick)
    tokens = torch.zeros(size, length, dtype=torch.int64)
    optimizer: Any = AdamW(model.parameters(), release=True) if way.releases else "adamw"
    autocast = torch.bfloat16 if job.has_autocast else None
    batch, is_chunked = {"input_ids": tokens, "labels": tokens}, way.formats is not None
    options: dict[str, Any] = {"device": "cuda", "autocast": autocast, "compiled": way.is_compiled, "chunked_loss": is_chunked}
    return pare.trace_step(model, batch, optimizer=optimizer, **options)


def predicted(job: Job, way: Way, *, is_quick: bool) -> dict[str, Any]:
    """Predicted peak and model memory, and bytes by role at the peak."""
    foot = pare.footprint(traced(job, way, is_quick=is_quick), way.plan())
    roles = {role.value: nbytes for role, nbytes in foot.at_peak.items() if nbytes}
    return {"predicted_bytes": foot.peak_bytes, "predicted_model_bytes": foot.model_bytes, "at_peak": roles}
