"""What number formats do to a real tensor: `make formats` runs this.

A small network learns handwritten digits; the gradient of its first layer is then stored in a dozen formats. The table says what
each one costs and loses, and demo/formats.svg draws it. Errors are |stored - exact| / |exact| over the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scatter import Point, chart
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paredown as pare

SHOWN = (
    *("fp32", "bf16", "fp16", "int8_block", "mxfp8_e4m3", "e5m2", "e4m3fn", "mxfp6_e2m3"),
    *("uint4_affine", "nf4_block", "nvfp4", "mxfp4", "int4_block", "uint2_affine", "int2_block"),
)
OUTPUT = Path("demo/formats.svg")
STEPS = 400
NUM_TRAIN = 1500
NUM_DRAWS = 64


@dataclass(frozen=True)
class Measured:
    """One format on one tensor."""

    name: str
    format: pare.Format
    nbytes: int
    bits: float  # per value, scales included
    nearest_error: float
    stochastic_error: float


def main() -> None:
    """Train, measure, print the table, write the chart, say what was learnt."""
    console = Console(highlight=False)
    model, accuracy = trained_model(console)
    gradient = first_gradient(model)
    console.print(
        f"A network that reads {accuracy:.0%} of unseen digits right. The gradient of its first layer: {gradient.numel()} values, "
        f"{gradient.nbytes} bytes as float32, half of them below {gradient.abs().median():.1g} in magnitude.\n"
    )
    rows = [measure(name, gradient) for name in SHOWN]
    console.print(table(rows, gradient, wide=console.width >= 110))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(drawing(rows, gradient))
    console.print(lesson({row.name: row for row in rows}, gradient))
    console.print(f"\nThe chart is in [bold]{OUTPUT}[/bold].")


def digits() -> tuple[Tensor, Tensor]:
    """The images that the package carries, (1797, 64) from 0 to 1, and which digit each shows."""
    with (files("paredown") / "data" / "digits.npz").open("rb") as file:
        data = np.load(file)
        return torch.from_numpy(data["x"]).flatten(1) / 16, torch.from_numpy(data["y"]).long()


def trained_model(console: Console) -> tuple[nn.Module, float]:
    """A network after STEPS steps, and the share of unseen digits that it reads right."""
    images, labels = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in track(range(STEPS), "Training on handwritten digits", console=console, transient=True):
        batch = torch.randint(NUM_TRAIN, (128,))
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    right = model(images[NUM_TRAIN:]).argmax(1) == labels[NUM_TRAIN:]
    return model, right.float().mean().item()


def first_gradient(model: nn.Module) -> Tensor:
    """The gradient of the first layer's weight over all training images, (256, 64)."""
    images, labels = digits()
    weight = next(model.parameters())
    (gradient,) = torch.autograd.grad(cross_entropy(model(images[:NUM_TRAIN]), labels[:NUM_TRAIN]), weight)
    return gradient


def measure(name: str, x: Tensor) -> Measured:
    """What the catalog's format `name` costs and loses on `x`."""
    packed = pare.encode(x, pare.CATALOG[name])
    stochastic = pare.round_trip(x, packed.format, rounding="stochastic", seed=1)
    bits = 8 * packed.nbytes / x.numel()
    return Measured(name, packed.format, packed.nbytes, bits, error(packed.decode(), x), error(stochastic, x))


def error(stored: Tensor, exact: Tensor) -> float:
    """|stored - exact| / |exact|."""
    return ((stored - exact).norm() / exact.norm()).item()


def table(rows: list[Measured], x: Tensor, *, wide: bool) -> Table:
    """The rows as a table; the names of the catalog if they fit the width."""
    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1) if wide else (0, 1, 0, 0))
    for heading in (("name",) if wide else ()) + ("format",):
        out.add_column(heading, no_wrap=True)
    for heading in ("bits", "bytes", "ratio", "error,\nnearest", "error,\nstochastic"):
        out.add_column(heading, justify="right")
    out.add_column("magnitudes", no_wrap=True)
    for row in rows:
        cells = (f"{row.bits:.2f}", str(row.nbytes), f"{x.nbytes / row.nbytes:.1f}x")
        errors = (percent(row.nearest_error), percent(row.stochastic_error))
        out.add_row(*((row.name,) if wide else ()), str(row.format), *cells, *errors, magnitudes(row.format))
    return out


def percent(share: float) -> str:
    """Two digits that count, red from a half on."""
    text = f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
    return f"[red]{text}[/red]" if share > 0.5 else text


def magnitudes(format: pare.Format) -> str:
    """The smallest and largest magnitude that a format can say, zero aside."""
    suffix = (" x scale" if format.scale else "") + ("+min" if format.minimum else "")
    largest = format.element.max_value
    return f"{format.element.smallest:.2g}..{f'{largest:g}' if largest < 1e5 else f'{largest:.2g}'}{suffix}"


def drawing(rows: list[Measured], x: Tensor) -> str:
    """The SVG of all rows that lose anything."""
    return chart(
        [Point(row.name, row.bits, row.nearest_error) for row in rows if row.nearest_error > 0],
        title="What a format costs, and what it loses",
        subtitle=f"A gradient of {x.numel()} values, rounded to nearest. Blue: no other format is both smaller and closer.",
        x_title="bits per value, scales included",
        y_title="relative error",
    )


def lesson(by_name: dict[str, Measured], x: Tensor) -> str:
    """What these numbers teach, in two sentences."""
    plain, scaled = by_name["e4m3fn"], by_name["int8_block"]
    lost = (x.abs() <= plain.format.element.smallest / 2).float().mean().item()
    draws = [pare.round_trip(x, plain.format, rounding="stochastic", seed=seed) for seed in range(NUM_DRAWS)]
    average_error = error(torch.stack(draws).mean(0), x)
    return (
        f"\n{lost:.0%} of this gradient rounds to zero in {plain.format}, which is off by {plain.nearest_error:.0%}; with a scale "
        f"for every {scaled.format.block} values, {scaled.format} is off by {scaled.nearest_error:.1%}, for "
        f"{scaled.bits - plain.bits:.2g} bits more. Stochastic rounding is worse on one value and right on average: "
        f"the mean of {NUM_DRAWS} such roundings to {plain.format} is off by {average_error:.0%}."
    )


if __name__ == "__main__":
    main()
