"""The end of a job: whether it is queued again since a rank has failed, and the user's `on_stop`.

The batch script calls it, also where Slurm ends the job. It exits with 75 where the job is to be
queued again, and with 2 after a mistake.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from lingua.base.dump_dir import CHECKPOINTS, LOGS, STEP_FOLDER
from lingua.base.files import load_json
from lingua.base.format import printable
from lingua.parallel.signals import STOPPING
from lingua.run.records import Record
from lingua.tools.slurm.status import END, errors_of, job_lines

ON_STOP_S = 60.0  # seconds that on_stop may take
# srun's line about a rank that found a mistake, or ranks that differ: its own exit code may be that
# of another, which it ended before that one could.
ENDED = re.compile(r"srun: error: .*: Exited with exit code ([23])")
REASONS = {2: "mistake", 3: "differs"}  # neither is queued again


def end_job(code: int, max_restarts: int, dump_dir: Path, job: str, slurm: str) -> str:
    """How a job has ended, in a word: `restarted` where it is to be queued again. `max_restarts` is
    0 before the run; `slurm`, empty where Slurm has not answered: the job's state, its restarts,
    whether it may be queued again and has a batch script, and a reason."""
    state, restarts, *may, why = (slurm or "RUNNING 0 None").split(maxsplit=4)
    reason, seen = how_ended(code, dump_dir, job), ""
    if state != "RUNNING":  # the run has queued it again, or Slurm or a person has ended it
        was = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        ended = "failed" if why == "TimeLimit" else "cancelled"
        reason = "requeued" if int(restarts) > was else ended
    elif reason == "failed" and max_restarts:
        folder = Path(Record(dump_dir).config.get("checkpoint.path") or dump_dir / CHECKPOINTS)
        names = os.listdir(folder) if folder.is_dir() else []
        newest = max(filter(STEP_FOLDER.fullmatch, names), default="")
        count = dump_dir / LOGS / job / "failures.json"
        failures = 1 + (load_json(count).get(newest, 0) if count.exists() else 0)
        count.write_text(json.dumps({newest: failures}))
        reason = "restarted" if failures <= max_restarts and may == ["1", "1"] else reason
        seen = f", failure {failures} without a new checkpoint (max_restarts = {max_restarts})"
    print(f"job {job}: {reason}, exit code {code}{seen}", file=sys.stderr, flush=True)
    return reason


def how_ended(code: int, dump_dir: Path, job: str) -> str:
    """finished, stopped before its last step, mistake, differs or failed."""
    if code == 0:
        record = Record(dump_dir)  # one that does not train has no end
        return "finished" if record.end is None or record.state == "finished" else "stopped"
    if not job and code - 128 in STOPPING:  # in a job a run that is stopped exits with 0
        return "stopped"
    lines = [line for line, _ in job_lines(dump_dir, job)]
    starts = [i for i, line in enumerate(lines) if END.fullmatch(line)]  # behind an earlier end
    ends = filter(None, map(ENDED.fullmatch, lines[max(starts, default=0) :]))
    codes = [code, *(int(end[1]) for end in ends)]
    return next((reason for number, reason in REASONS.items() if number in codes), "failed")


def report_end(on_stop: list[str], code: int, run: Path, job: str = "", reason: str = "") -> None:
    """Run `on_stop`, if there is one. What becomes of it changes nothing."""
    if not on_stop:
        return
    reason = reason or how_ended(code, run, job)
    errors = errors_of(run, job) if reason in ("failed", "restarted", *REASONS.values()) else []
    error, log = [*errors, ("", run / LOGS / job)][0]
    about = {"REASON": reason, "EXIT_CODE": code, "DUMP_DIR": run, "JOB_ID": job}
    about |= {"RUN": Record(run).config.get("name"), "ERROR": error, "LOG": log}
    env = os.environ | {f"LINGUA_{key}": printable(str(value)) for key, value in about.items()}
    try:
        subprocess.run(on_stop, env=env, stdin=subprocess.DEVNULL, timeout=ON_STOP_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        print(f"on_stop: {failure}", file=sys.stderr)


if __name__ == "__main__":
    code, most, dump_dir, job, slurm, *on_stop = sys.argv[1:]
    try:
        reason = end_job(int(code), int(most), Path(dump_dir), job, slurm)
    except (OSError, ValueError) as error:  # a full disk: what is not counted must not come again
        reason = "failed"
        print(f"job {job}: failed, exit code {code}, {error}", file=sys.stderr)
    report_end(on_stop, int(code), Path(dump_dir), job, reason)
    sys.exit({"restarted": 75, "mistake": 2}.get(reason, 0))
