"""Makes a failing program small: drops lines and options as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.programs.programs import Options, Program

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails) -> Program:
    """The smallest program that dropping single lines and options of `program` comes to, of those that still fail."""
    while True:
        smaller = next((other for other in _smaller(program) if _tried(other, fails)), None)
        if smaller is None:
            return program
        program = smaller


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a line less, then with an option less, then with all lines in one block."""
    yield from (program.without(line) for line in reversed(program.lines) if len(program.lines) > 1)
    usual = Options()
    for name, value in vars(usual).items():
        if getattr(program.options, name) != value:
            yield replace(program, options=replace(program.options, **{name: value}))
    if any(line.block for line in program.lines):
        yield replace(program, lines=tuple(replace(line, block=0) for line in program.lines))


def _tried(program: Program, fails: Fails) -> bool:
    try:
        return fails(program)
    except Exception:  # PyTorch refuses it
        return False
