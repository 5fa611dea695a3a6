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
from lingua.signals import StopRequest, exec_program
from lingua.slurm.freeze import CODE, COMMIT, DIFF, freeze_code, move_away
from lingua.slurm.jobs import (
    ENDED,
    environment_of_another,
    job_states,
    partition_limit,
    run_slurm,
    seconds_of,
)
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
        for f in fields(self):
            value = getattr(self, f.name)
            texts = value if isinstance(value, list) else [value]
            texts = list(value.values()) if isinstance(value, dict) else texts
            if any(isinstance(text, str) and not text.isprintable() for text in texts):
                yield f.name, "must not contain line breaks or other control characters"
        for option in self.slurm:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
                yield f"slurm.{option}", "must be the long name of an option of sbatch"


@dataclass(frozen=True)
class Launched:
    """A run that was submitted, or that ran on this machine."""

    dump_dir: Path
    job_id: str | None  # None without Slurm
    exit_code: int | None = None  # None with Slurm


@dataclass(frozen=True)
class CheckedRun:
    """A run whose config its script has accepted."""

    name: str
    dump_dir: Path
    config: str  # YAML
    notices: list[str]
    command: list[str]


def launch(
    job: JobArgs, arguments: list[str], sweep: dict[str, list[str]] | None = None
) -> list[Launched] | str:
    """Launch a run with the arguments of its script: ["config=run.yaml", "optim.lr=1e-3"].

    With `sweep`, {key: values}, it launches a run for each combination of values as one job array,
    `job.at_once` at a time. Each has a name and a dump dir of its own, inside that of the sweep.

    Returns the batch script with launcher=print. Raises UserError, and has submitted nothing.
    """
    for key, need in job.validate():
        raise UserError(f"{key}: {need}")
    script = _import_script(job)
    first = [f"{key}={values[0]}" for key, values in (sweep or {}).items()]
    whole = _check(job, script, [*arguments, *first])
    runs = _check_sweep(job, script, arguments, sweep, whole) if sweep else [whole]
    root = whole.dump_dir  # of a sweep: it has the code and the logs of all its runs

    if job.launcher == "print":
        return _batch(job, root, whole.name, len(runs))[1]
    for line in dict.fromkeys(line for run in runs for line in run.notices):
        print(line)
    _check_dump_dir(job, root)
    if job.launcher == "local":
        _write_inputs(script, root, runs)
        return _run_here(job, root, runs)
    executor, batch_script = _batch(job, root, whole.name, len(runs))
    _check_possible(job, batch_script)
    _write_inputs(script, root, runs)
    move_away(root / SCRIPT)
    (root / SCRIPT).write_text(batch_script)
    return _submit(executor, root, runs)


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


def _check(job: JobArgs, script: ModuleType, arguments: list[str]) -> CheckedRun:
    try:
        args, notices = script.check(arguments, job.nodes * job.ngpu)
    except UserError as error:
        keys = [word.partition("=")[0] for word in arguments]
        allowed = [f.name for f in fields(JobArgs)]
        hints = [
            f"\n  {key} is no key of stool either{nearest(key, allowed)}"
            for key in keys
            if f"{key}: unknown key" in str(error)
        ]
        raise UserError(str(error) + "".join(hints)) from None
    dump_dir = Path(os.path.abspath(args.dump_dir or f"runs/{args.name}"))
    for key, text in (("name", args.name), ("dump_dir", str(dump_dir))):
        bad = sorted({c for c in text if not c.isprintable() or c in "%\\:"})
        if bad:
            raise UserError(
                f"{key} = {text!r}: must not contain {', '.join(map(repr, bad))}, which have "
                "another meaning to Slurm or in a search path"
            )
    args.dump_dir = str(dump_dir)
    command = [sys.executable, "-u", "-m", job.script or main_program("train")]
    command += [f"config={dump_dir / BASE}"]
    # An app is trusted because the command line names it; the program must not rely on a file.
    command += [word for word in arguments if word.startswith("app=")]
    return CheckedRun(args.name, dump_dir, to_yaml(args), notices, command)


def _check_sweep(
    job: JobArgs,
    script: ModuleType,
    arguments: list[str],
    sweep: dict[str, list[str]],
    whole: CheckedRun,
) -> list[CheckedRun]:
    runs, errors = [], []
    for i, values in enumerate(product(*sweep.values())):
        words = [f"{key}={value}" for key, value in zip(sweep, values, strict=True)]
        short = "_".join(re.sub(r"^[^=]*\.", "", word) for word in words)
        name = f"{i:03d}_" + re.sub(r"[^\w=.+-]+", "-", short)
        own = [f"name={whole.name}-{name}", f"dump_dir={whole.dump_dir / name}"]
        try:
            runs.append(_check(job, script, [*arguments, *words, *own]))
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
        keys = ("partition", "nodes", "ngpu", "gpus", "ncpu", "mem", "constraint", "exclude")
        asked = {key: getattr(job, key) for key in keys}
        asked |= {f"slurm.{option}": value for option, value in job.slurm.items()}
        shown = ", ".join(f"{k} = {v}" for k, v in asked.items() if v is not None)
        raise UserError(f"{error} (asked for: {shown})") from None


# ---- launching


def _write_inputs(script: ModuleType, root: Path, runs: list[CheckedRun]) -> None:
    """Write what the runs start from: code and configs."""
    for name in (CODE, COMMIT, DIFF):
        move_away(root / name)
    freeze_code(Path(script.__file__), root)
    (root / "logs").mkdir(exist_ok=True)
    for run in runs:
        run.dump_dir.mkdir(exist_ok=True)
        move_away(run.dump_dir / BASE)
        (run.dump_dir / BASE).write_text(run.config, encoding="utf-8")


def _setup(job: JobArgs, root: Path) -> list[str]:
    """Shell lines: those of the user, then modules are imported from the copy of the code, not from
    the current folder, which relative paths refer to."""
    code = shlex.quote(str(root / CODE))
    search = [f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"', "export PYTHONSAFEPATH=1"]
    return [*job.setup, *search]


def _batch(job: JobArgs, root: Path, name: str, count: int) -> tuple[Any, str]:
    """submitit's executor for the job, an array where it is more than one run, and the batch script
    that it will submit."""
    try:
        from submitit.slurm import slurm as submitit
    except ImportError:
        raise UserError(
            "launcher = slurm: needs the package submitit, which is not installed: "
            "`pip install submitit`"
        ) from None

    class Executor(submitit.SlurmExecutor):
        affinity = classmethod(lambda cls: 2)  # a script can be written where Slurm is not

        def _make_submission_command(self, path: Path) -> list[str]:
            # One may launch from within a job, whose variables srun would take for options.
            own = sorted(os.environ.keys() - environment_of_another().keys())
            return ["env", *(f"--unset={key}" for key in own), "sbatch", str(path)]

    time = job.time or partition_limit(job.partition)
    if (limit_s := seconds_of(time)) is not None and limit_s <= job.signal_s:
        raise UserError(f"signal_s = {job.signal_s}: must be below time = {time}, {limit_s} s")
    job_id, in_shell = "%j", '"$SLURM_JOB_ID"'
    if count > 1:
        job_id, in_shell = "%A_%a", '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    logs = root / "logs"
    options = {"requeue": True, "time": time, "mem": job.mem, "output": logs / f"{job_id}.log"}
    options |= {"error": options["output"]} | job.slurm
    executor = Executor(logs / "%j")
    executor.update_parameters(
        job_name=name,
        nodes=job.nodes,
        ntasks_per_node=job.ngpu,
        cpus_per_task=job.ncpu,
        gpus_per_node=job.ngpu if job.gpus == "node" else None,
        gpus_per_task=1 if job.gpus == "task" else None,
        partition=job.partition,
        account=job.account,
        qos=job.qos,
        constraint=job.constraint,
        exclude=job.exclude,
        signal_delay_s=job.signal_s,
        array_parallelism=job.at_once or count,
        wckey=None,
        setup=[f"mkdir -p {shlex.quote(str(logs))}/{in_shell}", *_setup(job, root)],
        # srun takes its own number of cores, not the batch script's (Slurm 22.05)
        srun_args=["--kill-on-bad-exit=1", *([f"--cpus-per-task={job.ncpu}"] if job.ncpu else [])],
        additional_parameters={k: v for k, v in options.items() if v not in (None, False)},
    )
    script = submitit._make_sbatch_string(
        executor._submitit_command_str,
        executor.folder,
        map_count=count if count > 1 else None,
        **executor.parameters,
    )
    return executor, script


def _submit(executor: Any, root: Path, runs: list[CheckedRun]) -> list[Launched]:
    """Each task of the job starts as submitit's program, which execs the command."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with executor.batch():
            jobs = [executor.submit(exec_program, run.command) for run in runs]
        ids = [job.job_id for job in jobs]
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(
            f"sbatch: {error}; nothing was submitted, dirs_exists_ok=true launches it again"
        ) from None
    (root / JOB).write_text(ids[0].partition("_")[0] + "\n")
    for run, job_id in zip(runs, ids, strict=True):
        (run.dump_dir / JOB).write_text(job_id + "\n")
        if run.dump_dir != root:  # the logs of an array are in one place
            (run.dump_dir / "logs").mkdir(exist_ok=True)
            (run.dump_dir / "logs" / job_id).symlink_to(Path("../../logs") / job_id)
    return [Launched(run.dump_dir, job_id) for run, job_id in zip(runs, ids, strict=True)]


def _run_here(job: JobArgs, root: Path, runs: list[CheckedRun]) -> list[Launched]:
    """Run them on this machine by torchrun, one after the other. A signal stops the current run,
    which saves, and starts no other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(job.nodes * job.ngpu), "--redirects", "3", "--tee", "0:3"]
    shell = "\n".join(["set -e", *_setup(job, root), 'exec "$@"'])
    # What torchrun prints before each line of rank 0; its default names the role.
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": " "}
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "300"  # seconds to save, before torchrun kills
    launched = []
    with closing(StopRequest()) as stop:
        for run in runs:
            logs = run.dump_dir / "logs"
            logs.mkdir(exist_ok=True)
            command = [*torchrun, "--log-dir", str(logs), *run.command[2:]]
            process = subprocess.Popen(
                ["bash", "-c", shell, "bash", *command], env=os.environ | env
            )
            while process.poll() is None and stop.signal is None:
                time.sleep(0.1)
            if stop.signal not in (None, "SIGINT"):  # a terminal sends its Ctrl-C to torchrun too
                process.terminate()
            launched.append(Launched(run.dump_dir, None, process.wait()))
            if stop.signal is not None:
                break
    return launched


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
    job_keys = {f.name for f in fields(JobArgs)}
    of_job, of_run, sweep = [], [], {}
    for word in argv:
        key, _, value = word.partition("=")
        if key.startswith("sweep."):
            key = key.removeprefix("sweep.")
            sweep[key] = split_values(key, value)
        elif key.partition(".")[0] in job_keys or word in ("-h", "--help"):
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
    launched = launch(job, arguments, sweep)
    if isinstance(launched, str):
        print(launched, end="")
    elif launched[0].job_id is None:
        sys.exit(max(run.exit_code for run in launched))
    else:
        root = launched[0].dump_dir.parent if sweep else launched[0].dump_dir
        job_id = launched[0].job_id.partition("_")[0]
        runs = f": {len(launched)} runs" if len(launched) > 1 else ""
        print(f"job {job_id} was submitted{runs}")
        print(f"  folder  {root}")
        print(f"  watch   python -m lingua.stool status {shlex.quote(str(root))}")
        if not sweep:
            print(f"          tail -F {shlex.quote(str(root / 'train.log'))}")
        print(f"  cancel  scancel {job_id}")
