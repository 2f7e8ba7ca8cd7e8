"""Runs random programs by their numbers, and says what is wrong with them.

python -m tests.programs 228 --plan int8 --shrink                             one program, made as small as it fails
python -m tests.programs 3000 --count 400 --workers 8 --device cuda           400 programs from 3000 on, under fp32 and int8
python -m tests.programs 0 --count 100 --compiled                             100 programs compiled by torch.compile
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.programs.judging import drawn
from tests.programs.programs import Program
from tests.programs.running import run
from tests.programs.shrinking import shrunk
from tests.programs.survey import PLANS, Job, Verdict, faults_by_kind, prepare, summary, survey

PROGRESS_SECONDS = 60


def main() -> None:
    """Print the faults; the exit status is 1 if there are any."""
    told = _parser().parse_args()
    job = Job(range(told.number, told.number + told.count), tuple(told.plan), told.device, told.compiled)
    if told.count == 1:
        sys.exit(_one(job, is_shrunk=told.shrink))
    verdicts = survey(job, told.workers, Progress(told.count))
    print(summary(verdicts), flush=True)
    sys.exit(any(verdict.faults for verdict in verdicts))


class Progress:
    """Prints faults as they come, and once in a minute how far it is."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.printed = total, 0, time.monotonic()

    def __call__(self, verdict: Verdict) -> None:
        self.done += 1
        if verdict.faults:
            print(verdict, flush=True)
        if time.monotonic() - self.printed > PROGRESS_SECONDS:
            self.printed = time.monotonic()
            print(f"{self.done} of {self.total} programs", flush=True)


def _one(job: Job, *, is_shrunk: bool) -> int:
    """Print one program and its faults."""
    prepare(job.device)
    program, _ = drawn(job.numbers[0], job.device)
    program = shrunk(program, lambda other: bool(_faults(other, job))) if is_shrunk else program
    print(program)
    faults = _faults(program, job)
    print("\n".join(f"{kind}: {text}" for kind, texts in faults.items() for text in texts) or "nothing is wrong")
    return int(bool(faults))


def _faults(program: Program, job: Job) -> dict[str, list[str]]:
    expected = run(program, is_compiled=job.is_compiled)
    return faults_by_kind(program, expected, job.plans, is_compiled=job.is_compiled) if expected.is_sane else {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="of the (first) program")
    parser.add_argument("--count", type=int, default=1, help="how many programs, from that number on")
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=["fp32", "int8"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--compiled", action="store_true", help="compiled in a session, against torch.compile without one")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--shrink", action="store_true", help="of one program: drop lines and options as long as it still fails")
    return parser


if __name__ == "__main__":
    main()
