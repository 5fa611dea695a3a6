"""Mistakes on a command line and in files of a few lines. tests/mistakes.txt has the table: what a
user types, and what the refusal must name. What is compared: `refused` of tests/mistakes.py."""

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

import lingua
from apps.dpo import TrainArgs as DPOArgs
from apps.fastrnn import TrainArgs as FastArgs
from apps.main import eval as evaluation
from apps.main import generate as generation
from apps.main.config import TrainArgs
from apps.main.eval import EvalArgs
from apps.main.generate import GenerateArgs, read_prompts
from apps.main.hugging_face import from_config
from apps.mamba import TrainArgs as MambaArgs
from apps.sft import TrainArgs as SFTArgs
from lingua.app import choose_app
from lingua.base.errors import UserError
from lingua.checkpoint.run_config import load_run
from lingua.config.help import help_text
from lingua.config.load import load, meta_lingua
from lingua.config.saved import load_saved
from lingua.data.args import ChatArgs
from lingua.data.rows import TOKENIZER
from lingua.model.attention import choose_attention
from lingua.parallel.args import DistributedArgs, mesh_sizes
from lingua.parallel.launch import detect_launch
from lingua.run.start import check
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.commands import (
    audit,
    checkpoint,
    compare,
    data_prepare,
    data_show,
    runs,
    tokenizer,
)
from lingua.tools.commands import check as check_command
from lingua.tools.commands.data_prepare import PrepareArgs
from lingua.tools.commands.data_show import ShowArgs
from lingua.tools.exchange import convert
from lingua.tools.inference.harness import to_settings
from lingua.tools.plan.make import make_plan
from lingua.tools.runs.report import page as report
from lingua.tools.slurm import command_line as stool_command
from lingua.tools.slurm.job import JobArgs
from tests.apps.runs import SMALL, write_sources
from tests.apps.tasks import TASKS, write_tasks
from tests.checkpoints import resign
from tests.config.example import Config, Model, Optim
from tests.data.prepared import Prepared, make_args
from tests.data.prepared import check as check_documents
from tests.data.test_chat import BOT, PAIR, USER, prepared
from tests.data.test_chat import make_args as chat_args
from tests.mistakes import refused
from tests.tools.runs.compare.pool import write_run

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "tests/samples/0.1.0"
SAMPLE = SAMPLES / "run/checkpoints/0000000006"
PLANNED = ROOT / "apps/main/configs/small.yaml"


def stool(argv):
    words = {key: value for key, value in SMALL.items() if f"sweep.{key}" not in " ".join(argv)}
    words |= {"data.root_dir": ".", "dump_dir": "new"}
    stool_command.main(["launcher=print", *(f"{k}={v}" for k, v in words.items()), *argv])


def launched(argv):
    """A run with benchmarks in jobs of their own; the argument is the settings of those jobs."""
    words = SMALL | {"data.root_dir": ".", "dump_dir": "new", "eval.launcher": "slurm"}
    words |= {"eval.tasks": "[choice,reply]", "eval.task_dir": "../tasks", "eval.job": argv[0]}
    check([f"{key}={value}" for key, value in words.items()], 2)


def alone(main, *needed):
    """A program whose process group ends with it."""

    def program(argv):
        try:
            main([*needed, *argv])
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return program


def of_file(read, folder, name=None):
    """Reads a file beside the folder in which nothing may be written. Its content is the last
    argument, with Python's escapes; without a `name` the first one is that."""

    def program(argv):
        path = Path("..", folder, name or argv[0])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(argv[-1].encode().decode("unicode_escape").encode("latin-1"))
        read(path)

    return program


def read_text(path):
    Prepared(make_args(path.parent, sources={path.name: 1.0}), path.name)


def prepare_chat(argv, good, pairs):
    """Of three records, the second is the argument."""
    record = good | json.loads(argv[0]) if pairs else argv[0]
    make = partial(chat_args, Path("../chat"), [good, record, good], chat=ChatArgs(pairs=pairs))
    assert sum(prepared(make(on_bad_record="skip"))[0].manifest.skipped.values()) == 1
    prepared(make())


def use_template(argv):
    template = argv[0].encode().decode("unicode_escape")
    prepared(chat_args(Path("../template"), [{"messages": [USER, BOT]}], template))


def prepare_record(argv):
    """Of three records of text, the second is the argument, with Python's escapes."""
    folder, good = Path("../records"), b'{"text": "ok"}'
    record = argv[0].encode().decode("unicode_escape").encode("latin-1")
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_bytes(b"\n".join([good, record, good]))
    skipping = Prepared(make_args(folder, on_bad_record="skip"))
    assert sum(skipping.source.manifest.skipped.values()) == 1
    check_documents(skipping, ["ok", "ok"])
    Prepared(make_args(folder))


def read_prompts_of(path):
    read_prompts(load(GenerateArgs, ["ckpt=a", f"prompts={path}"])[0])


def choose(argv):
    impl, device, dtype, head_dim = argv
    choose_attention(impl, int(head_dim), torch.device(device), getattr(torch, dtype), True)


def load_family(argv):
    name, *changed = argv  # and what makes a good config a wrong one
    config = FAMILY | {"model_type": name.lower()}
    from_config(config, "there/config.json")
    from_config(config | yaml.safe_load(*changed), "there/config.json")


@dataclass
class Rows:
    seq_len: int


@dataclass
class Saved:
    """The part of a run's config.yaml that a program reads; it validates the model alone."""

    data: Rows
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)


def read_saved(path):
    try:
        load_saved(Saved, path)
    except UserError as error:
        assert os.environ["PATH"] not in str(error)
        raise


def loads(config, *needed, **options):
    return lambda argv: load(config, [*needed, *argv], **options)


FAMILY = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": 2}
FAMILY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
SOURCES = ("data.sources={a: 1}", "model.n_heads=4")
PAIRS = ("data.chat={pairs: true}", "data.document_mask=ignore", "checkpoint.init_from=m")
START = ("config=sample/config.yaml", "data.root_dir=sample/text", "dump_dir=new")
BATCH = ("data.sources={a: 1}", "data.global_batch_size=8")
PROGRAMS = {
    "example": loads(Config, foreign=meta_lingua),
    "file": of_file(lambda path: load(Config, [f"config={path}"]), "configs", "file.yaml"),
    "saved": of_file(read_saved, "configs", "saved.yaml"),
    "help": partial(help_text, Config),
    "train": loads(TrainArgs, *SOURCES),
    "run": lambda argv: load_run(choose_app([]), [*SOURCES, *argv]),
    "sft": loads(SFTArgs, *SOURCES),
    "dpo": loads(DPOArgs, *SOURCES, *PAIRS),
    "fastrnn": loads(FastArgs, *SOURCES, "model.n_kv_heads=null"),
    "mamba": loads(MambaArgs, *SOURCES, "model.dim=22"),
    "app": choose_app,
    "generate": loads(GenerateArgs, "ckpt=runs/a"),
    "tokens": loads(TokenizerArgs),
    "tokenizer": tokenizer.main,
    "family": load_family,
    "text": of_file(read_text, "text"),
    "record": prepare_record,
    "conversation": partial(prepare_chat, good={"messages": [USER, BOT]}, pairs=False),
    "pair": partial(prepare_chat, good=PAIR, pairs=True),
    "template": use_template,
    "prompts": of_file(read_prompts_of, "prompts"),
    "python": lambda argv: lingua.train(argv[0], yaml.safe_load(argv[1])),
    "data": lambda argv: data_prepare.main(["data.root_dir=.", *argv]),
    "mesh": lambda argv: mesh_sizes(load(DistributedArgs, argv[1:])[0], int(argv[0])),
    "environment": lambda argv: detect_launch(dict(word.split("=", 1) for word in argv)),
    "attention": choose,
    "harness": lambda argv: to_settings(yaml.safe_load(argv[0]), 5),
    "show": loads(ShowArgs, *BATCH, partial=True),
    "plan": lambda argv: make_plan([f"config={PLANNED}", *argv]),
    "check": check_command.main,
    "checkpoint": checkpoint.main,
    "audit": audit.main,
    "convert": convert.main,
    "runs": runs.main,
    "report": report.main,
    "compare": compare.main,
    "stool": stool,
    "launched": launched,
    "start": lambda argv: check([*START, *argv], 1),
    "generation": alone(generation.main, "max_gen_tokens=8"),
    "benchmark": alone(evaluation.main, "ckpt=run", "task_dir=../tasks", "tasks=[choice]"),
    "rows": lambda argv: data_show.main([*argv, "data.root_dir=sample/text"]),
    # of numbers out of range
    "evaluated": loads(TrainArgs, *SOURCES, "eval.tasks=[a]"),
    "eval": loads(EvalArgs, "ckpt=runs/a", "tasks=[a]"),
    "job": loads(JobArgs),
    "prepare": loads(PrepareArgs, *SOURCES[:1]),
    "row": loads(ShowArgs, *BATCH, "step=1"),
}
LINES = [line for line in (ROOT / "tests/mistakes.txt").read_text().splitlines() if line[:1] > "#"]
# What a line cannot hold.
TOO_LONG = [
    (["steps=" + 5000 * "9"], "999...", "whole number"),
    (["seed=0x" + 5000 * "f"], "fff...", "whole number"),
    (["steps=" + 200 * "x"], "xxx...", "whole number"),
    (["name=a\0b"], r"argument 'name=a\x00b'", "UTF-8"),
    (["name=\udcff"], r"argument 'name=\udcff'", "UTF-8"),
    ([f"config={300 * 'x'}"], "xxx", "File name too long"),
    ([300 * "a." + "b=1"], "a.a...", "unknown key"),
]
RANGES = [line.split()[1:] for line in LINES if line.startswith("range ")]
RANGES.append(["evaluated", "name=a\x1b[31m", "checkpoint.path=a\x7f", "dump_dir=a\nb"])


def mistakes():
    """(program, its arguments, what must be named)."""
    filled = {"{many}": ",".join(map(str, range(1, 40))), "{deep}": 500 * "[" + 500 * "]"}
    filled |= {"{long}": 300 * "a", "{U}": json.dumps(USER), "{A}": json.dumps(BOT)}
    for line in LINES:
        command, *names = re.split(r"  +", line)
        if command.startswith("range "):
            continue
        words = re.sub(r"\{(many|deep|long|U|A)\}", lambda m: filled[m[0]], command)
        program, *argv = shlex.split(words)
        yield pytest.param(program, argv, names, id=command)
    for argv, *names in TOO_LONG:
        yield pytest.param("example", argv, names, id=argv[0][:20])


def write_checkpoint(folder, file, group, **changed):
    """The sample with other values in a group of one of its files."""
    content = yaml.safe_load((shutil.copytree(SAMPLE, folder) / file).read_text())
    content[group] |= changed
    (folder / file).write_text(json.dumps(content))
    resign(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with runs, checkpoints, sources of text, prompts and a config; beside it, tasks."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, lr, seed in (("a-0", 0.1, 0), ("a-1", 0.1, 1), ("b-0", 0.2, 0)):
        write_run(folder / name, [f"optim.lr={lr}", f"seed={seed}", "steps=20"], [10, 20], [3, 2])
    write_sources(folder)
    (folder / "empty").mkdir()
    (folder / "bad.jsonl").write_text('{"text": "a line"}\n{"text": \n')
    (folder / "none.jsonl").touch()
    os.mkfifo(folder / "empty/pipe")
    (folder / "c.yaml").write_text("data: {root_dir: ., sources: {one: 1}}\n")
    (folder / "own.yaml").write_text("{memory_gib: 10, memory_gb_per_s: 1000, fp32_tflops: 1}")
    (folder / "token.jsonl").write_text('{"prompt": "a", "stop_tokens": [1, 258]}')
    (folder / "room.jsonl").write_text('{"prompt": "a", "max_gen_tokens": 64}')
    (folder / "prompts.txt").write_text("short\nsomewhat more\n")
    os.mkfifo(folder / "pipe.txt")
    shutil.copytree(SAMPLES, folder / "sample")
    shutil.copytree(SAMPLE, folder / "run/checkpoints" / SAMPLE.name)
    (shutil.copytree(SAMPLE, folder / "torn") / "train_state.json").unlink()
    shutil.copytree(
        SAMPLES / "run", folder / "lost", ignore=shutil.ignore_patterns("manifest.json")
    )
    write_checkpoint(folder / "fork", "config.yaml", "model", head_layers=1)
    write_checkpoint(folder / "few", "config.yaml", "model", vocab_size=100)
    write_checkpoint(folder / "retrained", "train_state.json", "data", **{TOKENIZER: "another"})
    with (shutil.copytree(SAMPLE, folder / "damaged") / "__0_0.distcp").open("r+b") as file:
        file.seek(-50, os.SEEK_END)
        file.write(b"0")
    tasks = write_tasks(folder.parent / "tasks")
    odd = (tasks / "reply.yaml").read_text().replace('"\\n"]', '"\\n"], penalty: 2')
    (tasks / "odd.yaml").write_text(odd.replace("task: reply", "task: odd"))
    absent = (
        "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: none.json}}\n"
    )
    (folder.parent / "broken").mkdir()
    (folder.parent / "broken/choice.yaml").write_text(TASKS["choice"] + absent)
    return folder


@pytest.mark.parametrize(("program", "argv", "names"), list(mistakes()))
def test_a_mistake_is_refused_by_what_it_is_about(place, monkeypatch, program, argv, names):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    message = refused(lambda: PROGRAMS[program](argv), *names)
    assert "Traceback" not in message and len(message) < 2500
    assert sorted(place.rglob("*")) == before  # nothing is written


def test_a_config_that_is_named_without_its_key_is_one_mistake():
    """What the file has is not missed besides."""
    message = refused(lambda: load_run(choose_app([]), [str(PLANNED)]), f"config={PLANNED}")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("program", "argument"), [(program, word) for program, *words in RANGES for word in words]
)
def test_a_number_out_of_range_is_refused_by_its_key(program, argument):
    message = refused(lambda: PROGRAMS[program]([argument]))
    assert message.startswith(argument.partition("=")[0]) and ": must " in message
    assert len(message.splitlines()) == 1
    PROGRAMS[program]([])  # what is refused is that value and no other
