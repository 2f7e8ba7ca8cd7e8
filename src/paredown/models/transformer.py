"""ViT for images and GPT for text, which use the same Transformer layer, and a language model on torch's LSTM.

    x <- x + project(attention(norm1(x)));   x <- x + mlp(norm2(x))

Attention is torch's scaled_dot_product_attention. Shapes are those of GPT-2 and ViT-B/16 as published, module names are not. Text models
return logits, and with targets also the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Scored(NamedTuple):
    """What a language model returns if it gets targets: logits (num_texts, length, vocabulary) and their mean loss."""

    logits: Tensor
    loss: Tensor


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token: logits (..., vocabulary) against targets (...)."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def scored(logits: Tensor, targets: Tensor | None) -> Tensor | Scored:
    """Return `logits` alone if `targets` is None, and otherwise the logits with their mean loss."""
    return logits if targets is None else Scored(logits, token_loss(logits, targets))


# --- the Transformer layer, ViT and GPT ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerConfig:
    """The sizes of one Transformer layer. `gelu`: "none" is the exact function, "tanh" its approximation in GPT-2."""

    dim: int
    num_heads: int
    dropout: float
    gelu: str
    epsilon: float


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a ViT; the defaults are ViT-B/16 with 86,567,656 parameters."""

    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.0
    picture: int = 224
    patch: int = 16
    num_classes: int = 1000


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT; the defaults are GPT-2, 124,439,808 parameters. `tied`: head and embedding share weights."""

    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.0
    vocabulary: int = 50257
    context: int = 1024
    tied: bool = True


@final
class Attention(nn.Module):
    """Multi-head scaled dot-product attention; with `causal`, each position attends to itself and earlier ones."""

    def __init__(self, config: LayerConfig, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal, self.dropout = config.num_heads, causal, config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.project = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention, a tensor of the shape of x, (num, length, dim)."""
        num, length, dim = x.shape
        heads = self.qkv(x).view(num, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (num, num_heads, length, dim / num_heads)
        dropped = self.dropout if self.training else 0.0
        out = scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=self.causal)
        return self.project(out.transpose(1, 2).reshape(num, length, dim))


@final
class TransformerLayer(nn.Module):
    """A Transformer layer with norms first (pre-norm): x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LayerConfig, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(config.dim, eps=config.epsilon) for _ in range(2))
        self.attention = Attention(config, causal=causal)
        expand, shrink = nn.Linear(config.dim, 4 * config.dim), nn.Linear(4 * config.dim, config.dim)
        self.mlp = nn.Sequential(expand, nn.GELU(config.gelu), shrink)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, a tensor of the shape of x, (num, length, dim)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


@final
class ViT(nn.Module):
    """A vision Transformer: patch embedding, class token, Transformer layers, and a linear head on the class token."""

    def __init__(self, config: ViTConfig | None = None) -> None:
        super().__init__()
        config = config or ViTConfig()
        dim, patch = config.dim, config.patch
        layer = LayerConfig(dim, config.num_heads, config.dropout, gelu="none", epsilon=1e-6)
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (config.picture // patch) ** 2, dim))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.Sequential(*(TransformerLayer(layer, causal=False) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(dim, eps=layer.epsilon)
        self.head = nn.Linear(dim, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (num_pictures, num_classes) of pictures (num_pictures, 3, height, width)."""
        x = self.patches(x).flatten(2).transpose(1, 2)  # (num_pictures, num_patches, dim)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = self.layers(self.dropout(x + self.positions))
        return self.head(self.norm(x)[:, 0])


@final
class GPT(nn.Module):
    """A language model with causal attention, which computes logits of the next token."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        layer = LayerConfig(config.dim, config.num_heads, config.dropout, gelu="tanh", epsilon=1e-5)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.Sequential(*(TransformerLayer(layer, causal=True) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.dim, eps=layer.epsilon)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.apply(_normal_weights)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | Scored:
        """Return logits (num_texts, length, vocabulary) of tokens (num_texts, length), and the loss with `targets`."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.layers(self.dropout(self.tokens(ids) + self.positions(positions)))
        return scored(self.head(self.norm(x)), targets)


def _normal_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and isinstance(module.bias, nn.Parameter):
        nn.init.zeros_(module.bias)


# --- a language model on torch's LSTM --------------------------------------------------------------------------------


@final
class LSTMModel(nn.Module):
    """A language model of an embedding, LSTM layers and a linear head, which computes logits of the next token."""

    def __init__(self, *, vocabulary: int = 10_000, dim: int = 512, num_layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | Scored:
        """Return logits (num_texts, length, vocabulary) of tokens (num_texts, length), and the loss with `targets`."""
        hidden, _ = self.lstm(self.dropout(self.tokens(ids)))
        return scored(self.head(self.dropout(hidden)), targets)
