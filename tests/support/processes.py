"""Processes of gloo on this machine, for what runs on several ranks.

They are forked from a server that has imported torch and this package once for all tests of a run: an import in each costs about 3 s.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo")
IMPORTED = ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "paredown.optim", "paredown.apply_plan"]
PATIENCE = timedelta(minutes=10)  # until a process that hangs is an error; on busy cores others are slow


def run_on_two(work: Callable[[int, Path], Any], folder: Path) -> list[Any]:
    """What `work(rank, folder)` answers in each of two processes."""
    return run_on(2, work, folder)


def run_on(num_processes: int, work: Callable[[int, Path], Any], folder: Path) -> list[Any]:
    """What `work(rank, folder)` answers in each process; `work` is a function of a module, so that it can be found there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(
        _worker, (num_processes, work, port, folder), nprocs=num_processes, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]


def _worker(rank: int, num_processes: int, work: Callable[[int, Path], Any], port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_processes, timeout=PATIENCE)
    torch.save(work(rank, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()
