"""`paredown env` prints versions, devices and missing packages, `paredown formats` number formats and their bytes; `paredown calibrate`
measures how long operations take on this device, so that step time can be predicted.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import paredown
from paredown.cli.application import ALONE, LOOK, Exit, JsonOption, app, name_for_pip, option, verb
from paredown.cli.output import emit, heading, spinner, table, tell

OLDEST_TORCH = (2, 11)
GIB = 1 << 30


class Package(NamedTuple):
    """An optional package: the name under which it is imported, and what paredown uses it for."""

    name: str
    use: str


PACKAGES = (
    Package("torch", "everything"),
    Package("numpy", "everything"),
    Package("triton", "fast kernels on a GPU"),
    Package("numba", "formats on a CPU in compiled loops"),
    Package("scipy", "pick: fitting priors"),
    Package("sqlalchemy", "sweeps and stores"),
    Package("psycopg", "stores on PostgreSQL"),
    Package("ray", "sweeps on a cluster"),
    Package("pyarrow", "exports as Parquet"),
    Package("safetensors", "weights in safetensors files"),
    Package("transformers", "models from a Hugging Face config"),
    Package("PIL", "pictures in folders"),
)
REQUIRED = ("torch", "numpy")


@verb(app, "env", "paredown env", "paredown env --json", panel=LOOK)
def env(is_json: JsonOption = False) -> None:
    """Print versions, devices, missing packages, and the commands that install them."""
    packages = [{"name": p.name, "version": _version(p.name), "use": p.use} for p in PACKAGES]
    machine = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    machine |= {"memory_bytes": _memory(), **(_device() if packages[0]["version"] else {})}
    folder = os.environ.get("PAREDOWN_DATA", "")  # not printed, since a path can name a user
    data = {"PAREDOWN_DATA": "set" if folder else "not set", "is_there": bool(folder) and os.path.isdir(folder)}
    value = {"paredown": paredown.__version__, **machine, "packages": packages, "data": data}
    advice = _advice(value)
    if is_json:
        emit({**value, "advice": advice})
    else:
        tell(*_lines(value), "", *([heading("To do"), *(f"  {line}" for line in advice)] if advice else ["Nothing is missing."]))
    if any(p["version"] is None for p in packages if p["name"] in REQUIRED):
        raise typer.Exit(Exit.ERROR)


@verb(app, "calibrate", "paredown calibrate", "paredown calibrate --trace trace.json --force", panel=LOOK)
def calibrate_verb(
    device: Annotated[str | None, option("cuda or cpu. (default: cuda if available)")] = None,
    trace: Annotated[
        list[Path] | None, option("A file of trace.save(path), whose operations are timed too: once for each file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again, also if a file of this device is there.")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Measure again how fast the host is, in a second; other work changes that.")
    ] = False,
    is_json: JsonOption = False,
) -> None:
    """Measure in about 20 s how long operations, packing and checkpointing take here; estimates then print step time."""
    with spinner("measuring this device"):
        from paredown.plan.calibration import calibration_path, find_calibration
        from paredown.plan.trace import Trace
        from paredown.predict.device_calibration import calibrate, checked_device

        kind = checked_device(device)
        found, reason = find_calibration(kind)
        traces = [Trace.load(path) for path in trace or ()]
        measured = calibrate(kind, traces=traces, is_forced=force, has_present_host=host)
    path = calibration_path(kind)
    if is_json:
        return emit({"file": str(path), "is_new": found != measured, "reason": reason, **measured.to_json()})
    did = f"Measured in {measured.measured_in_seconds:.0f} s" if found != measured else "Read, without measuring (--force measures)"
    again = [f"Measured again: {reason}"] if reason and "nothing is measured" not in reason else []
    tell(*again, f"{did}: {measured}.", f"The calibration is in {path}.")


def _version(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    try:
        return metadata.version(ALONE.get(name, name))
    except metadata.PackageNotFoundError:
        return "?"


def _device() -> dict[str, Any]:
    import torch

    cuda = torch.cuda
    num = cuda.device_count()
    free = [cuda.mem_get_info(i) for i in range(num)]
    gpus = [{"name": cuda.get_device_name(i), "free_bytes": free[i][0], "total_bytes": free[i][1]} for i in range(num)]
    return {"cuda": torch.version.cuda, "gpus": gpus, "kernels": "triton" if num and find_spec("triton") else "torch"}


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _advice(value: dict[str, Any]) -> list[str]:
    missing = [p["name"] for p in value["packages"] if p["version"] is None]
    torch = next(p["version"] for p in value["packages"] if p["name"] == "torch")
    advice = ["torch is missing: pip install torch"] if torch is None else []
    if torch and tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdigit()) < OLDEST_TORCH:
        advice.append(f"torch {torch} is too old: pip install 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}'")
    if torch and not value["gpus"]:
        has_gpu = shutil.which("nvidia-smi") is not None
        built = "check nvidia-smi" if value["cuda"] else "this torch is built without CUDA: install one that has it (pytorch.org)"
        advice += [f"a GPU is here and torch does not see it; {built}"] if has_gpu else []
    for name in missing:
        use = next(p.use for p in PACKAGES if p.name == name)
        if name not in REQUIRED and (name != "triton" or value.get("gpus")):
            advice.append(f"for {use}: pip install {name_for_pip(name)}")
    if value["data"]["PAREDOWN_DATA"] == "set" and not value["data"]["is_there"]:
        advice.append("PAREDOWN_DATA names no folder: correct it, or unset it")
    return advice


def _lines(value: dict[str, Any]) -> list[str]:
    memory = f", {value['memory_bytes'] / GIB:.1f} GiB of memory" if value["memory_bytes"] else ""
    lines = [
        heading(f"paredown {value['paredown']}"),
        f"  Python {value['python']} on {value['system']}, {value['cores']} cores{memory}",
    ]
    for gpu in value.get("gpus", ()):
        lines.append(
            f"  {gpu['name']}: {gpu['free_bytes'] / GIB:.1f} of {gpu['total_bytes'] / GIB:.1f} GiB free, CUDA {value['cuda']}"
        )
    lines += [] if value.get("gpus") else ["  no GPU: plans and footprints for a GPU can be made without one (--device cuda)"]
    rows = [(p["name"], p["version"] or "missing", p["use"]) for p in value["packages"]]
    return [*lines, "", *(f"  {line}" for line in table(("package", "version", "for"), rows, left=3))]


@verb(app, "formats", "paredown formats", "paredown formats int4/64@bf16 --shape 4096x4096", panel=LOOK)
def formats(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FORMAT]...", help="Names of the catalog, or texts such as int4/64@bf16.", show_default=False),
    ] = None,
    shape: Annotated[str, typer.Option(metavar="SHAPE", help="Shape of a tensor, whose bytes are printed.")] = "1024x1024",
    is_json: JsonOption = False,
) -> None:
    """Print number formats: bits per value, largest and smallest value, and the bytes of a tensor."""
    from paredown.formats.catalog import ROWS, find_format

    notes = {row.name: row.note for row in ROWS}
    sizes = _shape(shape)
    rows = []
    for name in names or notes:
        format = find_format(name)
        largest, smallest = float(format.element.max_value), float(format.element.smallest)
        value = {"name": name, "format": str(format), "bits_per_value": format.bits_per_value, "largest": largest}
        rows.append({**value, "smallest": smallest, "nbytes": format.nbytes(sizes), "note": notes.get(name, "")})
    if is_json:
        emit({"shape": list(sizes), "formats": rows})
        return
    cells = [
        (r["name"], r["format"], f"{r['bits_per_value']:g}", f"{r['largest']:g}", f"{r['smallest']:g}", str(r["nbytes"]), r["note"])
        for r in rows
    ]
    tell(*table(("name", "format", "bits per value", "largest", "smallest", f"bytes of {shape}", "for"), cells, left=2))
    tell(
        "",
        "Largest and smallest are values of the element; the scale of a block multiplies them. Any format can be written as "
        "element/block@scale+minimum.",
    )


def _shape(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise typer.BadParameter(f"shape {text!r} cannot be parsed; write 4096x4096.", param_hint="--shape")
    return tuple(int(part) for part in parts)
