"""Launching that needs no Slurm: the batch script, runs on this machine, and what is refused."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lingua.errors import UserError
from lingua.slurm.launch import JobArgs, launch, main, split_arguments, split_values
from lingua.slurm.local import run_sweep, shares
from lingua.slurm.status import status, table
from tests.apps.runs import SMALL, write_sources
from tests.programs import python

REPO = Path(__file__).parents[2]
STOOL = """
import runpy, sys
sys.executable = sys.argv.pop(1)  # of the runs; stool itself is to have a process of the terminal
runpy.run_module("lingua.stool", run_name="__main__")
"""


def test_a_sweep_on_this_machine_saves_all_runs_at_ctrl_c(tmp_path: Path) -> None:
    text, sweep = tmp_path / "text", tmp_path / "sweep"
    text.mkdir()
    write_sources(text)
    job = ["script=tests.slurm_app", "launcher=local", "at_once=2", "setup=[export STEP_S=0.2]"]
    values = SMALL | {"stop_at": "null", "steps": 200, "data.root_dir": text, "dump_dir": sweep}
    values["sweep.optim.lr"] = "1e-3,3e-4,1e-4"
    words = [*job, *(f"{key}={value}" for key, value in values.items())]
    command = [sys.executable, "-c", STOOL, *python(), *words]
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
    assert launcher.returncode and "step " not in output.partition("SIGINT: 2 runs will save")[0], (
        output
    )
    assert "stopped by SIGINT; 1 run not started. The same command with dirs_exists_ok" in output

    assert output.count("  stopped  step ") == 2 and "state" in output.splitlines()[-4]
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert secret not in output and not any(secret.encode() in f.read_bytes() for f in files)


def test_runs_that_run_at_once_divide_the_machine() -> None:
    assert shares(1, 2, [], 8) == [{}] and shares(1, 2, ["0", "1", "2"], 8) == [{}]
    assert shares(3, 1, [], 8) == 3 * [{"OMP_NUM_THREADS": "2"}]
    assert shares(3, 4, [], 8) == 3 * [{"OMP_NUM_THREADS": "1"}]
    parts = shares(2, 2, ["1", "3", "GPU-a", "GPU-b", "7"], 8)
    assert [part["CUDA_VISIBLE_DEVICES"] for part in parts] == ["1,3", "GPU-a,GPU-b"]
    with pytest.raises(UserError, match=r"at_once = 3: must be at most 2: this machine has 5 GPUs"):
        shares(3, 2, list("01234"), 8)


def test_a_run_of_a_sweep_that_fails_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    commands = []
    for name, code in (("bad", "raise ValueError('why')"), ("good", "print('done')")):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        (folder / "base_config.yaml").write_text("steps: 5\n")
        commands.append((folder, [sys.executable, "-c", code]))
    assert run_sweep(tmp_path, commands, [{}]) == [1, 0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("1 of 2  bad  failed  step 0/5  ")
    assert f"see {tmp_path}/bad/logs" in lines[1] and lines[2].startswith("2 of 2  good  ")
    assert "ValueError: why" in (tmp_path / "bad" / "logs" / "launcher.log").read_text()


def test_print_shows_the_script_and_needs_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_sources(tmp_path)
    values = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "a run"}
    job = "launcher=print nodes=2 ngpu=16 gpus=task ncpu=4 mem=64G time=1-00 slurm.reservation=r"
    words = [*job.split(), "slurm.exclusive=true", "setup=[module load cuda, 'echo \"a, b\"']"]
    argv = ["stool", *words, *(f"{k}={v}" for k, v in values.items())]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("PATH", str(tmp_path))
    main()
    script = capsys.readouterr().out
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=16",
        "#SBATCH --gpus-per-task=1",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --mem=64G",
        "#SBATCH --time=1-00",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --reservation=r",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "module load cuda",
        'echo "a, b"',
    ):
        assert line in script.splitlines()
    assert "--kill-on-bad-exit=1 --cpus-per-task=4" in script
    argv.remove("time=1-00")
    main()
    printed = set(capsys.readouterr().out.splitlines())  # Slurm applies the partition's own limit
    assert set(script.splitlines()) - printed == {"#SBATCH --time=1-00"}
    assert not (tmp_path / "a run").exists()


def test_wrong_input_is_refused_where_slurm_is_not(tmp_path: Path) -> None:
    write_sources(tmp_path)
    values = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "a run"}
    arguments = [f"{k}={v}" for k, v in values.items()]

    def refused(
        sweep: dict[str, list[str]] | None = None, more: tuple[str, ...] = (), **job: Any
    ) -> str:
        with pytest.raises(UserError) as raised:
            launch(JobArgs(**({"launcher": "print"} | job)), [*arguments, *more], sweep)
        return str(raised.value)

    for script in ("", "..", ".x", "a b", "/etc/passwd"):
        need = f"script = {script}: must be the dotted path of a module, such as apps.main"
        assert refused(script=script) == need
    assert refused(setup=["true", "module load a \\"]).startswith("setup[1] = ['true', ")
    no_folder = f"{tmp_path}/one.jsonl"  # a file
    error = refused(more=(f"dump_dir={no_folder}/x",), launcher="local")
    assert error.startswith(f"{no_folder}/x") and error.endswith(
        "cannot be written: Not a directory"
    )
    for key in ("name", "dump_dir"):
        assert f"sweep.{key}: must be another key" in refused({key: ["a", "b"]})
    error = refused({"optim.lr": ["1e-3", "0.001"]})
    assert error == "sweep.optim.lr = 1e-3,0.001: each value must be given once"
    numbers = list(map(str, range(1, 40)))
    assert refused({"seed": numbers, "steps": numbers}).startswith("the sweep has 1,521 runs: ")
    with pytest.raises(UserError, match=r"sweep\.seed is given twice"):
        split_arguments(["sweep.seed=1", "sweep.seed=2"])
    assert not (tmp_path / "a run").exists()
    # Of long values, what names a run is cut.
    long = {"data.cache_dir": [f"{tmp_path}/{c * 200}" for c in "ab"]}
    assert isinstance(launch(JobArgs(launcher="print"), arguments, long), str)


def test_what_cannot_fit_by_the_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_sources(tmp_path)
    values = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "a run"}
    gpu = tmp_path / "own.yaml"
    speeds = "memory_gb_per_s: 1, bf16_tflops: 1, tf32_tflops: 1, fp32_tflops: 1"
    links = "node_gb_per_s: 1, network_gb_per_s: 1"
    gpu.write_text(f"{{memory_gib: 0.003, reserve_gib: 0, {speeds}, {links}}}")
    sweep = {"optim.lr": ["1e-3", "1e-4"], "model.n_layers": ["2", "40"]}

    def planned(**job: Any) -> list[str]:
        args = JobArgs(launcher="print", ngpu=2, gpu=str(gpu), **job)
        script = launch(args, [f"{k}={v}" for k, v in values.items()], sweep)
        assert isinstance(script, str) and script.startswith("#!")
        return capsys.readouterr().err.splitlines()

    with pytest.raises(UserError) as raised:
        planned()
    [line, _] = str(raised.value).splitlines()
    assert line.startswith(f"gpu = {gpu}: model.n_layers=40: plan: does not fit, about ")
    capsys.readouterr()
    small, large = planned(allow_too_large=True)  # of four runs: a plan has no learning rate
    assert small.startswith("model.n_layers=2: plan: fits, about 0.0 of 0.003 GiB; a step takes ")
    assert large == line.removeprefix(f"gpu = {gpu}: ")
    for job, need in (
        (JobArgs(gpu="h100", script="apps.main.eval"), "gpu = h100: plans training: leave it out"),
        (JobArgs(allow_too_large=True), "allow_too_large = True: needs gpu"),
        (JobArgs(gpu="h10"), r'gpu = "h10": must be .*did you mean "h100"'),
    ):
        with pytest.raises(UserError, match=need):
            launch(job, [f"{k}={v}" for k, v in values.items()])


def test_without_submitit_the_message_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path)
    values = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "run"}
    monkeypatch.setitem(sys.modules, "submitit.slurm", None)
    with pytest.raises(UserError, match=r"^launcher = print: needs the package submitit, which is"):
        launch(JobArgs(launcher="print"), [f"{k}={v}" for k, v in values.items()])


def test_a_line_of_setup_that_fails_ends_the_job(tmp_path: Path) -> None:
    write_sources(tmp_path)
    values = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "a run"}
    job = JobArgs(launcher="print", setup=["false", "echo after"])
    script = launch(job, [f"{k}={v}" for k, v in values.items()])
    assert isinstance(script, str)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_status_does_not_obey_what_a_foreign_log_contains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    shown = table(status(tmp_path))
    assert "\\x1b[31m" in shown and r"ValueError: \x1b]0;owned\x07" in shown
    assert "\x1b" not in shown and "\x07" not in shown


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,3e-4", ["1e-3", "3e-4"]),
        ("{a: 1, b: 2},[1,2]", ["{a: 1, b: 2}", "[1,2]"]),
        ("'a,b', \"c']\",d", ["'a,b'", '"c\']"', "d"]),
        ("runs/a b.yaml", ["runs/a b.yaml"]),
    ],
)
def test_the_values_of_a_sweep_are_split_at_commas_outside_of_brackets_and_quotes(
    text: str, values: list[str]
) -> None:
    assert split_values("key", text) == values


@pytest.mark.parametrize("text", ["", "[1,2", "a,,b", 500 * "[" + 500 * "]"])
def test_values_of_a_sweep_that_are_no_list_are_refused(text: str) -> None:
    with pytest.raises(
        UserError, match=r"sweep\.optim\.lr = .*: must be values separated by commas"
    ):
        split_values("optim.lr", text)
