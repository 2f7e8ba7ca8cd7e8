"""Priors: what earlier tasks came to under which plans, as files that the package carries and files of the user's own.

    load("stored")       what users really run: formats in which tensors wait, on pictures and text
    load("simulated")    PEPPP's 99 configurations, arithmetic rounded, on pictures
    load("mine")         one of the user's own, made by `paredown prior add`
    load("file.json")    any file of this kind
    known("store")       the shipped one of this mode and all of the user's own, joined

Own priors lie in the folder that PAREDOWN_PRIORS names, else in ~/.local/share/paredown/priors. Nothing here needs torch.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from paredown.errors import PriorError
from paredown.plan.keys import closest
from paredown.search.earlier import Earlier, PlanRow, TaskRow, joined, pooled_noise
from paredown.search.earlier_json import read, write
from paredown.search.earlier_made import made_up

__all__ = ["Earlier", "PlanRow", "TaskRow", "add", "available", "joined", "known", "load", "made_up", "pooled_noise", "remove"]

SHIPPED = {"store": "stored", "simulate": "simulated"}  # by mode
FOLDER = "PAREDOWN_PRIORS"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def load(name: str | os.PathLike[str] = "stored") -> Earlier:
    """The prior of that name, or of that file."""
    text = os.fspath(name)
    if text.endswith(".json") or "/" in text or os.sep in text:
        return read(Path(text))
    return read(_paths_by_name(text))


def available() -> list[str]:
    """Names that `load` knows: shipped ones first."""
    shipped = [name for name in SHIPPED.values() if _shipped(name).is_file()]
    return [*shipped, *own()]


def own() -> list[str]:
    """The user's own."""
    return sorted(path.stem for path in folder().glob("*.json") if NAME.fullmatch(path.stem))


def known(mode: str = "store") -> Earlier:
    """All that is known in a mode: the shipped prior and the user's own."""
    if mode not in SHIPPED:
        raise PriorError(f"mode {mode!r} is unknown. Allowed: {', '.join(SHIPPED)}.")
    found = [load(name) for name in available()]
    parts = [one for one in found if one.mode == mode]
    if not parts:
        raise PriorError(f"there is no prior of mode {mode!r} yet: add your own sweeps with paredown prior add STORE.")
    return parts[0] if len(parts) == 1 else joined(parts, "+".join(one.name for one in parts))


def add(earlier: Earlier, name: str, *, replaces: bool = False) -> Path:
    """Keep a prior as one of the user's own; the file."""
    path = _own_path(name)
    if path.exists() and not replaces:
        raise PriorError(
            f"there is a prior {name!r} already. Remove it first (paredown prior remove {name}), or take another name."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write(earlier, path, name=name)
    return path


def remove(name: str) -> None:
    """Forget one of the user's own."""
    path = _own_path(name)
    if not path.is_file():
        raise PriorError(f"there is no prior {name!r} of your own. You have: {', '.join(own()) or 'none'}.")
    path.unlink()


def folder() -> Path:
    """Where the user's own are."""
    given = os.environ.get(FOLDER)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(given) if given else Path(base) / "paredown" / "priors"


def _own_path(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise PriorError(
            f"{name[:40]!r} is no name for a prior: letters, digits, dots, - and _, 64 at most, a letter or digit first."
        )
    if name in SHIPPED.values():
        raise PriorError(f"{name!r} is the prior that the package carries; it stays as it is. Take another name for your own.")
    return folder() / f"{name}.json"


def _shipped(name: str) -> Path:
    return Path(str(resources.files("paredown"))) / "search" / "shipped" / f"{name}.json"


def _paths_by_name(name: str) -> Path:
    path = _shipped(name) if name in SHIPPED.values() else folder() / f"{name}.json"
    if name in SHIPPED.values() and not path.is_file():
        raise PriorError(f"the {name} prior is not in this version of paredown yet. Known: {', '.join(available()) or 'none'}.")
    if not NAME.fullmatch(name) or not path.is_file():
        there = available()
        raise PriorError(
            f"there is no prior {name[:40]!r}. Closest: {closest(name[:40], there)}. Known: {', '.join(there) or 'none'}."
        )
    return path
