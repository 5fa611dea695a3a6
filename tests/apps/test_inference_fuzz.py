"""Hostile command lines, files of prompts and configs of generation and evaluation."""

import io
import json
import sys
from dataclasses import fields

import pytest

from apps.main import eval as evaluation
from apps.main import generate as generation
from lingua.tools.inference.sampling import SamplingArgs
from tests.apps.tasks import write_tasks
from tests.apps.test_generate import MODEL
from tests.mutation import VALUES, fuzz, hostile_argument
from tests.tools.exchange.converted import save_here

pytestmark = pytest.mark.soak

SECONDS = 20
JSON = [json.dumps(value) for value in VALUES] + ["NaN", "1e999", "[-1]", "[1e3]", "[" * 3000]
FORM = ["argument", "must have the form key=value", "unknown key"]


@pytest.fixture(scope="module")
def ckpt(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    ranks.run(1, save_here, folder / "checkpoints", MODEL, {})
    return folder


def test_hostile_command_lines_of_generation_are_refused_by_key(ckpt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where `out` is written
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))  # asked without a prompt
    keys = [f.name for f in fields(generation.GenerateArgs) if f.name not in ("app", "prompts")]
    keys += ["distributed.tp_size", "distributed.dp_shard", "distributed.model_dtype", "config"]

    def make(draw):
        argv = [f"ckpt={ckpt}", "prompt=a", "device=cpu", "max_gen_tokens=2"]
        argv += [hostile_argument(draw, keys) for _ in range(draw.randint(1, 3))]
        return lambda: generation.main(argv), [*(key.split(".")[-1] for key in keys), *FORM]

    fuzz(make, SECONDS)


def test_hostile_files_of_prompts_are_refused_by_line(ckpt, tmp_path):
    keys = [f.name for f in fields(SamplingArgs)] + ["prompt", "id", "seed", "x", "", "\x1b[31m"]
    path = tmp_path / "prompts.jsonl"

    def make(draw):
        line = f'{{"prompt": "a", {json.dumps(draw.choice(keys))}: {draw.choice(JSON)}}}'.encode()
        if draw.random() < 0.3:
            at = draw.randrange(len(line))
            line = line[:at] + bytes([draw.randrange(256)]) + line[at + draw.randint(0, 1) :]
        good = [b'{"prompt": "good"}'] * draw.randint(0, 2)
        path.write_bytes(b"\n".join([*good, line, *good]))
        argv = [f"ckpt={ckpt}", f"prompts={path}", "device=cpu", "max_gen_tokens=2"]
        return lambda: generation.main(argv), [f"{path}:"]

    fuzz(make, SECONDS)


def test_hostile_configs_of_an_evaluation_are_refused_by_key(ckpt, tmp_path):
    task_dir, config = write_tasks(tmp_path / "tasks", n=2), tmp_path / "c.yaml"
    skipped = ("app", "tasks", "wandb", "dump_dir")
    keys = [f.name for f in fields(evaluation.EvalArgs) if f.name not in skipped]
    plain = {"ckpt": str(ckpt), "tasks": ["choice", "reply"], "task_dir": str(task_dir)}
    plain |= {"device": "cpu", "limit": 1, "dump_dir": str(tmp_path / "out"), "max_gen_tokens": 2}
    names = [str(config), *keys, *FORM, "the evaluation failed: "]

    def make(draw):
        argv = [hostile_argument(draw, keys) for _ in range(draw.randint(1, 3))]
        in_file = [word for word in argv if "\udcff" not in word and draw.random() < 0.5]
        lines = [f"{key}: {json.dumps(value)}\n" for key, value in plain.items()]
        lines += [word.replace("=", ": ", 1) + "\n" for word in in_file]
        config.write_text("".join(lines), encoding="utf-8")
        argv = [f"config={config}", *(word for word in argv if word not in in_file)]
        return lambda: evaluation.main(argv), names

    fuzz(make, SECONDS)
