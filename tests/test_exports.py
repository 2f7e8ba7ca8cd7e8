"""The public surface: these names and no others, loaded when they are used, with or without Triton."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paredown

EXPORTS = {
    "CATALOG",
    "Calibration",
    "Element",
    "Footprint",
    "Format",
    "Frontier",
    "Guard",
    "Limits",
    "Overflow",
    "PackedTensor",
    "Picked",
    "Plan",
    "Role",
    "Rounding",
    "Seed",
    "Sensitivities",
    "Session",
    "Task",
    "Trace",
    "Trial",
    "Verification",
    "__version__",
    "apply",
    "assign",
    "calibrate",
    "encode",
    "errors",
    "evaluate",
    "explain_oom",
    "footprint",
    "load_packed",
    "optim",
    "pick",
    "probe",
    "round_trip",
    "save_packed",
    "trace_step",
    "verify",
}


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_exports_are_pinned() -> None:
    assert set(paredown.__all__) == EXPORTS
    assert len(paredown.__all__) == len(EXPORTS)
    assert set(dir(paredown)) == EXPORTS


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_every_export_resolves(name: str) -> None:
    assert getattr(paredown, name) is not None


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="'paredown' has no attribute 'quantize'"):
        paredown.quantize  # noqa: B018


def test_import_is_lazy() -> None:
    heavy = run("import sys, paredown; print(sorted({'torch', 'triton', 'rich', 'numpy'} & set(sys.modules)))")
    assert heavy == "[]"


def test_formats_need_no_torch() -> None:
    printed = run("import sys, paredown; print(paredown.CATALOG['nvfp4'].nbytes((16, 16)), 'torch' in sys.modules)")
    assert printed == "148 False"


def test_everything_works_where_triton_is_missing() -> None:
    code = """
import sys
from importlib import import_module
from pathlib import Path
sys.modules["triton"] = None  # as if it were not installed
import torch
import paredown
from paredown.codec import backend
assert all(getattr(paredown, name) is not None for name in paredown.__all__)
assert backend.find_kernels() is None
print(paredown.encode(torch.full((2, 8), 7.0), "int4/8@bf16").decode().sum().item())
"""
    assert run(code) == "112.0"


def test_importing_and_encoding_print_nothing() -> None:
    assert run("import torch, paredown; paredown.round_trip(torch.ones(4), 'e4m3fn')") == ""


PACKAGES = (
    "integrations",
    "plan",
    "session",
    "simulate",
    *(f"study.{name}" for name in ("papers", "pick", "priors", "report", "sweeps", "tasks")),
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_resolves(package: str) -> None:
    module = import_module(f"paredown.{package}")
    submodules = {path.stem for path in Path(module.__path__[0]).glob("*.py")}
    assert module.__all__ and not submodules & set(module.__all__), "a submodule of the same name would replace it when imported"
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module 'paredown.{package}' has no attribute 'unheard_of'"):
        _ = module.unheard_of
