"""Long trainings of one GPT under many plans, and whether their losses differ; rows in results/train_long.json.

    python benchmarks/train_long.py --data folder --states states               # one GPU: the GPT of 30M parameters, all arms, three seeds
    python benchmarks/train_long.py --arm int4 int4-nearest --seeds 0 1 2 3 4 --states states --minutes 9
    python benchmarks/train_long.py --size 30m-source --text linux-source --data folder --states states
    python benchmarks/train_long.py --size tiny --states states                 # a GPT of 0.6M parameters on bytes, for a CPU
    python benchmarks/train_long.py --table [--size tiny]                       # the table of the rows in the file

An arm is a plan (ARMS). Runs of one seed start with the same weights and see the same batches in all arms. Seeds run one after the other,
with the baseline first. A command ends after --minutes; the same command goes on from the saved states, whose curves are those of a run in
one piece, also if it was killed. On a GPU steps are compiled; arms that pack weights are eager, since weights of compiled modules
are not packed, and --eager is for all.

Losses are compared by seed: an arm's validation loss less that of the baseline, the mean of these differences, its standard error, and the
95 % confidence interval by Student's t. The verdict says which side of 0 the interval is on and whether it is within --margin, or
how many seeds it would take to be that narrow. --stop leaves out further seeds of an arm that is decided, or has a standard error of at
most --error, after three; repeated looks make intervals a little too narrow.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language_training import (
    TOKENS,
    Corpus,
    Setting,
    Training,
    new_gpt,
    packed_texts,
    state_path,
    write_ids,
    write_tokens,
)
from loops import Log, failure, release, training_options

import paredown as pare
from paredown.models.transformer import GPTConfig
from paredown.roles import Role
from paredown.tables import Table

FILE = "train_long.json"
BASELINE = "baseline"
MOST_SEEDS = 1000
SUFFIXES = (".c", ".h", ".rst", ".txt")  # of the files that --text reads
MOST_CHARACTERS = 120_000_000  # of --text: about 30 M tokens

# --- what is trained ----------------------------------------------------------------------------------------------------

SETTING_30M = Setting(3000, 6e-4)
SETTINGS = {
    "30m": SETTING_30M,
    "30m-source": replace(SETTING_30M, text="source", config=replace(SETTING_30M.config, vocabulary=16_384)),
    "tiny": Setting(400, 2e-3, 8, 128, GPTConfig(dim=128, num_layers=3, num_heads=4, vocabulary=256, context=128), "bytes", 100),
    "quick": Setting(6, 2e-3, 2, 32, GPTConfig(dim=64, num_layers=1, num_heads=2, vocabulary=256, context=32), "bytes", 2),
}
INT8, INT4 = "int8/64@bf16", "int4/64@bf16"


def stored(format: str, rounding: str) -> Callable[[], pare.Plan]:
    """A plan that packs activations alone."""
    return lambda: pare.Plan.uniform(activation=format, rounding=rounding)


def joined(preset: str, format: str) -> Callable[[], pare.Plan]:
    """A preset with packed activations."""
    return lambda: pare.Plan.preset(preset).set("activation", format)


ARMS: dict[str, Callable[[], pare.Plan | None]] = {
    BASELINE: lambda: None,
    "lpmm": partial(pare.Plan.preset, "lpmm"),
    "lpmm-bf16-scales": lambda: pare.Plan.preset("lpmm").set("weight", INT8),
    "lpmm-moments": lambda: pare.Plan.preset("lpmm").without("weight"),
    "half": partial(pare.Plan.preset, "half"),
    "safe": partial(pare.Plan.preset, "safe"),
    "int8": stored(INT8, "nearest_even"),
    "int8-stochastic": stored(INT8, "stochastic"),
    "int4": stored(INT4, "stochastic"),
    "int4-nearest": stored(INT4, "nearest_even"),
    "int4-affine": stored("uint4/64@bf16+bf16", "stochastic"),
    "int2": partial(pare.Plan.preset, "activations2"),
    "lpmm+int8": joined("lpmm", INT8),
    "lpmm+int4": joined("lpmm", INT4),
    "half+int8": joined("half", INT8),
}
PRODUCTS = {"int8-products": "int8", "fp8-products": "e4m3fn"}  # arms whose linear layers multiply 8-bit codes
LAYERS = ("attention.qkv", "attention.project", "mlp.0", "mlp.2")  # rules with their names hold below the least width, too


ORDER = (*ARMS, *PRODUCTS)


def plan_of(arm: str, setting: Setting) -> pare.Plan | None:
    """The plan of an arm; None for the baseline."""
    if arm not in PRODUCTS:
        return ARMS[arm]()
    layers = (f"layers.{i}.{name}" for i in range(setting.config.num_layers) for name in LAYERS)
    return pare.Plan(products=tuple((f"product={layer}", PRODUCTS[arm]) for layer in layers))


def source_text(folder: Path) -> str:
    """Source code and documentation below a folder, in the order of a hash of their paths, up to MOST_CHARACTERS."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    np.random.default_rng(0).shuffle(files)  # type: ignore[arg-type]
    parts: list[str] = []
    size = 0
    for path in files:
        parts.append(path.read_text(errors="replace"))
        size += len(parts[-1])
        if size > MOST_CHARACTERS:
            break
    return "\n".join(parts)


def tokens_of(setting: Setting, options: argparse.Namespace) -> Path:
    """The file with the tokens of a setting, made where it is missing."""
    if setting.text == "bytes":
        path = options.states / "bytes.npz"
        if not path.exists():
            text = packed_texts(options.data)["sotu_en"]
            write_ids({"bytes": np.frombuffer(text.encode(), dtype=np.uint8)}, path)
    elif setting.text == "source":
        path = options.states / "source.npz"
        if not path.exists():
            if options.text is None:
                raise SystemExit("--size 30m-source reads files of --text FOLDER, such as an unpacked linux-source.")
            write_tokens({"source": source_text(options.text)}, path, setting.config.vocabulary)
    else:
        path = options.states / TOKENS
        if not path.exists():
            write_tokens(packed_texts(options.data), path)
    return path


# --- rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One finished run. `curve`: (steps, validation loss, mean training loss since the point before)."""

    size: str
    arm: str
    seed: int
    num_steps: int
    shape: tuple[int, ...] = ()
    is_compiled: bool = False
    validation_loss: float | None = None
    curve: tuple[tuple[int, float, float | None], ...] = ()
    step_seconds: float | None = None  # the mean
    num_changes: int | None = None
    error: str | None = None


Losses = Mapping[tuple[str, int], float]  # by arm and seed


def losses_of(runs: Iterable[Mapping[str, Any]], size: str, num_steps: int) -> dict[tuple[str, int], float]:
    """Validation losses of the finished runs of a size, the newest ones."""
    rows = [row for run in runs for row in run["rows"] if (row["size"], row["num_steps"]) == (size, num_steps)]
    return {(row["arm"], row["seed"]): row["validation_loss"] for row in rows if row["error"] is None}


@dataclass(frozen=True)
class Paired:
    """Differences of losses from the baseline, one for each seed that both have.

    >>> print(Paired((0.03, 0.02, 0.025)).verdict(0.01))
    loses
    >>> Paired((0.03, -0.02, 0.01)).verdict(0.01)
    'undecided: 0.01 takes about 27 seeds'
    """

    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean difference."""
        return statistics.mean(self.differences)

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite with one seed."""
        count = len(self.differences)
        return statistics.stdev(self.differences) / math.sqrt(count) if count > 1 else math.inf

    def half_width(self, count: int | None = None) -> float:
        """Half of the 95 % confidence interval, with `count` seeds of the same standard deviation."""
        from scipy.stats import t

        known = len(self.differences)
        count = count or known
        return float(t.ppf(0.975, count - 1)) * self.error * math.sqrt(known / count) if known > 1 else math.inf

    def verdict(self, margin: float) -> str:
        """What the interval says of the arm: loses, gains, within the margin, or undecided and how many seeds would make it that narrow."""
        if len(self.differences) < 2:
            return "undecided: one seed has no standard error"
        half = self.half_width()
        side = "loses" if self.mean - half > 0 else "gains" if self.mean + half < 0 else ""
        if abs(self.mean) + half <= margin:
            return f"{side or 'differs'} by less than {margin:g}"
        if side:
            return side
        seeds = next((n for n in range(2, MOST_SEEDS) if self.half_width(n) <= margin), MOST_SEEDS)
        return f"undecided: {margin:g} takes about {seeds} seeds"

    def is_decided(self, margin: float, error: float) -> bool:
        """Whether more seeds are not needed."""
        return len(self.differences) >= 3 and (self.error <= error or not self.verdict(margin).startswith("undecided"))


def paired(losses: Losses, arm: str) -> Paired:
    """The differences of an arm from the baseline."""
    seeds = sorted(seed for name, seed in losses if name == arm and (BASELINE, seed) in losses)
    return Paired(tuple(losses[arm, seed] - losses[BASELINE, seed] for seed in seeds))


def table_of(losses: Losses, margin: float) -> Table:
    """One line for each arm."""
    lines: list[tuple[str, ...]] = []
    for arm in sorted({arm for arm, _ in losses}, key=ORDER.index):
        own = [loss for (name, _), loss in losses.items() if name == arm]
        found = paired(losses, arm)
        cells = ("", "", "")
        if arm != BASELINE and found.differences:
            cells = (f"{found.mean:+.4f} ({found.error:.4f})", f"{found.half_width():.4f}", found.verdict(margin))
        lines.append((arm, str(len(own)), f"{statistics.mean(own):.4f}", *cells))
    head = ("arm", "seeds", "validation loss", "difference (standard error)", "95 %, +-", f"verdict at {margin:g}")
    return Table(head, lines, right=range(1, 5))


# --- the command --------------------------------------------------------------------------------------------------------


def packs_weights(plan: pare.Plan | None) -> bool:
    """Whether a plan packs weights, which compiled modules would leave unpacked."""
    return plan is not None and plan.find(("",), Role.WEIGHT).format is not None


def training_of(options: argparse.Namespace, setting: Setting, arm: str, seed: int, device: str) -> Training:
    """The training of one arm and seed."""
    plan = plan_of(arm, setting)
    is_compiled = device == "cuda" and not options.eager and not packs_weights(plan)
    path = state_path(options.states, options.size, arm, seed)
    return Training(setting, plan, seed, device, path, lambda: new_gpt(setting.config, seed, device), is_compiled)


def run_all(options: argparse.Namespace, device: str, log: Log) -> bool:
    """Train what is missing, seed after seed; whether all of it is done."""
    setting = SETTINGS[options.size]
    corpus = Corpus.read(tokens_of(setting, options), setting, device)
    deadline = time.monotonic() + 60 * options.minutes
    losses = losses_of(log.runs, options.size, setting.num_steps)
    arms = list(dict.fromkeys((BASELINE, *options.arm)))
    for seed, arm in ((seed, arm) for seed in options.seeds for arm in arms):
        is_known = (arm, seed) in losses
        if is_known or (options.stop and arm != BASELINE and paired(losses, arm).is_decided(options.margin, options.error)):
            continue
        training = training_of(options, setting, arm, seed, device)
        row = Row(options.size, arm, seed, setting.num_steps, is_compiled=training.is_compiled)
        torch.compiler.reset()
        release(device)
        try:
            fields = training.run(corpus, deadline)
        except Exception as error:
            fields = {"error": failure(error)}
        if fields is None:
            return False
        row = replace(row, **fields)
        log.add(row)
        print(
            f"{arm:20s} seed {seed}  {row.error or f'loss {row.validation_loss:.4f}, {row.step_seconds:.3f} s a step'}",
            flush=True,
        )
        if row.validation_loss is not None:
            losses[arm, seed] = row.validation_loss
    return True


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = training_options(__doc__)
    parser.add_argument("--size", choices=tuple(SETTINGS), help="30m on a GPU, tiny on a CPU")
    parser.add_argument("--arm", nargs="+", choices=ORDER, default=ORDER, help="beside the baseline; all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--states", type=Path, help="folder of saved states, from which a later command goes on")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which the command saves its state and ends")
    parser.add_argument("--text", type=Path, help="folder of source code, for the sizes that read it")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--margin", type=float, default=0.01, help="difference of losses that matters")
    parser.add_argument("--error", type=float, default=0.003, help="standard error that is small enough for --stop")
    parser.add_argument("--stop", action="store_true", help="leave out seeds of arms that are decided")
    parser.add_argument("--table", action="store_true", help="print the table of the file, train nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, print the table; 75 if --minutes ended before the last step."""
    options = parsed(arguments)
    device = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    options.size = "quick" if options.quick else options.size or ("30m" if device == "cuda" else "tiny")
    log = Log(FILE, device, options, continues=True)
    is_done = True
    if not options.table:
        with tempfile.TemporaryDirectory() as folder:
            options.states = options.states or Path(folder)
            is_done = run_all(options, device, log)
    losses = losses_of(log.runs, options.size, SETTINGS[options.size].num_steps)
    print(table_of(losses, options.margin), flush=True)
    if not is_done:
        print("The time is over: the same command goes on from the saved states.", flush=True)
    return 0 if is_done else 75


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
