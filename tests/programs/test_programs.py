"""Random programs: gradients under sessions against those of the unmodified program.

    OMP_NUM_THREADS=1 python -m tests.programs 228 --plan int8            one program again; --shrink makes it small first

Programs and runs are fixed by their numbers, so verdicts repeat; `judging.py` says what is allowed, and why.
"""

from __future__ import annotations

import pytest

from tests.programs.judging import E4M3, INT8, UINT4, Rounded, differences, drawn, faults_of_exact, faults_of_rounded
from tests.programs.running import run
from tests.support.scale import scaled

NUM_PROGRAMS = scaled(200)
CHUNK = 25
# Every program runs under int8; one in so many also under formats of fewer bits.
SPARSE = ((E4M3, 5), (UINT4, 5))


def judged(number: int) -> list[str]:
    """What is wrong with a program under every plan; nothing if its own runs differ, which is told."""
    program, expected = drawn(number)
    if differences(expected, run(program)):
        return ["not repeatable"]
    plans: list[Rounded] = [INT8, *(rounded for rounded, every in SPARSE if number % every == 0)]
    faults = [f"fp32: {fault}" for fault in faults_of_exact(program, expected)]
    faults += [f"{rounded.name}: {fault}" for rounded in plans for fault in faults_of_rounded(program, expected, rounded)]
    again = f"python -m tests.programs {number}"
    return [*faults, f"{program}\nrun it alone: {again}"] if faults else []


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, CHUNK))
def test_gradients_of_random_programs(first: int) -> None:
    found = {number: judged(number) for number in range(first, min(first + CHUNK, NUM_PROGRAMS))}
    unrepeatable = [number for number, faults in found.items() if faults == ["not repeatable"]]
    assert len(unrepeatable) <= 1, f"programs {unrepeatable} differ from themselves when they run unmodified twice"
    faults = [f"program {number}: {fault}" for number, faults in found.items() if faults != ["not repeatable"] for fault in faults]
    assert not faults, "\n".join(faults)
