"""The status of launched runs: the table of `lingua runs`, their jobs' states from Slurm, and the
errors of those that failed."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lingua.base.dump_dir import JOB_ID, LOGS, RESULTS
from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.parallel.slurm import run_slurm
from lingua.run.records import Record
from lingua.tools.runs.records import open_runs
from lingua.tools.runs.settings import differing
from lingua.tools.runs.table import TAIL_BYTES, Row, row_of, shown_keys, table

LOG_TAIL_BYTES = 65536  # each log is read from this many bytes before its end
# The last line of a Python traceback, which torch prefixes with the rank, or of a UserError.
ERROR = re.compile(r"(\[rank\d+\]: ?)?(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*|error: .*")
# Slurm's lines about a process that was killed, and the last one of lingua.tools.slurm.end.
KILLED = re.compile(r".*error:.*(oom.kill|out of memory|: Killed|TIME LIMIT|NODE FAILURE).*", re.I)
END = re.compile(r"job \S+: \w+, exit code .*")

# States of a job that Slurm does not start again by itself.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}

# Variables of Slurm, MPI, torchrun and torch for the place of a process in its job, and of wandb
# for the address of its own process.
PLACE = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI|PMIX|TORCHELASTIC|MASTER|GROUP|ROLE)_.*|(LOCAL_)?(RANK|WORLD_SIZE)"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|WANDB_SERVICE"
)


@dataclass(frozen=True)
class RunStatus:
    record: Record
    row: Row  # the run's line in the table
    state: str  # Slurm's word; "gone" where Slurm no longer knows the job, "-" without a job
    job_id: str
    failed: bool
    errors: list[str]  # the errors of a failed run's ranks, by time, and how its job ended


def status(folder: Path | str) -> list[RunStatus]:
    """The status of the runs in or below `folder`. Raises UserError if there is none."""
    records = open_runs([folder], TAIL_BYTES)
    jobs = ["".join(_tail(record.folder / JOB_ID)[-1:]).strip() for record in records]
    states = job_states([job for job in jobs if job])
    return [_status(r, j, states.get(j, "gone")) for r, j in zip(records, jobs, strict=True)]


def _status(record: Record, job: str, state: str) -> RunStatus:
    row = row_of(record)
    # a job that does not train writes RESULTS
    done = any(record.folder.glob(RESULTS)) if row.steps is None else row.state == "finished"
    # A run can fail after its last step, while it saves. Where Slurm does not know the job, the
    # files do.
    failed = state in ENDED and state != "COMPLETED"
    if state == "gone":
        failed = not done and row.state != "running"
    errors = [f"{line} ({path})" for line, path in errors_of(record.folder, job) * failed]
    return RunStatus(record, row, state if job else "-", job or "-", failed, errors)


def status_table(runs: list[RunStatus]) -> str:
    """A line for each run, then the errors of those that failed."""
    more = {"job": [run.job_id for run in runs], "Slurm": [run.state for run in runs]}
    keys = shown_keys(differing([run.record for run in runs]))
    shown = table([run.row for run in runs], keys, more=more)
    errors = [f"{run.row.name}: {error}" for run in runs for error in run.errors]
    return "\n".join([shown, *map(printable, errors)])


def errors_of(folder: Path, job: str) -> list[tuple[str, Path]]:
    """The last error of each rank, by time, with its log: a rank that only lost contact with
    another ends later. Slurm's own error is the first where it is about a process that was killed,
    or no rank has one. The last line is how the job ended."""
    errors, logs = [], folder / LOGS
    for path in (logs / job).rglob("*err*"):
        lines = [line for line in _tail(path) if ERROR.fullmatch(line)]
        errors += [(path.stat().st_mtime_ns, line, path) for line in lines[-1:]]
    shown = [(line, path) for _, line, path in sorted(errors)]
    of_job, kind = job_lines(folder, job), KILLED if shown else re.compile(r".*error:.*")
    shown[:0] = [each for each in of_job if kind.fullmatch(each[0])][-1:]
    return shown + [each for each in of_job if END.fullmatch(each[0])][-1:]


def job_lines(folder: Path, job: str) -> list[tuple[str, Path]]:
    """The last lines of a job's own log, which has what srun prints, with its path; none without a
    job."""
    logs = [where / LOGS / f"{job}.log" for where in (folder, folder.parent)] if job else []
    return [(line, path) for path in logs for line in _tail(path)]  # a sweep's are in its own


def _tail(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


# ---- jobs


def environment_of_another() -> dict[str, str]:
    """This process's environment, for a command that launches another job."""
    return {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not PLACE.fullmatch(k)}


def job_states(ids: list[str]) -> dict[str, str]:
    """{job id: PENDING, RUNNING, FAILED, ...} of the jobs that Slurm still knows.

    The controller forgets ended jobs after minutes; accounting, where a cluster has it, does not.
    """
    states: dict[str, str] = {}
    if not ids:
        return states
    for command in (
        ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State"],
        ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T"],
    ):
        try:
            shown = run_slurm(*command, f"--jobs={','.join(ids)}")
        except UserError:  # no accounting, or the controller knows none of the jobs
            continue
        for line in shown.splitlines():
            job, _, state = line.partition("|")
            states[job] = state.split()[0]  # "CANCELLED by 1000"
    return states
