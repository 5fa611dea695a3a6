"""Launch runs on Slurm, one or a sweep, and see how they are:

    python -m lingua.stool config=FILE nodes=2 ngpu=8 [script=MODULE] [app=MODULE] [key=value ...]
    python -m lingua.stool config=FILE sweep.optim.lr=1e-3,3e-4 at_once=2 [key=value ...]
    python -m lingua.stool status DIR

A launch checks the whole config, freezes it with the code in the dump dir, and submits a job that
runs from there. `launch`, `launch_sweep` and `lingua.slurm.status.status` do the same from Python.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from lingua.app import main_program
from lingua.config.load import load, to_yaml
from lingua.errors import UserError, nearest
from lingua.signals import STOPPING, exec_program
from lingua.slurm.freeze import CODE, freeze_code, move_away
from lingua.slurm.jobs import (
    ENDED,
    ask,
    environment_of_another,
    job_states,
    partition_limit,
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
    # GPUs of the ranks: those of their node visible to all (node), one bound to each (task), none
    gpus: Literal["node", "task", "none"] = "node"
    ncpu: int | None = None  # CPU cores of a rank; null: Slurm's default
    mem: str | None = None  # memory of a node, such as 64G (0: all of it); null: Slurm's default
    time: str | None = None  # limit, minutes or [days-]hours:minutes:seconds; null: the partition's
    signal_s: int = 120  # seconds ahead of the limit at which the run is told to save and requeue
    partition: str | None = None  # null: the default one
    account: str | None = None  # that is charged
    qos: str | None = None  # quality of service
    constraint: str | None = None  # features the nodes must have
    exclude: str | None = None  # nodes not to run on
    # any other option of sbatch by its long name, slurm.reservation=NAME; one without value is true
    slurm: dict[str, Any] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)  # lines of shell before the run: [module load x]
    at_once: int | None = None  # of a sweep, how many runs at once; null: all
    dirs_exists_ok: bool = False  # go on in a dump dir that exists

    def validate(self) -> Iterator[tuple[str, str]]:
        for key in ("nodes", "ngpu", "ncpu", "signal_s", "at_once"):
            if (value := getattr(self, key)) is not None and value < 1:
                yield key, "must be at least 1"
        for f in fields(self):
            value = getattr(self, f.name)
            texts = value if isinstance(value, list) else [value]
            texts = list(value.values()) if isinstance(value, dict) else texts
            if any(isinstance(text, str) and not text.isprintable() for text in texts):
                yield f.name, "must hold no line breaks and no control characters"
        for option in self.slurm:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
                yield f"slurm.{option}", "must be the long name of an option of sbatch"


@dataclass(frozen=True)
class Launched:
    """A run that was submitted, or that ran here."""

    dump_dir: Path
    job_id: str | None  # None without Slurm
    exit_code: int | None = None  # of one that ran here


@dataclass(frozen=True)
class Member:
    """A run whose config its script accepts."""

    name: str
    dump_dir: Path
    config: str  # YAML
    notices: list[str]
    app: list[str]  # app=MODULE where the caller gave it: the program must not take it from a file


def launch(job: JobArgs, arguments: list[str]) -> Launched | str:
    """Launch one run with the arguments of its script: ["config=run.yaml", "optim.lr=1e-3"].

    With launcher=print it returns the batch script. Raises UserError, and has submitted nothing.
    """
    member = _checked(job, arguments)
    launched = _launch(job, member.dump_dir, member.name, [member])
    return launched if isinstance(launched, str) else launched[0]


def launch_sweep(
    job: JobArgs, arguments: list[str], sweep: dict[str, list[str]]
) -> list[Launched] | str:
    """Launch a run for each combination of values as one job array, `job.at_once` at a time.

    Each has a name and a dump dir of its own, inside that of the sweep. Otherwise as `launch`.
    """
    whole, members, wrong = None, [], []
    for i, values in enumerate(product(*sweep.values())):
        given = [f"{key}={value}" for key, value in zip(sweep, values, strict=True)]
        short = "_".join(re.sub(r"^[^=]*\.", "", word) for word in given)
        name = f"{i:03d}_" + re.sub(r"[^\w=.+-]+", "-", short)
        try:
            whole = whole or _checked(job, [*arguments, *given])
            place = [f"name={whole.name}-{name}", f"dump_dir={whole.dump_dir / name}"]
            members.append(_checked(job, [*arguments, *given, *place]))
        except UserError as error:
            wrong.append(f"{' '.join(given)}: {error}")
    if wrong:
        raise UserError("\n".join(wrong))
    return _launch(job, whole.dump_dir, whole.name, members)


# ------------------------------------------------------------------------------------- checking


def _script(job: JobArgs) -> ModuleType:
    name = job.script or main_program("train")
    try:
        module = import_module(name)
    except ImportError as error:
        raise UserError(f"script = {name}: cannot be imported ({error})") from None
    if not hasattr(module, "check"):
        need = "must have a function check(arguments, world_size) that validates its config"
        raise UserError(f"script = {name}: {need}")
    return module


def _checked(job: JobArgs, arguments: list[str]) -> Member:
    """The run that the arguments ask for, which its script accepts on that many ranks."""
    for key, need in job.validate():
        raise UserError(f"{key}: {need}")
    try:
        args, notices = _script(job).check(arguments, job.nodes * job.ngpu)
    except UserError as error:
        hints = ""
        for key in (word.partition("=")[0] for word in arguments):
            if f"{key}: unknown key" in str(error):
                hint = nearest(key, [f.name for f in fields(JobArgs)])
                hints += f"\n  {key} is no key of stool either{hint}"
        raise UserError(f"{error}{hints}") from None
    args.dump_dir = os.path.abspath(args.dump_dir or f"runs/{args.name}")
    for key in ("name", "dump_dir"):
        text = getattr(args, key)
        bad = sorted({c for c in text if not c.isprintable() or c in "%\\:"})
        if bad:
            why = "which mean something else to Slurm or in a search path"
            shown = ", ".join(map(repr, bad))
            raise UserError(f"{key} = {text!r}: must not contain {shown}, {why}")
    app = [word for word in arguments if word.startswith("app=")]
    return Member(args.name, Path(args.dump_dir), to_yaml(args), notices, app)


def _check_free(job: JobArgs, root: Path) -> None:
    """Refuse a dump dir that is in use, or that the user may not know to exist."""
    if not root.exists() or not any(root.iterdir()):
        return
    if not job.dirs_exists_ok:
        raise UserError(
            f"dump_dir = {root}: exists; choose another, or go on there with dirs_exists_ok=true"
        )
    former = root / JOB
    if former.exists():
        for job_id, state in job_states([former.read_text().strip()]).items():
            if state not in ENDED:
                raise UserError(
                    f"dump_dir = {root}: job {job_id} is {state} there; `scancel {job_id}` ends it"
                )


def _check_possible(job: JobArgs, script: str) -> None:
    """Refuse what the cluster would never run."""
    try:
        ask("sbatch", "--test-only", given=script)
    except UserError as error:  # Slurm may not say what it is that no node has
        keys = ("partition", "nodes", "ngpu", "gpus", "ncpu", "mem", "constraint", "exclude")
        asked = {key: getattr(job, key) for key in keys}
        asked |= {f"slurm.{option}": value for option, value in job.slurm.items()}
        said = ", ".join(f"{k} = {v}" for k, v in asked.items() if v is not None)
        raise UserError(f"{error} (asked for: {said})") from None


# ------------------------------------------------------------------------------------- launching


def _launch(job: JobArgs, root: Path, name: str, members: list[Member]) -> list[Launched] | str:
    """What both kinds of launch share: `root` holds the code, and the logs of all members."""
    if job.launcher != "print":
        for line in dict.fromkeys(line for m in members for line in m.notices):
            print(line)
    if job.launcher == "local":
        _check_free(job, root)
        _freeze(job, root, members)
        return list(_run_each_here(job, root, members))
    executor, script = _batch(job, root, name, len(members))
    if job.launcher == "print":
        return script
    _check_free(job, root)
    _check_possible(job, script)
    _freeze(job, root, members)
    move_away(root / SCRIPT)
    (root / SCRIPT).write_text(script)
    ids = _submit(executor, [_command(job, m) for m in members])
    (root / JOB).write_text(ids[0].partition("_")[0] + "\n")
    for member, job_id in zip(members, ids, strict=True):
        (member.dump_dir / JOB).write_text(job_id + "\n")
        if member.dump_dir != root:  # the logs of an array are in one place
            (member.dump_dir / "logs").mkdir(exist_ok=True)
            (member.dump_dir / "logs" / job_id).symlink_to(Path("../../logs") / job_id)
    return [Launched(m.dump_dir, job_id) for m, job_id in zip(members, ids, strict=True)]


def _freeze(job: JobArgs, root: Path, members: list[Member]) -> None:
    """Write what the runs are started from: code and configs."""
    for file in (CODE, f"{CODE}.commit", f"{CODE}.diff"):
        move_away(root / file)
    freeze_code(Path(_script(job).__file__), root)
    (root / "logs").mkdir(exist_ok=True)
    for member in members:
        member.dump_dir.mkdir(exist_ok=True)
        move_away(member.dump_dir / BASE)
        (member.dump_dir / BASE).write_text(member.config, encoding="utf-8")


def _setup(job: JobArgs, root: Path) -> list[str]:
    """Lines of shell: what the user wants, then that modules are found in the copy of the code and
    not in the folder the run is started in, whose relative paths keep their meaning."""
    code = shlex.quote(str(root / CODE))
    search = [f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"', "export PYTHONSAFEPATH=1"]
    return [*job.setup, *search]


def _command(job: JobArgs, member: Member) -> list[str]:
    return [
        sys.executable,
        "-u",
        "-m",
        job.script or main_program("train"),
        f"config={member.dump_dir / BASE}",
        *member.app,
    ]


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


def _submit(executor: Any, commands: list[list[str]]) -> list[str]:
    """Job ids. Each task of a job is submitit's program first, and then becomes the command."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with executor.batch():
            jobs = [executor.submit(exec_program, command) for command in commands]
        return [job.job_id for job in jobs]
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(
            f"sbatch: {error}; nothing was submitted, dirs_exists_ok=true launches it again"
        ) from None


def _run_each_here(job: JobArgs, root: Path, members: list[Member]) -> Iterator[Launched]:
    """One after the other, none more once one was told to stop."""
    for member in members:
        code, stopped = _run_here(job, root, member)
        yield Launched(member.dump_dir, None, code)
        if stopped:
            return


def _run_here(job: JobArgs, root: Path, member: Member) -> tuple[int, bool]:
    """The exit code of the job's run in processes of this machine, as many as it has ranks, and
    whether a signal came."""
    logs = member.dump_dir / "logs"
    logs.mkdir(exist_ok=True)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks += ["--nproc-per-node", str(job.nodes * job.ngpu)]
    ranks += ["--redirects", "3", "--tee", "0:3", "--log-dir", str(logs)]
    shell = "\n".join(["set -e", *_setup(job, root), 'exec "$@"'])
    command = ["bash", "-c", shell, "bash", *ranks, *_command(job, member)[2:]]
    # What torchrun puts before each line of rank 0 on the console; its default names the role.
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": " "}
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "300"  # seconds to save, before it kills
    process = subprocess.Popen(command, env=os.environ | env)
    # torchrun passes SIGTERM on, and a terminal gives its Ctrl-C to all of us.
    came: list[int] = []

    def receive(number: int, _: Any) -> None:
        came.append(number)
        if number != signal.SIGINT:
            process.terminate()

    before = {n: signal.signal(n, receive) for n in STOPPING}
    try:
        return process.wait(), bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------- command line


def _split(text: str) -> list[str]:
    """The values of `sweep.key=a,b`: split_arguments by commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if c == "," and not depth and not quote:
            parts.append("")
            continue
        if quote or c in "'\"":
            quote = "" if c == quote else quote or c
        else:
            depth += (c in "[{") - (c in "]}")
        parts[-1] += c
    return [part.strip() for part in parts]


def split_arguments(argv: list[str]) -> tuple[JobArgs, list[str], dict[str, list[str]]]:
    """The command line split_arguments: what is said of the job, of the run, and what is swept."""
    ours = {f.name for f in fields(JobArgs)}
    of_job, of_run, sweep = [], [], {}
    for word in argv:
        key, _, value = word.partition("=")
        if key.startswith("sweep."):
            sweep[key.removeprefix("sweep.")] = _split(value)
        elif key.partition(".")[0] in ours or word in ("-h", "--help"):
            of_job.append(word)
        else:
            of_run.append(word)
    return load(JobArgs, of_job)[0], of_run, sweep


def _tell(launched: list[Launched], root: Path) -> None:
    ids = sorted({run.job_id.partition("_")[0] for run in launched if run.job_id})
    if ids:
        print(
            f"job {ids[0]} was submitted" + (f": {len(launched)} runs" if len(launched) > 1 else "")
        )
        print(f"  folder  {root}")
        print(f"  watch   python -m lingua.stool status {shlex.quote(str(root))}")
        if len(launched) == 1:
            print(f"          tail -F {shlex.quote(str(root / 'train.log'))}")
        print(f"  cancel  scancel {ids[0]}")


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
    result = launch_sweep(job, arguments, sweep) if sweep else launch(job, arguments)
    if isinstance(result, str):
        print(result, end="")
        return
    launched = result if isinstance(result, list) else [result]
    _tell(launched, launched[0].dump_dir.parent if sweep else launched[0].dump_dir)
    sys.exit(max(run.exit_code or 0 for run in launched))
