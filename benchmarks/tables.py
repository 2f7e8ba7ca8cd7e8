"""The tables and figures of README.md, docs/benchmarks.md and docs/sizing.md, from results/*.json alone.

Of each job and way it is the newest row; a ratio compares two rows of one commit.


python benchmarks/tables.py             # print them
python benchmarks/tables.py --write     # put them into the pages, between their marks
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
README = Path(__file__).parent.parent / "README.md"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "report.json"
SIZING = Path(__file__).parent.parent / "docs" / "sizing.md"
MARKS = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GIB = 2**30
WORDS = {
    "checkpointing": "activation checkpointing",
    "by hand": "an eager loop",
    "compiled": "`torch.compile`",
}  # names in results: names on the page
TRIED = (
    "fp8@notranspose",
    "fp8@loops",
    "fp8@all",
    "fp8+half@all",
)  # ways of bench_products.py without a part of the code, which only the log speaks of
LOWER = ("budget=0.5", "budget=0.3")  # torch's budgets that take longer, for about the same memory
PLANNED = ("trace_step", "assign 90%", "assign 65%", "a step", "probe, 16", "write", "64")
# Rows of the README: name, file, field of its jobs, job, way, the way that it is compared with.
HEADLINE = (
    ("ResNet-50, batch 256, 8 bits", "compile", "job", "resnet50", "int8", "compiled"),
    ("the same, `int4/64`", "compile", "job", "resnet50", "int4", "compiled"),
    ("ViT-B/16, batch 128, `int4/64`", "compile", "job", "vit_b_16", "int4", "compiled"),
    ("GPT-2 124M, 16 x 1024 tokens, `int4/64`", "language", "job", "gpt2", "compiled-int4", "compiled"),
    ("BERT-base, 32 x 512 tokens, 8 bits", "zoo", "network", "bert", "int8", "compiled"),
    ("Qwen3-shaped, 4 x 1024 tokens, 8 bits", "zoo", "network", "qwen3", "int8", "compiled"),
    ("Llama-shaped, 1B, 4 x 2048 tokens, `fp8`", "products", "case", "llama-1b", "fp8", "compiled"),
    ("Llama 8B's widths, 4 layers, `fp8`", "products", "case", "llama-8b-4-layers", "fp8", "compiled"),
    ("LoRA of Llama 8B, 4096 tokens, nf4 base", "language", "job", "lora", "paredown-nf4", "qlora-double"),
    ("AdamW over 355M parameters, `lpmm`", "optim", "job", "355M", "AdamW paredown lpmm", "AdamW torch fused bfloat16"),
)


def newest(name: str, keys: tuple[str, ...], *, having: str = "") -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by those of their fields, later runs of the file over earlier ones, with the commit that they were measured at.

    `having`: a field without which a row does not count.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in json.loads((RESULTS / f"{name}.json").read_text()):
        for row in run.get("rows", ()):
            whole = {**row, "commit": run["commit"], "device": run["device"]}
            if not having or whole.get(having):
                found[tuple(whole.get(key) for key in keys)] = whole
    return found


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))


def step(row: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    """Peak and time of a step, each with the ratio to a baseline if there is another one."""
    peak, time = f"{row['peak_bytes'] / GIB:.2f} GiB", f"{1e3 * row['median_seconds']:.1f} ms"
    if baseline is None or baseline is row:
        return f"{peak}, {time}"
    return f"{peak} ({relative(row, baseline, 'peak_bytes')}), {time} ({relative(row, baseline, 'median_seconds')})"


def commits(rows: Iterable[dict[str, Any]]) -> str:
    """The commits that rows were measured at, each once."""
    return ", ".join(dict.fromkeys(row["commit"] for row in rows))


def activations() -> str:
    """Peaks and times of training steps whose activations are packed; of each job the rows of its last commit with times of kernels."""
    found = newest("session", ("job", "way", "size", "commit"))
    rows = [row for row in found.values() if "largest" not in row["job"] and not row["error"]]
    last = {row["job"]: row["commit"] for row in rows if row["way"] == "int8/64@bf16" and row.get("kernel_ratio")}
    cells: list[tuple[str, ...]] = []
    for job, commit in sorted(last.items()):
        ways = {row["way"]: row for row in rows if (row["job"], row["commit"]) == (job, commit)}
        chosen = [ways.get(way) for way in ("baseline", "int8/64@bf16", "int4/64@bf16")]
        kernels = ", ".join(f"{row['kernel_ratio']:.2f}x" for row in chosen[1:] if row)
        errors = [row["predicted_peak_bytes"] / row["peak_bytes"] - 1 for row in chosen if row and row["predicted_peak_bytes"]]
        worst = f"{max(errors, key=abs):+.1%}" if errors else ""
        cells.append((job, *(step(row, chosen[0]) if row else "" for row in chosen), kernels, worst, commit))
    head = ("step", "baseline", "`int8/64@bf16`", "`int4/64@bf16`", "kernels", "predicted peak", "commit")
    return markdown(head, cells)


def compiled_rows(kind: str) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """The newest rows of compiled steps without an error, each with the rows by way of the same job and commit.

    There are none before results/compile.json exists.
    """
    if not (RESULTS / "compile.json").exists():
        return []
    everything = newest("compile", ("job", "way", "commit", "error"))
    rows = [row for row in everything.values() if row["kind"] == kind and not row["error"] and not row["job"].startswith("toy")]
    last = {(row["job"], row["way"]): row for row in rows}
    places = list(dict.fromkeys(row["job"] for row in rows))
    beside = {(row["job"], row["commit"]): {} for row in rows}
    for row in rows:
        beside[row["job"], row["commit"]][row["way"]] = row
    return [(row, beside[row["job"], row["commit"]]) for row in sorted(last.values(), key=lambda row: places.index(row["job"]))]


def relative(row: dict[str, Any], baseline: dict[str, Any] | None, name: str) -> str:
    """A value relative to that of the baseline, if both were measured."""
    return f"{row[name] / baseline[name]:.2f}x" if baseline and row[name] and baseline[name] else ""


def titled(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table below its title; no text without rows."""
    return f"{title}\n\n{markdown(head, rows)}" if rows else ""


def compiled() -> str:
    """Peaks and times of compiled steps, relative to plain torch.compile, and seconds to compile."""
    cells: list[tuple[str, ...]] = []
    rows = compiled_rows("steps")
    for job in dict.fromkeys(row["job"] for row, _ in rows):
        ways = {row["way"].split("=")[0]: (row, beside) for row, beside in rows if row["job"] == job and row["way"] not in LOWER}
        chosen = [ways.get(way) for way in ("compiled", "int8", "int4", "budget", "fit")]
        steps = ("" if pair is None else step(pair[0], pair[1].get("compiled")) for pair in chosen)
        seconds = ", ".join(f"{pair[0]['compile_seconds']:.0f}" for pair in chosen[:3] if pair)
        cells.append((job, *steps, seconds, commits(pair[0] for pair in chosen if pair)))
    head = ("step", "`torch.compile`", "`int8`", "`int4`", "torch's budget of 0.8", "plan for that peak", "compile, s", "commit")
    return titled("Training steps, with ratios to plain `torch.compile` at the same commit:", head, cells)


def pair(name: str, field: str, job: str, way: str, base: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of two ways of one job with their commit, the newest that has both; rows without a time do not count."""
    timed: dict[tuple[str, str], dict[str, Any]] = {}
    for run in json.loads((RESULTS / f"{name}.json").read_text()):
        rows = [row for row in run.get("rows", ()) if row.get(field) == job and row["median_seconds"]]
        timed.update({(run["commit"], row["way"]): {**row, "commit": run["commit"]} for row in rows})
    commit = next(commit for commit, _ in reversed(timed) if {(commit, way), (commit, base)} <= timed.keys())
    return timed[commit, way], timed[commit, base]


def headline() -> str:
    """The README's table: peak memory and time of steps, and how both compare with the step of others."""
    cells: list[tuple[str, ...]] = []
    for title, *place in HEADLINE:
        row, base = pair(*place)
        ratios = (relative(row, base, name) for name in (memory_field(row), "median_seconds"))
        cells.append((title, memory_and_time(base), memory_and_time(row), *ratios))
    return markdown(("one H200, bf16", "without paredown", "with paredown", "memory", "time"), cells)


def memory_field(row: dict[str, Any]) -> str:
    """The field with a row's memory: its peak, or bytes per parameter of an optimizer's step, which has none."""
    return "peak_bytes" if row["peak_bytes"] else "bytes_per_parameter"


def memory_and_time(row: dict[str, Any]) -> str:
    """Peak and milliseconds of a step, or bytes per parameter and milliseconds of an optimizer's."""
    seconds = 1e3 * row["median_seconds"]
    if row["peak_bytes"]:
        return f"{row['peak_bytes'] / GIB:.1f} GiB, {seconds:.{0 if seconds >= 100 else 1}f} ms"
    return f"{row['bytes_per_parameter']:.1f} bytes each, {seconds:.2f} ms"


def caption() -> str:
    """The sentence below the README's picture, from the runs that the picture shows."""
    runs = json.loads(PICTURE.read_text())["runs"]
    plain, packed = ([run for run in runs if (run["plan"] == "baseline") == is_plain] for is_plain in (True, False))
    peaks = [max(run["measured_bytes"] for run in some) / 2**20 for some in (packed, plain)]
    ratio = statistics.median(run["step_ratio"] for run in packed)
    said = f"peak {peaks[0]:.1f} instead of {peaks[1]:.1f} MiB, {ratio:.1f}x as long"
    return f"*One training step of a small network, from `make demo`: {said}.*\n"


def measured() -> str:
    """The README's sentence about its estimate of an eager step of GPT-2: what the same step took."""
    rows = newest("session", ("job", "way"))
    peaks = (rows["gpt2", way]["peak_bytes"] / GIB for way in ("baseline", "int8/64@bf16"))
    said = "Predicted for GPT-2 124M from its `config.json` alone; one H200 took {:.2f} GiB, and {:.2f} in 8 bits.\n"
    return said.format(*peaks)


def compiled_networks() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Network and way of each packed compiled step of bench_zoo.py, its newest row, and that of plain torch.compile."""
    for network, way in newest("zoo", ("network", "way"), having="num_changes"):
        if not way.startswith("eager"):
            yield network, way, *pair("zoo", "network", network, way, "compiled")


def zoo() -> str:
    """Peaks and times of compiled steps of networks that nothing was tuned for, relative to plain torch.compile."""
    cells: list[tuple[str, ...]] = []
    for network, way, row, base in compiled_networks():
        ratios = (relative(row, base, name) for name in ("peak_bytes", "median_seconds"))
        cells.append(
            (network, row["kind"], way, *map(memory_and_time, (base, row)), *ratios, str(row["num_changes"]), row["commit"])
        )
    head = ("network", "kind", "way", "`torch.compile`", "`session.compile()`", "memory", "time", "rows in `changes`", "commit")
    return markdown(head, cells)


def products() -> str:
    """Peaks and times of steps whose linear layers multiply 8-bit codes, relative to plain torch.compile in the same run."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for run in json.loads((RESULTS / "products.json").read_text()):
        timed = [row for row in run["rows"] if run["kind"] == "steps" and not row["error"] and row["way"] not in TRIED]
        plain = {row["case"]: row for row in timed if row["way"] == "compiled"}
        rows |= {(row["case"], row["way"]): {**row, "plain": plain[row["case"]], "commit": run["commit"]} for row in timed}
    cells = [
        (case, WORDS.get(way, way), memory_and_time(row), relative(row, row["plain"], "peak_bytes"),
         relative(row, row["plain"], "median_seconds"), row["commit"])
        for (case, way), row in sorted(rows.items())
    ]  # fmt: skip
    return markdown(("case", "way", "peak, time", "memory", "time", "commit"), cells)


def compiled_largest() -> str:
    """Examples per second of the largest batch below a limit of peak memory."""
    cells: list[tuple[str, ...]] = []
    for row, beside in compiled_rows("largest"):
        speeds = {way: {"speed": other["size"] / other["median_seconds"]} for way, other in beside.items()}
        own = speeds[row["way"]]
        ratios = (relative(own, speeds.get(base), "speed") for base in ("eager", "compiled"))
        peaks = (f"{row['peak_bytes'] / GIB:.2f}", f"{row['limit_bytes'] / GIB:.0f}")
        name = (row["job"].removesuffix("-largest"), row["way"], str(row["size"]))
        cells.append((*name, *peaks, f"{own['speed']:.0f}", *ratios, row["commit"]))
    head = ("network", "way", "largest batch", "peak, GiB", "limit, GiB", "examples per second", "x eager", "x compiled", "commit")
    return titled("The largest batch whose step peaks below a limit:", head, cells)


def sizes() -> str:
    """Predicted peaks of common models under plans, and the smallest card whose memory they are within; a step is named once."""
    (run,) = json.loads((RESULTS / "sizes.json").read_text())
    cells: list[tuple[str, ...]] = []
    titles: set[str] = set()
    for row in run["rows"]:
        card = next((card for card, nbytes in run["cards"].items() if row["peak_bytes"] <= nbytes), "none")
        cells.append(("" if row["title"] in titles else row["title"], f"`{row['plan']}`", f"{row['peak_bytes'] / GIB:.1f}", card))
        titles.add(row["title"])
    said = f"Predicted at {run['commit']} with torch {run['versions']['torch']}, Transformers {run['versions']['transformers']}:"
    return titled(said, ("step", "plan", "peak, GiB", "smallest card"), cells)


def language_rows(*, has_seed: bool) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The newest rows of language models without an error, by job, way and seed; none before results/language.json exists."""
    if not (RESULTS / "language.json").exists():
        return {}
    found = newest("language", ("job", "way", "seed", "error", "skipped", "device"))
    rows = [row for row in found.values() if not row["error"] and not row["skipped"] and (row["seed"] is not None) == has_seed]
    names = ("" if row["device"].startswith("NVIDIA") else f", {row['device']}" for row in rows)
    return {(f"{row['job']}{name}", row["way"], row["seed"]): row for row, name in zip(rows, names, strict=True)}


def language() -> str:
    """Peaks, stored bytes, times and largest lengths of steps of language models on a GPU."""
    cells: list[tuple[str, ...]] = []
    rows = {key: row for key, row in language_rows(has_seed=False).items() if row["device"].startswith("NVIDIA")}
    lengths = newest("language", ("job", "way", "device"), having="largest_length") if rows else {}
    for (job, _, _), row in rows.items():
        if not row["median_seconds"]:
            continue
        sizes = (f"{row[name] / GIB:.2f}" if row[name] else "" for name in ("peak_bytes", "predicted_bytes", "model_bytes"))
        other = row if row["largest_length"] else lengths.get((row["job"], row["way"], row["device"]), row)
        largest = str(other["largest_length"] or "") + (f" ({other['commit']})" if other is not row else "")
        cells.append((job, row["way"], *sizes, f"{1e3 * row['median_seconds']:.1f}", largest, row["commit"]))
    head = ("step", "way", "peak, GiB", "predicted", "model", "ms", "largest length in 24 GiB", "commit")
    return titled(
        "Training steps of language models, ours and those of other libraries:", head, sorted(cells, key=lambda cell: cell[0])
    )


def language_losses() -> str:
    """Validation losses of trainings: means over seeds, and differences from the baseline of the same seed, with standard errors."""
    rows = language_rows(has_seed=True)
    cells: list[tuple[str, ...]] = []
    for job, way in dict.fromkeys((job, way) for job, way, _ in rows):
        base = next(other for one, other, _ in rows if one == job)  # the first way of a job is its baseline
        losses = {seed: row["validation_loss"] for (*key, seed), row in rows.items() if key == [job, way]}
        pairs = [loss - rows[job, base, seed]["validation_loss"] for seed, loss in losses.items() if (job, base, seed) in rows]
        shown = (mean_with_error(list(losses.values()), ""), mean_with_error(pairs, "+") if way != base else "")
        cells.append((job, way, str(len(losses)), *shown, next(rows[job, way, seed]["commit"] for seed in losses)))
    head = ("training", "way", "seeds", "validation loss (standard error)", "difference, paired by seed (standard error)", "commit")
    return titled("Validation losses of trainings:", head, cells)


def mean_with_error(values: list[float], sign: str) -> str:
    """A mean and its standard error, which needs two values."""
    error = f"{statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else "-"
    return f"{statistics.mean(values):{sign}.4f} ({error})" if values else ""


def optimizers() -> str:
    """Bytes per parameter and time of one optimizer step over GPT-2 medium's 292 tensors."""
    rows = {way: row for (job, way), row in newest("optim", ("job", "way")).items() if job == "355M" and not row.get("error")}
    names = ("SGDM", "AdamW", "Lion")
    cells: list[tuple[str, ...]] = []
    for way in dict.fromkeys(name.partition(" ")[2] for name in rows):
        chosen = [rows.get(f"{name} {way}") for name in names]
        cells.append((way, *map(bytes_and_time, chosen), commits(row for row in chosen if row)))
    return markdown(("bytes per parameter, ms", *names, "commit"), cells)


def bytes_and_time(row: dict[str, Any] | None) -> str:
    """Bytes per parameter and milliseconds of an optimizer's step; no time if the update runs in backward."""
    if row is None:
        return ""
    time = f", {1e3 * row['median_seconds']:.2f}" if row.get("median_seconds") else ""
    return f"{row['bytes_per_parameter']:.2f}{time}"


def footprints() -> str:
    """Predicted peaks against measured ones: the largest errors over all plans and sizes of a network."""
    by_job: dict[str, list[dict[str, Any]]] = {}
    for (job, _, _), row in newest("footprint", ("job", "way", "size")).items():
        by_job.setdefault(job, []).append(row)
    cells: list[tuple[str, ...]] = []
    for job, rows in sorted(by_job.items()):
        worst = max((row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1 for row in rows), key=abs)
        batches = ", ".join(str(size) for size in sorted({row["size"] for row in rows}))
        cells.append((job, batches, f"{worst:+.1%}", commits(rows)))
    return markdown(("network", "batches", "predicted against measured, at worst", "commit"), cells)


def sweeps() -> str:
    """Simulated trainings a minute."""
    rows = newest("sweep", ("way", "width")).values()
    cells = [
        (
            WORDS.get(row["way"], row["way"]),
            str(row["width"]),
            str(row["steps"]),
            f"{row['trials_per_minute']:.1f}",
            f"{row['ms_per_step']:.2f}",
            row["commit"],
        )
        for row in rows
    ]
    return markdown(("way", "width of ResNet-18", "steps of a trial", "trials per minute", "ms per step", "commit"), cells)


def planning() -> str:
    """Seconds of tracing, planning and probing, and of the store; all other rows are in plan.json and store.json."""
    rows = [*newest("plan", ("job", "who")).values(), *newest("store", ("job", "who")).values()]
    on_gpu = {row["job"] for row in rows if row["device"].startswith("NVIDIA")}
    shown = [
        row for row in rows if row["job"].startswith(PLANNED) and (row["device"].startswith("NVIDIA") or row["job"] not in on_gpu)
    ]
    cells = [(row["job"], row["who"], row["device"], f"{row['median_seconds']:.4f}", row["commit"]) for row in shown]
    return markdown(("job", "of", "on", "seconds", "commit"), cells)


def low_budget_regrets() -> str:
    """Mean regret over tasks of each way to choose, its difference from `pick` with six trials, and the step time of its choices."""
    cells: list[tuple[str, ...]] = []
    rows = [row for row in json.loads((RESULTS / "low_budgets.json").read_text())["rows"] if row["knows"] != "alone"]
    ways, budgets = (list(dict.fromkeys(row[word] for row in rows)) for word in ("way", "budget"))
    untimed = {row["task"] for row in rows if row["budget"] == budgets[-1] and not row["step_ratio"]}  # by some way
    for way in ways:
        line = [way]
        for budget in budgets:
            ours, own = ([row for row in rows if (row["way"], row["budget"]) == (one, budget)] for one in (ways[0], way))
            apart = [1e3 * (a["regret"] - b["regret"]) for a, b in zip(ours, own, strict=True)]
            mean = statistics.mean(1e3 * row["regret"] for row in own)
            error = statistics.stdev(apart) / len(apart) ** 0.5
            line.append(f"{mean:.1f}" if way == ways[0] else f"{mean:.1f}; {statistics.mean(apart):+.1f} ({error:.1f})")
        timed = [row for row in rows if (row["way"], row["budget"]) == (way, budgets[-1]) and row["task"] not in untimed]
        cells.append((*line, f"{statistics.mean(row['step_ratio'] for row in timed):.2f}x"))
    return markdown(("choice", *(budget.replace("%", " %") for budget in budgets), f"step time, {budgets[-1]}"), cells)


def state_budget_regrets() -> str:
    """Mean regret of each way in thousandths, and the difference of `pick` with six trials, by what is known and which tasks count."""
    rows, cells = json.loads((RESULTS / "state_budgets.json").read_text())["rows"], list[tuple[str, ...]]()
    ways, columns = (list(dict.fromkeys(row[word] for row in rows)) for word in ("way", "knows"))
    for way in ways:
        line = [way]
        for knows in columns:
            ours, own = ([1e3 * r["regret"] for r in rows if (r["way"], r["knows"]) == (one, knows)] for one in (ways[0], way))
            apart = [a - b for a, b in zip(ours, own, strict=True)]
            paired = f"; {statistics.mean(apart):+.1f} ({statistics.stdev(apart) / len(apart) ** 0.5:.1f})"
            line.append(f"{statistics.mean(own):.1f}" + (paired if way != ways[0] else ""))
        cells.append(tuple(line))
    counts = {knows: len({row["task"] for row in rows if row["knows"] == knows}) for knows in columns}
    heads = [f"{count} tasks, {'alone' if knows.startswith('alone') else 'joined'}" for knows, count in counts.items()]
    return markdown(("choice", *heads), cells)


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        activations,
        compiled,
        compiled_largest,
        zoo,
        products,
        language,
        language_losses,
        optimizers,
        footprints,
        sweeps,
        planning,
        low_budget_regrets,
        state_budget_regrets,
    )
}  # the names that the marks of docs/benchmarks.md have
README_TABLES: dict[str, Callable[[], str]] = {made.__name__: made for made in (caption, measured, headline)}
SIZE_TABLES: dict[str, Callable[[], str]] = {"sizes": sizes}


def filled(page: str) -> str:
    """The page with its tables as the results have them now."""
    made = {**TABLES, **README_TABLES, **SIZE_TABLES}
    return MARKS.sub(lambda mark: f"{mark[1]}{made[mark[2]]()}{mark[3]}", page)


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        for page in (PAGE, README, SIZING):
            page.write_text(filled(page.read_text()))
    else:
        print("\n".join(make() for make in (*README_TABLES.values(), *TABLES.values(), *SIZE_TABLES.values())))


if __name__ == "__main__":
    main()
