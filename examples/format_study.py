"""A study of number formats: one network, trained with arithmetic in seven formats that no CPU has.

Master weights stay float32; what operations take and give is rounded to the format, as in the papers on low-precision training. The last
losses tell the formats apart. `python format_study.py --size full` trains longer and wider, on a GPU.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paredown as pare
from paredown.study.tasks import find_task

SIZES = {"small": ("cpu", 16, 25), "full": ("cuda", 64, 2000)}  # device, channels, steps
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
device, width, num_steps = SIZES[parser.parse_known_args()[0].size]
torch.set_num_threads(1)  # tensors are small

# %% What operations give and take: activations and weights forward, errors backward
STUDIED = {
    "float32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "8 bits, OCP": ("e4m3fn", "e5m2"),
    "the same, blocks of 32": ("e4m3fn/32@e8m0", "e5m2/32@e8m0"),
    "6 bits, blocks of 32": ("e2m3fn/32@e8m0", "e3m2fn/32@e8m0"),
    "4 bits, blocks of 32": ("e2m1fn/32@e8m0", "e2m1fn/32@e8m0"),
    "8 bits, to zero": ("e4m3fn", "e5m2"),
}


def plan_of(forward: str, backward: str, name: str) -> pare.Plan:
    """Activations and weights in one format, errors in the other; the master weights stay float32."""
    rounding = {"rounding": "toward_zero"} if "to zero" in name else {}
    return pare.Plan.uniform(activation=forward, weight=forward, error=backward, overflow="saturate", **rounding)


# %% A network for pictures of 8 x 8, trained with arithmetic simulated in the formats of a plan
def network() -> nn.Module:
    """Three convolutions."""
    layers = [
        (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, width), (width, width), (width, 2 * width))
    ]
    return nn.Sequential(
        *(part for layer in layers for part in layer), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)
    )


def train(plan: pare.Plan) -> float:
    """The mean loss of the last fifth of the steps."""
    torch.manual_seed(0)
    model, losses = network().to(device), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = find_task("digits").data.batches(32, seed=0, device=torch.device(device))
    with pare.apply(plan, model, mode="simulate"):  # an unmodified model, torch's own optimizer
        for _, (x, y) in zip(range(num_steps), data, strict=False):
            loss = cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    last = losses[-max(1, num_steps // 5) :]
    return sum(last) / len(last)


# %% A row for each
print(f"{'arithmetic in':24} {'forward':16} {'backward':16} {'loss':>7}")
for name, (forward, backward) in STUDIED.items():
    print(f"{name:24} {forward:16} {backward:16} {train(plan_of(forward, backward, name)):7.3f}")
print('One seed and few steps: a sweep with several seeds tells them apart (mode = "simulate").')
