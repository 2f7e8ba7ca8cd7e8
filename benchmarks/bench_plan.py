"""How long planning takes, on the CPU: tracing a step, assigning formats to it, and probing a model. Rows in results/plan.json.

    python benchmarks/bench_plan.py             # GPT-2 124M, 8 x 1024 tokens, and ResNet-50, 64 pictures, as on a GPU with bf16 autocast
    python benchmarks/bench_plan.py --quick     # small ones

No weights and no data are made for traces: models are on the meta device. Probes are of small models, of an eighth of the batch whose
training step stands beside them, with 16 backwards (the first) and 8 (those of guards). `bytes_moved` of a row is the peak that was
planned for, or that of the step as it is written in the rows of traces, steps and probes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from measure import Row, append, machine, time_call
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.models import MODELS, random_batch
from paredown.models.resnet import resnet50
from paredown.models.tokens import token_loss
from paredown.models.transformer import GPT, GPTConfig

Step = tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], Callable[..., Tensor]]
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


def probe_rows(name: str, num: int, repeats: int) -> list[Row]:
    """Times of a training step as it is written, and of probes of an eighth of its batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name]().train(), random_batch(name, num)
    loss = token_loss if name == "gpt" else cross_entropy
    trace = pare.trace_step(model, batch, loss=loss, optimizer="adamw", device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    part = tuple(tensor[: max(num // 8, 1)] for tensor in batch)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    jobs: dict[str, Callable[[], object]] = {"a step": step}
    for count in (16, 8):
        jobs[f"probe, {count} backwards"] = partial(pare.probe, model, part, trace, loss=loss, backwards=count)
    shape, peak = (len(trace.slots), trace.length), pare.footprint(trace).peak_bytes
    return [Row(job, f"{name}, {num}", shape, peak, *time_call(call, "cpu", repeats=repeats)) for job, call in jobs.items()]


def main() -> None:
    """Time all of it, print the table and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few repeats, and no rows")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, step in (quick_steps() if options.quick else full_steps()).items():
        rows += rows_of(name, step, 3 if options.quick else 7)
    for name in ("gpt", "resnet18"):
        rows += probe_rows(name, 16 if options.quick else 256, 3 if options.quick else 5)
    for row in rows:
        peak = f"{row.bytes_moved / 2**30:8.3f} GiB"
        print(f"{row.who:22s} {row.job:22s} {peak}  {row.median_seconds:7.3f} s ({row.p20_seconds:.3f} to {row.p80_seconds:.3f})")
    if not options.quick:
        append("plan.json", machine("cpu", ("torch", "numpy", "paredown")), rows)


if __name__ == "__main__":
    main()
