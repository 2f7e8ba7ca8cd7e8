"""The sweeps behind the shipped priors, written as files that `paredown sweep run` takes; sizes and steps stand here alone.

    python benchmarks/make_sweeps.py rates                        sweeps/rates_*.toml: learning rates to try at full precision
    python benchmarks/make_sweeps.py choose --store trials.db     sweeps/rates.json: of each task the rate with the least error
    python benchmarks/make_sweeps.py sweeps                       all other sweeps, with those rates in the names of their tasks

`benchmarks/sweeps/README.md` has the whole way from here to the shipped files.
`--tiny` writes sweeps of two tasks, four plans and five steps.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paredown.formats.catalog import TIERS
from paredown.simulate.peppp import HIGH_FORMATS, LOW_FORMATS
from paredown.study.sweeps.export import rows
from paredown.study.sweeps.store import Store

FOLDER = Path(__file__).parent / "sweeps"
PICTURES = (  # those with ten classes first: they share captured graphs
    "mnist", "fashion_mnist", "cifar10", "bangla_digits", "devanagari_digits", "telugu_digits", "sk_digits", "cifar100",
    "pneumonia_mnist", "tiny_imagenet20", "trashnet",
)  # fmt: skip
TEXTS = ("sotu_en", "pydoc_en")
SUPERCLASSES = range(20)
FOR_RATES = {"sumlast18": 1.5}  # by which trainings are longer that try rates
OF_VIT = ("mnist", "fashion_mnist")  # where a ViT learns from so few pictures

# --- how tasks are trained ----------------------------------------------------------------------------------------------
SIMULATED: Mapping[str, Any] = {"batch": 32, "loss_factor": 1000, "model": "sumlast18", "side": 32, "steps": 200, "width": 16}
LONGER = {"cifar10": 400, "cifar100": 400}  # steps of simulated tasks that learn slowly
CNN: Mapping[str, Any] = {"batch": 768, "model": "resnet18", "side": 32, "steps": 60, "width": 16}
VIT: Mapping[str, Any] = {"batch": 768, "model": "vit", "side": 32, "steps": 60, "dim": 64, "num_layers": 4}
GPT: Mapping[str, Any] = {"batch": 384, "model": "gpt", "length": 128, "steps": 60, "dim": 64, "num_layers": 4}
RATES = {"sumlast18": (0.02, 0.06, 0.2), "resnet18": (0.05, 0.15, 0.4), "vit": (0.001, 0.003, 0.01), "gpt": (0.001, 0.003, 0.01)}

# --- plans --------------------------------------------------------------------------------------------------------------
BITS = ("bf16", "int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16")
AFFINE, FLOAT8, FLOAT4 = "uint4/64@bf16+bf16", "e4m3fn/64@bf16", "e2m1fn/32@e8m0"
Table = Mapping[str, Any]
STORED: Sequence[Table] = (
    {},
    *({"preset": name} for name in ("half", "lpmm", "lpmm4")),
    *({"activation": list(BITS), **TIERS[tier]} for tier in ("full", "half", "lpmm")),
    {"activation": [AFFINE, FLOAT8, FLOAT4]},
    {"activation": AFFINE, **TIERS["lpmm"]},
    {"assign": ["40%", "50%", "70%"], "method": ["role", "size"]},
)
STORED_AGAIN: Sequence[Table] = (  # what fits into 40 %, and what it is held against
    {},
    *({"activation": list(BITS[2:]), **TIERS[tier]} for tier in ("full", "half", "lpmm")),
    {"activation": [AFFINE, FLOAT4]},
    {"assign": ["40%"], "method": ["role"]},
)
STORED_FITS: Sequence[Table] = (  # the rest of what fits into 40 %
    *({"activation": BITS[1], **TIERS[tier]} for tier in ("half", "lpmm")),
    {"activation": AFFINE, **TIERS["lpmm"]},
    {"assign": ["40%"], "method": ["size"]},
)
PEPPP: Sequence[Table] = ({"peppp_low": list(LOW_FORMATS), "peppp_high": list(HIGH_FORMATS)},)
PEPPP_AGAIN: Sequence[Table] = ({}, {"peppp_low": ["e3m1", "e3m4", "e4m2", "e5m2"], "peppp_high": ["e6m7", "e8m11"]})
PEPPP_FITS: Sequence[Table] = (  # the rest of what fits into 22 %, twins once
    {"peppp_low": ["e3m1"], "peppp_high": ["e6m9"]},
    {"peppp_low": ["e3m2", "e4m1"], "peppp_high": ["e6m7", "e6m9", "e6m11"]},
)
SHARE = 0.38  # of superclass rows, so that each has 30 % at least; cheap plans first: twice that at most
TINY = 5  # steps
DEVICE = "cuda"  # for which stored tasks are traced, and where they run


def task(data: str, how: Mapping[str, Any], **more: Any) -> str:
    """A task by name, its options in order."""
    options = {**how, **more}
    if options["steps"] == TINY:
        options |= {"batch": 16, "side": 8} if "side" in options else {"batch": 4}
    file = f"text:{data}.txt.gz" if data in TEXTS else f"images:{data}.npz"
    return f"{file}#" + ",".join(f"{name}={value}" for name, value in sorted(options.items()))


def stored_tasks() -> list[tuple[str, Mapping[str, Any]]]:
    """Data and how it is trained."""
    found = [(data, VIT if data in OF_VIT else CNN) for data in PICTURES]
    return [*found, *((data, GPT) for data in TEXTS)]


def simulated_tasks() -> list[tuple[str, Mapping[str, Any]]]:
    """The complete rows, then the superclasses."""
    found = [(data, {**SIMULATED, "steps": LONGER.get(data, SIMULATED["steps"])}) for data in PICTURES]
    return [*found, *(("cifar100", {**SIMULATED, "superclass": number}) for number in SUPERCLASSES)]


# --- files --------------------------------------------------------------------------------------------------------------


def write_sweep(name: str, tasks: Sequence[str], plans: Sequence[Table], **rest: Any) -> None:
    """A TOML file."""
    lines = ["# Written by benchmarks/make_sweeps.py"]
    lines += [f"{word} = {json.dumps(value)}" for word, value in rest.items()]
    lines += ["tasks = [", *(f"    {json.dumps(text)}," for text in tasks), "]"]
    for table in plans:
        lines += ["", "[[plans]]", *(f"{word} = {json.dumps(value)}" for word, value in table.items())]
    (FOLDER / f"{name}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_rates() -> None:
    """Every task at several learning rates, without a plan."""
    for name, tasks, mode in (("rates_simulated", simulated_tasks(), "peppp"), ("rates_stored", stored_tasks(), "store")):
        texts = [task(data, for_rates(how), lr=lr) for data, how in tasks for lr in RATES[how["model"]]]
        write_sweep(name, texts, [{}], mode=mode)


def for_rates(how: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a task is trained when rates are tried."""
    return {**how, "steps": how["steps"] if how["steps"] == TINY else int(FOR_RATES.get(how["model"], 1) * how["steps"])}


def without_rate(text: str) -> str:
    """A task's name without its rate and its steps."""
    head, _, tail = text.partition("#")
    return f"{head}#" + ",".join(part for part in tail.split(",") if not part.startswith(("lr=", "steps=")))


def choose(store: Store) -> dict[str, float]:
    """The rate of least error of each task; of equals the one with the least loss. Tasks of which a rate is still to be tried wait."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    tried = [row for row in rows(store) if row["sweep"].startswith("rates_")]
    waiting = {without_rate(row["task"]) for row in tried if not row["trial"]}
    for row in tried:
        if without_rate(row["task"]) not in waiting:
            rate = next(float(part[3:]) for part in row["task"].partition("#")[2].split(",") if part.startswith("lr="))
            worst = (math.inf, math.inf) if row["error"] is None else (row["error"], row["loss"])
            found[without_rate(row["task"])].append((*worst, rate))
    return {text: min(of_task)[2] for text, of_task in found.items()}


def read_rates(folder: Path) -> dict[str, float]:
    """The rates that were chosen so far."""
    path = folder / "rates.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_sweeps(rates: Mapping[str, float]) -> None:
    """The sweeps of all tasks whose rates are known."""

    def rated(tasks: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        known = [(data, how) for data, how in tasks if without_rate(task(data, how)) in rates]
        return [task(data, how, lr=rates[without_rate(task(data, how))]) for data, how in known]

    simulated = simulated_tasks()
    if complete := rated(simulated[: len(PICTURES)]):
        write_sweep("simulated", complete, [{}, *PEPPP], mode="peppp")
        write_sweep("simulated_again", complete, PEPPP_AGAIN, mode="peppp", seeds=[1, 2])
        write_sweep("simulated_fits", complete, PEPPP_FITS, mode="peppp", seeds=[1, 2])
    for place, (method, share) in enumerate((("uniform", SHARE), ("cheap_first", 2 * SHARE))):
        if sampled := rated(simulated[len(PICTURES) + place :: 2]):
            write_sweep(f"superclasses_{method}", sampled, PEPPP, mode="peppp", method=method, share=share, draw_seed=7)
    if stored := rated(stored_tasks()):
        write_sweep("stored", stored, STORED, mode="store", device=DEVICE)
        write_sweep("stored_again", stored, STORED_AGAIN, mode="store", device=DEVICE, seeds=[1, 2])
        write_sweep("stored_fits", stored, STORED_FITS, mode="store", device=DEVICE, seeds=[1, 2])


def make_tiny() -> None:
    """Sizes with which all of it runs on a CPU in a minute."""
    global PICTURES, TEXTS, SUPERCLASSES, OF_VIT, SIMULATED, CNN, VIT, GPT, STORED, STORED_AGAIN, STORED_FITS
    global PEPPP, PEPPP_AGAIN, PEPPP_FITS, SHARE, DEVICE
    DEVICE = "cpu"
    PICTURES, TEXTS, SUPERCLASSES, OF_VIT, SHARE = ("sk_digits", "mnist"), TEXTS[:1], range(2), (), 0.5
    SIMULATED, CNN = ({**how, "steps": TINY, "width": 8} for how in (SIMULATED, CNN))
    GPT = {**GPT, "steps": TINY, "length": 16, "dim": 16, "num_layers": 2}
    STORED, STORED_AGAIN = [*STORED[:1], *STORED[3:4], {"assign": ["70%"], "method": ["role", "size"]}], STORED[:1]
    PEPPP = ({"peppp_low": ["e3m1", "e5m2"], "peppp_high": ["e6m7", "e8m11"]},)
    STORED_FITS, PEPPP_AGAIN, PEPPP_FITS = STORED_AGAIN, PEPPP, PEPPP


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("rates", "choose", "sweeps"))
    parser.add_argument("--store", help="the store with the trials of the rates")
    parser.add_argument("--tiny", action="store_true", help="small sweeps, to try the whole way")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are")
    given = parser.parse_args()
    globals()["FOLDER"] = given.folder
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.tiny:
        make_tiny()
    if given.what == "rates":
        write_rates()
    elif given.what == "choose":
        with Store(given.store, may_create=False) as store:
            chosen = read_rates(given.folder) | choose(store)
        (given.folder / "rates.json").write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    else:
        write_sweeps(read_rates(given.folder))


if __name__ == "__main__":
    main()
