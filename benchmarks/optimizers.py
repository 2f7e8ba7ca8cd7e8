"""The optimizers that bench_optim compares: torch's fused ones, the tiers of paredown, and other libraries where they can be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paredown.optim import SGD, AdamW, Lion

PEERS = Path(__file__).parent.parent / "peers"  # other libraries, unpacked; looked at after what is installed

Maker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Way:
    """One optimizer over parameters of one dtype; with a tier, in a session."""

    library: str
    rule: str
    make: Maker
    dtype: torch.dtype = torch.bfloat16
    tier: str | None = None
    release: bool = False
    only: str | None = None  # the one job that it takes part in

    @property
    def name(self) -> str:
        """For tables and `--way`."""
        kind = f"{self.tier}{'+release' if self.release else ''}" if self.tier else str(self.dtype).removeprefix("torch.")
        return f"{self.rule} {self.library} {kind}"


def peer(module: str, name: str, **options: Any) -> Maker:
    """Another library's optimizer, imported when it is made."""

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if str(PEERS) not in sys.path and PEERS.is_dir():
            sys.path.append(str(PEERS))
        return getattr(import_module(module), name)(params, **options)

    return make


SGDM: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 1e-2}
LION: dict[str, Any] = {"lr": 1e-5, "weight_decay": 1e-2}
OURS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGDM": partial(SGD, **SGDM),
    "AdamW": partial(AdamW, **ADAMW),
    "Lion": partial(Lion, **LION),
}


def peer_versions() -> dict[str, str]:
    """Of what lies in the folder."""
    return {found.metadata["Name"]: found.version for found in metadata.distributions(path=[str(PEERS)])}


def ours(rule: str, tier: str, *, release: bool = False) -> Way:
    """A tier of paredown."""
    return Way("paredown", rule, partial(OURS[rule], release=release), tier=tier, release=release)


TORCH = tuple(
    Way("torch fused", rule, partial(maker, fused=True, **options), dtype)
    for rule, maker, options in (("SGDM", torch.optim.SGD, SGDM), ("AdamW", torch.optim.AdamW, ADAMW))
    for dtype in (torch.float32, torch.bfloat16)
)
ALONE = tuple(ours(rule, tier) for rule in OURS for tier in ("safe", "half", "lpmm", "lpmm4"))
RELEASED = tuple(ours(rule, tier, release=True) for rule in ("SGDM", "AdamW") for tier in ("half", "lpmm", "lpmm4"))
OTHERS = (
    Way("bitsandbytes 8bit", "SGDM", peer("bitsandbytes.optim", "SGD8bit", **SGDM)),
    Way("bitsandbytes 8bit", "AdamW", peer("bitsandbytes.optim", "AdamW8bit", **ADAMW)),
    Way("bitsandbytes 8bit", "Lion", peer("bitsandbytes.optim", "Lion8bit", **LION)),
    Way("FlashOptim", "SGDM", peer("flashoptim", "FlashSGD", **SGDM)),
    Way("FlashOptim", "AdamW", peer("flashoptim", "FlashAdamW", **ADAMW)),
    Way("FlashOptim", "Lion", peer("flashoptim", "FlashLion", **LION)),
    Way("torchao 8bit", "AdamW", peer("torchao.optim", "AdamW8bit", bf16_stochastic_round=True, **ADAMW), only="355M"),
)
TRAINED = (*(ours("AdamW", tier) for tier in ("safe", "half", "lpmm", "lpmm4")), ours("SGDM", "lpmm"))
