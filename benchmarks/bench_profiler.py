"""The host before and after torch's profiler has run once in the process: empty operations and steps of a small GPT; results/profiler.json.

    python benchmarks/bench_profiler.py         # alone on one GPU; on the CPU it shows whether it runs, and writes nothing

Nothing else changes between the rows: what the profiler leaves attached to the driver makes every later launch longer. With
TEARDOWN_CUPTI=1 in the environment, Kineto detaches it after a while. Seconds are the least and the median of LOOPS loops of empty
operations, and of STEPS steps. The rows "lstm, forward" and "lstm, backward" of the file are single calls that a calibration at 4385679
timed 0.1 s apart, in quiet and in slow moments of the host: LAUNCH_SHARE of plan/calibration.py follows from them.
"""

from __future__ import annotations

import json
import os
import time
from statistics import median
from typing import Any

import torch
from measure import RESULTS, machine

from paredown.predict.device_time import empty_operation
from paredown.predict.host_time import SmallNetwork, small_networks

PATH = RESULTS / "profiler.json"
LOOPS, CALLS, STEPS, WARM_UP = 20, 100, 30, 5
PAUSE = 1.0  # seconds after the profiler


def row(what: str, network: SmallNetwork, pair: tuple[Any, Any]) -> dict[str, Any]:
    """Seconds of an empty operation and of a step, now."""
    empty = [empty_operation(network.device, CALLS) for _ in range(LOOPS)]
    network.step(*pair)  # fills caches
    steps = [sum(network.step(*pair)) for _ in range(STEPS)]
    seconds = {"empty_operation": empty, "step": steps}
    found = {f"{name}_{kind.__name__}": kind(values) for name, values in seconds.items() for kind in (min, median)}
    print(f"{what:20s}" + "   ".join(f"{name} {value:.3g} s" for name, value in found.items()), flush=True)
    return {"what": what, **found}


def profile(device: str) -> None:
    """Run the profiler around one matrix product."""
    x = torch.randn(2000, 2000, device=device)
    kind = torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]):
        x @ x  # pyright: ignore[reportUnusedExpression]
        if device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Print the rows; on a GPU append them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = small_networks(device)[0]
    model = network.build()
    pair = model, torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(WARM_UP):
        network.step(*pair)
    rows = [row(what, network, pair) for what in ("start", "start again")]
    profile(device)
    rows.append(row("after the profiler", network, pair))
    time.sleep(PAUSE)
    rows += [row(what, network, pair) for what in ("a second later", "again")]
    if device == "cuda":
        runs = json.loads(PATH.read_text()) if PATH.exists() else []
        run = {**machine(device, ("torch",)), "teardown_cupti": os.environ.get("TEARDOWN_CUPTI"), "rows": rows}
        PATH.write_text(json.dumps([*runs, run], indent=1) + "\n")


if __name__ == "__main__":
    main()
