"""A LoRA fine-tune of a diffusion transformer with diffusers, over a base in 4 bits.

The transformer of Stable Diffusion 3 from a config, with PEFT's adapters on its attention: the frozen base is stored in nf4, activations in
8 bits, and the adapters train as they are, by flow matching. Latents and texts are random: nothing is downloaded. `python diffusion.py
--size full` has the sizes of SD 3 medium, for a GPU; `SD3Transformer2DModel.from_pretrained(..., subfolder="transformer")` has weights.
"""

import argparse
import sys
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import mse_loss

import paredown as pare

if not (find_spec("diffusers") and find_spec("peft")):
    sys.exit("Skipped: this example needs diffusers and PEFT (pip install diffusers peft).")

from diffusers import SD3Transformer2DModel
from diffusers.utils.logging import set_verbosity_error
from peft import LoraConfig

SIZES = {"small": ("cpu", 2, 2, 32, 16, 8, 8), "full": ("cuda", 24, 24, 64, 4, 64, 100)}  # device, layers, heads, width of one, ...
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
set_verbosity_error()
device, num_layers, num_heads, head_width, batch_size, side, num_steps = SIZES[parser.parse_known_args()[0].size]
torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)

# %% The model from its config, frozen, with adapters
width = num_heads * head_width
shape = {"attention_head_dim": head_width, "num_attention_heads": num_heads, "caption_projection_dim": width}
model = SD3Transformer2DModel(sample_size=side, num_layers=num_layers, joint_attention_dim=128, pooled_projection_dim=64, **shape)
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights="gaussian"))
model.to(device).train()
trained = [p for p in model.parameters() if p.requires_grad]
before = sum(p.nbytes for p in model.parameters())

# %% The base in 4 bits, activations in 8
plan = pare.Plan.preset("frozen4").set("activation", "int8/64@bf16")
session = pare.apply(plan, model)
after = session.weight_bytes + sum(p.untyped_storage().nbytes() for p in model.parameters())
print(f"weights: {after / 2**20:.2f} MiB instead of {before / 2**20:.2f}; {sum(p.numel() for p in trained):,} values are trained")

# %% Flow matching: the model predicts the way from latents to noise
optimizer = torch.optim.AdamW(trained, lr=1e-3)
latents = torch.randn(batch_size, 16, side, side, device=device)
texts, pooled = torch.randn(batch_size, 32, 128, device=device), torch.randn(batch_size, 64, device=device)
for step in range(1, num_steps + 1):
    noise, times = torch.randn_like(latents), torch.rand(batch_size, device=device)
    noisy = torch.lerp(latents, noise, times[:, None, None, None])
    predicted = model(noisy, encoder_hidden_states=texts, pooled_projections=pooled, timestep=1000 * times).sample
    loss = mse_loss(predicted, noise - latents)
    stored = session.stored_bytes
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, num_steps):
        print(f"step {step}: loss {loss.item():.3f}, {stored / 2**10:.0f} KiB of packed activations")

# %% The adapters alone are saved, as diffusers loads them
with TemporaryDirectory() as folder:
    model.save_lora_adapter(folder)
session.close()
