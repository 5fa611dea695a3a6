"""Launching runs, for `lingua stool` and from Python: a launch validates the whole config, copies
it and the code to the dump dir, and submits a plain batch script that runs from there."""

import json
import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

from lingua.app import import_named, main_program
from lingua.base.dump_dir import BASE_CONFIG, JOB_ID, LAUNCHED_AT, LOGS, PLAN, SUBMIT_SCRIPT
from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.config.load import to_yaml
from lingua.config.values import parse_argument, plain
from lingua.parallel.slurm import run_slurm
from lingua.tools.slurm.freeze import freeze_code, move_away
from lingua.tools.slurm.job import JobArgs, RunConfig, batch_script, check_words, setup_lines
from lingua.tools.slurm.local import Command, machine_shares, run_one, run_sweep, visible_gpus
from lingua.tools.slurm.status import ENDED, environment_of_another, job_states

Sweep = dict[str, list[str]]  # {key: values, as written}

_LEARNING = re.compile(r"seed=|optim\.(?!name=)")  # words of a sweep that leave its plan as it is
MAX_SWEEP_RUNS = 1000  # Slurm's default limit of an array


class Script(Protocol):
    """The module that a job runs as its program."""

    __name__: str
    __file__: str | None

    def check(self, argv: list[str], world_size: int) -> tuple[RunConfig, list[str]]: ...


@dataclass(frozen=True)
class Launched:
    """A run that was submitted, or that ran on this machine."""

    dump_dir: Path
    job_id: str | None  # None without Slurm
    exit_code: int | None = None  # None with Slurm


def launch(job: JobArgs, arguments: list[str], sweep: Sweep | None = None) -> list[Launched] | str:
    """Launch a run with the arguments of its script: ["config=run.yaml", "optim.lr=1e-3"].

    With `sweep`, {key: values}, it launches a run for each combination of values as one job array,
    `job.at_once` at a time. Each has a name and a dump dir of its own, inside that of the sweep;
    they are started and returned seed by seed.

    With launcher=print it returns the batch script, which is not submitted. Raises UserError, and
    has submitted nothing.
    """
    module, whole, notices = _check_job(job, arguments, sweep or {})
    root = Path(whole.dump_dir)  # a sweep has its code and all its logs here
    configs = _check_sweep(job, module, arguments, sweep, whole) if sweep else [whole]

    for line in notices if job.launcher != "print" else ():
        print(line)
    _check_dump_dir(job, root)
    plans = _plans(job, arguments, sweep or {})
    # An app is trusted because the command line names it; the program must not rely on a file.
    program = [module.__name__, *(word for word in arguments if word.startswith("app="))]
    if job.launcher == "local":
        _shares(job, configs)  # refuses an at_once that leaves a run too few GPUs
        _write_inputs(job, module, arguments, root, configs, plans)
        return _run_here(job, root, configs, program, swept=bool(sweep))
    script = batch_script(job, root, whole.name, configs, program)
    if job.launcher == "slurm":
        _check_possible(job, script)
    _write_inputs(job, module, arguments, root, configs, plans, script)
    return script if job.launcher == "print" else _submit(root, configs)


# ---- checks


def check_launch(job: JobArgs, arguments: list[str]) -> None:
    """Raise UserError where `launch` would refuse the arguments of a job, whose dump dir, machine
    and Slurm are not looked at."""
    module, whole, _ = _check_job(job, arguments, {})
    batch_script(job, Path(whole.dump_dir), whole.name, [whole], [module.__name__])


def _check_job(
    job: JobArgs, arguments: list[str], sweep: Sweep
) -> tuple[Script, RunConfig, list[str]]:
    """The script, the config of the first run of a sweep, and lines about it. Raises UserError."""
    for key, need in job.validate():
        raise UserError(f"{key} = {getattr(job, key.partition('[')[0])}: {need}")
    module = import_script(job)
    first = [f"{key}={values[0]}" for key, values in sweep.items()]
    return module, *_check(job, module, [*arguments, *first])


def import_script(job: JobArgs) -> Script:
    name = main_program() if job.script is None else job.script
    module = import_named(name, f"script = {name}")
    if not hasattr(module, "check"):
        need = "must have a function check(arguments, world_size) that validates its config"
        raise UserError(f"script = {name}: {need}")
    return cast(Script, module)


def _check(job: JobArgs, module: Script, arguments: list[str]) -> tuple[RunConfig, list[str]]:
    """The config of a run, as its program accepts it, and the program's notices."""
    try:
        args, notices = module.check(arguments, job.nodes * job.ngpu)
    except UserError as error:
        keys = f"\n  keys of stool: {', '.join(f.name for f in fields(JobArgs))}"
        raise UserError(f"{error}{keys * ('unknown key' in str(error))}") from None
    args.dump_dir = os.path.abspath(args.dump_dir or f"runs/{args.name}")
    for key, text in (("name", args.name), ("dump_dir", args.dump_dir)):
        if not text.isprintable() or set(text) & set("%\\:"):
            need = "must not contain %, \\, a colon or a control character"
            raise UserError(f"{key} = {text!r}: {need}; Slurm or a search path could misread it")
    return args, notices


def _check_sweep(
    job: JobArgs, module: Script, arguments: list[str], sweep: Sweep, whole: RunConfig
) -> list[RunConfig]:
    """The config of each combination of values, with a name and a dump dir of its own."""
    for key, texts in sweep.items():
        if key in ("name", "dump_dir"):
            raise UserError(f"sweep.{key}: must be another key: each run gets a {key} of its own")
        parsed = [plain(parse_argument(text)) for text in texts]
        if any(parsed.count(value) > 1 for value in parsed):
            raise UserError(f"sweep.{key} = {','.join(texts)}: each value must be given once")
    if (count := prod(map(len, sweep.values()))) > MAX_SWEEP_RUNS:
        raise UserError(f"the sweep has {count:,} runs: must be at most {MAX_SWEEP_RUNS:,}")
    configs, errors = [], []
    for i, words in _in_order(sweep):
        short = "_".join(re.sub(r"^[^=]*\.", "", word) for word in words)
        name = f"{i:03d}_" + re.sub(r"[^\w=.+-]+", "-", short)
        name = name.encode()[:120].decode(errors="ignore")  # the name of a folder
        place = [f"name={whole.name}-{name}", f"dump_dir={whole.dump_dir}/{name}"]
        try:
            configs.append(_check(job, module, [*arguments, *words, *place])[0])
        except UserError as error:
            errors.append(f"{' '.join(words)}: {error}")
    # A script of another kind than training may have no checkpoints.
    folders = [str(c.checkpoint_folder) for c in configs if hasattr(c, "checkpoint_folder")]
    if shared := [folder for folder in folders if folders.count(folder) > 1]:
        need = "leave it out, or sweep it, so that each run has a folder of its own"
        errors.append(f"checkpoint.path = {shared[0]}: is that of several runs; {need}")
    if errors:
        raise UserError("\n".join(errors))
    return configs


def _in_order(sweep: Sweep) -> list[tuple[int, tuple[str, ...]]]:
    """(number, words) of each run as they are started: all of one seed before any of the next, so
    that a sweep that is stopped has whole pairs, and a machine that slows down does so in all arms.
    The number, which is in the run's name, is that of the combination in the order of the keys."""
    words = [[f"{key}={value}" for value in values] for key, values in sweep.items()]
    seeds = [at for at, key in enumerate(sweep) if key.rpartition(".")[2] == "seed"]
    runs = enumerate(product(*words))
    return sorted(runs, key=lambda run: [words[at].index(run[1][at]) for at in seeds])


def _check_dump_dir(job: JobArgs, root: Path) -> None:
    """Refuse a dump dir that exists, unless the user knows of it and no job uses it."""
    if root.exists() and not root.is_dir():
        raise UserError(f"dump_dir = {root}: must be a folder")
    if not root.exists() or not any(root.iterdir()):
        return
    if not job.dirs_exists_ok:
        raise UserError(
            f"dump_dir = {root}: exists; choose another, or resume there with dirs_exists_ok=true"
        )
    previous_jobs = (root / JOB_ID).read_text().split() if (root / JOB_ID).exists() else []
    for job_id, state in job_states(previous_jobs).items():
        if state not in ENDED:
            raise UserError(
                f"dump_dir = {root}: job {job_id} is {state} there; `scancel {job_id}` ends it"
            )


def _check_possible(job: JobArgs, batch_script: str) -> None:
    """Refuse a job that the cluster would never run."""
    try:
        run_slurm("sbatch", "--test-only", stdin=batch_script)
    except UserError as error:
        try:
            run_slurm("scontrol", "ping")
        except UserError:
            need = "there is no Slurm here, launcher=local runs it on this machine"
            raise UserError(f"{error}; {need}") from None
        # Slurm may not name the option that no node fulfills.
        asked = ", ".join(f"{k} = {v}" for k, v in asdict(job).items() if v)
        raise UserError(f"{error} (asked for: {asked})") from None


def _plans(job: JobArgs, arguments: list[str], sweep: Sweep) -> list[dict[str, Any] | None]:
    """Print a summary of the plan of each run that differs in more than its learning, and return
    the numbers of all. Raises UserError where one cannot fit."""
    if job.gpu is None:
        return [None] * prod(map(len, sweep.values()))
    from lingua.tools.plan.make import make_plan  # here, since it takes time to import
    from lingua.tools.plan.report import summary

    machine = [f"nodes={job.nodes}", f"ngpu={job.ngpu}", f"gpu={job.gpu}"]
    plan_of_words: dict[str, dict[str, Any]] = {}
    plans: list[dict[str, Any] | None] = []
    too_large: list[str] = []
    for _, words in _in_order(sweep):
        differ = " ".join(word for word in words if not _LEARNING.match(word))
        if differ not in plan_of_words:
            plan, _ = make_plan([*machine, *arguments, *words], quick=True)
            plan_of_words[differ] = plan.as_json()
            line = f"{differ}: {summary(plan)}" if differ else summary(plan)
            print(line, file=sys.stderr)  # stdout is for the job
            too_large += [] if plan.fits else [line]
        plans.append(plan_of_words[differ])
    if too_large and not job.allow_too_large:
        raise UserError(
            "\n".join(f"gpu = {job.gpu}: {line}" for line in too_large)
            + "\n`python -m lingua plan choices=3 ...` shows what fits, allow_too_large=true "
            "launches it all the same"
        )
    return plans


# ---- launching


def _write_inputs(
    job: JobArgs,
    module: Script,
    arguments: list[str],
    root: Path,
    configs: list[RunConfig],
    plans: list[dict[str, Any] | None],
    batch_script: str | None = None,
) -> None:
    """Write what the runs start from: code, configs and the batch script; and the plan of each,
    which its log compares with what it measured. Raises UserError."""
    # stdout is for the job, whose first line a program may read.
    try:
        apps = {str(app) for config in configs if (app := getattr(config, "app", None))}
        files = [word.removeprefix("config=") for word in arguments if word.startswith("config=")]
        freeze_code(
            Path(str(module.__file__)), root, [module.__name__, *sorted(apps)], job.copy, files,
            lambda line: print("code:", printable(line), file=sys.stderr),
        )  # fmt: skip
        move_away(root / SUBMIT_SCRIPT)
        (root / LOGS).mkdir(exist_ok=True)
        for config, plan in zip(configs, plans, strict=True):
            dump_dir = Path(config.dump_dir)
            (dump_dir / LOGS).mkdir(parents=True, exist_ok=True)
            for name in (BASE_CONFIG, PLAN):
                move_away(dump_dir / name)
            launched = f"{LAUNCHED_AT}{datetime.now(UTC).isoformat()} variance={job.variance}\n"
            (dump_dir / BASE_CONFIG).write_text(launched + to_yaml(config), encoding="utf-8")
            if plan is not None:
                (dump_dir / PLAN).write_text(json.dumps(plan, indent=1) + "\n")
        if batch_script is not None:
            (root / SUBMIT_SCRIPT).write_text(batch_script, encoding="utf-8")
    except OSError as error:
        what, why = error.filename or root, error.strerror or error
        raise UserError(f"{what}: cannot be written: {why}") from None


def _submit(root: Path, configs: list[RunConfig]) -> list[Launched]:
    try:
        # One may launch from within a job, whose variables srun would take for options.
        sbatch = ("sbatch", "--parsable", str(root / SUBMIT_SCRIPT))
        shown = run_slurm(*sbatch, env=environment_of_another())
    except UserError as error:
        raise UserError(
            f"{error}; nothing was submitted, dirs_exists_ok=true launches it again"
        ) from None
    job_id = shown.partition(";")[0].strip()  # a name of the cluster may follow
    ids = [f"{job_id}_{i}" for i in range(len(configs))] if len(configs) > 1 else [job_id]
    (root / JOB_ID).write_text(job_id + "\n")
    launched = [Launched(Path(c.dump_dir), i) for c, i in zip(configs, ids, strict=True)]
    for run in launched:
        (run.dump_dir / JOB_ID).write_text(f"{run.job_id}\n")
    return launched


def _run_here(
    job: JobArgs, root: Path, configs: list[RunConfig], program: list[str], swept: bool
) -> list[Launched]:
    """Run them on this machine by torchrun: one whose output is shown, or a sweep."""
    torchrun = [sys.executable, "-m", "lingua.tools.slurm.torchrun", "--standalone"]
    torchrun += ["--nproc-per-node", str(job.nodes * job.ngpu)]
    shell = [
        "set -e",
        "trap 'exit 143' TERM",  # once the command that runs, which gets the signal too, has ended
        *setup_lines(job, root),
        # What torchrun prints before each line of rank 0; its default names the role.
        "export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=' '",
        "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300",  # seconds to save, before torchrun kills
    ]
    commands: list[Command] = []
    for config in configs:
        check = [*torchrun, *check_words(job, config), f"folder={config.dump_dir}"]
        lines = [*shell, *[shlex.join(check)] * job.check, 'exec "$@"']
        bash = ["bash", "-c", "\n".join(lines), "bash", *torchrun]
        tee = [] if swept else ["--tee", "0:3"]
        logs = ["--redirects", "3", "--log-dir", f"{config.dump_dir}/{LOGS}", *tee]
        argv = [*bash, *logs, "-m", *program, f"config={config.dump_dir}/{BASE_CONFIG}"]
        commands.append((Path(config.dump_dir), argv))
    share, on_stop = _shares(job, configs), job.on_stop
    codes = run_sweep(root, commands, share, on_stop) if swept else [run_one(*commands[0], on_stop)]
    return [Launched(d, None, code) for (d, _), code in zip(commands, codes, strict=True)]


def _shares(job: JobArgs, configs: list[RunConfig]) -> list[dict[str, str]]:
    """Returns the share of this machine for each of the runs that a sweep runs at once."""
    on_cpu = job.gpus == "none" or getattr(configs[0], "device", "auto") == "cpu"
    at_once = min(job.at_once or 1, len(configs))
    cores = len(os.sched_getaffinity(0))
    return machine_shares(at_once, job.nodes * job.ngpu, [] if on_cpu else visible_gpus(), cores)
