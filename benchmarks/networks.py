"""Networks that benchmarks build themselves: language models (Llama-shaped, selective scan, LSTM), a U-Net, a graph network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu, softplus


class Answer(NamedTuple):
    """What a network returns that computes its own loss."""

    loss: Tensor
    logits: Tensor


def answer(logits: Tensor, labels: Tensor) -> Answer:
    """The mean cross entropy over all positions beside the logits."""
    return Answer(cross_entropy(logits.flatten(0, -2), labels.flatten()), logits)


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


# --- selective scan ---------------------------------------------------------------------------------------------------------------


def selective_scan(x: Tensor, decay: Tensor, write: Tensor, read: Tensor, chunk: int = 64) -> Tensor:
    """y[t] = h[t] read[t] with h[t] = exp(decay[t]) h[t - 1] + x[t] write[t]^T, in chunks, as Mamba-2 computes it.

    x (batch, time, heads, width), decay (batch, time, heads) float32, write and read (batch, time, states) -> y like x.
    """
    x, decay, write, read = (t.unflatten(1, (-1, chunk)) for t in (x, decay, write, read))
    total = decay.cumsum(2)  # (batch, chunks, chunk, heads)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)[:, :, None]
    between = (total[:, :, :, None] - total[:, :, None]).masked_fill(later, -torch.inf).exp()
    scores = torch.einsum("bctn,bcsn->bcts", read, write)
    within = torch.einsum("bcts,bctsh,bcshp->bcthp", scores, between, x)
    written = torch.einsum("bcsn,bcsh,bcshp->bchpn", write, (total[:, :, -1:] - total).exp(), x)
    end = total[:, :, -1].cumsum(1)  # (batch, chunks, heads)
    start = end - total[:, :, -1]
    not_before = torch.ones(end.shape[1], end.shape[1], dtype=torch.bool, device=x.device).triu()[:, :, None]
    carried = (start[:, :, None] - end[:, None]).masked_fill(not_before, -torch.inf).exp()
    state = torch.einsum("bczh,bzhpn->bchpn", carried, written)  # at the start of each chunk
    return (within + torch.einsum("bctn,bcth,bchpn->bcthp", read, total.exp(), state)).flatten(1, 2)


class ScanLayer(nn.Module):
    """A selective scan with a short convolution before and a gate after it, added to the input; steps and decays in float32."""

    def __init__(self, width: int, num_heads: int, num_states: int) -> None:
        super().__init__()
        self.sizes = inner, _, _ = (2 * width, 2 * width + 2 * num_states, num_heads)
        self.num_states, self.num_heads = num_states, num_heads
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(self.sizes[1], self.sizes[1], 4, padding=3, groups=self.sizes[1])
        self.rate, self.step = nn.Parameter(torch.zeros(num_heads)), nn.Parameter(torch.full((num_heads,), -4.0))
        self.norm2, self.outputs = nn.LayerNorm(inner), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, time, width) -> the same shape; a step draws from earlier ones only."""
        gate, mixed, step = self.inputs(self.norm(x)).split(self.sizes, -1)
        mixed = silu(self.conv(mixed.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))
        values, write, read = mixed.split((self.sizes[0], self.num_states, self.num_states), -1)
        step = softplus(step.float() + self.step)
        heads = values.unflatten(-1, (self.num_heads, -1))
        y = selective_scan(heads * step[..., None], -self.rate.exp() * step, write, read)
        return x + self.outputs(self.norm2((y + heads).flatten(2) * silu(gate)))


class ScanLanguageModel(nn.Module):
    """Selective scans between an embedding and a head."""

    def __init__(
        self, width: int = 1024, num_layers: int = 12, num_heads: int = 32, num_states: int = 64, vocabulary: int = 32000
    ) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(ScanLayer(width, num_heads, num_states) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Answer:
        """The loss of `labels`, and the logits."""
        return answer_of_layers(self, input_ids, labels)


def answer_of_layers(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Answer:
    """The answer of a language model that has an embedding, layers, a norm and a head."""
    h = model.embedding(input_ids)
    for layer in model.layers:
        h = layer(h)
    return answer(model.head(model.norm(h)), labels)


# --- an LSTM, and a graph ---------------------------------------------------------------------------------------------------------


class LstmLanguageModel(nn.Module):
    """Two layers of LSTM between an embedding and a head."""

    def __init__(self, width: int = 1024, vocabulary: int = 16384) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Answer:
        """The loss of `labels`, and the logits."""
        h, _ = self.lstm(self.embedding(input_ids))
        return answer(self.head(h), labels)


class GraphLayer(nn.Module):
    """A message along each edge from both of its nodes, summed at its target, added to the nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.message, self.update = nn.LayerNorm(width), nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """h (nodes, width) -> the same shape."""
        nodes = self.norm(h)
        messages = silu(self.message(torch.cat([nodes[source], nodes[target]], -1)))
        received = torch.zeros(h.shape, dtype=messages.dtype, device=h.device).index_add(0, target, messages)
        return h + self.update(silu(received))


class GraphNetwork(nn.Module):
    """Messages between nodes, and a class for each node."""

    def __init__(self, width: int = 128, num_layers: int = 4, num_inputs: int = 64, num_classes: int = 40) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(num_inputs, width), nn.Linear(width, num_classes)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(num_layers))

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Answer:
        """nodes (nodes, inputs), edges (2, edges), labels (nodes,) -> the loss and the logits."""
        h = self.first(nodes)
        for layer in self.layers:
            h = layer(h, edges[0], edges[1])
        return answer(self.last(h), labels)
