"""How launched runs are: their jobs' states from Slurm, how far they are from their own metrics."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lingua.errors import UserError
from lingua.format import align, short_count, short_time
from lingua.slurm.jobs import ENDED, job_states

JOB = "job_id"  # file of a dump dir: the id of the job launched last
BASE = "base_config.yaml"
RESULTS = "results_*.json"  # files of a dump dir: what a job that does not train has come to
TAIL_BYTES = 65536  # of a log or metrics file that are looked at
# The last line of a Python traceback, which torch marks with the rank, or a mistake told without.
ERROR = re.compile(r"(\[rank\d+\]: ?)?(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*|error: .*")


@dataclass(frozen=True)
class RunStatus:
    name: str  # of the dump dir
    state: str  # Slurm's word; "gone" where Slurm no longer knows the job, "-" without one
    job_id: str
    step: int
    steps: int  # the step this launch goes up to; 0 of a job that does not train
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None  # seconds of training left, at the last measured speed
    failed: bool
    errors: list[str]  # what ended a failed run, the first of its ranks first


def status(folder: Path | str) -> list[RunStatus]:
    """Of the run in `folder`, or of all runs in it. Raises UserError where there is none."""
    folder = Path(folder)
    dump_dirs = [p.parent for p in (*folder.glob(BASE), *sorted(folder.glob(f"*/{BASE}")))]
    if not dump_dirs:
        raise UserError(f"{folder}: holds no run that was launched (no {BASE})")
    jobs = {d: (d / JOB).read_text().strip() if (d / JOB).exists() else "" for d in dump_dirs}
    states = job_states([job for job in jobs.values() if job])
    return [_status(d, jobs[d], states.get(jobs[d], "gone")) for d in dump_dirs]


def _status(dump_dir: Path, job: str, state: str) -> RunStatus:
    last = _last_metrics(dump_dir / "metrics.jsonl")
    config = OmegaConf.load(dump_dir / BASE)
    steps = config.get("steps", 0)
    steps = min(steps, config.get("stop_at") or steps)
    step = last.get("step", 0)
    step_s = last.get("step_time_s")
    done = step >= steps if steps else any(dump_dir.glob(RESULTS))
    # One that has made its last step may still have failed to save it; where Slurm has forgotten
    # the job, the step is all that is known.
    failed = not done if state == "gone" else state in ENDED and state != "COMPLETED"
    return RunStatus(
        name=dump_dir.name,
        state=state if job else "-",
        job_id=job or "-",
        step=step,
        steps=steps,
        loss=last.get("loss"),
        tokens_per_s=last.get("tokens_per_s"),
        left_s=None if step_s is None else (steps - step) * step_s,
        failed=failed,
        errors=list(_errors(dump_dir / "logs", job)) if failed else [],
    )


def table(runs: list[RunStatus]) -> str:
    """A line for each run, and below them what ended those that failed."""
    rows = [("run", "state", "step", "loss", "tok/s", "left", "job")]
    for run in runs:
        rows.append(
            (
                run.name,
                run.state,
                f"{run.step}/{run.steps}" if run.steps else "-",
                "-" if run.loss is None else f"{run.loss:.4f}",
                "-" if run.tokens_per_s is None else short_count(run.tokens_per_s),
                "-" if run.left_s is None else short_time(run.left_s),
                run.job_id,
            )
        )
    lines = align(rows, left=len(rows[0]))
    return "\n".join(lines + [f"{run.name}: {line}" for run in runs for line in run.errors])


def _last_metrics(path: Path) -> dict[str, Any]:
    """The newest whole line about a step."""
    for line in reversed(_tail(path)):
        try:
            values = json.loads(line)
        except ValueError:  # being written, or the middle of one
            continue
        if "loss" in values:
            return values
    return {}


def _errors(logs: Path, job: str) -> Iterator[str]:
    """The last words of each rank that failed; ranks that met the failure of another come later.
    Where no rank had any, what Slurm said."""
    found = []
    for path in (logs / job).rglob("*err*") if job else logs.rglob("*err*"):
        lines = [line for line in _tail(path) if ERROR.fullmatch(line)]
        if path.is_file() and lines:
            found.append((path.stat().st_mtime_ns, f"{lines[-1]} ({path})"))
    if not found and job:
        path = logs / f"{job}.log"
        found = [(0, f"{line} ({path})") for line in _tail(path) if "error:" in line][-1:]
    yield from (line for _, line in sorted(found))


def _tail(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
