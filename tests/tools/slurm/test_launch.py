"""Launching that needs no Slurm: the batch script, runs on this machine, their progress, and what
is refused."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lingua.run.records import Record
from lingua.tools.runs.launches import assumes_equal, launched_at
from lingua.tools.slurm.command_line import main, split_values
from lingua.tools.slurm.job import JobArgs
from lingua.tools.slurm.launch import launch
from lingua.tools.slurm.local import machine_shares, run_sweep
from lingua.tools.slurm.status import environment_of_another, status, status_table
from tests.apps.runs import SMALL, write_sources
from tests.mistakes import refused
from tests.parallel.test_launch import MISTAKEN
from tests.programs import OF_OTHERS, python

REPO = Path(__file__).parents[3]
HOSTILE = """it's "a" $(touch pwned) `touch pwned` $HOME & ; #x * name"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run, which needs no more; a launch imports it from its copy of the code."""
    monkeypatch.setattr(sys, "executable", *python(OF_OTHERS))
    write_sources(tmp_path)
    values = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "a run"}
    return [f"{key}={value}" for key, value in values.items()]


def processes_with(variable: str) -> list[str]:
    """The command lines of processes that have it in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
    return found


STOOL = """
import runpy, sys
sys.executable = sys.argv.pop(1)  # of the runs; stool itself is to have a process of the terminal
runpy.run_module("lingua.stool", run_name="__main__")
"""


def test_a_sweep_on_this_machine_saves_all_runs_at_ctrl_c(tmp_path):
    text, sweep = tmp_path / "text", tmp_path / "sweep"
    text.mkdir()
    write_sources(text)
    job = ["script=tests.slurm_app", "launcher=local", "at_once=2", "setup=[export STEP_S=0.2]"]
    values = SMALL | {"stop_at": "null", "steps": 200, "data.root_dir": text, "dump_dir": sweep}
    values["sweep.optim.lr"] = "1e-3,3e-4,1e-4"
    words = [*job, *(f"{key}={value}" for key, value in values.items())]
    command = [sys.executable, "-c", STOOL, *python(OF_OTHERS), *words]
    env = os.environ | {"A_SECRET": (secret := secrets.token_hex())}

    def both_train() -> bool:
        return sum('"loss"' in path.read_text() for path in sweep.glob("*/metrics.jsonl")) == 2

    with subprocess.Popen(
        command,
        cwd=REPO,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # the processes of one terminal
    ) as launcher:
        try:
            while launcher.poll() is None and not both_train():
                time.sleep(0.05)
            os.killpg(launcher.pid, signal.SIGINT)
            output = launcher.communicate(timeout=120)[0].decode()
        finally:
            launcher.kill()
    logs = sorted(sweep.glob("*/train.log"))  # of the first two: the third was not started
    assert [log.parent.name[:3] for log in logs] == ["000", "001"], output
    for log in logs:
        assert "stopped by SIGINT after step" in log.read_text(), output
        [checkpoint] = (log.parent / "checkpoints").glob("0*")
        assert f"step {int(checkpoint.name)}, which is saved" in log.read_text()
    before_signal, _, _ = output.partition("SIGINT: 2 runs will save")
    assert launcher.returncode == 130 and "step " not in before_signal, output
    started = [line.split() for line in before_signal.splitlines() if line.startswith("started ")]
    assert [name[:3] for _, name in started] == ["000", "001"], output
    assert "stopped by SIGINT; 1 run not started. The same command with dirs_exists_ok" in output

    assert output.count("  stopped  step ") == 2 and "state" in output.splitlines()[-4]
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert secret not in output and not any(secret.encode() in f.read_bytes() for f in files)

    command = [word for word in command if not word.startswith(("setup=", "steps="))]
    again = [*command, "steps=20", "dirs_exists_ok=true"]
    done = subprocess.run(again, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("  finished  step ") == 3, done.stdout


@pytest.mark.parametrize(
    ("setup", "sign"), [("echo None; sleep 60", ""), ("export SLEEP_S=60", " None None")]
)
def test_a_signal_while_a_launch_starts_ends_all_its_processes(tmp_path, setup, sign):
    """In a line of `setup`, and when torchrun has just started its ranks."""
    words = ["script=tests.gpu_app", "launcher=local", "gpus=none", "ngpu=2"]
    words += [f"setup=[{setup}]", f"dump_dir={tmp_path / 'run'}"]
    tag = f"TAG={secrets.token_hex()}"
    with subprocess.Popen(
        ["env", tag, sys.executable, "-c", STOOL, *python(OF_OTHERS), *words],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        lines = iter(launcher.stdout)
        before = next(line for line in lines if f"None{sign}" in line)
        launcher.send_signal(signal.SIGTERM)
        after = [line for line in lines if line != "Terminated\n"]  # bash's own, of its command
    assert launcher.returncode == 143, before
    assert after == ["stopped by SIGTERM. The same command with dirs_exists_ok=true continues\n"]
    assert not processes_with(tag)


@pytest.mark.parametrize("code", [2, 3])  # of a mistake, and of ranks that differ
def test_a_local_launch_ends_with_the_code_of_an_error_and_without_a_report(tmp_path, code):
    program = MISTAKEN.replace('wrong")', f'wrong", exit_code={code})')
    assert program != MISTAKEN
    (tmp_path / "program.py").write_text(program)
    torchrun = [*python(), "-m", "lingua.tools.slurm.torchrun", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--no-python", *python(), tmp_path / "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (code, "error: this is wrong\n")


def test_runs_that_run_at_once_divide_the_machine():
    assert machine_shares(1, 2, [], 8) == [{}] and machine_shares(1, 2, ["0", "1", "2"], 8) == [{}]
    assert machine_shares(3, 1, [], 8) == 3 * [{"OMP_NUM_THREADS": "2"}]
    assert machine_shares(3, 4, [], 8) == 3 * [{"OMP_NUM_THREADS": "1"}]
    parts = machine_shares(2, 2, ["1", "3", "GPU-a", "GPU-b", "7"], 8)
    assert [part["CUDA_VISIBLE_DEVICES"] for part in parts] == ["1,3", "GPU-a,GPU-b"]
    refused(lambda: machine_shares(3, 2, list("01234"), 8), "at_once = 3", "2", "5 GPUs")


def test_a_run_of_a_sweep_that_fails_or_is_stopped_does_not_end_the_others(tmp_path, capsys):
    stop = """{"event": "stop", "step": 2, "reason": "SIGTERM", "created_at": "%s"}"""
    stop = f"import datetime; print('{stop}' % datetime.datetime.now(datetime.UTC).isoformat(), "
    stop += f"file=open('{tmp_path}/stopped/metrics.jsonl', 'w')); exit(1)"
    codes = {"bad": "raise ValueError('why')", "good": "print('done')", "stopped": stop}
    codes["killed"] = "import os; os.kill(os.getpid(), 9)"
    commands = []
    for name, code in codes.items():
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        (folder / "base_config.yaml").write_text("steps: 5\n")
        commands.append((folder, [sys.executable, "-c", code]))
    tell = 'echo "$LINGUA_REASON $LINGUA_EXIT_CODE $LINGUA_DUMP_DIR" >>"$0"; exit 3'
    on_stop = ["sh", "-c", tell, str(tmp_path / "said")]
    assert run_sweep(tmp_path, commands, [{}], on_stop) == [1, 0, 1, 137]
    ends = [f"failed 1 {tmp_path}/bad", f"stopped 0 {tmp_path}/good"]  # before step 5
    ends += [f"failed 1 {tmp_path}/stopped", f"failed 137 {tmp_path}/killed"]
    assert (tmp_path / "said").read_text().splitlines() == ends
    shown = capsys.readouterr().out
    for n, name, how in ((1, "bad", "failed  step 0/5"), (2, "good", ""),
                         (3, "stopped", "stopped  step 2/5"), (4, "killed", "failed")):  # fmt: skip
        assert f"started  {name}\n" in shown and f"{n} of 4  {name}  {how}" in shown
    assert f"see {tmp_path}/bad/logs" in shown
    assert "ValueError: why" in (tmp_path / "bad" / "logs" / "launcher.log").read_text()
    again = tmp_path / "stopped", [sys.executable, "-c", "exit(1)"]  # before it writes a line
    assert run_sweep(tmp_path, [again], [{}], []) == [1]
    assert "stopped  failed  step 2/5" in capsys.readouterr().out


def test_print_writes_what_a_job_needs_and_needs_no_slurm(arguments, tmp_path, monkeypatch, capsys):
    job = "launcher=print nodes=2 ngpu=16 gpus=task ncpu=4 mem=64G time=1-00 slurm.reservation=r"
    words = [
        *job.split(),
        "variance=equal",
        "slurm.exclusive=true",
        "setup=[module load cuda, 'echo \"a, b\"']",
    ]
    argv = [*words, *arguments]
    (tmp_path / "git").symlink_to(str(shutil.which("git")))  # of all commands
    monkeypatch.setenv("PATH", str(tmp_path))
    before = datetime.now(UTC)
    main(argv)
    script = capsys.readouterr().out
    options = "nodes=2 ntasks-per-node=16 gpus-per-task=1 cpus-per-task=4 mem=64G time=1-00"
    options += " signal=USR2@120 reservation=r exclusive requeue"
    lines = {f"#SBATCH --{option}" for option in options.split()}
    assert set(script.splitlines()) >= lines | {"module load cuda", 'echo "a, b"'}
    assert "--kill-on-bad-exit=1 --cpus-per-task=4" in script
    folder = tmp_path / "a run"
    assert (folder / "submit.slurm").read_text() == script
    for file in ("base_config.yaml", "code/apps/main/train.py", "code.commit", "logs"):
        assert (folder / file).exists(), file
    assert before <= launched_at(Record(folder)) <= datetime.now(UTC)
    assert assumes_equal([Record(folder)])
    assert ' -m apps.main.train config="$run/base_config.yaml"' in script
    assert f"sbatch '{folder}/submit.slurm'" in script and "# export NCCL_DEBUG=INFO" in script
    argv.remove("time=1-00")
    refused(lambda: main(argv), "dirs_exists_ok=true")
    main([*argv, "dirs_exists_ok=true"])
    printed = set(capsys.readouterr().out.splitlines())  # Slurm applies the partition's own limit
    assert set(script.splitlines()) - printed == {"#SBATCH --time=1-00"}
    argv[0] = "dirs_exists_ok=true"
    refused(lambda: main(argv), "sbatch", "launcher=local")
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")  # of a Slurm that has no cluster
    (tmp_path / "sbatch").chmod(0o700)
    assert "asked for" not in refused(lambda: main(argv), "sbatch", "launcher=local")


def test_runs_of_a_sweep_that_share_their_checkpoints_are_refused(arguments, tmp_path):
    words, rates = [*arguments, f"checkpoint.path={tmp_path / 'all'}"], {"optim.lr": ["1", "2"]}
    each = {"checkpoint.path": [f"{tmp_path}/{c * 200}" for c in "ab"]}  # a name of a run is cut
    job = JobArgs(launcher="print")
    refused(lambda: launch(job, words, rates), f"checkpoint.path = {tmp_path / 'all'}", "several")
    refused(lambda: launch(job, arguments, rates | each), "checkpoint.path", "several")
    assert launch(job, arguments, each)


def test_a_sweep_starts_all_arms_of_one_seed_before_those_of_the_next(arguments, tmp_path):
    """The number in a name is that of the combination, so that a sweep of an earlier version finds
    its runs; each is started with the values in its name."""
    sweep = {"optim.lr": ["1", "2"], "seed": ["7", "5"]}
    script = str(launch(JobArgs(launcher="print"), arguments, sweep))
    started = re.findall(r"a run/(\d\S+)'", script.partition("runs=(")[2].partition(")")[0])
    assert started == [f"00{n}_lr={lr}_seed={seed}" for n, lr, seed in ("017", "227", "115", "325")]
    assert "#SBATCH --array=0-3%4" in script
    for name in started:
        config = Record(tmp_path / "a run" / name).config
        assert [f"{config[key]:g}" for key in sweep] == re.findall(r"=(\d)", name)


def test_what_cannot_fit_by_the_plan_is_refused(arguments, tmp_path, capsys):
    gpu = tmp_path / "own.yaml"
    speeds = "memory_gb_per_s: 1, bf16_tflops: 1, tf32_tflops: 1, fp32_tflops: 1"
    links = "node_gb_per_s: 1, network_gb_per_s: 1"
    gpu.write_text(f"{{memory_gib: 0.003, reserve_gib: 0, {speeds}, {links}}}")
    sweep = {"optim.lr": ["1e-3", "1e-4"], "model.n_layers": ["2", "40"]}

    def planned(**job: Any) -> list[str]:
        args = JobArgs(launcher="print", ngpu=2, gpu=str(gpu), **job)
        script = launch(args, arguments, sweep)
        assert isinstance(script, str) and script.startswith("#!")
        return capsys.readouterr().err.splitlines()

    [line, _] = refused(planned).splitlines()
    assert line.startswith(f"gpu = {gpu}: model.n_layers=40: plan: does not fit, about ")
    capsys.readouterr()
    small, large = planned(allow_too_large=True)  # of four runs: a plan has no learning rate
    assert small.startswith("model.n_layers=2: plan: fits, about 0.0 of 0.003 GiB; a step takes ")
    assert large == line.removeprefix(f"gpu = {gpu}: ")


def test_the_script_runs_in_a_folder_of_any_name(arguments, tmp_path):
    srun, dump_dir = tmp_path / "srun", tmp_path / HOSTILE
    srun.write_text('#!/bin/sh\nprintf %s "$PYTHONPATH"\n')
    srun.chmod(0o700)
    job = JobArgs(launcher="print", setup=["$SETUP"])
    script = launch(job, [*arguments, f"dump_dir={dump_dir}"])
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for line, code, output in (("true", 0, f"{dump_dir}/code"), ("false", 1, "")):
        where = {"cwd": tmp_path, "env": env | {"SETUP": line}, "capture_output": True}
        done = subprocess.run(["bash", "-c", script], text=True, **where)
        assert (done.returncode, done.stdout) == (code, output), done
    assert (dump_dir / "logs" / "7").is_dir() and not list(tmp_path.rglob("pwned"))


def test_a_job_ends_where_its_check_fails(arguments, tmp_path):
    srun, dump_dir = tmp_path / "srun", tmp_path / HOSTILE
    srun.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *" -m lingua check "*) exit "$CODE";; esac')
    srun.chmod(0o700)
    words = [*arguments, f"dump_dir={dump_dir}", "device=cpu"]
    script = launch(JobArgs(launcher="print", check=True, ncpu=3), words)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for code in ("0", "1"):
        where = {"cwd": tmp_path, "env": env | {"CODE": code}, "capture_output": True}
        done = subprocess.run(["bash", "-c", script], text=True, **where)
        check, *run = done.stdout.splitlines()
        assert done.returncode == int(code) and len(run) == 1 - int(code), done
        assert check.endswith(f"-m lingua check device=cpu folder={dump_dir}")
        assert "--cpus-per-task=3" in check and "--output" not in check  # it is in the job's log


def test_a_signal_ends_a_check_and_waits_until_a_run_takes_it(arguments, tmp_path):
    for name, lines in (
        ("srun", 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"'),  # options
        ("program", "kill -USR2 $$\necho it goes on"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for check, ended in ((False, (0, "it goes on\n")), (True, (128 + signal.SIGUSR2, ""))):
        script = launch(JobArgs(launcher="print", check=check, dirs_exists_ok=True), arguments)
        script = script.replace(sys.executable, str(tmp_path / "program"))
        where = {"cwd": tmp_path, "env": env, "capture_output": True}
        done = subprocess.run(["bash", "-c", script], text=True, **where)
        assert (done.returncode, done.stdout) == ended, done


def test_a_run_on_this_machine_starts_only_where_its_check_is_right(arguments, tmp_path, capfd):
    def launched(**options: Any) -> tuple[int | None, str, bool]:
        [run] = launch(JobArgs(launcher="local", check=True, **options), arguments)
        return run.exit_code, capfd.readouterr().out, (run.dump_dir / "metrics.jsonl").exists()

    code, shown, trained = launched(gpu="h100")
    assert code == 1 and re.search("^products, TFLOP/s +OUT OF LINE", shown, re.M) and not trained
    code, shown, trained = launched(dirs_exists_ok=True)
    assert code == 0 and re.search("^products, TFLOP/s +right", shown, re.M) and trained


def test_status_does_not_obey_what_a_foreign_log_contains(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    dump_dir = tmp_path / "run\x1b[31m"
    (dump_dir / "logs" / "1").mkdir(parents=True)
    (dump_dir / "base_config.yaml").write_text("steps: 3\n")
    (dump_dir / "job_id").write_text("1")
    (dump_dir / "metrics.jsonl").write_bytes(
        b'\xff\n[1]\n{"step": "a", "loss": [], "step_time_s": 1e999, "tokens_per_s": NaN}\n'
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "base_config.yaml").write_text("steps: [x]\nstop_at: ${oc.env:HOME}\n")
    os.mkfifo(other / "job_id")
    (dump_dir / "logs" / "1" / "1_0_log.err").write_text("ValueError: \x1b]0;owned\x07\n")
    shown = status_table(status(tmp_path))
    assert "\\x1b[31m" in shown and r"ValueError: \x1b]0;owned\x07" in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_the_values_of_a_sweep_are_split_at_commas_outside_of_brackets_and_quotes():
    for text, values in (
        ("1e-3,3e-4", ["1e-3", "3e-4"]),
        ("{a: 1, b: 2},[1,2]", ["{a: 1, b: 2}", "[1,2]"]),
        ("'a,b', \"c']\",d", ["'a,b'", '"c\']"', "d"]),
        ("runs/a b.yaml", ["runs/a b.yaml"]),
    ):
        assert split_values("key", text) == values


def test_another_job_does_not_inherit_the_variables_of_this_one(monkeypatch):
    own = "SLURM_JOB_ID SLURM_MEM_PER_CPU PMIX_RANK RANK LOCAL_WORLD_SIZE MASTER_ADDR GROUP_RANK"
    own += " TORCHELASTIC_RUN_ID CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL"
    kept = "SLURM_CONF SBATCH_ACCOUNT HOME HF_HUB_OFFLINE OMP_NUM_THREADS"
    for name in f"{own} ZE_AFFINITY_MASK {kept}".split():
        monkeypatch.setenv(name, "1")
    env = environment_of_another()
    assert not env.keys() & {*own.split(), "ZE_AFFINITY_MASK"} and env.keys() >= set(kept.split())
