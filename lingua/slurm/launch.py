"""Launch runs on Slurm, one or a sweep, and show their status:

    python -m lingua.stool config=FILE nodes=2 ngpu=8 [script=MODULE] [app=MODULE] [key=value ...]
    python -m lingua.stool config=FILE sweep.optim.lr=1e-3,3e-4 at_once=2 [key=value ...]
    python -m lingua.stool status DIR

A launch validates the whole config, copies it and the code to the dump dir, and submits a job that
runs from there. From Python: `launch` and `lingua.slurm.status.status`.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import yaml

from lingua.app import main_program
from lingua.config.load import load, to_yaml
from lingua.errors import UserError, nearest
from lingua.signals import StopRequest
from lingua.slurm.freeze import CODE, COMMIT, DIFF, freeze_code, move_away
from lingua.slurm.jobs import ENDED, job_states, partition_limit, run_slurm, seconds_of
from lingua.slurm.status import BASE, JOB, status, table

SCRIPT = "submit.slurm"


@dataclass
class JobArgs:
    script: str | None = None  # module to run; its check() validates the config; null: training
    # slurm submits a job, local runs it on this machine without Slurm, print shows the batch script
    launcher: Literal["slurm", "local", "print"] = "slurm"
    nodes: int = 1  # machines
    ngpu: int = 1  # ranks on each
    # GPUs a rank sees: all that the job has on its node (node), one of its own (task), none
    gpus: Literal["node", "task", "none"] = "node"
    ncpu: int | None = None  # CPU cores of a rank; null: Slurm's default
    mem: str | None = None  # memory of a node, such as 64G (0: all of it); null: Slurm's default
    time: str | None = None  # limit, minutes or [days-]hours:minutes:seconds; null: the partition's
    signal_s: int = 120  # seconds before the limit at which the run gets a signal, saves, requeues
    partition: str | None = None  # null: the default one
    account: str | None = None  # that is charged
    qos: str | None = None  # quality of service
    constraint: str | None = None  # features the nodes must have
    exclude: str | None = None  # nodes not to run on
    # any other option of sbatch by its long name, slurm.reservation=NAME; one without value is true
    slurm: dict[str, Any] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)  # shell lines before the run: [module load x]
    at_once: int | None = None  # of a sweep, how many runs at once; null: all
    dirs_exists_ok: bool = False  # launch in a dump dir that exists, and resume there

    def validate(self) -> Iterator[tuple[str, str]]:
        for key in ("nodes", "ngpu", "ncpu", "signal_s", "at_once"):
            if (value := getattr(self, key)) is not None and value < 1:
                yield key, "must be at least 1"


JOB_KEYS = [f.name for f in fields(JobArgs)]


@dataclass
class Run:
    """A run whose config its script has accepted."""

    name: str
    dump_dir: Path
    config: str  # YAML
    notices: list[str]
    command: list[str]
    job_id: str | None = None  # of a run that was submitted
    exit_code: int | None = None  # of a run that ran on this machine


def launch(
    job: JobArgs, arguments: list[str], sweep: dict[str, list[str]] | None = None
) -> list[Run] | str:
    """Launch a run with the arguments of its script: ["config=run.yaml", "optim.lr=1e-3"].

    With `sweep`, {key: values}, it launches a run for each combination of values as one job array,
    `job.at_once` at a time. Each has a name and a dump dir of its own, inside that of the sweep.

    Returns the batch script with launcher=print. Raises UserError, and has submitted nothing.
    """
    for key, need in job.validate():
        raise UserError(f"{key}: {need}")
    first = [f"{key}={values[0]}" for key, values in (sweep or {}).items()]
    whole = _check(job, [*arguments, *first])
    runs = _check_sweep(job, arguments, sweep, whole) if sweep else [whole]
    root = whole.dump_dir  # of a sweep: it has the code and the logs of all its runs

    if job.launcher == "print":
        return _batch_script(job, root, whole.name, runs)
    for line in dict.fromkeys(line for run in runs for line in run.notices):
        print(line)
    _check_dump_dir(job, root)
    if job.launcher == "local":
        _write_inputs(job, root, runs)
        _run_here(job, root, runs)
    else:
        batch_script = _batch_script(job, root, whole.name, runs)
        _check_possible(job, batch_script)
        _write_inputs(job, root, runs)
        _submit(batch_script, root, runs)
    return runs


# ---- checks


def _import_script(job: JobArgs) -> ModuleType:
    name = job.script or main_program("train")
    try:
        module = import_module(name)
    except ImportError as error:
        raise UserError(f"script = {name}: cannot be imported ({error})") from None
    if not hasattr(module, "check"):
        need = "must have a function check(arguments, world_size) that validates its config"
        raise UserError(f"script = {name}: {need}")
    return module


def _check(job: JobArgs, arguments: list[str]) -> Run:
    """The run of these arguments, if its script accepts them on the ranks of the job."""
    script = _import_script(job)
    try:
        args, notices = script.check(arguments, job.nodes * job.ngpu)
    except UserError as error:
        message = str(error)
        for key in (word.partition("=")[0] for word in arguments):
            if f"{key}: unknown key" in str(error):
                message += f"\n  {key} is no key of stool either{nearest(key, JOB_KEYS)}"
        raise UserError(message) from None
    dump_dir = Path(os.path.abspath(args.dump_dir or f"runs/{args.name}"))
    for key, text in (("name", args.name), ("dump_dir", str(dump_dir))):
        bad = sorted({c for c in text if not c.isprintable() or c in "%\\:"})
        if bad:
            raise UserError(
                f"{key} = {text!r}: must not contain {', '.join(map(repr, bad))}, which have "
                "another meaning to Slurm or in a search path"
            )
    args.dump_dir = str(dump_dir)
    command = [sys.executable, "-u", "-m", script.__name__, f"config={dump_dir / BASE}"]
    # An app is trusted where the command line names it, not where a file does.
    command += [word for word in arguments if word.startswith("app=")]
    return Run(args.name, dump_dir, to_yaml(args), notices, command)


def _check_sweep(
    job: JobArgs, arguments: list[str], sweep: dict[str, list[str]], whole: Run
) -> list[Run]:
    runs, errors = [], []
    for i, values in enumerate(product(*sweep.values())):
        words = [f"{key}={value}" for key, value in zip(sweep, values, strict=True)]
        short = "_".join(re.sub(r"^[^=]*\.", "", word) for word in words)
        name = f"{i:03d}_" + re.sub(r"[^\w=.+-]+", "-", short)
        own = [f"name={whole.name}-{name}", f"dump_dir={whole.dump_dir / name}"]
        try:
            runs.append(_check(job, [*arguments, *words, *own]))
        except UserError as error:
            errors.append(f"{' '.join(words)}: {error}")
    if errors:
        raise UserError("\n".join(errors))
    return runs


def _check_dump_dir(job: JobArgs, root: Path) -> None:
    """Refuse a dump dir that exists, unless the user knows of it and no job uses it."""
    if not root.exists() or not any(root.iterdir()):
        return
    if not job.dirs_exists_ok:
        raise UserError(
            f"dump_dir = {root}: exists; choose another, or resume there with dirs_exists_ok=true"
        )
    former = (root / JOB).read_text().split() if (root / JOB).exists() else []
    for job_id, state in job_states(former).items():
        if state not in ENDED:
            raise UserError(
                f"dump_dir = {root}: job {job_id} is {state} there; `scancel {job_id}` ends it"
            )


def _check_possible(job: JobArgs, batch_script: str) -> None:
    """Refuse a job that the cluster would never run."""
    try:
        run_slurm("sbatch", "--test-only", stdin=batch_script)
    except UserError as error:  # which may not name the option that no node fulfills
        asked = ", ".join(f"{key} = {value}" for key, value in vars(job).items() if value)
        raise UserError(f"{error} (asked for: {asked})") from None


# ---- launching


def _write_inputs(job: JobArgs, root: Path, runs: list[Run]) -> None:
    """Write what the runs start from: code and configs."""
    for name in (CODE, COMMIT, DIFF):
        move_away(root / name)
    freeze_code(Path(_import_script(job).__file__), root)
    (root / "logs").mkdir(exist_ok=True)
    for run in runs:
        run.dump_dir.mkdir(exist_ok=True)
        move_away(run.dump_dir / BASE)
        (run.dump_dir / BASE).write_text(run.config, encoding="utf-8")


def _setup(job: JobArgs, root: Path) -> list[str]:
    """Shell lines: those of the user, then modules are imported from the copy of the code, not from
    the current folder, which relative paths refer to."""
    path = shlex.quote(str(root / CODE)) + '"${PYTHONPATH:+:$PYTHONPATH}"'
    return [*job.setup, f"export PYTHONPATH={path}", "export PYTHONSAFEPATH=1"]


def _batch_script(job: JobArgs, root: Path, name: str, runs: list[Run]) -> str:
    """What sbatch is given: a job for one run, a job array for several."""
    limit = job.time or partition_limit(job.partition)
    if (limit_s := seconds_of(limit)) is not None and limit_s <= job.signal_s:
        raise UserError(f"signal_s = {job.signal_s}: must be below time = {limit}, {limit_s} s")
    logs, n = root / "logs", len(runs)
    pattern, job_id = "%j", "$SLURM_JOB_ID"
    if n > 1:
        pattern, job_id = "%A_%a", "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    options = {
        "job-name": name,
        "array": f"0-{n - 1}%{job.at_once or n}" if n > 1 else None,
        "nodes": job.nodes,
        "ntasks-per-node": job.ngpu,
        "cpus-per-task": job.ncpu,
        "gpus-per-node": job.ngpu if job.gpus == "node" else None,
        "gpus-per-task": 1 if job.gpus == "task" else None,
        "mem": job.mem,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "exclude": job.exclude,
        "time": limit,
        "signal": f"USR2@{job.signal_s}",
        "requeue": True,
        "open-mode": "append",
        "output": logs / f"{pattern}.log",
        "error": logs / f"{pattern}.log",
        **job.slurm,
    }
    lines = ["#!/bin/bash"]
    for option, value in options.items():
        # A line break would begin another option.
        if not re.fullmatch(r"[a-z][a-z0-9-]*", option) or not str(value).isprintable():
            raise UserError(f"{option} = {value!r}: must be a long option of sbatch, on one line")
        if value is True:
            lines.append(f"#SBATCH --{option}")
        elif value is not None and value is not False:
            lines.append(f"#SBATCH --{option}={shlex.quote(str(value))}")
    # srun does not take the cores of a task from the batch script (Slurm 22.05)
    cores = f"--cpus-per-task={job.ncpu} " if job.ncpu else ""
    lines += [
        *_setup(job, root),
        'case "${SLURM_ARRAY_TASK_ID:-0}" in',
        *(f"{i}) run=({shlex.join(run.command)}) ;;" for i, run in enumerate(runs)),
        "esac",
        f"job={job_id}",
        f"logs={shlex.quote(str(logs))}/$job",
        'mkdir -p "$logs"',
        f"srun --unbuffered --kill-on-bad-exit=1 {cores}\\",
        '    --output="$logs/${job}_%t_log.out" --error="$logs/${job}_%t_log.err" \\',
        f'    {shlex.quote(sys.executable)} -m lingua.signals "${{run[@]}}"',
    ]
    return "\n".join(lines) + "\n"


def _submit(batch_script: str, root: Path, runs: list[Run]) -> None:
    move_away(root / SCRIPT)
    (root / SCRIPT).write_text(batch_script)
    try:
        answer = run_slurm("sbatch", "--parsable", str(root / SCRIPT))
    except UserError as error:
        raise UserError(
            f"{error}; nothing was submitted, dirs_exists_ok=true launches it again"
        ) from None
    job_id = answer.strip().partition(";")[0]  # ID or ID;CLUSTER
    (root / JOB).write_text(job_id + "\n")
    for i, run in enumerate(runs):
        run.job_id = f"{job_id}_{i}" if len(runs) > 1 else job_id
        (run.dump_dir / JOB).write_text(run.job_id + "\n")
        if run.dump_dir != root:  # the logs of a sweep are in one place
            (run.dump_dir / "logs").mkdir(exist_ok=True)
            (run.dump_dir / "logs" / run.job_id).symlink_to(Path("../../logs") / run.job_id)


def _run_here(job: JobArgs, root: Path, runs: list[Run]) -> None:
    """Run them on this machine by torchrun, one after the other. A signal stops the current run,
    which saves, and starts no other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(job.nodes * job.ngpu), "--redirects", "3", "--tee", "0:3"]
    shell = "\n".join(["set -e", *_setup(job, root), 'exec "$@"'])
    # What torchrun prints before each line of rank 0; its default names the role.
    env = os.environ | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": " "}
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "300"  # seconds to save, before torchrun kills
    with closing(StopRequest()) as stop:
        for run in runs:
            logs = run.dump_dir / "logs"
            logs.mkdir(exist_ok=True)
            command = [*torchrun, "--log-dir", str(logs), *run.command[2:]]
            process = subprocess.Popen(["bash", "-c", shell, "bash", *command], env=env)
            while process.poll() is None and stop.signal is None:
                time.sleep(0.1)
            if stop.signal not in (None, "SIGINT"):  # a terminal sends its Ctrl-C to torchrun too
                process.terminate()
            run.exit_code = process.wait()
            if stop.signal is not None:
                return


# ---- command line


def split_values(key: str, text: str) -> list[str]:
    """The values of `sweep.key=a,b`, as written: a comma in brackets or quotes is part of one."""
    flow = f"[{text}]"
    try:
        nodes = yaml.compose(flow).value
    except yaml.YAMLError:
        nodes = []
    if not nodes:
        raise UserError(f"sweep.{key} = {text}: must be values separated by commas")
    return [flow[node.start_mark.index : node.end_mark.index] for node in nodes]


def split_arguments(argv: list[str]) -> tuple[JobArgs, list[str], dict[str, list[str]]]:
    """A command line: the arguments of the job, those of the run, and the values of a sweep."""
    of_job, of_run, sweep = [], [], {}
    for word in argv:
        key, _, value = word.partition("=")
        if key.startswith("sweep."):
            key = key.removeprefix("sweep.")
            sweep[key] = split_values(key, value)
        elif key.partition(".")[0] in JOB_KEYS or word in ("-h", "--help"):
            of_job.append(word)
        else:
            of_run.append(word)
    return load(JobArgs, of_job)[0], of_run, sweep


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] == ["status"]:
        if len(argv) != 2:
            raise UserError("usage: python -m lingua.stool status DIR")
        print(table(status(argv[1])))
        return
    if {"-h", "--help"} & set(argv):
        print(__doc__)
    job, arguments, sweep = split_arguments(argv)
    runs = launch(job, arguments, sweep)
    if isinstance(runs, str):
        print(runs, end="")
    elif runs[0].job_id is None:
        sys.exit(max(run.exit_code or 0 for run in runs))
    else:
        _report(runs, runs[0].dump_dir.parent if sweep else runs[0].dump_dir)


def _report(runs: list[Run], root: Path) -> None:
    job_id = runs[0].job_id.partition("_")[0]
    print(f"job {job_id} was submitted" + (f": {len(runs)} runs" if len(runs) > 1 else ""))
    print(f"  folder  {root}")
    print(f"  watch   python -m lingua.stool status {shlex.quote(str(root))}")
    if len(runs) == 1:
        print(f"          tail -F {shlex.quote(str(runs[0].dump_dir / 'train.log'))}")
    print(f"  cancel  scancel {job_id}")
