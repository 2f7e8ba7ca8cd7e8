"""A 3-D U-Net for segmentation as nnU-Net trains it, in 8 bits.

Instance norm and leaky ReLU, deep supervision, Dice with cross entropy, SGD with Nesterov momentum and a polynomial schedule. Volumes make
activations most of the memory, and a patch of twice the voxels is what saved memory buys. Data are random balls: nothing is downloaded.
`python segmentation.py --size full` takes patches of 128 x 128 x 128 on a GPU.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, one_hot

import paredown as pare

SIZES = {"small": ("cpu", (8, 16, 32), 16, 12), "full": ("cuda", (32, 64, 128, 256, 320), 128, 250)}  # device, widths, patch, steps
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
device, widths, patch, num_steps = SIZES[parser.parse_known_args()[0].size]
torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)


# %% The network: two convolutions at each of its resolutions, and logits at all of them (deep supervision)
def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    parts = [(nn.Conv3d(a, outputs, 3, s, 1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01))
             for a, s in ((inputs, stride), (outputs, 1))]  # fmt: skip
    return nn.Sequential(*(part for three in parts for part in three))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ins, outs = (1, *widths[:-1]), widths
        self.encoder = nn.ModuleList(block(a, b, 1 + (i > 0)) for i, (a, b) in enumerate(zip(ins, outs, strict=True)))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in pairs)
        self.decoder = nn.ModuleList(block(2 * b, b) for _, b in pairs)
        self.heads = nn.ModuleList(nn.Conv3d(b, 2, 1) for _, b in pairs)

    def forward(self, x: Tensor) -> list[Tensor]:
        skipped, logits = [], []
        for layer in self.encoder:
            skipped.append(x := layer(x))
        skipped.pop()
        for enlarge, layer, head in zip(self.enlarge, self.decoder, self.heads, strict=True):
            x = layer(torch.cat([enlarge(x), skipped.pop()], 1))
            logits.append(head(x))
        return logits[::-1]  # the finest first


# %% Dice with cross entropy, summed over resolutions with halving weights
def dice(logits: Tensor, labels: Tensor) -> Tensor:
    shares, targets = logits.softmax(1)[:, 1], one_hot(labels, 2)[..., 1]
    return (2 * (shares * targets).sum() + 1) / (shares.sum() + targets.sum() + 1)


def loss_fn(outputs: list[Tensor], labels: Tensor) -> Tensor:
    total = torch.zeros((), device=labels.device)
    for level, logits in enumerate(outputs):
        coarse = interpolate(labels[:, None].float(), size=logits.shape[2:])[:, 0].long()
        total = total + (cross_entropy(logits, coarse) - dice(logits, coarse)) / 2**level
    return total


def batch() -> tuple[Tensor, Tensor]:
    """Two volumes with noise and a ball each."""
    places = torch.stack(torch.meshgrid(*3 * [torch.linspace(-1, 1, patch)], indexing="ij"))
    labels = torch.stack([((places - 0.4 * torch.randn(3, 1, 1, 1)).norm(dim=0) < 0.5).long() for _ in range(2)])
    return (labels[:, None] + 0.5 * torch.randn(2, 1, *3 * [patch])).to(device), labels.to(device)


# %% The step before it runs: baseline, 8 and 4 bits
model = UNet().to(device)
trace = pare.trace_step(model, batch(), loss=loss_fn, optimizer="sgdm", device=device)
plans = {"baseline": None, "8 bits": pare.Plan.preset("activations8"), "4 bits": pare.Plan.preset("activations4")}
for name, plan in plans.items():
    print(f"{name}: {pare.footprint(trace, plan).peak_bytes / 2**20:.1f} MiB at the peak")

# %% Training in 8 bits
session = pare.apply(plans["8 bits"], model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, num_steps, power=0.9)
for step in range(1, num_steps + 1):
    x, y = batch()
    outputs = model(x)
    loss = loss_fn(outputs, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 12.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step in (1, num_steps):
        print(f"step {step}: loss {loss.item():.3f}, Dice {dice(outputs[0], y).item():.3f}")
session.close()
