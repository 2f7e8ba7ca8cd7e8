"""Runs one random program again, and says what is wrong with it: python -m tests.programs 228 --plan int8 --shrink."""

from __future__ import annotations

import argparse

from tests.programs.judging import ROUNDED, drawn, faults_of_exact, faults_of_rounded
from tests.programs.programs import Program
from tests.programs.running import run
from tests.programs.shrinking import shrunk


def faults(program: Program, plan: str) -> list[str]:
    """What is wrong with a program under a plan by its name."""
    expected = run(program)
    if not expected.is_sane:
        return []
    return faults_of_exact(program, expected) if plan == "fp32" else faults_of_rounded(program, expected, ROUNDED[plan])


def main() -> None:
    """Print the program and its faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--plan", choices=["fp32", *ROUNDED], default="int8")
    parser.add_argument("--shrink", action="store_true", help="drop lines and options as long as it still fails")
    told = parser.parse_args()
    program, _ = drawn(told.number)
    program = shrunk(program, lambda other: bool(faults(other, told.plan))) if told.shrink else program
    print(program)
    print("\n".join(faults(program, told.plan)) or "nothing is wrong")


if __name__ == "__main__":
    main()
