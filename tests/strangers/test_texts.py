"""Formats, sizes, tasks and plans as text: a value or a sentence, each time; sweeps as TOML."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import paredown as pare
from paredown.formats.catalog import find_format
from paredown.sizes import parse_bytes
from paredown.study.tasks.lookup import find_task, parse_options
from tests.strangers.mutations import TEXTS, answers, thousands, wrong_bytes

TOML = b"""
name = "widths"
tasks = ["digits", "mine.py:small"]
seeds = [0, 1]
method = "uniform"
share = 0.2
draw_seed = 0
mode = "store"
timeout_seconds = 3600
store = "trials.db"
[[plans]]
[[plans]]
preset = "lpmm"
[[plans]]
activation = ["int4/64@bf16", "int8/64@bf16"]
weight = "int8/64@e8m0"
"""
VALUES = (
    "[]",
    "[[]]",
    "1e400",
    "-1",
    "true",
    "1979-05-27",
    '""',
    "{}",
    '"\\u0000"',
    "[1, 'a']",
    "nan",
    "99999999999999999999",
    "9" * 6000,
    "[" + "9" * 6000 + "]",
    "inf",
    "[{}]",
    '"x"',
)


@thousands(1500)
@given(TEXTS)
@example("9" * 5000)
@example("int" + "9" * 5000)
@example("e" + "9" * 400 + "m3")
@example("int8/" + "9" * 5000 + "@bf16")
@example("e4m3b" + "9" * 5000)
def test_a_format(text: str) -> None:
    if answers(lambda: find_format(text)):
        found = find_format(text)
        assert pare.Format.parse(str(found)) == found and found.nbytes((3, 100)) > 0


@thousands(1500)
@given(TEXTS)
@example("9" * 5000 + "GiB")
@example("0." + "1" * 5000 + "%")
@example("8GiB\n8GiB")
@example("\u0668GiB")
def test_a_size(text: str) -> None:
    if answers(lambda: parse_bytes(text, whole=1000)):
        assert parse_bytes(text, whole=1000) >= 0


@thousands(600)
@given(TEXTS)
def test_options(text: str) -> None:
    answers(lambda: parse_options(text))


@thousands(200)
@given(
    st.builds(
        lambda kind, rest: kind + rest,
        st.sampled_from(("digit", "digits#", "digits#model=", "images:", "text:", "x.py:", "", "#")),
        TEXTS,
    )
)
@example("digits#batch=0")
@example("digits#model=mlp,width=-1")
@example("digits#model=mlp,batch=" + "9" * 5000)
@example("digits#lr=nan")
@example("digits#steps=-1")
@example("images:" + "x" * 5000)
@example("text:\x00")
def test_a_task(text: str) -> None:
    answers(lambda: find_task(text, "/nonexistent"))


def sweeps() -> st.SearchStrategy[bytes]:
    """The right file with bytes changed, or a line of it with another value."""
    lines = TOML.decode().splitlines()
    at = [i for i, line in enumerate(lines) if "=" in line]

    def changed(place: int, value: str) -> bytes:
        name = lines[place].partition("=")[0]
        return "\n".join([*lines[:place], f"{name}= {value}", *lines[place + 1 :]]).encode()

    return st.one_of(wrong_bytes(TOML), st.builds(changed, st.sampled_from(at), st.sampled_from(VALUES)))


def test_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from paredown.study.sweeps.sweep_file import load_sweep

    path = tmp_path / "sweep.toml"
    path.write_bytes(TOML)
    assert answers(lambda: load_sweep(path))

    @thousands(300)
    @given(sweeps())
    def check(data: bytes) -> None:
        path.write_bytes(data)
        if answers(lambda: load_sweep(path)):
            found = load_sweep(path).sweep
            answers(found.draw if found.method != "cheap_first" else lambda: None)

    check()
    for data in (
        b"a=" + b"[" * 50_000,
        b"tasks = ['x']\n" * 2,
        b"",
        b"\xff",
        b"x." * 500_000 + b"y = 1",
        b"a = {" + b"'x' . " * 500_000 + b"y = 1}",
    ):
        path.write_bytes(data)
        assert not answers(lambda: load_sweep(path))
