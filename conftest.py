"""What tests and doctests need to know of the machine: whether it has a CUDA device, and whether Triton is installed.

Without a device Triton's kernels run in its interpreter, on the CPU; tests marked `gpu` are then skipped and counted.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

# Some virtual machines announce AMX and cannot run it: products of bfloat16 would end the process. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

torch.set_num_threads(1)  # tests run side by side, and tensors are small

# package: what cannot be imported without it; tests that need it skip themselves
STORES = ("address", "claims", "database", "export", "merge", "progress", "running", "schema", "status", "store", "watch", "worker")
NEEDED_BY = {
    "triton": ["src/paredown/codec/kernels", "src/paredown/optim/kernels"],
    "sqlalchemy": [
        *(f"src/paredown/runs/{name}.py" for name in STORES),
        "src/paredown/runs/engines",
        "src/paredown/report/sweeps.py",
        "tests/support/work.py",
    ],
    "typer": ["src/paredown/cli"],
}
collect_ignore = [path for package, paths in NEEDED_BY.items() if not find_spec(package) for path in paths]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
