"""Tasks by name that are found again: a process that runs many trials of one task reads its data once.

A task on a file is made again when the file has changed; one on a folder, or of the user's own code, each time.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from paredown.errors import TaskError
from paredown.runs.tasks import WITH_FILE, Task, find_file, find_task

KEPT = 32  # tasks: those of a sweep that runs cheap plans first take turns
Stamp = tuple[int, int]


def found_task(text: str, folder: Path | None) -> Task:
    """`find_task(text, folder)`, the same object for the same words and the same file; with None data of this folder, and no code."""
    head = text.strip().partition("#")[0].strip()
    if ".py:" in head:
        if folder is None:
            raise TaskError("a file of code is named, and no folder that tasks may come from: it is not run.")
        return find_task(text, folder)
    folder = Path().resolve() if folder is None else folder
    kind, _, file = head.partition(":")
    path = find_file(file, folder) if kind in WITH_FILE and file else None
    if path is not None and path.is_dir():
        return find_task(text, folder)  # a picture in it may have changed
    return _kept(text, folder, None if path is None else _stamp(path))


@lru_cache(maxsize=KEPT)
def _kept(text: str, folder: Path, stamp: Stamp | None) -> Task:
    return find_task(text, folder)


def _stamp(path: Path) -> Stamp:
    """When a file was written, and how long it is."""
    seen = path.stat()
    return (seen.st_mtime_ns, seen.st_size)
