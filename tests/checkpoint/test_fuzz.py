"""Hostile checkpoints and models of anybody. Manifests fit the changed files, as if somebody had
forged them."""

import json
import pickle
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import yaml

from lingua.app import find_app
from lingua.checkpoint.origin import open_source
from lingua.checkpoint.resume import find_start
from lingua.checkpoint.retention import CheckpointArgs
from lingua.parallel.launch import one_process
from lingua.tools.commands.checkpoint import main
from lingua.tools.exchange import convert
from lingua.tools.inference.trained import open_trained
from tests.checkpoint.test_foreign import SAMPLE, STEP
from tests.checkpoints import resign, write_manifest
from tests.mutation import EXECUTED, VALUES, Executes, change_file, fuzz, is_refused

pytestmark = pytest.mark.soak

SECONDS = 6.0  # of each kind of file


def fuzz_files(original, names, folder, programs):
    """Change one of the files `names` of a copy at `folder` at a time."""
    none_left = f"{folder.parent}: has checkpoints, but none that can be used"
    refusal_names = [str(folder), none_left, "in the checkpoint, ", "data.tokenizer."]
    for program in programs:
        assert not is_refused(program, refusal_names, "unchanged")

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

    fuzz(make, SECONDS * len(names))


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
        find_start(root, CheckpointArgs(**settings), ["seed", "data.sources", "model.dim"])


def test_any_change_of_a_checkpoint_is_accepted_or_refused_by_name(tmp_path):
    original, config = SAMPLE / "run/checkpoints" / STEP, f"config={SAMPLE / 'config.yaml'}"
    folder = shutil.copytree(original, tmp_path / "root" / STEP)
    programs = [
        lambda: main(["show", str(folder)]),
        lambda: main(["diff", str(folder), config]),
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
    values = [*VALUES, Executes()]
    contents = [*values, *({"model": v} for v in values), *({"model": {"a": v}} for v in values)]
    for key in ("step", "config"):
        contents += [{"model": {"a": torch.ones(2)}, key: value} for value in values]
    for content in contents:
        torch.save(content, file)
        for program in programs:
            is_refused(program, [str(file)], repr(content)[:80])
    assert not EXECUTED.exists()


def test_the_program_ends_with_one_line_and_code_2_and_quietly_where_its_reader_leaves(tmp_path):
    folder = shutil.copytree(SAMPLE / "run/checkpoints" / STEP, tmp_path / STEP)
    command = f"{sys.executable} -m lingua checkpoint show"
    script = f"{command} {folder} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")
    (folder / ".metadata").write_bytes(pickle.dumps("\x1b[31m"))
    resign(folder)
    done = subprocess.run([*command.split(), str(folder)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {folder / '.metadata'} cannot be read")
