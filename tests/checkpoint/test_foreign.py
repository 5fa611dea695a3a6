"""Checkpoints of anybody: nothing of them executes, and what is wrong in them is named.

The checkpoint that each test forges is the sample of an earlier version. One process reads it.
"""

import io
import json
import os
import pickle
import resource
import shutil
import time
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

import lingua
from apps.main.config import ModelArgs
from apps.main.hugging_face import llama
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.dcp import _ALLOWED, DCPFolder
from lingua.checkpoint.folder import published, read_checkpoint
from lingua.checkpoint.origin import open_source
from lingua.checkpoint.saved import newest, read_saved
from lingua.parallel.alone import one_process
from lingua.run.start import find_start
from lingua.tools.commands.checkpoint import main
from lingua.tools.exchange import convert
from lingua.tools.exchange.hugging_face import open_folder
from lingua.tools.exchange.trained import open_trained
from tests.checkpoints import refusal, resign, write_manifest

SAMPLE = Path(__file__).parents[1] / "samples/0.1.0"
STEP = "0000000006"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(SAMPLE / "run/checkpoints" / STEP, tmp_path / "run/checkpoints" / STEP)


def forge(folder: Path, content: bytes, name: str = ".metadata") -> None:
    (folder / name).write_bytes(content)
    resign(folder)


def convert_to(source: Path, out: Path) -> None:
    convert.main([f"source={source}", f"out={out}"])


def named(module: str, name: str) -> bytes:
    """Opcodes that put the thing of this import path on the stack."""
    words = (b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"".join(words) + pickle.STACK_GLOBAL


def opcodes_on(module: str, name: str) -> dict[str, bytes]:
    """A pickle for each way in which one can change, or call, what a name stands for."""
    thing, end = named(module, name), pickle.STOP
    change = pickle.dumps({"parent": "/tmp"}, 4)[11:-1]  # without its frame
    inst = b"(" + pickle.INST + f"{module}\n{name}\n".encode()
    return {
        "BUILD attributes": thing + change + pickle.BUILD + end,
        "BUILD slots": thing + pickle.NONE + change + pickle.TUPLE2 + pickle.BUILD + end,
        "BUILD of a result": thing + b")R" + pickle.NONE + change + pickle.TUPLE2 + b"b" + end,
        "SETITEM": thing + b"K\x01K\x02" + pickle.SETITEM + end,
        "APPEND": thing + b"K\x01" + pickle.APPEND + end,
        "REDUCE": thing + b"\x8c\x04/tmp" + pickle.TUPLE1 + pickle.REDUCE + end,
        "NEWOBJ": thing + b"\x8c\x04/tmp" + pickle.TUPLE1 + pickle.NEWOBJ + end,
        "NEWOBJ_EX": thing + b")}" + pickle.NEWOBJ_EX + end,
        "INST": inst + end,
        "GLOBAL": pickle.GLOBAL + f"{module}\n{name}\n".encode() + end,
        "OBJ": b"(" + thing + pickle.OBJ + end,
    }


def test_no_opcode_changes_or_calls_what_an_allowed_name_stands_for(folder):
    """As in the attack: `parent` of every path, set by the .metadata of a checkpoint."""
    cases = [(module, name) for module, names in _ALLOWED.items() for name in names]
    assert ("pathlib", "PosixPath") in cases and len(cases) > 20
    for module, name in cases:
        real = getattr(import_module(module), name)
        before = dict(getattr(real, "__dict__", {}))
        for case, opcodes in opcodes_on(module, name).items():
            (folder / ".metadata").write_bytes(pickle.PROTO + b"\x04" + opcodes)
            with pytest.raises((ValueError, TypeError, AttributeError, pickle.PickleError)):
                print(name, case, DCPFolder(folder))
            assert dict(getattr(real, "__dict__", {})) == before, (name, case)
    assert Path("/a/b").parent == Path("/a")
    # the bait does bite: a reader that trusts changes a class like these for the whole process
    victim = type("Victim", (), {"__module__": __name__})
    globals()["Victim"] = victim
    pickle.loads(pickle.PROTO + b"\x04" + opcodes_on(__name__, "Victim")["BUILD slots"])
    assert victim.parent == "/tmp"


def test_what_a_small_file_would_take_in_memory_is_refused(folder):
    pickled, n = (folder / ".metadata").read_bytes(), (1 << 27).to_bytes(4, "little")
    for bomb in (
        b"N" + pickle.LONG_BINPUT + n + pickled[2:],  # a place in a list of that length
        b"\x8e" + (1 << 40).to_bytes(8, "little"),
    ):
        forge(folder, pickle.PROTO + b"\x04" + bomb)
        assert "cannot be read" in refusal(lambda: main(["show", str(folder)]))
    forge(folder, pickled)
    config = (folder / "config.yaml").read_bytes()
    forge(folder, config.replace(b"\n  dim: 16\n", b"\n  dim: 10000000\n"), "config.yaml")
    assert "does not fit this model" in refusal(lambda: lingua.load(folder, device="cpu"))
    forge(folder, config, "config.yaml")
    metadata = pickle.loads(pickled)
    name = "model.tok_embeddings.weight"
    huge, entry = torch.Size((1 << 20, 1 << 20)), metadata.state_dict_metadata[name]
    entry.size = entry.chunks[0].sizes = huge
    del entry.chunks[1:]
    forge(folder, pickle.dumps(metadata))
    told = refusal(lambda: convert_to(folder, folder / "file.pth"))
    assert f"{folder / '.metadata'} cannot be read: its tensors have" in told
    # Chunks whose sides divide a tensor into many cells: each a slice of what those before leave;
    # and others that overlap.
    begin, sides, slices = time.process_time(), [32] * 6, []
    for i in range(187):
        sizes = [1 if dim == i % 6 and i < 186 else side for dim, side in enumerate(sides)]
        slices.append(([32 - side for side in sides], sizes))
        sides[i % 6] -= 1
    overlapping = [([i] * 2, [1500 - i] * 2) for i in [*range(1500), *[0] * 20_000]]
    for size, chunks in (([32] * 6, slices), ([1500] * 2, overlapping)):
        entry.size = torch.Size(size)
        entry.chunks = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in chunks]
        forge(folder, pickle.dumps(metadata))
        assert f"each element of {name} once" in refusal(lambda: main(["show", str(folder)]))
    assert time.process_time() - begin < 10

    file = folder / "file.pth"
    torch.save({"model": {"a": torch.zeros(1).expand(1 << 40)}}, file)
    assert "and the files only" in refusal(lambda: convert_to(file, folder / "x"))
    compressed = io.BytesIO()
    with zipfile.ZipFile(file) as stored, zipfile.ZipFile(compressed, "w", 8) as archive:
        for entry in stored.infolist():
            content = stored.read(entry)
            content = bytes(1 << 20) if entry.filename.endswith("/byteorder") else content
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    file.write_bytes(compressed.getvalue())
    assert "is compressed" in refusal(lambda: convert_to(file, folder / "x"))
    (folder / "__0_0.distcp").write_bytes(compressed.getvalue())
    for info in (metadata := pickle.loads(pickled)).storage_data.values():
        info.offset, info.length = 0, len(compressed.getvalue())
    forge(folder, pickle.dumps(metadata))
    assert "is compressed" in refusal(lambda: convert_to(folder, folder / "x"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # KiB


FORGED: dict[str, list[bytes]] = {
    "train_state.json": [
        *(b"{", b"[]", b"5", b"[" * 100_000, b"\xff", b'{"x": "\\ud800"}', b'{"topology": "x"}'),
        b'{"x": ' * 900 + b"1" + b"}" * 900,
        *(b'{"data": []}', b'{"held_out": "low"}', b'{"param_groups": [{}]}'),
        *(b'{"progress": %s}' % progress for progress in (b"3", b'{"steps": 1}')),
        *(b'{"progress": {"step": %s}}' % s for s in (b'"x"', b"-1", b"1e300", b"9" * 5000)),
    ],
    ".metadata": [
        *map(pickle.dumps, (None, [], "Metadata")),
        *map(pickle.dumps, (Metadata(None, None, None), Metadata({}, None, {1: 2}))),
    ],
    "__0_0.distcp": [b""],
}
MIXTURES: list[dict[str, Any]] = [
    {"sources": "one"},
    {"sources": {"one": "much"}},
    {"sources": {"one": float("inf")}},
    {"stages": {"a": 1}},
    {"stages": [{"from": 3}]},
    {"global_batch_size": "seven"},
]


def test_wrong_content_behind_a_manifest_that_fits_is_refused_by_name(folder):
    config = f"config={SAMPLE / 'config.yaml'}"
    for name, contents in FORGED.items():
        whole = (folder / name).read_bytes()
        named = name if name == "train_state.json" else ".metadata"  # which refers to the tensors
        for content in contents:
            forge(folder, content, name)
            told = refusal(lambda: main(["show", str(folder)]))
            assert str(folder / named) in told, content[:99]
            if name == "train_state.json":
                assert str(folder / name) in refusal(lambda: main(["diff", str(folder), config]))
        forge(folder, whole, name)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    for changed in MIXTURES:
        text = yaml.safe_dump(saved | {"data": saved["data"] | changed})
        forge(folder, text.encode(), "config.yaml")
        told = refusal(lambda: main(["diff", str(folder), config]))
        assert f"data.{next(iter(changed))}" in told and str(folder / "config.yaml") in told


def test_a_manifest_that_names_what_is_no_file_of_its_folder_is_no_checkpoint(folder):
    manifest = json.loads((folder / "manifest.json").read_text())

    def reason() -> str:
        checkpoint, why = read_checkpoint(folder)
        assert checkpoint is None
        return why

    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "inside").mkdir()
    entry = {"size": 0, "xxh3_64": ""}
    for name, wrong, why in (
        *((name, entry, f"{name} is not a file") for name in ("pipe", "device", "inside")),
        *((name, entry, f"wrong entry for {name}") for name in ("../../x", "/etc/passwd")),
        ("config.yaml", {"xxh3_64": 1}, "wrong entry for config.yaml"),
        ("config.yaml", None, "cannot be read"),
    ):
        write_manifest(folder, manifest | {"files": manifest["files"] | {name: wrong}})
        assert why in reason()
    numbers = "must have whole numbers as step and serial"
    for changed, why in (
        ({"files": []}, "must list train_state.json and config.yaml in files"),
        ({"files": {}}, "must list"),
        *(({"step": step}, numbers) for step in ("6", -1, 1e300)),
        ({"serial": None}, numbers),
    ):
        write_manifest(folder, manifest | changed)
        assert why in reason()
    for text in (b"", b"{}", b"[]", b"null", b"1", b'{"xxh3_64": "0"}', b"\xff", b"{"):
        (folder / "manifest.json").write_bytes(text)
        assert "manifest.json" in reason()
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert "manifest.json is not a file" in reason()


def test_weights_of_a_folder_of_transformers_are_files_of_it(tmp_path):
    config = llama.to_config(ModelArgs(dim=48, n_heads=6, vocab_size=259), 512)
    (tmp_path / "config.json").write_text(json.dumps(config))
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "empty.safetensors").touch()
    index = tmp_path / "model.safetensors.index.json"
    files = ["pipe.safetensors", "empty.safetensors", "../x", "/dev/zero", "no\0name", "", 5]
    for weight_map in (None, [], *({"a": file} for file in files)):
        index.write_text(json.dumps({"weight_map": weight_map}))
        told = refusal(lambda: open_folder(llama, tmp_path))
        assert str(tmp_path) in told, weight_map


def test_the_config_of_a_checkpoint_is_read_as_text(folder, monkeypatch, capsys):
    """It names a secret of the environment, and a file that is not its own."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text, there = (folder / "config.yaml").read_text(), folder.parents[1] / "private"
    there.write_text("seed: 5\n")
    forged = text.replace("seed: 11", "seed: ${oc.env:HF_TOKEN}")
    forged = forged.replace("  name: bytes", "  name: ${oc.env:HF_TOKEN}")
    assert forged.count("${") == 2
    (folder / "config.yaml").write_text(f"base: {there}\n{forged}")
    resign(folder)
    printed = []
    for work in (
        lambda: main(["diff", str(folder), f"config={SAMPLE / 'config.yaml'}"]),
        lambda: convert_to(folder, folder.parent / "file.pth"),
        lambda: convert_to(folder, folder.parent / "hf"),
        lambda: open_trained("ckpt", str(folder), None),
    ):
        printed += [refusal(work), *capsys.readouterr()]
    with one_process():
        source = open_source("source", folder, None, "full", print)
        found = published(folder.parent, print)
        saved = read_saved(newest(found, "full", print), ["seed", "data.tokenizer.name"])
        start = find_start([c.to_json() for c in found], CheckpointArgs(), ["seed"])
    printed += [str(start), source.config, *capsys.readouterr()]
    assert saved.config == dict.fromkeys(("seed", "data.tokenizer.name"), "${oc.env:HF_TOKEN}")
    assert "hf_secret" not in "".join(printed) and "seed: 5" not in "".join(printed)
    assert "${oc.env:HF_TOKEN}" in printed[1]  # in the table of diff


def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(folder, capsys):
    escape = "\x1b]0;owned\x07\x9b31m"
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"seed": escape}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    state = json.loads((folder / "train_state.json").read_text())
    state["versions"] = {"torch": escape, escape: "${"}
    (folder / "train_state.json").write_text(json.dumps(state))
    resign(folder)
    (folder.parent / f"0000000001{escape}").mkdir()
    main(["show", str(folder.parents[1])])
    words = ["diff", str(folder.parents[1]), f"config={SAMPLE / 'config.yaml'}"]
    assert refusal(lambda: main(words))
    printed = "".join(capsys.readouterr())
    assert "owned" in printed and "seed" in printed and "is not a checkpoint" in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b"}
