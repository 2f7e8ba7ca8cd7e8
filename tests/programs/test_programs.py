"""Random programs: gradients under sessions against those of the unmodified program.

    OMP_NUM_THREADS=1 python -m tests.programs 228 --plan int8            one program again; --shrink makes it small first
    python -m tests.programs 3000 --count 400 --workers 8 --device cuda     400 others, on a GPU

Programs and runs are fixed by their numbers, so verdicts repeat; `judging.py` says what is allowed, and why.
"""

from __future__ import annotations

import pytest

from tests.programs import running
from tests.programs.judging import E4M3, INT8, UINT4, faults_of_exact, faults_of_rounded
from tests.programs.programs import PLAIN, THREADS, Options, Program, chain
from tests.programs.running import run
from tests.programs.survey import UNREPEATABLE, Verdict, judge
from tests.support.scale import scaled

# Programs whose gradients were wrong: operations of the first block, of the second one, and their structure.
FOUND = {
    "views of one mask storage": (("linear", "two views"), (), PLAIN),
    "three views of one storage": (("linear", "three views"), (), PLAIN),
    "halves of one storage": (("linear", "views of halves"), (), PLAIN),
    "threads of which one ends before a layer": (("linear", "gelu", "linear"), ("linear", "gelu"), THREADS),
    "threads of which one ends after a norm": (("linear", "layer norm", "linear"), ("linear", "layer norm"), THREADS),
    "equal rows before a norm, whose gradients cancel": (("sub", "linear", "unfold", "batch norm 1d", "layer norm"), (), PLAIN),
    "attention whose rows attend to one key": (("mul of itself", "group norm", "causal attention"), (), PLAIN),
    "attention with large logits": (("linear", "custom square", "softmax over rows", "causal attention"), (), PLAIN),
}
NUM_PROGRAMS = scaled(200)
CHUNK = 25
# Every program runs under int8; one in so many also under formats of fewer bits.
SPARSE = ((E4M3, 5), (UINT4, 5))


def judged(number: int) -> Verdict:
    """What is wrong with a program under every plan."""
    plans = ["fp32", "int8", *(rounded.name for rounded, every in SPARSE if number % every == 0)]
    return judge(number, plans)


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, CHUNK))
def test_gradients_of_random_programs(first: int) -> None:
    found = [verdict for number in range(first, min(first + CHUNK, NUM_PROGRAMS)) if (verdict := judged(number)).faults]
    unrepeatable = [verdict.number for verdict in found if UNREPEATABLE in verdict.faults]
    assert len(unrepeatable) <= 1, f"programs {unrepeatable} differ from themselves when they run unmodified twice"
    faults = [str(verdict) for verdict in found if UNREPEATABLE not in verdict.faults]
    assert not faults, "\n".join([*faults, "python -m tests.programs NUMBER runs one alone"])


def test_gradients_of_passes_that_repeat_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps instead of three: from the third pass on, parts of the graph are read without a search."""
    monkeypatch.setattr(running, "NUM_STEPS", 8)
    verdicts = [judge(number, ("fp32", "int8")) for number in range(1000, 1000 + scaled(25))]
    faults = [str(verdict) for verdict in verdicts if verdict.faults and UNREPEATABLE not in verdict.faults]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", FOUND)
def test_gradients_that_were_wrong(name: str) -> None:
    first, second, structure = FOUND[name]
    lines = [*chain(first, 0), *chain(second, 1)]
    program = Program(1, tuple(lines), Options(structure=structure, needs_input_gradient=True))
    expected = run(program)
    faults = faults_of_exact(program, expected)
    faults += [fault for rounded in (INT8, UINT4) for fault in faults_of_rounded(program, expected, rounded)]
    assert not faults, "\n".join([*faults, str(program)])
