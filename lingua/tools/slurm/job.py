"""What a job asks for, and the batch script that asks Slurm for it and starts the run."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lingua.base.dump_dir import BASE_CONFIG, CODE, JOB_ID, LOGS, SUBMIT_SCRIPT
from lingua.base.errors import UserError
from lingua.config.schema import bounds

BATCH_SCRIPT = """\
#!/bin/bash
# It is submitted by
#     sbatch {script}
# and resumes the run where it is submitted again. The run's keys are in {base_config}, beside it.
{options}

set -e  # the first line that fails ends the job
job="{job}"
{run}
logs="$run/{logs}/$job"
mkdir -p "$logs"
echo "$job" >"$run/{job_id}"

max_restarts=0  # until the run starts
at_end() {{
    code=$?
    shown=$(squeue -h -j "$job" -O State:20,RestartCnt:9,Requeue:3,BatchFlag:3,Reason:99 || true)
    {search}
    {end} "$code" "$max_restarts" "$run" "$job" "$shown" {on_stop} || again=$?
    if ((again == 75)); then scontrol requeue "$job" || true; fi # a rank has failed
    exit "$((again == 2 ? 2 : code))"  # 2: a mistake
}}
trap at_end EXIT
trap 'exit 143' TERM  # once the ranks have left: Slurm ends the job

cd {folder}
{setup}
export PYTHONUNBUFFERED=1

# What some clusters need; remove the # before a line to set it.
# export NCCL_DEBUG=INFO  # print the networks and GPUs that NCCL uses
# export NCCL_SOCKET_IFNAME=eth0  # network interface of NCCL's sockets
# export GLOO_SOCKET_IFNAME=eth0  # network interface of messages between hosts
# export NCCL_IB_HCA=mlx5  # InfiniBand adapters
# export NCCL_IB_DISABLE=1  # use sockets, not InfiniBand
# export MASTER_PORT=29500  # port at which rank 0 meets the others

# Signals that come while Python starts wait until the run takes them (GNU coreutils from 8.31 on).
hold=(env --block-signal=USR2,TERM,INT,HUP)
"${{hold[@]}}" true 2>/dev/null || hold=()
{check}max_restarts={max_restarts}
srun --unbuffered --kill-on-bad-exit=1{cores} \\
    --output="$logs/${{job}}_%t_log.out" --error="$logs/${{job}}_%t_log.err" \\
    "${{hold[@]}}" {program} config="$run/{base_config}"
"""
# All ranks leave with one code, which the kill of those that are still leaving would change; --wait
# is for one that hangs. The table is in the job's log.
CHECK = """\
# What is out of line ends the job, which gives its nodes back and is not queued again. So does a
# signal: the check does not hold it back.
srun --wait=30{cores} --error="$logs/${{job}}_%t_check.err" \\
    {program} folder="$run"
"""


@dataclass
class JobArgs:
    script: str | None = None  # module to run; its check() validates the config; null: training
    # slurm submits a job, local runs it on this machine without Slurm, print writes all that a job
    # needs into the dump dir, prints the batch script, and leaves submitting it to you
    launcher: Literal["slurm", "local", "print"] = "slurm"
    nodes: int = 1  # machines
    ngpu: int = 1  # ranks on each
    # GPUs a rank sees: all that the job has on its node (node), one of its own (task), none
    gpus: Literal["node", "task", "none"] = "node"
    ncpu: int | None = None  # CPU cores of a rank; null: Slurm's default
    mem: str | None = None  # memory of a node, such as 64G (0: all of it); null: Slurm's default
    # limit, minutes or [days-]hours:minutes:seconds; null: the partition's default
    time: str | None = None
    signal_s: int = 120  # seconds before the limit at which the run gets a signal, saves, requeues
    partition: str | None = None  # Slurm partition; null: the default one
    account: str | None = None  # Slurm account to charge
    qos: str | None = None  # quality of service
    constraint: str | None = None  # features the nodes must have
    exclude: str | None = None  # nodes not to run on
    # any other option of sbatch by its long name, slurm.reservation=NAME; one without value is true
    slurm: dict[str, Any] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)  # shell lines before the run: [module load x]
    # untracked files and folders of the checkout to copy with the code, besides the Python files of
    # apps, lingua and the app
    copy: list[str] = field(default_factory=list)
    # what lingua compare will assume of the arms of a sweep: each has a variance of its own, or all
    # vary alike
    variance: Literal["separate", "equal"] = "separate"
    # how many runs of a sweep at once; null: all of them as jobs, one on this machine, whose cores
    # and GPUs are divided among those that run
    at_once: int | None = None
    # device to plan for, as lingua plan knows it: a summary is printed, and what cannot fit is
    # refused. null: no plan
    gpu: str | None = None
    allow_too_large: bool = False  # launch what does not fit by that plan
    # measure the machine before the run, as lingua check: what is out of line ends the job
    check: bool = False
    # how often in a row a job is queued again since a rank has failed, without a new checkpoint
    # between; not after a mistake (exit code 2) or where ranks differ (3), nor with launcher=local
    max_restarts: int = 3
    # command and arguments to run when a job ends or is queued again; its variable LINGUA_REASON
    on_stop: list[str] = field(default_factory=list)
    dirs_exists_ok: bool = False  # launch in a dump dir that exists, and resume there

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "nodes", "ngpu", "ncpu", "signal_s", "at_once", maximum=65535)
        yield from bounds(self, 0, "max_restarts", maximum=65535)
        for i, line in enumerate(self.setup):
            if line.endswith("\\"):
                yield f"setup[{i}]", "must not end in a backslash, which joins the next line to it"
        if self.gpu is not None and self.script is not None:
            yield "gpu", f"plans training: leave it out with script = {self.script}"
        if self.allow_too_large and self.gpu is None:
            yield "allow_too_large", "needs gpu, the device to plan for"
        minutes = self.time or ""
        if minutes.isdigit() and int(minutes) * 60 <= self.signal_s:
            yield "signal_s", f"must be below time = {minutes}, in seconds"


class RunConfig(Protocol):
    """The configuration of a run: of training, or of another program."""

    name: str
    dump_dir: str  # absolute once it is checked


def batch_script(
    job: JobArgs, root: Path, name: str, configs: list[RunConfig], program: list[str]
) -> str:
    """A batch script that starts the run in each of its tasks; of a sweep, an array of jobs."""
    n = len(configs)
    same_name = ("time", "mem", "partition", "account", "qos", "constraint", "exclude")
    options = {"job-name": name, "nodes": job.nodes, "ntasks-per-node": job.ngpu}
    options |= {"node": {"gpus-per-node": job.ngpu}, "task": {"gpus-per-task": 1}}.get(job.gpus, {})
    options |= {"cpus-per-task": job.ncpu} | {name: getattr(job, name) for name in same_name}
    options |= {"signal": f"USR2@{job.signal_s}", "requeue": True, "open-mode": "append"}
    options |= {"array": f"0-{n - 1}%{job.at_once or n}"} if n > 1 else {}
    options |= {"output": root / LOGS / ("%A_%a.log" if n > 1 else "%j.log")} | job.slurm
    lines = []
    for option, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", option) or not str(value).isprintable():
            need = "must be the long name of an option, with a value without control characters"
            raise UserError(f"option of sbatch {option} = {value!r}: {need}")
        if value not in (None, False):
            shown = "" if value is True else f"={shlex.quote(str(value))}"
            lines.append(f"#SBATCH --{option}{shown}")
    folders = [shlex.quote(config.dump_dir) for config in configs]
    # srun takes its own number of cores, not the batch script's (Slurm 22.05)
    cores = f" --cpus-per-task={job.ncpu}" if job.ncpu else ""
    check = shlex.join([sys.executable, *check_words(job, configs[0])])
    return BATCH_SCRIPT.format(
        script=shlex.quote(str(root / SUBMIT_SCRIPT)),
        base_config=BASE_CONFIG,
        options="\n".join(lines),
        folder=shlex.quote(os.getcwd()),
        setup="\n".join(setup_lines(job, root)),
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if n > 1 else "$SLURM_JOB_ID",
        run="\n".join(["runs=(", *folders, ")", 'run="${runs[SLURM_ARRAY_TASK_ID]}"'])
        if n > 1
        else f"run={folders[0]}",
        logs=LOGS,
        job_id=JOB_ID,
        cores=cores,
        check=CHECK.format(cores=cores, program=check) if job.check else "",
        search="; ".join(setup_lines(job, root)[-2:]),  # before `setup` has run too
        end=shlex.join([sys.executable, "-m", "lingua.tools.slurm.end"]),
        on_stop=shlex.join(job.on_stop),
        max_restarts=job.max_restarts,
        program=shlex.join([sys.executable, "-m", *program]),
    )


def setup_lines(job: JobArgs, root: Path) -> list[str]:
    """Shell lines: those of the user; then modules are imported from the copy of the code, not from
    the current folder, which relative paths refer to."""
    code = shlex.quote(str(root / CODE))
    search = [f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"', "export PYTHONSAFEPATH=1"]
    return [*job.setup, *search]


def check_words(job: JobArgs, config: RunConfig) -> list[str]:
    """Arguments of Python for a check of what a run will use."""
    keys = {"device": getattr(config, "device", None), "gpu": job.gpu}
    return ["-m", "lingua", "check", *(f"{k}={v}" for k, v in keys.items() if v is not None)]
