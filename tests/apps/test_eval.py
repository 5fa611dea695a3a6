"""Benchmarks, by the program and while a run trains: lm-evaluation-harness's own scores, on any
topology, and the run is the same. What is refused is in tests/mistakes.txt."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from apps.main.config import ModelArgs
from apps.main.eval import main
from lingua.base.errors import UserError
from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import mark_file, marks
from lingua.checkpoint.save import save
from lingua.checkpoint.tensors import tensors_of
from lingua.monitor.args import WAITING
from lingua.parallel import launch
from lingua.parallel.args import DistributedArgs
from lingua.run.start import check
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.exchange import convert
from lingua.tools.slurm.status import status, status_table
from tests.apps.meshes import mesh, on_meshes
from tests.apps.runs import SMALL, Outcome, differs, write_sources
from tests.apps.tasks import TASKS, write_tasks
from tests.apps.test_model import initialised, model_args
from tests.apps.test_resume import start
from tests.local_slurm import needs_slurm, slurm_here
from tests.mistakes import refused
from tests.programs import wait_for
from tests.ranks import Ranks
from tests.tokenizer.test_tokenizer import write_byte_level, write_ranks, write_sentencepiece

CPU = torch.device("cpu")
MODEL = model_args(vocab_size=400, dim=36, n_heads=6, n_kv_heads=2, init_base_std=0.3)
SEQ_LEN = 64
SP_BYTES = slice(3, 259)  # the ids of bytes in a sentencepiece model
GIVEN = {"num_fewshot": 2, "limit": 5}


def make_run_here(
    folder: Path,
    model: ModelArgs,
    tokenizer: TokenizerArgs,
    add_bos: bool,
    seq_len: int = SEQ_LEN,
) -> None:
    """A run whose checkpoint of step 3 is exported to `folder`/hf."""
    launch.start(CPU, launch.detect_launch(), DistributedArgs())
    data = {"seq_len": seq_len, "add_bos": add_bos, "add_eos": True}
    data["tokenizer"] = asdict(tokenizer)
    text = OmegaConf.to_yaml({"model": OmegaConf.structured(model), "data": data})
    made = initialised(model)
    if tokenizer.name == "sp":
        # Never the likeliest: of bytes in a row that are no UTF-8, sentencepiece gives up those
        # that are none, but transformers all.
        made.output.weight.data[SP_BYTES] = 0
    save(folder / "checkpoints", 3, tensors_of(made), {}, text)
    dist.destroy_process_group()
    convert.main([f"source={folder}", f"out={folder / 'hf'}"])


def eval_here(*arguments: str, hidden: str | None = None) -> tuple[str, str]:
    """(the error, what it prints); `hidden` is a package that is not installed."""
    printed, message = io.StringIO(), ""
    gone = {name: None for name in sys.modules if hidden and name.split(".")[0] == hidden}
    gone |= {hidden: None} if hidden else {}
    with contextlib.redirect_stdout(printed), mock.patch.dict(sys.modules, gone):
        try:
            main(list(arguments))
        except UserError as error:
            message = str(error)
        finally:
            if dist.is_initialized():
                launch.leave(patience_s=30)  # as the program does
    return message, printed.getvalue()


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


BPE = partial(write_sentencepiece, model_type="bpe")
WRITE = {"hf": write_byte_level, "sp": BPE, "tiktoken": write_ranks}


@pytest.fixture(scope="module")
def make_run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(add_bos: bool, kind: str = "hf", **changed: Any) -> Path:
        folder = tmp_path_factory.mktemp("run")
        tokenizer = TokenizerArgs(kind, WRITE[kind](folder / "tokenizer"))
        model = replace(MODEL, vocab_size=build_tokenizer(tokenizer).vocab_size, **changed)
        ranks.run(1, make_run_here, folder, model, tokenizer, add_bos)
        return folder

    return make


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path]) -> Path:
    return make_run(False)


def theirs(run: Path, task_dir: Path, tasks: list[str], **given: Any) -> dict[str, Any]:
    """What the harness finds itself, with its own class for models of transformers."""
    of_model = {key: given.pop(key, None) for key in ("add_bos_token", "tokenizer")}
    of_model["max_length"] = given.pop("max_length", SEQ_LEN)
    model = HFLM(
        pretrained=str(run / "hf"), device="cpu", dtype="float32", batch_size=3, **of_model
    )  # fmt: skip
    manager = TaskManager(include_path=str(task_dir), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, **(GIVEN | given))


def ours(ranks: Ranks, run: Path, task_dir: Path, out: Path, *more: str, n: int = 1) -> Path:
    """Evaluate; returns the folder of the results."""
    argv = [f"ckpt={run}", f"task_dir={task_dir}", f"dump_dir={out}", "batch_size=4"]
    argv += [f"{key}={value}" for key, value in GIVEN.items()]
    if not any(word.startswith("tasks=") for word in more):
        argv.append(f"tasks=[{','.join(TASKS)}]")
    for error, _ in ranks.run(n, eval_here, *argv, *more):
        assert not error
    return out


def results_in(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("results_*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def samples_in(folder: Path, task: str) -> list[dict[str, Any]]:
    [path] = folder.glob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {key}": value
        for task, values in results["results"].items()
        for key, value in values.items()
        if isinstance(value, int | float)
    }


def replies(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["resps"][0][0] for sample in sorted(samples, key=lambda s: s["doc_id"])]


def answers(samples: list[dict[str, Any]]) -> list[list[float]]:
    """The log-probability of every choice of every document, or of the document as a whole."""
    return [
        [float(np.atleast_1d(answer)[0]) for answer in sample["filtered_resps"]]
        for sample in sorted(samples, key=lambda s: s["doc_id"])
    ]


@pytest.fixture(scope="module")
def expected(run: Path, task_dir: Path) -> dict[str, Any]:
    return theirs(run, task_dir, list(TASKS))


@on_meshes((1, 1, 1), (2, 1, 1), soak=[(1, 2, 1), (1, 1, 2)])
def test_scores_are_those_of_the_harness(ranks, run, task_dir, expected, tmp_path, sizes):
    words = [f"{key}={size}" for key, size in mesh(sizes).items()]
    out = ours(ranks, run, task_dir, tmp_path / "out", *words, n=prod(sizes))
    found, there = numbers(results_in(out)), numbers(expected)
    assert set(found) == set(there) and len(there) > 8
    for key, value in there.items():
        assert found[key] == pytest.approx(value, abs=1e-4, rel=1e-4), key
    for task in ("reply", "story"):
        assert replies(samples_in(out, task)) == replies(expected["samples"][task])
    assert len({len(text) for text in replies(samples_in(out, "reply"))}) > 1  # some were stopped
    lines = [json.loads(line) for line in (out / "metrics.eval.jsonl").read_text().splitlines()]
    assert [line["task"] for line in lines] == list(TASKS)
    assert all(line["step"] == 3 and "created_at" in line for line in lines)
    assert lines[0]["acc,none"] == found["choice acc,none"]
    assert lines[0]["num_fewshot"] == 2


def read_ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    """A file of tiktoken's ranks as transformers reads it. What is exported has no tokenizer."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # it would keep a copy under the name of the file
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    made = TikTokenConverter(str(path), extra_special_tokens=special).converted()
    tokens = dict(zip(("bos_token", "eos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, add_bos_token=True, **tokens)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["sp", "tiktoken"])
def test_other_tokenizers_and_tied_weights_score_so(
    ranks, make_run, task_dir, tmp_path, monkeypatch, kind
):
    run = make_run(True, kind, weight_tying=True)
    tokenizer = read_ranks(run / "tokenizer", monkeypatch) if kind == "tiktoken" else None
    there = theirs(run, task_dir, list(TASKS), num_fewshot=0, tokenizer=tokenizer)
    argv = ["distributed.tp_size=2", "num_fewshot=0"]  # whole prompts, most of which fit
    out = ours(ranks, run, task_dir, tmp_path / "out", *argv, n=2)
    for task in ("choice", "rolling"):
        found, same = answers(samples_in(out, task)), answers(there["samples"][task])
        for line, expected in zip(found, same, strict=True):
            assert line == pytest.approx(expected, abs=1e-4, rel=1e-6), task
    for task in ("reply", "story"):
        assert replies(samples_in(out, task)) == replies(there["samples"][task])


@pytest.mark.soak
def test_groups_and_tags_are_those_of_the_harness(ranks, run, task_dir, tmp_path):
    folder = shutil.copytree(task_dir, tmp_path / "tasks")
    choice = (folder / "choice.yaml").read_text()
    for name, tag in (("other", ""), ("third", "\ntag: quick")):
        task = choice.replace("task: choice", f"task: {name}{tag}").replace("Answer: ", f"{name} ")
        (folder / f"{name}.yaml").write_text(task)
    (folder / "both.yaml").write_text(
        "group: both\ntask: [choice, other]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
    )
    there = theirs(run, folder, ["both", "quick"])
    found = results_in(ours(ranks, run, folder, tmp_path / "out", "tasks=[both,quick]"))
    assert set(found["results"]) == set(there["results"]) == {"both", "choice", "other", "third"}
    assert found["groups"]["both"]["acc,none"] == there["groups"]["both"]["acc,none"]
    for key, value in numbers(there).items():
        assert numbers(found)[key] == pytest.approx(value, abs=1e-4), key
    lines = (tmp_path / "out" / "metrics.eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines].count("both") == 1


def test_a_task_may_have_a_slash_in_its_name(ranks, run, task_dir, tmp_path):
    folder = shutil.copytree(task_dir, tmp_path / "tasks")
    choice = (folder / "choice.yaml").read_text()
    (folder / "part.yaml").write_text(choice.replace("task: choice", "task: suite/part"))
    out = ours(ranks, run, folder, tmp_path / "out", "tasks=[choice,suite/part]")
    assert samples_in(out, "suite%2Fpart") == samples_in(out, "choice")
    results = results_in(out)["results"]
    assert results["suite/part"]["acc,none"] == results["choice"]["acc,none"]


def test_without_the_harness_the_message_names_the_package(ranks, run, tmp_path):
    argv = [f"ckpt={run}", "tasks=[arc_easy]", f"dump_dir={tmp_path / 'out'}"]
    for error, _ in ranks.run(2, eval_here, *argv, hidden="lm_eval"):
        assert "lm_eval, which is not installed (pip install lm_eval)" in error


def test_results_go_to_the_run_and_a_task_may_be_a_file(ranks, run, task_dir, tmp_path):
    shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    checkpoint = tmp_path / "run" / "checkpoints" / "0000000003"
    mark_file(checkpoint, WAITING).touch()
    argv = [f"ckpt={tmp_path / 'run'}", f"tasks=[{task_dir / 'rolling.yaml'}]", "limit=1"]
    argv += ["wandb.mode=offline", "wandb.group=mine"]
    [(error, printed)] = ranks.run(1, eval_here, *argv)
    assert not error and "|rolling|" in printed and "bits_per_byte" in printed
    folder = tmp_path / "run" / "evals" / "0000000003"
    assert f"step 3: results and samples are in {folder}" in printed
    assert results_in(folder)["config"]["limit"] == 1 and len(samples_in(folder, "rolling")) == 1
    [line] = (tmp_path / "run" / "metrics.eval.jsonl").read_text().splitlines()
    assert json.loads(line)["task"] == "rolling"
    [sent] = folder.glob("wandb/offline-run-*/run-*.wandb")
    values = {key: value for key, value in json.loads(line).items() if "," in key}
    assert all(f"eval/rolling/{key}".encode() in sent.read_bytes() for key in values)
    assert json.dumps(values["bits_per_byte,none"]).encode() in sent.read_bytes()
    assert marks(checkpoint) == []  # no job waits for it any longer


# ------------------------------------------------------------------------------- while a run trains

TRAINED = {
    "steps": 4,
    "stop_at": "null",
    "deterministic": True,
    "model.dropout": 0.1,
    "checkpoint.dump.every": 2,
    "eval.tasks": "[choice,rolling,reply]",
    "eval.num_fewshot": 1,
}


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
        [(error, _)] = runs.ranks.run(1, eval_here, *argv)
        assert not error
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


WAIT_S = 180.0  # of a job, where others run too


@needs_slurm
@pytest.mark.soak
def test_a_run_launches_its_evaluations_and_logs_those_that_fail(tmp_path, tmp_path_factory):
    text, dump_dir = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    write_sources(text)
    task_dir = write_tasks(tmp_path / "tasks", n=3)
    settings = {"dump_dir": dump_dir, "data.root_dir": text, "steps": 6}
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
            job_7 = env | {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_MEM_PER_CPU": "1"}
            words = settings | {"stop_at": stop_at, "eval.job": job}
            program = start(1, [sys.executable], words, env=job_7)
            output, _ = program.communicate()
            assert program.returncode == 0, output
            return output

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
