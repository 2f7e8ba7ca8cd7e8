"""The script of docs/how_to/slurm.md, run with stand-ins for `sbatch` and `srun` on a real PostgreSQL server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("typer")

from paredown.study.sweeps.export import rows
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from tests.study.sweeps.test_sweep_cli import finished, write
from tests.study.sweeps.test_worker_faults import wait_for
from tests.support.work import ROOT

SCRIPT = ROOT / "examples" / "slurm_sweep.sh"
# sbatch --array=A-B SCRIPT ARGUMENT...: every array task at once, with Slurm's variables, and its output in the file of --output
SBATCH = r"""#!/bin/bash
array="${1#--array=}"; script="$2"; shift 2
grep -q '^#SBATCH --array=' "$script" || exit 9
export SLURM_ARRAY_TASK_MIN="${array%-*}" SLURM_CPUS_PER_TASK=1
for id in $(seq "${array%-*}" "${array#*-}"); do
    SLURM_ARRAY_TASK_ID="$id" bash "$script" "$@" > "paredown-1_$id.log" 2> "paredown-1_$id.err" &
    echo $! > "paredown-1_$id.pid"
done
status=0
for job in $(jobs -p); do wait "$job" || status=1; done
exit $status
"""
SRUN = '#!/bin/bash\n[ -n "$SLURM_ARRAY_TASK_ID" ] || exit 9\nexec "$@"\n'
PAREDOWN = f'#!/bin/bash\nexec {sys.executable} -W error -c "from paredown.cli import main; main()" "$@"\n'


# a paredown that prints its arguments
ARGUMENTS = '#!/bin/bash\necho "$SLURM_ARRAY_TASK_ID threads $OMP_NUM_THREADS cpus $SRUN_CPUS_PER_TASK: $*"\n'


def submit(folder: Path, address: str, *arguments: str, paredown: str = PAREDOWN) -> subprocess.Popen[str]:
    """sbatch with these arguments, in a group of processes of its own."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("paredown", paredown)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "PAREDOWN_STORE": address}
    return subprocess.Popen(["sbatch", *arguments], cwd=folder, env=env, text=True, start_new_session=True)


def logs(folder: Path, kind: str) -> str:
    """What all array tasks wrote."""
    return "".join(path.read_text() for path in sorted(folder.glob(f"paredown-1_*.{kind}")))


@pytest.mark.full
@pytest.mark.parametrize(("array", "num_seeds", "engine"), [("0-1", 1, "inline"), ("3-6", 5, "local")])
def test_a_job_array_finishes_a_sweep(
    tmp_path: Path, new_postgres: Callable[[], str], array: str, num_seeds: int, engine: str
) -> None:
    """Every trial once. In the second, Slurm's SIGTERM ends one worker, and a node failure (kill -9) another one."""
    address = new_postgres()
    sweep = write(tmp_path)
    sweep.write_text(sweep.read_text().replace("[0, 1, 2, 3, 4]", str(list(range(num_seeds)))))
    job = submit(tmp_path, address, f"--array={array}", str(SCRIPT), sweep.name, "--engine", engine, "--patience", "2")
    try:
        if num_seeds > 1:
            with Store(address) as store:
                wait_for(lambda: [counts for counts in count(store) if counts.finished >= 3] or job.poll() is not None)
                for task, sent in ((4, signal.SIGTERM), (5, signal.SIGKILL)):
                    with suppress(ProcessLookupError):  # on busy cores it may have ended
                        os.kill(int((tmp_path / f"paredown-1_{task}.pid").read_text()), sent)
        status = job.wait(timeout=600)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    reported = finished(logs(tmp_path, "log"))
    with Store(address) as store:
        found = rows(store)
    assert status == 0 or num_seeds > 1, logs(tmp_path, "err")
    assert [row["status"] for row in found] == ["done"] * 4 * num_seeds
    assert len(set(reported)) == len(reported) >= 4 * num_seeds - (num_seeds > 1), "one at most was killed before it was announced"
    assert set(reported) <= {row["key"] for row in found}


def test_the_first_array_task_adds_trials_and_the_others_are_workers(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").touch()
    job = submit(tmp_path, "postgresql://db/trials", "--array=4-6", str(SCRIPT), "sweep.toml", "--slots", "2", paredown=ARGUMENTS)
    assert job.wait(timeout=600) == 0, logs(tmp_path, "err")
    worker = f"threads 1 cpus 1: worker --tasks {tmp_path} --wait 12h --slots 2"
    first = f"4 threads 1 cpus 1: sweep run {tmp_path}/sweep.toml --slots 2"
    assert logs(tmp_path, "log").splitlines() == [first, f"5 {worker}", f"6 {worker}"]


def test_the_script_needs_a_store(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0"}
    ran = subprocess.run(["bash", str(SCRIPT), "sweep.toml"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "Set PAREDOWN_STORE to the PostgreSQL URL of the store" in ran.stderr


def test_the_page_has_the_script() -> None:
    page = (ROOT / "docs" / "how_to" / "slurm.md").read_text(encoding="utf-8")
    assert f"```bash\n{SCRIPT.read_text(encoding='utf-8')}```\n" in page
