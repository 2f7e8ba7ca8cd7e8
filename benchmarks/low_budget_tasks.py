"""Tasks and plans of `collect_low_budgets.py`: two sets, `activations` and `state`.

`activations`: deep and narrow networks whose weights, gradients and moments are 0.3 % of the step. 300 steps, learning rates chosen at
full precision. What is chosen is how to store activations.

`state`: networks whose weights, gradients and moments are 34 to 59 % of the step, so that 30 % of the memory forces a choice between
narrower state and narrower activations. By arithmetic, on each of these networks `lpmm4` fits 30 % with activations in 2 bits and does not
with 4 bits; with weights or gradients in 4 bits, activations of 4 or 8 bits fit. Each network is trained from new weights at a high
learning rate, and fine-tuned at a low one from weights that were trained on other data. Learning rates are fixed. The loss decides, not the
share of wrong answers: between plans of one seed its noise is small beside their differences on the Transformers (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True)
class TaskSet:
    """Tasks (data, options), uniform plans (format of activations or None, tier), templates, and how they are trained."""

    sweep: str
    tasks: tuple[tuple[str, Options], ...]
    uniform: tuple[tuple[str | None, str], ...]
    templates: tuple[str, ...]
    starts: Mapping[str, str] = field(default_factory=dict[str, str])  # file of weights -> the task that they are trained on
    most_share: float = 1.0  # plans with a larger share of the baseline's peak are left out
    has_tf32: bool = False  # matrix products in TF32
    num_first: int = 100  # tasks of which all seeds run before those of the others


# --- activations ------------------------------------------------------------------------------------------------------

CNN = {"batch": 256, "model": "resnet50", "side": 32, "steps": 300, "width": 8}
MOBILE = {"batch": 256, "model": "mobilenet", "side": 32, "steps": 300, "width": 0.25}
VIT = {"batch": 256, "dim": 64, "model": "vit", "num_layers": 12, "side": 32, "steps": 300}
GPT = {"batch": 128, "dim": 64, "length": 128, "model": "gpt", "num_layers": 12, "steps": 300}
RATES = {"resnet50": (0.03, 0.1, 0.3), "mobilenet": (0.03, 0.1, 0.3), "vit": (5e-4, 1e-3, 2e-3), "gpt": (1e-3, 2e-3, 4e-3)}
EIGHT, FOUR, FOUR_AFFINE, FLOAT4 = "int8/64@bf16", "int4/64@bf16", "uint4/64@bf16+bf16", "e2m1fn/32@e8m0"
TWO, TWO_LONG, TWO_SHORT, TERNARY = "uint2/64@bf16+bf16", "uint2/256@bf16+bf16", "uint2/16@bf16+bf16", "int2/64@bf16"

ACTIVATIONS = TaskSet(
    "low_budgets",
    (
        *(("images:cifar10.npz", how) for how in (CNN, VIT)),
        *(("images:fashion_mnist.npz", how) for how in (CNN, VIT)),
        *((f"text:{name}_2mb.txt.gz", GPT) for name in ("sotu_en", "pydoc_en")),
        ("images:bangla_digits.npz", CNN),
        ("images:mnist.npz", VIT),
        *((f"images:{name}.npz", MOBILE) for name in ("cifar10", "fashion_mnist", "tiny_imagenet20", "mnist")),
        ("images:tiny_imagenet20.npz", CNN),
    ),
    (
        *((FOUR, tier) for tier in ("full", "lpmm", "lpmm4")),
        *((TWO, tier) for tier in ("full", "lpmm", "lpmm4")),
        *((format, "full") for format in (FOUR_AFFINE, FLOAT4, TWO_SHORT, TWO_LONG, TERNARY)),
        (TERNARY, "lpmm4"),
    ),
    ("assign 30% size", *(f"assign {budget}% role" for budget in (20, 25, 30, 23))),
)

# --- state ------------------------------------------------------------------------------------------------------------

# below lpmm4 (3.11 bytes a parameter with AdamW): weights or gradients in 4 bits, 2.61; both, 2.11; both with moments in 8 bits, 3.11
WEIGHT4, GRADIENT4, BOTH4, MOMENTS8 = "lpmm4 weight4", "lpmm4 gradient4", "lpmm4 weight4 gradient4", "lpmm weight4 gradient4"
WIDE_CNN = {"autocast": "bf16", "batch": 64, "model": "resnet50", "side": 32, "steps": 120, "width": 96}
WIDE_VIT = {"batch": 128, "dim": 768, "model": "vit", "num_heads": 12, "num_layers": 6, "patch": 8, "side": 32, "steps": 120}
WIDE_GPT = {"batch": 14, "dim": 768, "length": 128, "model": "gpt", "num_heads": 12, "num_layers": 6, "steps": 120}
START_STEPS = 400


def _text(options: Options) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(options.items()))


def _start(data: str, how: Options, lr: float) -> str:
    return f"{data}#{_text({**how, 'lr': lr, 'steps': START_STEPS})}"


STATE = TaskSet(
    "low_budgets_state",
    (
        ("text:sotu_en_2mb.txt.gz", {**WIDE_GPT, "lr": 5e-4}),
        ("images:cifar10.npz", {**WIDE_CNN, "lr": 0.1}),
        ("images:fashion_mnist.npz", {**WIDE_VIT, "lr": 3e-4}),
        ("text:pydoc_en_2mb.txt.gz", {**WIDE_GPT, "lr": 3e-5, "start": "gpt_sotu_en.pt"}),
        ("images:tiny_imagenet20.npz", {**WIDE_VIT, "lr": 3e-5, "start": "vit_cifar100.pt"}),
        ("images:fashion_mnist.npz", {**WIDE_CNN, "lr": 0.2}),
        ("text:sotu_en_2mb.txt.gz", {**WIDE_GPT, "lr": 3e-5, "start": "gpt_pydoc_en.pt"}),
        ("images:trashnet.npz", {**WIDE_CNN, "lr": 0.01, "start": "resnet50_cifar100.pt"}),
        ("text:pydoc_en_2mb.txt.gz", {**WIDE_GPT, "lr": 5e-4}),
        ("images:cifar10.npz", {**WIDE_VIT, "lr": 3e-5, "start": "vit_cifar100.pt"}),
        ("images:bangla_digits.npz", {**WIDE_VIT, "lr": 3e-4}),
        ("images:mnist.npz", {**WIDE_CNN, "lr": 0.1}),
    ),
    (
        *((FOUR, tier) for tier in (BOTH4, WEIGHT4, GRADIENT4)),
        *((TWO, tier) for tier in ("lpmm4", WEIGHT4, GRADIENT4, MOMENTS8)),
        *((format, BOTH4) for format in (EIGHT, FOUR_AFFINE)),
        (TERNARY, "lpmm4"),
    ),
    ("assign 30% role", "assign 30% size"),
    starts={
        "gpt_sotu_en.pt": _start("text:sotu_en_2mb.txt.gz", WIDE_GPT, 1e-3),
        "gpt_pydoc_en.pt": _start("text:pydoc_en_2mb.txt.gz", WIDE_GPT, 1e-3),
        "vit_cifar100.pt": _start("images:cifar100.npz", WIDE_VIT, 5e-4),
        "resnet50_cifar100.pt": _start("images:cifar100.npz", WIDE_CNN, 0.1),
    },
    most_share=0.3,
    has_tf32=True,
    num_first=10,
)

SETS: Mapping[str, TaskSet] = MappingProxyType({"activations": ACTIVATIONS, "state": STATE})
TINY = {"batch": 8, "steps": 4}
TINY_WIDE: Mapping[str, Options] = MappingProxyType(
    {name: {"dim": 64, "num_heads": 4, "num_layers": 2} for name in ("vit", "gpt")} | {"resnet50": {"width": 8}}
)


def rates_of(how: Options) -> tuple[float, ...]:
    """The learning rates that are tried at full precision: that of the task alone where it has one."""
    return (how["lr"],) if "lr" in how else RATES[how["model"]]


def tiny(how: Options) -> dict[str, Any]:
    """The task's options with sizes for a CPU."""
    return {**how, **TINY_WIDE.get(how["model"], {}), **TINY}
