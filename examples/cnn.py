"""A CNN in a loop of your own, within a memory budget.

The step of a ResNet-18 on handwritten digits has to run in 40 % of its memory: its peak is predicted, `assign` chooses a format for every
tensor, and the loop stays the usual one. `python cnn.py --size full` is a wider one on pictures of 224 x 224, for a GPU.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy, interpolate

import paredown as pare
from paredown.models import resnet18
from paredown.study.tasks import find_task

SIZES = {"small": ("cpu", 8, 16, 64, 20), "full": ("cuda", 64, 224, 256, 200)}  # device, width, picture, batch, steps
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
parser.add_argument("--budget", default="40%", help='of the peak of the unmodified step, or bytes: "8GiB"')
options, _ = parser.parse_known_args()
device, width, side, batch_size, num_steps = SIZES[options.size]

# %% The model and its data
torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)
model = resnet18(num_classes=10, width=width, small_input=True).to(device)
digits = find_task("digits").data.batches(batch_size, seed=0, device=torch.device(device))
batches = ((interpolate(x, size=(side, side)), y) for x, y in digits)

# %% What one step takes, without running it; `device="cuda"` works here without a GPU
trace = pare.trace_step(model, next(batches), loss=cross_entropy, optimizer="adamw", device=device)
baseline = pare.footprint(trace)
activations = baseline.by_role[pare.Role.ACTIVATION]
print(f"baseline: {baseline.peak_bytes / 2**20:.1f} MiB at the peak, {activations / 2**20:.1f} of them activations")

# %% A format for every tensor, so that the peak is within the budget. Where none is, an error names the smallest budget
plan = pare.assign(trace, options.budget)
print(f"within {options.budget}: {pare.footprint(trace, plan).peak_bytes / 2**20:.1f} MiB predicted")
plan.save("plan.json")

# %% The loop. An out-of-memory error inside of the `with` says what the peak is made of, and which plan takes less
session = pare.apply(plan, model)
optimizer = pare.optim.AdamW(model.parameters(), lr=3e-3)
with pare.explain_oom(model, optimizer=optimizer):
    for step, (x, y) in zip(range(1, num_steps + 1), batches, strict=False):
        loss = cross_entropy(model(x), y)
        stored = session.stored_bytes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == num_steps:
            print(f"step {step}: loss {loss.item():.3f}, {stored / 2**20:.1f} MiB of packed activations")

# %% What is stored otherwise than planned, and the unmodified model back: `torch.save(model.state_dict(), ...)`
print(f"{len(session.changes)} slots are not stored as planned; session.changes has the reasons")
session.close()
