"""The program that runs benchmarks: lm-evaluation-harness's own scores, on any topology. What it
refuses is in tests/mistakes.txt."""

import contextlib
import io
import json
import shutil
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

from apps.main.eval import main
from apps.main.transformer import ModelArgs
from lingua.base.errors import UserError
from lingua.checkpoint.retention import mark, marks
from lingua.checkpoint.save import save
from lingua.checkpoint.tensors import tensors_of
from lingua.monitor.evaluation import WAITING
from lingua.parallel.launch import detect_launch, leave, start
from lingua.parallel.mesh import DistributedArgs
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from lingua.tools.exchange import convert
from tests.apps.meshes import mesh, on_meshes
from tests.apps.tasks import TASKS, write_tasks
from tests.apps.test_model import initialised, model_args
from tests.ranks import Ranks
from tests.tokenizer.test_tokenizer import write_byte_level, write_ranks, write_sentencepiece

CPU = torch.device("cpu")
MODEL = model_args(vocab_size=400, dim=36, n_heads=6, n_kv_heads=2, init_base_std=0.3)
SEQ_LEN = 64
SP_BYTES = slice(3, 259)  # the ids of bytes in a sentencepiece model
GIVEN = {"num_fewshot": 2, "limit": 5}


def make_run_here(folder: Path, model: ModelArgs, tokenizer: TokenizerArgs, add_bos: bool) -> None:
    """A run whose checkpoint of step 3 is exported to `folder`/hf."""
    start(CPU, detect_launch(), DistributedArgs())
    data = {"seq_len": SEQ_LEN, "add_bos": add_bos, "add_eos": True}
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
    printed, refused = io.StringIO(), ""
    gone = {name: None for name in sys.modules if hidden and name.split(".")[0] == hidden}
    gone |= {hidden: None} if hidden else {}
    with contextlib.redirect_stdout(printed), mock.patch.dict(sys.modules, gone):
        try:
            main(list(arguments))
        except UserError as error:
            refused = str(error)
        finally:
            if dist.is_initialized():
                leave(patience_s=30)  # as the program does
    return refused, printed.getvalue()


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
    model = HFLM(
        pretrained=str(run / "hf"), device="cpu", dtype="float32", batch_size=3,
        max_length=SEQ_LEN, **of_model,
    )  # fmt: skip
    manager = TaskManager(include_path=str(task_dir), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, **(GIVEN | given))


def ours(ranks: Ranks, run: Path, task_dir: Path, out: Path, *more: str, n: int = 1) -> Path:
    """Evaluate; returns the folder of the results."""
    argv = [f"ckpt={run}", f"task_dir={task_dir}", f"dump_dir={out}", "batch_size=4"]
    argv += [f"{key}={value}" for key, value in GIVEN.items()]
    if not any(word.startswith("tasks=") for word in more):
        argv.append(f"tasks=[{','.join(TASKS)}]")
    for refused, _ in ranks.run(n, eval_here, *argv, *more):
        assert not refused
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


@pytest.mark.parametrize("kind", ["sp", pytest.param("tiktoken", marks=pytest.mark.soak)])
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


def test_without_the_harness_the_message_names_the_package(ranks, run, tmp_path):
    argv = [f"ckpt={run}", "tasks=[arc_easy]", f"dump_dir={tmp_path / 'out'}"]
    for refused, _ in ranks.run(2, eval_here, *argv, hidden="lm_eval"):
        assert "lm_eval, which is not installed (pip install lm_eval)" in refused


def test_results_go_to_the_run_and_a_task_may_be_a_file(ranks, run, task_dir, tmp_path):
    shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    checkpoint = tmp_path / "run" / "checkpoints" / "0000000003"
    mark(checkpoint, WAITING)
    argv = [f"ckpt={tmp_path / 'run'}", f"tasks=[{task_dir / 'rolling.yaml'}]", "limit=1"]
    argv += ["wandb.mode=offline", "wandb.group=mine"]
    [(refused, printed)] = ranks.run(1, eval_here, *argv)
    assert not refused and "|rolling|" in printed and "bits_per_byte" in printed
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
