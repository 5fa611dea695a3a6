"""Benchmarks while a run trains: their scores, that the run is the same, and their mistakes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apps.main.check import check
from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import marks
from lingua.monitor.evaluation import WAITING
from lingua.tools.slurm.status import status, status_table
from tests.apps.runs import SMALL, Outcome, differs, write_sources
from tests.apps.tasks import write_tasks
from tests.apps.test_eval import eval_here, results_in
from tests.local_slurm import needs_slurm, slurm_here
from tests.mistakes import refused
from tests.programs import wait_for

TRAINED = {
    "steps": 4,
    "stop_at": "null",
    "deterministic": True,
    "model.dropout": 0.1,
    "checkpoint.dump.every": 2,
    "eval.tasks": "[choice,rolling,reply]",
    "eval.num_fewshot": 1,
}


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), n=4)


def of_evals(run: Outcome) -> list[dict[str, Any]]:
    path = run.dump_dir / "metrics.eval.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_evaluated_run_is_the_same_and_scores_as_its_checkpoints(runs, task_dir, tmp_path):
    settings = TRAINED | {"eval.task_dir": task_dir}
    evaluated = runs.train((1, 2, 1), settings | {"eval.every": 2})
    plain = runs.train((1, 2, 1), {k: v for k, v in settings.items() if k[:5] != "eval."})
    assert evaluated.column("loss") == plain.column("loss")
    assert evaluated.column("grad_norm") == plain.column("grad_norm")
    assert differs(evaluated, plain) == []
    assert not (plain.dump_dir / "metrics.eval.jsonl").exists()
    found = of_evals(evaluated)
    tasks = ["choice", "rolling", "reply"]
    expected = [(step, task) for step in (2, 4) for task in tasks]
    assert [(line["step"], line["task"]) for line in found] == expected
    assert "|choice" in evaluated.log and "bits_per_byte" in evaluated.log
    for step, lines in ((2, found[:3]), (4, found[3:])):
        assert results_in(evaluated.dump_dir / "evals" / f"{step:010d}")["step"] == step
        out = tmp_path / str(step)
        argv = [f"ckpt={evaluated.checkpoint(step)}", f"dump_dir={out}", f"task_dir={task_dir}"]
        argv += ["tasks=[choice,rolling,reply]", "num_fewshot=1"]
        [(refused, _)] = runs.ranks.run(1, eval_here, *argv)
        assert not refused
        for line in lines:
            alone = results_in(out)["results"][line["task"]]
            numbers = {k: v for k, v in line.items() if "," in k}
            assert numbers and numbers == pytest.approx({k: alone[k] for k in numbers}, rel=1e-4)
    changed = [line["bits_per_byte,none"] for line in found if line["task"] == "rolling"]
    assert abs(changed[0] / changed[1] - 1) > 1e-3  # which the comparison would notice


def test_a_resumed_run_cuts_the_evaluations_of_what_it_repeats(runs, task_dir):
    settings = TRAINED | {"eval.task_dir": task_dir, "eval.tasks": "[rolling]", "eval.every": 1}
    begun = runs.train((1, 1, 1), settings | {"stop_at": 2})
    with (begun.dump_dir / "metrics.eval.jsonl").open("a") as file:
        file.write('{"step": 3, "task": "rolling"}\n{"step"')  # what a killed process left
    run = runs.train((1, 1, 1), settings, dump_dir=begun.dump_dir)
    assert [line["step"] for line in of_evals(run)] == [1, 2, 3, 4]
    assert all("byte_perplexity,none" in line for line in of_evals(run))


def test_what_fails_in_an_evaluation_does_not_stop_training(runs, tmp_path):
    """A task of which a function fails, and then results that cannot be written."""
    task_dir, dump_dir = write_tasks(tmp_path / "tasks", n=4), tmp_path / "run"
    broken = 'def length(doc, results):\n    return {"length": 1 / 0}\n'
    (task_dir / "measure.py").write_text(broken)
    (dump_dir / "evals").mkdir(parents=True)
    (dump_dir / "evals" / "0000000004").write_text("a file")
    settings = TRAINED | {"eval.task_dir": task_dir, "eval.every": 2}
    runs.train((1, 2, 1), settings | {"eval.tasks": "[reply]", "stop_at": 3}, dump_dir=dump_dir)
    run = runs.train((1, 2, 1), settings | {"eval.tasks": "[rolling]"}, dump_dir=dump_dir)
    assert "error: step 2 is not evaluated: the evaluation failed: ZeroDiv" in run.log
    assert "error: step 4 is not evaluated: " in run.log and "cannot be written" in run.log
    assert "done: 4 steps" in run.log and of_evals(run)[-1]["step"] == 4


def test_an_evaluation_stops_where_a_signal_asks_the_run_to_stop(runs, tmp_path):
    task_dir, dump_dir = write_tasks(tmp_path / "tasks", n=4), runs.folder / "signalled"
    # Sent while the questions are written, of the first evaluation: its checkpoint is there.
    code = "import os, signal\n\ndef text(doc):\n"
    code += f"    if os.path.exists({str(dump_dir / 'checkpoints' / '0000000001')!r}):\n"
    code += '        os.kill(os.getpid(), signal.SIGUSR2)\n    return doc["question"]\n'
    with (task_dir / "measure.py").open("a") as file:
        file.write(code)
    task = (task_dir / "reply.yaml").read_text()
    by_function = task.replace('doc_to_text: "{{question}}"', "doc_to_text: !function measure.text")
    assert by_function != task
    (task_dir / "reply.yaml").write_text(by_function)
    settings = TRAINED | {"eval.task_dir": task_dir, "eval.tasks": "[reply]", "eval.every": 1}
    run = runs.train((1, 2, 1), settings, dump_dir=dump_dir)
    assert "error: step 1 is not evaluated: a signal asks the run to stop" in run.log
    assert "stopped by SIGUSR2" in run.log and run.column("step") == [1]
    assert not (dump_dir / "metrics.eval.jsonl").exists()

    (task_dir / "reply.yaml").write_text(task)
    run = runs.train((1, 1, 1), settings, dump_dir=dump_dir)  # runs the missed evaluation
    assert [line["step"] for line in of_evals(run)] == [1, 2, 3, 4]
    assert "resuming" in run.log and "done: 4 steps" in run.log


def test_mistakes_of_an_evaluation_are_found_before_training(runs, task_dir):
    """Those of the job of one: tests/mistakes.txt."""
    settings = TRAINED | {"data.root_dir": runs.text, "eval.task_dir": task_dir}
    run = runs.train((1, 2, 1), settings | {"data.seq_len": 12}, refused=True)
    assert "tasks: reply: max_gen_tokens = 12: leaves no room" in run.error
    assert not list((run.dump_dir / "checkpoints").glob("0*"))

    def validate(**more: Any) -> None:
        """As a launcher of the run does."""
        words = SMALL | settings | {"dump_dir": run.dump_dir} | more
        check([f"{key}={value}" for key, value in words.items()], 2)

    refused(lambda: validate(**{"eval.task_dir": "/no"}), 'eval.task_dir = "/no": must be a folder')
    job = "{ngpu: 2, distributed.tp_size: 2, context: 16, time: 5, signal_s: 60}"
    validate(**{"eval.launcher": "slurm", "eval.job": job})


def test_the_status_of_a_job_that_does_not_train_is_what_it_came_to(tmp_path):
    for name in ("0000000002", "0000000004"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "base_config.yaml").write_text("tasks: [a]\n")
    (tmp_path / "0000000004" / "results_now.json").write_text("{}")
    (tmp_path / "0000000002" / "logs" / "rank_err.txt").write_text("error: no space\n")
    first, second = status(tmp_path)
    assert first.failed and first.errors and "error: no space" in status_table([first])
    assert not second.failed and " 0/0 " not in status_table([first, second])


REPO = Path(__file__).parents[2]
WAIT_S = 180.0  # of a job, where others run too


@needs_slurm
@pytest.mark.soak
def test_a_run_launches_its_evaluations_and_logs_those_that_fail(tmp_path, tmp_path_factory):
    text, dump_dir = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    write_sources(text)
    task_dir = write_tasks(tmp_path / "tasks", n=3)
    settings = SMALL | {"dump_dir": dump_dir, "data.root_dir": text, "steps": 6}
    settings |= {"checkpoint.dump.every": 6, "checkpoint.dump.keep": 1, "eval.every": 2}
    checkpoints = tmp_path / "elsewhere"
    settings |= {"checkpoint.path": checkpoints, "logging.wandb.mode": "offline"}
    settings |= {"eval.launcher": "slurm", "eval.tasks": "[reply]", "eval.task_dir": task_dir}

    def evaluation(step: int) -> Path:
        return dump_dir / "evals" / f"{step:010d}"

    def marked(step: int) -> list[str]:
        return marks(checkpoints / f"{step:010d}")

    with slurm_here(tmp_path_factory.mktemp("jobs") / "cluster", 1) as env:

        def train(stop_at: int, job: str) -> str:
            """The output of a process that is itself in a job; each of them ends well."""
            words = (settings | {"stop_at": stop_at, "eval.job": job}).items()
            command = [sys.executable, "-m", "apps.main.train", *(f"{k}={v}" for k, v in words)]
            job_7 = env | {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_MEM_PER_CPU": "1"}
            done = subprocess.run(command, cwd=REPO, env=job_7, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def state(job_id: str) -> str:
            command = ["scontrol", "show", "job", "--oneliner", job_id]
            shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            return dict(w.split("=", 1) for w in shown.stdout.split() if "=" in w)["JobState"]

        # A job that fails: the task needs more room than it is given there.
        output = train(2, "{gpus: none, time: 5, context: 12}")
        [failed] = re.findall(r"step 2 is evaluated by a job: job (\d+) was submitted", output)
        wait_for(lambda: state(failed) == "FAILED", seconds=WAIT_S)
        assert marked(2) == [WAITING] and marked(4) == []

        # The next evaluation logs it; its own job completes.
        output = train(4, "{gpus: none, time: 5}")
        assert f"error: job {failed}, which evaluates 0000000002, is FAILED: error: " in output
        assert "must be below the context of 12 tokens" in output
        [good] = re.findall(r"step 4 is evaluated by a job: job (\d+) was submitted", output)
        wait_for(lambda: state(good) == "COMPLETED", seconds=WAIT_S)
        [line] = (dump_dir / "metrics.eval.jsonl").read_text().splitlines()
        assert (json.loads(line)["step"], json.loads(line)["task"]) == (4, "reply")
        assert results_in(evaluation(4))["config"]["num_fewshot"] is None
        assert len(list(evaluation(4).glob("wandb/offline-run-*/run-*.wandb"))) == 1
        assert marked(4) == [] and marked(2) == [WAITING]

        # One that cannot be launched.
        output = train(6, "{gpus: none, time: 5, partition: nowhere}")
        assert "error: step 6 is not evaluated: its job was not launched: error: " in output
        assert "nowhere" in output and "done: 6 steps" in output
        assert not list(evaluation(6).glob("results_*")) and WAITING not in marked(6)
        saved = sorted(c.step for c in find(checkpoints))
        assert saved == [2, 6]  # 4 is evaluated, 2 was never
