"""How long planning takes: tracing a step, assigning formats to it, and probing a model. Rows in results/plan.json.

    python benchmarks/bench_plan.py             # GPT-2 124M, 8 x 1024 tokens, and ResNet-50, 64 pictures, as on a GPU with bf16 autocast
    python benchmarks/bench_plan.py --quick     # small ones
    python benchmarks/bench_plan.py --gpu       # probes alone, beside training steps of the same networks, on one GPU with bf16 autocast

No weights and no data are made for traces: models are on the meta device. Probes are of small models, or on a GPU of large ones, of an
eighth of the batch whose training step stands beside them, with 16 backwards (the first) and 8 (those of guards). `share` is what one of
the first kind and six of the second take of 10,000 steps. `bytes_moved` of a row is the peak that was planned for, or that of the step as
it is written in the rows of traces, steps and probes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import RESULTS, Row, append, machine, time_call
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.models import MODELS, random_batch
from paredown.models.resnet import resnet50
from paredown.models.transformer import GPT, GPTConfig, token_loss

Step = tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], Callable[..., Tensor]]
STEP, BACKWARDS = "a step", (16, 8)  # those of a first probe, and of guards
BUDGETS = {"role": ("90%", "75%", "65%"), "size": ("75%",), "random": ("75%",)}


def full_steps() -> dict[str, Step]:
    """The steps that people ask about."""
    tokens = torch.empty(8, 1024, dtype=torch.int64, device="meta")
    pictures = torch.empty(64, 3, 224, 224, device="meta"), torch.empty(64, dtype=torch.int64, device="meta")
    return {
        "GPT-2 124M, 8 x 1024": (lambda: GPT(GPTConfig()), (tokens, tokens), token_loss),
        "ResNet-50, 64": (resnet50, pictures, cross_entropy),
    }


def quick_steps() -> dict[str, Step]:
    """Small ones, for a test."""
    return {"small gpt": (MODELS["gpt"], random_batch("gpt", 512), token_loss)}


def traced(step: Step) -> pare.Trace:
    """The trace of one step with AdamW."""
    make, batch, loss = step
    with torch.device("meta"):
        model = make()
    return pare.trace_step(model, batch, loss=loss, optimizer="adamw", device="cuda", autocast=torch.bfloat16)


def rows_of(name: str, step: Step, repeats: int) -> list[Row]:
    """Times of a trace and of the plans of each method and budget."""
    trace = traced(step)
    shape = (len(trace.slots), trace.length)
    peak = pare.footprint(trace).peak_bytes
    rows = [Row("trace_step", name, shape, peak, *time_call(lambda: traced(step), "cpu", repeats=repeats))]
    for method, budgets in BUDGETS.items():
        for budget in budgets:
            plan = pare.assign(trace, budget, method=method)
            times = time_call(lambda: pare.assign(trace, budget, method=method), "cpu", repeats=repeats)  # noqa: B023
            rows.append(Row(f"assign {budget}, {method}", name, shape, pare.footprint(trace, plan).peak_bytes, *times))
    return rows


def small_step(name: str, num: int) -> Step:
    """A network of paredown.models, and a batch for it."""
    return MODELS[name], random_batch(name, num), token_loss if name == "gpt" else cross_entropy


def large_steps() -> dict[str, Step]:
    """Those of full_steps with data, twice as many of it or more, as GPUs train them."""
    ids = torch.randint(50257, (16, 1024))
    pictures = torch.randn(256, 3, 224, 224), torch.randint(1000, (256,))
    return {
        "GPT-2 124M, 16": (lambda: GPT(GPTConfig()), (ids, ids), token_loss),
        "ResNet-50, 256": (resnet50, pictures, cross_entropy),
    }


def probe_rows(name: str, of: Step, device: str, repeats: int) -> list[Row]:
    """Times of a baseline training step, and of probes of an eighth of its batch."""
    torch.manual_seed(0)
    make, host_batch, loss = of
    model, batch = make().to(device).train(), tuple(tensor.to(device) for tensor in host_batch)
    autocast = torch.bfloat16 if device == "cuda" else None
    trace = pare.trace_step(model, batch, loss=loss, optimizer="adamw", device=device, autocast=autocast)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    part = tuple(tensor[: max(len(tensor) // 8, 1)] for tensor in batch)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, autocast, enabled=autocast is not None):
            value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()

    jobs: dict[str, Callable[[], object]] = {STEP: step}
    for count in BACKWARDS:
        jobs[f"probe, {count} backwards"] = partial(pare.probe, model, part, trace, loss=loss, backwards=count)
    shape, peak = (len(trace.slots), trace.length), pare.footprint(trace).peak_bytes
    return [Row(job, name, shape, peak, *time_call(call, device, repeats=repeats, calls=1)) for job, call in jobs.items()]


def share_of_training(rows: list[Row]) -> float:
    """What the probes of 10,000 steps take of them: one with 16 backwards, and six with 8, at 10, 30, ..., 3,000 steps."""
    step, first, later = (row.median_seconds for row in rows)
    return (first + 6 * later) / (10_000 * step)


def main() -> None:
    """Time all of it, print the table and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few repeats, and no rows")
    parser.add_argument("--gpu", action="store_true", help="probes alone, on the GPU")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    device, rows = "cuda" if options.gpu else "cpu", list[Row]()
    for name, step in {} if options.gpu else (quick_steps() if options.quick else full_steps()).items():
        rows += rows_of(name, step, 3 if options.quick else 7)
    num = 16 if options.quick else 256
    small = {f"{name}, {num}": small_step(name, num) for name in ("gpt", "resnet18")}
    for name, step in (large_steps() if options.gpu else small).items():
        rows += probe_rows(name, step, device, 3 if options.quick else 5)
        print(f"{name:22s} probes take {share_of_training(rows[-3:]):.2%} of 10,000 steps", flush=True)
    for row in rows:
        peak = f"{row.bytes_moved / 2**30:8.3f} GiB"
        print(f"{row.who:22s} {row.job:22s} {peak}  {row.median_seconds:7.3f} s ({row.p20_seconds:.3f} to {row.p80_seconds:.3f})")
    if not options.quick:
        append("plan.json", machine(device, ("torch", "numpy", "paredown"), options.commit), rows, options.out)


if __name__ == "__main__":
    main()
