"""The runs of a study: launched by `lingua stool`, watched, ended where they take too long or too
much space, and read."""

import math
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lingua.base.dump_dir import JOB_ID
from lingua.base.errors import UserError, import_optional
from lingua.parallel.signals import StopRequest
from lingua.parallel.slurm import run_slurm
from lingua.run.records import Record
from lingua.tools.runs.held_out import heldout
from lingua.tools.slurm.status import ENDED, errors_of, job_states
from lingua.tools.study.change import BASE, environment
from lingua.tools.study.ledger import Line

POLL_S, JOB_POLL_S = 0.5, 5.0
FULL = re.compile("No space left|Disk quota|could not be saved|cannot be written")
LAUNCH_LOG = "launch.log"  # what lingua stool prints


class Interrupted(Exception):
    """A signal, which the runs have received too."""


def run_of(root: Path, seed: int) -> Path:
    """The dump dir of a seed."""
    return next(root.glob(f"*_seed={seed}"), root / "none")


def run_all(
    study: Path, settings: Mapping[str, Any], arm: Line, root: Path, seeds: Sequence[int]
) -> dict[int, str]:
    """Run these seeds of an arm to their ends, or continue those that began. Returns why some were
    ended. Raises Interrupted, and UserError where they cannot be launched."""
    ended: dict[int, str] = {}
    root.mkdir(parents=True, exist_ok=True)
    _kill(_processes(root))  # of a study that was killed
    words = [f"name={study.name}-{arm['label']}", f"dump_dir={root}", "dirs_exists_ok=true"]
    words += [f"sweep.seed={','.join(map(str, seeds))}"]
    words = [f"config={study / BASE}", *arm["words"], *words]
    command = [sys.executable, "-m", "lingua", "stool", *settings["job"], *words]
    env = environment(study, arm["code"])
    limits = settings["minutes_per_run"], settings["gib_per_run"]
    with StopRequest() as stop, (root / LAUNCH_LOG).open("ab") as log:
        if not _is_queued(root):  # jobs go on without the study
            options: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            options["cwd"] = settings["cwd"]
            with subprocess.Popen(command, env=env, start_new_session=True, **options) as process:
                while process.poll() is None:
                    if stop.signal is not None:
                        process.terminate()  # runs save and leave
                        process.wait()
                    _end_beyond(root, seeds, *limits, ended)
                    time.sleep(POLL_S)
        while _is_queued(root) and stop.signal is None:
            _end_beyond(root, seeds, *limits, ended)
            time.sleep(JOB_POLL_S)
    if stop.signal is not None:
        raise Interrupted(stop.signal)
    if not run_of(root, seeds[0]).is_dir():
        printed = (root / LAUNCH_LOG).read_text(errors="replace").rpartition("error: ")[2].strip()
        raise UserError(printed[:500] or f"{root}: no run was launched")
    return ended


def _is_queued(root: Path) -> bool:
    """Whether Slurm has jobs of these runs that are not over."""
    ids = [path.read_text().strip() for path in root.glob(f"*/{JOB_ID}")]
    return any(state not in ENDED for state in job_states(ids).values())


def _end_beyond(
    root: Path,
    seeds: Sequence[int],
    minutes: float | None,
    gib: float | None,
    ended: dict[int, str],
) -> None:
    """End runs that are beyond these limits, with their children."""
    for seed in [seed for seed in seeds if seed not in ended]:
        run = run_of(root, seed)
        if minutes and _seconds(run) > 60 * minutes:
            ended[seed] = f"took more than {minutes:g} minutes"
        elif gib and _size(run) > gib * 2**30:
            ended[seed] = f"wrote more than {gib:g} GiB"
        if seed in ended:
            if (run / JOB_ID).exists():
                run_slurm("scancel", (run / JOB_ID).read_text().strip())
            _kill(_processes(run))


def _seconds(run: Path) -> float:
    """Since a run that is not over has started: by its processes here, or its job."""
    begins = [process.create_time() for process in _processes(run)]
    if (run / JOB_ID).exists():
        job = f"--jobs={(run / JOB_ID).read_text().strip()}"
        with suppress(UserError):  # Slurm has forgotten it
            shown = run_slurm("squeue", "--noheader", "--states=RUNNING", "--format=%S", job)
            begins += [datetime.fromisoformat(start).timestamp() for start in shown.split()]
    return time.time() - min(begins) if begins else 0.0


def _size(run: Path) -> int:
    size = 0
    for path in run.rglob("*"):
        with suppress(OSError):  # a checkpoint that was removed
            size += path.lstat().st_size
    return size


def _processes(place: Path) -> list[Any]:
    """The processes that write to a dump dir or below a folder, by their arguments."""
    psutil = import_optional("psutil", "lingua study")
    named = re.compile(rf'(config|dump_dir)="?{re.escape(str(place))}(["/].*)?')
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(map(named.fullmatch, process.info["cmdline"] or []))
    ]


def _kill(processes: Sequence[Any]) -> None:
    """With their children."""
    psutil = import_optional("psutil", "lingua study")
    for process in processes:
        with suppress(psutil.Error):
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.Error):
                    each.kill()


def result_of(run: Path, why: str | None, starts: int, measured: bool) -> Line | None:
    """What became of a run: its last held-out loss, where it was to be `measured`, and the hash of
    that text, or why it `failed`, which `why` may tell. None where it is to be started again: once
    after a failure, twice where something outside has stopped or killed it. Raises UserError where
    the disk is full, which is no fault of a change."""
    record = Record(run)
    newest, tokens = record.newest, record.metrics.numbers("tokens")
    per_byte = any(c.has("nats_per_byte") for c in record.validation.values())
    measure = "nats_per_byte" if per_byte else "nats_per_token"
    at, losses = heldout(record, measure)
    texts = {name: c.text("text")[-1] for name, c in record.validation.items()}
    known = {"tokens": int(tokens[-1]) if len(tokens) else 0, "measure": measure, "text": texts}
    has_loss = len(at) > 0 and at[-1] == newest.get("step")
    by_clock = has_loss and record.config.get("seconds") is not None  # of apps/onefile
    if not why and (record.state == "finished" or by_clock):
        if not measured or (has_loss and math.isfinite(losses[-1])):
            return {**known, "loss": float(losses[-1]) if measured else None, "failed": ""}
        why = "its held-out loss is not finite" if has_loss else "it has no held-out loss"
    if not why:
        logs = sorted(run.rglob("stderr.log"), key=lambda log: log.stat().st_mtime)
        printed = "" if newest or not logs else logs[-1].read_text(errors="replace").strip()
        errors = [printed.rpartition("\n")[2], *(line for line, _ in errors_of(run, ""))]
        why = str(newest.get("error") or errors[-1])
        if FULL.search(why):
            raise UserError(f"{run}: {why}")
        if starts < (2 if why else 3):
            return None
        why = why or "was stopped or killed again and again"
    step = newest.get("step", 0)
    return {**known, "loss": None, "failed": f"{why.removeprefix('error: ')} (step {step:,})"}
