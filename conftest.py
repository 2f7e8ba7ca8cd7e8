"""What tests and doctests need to know of the machine and of the run: a CUDA device, optional packages, `make test` or `make test-all`.

Without a device Triton's kernels run in its interpreter, on the CPU; tests marked `gpu` are then skipped and counted. Tests marked `full`
run in `make test-all` alone and are counted skips elsewhere. Random examples are the same in every run, however slow the machine is.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator
from importlib.util import find_spec

# Some virtual machines announce AMX and cannot run it: products of bfloat16 would end the process. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Before its first kernel Inductor compiles and loads six libraries to see which vector instructions work, which takes 7 s in each
# process. Kernels have none, whatever the processor; tests of the codec in kernels use `tests.support.inductor.vector_instructions`.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes that import torch, and the cores are busy

import pytest
import torch

from tests.support.quick_interpreter import make_interpreter_quick
from tests.support.scale import SCALE

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

os.environ["PAREDOWN_CACHE"] = os.path.join(
    tempfile.gettempdir(), "no calibration of paredown's tests"
)  # no test predicts by a user's file

torch.set_num_threads(1)  # tests run side by side, and tensors are small

if not HAS_CUDA and find_spec("triton"):
    make_interpreter_quick()

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # Hypothesis otherwise draws anew in each run and fails an example that takes longer than 200 ms, as any may on busy cores.
    settings.register_profile(
        "anywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("anywhere")

# package: what cannot be imported without it; tests that need it skip themselves
STORES = ("database", "export", "runner", "status", "store", "worker")
NEEDED_BY = {
    "triton": ["src/paredown/codec/kernels", "src/paredown/optim/kernels"],
    "sqlalchemy": [
        *(f"src/paredown/study/sweeps/{name}.py" for name in STORES),
        "src/paredown/study/sweeps/engines",
        "src/paredown/study/report/store_record.py",
        "tests/support/work.py",
        "tests/study/sweeps/test_silent_server.py",
    ],
    "typer": ["src/paredown/cli"],
    "transformers": ["src/paredown/integrations/hugging_face.py"],
    "lightning": ["src/paredown/integrations/lightning.py"],
}
collect_ignore = [path for package, paths in NEEDED_BY.items() if not find_spec(package) for path in paths]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, and what is of full size outside `make test-all`."""
    skipped = {"gpu": "no CUDA device"} if not HAS_CUDA else {}
    if SCALE == 1:
        skipped["full"] = "of full size: make test-all"
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collection: each gc.collect() would visit these objects again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the last test of a file: leave out what it imported, too. Meters of memory collect garbage before each measurement."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_unconfigure() -> None:
    """Let the interpreter free them at its end; some extensions report objects that are not."""
    gc.unfreeze()
