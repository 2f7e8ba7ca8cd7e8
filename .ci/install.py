"""Install paredown and what its tests need into the environment of the Python that runs this.

torch comes first, pinned: left to the resolver it would be the newest build, of several gigabytes. A torch >= 2.11 that is
already there is kept, and the pins of what it requires (numpy, Triton in CUDA builds, ...) are left to it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 11)
COMPILE = """
import torch, paredown
paredown.encode(torch.ones(1 << 15), "int8/64@bf16").decode()
p = torch.nn.Parameter(torch.ones(256, 256))
optimizer = paredown.optim.AdamW([p], weight=None, moment1="int8/64@bf16", moment2="uint8/64@bf16", gradient="int8/64@bf16")
p.sum().backward()
optimizer.step()
"""
EXTRAS = "cli,cpu,safetensors,search,test"  # unless others are named on the command line


def main() -> None:
    """Install, in two steps."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    tested = next(pin for pin in pins if name_of(pin) == "torch")
    if installed_torch() < OLDEST_TORCH:
        print(f"Installing {tested} into .venv (once; a minute or more) ...", flush=True)
        install(tested, pins=[pin for pin in pins if name_of(pin) != "triton"])
    print(f"Installing paredown beside torch {metadata.version('torch')} ...", flush=True)
    install("-e", f"{ROOT}[{sys.argv[1] if len(sys.argv) > 1 else EXTRAS}]", pins=pins_beside_torch(pins))
    if find_spec("numba") is not None:
        print("Compiling the loops of codec and optimizers for the CPU (once; half a minute) ...", flush=True)
        subprocess.run([sys.executable, "-c", COMPILE], check=True)


def installed_torch() -> tuple[int, ...]:
    """(major, minor) of the torch that is there; () where there is none."""
    try:
        return tuple(int(part) for part in metadata.version("torch").split(".")[:2])
    except metadata.PackageNotFoundError:
        return ()


def pins_beside_torch(pins: list[str]) -> list[str]:
    """`pins` with torch held at what is there, and without the packages that this torch requires."""
    required = {name_of(text) for text in metadata.requires("torch") or [] if "extra ==" not in text}
    return [f"torch=={metadata.version('torch')}", *(pin for pin in pins if name_of(pin) not in {"torch", *required})]


def name_of(requirement: str) -> str:
    """The package that a requirement asks for, spelled as package indexes compare names."""
    match = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def install(*what: str, pins: list[str]) -> None:
    """pip install `what` under `pins`; Python compiles what is imported, when it is."""
    constraints = Path(sys.prefix) / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "-c", str(constraints)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *what], check=True)


if __name__ == "__main__":
    main()
