"""A ViT with timm's names and conventions, compiled, with 8-bit optimizer state.

Modules have the names of timm's `VisionTransformer`, so the plan below fits `timm.create_model("vit_base_patch16_224")` as it is: weight
decay leaves norms and biases out, gradients are clipped, the learning rate warms up, and an average of the weights is kept. Pictures are
random. `python vit.py --size full` is ViT-B/16 on a GPU, with `session.compile()`.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paredown as pare

SIZES = {"small": ("cpu", 64, 3, 32, 4, 32, 8), "full": ("cuda", 768, 12, 224, 16, 128, 100)}  # ..., picture, patch, batch, steps
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
device, width, depth, side, patch, batch_size, num_steps = SIZES[parser.parse_known_args()[0].size]
torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)


# %% The network, with timm's names: patch_embed.proj, cls_token, pos_embed, blocks.N.attn.qkv, blocks.N.mlp.fc1, norm, head
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, width // 64 or 1, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(width), Attention(), nn.LayerNorm(width), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.cls_token = PatchEmbed(), nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


# %% A plan by module names: 4 bits in all MLPs, 8 elsewhere, and optimizer state in 8 bits; weights stay as they are
plan = pare.Plan.preset("activations8").set("blocks.*.mlp.*:input", "int4/64@bf16")
plan = plan.set("moment1", "int8/64@bf16").set("moment2", "uint8/64@bf16")
model = VisionTransformer().to(device)
x, y = torch.randn(batch_size, 3, side, side, device=device), torch.randint(10, (batch_size,), device=device)
trace = pare.trace_step(model, (x, y), loss=cross_entropy, optimizer="adamw", device=device)
sizes = [pare.footprint(trace, one).peak_bytes / 2**20 for one in (None, plan)]
print(f"predicted peak: {sizes[0]:.1f} MiB unmodified, {sizes[1]:.1f} under the plan")

# %% Parameter groups, an average of the weights, and the compiled model
session = pare.apply(plan, model)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
optimizer = pare.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(step / num_steps))
)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
step_model = session.compile() if device == "cuda" else model

# %% The loop
for step in range(1, num_steps + 1):
    loss = cross_entropy(step_model(x), y, label_smoothing=0.1)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    warmup.step()
    average.update_parameters(model)
    if step in (1, num_steps):
        print(f"step {step}: loss {loss.item():.3f}")
session.close()
