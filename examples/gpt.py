"""A GPT from scratch with everything in low precision, guarded, logged and resumed.

Weights, gradients and moments in 8 bits, activations in 4. A guard raises the precision of slots whose rounding goes wrong; a run that was
stopped half-way ends with the bits of an unbroken one. `python gpt.py --size full` is GPT-2 124M on a GPU, compiled.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.integrations import Monitor
from paredown.models import GPT, GPTConfig

SMALL = GPTConfig(dim=64, num_layers=2, num_heads=4, vocabulary=256, context=64)
SIZES = {"small": ("cpu", SMALL, 8, 20), "full": ("cuda", GPTConfig(), 16, 100)}  # device, shape, batch, steps
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
device, config, batch_size, num_steps = SIZES[parser.parse_known_args()[0].size]
torch.set_num_threads(1)  # tensors are small

# %% A text, the loss of its next byte, and the plan
TEXT = (pare.__doc__ or "").encode() * 400
PLAN = pare.Plan.preset("lpmm").set("activation", "int4/64@bf16")


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the next byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(TEXT) - config.context - 1, (batch_size,), generator=generator).tolist()
    rows = torch.tensor([list(TEXT[begin : begin + config.context + 1]) for begin in begins], device=device)
    return rows[:, :-1], rows[:, 1:]


# %% Steps of a training, with a checkpoint at their end: the model first, then apply, the optimizer last
def train(model: nn.Module, begin: int, end: int, checkpoint: dict[str, dict] | None = None) -> dict[str, dict]:
    """Steps `begin` to `end` of a training, from a checkpoint if there is one; another checkpoint at its end."""
    trace = pare.trace_step(model, batch(0), loss=loss_fn, optimizer="adamw", device=device)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    session = pare.apply(PLAN, model, guard=pare.Guard(trace))
    called = session.compile() if device == "cuda" else model
    opt = pare.optim.AdamW(model.parameters(), lr=3e-3)
    if checkpoint:
        session.load_state_dict(checkpoint["session"])
        opt.load_state_dict(checkpoint["opt"])
    monitor = Monitor(session, model)
    for step in range(begin, end):
        x, y = batch(step)
        loss = loss_fn(called(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if (step + 1) % (num_steps // 4) == 0:
            logged = monitor.numbers(opt)  # W&B: run.log(logged); TensorBoard: writer.add_scalar(name, value, step) for each
            sizes = ", ".join(f"{name.split('/')[1][:-4]} {value * 1024:.2f}" for name, value in logged.items() if "_gib" in name)
            print(f"step {step + 1}: loss {loss.item():.3f}; MiB: {sizes}; {logged['updates/flips']:.0%} of the weights moved")
    kept = {"model": model.state_dict(), "opt": opt.state_dict(), "session": session.state_dict()}
    session.close()
    return kept


# %% In one go, and in two
def make() -> nn.Module:
    torch.manual_seed(0)
    return GPT(config).to(device)


whole = train(make(), 0, num_steps)["model"]
half = train(make(), 0, num_steps // 2)
resumed = train(make(), num_steps // 2, num_steps, half)["model"]
same = "the same bits" if all(torch.equal(whole[name], resumed[name]) for name in whole) else "DIFFERENT"
print(f"in one go and resumed at step {num_steps // 2}: {same}")
