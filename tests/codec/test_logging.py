"""The logger `paredown` reports once which implementation is used, and nothing is printed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paredown
from paredown.codec import backend
from paredown.codec.packed import encode, round_trip
from tests.support.values import normal

FEW_CALLS = """
import torch, paredown
x = torch.ones(4, 70)
packed = paredown.encode(x, "int4/64@bf16", rounding="stochastic")
packed.decode()
paredown.round_trip(x, "e4m3fn")
"""


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> Iterator[None]:
    """Each test starts as a fresh process would, and leaves no record of what was logged."""
    forget()
    yield
    forget()


def forget() -> None:
    backend._log_once.cache_clear()
    backend._log_cpu_once.cache_clear()


def use_everything() -> None:
    for text in ("int4/64@bf16", "e4m3fn", "e2m1fn/16@e4m3fn"):
        encode(normal(4, 70), text).decode()
        round_trip(normal(4, 70), text)


def test_the_implementation_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="paredown"):
        use_everything()
        use_everything()
    logged = [record for record in caplog.records if record.name.split(".")[0] == "paredown"]
    assert len(logged) == 1
    assert logged[0].name == "paredown" and logged[0].levelno == logging.INFO
    assert "numba" in logged[0].getMessage()


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that sees this very package."""
    environment = {**os.environ, "PYTHONPATH": str(Path(paredown.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)


def test_a_fresh_process_is_silent() -> None:
    done = run(FEW_CALLS)
    assert (done.stdout, done.stderr) == ("", "")


def test_enabled_logging_prints_it_once() -> None:
    done = run("import logging\nlogging.basicConfig(level=logging.INFO)\n" + FEW_CALLS)
    assert done.stdout == ""
    assert [line[:14] for line in done.stderr.splitlines()] == ["INFO:paredown:"]


def test_the_logger_has_no_handlers_of_its_own() -> None:
    assert logging.getLogger("paredown").handlers == []
