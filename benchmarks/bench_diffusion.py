"""LoRA of diffusion transformers beside bitsandbytes nf4 with checkpointing: peak memory and step time; rows in results/diffusion.json.

    python benchmarks/bench_diffusion.py predict    # peaks, without a GPU: results/diffusion_predictions.json
    python benchmarks/bench_diffusion.py            # one GPU; diffusers, PEFT and bitsandbytes from the folder peers/
    python benchmarks/bench_diffusion.py --quick    # tiny shapes on the CPU: whether it runs, no figures

`flux` and `sd3` are the transformers of FLUX.1 dev (11.9B parameters) and of Stable Diffusion 3 medium (2.0B) from their configs, with
random bfloat16 weights: one picture of 1024 x 1024, adapters of rank 16 by PEFT on the attention's projections, in bfloat16, and the
model's own activation checkpointing in all ways. The loss is that of flow matching; AdamW is torch's, fused.

bitsandbytes quantizes every linear layer, in blocks of 64 with float32 scales. Its prediction is that of our nf4 with such scales.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from bench_session import cpu_times, cuda_times
from language_steps import INT8, NF4, RANK, import_peers, quantize_by_bitsandbytes
from loops import Log, common_options, failure, gib, release
from measure import RESULTS, version
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import paredown as pare
from paredown.integrations.diffusers_config import diffusion_batch, sample_loss
from paredown.integrations.hugging_face_config import CONFIG_BATCH
from paredown.study.tasks.task_trace import resized

FILE, PREDICTIONS = "diffusion.json", "diffusion_predictions.json"
PEERS = ("diffusers", "peft", "bitsandbytes")
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
WARM_UP = 3
CONFIGS: dict[str, dict[str, Any]] = {
    "flux": {
        "_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True, "in_channels": 64,
        "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38, "patch_size": 1,
        "pooled_projection_dim": 768,
    },
    "sd3": {
        "_class_name": "SD3Transformer2DModel", "attention_head_dim": 64, "caption_projection_dim": 1536, "in_channels": 16,
        "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 24, "out_channels": 16, "patch_size": 2,
        "pooled_projection_dim": 2048, "pos_embed_max_size": 192, "sample_size": 128,
    },
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "flux": {"num_attention_heads": 2, "attention_head_dim": 64, "axes_dims_rope": [16, 24, 24], "num_layers": 2, "num_single_layers": 2},
    "sd3": {"num_attention_heads": 2, "caption_projection_dim": 128, "num_layers": 2, "sample_size": 32, "pos_embed_max_size": 32},
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How a step stores its base and the inputs of checkpointed layers; without `frozen` the base is bfloat16, or a peer's."""

    name: str
    frozen: str | None = None
    activation: str | None = None
    offloads: bool = False
    is_peer: bool = False

    def plan(self) -> pare.Plan:
        """The plan of the way, and for the peer the one whose bytes are predicted for it."""
        formats = {"frozen": self.frozen, "activation": self.activation}
        plan = pare.Plan.uniform(**{role: text for role, text in formats.items() if text})
        return plan.offloading() if self.offloads else plan


PEER = "bitsandbytes-nf4"
WAYS = (
    Way("bf16"),
    Way(PEER, "nf4/64@fp32", is_peer=True),
    Way("frozen4", NF4),
    Way("frozen4+int8", NF4, INT8),
    Way("frozen4+int8-offload", NF4, INT8, offloads=True),
)


@dataclass(frozen=True)
class Row:
    """One way of one model; None: not measured."""

    job: str
    way: str
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    base_bytes: int | None = None  # what the model holds before the first step
    reserved_bytes: int | None = None
    host_seconds: float | None = None
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    num_changes: int | None = None
    last_loss: float | None = None
    skipped: str | None = None
    error: str | None = None


# --- a step -----------------------------------------------------------------------------------------------------------


def made(job: str, way: Way, device: str, *, is_quick: bool) -> nn.Module:
    """The model in bfloat16 with adapters and checkpointing, before a plan is applied."""
    import diffusers  # type: ignore[import-not-found]
    from peft import LoraConfig  # type: ignore[import-not-found]

    diffusers.utils.logging.set_verbosity_error()
    config = {**CONFIGS[job], **(TINY[job] if is_quick else {})}
    with torch.device(device):
        model: Any = getattr(diffusers, config["_class_name"]).from_config(config).to(torch.bfloat16)
    if way.is_peer and device != "meta":
        linear = {path.rpartition(".")[2] for path, module in model.named_modules() if type(module) is nn.Linear}
        quantize_by_bitsandbytes(model, is_double=False, targets=linear)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.enable_gradient_checkpointing()
    return model.train()


def batch_of(model: nn.Module, device: str, *, is_quick: bool) -> tuple[Any, ...]:
    """The arguments of the model and the target for one picture, of random values."""
    options = {"picture": 128, "length": 16} if is_quick else {"picture": 1024}
    batch = resized(diffusion_batch(model, options)[0], CONFIG_BATCH, 1)

    def filled(tensor: Tensor) -> Tensor:
        is_float = tensor.is_floating_point() and tensor.is_meta
        return torch.randn(tensor.shape, dtype=tensor.dtype, device=device) if is_float else torch.ones_like(tensor, device=device)

    return batch if device == "meta" else tree_map_only(Tensor, filled, batch)


def measured(job: str, way: Way, device: str, num_steps: int, *, is_quick: bool) -> dict[str, Any]:
    """Peak, times and loss of a step."""
    torch.manual_seed(0)
    model = made(job, way, device, is_quick=is_quick)
    *args, target = batch_of(model, device, is_quick=is_quick)
    with ExitStack() as stack:
        session = stack.enter_context(pare.apply(way.plan(), model)) if way.frozen and not way.is_peer else None
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        release(device)
        base_bytes = torch.cuda.memory_allocated() if device == "cuda" else None

        def step() -> Tensor:
            loss = sample_loss(model(*args), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        for _ in range(WARM_UP):
            step()
        found = cuda_times(step, num_steps) if device == "cuda" else cpu_times(step, num_steps)
        return {**found, "base_bytes": base_bytes, "num_changes": None if session is None else len(session.changes)}


def row_of(job: str, way: Way, device: str, num_steps: int, *, is_quick: bool) -> Row:
    """A measured row; an error, or a peer that is not there, is a row too."""
    if way.is_peer and (version("bitsandbytes") is None or device == "cpu"):
        return Row(job, way.name, skipped="bitsandbytes is not installed, or there is no GPU")
    try:
        return Row(job, way.name, **measured(job, way, device, num_steps, is_quick=is_quick))
    except Exception as error:
        return Row(job, way.name, error=failure(error))
    finally:
        release(device)


def predicted(job: str, *, is_quick: bool) -> Iterator[tuple[Way, int]]:
    """The peak of each way, from one trace of the step on a GPU."""
    model = made(job, WAYS[0], "meta", is_quick=is_quick)
    batch = batch_of(model, "meta", is_quick=is_quick)
    trace = pare.trace_step(model, batch, loss=sample_loss, optimizer="adamw", device="cuda")
    for way in WAYS:
        yield way, pare.footprint(trace, way.plan()).peak_bytes


# --- the command ------------------------------------------------------------------------------------------------------


def predict(jobs: list[str], options: argparse.Namespace) -> None:
    """Write and print the predicted peaks, beside that of bitsandbytes' format."""
    path = (options.out or RESULTS) / PREDICTIONS
    found: dict[str, int] = json.loads(path.read_text()) if path.exists() and not options.quick else {}
    for job in jobs:
        found |= {f"{job}:{way.name}": nbytes for way, nbytes in predicted(job, is_quick=options.quick)}
        peer = found[f"{job}:{PEER}"]
        for way in WAYS:
            nbytes = found[f"{job}:{way.name}"]
            print(f"{job:5s} {way.name:22s} {gib(nbytes)} GiB  {nbytes / peer:.2f}x", flush=True)
    if options.out or not options.quick:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


def line(row: Row, peer: Row | None) -> str:
    """One row as text, with its ratios to the peer's."""
    if row.error or row.skipped:
        return f"{row.job:5s} {row.way:22s} {row.error or row.skipped}"
    ratios: list[str] = []
    for name in ("peak_bytes", "median_seconds"):
        value, other = getattr(row, name), getattr(peer, name) if peer is not None else None
        ratios.append(f"{value / other:.2f}x" if value and other else "-")
    ms = 1e3 * (row.median_seconds or 0)
    cells = f"{gib(row.peak_bytes)} GiB {ratios[0]:>6s} {ms:9.1f} ms {ratios[1]:>6s}  predicted {gib(row.predicted_bytes)}"
    return f"{row.job:5s} {row.way:22s} {cells}"


def measure(jobs: list[str], options: argparse.Namespace, predictions: Mapping[str, int]) -> None:
    """Measure and write one row after the other."""
    device = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    options.quick = device == "cpu"
    log = Log(FILE, device, options)
    log.runs[-1]["versions"] |= {name: version(name) for name in PEERS}
    for job in jobs:
        peer = None
        for way in sorted(WAYS, key=lambda way: not way.is_peer):  # the peer first
            row = row_of(job, way, device, 3 if options.quick else options.steps, is_quick=options.quick)
            row = Row(**{**vars(row), "predicted_bytes": None if options.quick else predictions.get(f"{job}:{way.name}")})
            peer = row if way.is_peer else peer
            log.add(row)
            print(line(row, peer), flush=True)


def main() -> None:
    """Predict or measure."""
    parser = common_options(__doc__)
    parser.add_argument("what", nargs="?", choices=["predict"], help="predict: without a GPU; otherwise measure")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each row")
    options = parser.parse_args()
    import_peers()
    jobs = [name for name in CONFIGS if name in (options.model or CONFIGS)]
    if options.what == "predict":
        predict(jobs, options)
        return
    path = RESULTS / PREDICTIONS
    measure(jobs, options, json.loads(path.read_text()) if path.exists() else {})


if __name__ == "__main__":
    main()
