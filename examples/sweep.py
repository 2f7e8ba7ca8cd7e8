"""A sweep on two machines: tasks x plans x seeds, with workers that share a store.

One machine adds the trials and works on them, the other joins. Here both are processes of this machine and the store is a file; on two
machines it is a database: set PAREDOWN_STORE=postgresql://... on both, and type the same two commands. Any of them can be killed, and the
same command resumes. `python sweep.py --size full` trains ResNet-18 on larger pictures of digits, longer, on a GPU.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

if not (find_spec("sqlalchemy") and find_spec("typer")):
    sys.exit("Skipped: this example needs SQLAlchemy and Typer (pip install 'paredown[cli,sweeps]').")

from paredown import Plan
from paredown.study.sweeps import Store, count, rows

SIZES = {"small": "digits#model=mlp,steps=20", "full": "digits#model=resnet18,side=32,width=64,steps=2000"}
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
task = SIZES[parser.parse_known_args()[0].size]

# %% The sweep: one task, three plans, two seeds
Path("sweep.toml").write_text(f"""
tasks = ["{task}"]
seeds = [0, 1]
store = "trials.db"
[[plans]]
label = "baseline"
[[plans]]
preset = "activations4"
[[plans]]
preset = "lpmm"
""")

# %% Two workers; `inline` runs trials in the worker, without --engine each has a process of its own
paredown = [sys.executable, "-W", "ignore", "-m", "paredown"]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
first = subprocess.Popen([*paredown, "sweep", "run", "sweep.toml", "--engine", "inline"], **quiet)
second = subprocess.Popen([*paredown, "worker", "--store", "trials.db", "--engine", "inline", "--wait", "60s"], **quiet)
print(f"the workers ended with {first.wait()} and {second.wait()}")

# %% What is in the store
store = Store("trials.db")
print(*count(store))
for row in rows(store):
    plan = Plan.from_json(row["plan"]).reason or "baseline"
    print(f"seed {row['seed']}: {row['status']}, error {row['error']:.3f}; {plan}")
store.close()
