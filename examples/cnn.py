"""A CNN that does not fit: see what a step takes, let a budget choose the formats, train within it: `cnn.py --budget 40%`."""

from __future__ import annotations

import argparse
import sys

import torch
from torch.nn.functional import cross_entropy, interpolate

import paredown as pare
from paredown.integrations import explain_on_out_of_memory
from paredown.models import resnet18
from paredown.study.tasks import find_task


def main() -> None:
    """Print what is predicted, then what training within it gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="40%", help='of the peak of the baseline, or bytes: "8GiB"')
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.set_num_threads(1)  # tensors are small: more threads cost more than they give
    torch.manual_seed(0)
    digits = find_task("digits").data
    model = resnet18(num_classes=10, width=8, small_input=True)

    def batch(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return interpolate(x, size=(16, 16)), y

    data = digits.batches(64, seed=0, device=torch.device("cpu"))
    first = batch(*next(data))

    # 1. What one step takes, without running it; "cuda" works here without a GPU.
    trace = pare.trace_step(model, first, loss=cross_entropy, optimizer="adamw", device="cpu")
    baseline = pare.footprint(trace)
    activations = baseline.by_role[pare.Role.ACTIVATION]
    print(f"baseline: {baseline.peak_bytes / 2**20:.1f} MiB at the peak, {activations / 2**20:.1f} of them activations")

    # 2. A format for every tensor, so that the peak is within the budget; or an error that names the smallest budget.
    try:
        plan = pare.assign(trace, options.budget)
    except pare.errors.BudgetError as error:
        sys.exit(f"{error}")
    print(f"within {options.budget}: {pare.footprint(trace, plan).peak_bytes / 2**20:.1f} MiB predicted")
    plan.save("plan.json")

    # 3. The loop is the usual one.
    session = pare.apply(plan, model)
    opt = pare.optim.AdamW(model.parameters(), lr=3e-3)
    with explain_on_out_of_memory(trace, plan):  # an out-of-memory error names the role that grew and the next plan
        for step, (x, y) in zip(range(options.steps), data, strict=False):
            x, y = batch(x, y)
            loss = cross_entropy(model(x), y)
            stored = session.stored_bytes
            loss.backward()
            opt.step()
            opt.zero_grad()
            if step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.3f}, {stored / 2**20:.1f} MiB of packed activations")
    print(f"{len(session.changes)} slots are not stored as planned; session.changes has the reasons")
    session.close()  # restores the unmodified model: torch.save(model.state_dict(), ...)


if __name__ == "__main__":
    main()
