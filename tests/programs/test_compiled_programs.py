"""Random programs compiled in a session: gradients against those of torch.compile without one.

    OMP_NUM_THREADS=1 python -m tests.programs 228 --compiled            one program again; --shrink makes it small first

Exact plans must change no bit, as the same operations run on the same values, some of them in backward. `compiling.py` says what runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from paredown import Plan
from tests.programs.judging import INT8, faults_of_exact, faults_of_rounded
from tests.programs.programs import Options, Program, chain
from tests.programs.running import run
from tests.programs.survey import REFUSED, UNREPEATABLE, judge
from tests.support.scale import scaled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
# Programs whose gradients were wrong, or that raised: operations, and the type of values.
FOUND = {
    "placeholders with names of others": (("encoder with dropout",), "bfloat16"),
    "attention of equal views": (("linear", "attention"), "float32"),
}
NUM_PROGRAMS = scaled(3)
CHUNK = 3
NOT_JUDGED = {REFUSED, UNREPEATABLE}  # of torch.compile alone


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, CHUNK))
def test_gradients_of_compiled_random_programs(first: int) -> None:
    verdicts = [judge(number, ("fp32", "int8"), is_compiled=True) for number in range(first, first + CHUNK)]
    assert sum(not NOT_JUDGED & verdict.faults.keys() for verdict in verdicts) >= CHUNK // 2
    faults = [str(verdict) for verdict in verdicts if verdict.faults.keys() - NOT_JUDGED]
    assert not faults, "\n".join([*faults, "python -m tests.programs NUMBER --compiled runs one alone"])


@pytest.mark.parametrize("name", FOUND)
def test_compiled_programs_that_were_wrong(name: str) -> None:
    operations, dtype = FOUND[name]
    program = Program(1, tuple(chain(operations, 0)), Options(dtype=dtype, needs_input_gradient=True))
    expected = run(program, is_compiled=True)
    faults = faults_of_exact(program, expected, is_compiled=True) + faults_of_rounded(program, expected, INT8, is_compiled=True)
    assert not faults, "\n".join([*faults, str(program)])


def test_a_compiled_session_that_is_too_coarse_is_told() -> None:
    program = Program(1, tuple(chain(("linear", "gelu", "linear"), 0)), Options())
    expected = run(program, is_compiled=True)
    coarse = replace(INT8, plan=Plan.uniform(activation="int2/64@bf16"))
    faults = faults_of_rounded(program, expected, coarse, is_compiled=True)
    assert faults and all(" off, " in fault for fault in faults)
