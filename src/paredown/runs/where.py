"""Where a trial ran: device, versions and the commit of paredown; no path, no host, no user."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path

import torch

PACKAGES = ("torch", "numpy", "triton")
ROOT = Path(__file__).parents[3]  # of a checkout: src/paredown/runs lies in it


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Of paredown, Python and the packages that numbers depend on; CUDA's where torch has it."""
    own: str = import_module("paredown").__version__  # the one name of the public surface that is needed here
    found = {"paredown": own, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


@lru_cache(maxsize=1)
def commit() -> str:
    """Of the checkout that paredown is run from, with `-dirty` where files were changed; empty where it was installed.

    The environment variable PAREDOWN_COMMIT says it where a checkout was copied without its history.
    """
    if os.environ.get("PAREDOWN_COMMIT"):
        return os.environ["PAREDOWN_COMMIT"]
    if not (ROOT / ".git").exists() or not (ROOT / "pyproject.toml").exists():
        return ""
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
