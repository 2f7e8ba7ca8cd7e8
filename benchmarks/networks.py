"""Networks that benchmarks build themselves: a Llama-shaped language model of transformers, and a U-Net of group norms and attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def llama(**changes: int) -> nn.Module:
    """transformers' Llama with random weights: 0.4B parameters unless changed, attention by torch, no key-value cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 32000,
    }
    sizes["num_key_value_heads"] = changes.get("num_attention_heads", 12)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}, use_cache=False, attn_implementation="sdpa")).train()


class Residual(nn.Module):
    """Two convolutions with group norms and SiLU, and a shortcut."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, num_out), nn.Conv2d(num_out, num_out, 3, padding=1)
        self.shortcut = nn.Conv2d(num_in, num_out, 1) if num_in != num_out else nn.Identity()
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the shortcut and the convolutions."""
        h = self.conv1(self.act(self.norm1(x)))
        return self.shortcut(x) + self.conv2(self.act(self.norm2(h)))


class PixelAttention(nn.Module):
    """Attention over all pixels, 4 heads, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x + attention(norm(x))."""
        size, width, height, columns = x.shape
        heads = self.qkv(self.norm(x)).view(size, 3, 4, width // 4, height * columns).transpose(-1, -2)
        query, key, value = heads.unbind(1)
        mixed = scaled_dot_product_attention(query, key, value).transpose(-1, -2).reshape(size, width, height, columns)
        return x + self.out(mixed)


class AttentionUNet(nn.Module):
    """A U-Net with three sizes of pictures; attention at the smallest."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in zip((width, *widths), widths, strict=False))
        self.middle = nn.Sequential(Residual(widths[-1], widths[-1]), PixelAttention(widths[-1]), Residual(widths[-1], widths[-1]))
        self.up = nn.ModuleList(Residual(a + b, b) for a, b in zip((widths[-1], *reversed(widths)), reversed(widths), strict=False))
        self.pool, self.enlarge = nn.AvgPool2d(2), nn.Upsample(scale_factor=2)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """A picture of the same size."""
        h, skipped = self.first(x), list[Tensor]()
        for layer in self.down:
            h = layer(h)
            skipped.append(h)
            h = self.pool(h)
        h = self.middle(h)
        for layer in self.up:
            h = layer(torch.cat([self.enlarge(h), skipped.pop()], 1))
        return self.last(nn.functional.silu(self.norm(h)))
