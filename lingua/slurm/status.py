"""The status of launched runs: their jobs' states from Slurm, their progress from metrics.jsonl."""

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingua.config.values import plain, read_file
from lingua.errors import UserError
from lingua.format import align, printable, short_count, short_time
from lingua.slurm.jobs import ENDED, job_states

JOB = "job_id"  # file of a dump dir: the id of the job launched last
BASE = "base_config.yaml"
RESULTS = "results_*.json"  # files of a dump dir: results of a job that does not train
TAIL_BYTES = 65536  # that are read of a log or metrics file
# The last line of a Python traceback, which torch prefixes with the rank, or of a UserError.
ERROR = re.compile(r"(\[rank\d+\]: ?)?(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*|error: .*")


@dataclass(frozen=True)
class RunStatus:
    name: str  # of the dump dir
    state: str  # Slurm's word; "gone" where Slurm no longer knows the job, "-" without a job
    job_id: str
    step: int
    steps: int  # the step that the job trains up to; 0 for a job that does not train
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None  # seconds of training left at the last measured speed
    failed: bool
    errors: list[str]  # of a failed run's ranks, the first one first


def status(folder: Path | str) -> list[RunStatus]:
    """The status of the run in `folder`, or of all runs in it. Raises UserError if none."""
    folder = Path(folder)
    dump_dirs = [p.parent for p in (*folder.glob(BASE), *sorted(folder.glob(f"*/{BASE}")))]
    if not dump_dirs:
        raise UserError(f"{folder}: no run was launched there (it has no {BASE})")
    jobs = {d: "".join(_tail(d / JOB)[-1:]).strip() for d in dump_dirs}
    states = job_states([job for job in jobs.values() if job])
    return [_status(d, jobs[d], states.get(jobs[d], "gone")) for d in dump_dirs]


def _status(dump_dir: Path, job: str, state: str) -> RunStatus:
    last = _last_metrics(dump_dir / "metrics.jsonl")
    config = plain(read_file(dump_dir / BASE, str(dump_dir / BASE)))
    steps = int(_number(config, "steps") or 0)
    steps = min(steps, int(_number(config, "stop_at") or steps))
    step, step_s = int(_number(last, "step") or 0), _number(last, "step_time_s")
    done = step >= steps if steps else any(dump_dir.glob(RESULTS))
    # A run can fail after its last step, while it saves. Where Slurm has forgotten the job, only
    # the step is known.
    failed = not done if state == "gone" else state in ENDED and state != "COMPLETED"
    return RunStatus(
        name=dump_dir.name,
        state=state if job else "-",
        job_id=job or "-",
        step=step,
        steps=steps,
        loss=_number(last, "loss"),
        tokens_per_s=_number(last, "tokens_per_s"),
        left_s=None if step_s is None else (steps - step) * step_s,
        failed=failed,
        errors=_errors(dump_dir / "logs", job) if failed else [],
    )


def table(runs: list[RunStatus]) -> str:
    """A line for each run, then the errors of those that failed."""
    rows = [("run", "state", "step", "loss", "tok/s", "left", "job")]
    for run in runs:
        step = f"{run.step}/{run.steps}" if run.steps else "-"
        loss = "-" if run.loss is None else f"{run.loss:.4f}"
        speed = "-" if run.tokens_per_s is None else short_count(run.tokens_per_s)
        left = "-" if run.left_s is None else short_time(run.left_s)
        rows.append((run.name, run.state, step, loss, speed, left, run.job_id))
    lines = align(rows, left=len(rows[0]))
    errors = [f"{run.name}: {error}" for run in runs for error in run.errors]
    return printable("\n".join(lines + errors))


def _number(values: dict[str, Any], key: str) -> float | None:
    """A finite number of a file, which may be somebody else's; None if it has none."""
    value = values.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _last_metrics(path: Path) -> dict[str, Any]:
    """The last complete line about a step. Other lines are events."""
    for line in reversed(_tail(path)):
        with suppress(ValueError):  # incomplete
            values = json.loads(line)
            if isinstance(values, dict) and "loss" in values:
                return values
    return {}


def _errors(logs: Path, job: str) -> list[str]:
    """The last error of each rank, by time: a rank that only lost contact with another ends later.
    Slurm's own error where no rank has one."""
    errors = []
    for path in (logs / job).rglob("*err*"):
        lines = [line for line in _tail(path) if ERROR.fullmatch(line)]
        errors += [(path.stat().st_mtime_ns, f"{line} ({path})") for line in lines[-1:]]
    if not errors and job:
        path = logs / f"{job}.log"
        return [f"{line} ({path})" for line in _tail(path) if "error:" in line][-1:]
    return [error for _, error in sorted(errors)]


def _tail(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
