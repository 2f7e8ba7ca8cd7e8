"""A sweep on a Ray cluster: tasks x plans x seeds in a store that survives kills; without Ray it says so and ends."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import paredown as pare


def main() -> None:
    """Run what is left of the sweep, print every trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--engine", default="ray", choices=("ray", "local", "inline"))
    parser.add_argument("--store", default="trials.db", help="a file, or postgresql://... for workers on many machines")
    options = parser.parse_args()
    for package, extra in (("sqlalchemy", "sweeps"), ("ray", "ray")):
        if not find_spec(package) and (package != "ray" or options.engine == "ray"):
            print(f"This example needs {package}: pip install 'paredown[{extra}]'. Nothing was run.")
            sys.exit(0)
    from paredown.study.sweeps import Store, Sweep, TaskFolder, count, make_engine, rows, run_sweep

    tasks = (f"digits#model=mlp,steps={options.steps}",)
    plans = tuple(pare.Plan.preset(name) for name in ("activations4", "lpmm"))
    sweep = Sweep("digits", tasks, (pare.Plan(), *plans), seeds=(0, 1))
    store = Store(options.store)
    engine = make_engine(options.engine, TaskFolder(Path.cwd()))
    ran = run_sweep(sweep, store, engine)  # a second call runs what is left: nothing
    print(f"{ran} trials were run")
    print(*count(store))
    for row in rows(store):
        plan = pare.Plan.from_json(row["plan"]).reason or "baseline"
        print(f"seed {row['seed']}: {row['status']}, error {row['error']:.3f}; {plan}")
    store.close()


if __name__ == "__main__":
    main()
