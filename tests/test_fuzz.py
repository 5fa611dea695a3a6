"""Hostile inputs of every kind, made by tests/mutation.py: each is accepted, or refused by name.
Manifests fit the changed files of a checkpoint, as if somebody had forged them."""

import gzip
import io
import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import lingua
from apps.main import eval as evaluation
from apps.main import generate as generation
from apps.main.config import TrainArgs
from apps.main.eval import EvalArgs
from apps.main.generate import GenerateArgs
from lingua.app import find_app
from lingua.base.errors import UserError
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import published
from lingua.checkpoint.origin import open_source
from lingua.config.load import load, meta_lingua
from lingua.config.schema import schema
from lingua.data.shards import Source
from lingua.data.sources import held_out_windows
from lingua.model.sampling import SamplingArgs
from lingua.parallel.alone import one_process
from lingua.run.start import check, find_start
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.commands import checkpoint
from lingua.tools.commands.data_prepare import PrepareArgs
from lingua.tools.commands.data_show import ShowArgs
from lingua.tools.exchange import convert
from lingua.tools.exchange.convert import ConvertArgs
from lingua.tools.exchange.trained import open_trained
from lingua.tools.slurm import command_line as stool_command
from lingua.tools.slurm.job import JobArgs
from tests import mutation
from tests.apps.tasks import write_tasks
from tests.checkpoint.test_foreign import SAMPLE, STEP
from tests.checkpoints import resign, write_manifest
from tests.data.prepared import TEXTS, Prepared, expected_tokens, make_args, train_tokens
from tests.mutation import change_bytes, change_file, change_json, fuzz, hostile_argument
from tests.tokenizer import test_tokenizer as tokenizers
from tests.tools.exchange.test_convert import TALK, write_base

pytestmark = pytest.mark.soak

SMALL = Path("apps/main/configs/small.yaml")


def stool(argv: list[str]) -> None:
    stool_command.main(["launcher=print", *argv])


PROGRAMS = [
    (TrainArgs, lambda argv: load(TrainArgs, argv, meta_lingua)),
    (TrainArgs, lambda argv: check(argv, 2)),
    (JobArgs, stool),
    *((cls, lambda argv, cls=cls: load(cls, argv)) for cls in (GenerateArgs, EvalArgs)),
    *((cls, lambda argv, cls=cls: load(cls, argv)) for cls in (ConvertArgs, ShowArgs)),
    (PrepareArgs, lambda argv: load(PrepareArgs, argv, meta_lingua, partial=True)),
]


def special_files(folder: Path) -> list[Path]:
    """What a `config=` or a `base:` may name by mistake."""
    texts = {"self": "base: self\n", "of_fifo": "base: fifo\n", "empty": ""}
    texts["zeros"] = "\0" * (2 << 20)
    texts["many"] = "".join(f"k{i}: 1\n" for i in range(20_000))
    for name, text in texts.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "unreadable").write_bytes(bytes(range(256)))
    names = [*texts, "fifo", "folder", "zero", "loop", "unreadable", "x" * 300, "\x1b[31m"]
    return [folder / name for name in names]


def test_every_config_and_command_line_is_accepted_or_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    specials, changed = special_files(tmp_path), tmp_path / "changed.yaml"
    names = ["config=", "argument", "unknown key", "sweep.", str(tmp_path)]
    names += {key for cls, _ in PROGRAMS for key in schema(cls)}

    def make(draw):
        cls, program = draw.choice(PROGRAMS)
        changed.write_bytes(change_bytes(SMALL.read_bytes(), draw))
        keys = list(schema(cls))
        if cls is JobArgs:
            keys += [*schema(TrainArgs), *(f"sweep.{key}" for key in schema(TrainArgs))]
        argv = [f"config={draw.choice([SMALL, SMALL, changed, draw.choice(specials)])}"]
        argv = argv * draw.randint(0, 1)
        argv += [hostile_argument(draw, keys) for _ in range(draw.randint(0, 3))]
        return lambda: program(argv), names

    fuzz(make, 15)


def test_any_change_to_a_file_of_text_gives_tokens_or_a_named_error(tmp_path):
    lines = b"".join(json.dumps({"n": 1, "text": text}).encode() + b"\n" for text in TEXTS[:200])
    table = pa.table({"n": list(range(200)), "text": TEXTS[:200]})
    pq.write_table(table, tmp_path / "p", row_group_size=50)
    forms = {
        "jsonl": lines,
        "jsonl.gz": gzip.compress(lines),
        "jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True),
        "parquet": (tmp_path / "p").read_bytes(),
        "json": json.dumps([{"text": text} for text in TEXTS[:200]], indent=1).encode(),
        "csv": table.to_pandas().to_csv().encode(),
        "txt": "".join(TEXTS).encode(),
        "txt.gz": gzip.compress("".join(TEXTS).encode()),
    }

    def make(draw):
        form = draw.choice(list(forms))
        for path in tmp_path.glob("a.*"):
            path.unlink()
        (tmp_path / f"a.{form}").write_bytes(change_bytes(forms[form], draw))
        args = make_args(tmp_path, on_bad_record=draw.choice(["stop", "skip"]))
        unit_bytes = draw.choice([1000, 10**9])
        read = lambda: train_tokens(Prepared(args, unit_bytes=unit_bytes).source)  # noqa: E731
        return read, [str(tmp_path), "data."]

    fuzz(make, 8)


def test_any_change_to_a_shard_is_named_by_a_run_and_built_again_by_the_next(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    args, tokens = make_args(tmp_path), expected_tokens(TEXTS)
    whole = Prepared(args, unit_bytes=20_000).source.folder.parent
    backup = shutil.copytree(whole, tmp_path / "backup")

    def make(draw):
        shutil.rmtree(whole)
        shutil.copytree(backup, whole)
        source = Source.open(next(whole.glob("a-*[!d]")))
        path = draw.choice(sorted(path for path in whole.glob("**/*") if path.is_file()))
        change_file(path, draw)

        def read_and_build_again():
            errors = []
            held_out = lambda source: held_out_windows(source, 64, (10**6, "tokens"))  # noqa: E731
            for read in (train_tokens, held_out):
                try:
                    read(source)  # as a run that has them open
                except UserError as error:
                    errors.append(error)
            found = train_tokens(Prepared(args, unit_bytes=20_000).source)
            assert found == tokens or path.name == "manifest.json"
            if errors:
                raise errors[0]

        return read_and_build_again, [str(tmp_path)]

    fuzz(make, 8)


def test_any_change_to_a_tokenizer_gives_ids_of_its_vocabulary_or_a_named_error(tmp_path):
    files = [
        ("sp", tokenizers.write_sentencepiece(tmp_path / "bpe.model", model_type="bpe")),
        ("tiktoken", tokenizers.write_ranks(tmp_path / "ranks")),
        ("hf", tokenizers.write_byte_level(tmp_path / "byte_level.json")),
        ("hf", tokenizers.write_metaspace(tmp_path / "metaspace.json")),
    ]
    config = json.dumps({"bos_token": "<s>", "eos_token": {"content": "<s>"}, "x": [1]}).encode()
    pattern = rb"\w+|\s+|[^\w\s]+(?!\S)|."

    def make(draw):
        name, source = draw.choice(files)
        data, odd, split = Path(source).read_bytes(), b"{}", b"."
        if draw.random() < 0.2:  # the file of names or the pattern is the odd one
            odd = draw.choice([change_json, change_bytes])(config, draw)
            split = change_bytes(pattern, draw)
        else:
            is_json = name == "hf" and draw.random() < 0.8
            data = change_json(data, draw) if is_json else change_bytes(data, draw)
        for file, content in (("x", data), ("tokenizer_config.json", odd), ("x.pattern", split)):
            (tmp_path / file).write_bytes(content)

        def use():
            tokenizer = build_tokenizer(TokenizerArgs(name, str(tmp_path / "x")))
            for ids in tokenizer.encode_batch(["", TEXTS[0], "a\0 \u2028😀" * 500, "<s>"]):
                assert not len(ids) or ids.max() < tokenizer.vocab_size
                tokenizer.decode(ids)
            tokenizer.encode("x", bos=True, eos=True)

        return use, ["data."]

    fuzz(make, 8)


JSON = [*map(json.dumps, mutation.VALUES), "NaN", "1e999", "[-1]", "[1e3]", "[" * 3000]
FORM = ["argument", "must have the form key=value", "unknown key"]


RUN = str(SAMPLE / "run")


@pytest.mark.parametrize(
    ("main", "cls", "skipped"),
    [
        (generation.main, GenerateArgs, ("app", "prompts")),
        (evaluation.main, EvalArgs, ("app", "tasks", "wandb", "dump_dir")),
    ],
    ids=["generate", "eval"],
)
def test_hostile_settings_of_a_program_are_refused_by_key(
    main, cls, skipped, tmp_path, monkeypatch
):
    """On a command line and in a file."""
    monkeypatch.chdir(tmp_path)  # where `out` is written
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))  # asked without a prompt
    config = tmp_path / "c.yaml"
    plain = {"ckpt": RUN, "device": "cpu", "max_gen_tokens": 2}
    if cls is EvalArgs:
        task_dir = write_tasks(tmp_path / "tasks", n=2)
        plain |= {"tasks": ["choice", "reply"], "task_dir": str(task_dir), "limit": 1}
        plain["dump_dir"] = str(tmp_path / "out")
    else:
        plain["prompt"] = "a"
    keys = [f.name for f in fields(cls) if f.name not in skipped]
    keys += ["distributed.tp_size", "distributed.dp_shard", "distributed.model_dtype"]
    names = [str(config), *(key.split(".")[-1] for key in keys), *FORM, "the evaluation failed: "]

    def make(draw):
        argv = [hostile_argument(draw, keys) for _ in range(draw.randint(1, 3))]
        in_file = [word for word in argv if "\udcff" not in word and draw.random() < 0.5]
        lines = [f"{key}: {json.dumps(value)}\n" for key, value in plain.items()]
        lines += [word.replace("=", ": ", 1) + "\n" for word in in_file]
        config.write_text("".join(lines), encoding="utf-8")
        argv = [f"config={config}", *(word for word in argv if word not in in_file)]
        return lambda: main(argv), names

    fuzz(make, 10)


def test_hostile_files_of_prompts_are_refused_by_line(tmp_path):
    keys = [f.name for f in fields(SamplingArgs)] + ["prompt", "id", "seed", "x", "", "\x1b[31m"]
    path = tmp_path / "prompts.jsonl"

    def make(draw):
        line = f'{{"prompt": "a", {json.dumps(draw.choice(keys))}: {draw.choice(JSON)}}}'.encode()
        if draw.random() < 0.3:
            at = draw.randrange(len(line))
            line = line[:at] + bytes([draw.randrange(256)]) + line[at + draw.randint(0, 1) :]
        good = [b'{"prompt": "good"}'] * draw.randint(0, 2)
        path.write_bytes(b"\n".join([*good, line, *good]))
        argv = [f"ckpt={RUN}", f"prompts={path}", "device=cpu", "max_gen_tokens=2"]
        return lambda: generation.main(argv), [f"{path}:"]

    fuzz(make, 10)


def fuzz_files(original, names, folder, programs, *words):
    """Change one of the files `names` of a copy at `folder` at a time."""
    none_left = f"{folder.parent}: has checkpoints, but none that can be used"
    refusal_names = [str(folder), none_left, "in the checkpoint, ", "data.tokenizer.", *words]
    for program in programs:
        assert not mutation.is_refused(program, refusal_names, "unchanged")

    def make(draw):
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
        path = folder / draw.choice(names)
        change_file(path, draw)
        if path.name == "manifest.json":
            with suppress(ValueError, TypeError, AttributeError):  # what is no object any more
                write_manifest(folder, json.loads(path.read_bytes()))
        elif (folder / "manifest.json").exists():
            resign(folder)
        return draw.choice(programs), refusal_names

    fuzz(make, 4 * len(names))


def export_to(source, out):
    shutil.rmtree(out, ignore_errors=True)
    convert.main([f"source={source}", f"out={out}", "tokenizer.name=bytes"])


def convert_to(source, out):
    """`out` is the folder of what is written."""
    shutil.rmtree(out, ignore_errors=True)
    to = "checkpoint" if source.suffix or not (source / "manifest.json").exists() else "file"
    convert.main([f"source={source}", f"out={out / 'made'}", f"to={to}"])


def start_in(root, **settings):
    with one_process():
        found = [c.to_json() for c in published(root, print)]
        find_start(found, CheckpointArgs(**settings), ["seed", "data.sources", "model.dim"])


def test_any_change_of_a_checkpoint_is_accepted_or_refused_by_name(tmp_path):
    original, config = SAMPLE / "run/checkpoints" / STEP, f"config={SAMPLE / 'config.yaml'}"
    folder = shutil.copytree(original, tmp_path / "root" / STEP)
    programs = [
        lambda: checkpoint.main(["show", str(folder)]),
        lambda: checkpoint.main(["diff", str(folder), config]),
        lambda: convert_to(folder, tmp_path / "file"),
        lambda: export_to(folder, tmp_path / "hf"),
        lambda: open_trained("ckpt", str(folder), None),
        lambda: start_in(folder.parent),
        lambda: start_in(tmp_path / "none", init_from=str(folder), verify="size"),
    ]
    names = [".metadata", "train_state.json", "manifest.json", "config.yaml", "__0_0.distcp"]
    fuzz_files(original, names, folder, programs)


def test_any_change_of_a_folder_of_transformers_is_accepted_or_refused_by_name(tmp_path):
    sample = SAMPLE / "run/checkpoints" / STEP
    export_to(sample, tmp_path / "original")
    folder = shutil.copytree(tmp_path / "original", tmp_path / "hf")
    app, model = find_app(None, ""), open_trained("ckpt", str(sample), None).args.model
    programs = [
        lambda: export_to(folder, tmp_path / "out"),
        lambda: open_source("init_from", folder, app, "size").check_model(model, []),
    ]
    names = ["config.json", "model.safetensors"]
    fuzz_files(tmp_path / "original", names, folder, programs)


def test_any_change_of_a_folder_with_a_chat_template_is_used_or_refused_by_name(tmp_path):
    write_base(tmp_path / "original")
    folder = shutil.copytree(tmp_path / "original", tmp_path / "hf")

    def load_and_use():
        lm = lingua.load(folder, device="cpu")
        lm.generate("this \u2028😀", temperature=0, max_gen_tokens=2)
        lm.chat(TALK[:1], temperature=0, max_gen_tokens=2)
        for token in range(lm.tokenizer.vocab_size):
            lm.tokenizer.decode([token, 5, token])

    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    names += ["generation_config.json"]
    words = ["messages: ", "chat: ", "the text is empty", "max_gen_tokens"]
    fuzz_files(tmp_path / "original", names, folder, [load_and_use], *words)


def test_any_change_of_a_checkpoint_of_meta_lingua_is_accepted_or_refused_by_name(tmp_path):
    sample, original = SAMPLE / "run/checkpoints" / STEP, tmp_path / "original"
    original.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        shutil.copy(sample / name, original)
    config = yaml.safe_load((sample / "config.yaml").read_text())
    (original / "params.json").write_text(json.dumps(config))
    (original / "train_state_00000.json").write_text(json.dumps({"step": 6, "acc_step": 0}))
    folder, none = shutil.copytree(original, tmp_path / "lingua"), tmp_path / "none"
    go_on = {"init_from": str(folder), "continue_training_from_init": True}
    programs = [lambda: convert_to(folder, tmp_path / "file"), lambda: start_in(none, **go_on)]
    names = [".metadata", "params.json", "train_state_00000.json"]
    fuzz_files(original, names, folder, programs)


def test_any_change_of_a_file_of_torch_save_is_accepted_or_refused_by_name(tmp_path):
    original, none = tmp_path / "original", tmp_path / "none"
    original.mkdir()
    sample = SAMPLE / "run/checkpoints" / STEP
    convert.main([f"source={sample}", f"out={original / 'model.pth'}"])
    folder = shutil.copytree(original, tmp_path / "copy")
    file = folder / "model.pth"
    programs = [lambda: convert_to(file, none), lambda: start_in(none, init_from=str(file))]
    fuzz_files(original, ["model.pth"], folder, programs)
    values = [*mutation.VALUES, mutation.Executes()]
    contents = [*values, *({"model": v} for v in values), *({"model": {"a": v}} for v in values)]
    for key in ("step", "config"):
        contents += [{"model": {"a": torch.ones(2)}, key: value} for value in values]
    for content in contents:
        torch.save(content, file)
        for program in programs:
            mutation.is_refused(program, [str(file)], repr(content)[:80])
    assert not mutation.EXECUTED.exists()
