"""A GPT with everything in low precision: 8-bit weights, gradients and moments, 4-bit activations, guarded, logged, and resumed."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.integrations import Monitor
from paredown.models import GPT, GPTConfig

TEXT = (pare.__doc__ or "").encode() * 40
PLAN = pare.Plan.preset("lpmm").set("activation", "int4/64@bf16")


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the next byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, size: int = 8, length: int = 64) -> tuple[Tensor, Tensor]:
    """Pieces of the text, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(TEXT) - length - 1, (size,), generator=generator).tolist()
    rows = torch.tensor([list(TEXT[begin : begin + length + 1]) for begin in begins])
    return rows[:, :-1], rows[:, 1:]


def train(model: nn.Module, begin: int, end: int, checkpoint: dict[str, dict] | None = None) -> dict[str, dict]:
    """Steps `begin` to `end` of a training, from a checkpoint if there is one; another checkpoint at its end."""
    trace = pare.trace_step(model, batch(0), loss=loss_fn, optimizer="adamw", device="cpu")
    if checkpoint:
        model.load_state_dict(checkpoint["model"])  # the model first, then apply, the optimizer last
    session = pare.apply(PLAN, model, guard=pare.Guard(trace))
    opt = pare.optim.AdamW(model.parameters(), lr=3e-3)
    if checkpoint:
        session.load_state_dict(checkpoint["session"])
        opt.load_state_dict(checkpoint["opt"])
    monitor = Monitor(session, model)
    for step in range(begin, end):
        x, y = batch(step)
        loss = loss_fn(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % 5 == 4:
            logged = monitor.numbers(opt)  # W&B: run.log(logged); TensorBoard: writer.add_scalar(name, value, step) for each
            sizes = ", ".join(f"{name.split('/')[1][:-4]} {value * 1024:.2f}" for name, value in logged.items() if "_gib" in name)
            print(f"step {step + 1}: loss {loss.item():.3f}; MiB: {sizes}; {logged['updates/flips']:.0%} of the weights moved")
    kept = {"model": model.state_dict(), "opt": opt.state_dict(), "session": session.state_dict()}
    session.close()
    return kept


def main() -> None:
    """Train once in one go, once in two, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # tensors are small

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(GPTConfig(dim=64, num_layers=2, num_heads=4, vocabulary=256, context=64))

    whole = train(make(), 0, steps)["model"]
    half = train(make(), 0, steps // 2)
    resumed = train(make(), steps // 2, steps, half)["model"]
    same = "the same bits" if all(torch.equal(whole[name], resumed[name]) for name in whole) else "DIFFERENT"
    print(f"in one go and resumed at step {steps // 2}: {same}")


if __name__ == "__main__":
    main()
