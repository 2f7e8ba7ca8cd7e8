"""Two processes of gloo on this machine, for what runs on several ranks."""

from __future__ import annotations

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


def run_on_two(work: Callable[[int, Path], Any], folder: Path) -> list[Any]:
    """What `work(rank, folder)` answers in each of two processes; `work` is a function of a module, so that it can be found there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (work, port, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _worker(rank: int, work: Callable[[int, Path], Any], port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.save(work(rank, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()
