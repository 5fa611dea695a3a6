"""`python -m lingua data verify`: damaged, missing and stale shards are named, none is changed."""

import os
from pathlib import Path

import pytest

from lingua.data.shards import SHARDS_MANIFEST
from lingua.tools.commands.data_prepare import main as prepare
from lingua.tools.commands.data_verify import main as verify
from tests.data.prepared import TEXTS, write_jsonl
from tests.mistakes import refused

pytestmark = pytest.mark.quick


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A config whose sources a and b, and the validation source c, are prepared."""
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS[:200]])
    words = [f"data.root_dir={tmp_path}", "data.sources={a: 1, b: 1}", "validation.sources=[c]"]
    prepare([*words, "processes=1"])
    return words


def shards(words: list[str], name: str) -> Path:
    [manifest] = Path(words[0].partition("=")[2], ".tokens").glob(f"{name}-*/{SHARDS_MANIFEST}")
    return manifest.parent


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def damage(folder: Path, pattern: str) -> str:
    """Change one bit of a file, as a disk does: its size and its times stay. Returns its shard."""
    path = next(folder.glob(pattern))
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return path.name.partition(".")[0]


def test_a_line_for_each_source_whose_shards_are_as_they_were_written(words, tmp_path, capsys):
    capsys.readouterr()
    verify(words)
    lines = capsys.readouterr().out.splitlines()
    keys = ["data.sources.a", "data.sources.b", "validation.sources.c"]
    assert [line.partition(": ")[0] for line in lines] == keys
    tokens = sum(len(f"a {text}".encode()) + 2 for text in TEXTS[:200])
    assert f": 1 shard, {tokens:,} tokens, " in lines[0]
    run = tmp_path / "run"
    run.mkdir()
    config = f"data: {{root_dir: {tmp_path}, sources: {{a: 1}}}}\nmodel: {{dim: 8}}\n"
    (run / "config.yaml").write_text(config)
    verify([str(run)])  # named by its folder
    assert capsys.readouterr().out.splitlines() == lines[:1]
    refused(lambda: verify([str(tmp_path)]), tmp_path, "dump dir of a run")


@pytest.mark.parametrize("file", ["*.train.tokens", "*.heldout.tokens", "*.train.documents"])
def test_damage_is_named_with_its_source_and_nothing_is_changed(words, file, capsys):
    folder = shards(words, "b")
    shard = damage(folder, file)
    before = contents(folder.parent)
    capsys.readouterr()
    refused(lambda: verify(words), f"data.sources.b: {folder}: {shard}: ", "manifest")
    assert len(capsys.readouterr().out.splitlines()) == 2  # the other sources are whole
    assert contents(folder.parent) == before


def test_all_that_is_missing_stale_and_damaged_is_named_together(words, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["another text"])
    next(shards(words, "b").glob("*.train.tokens")).unlink()
    (shards(words, "c") / SHARDS_MANIFEST).unlink()
    names = "data.sources.a: ", "a.jsonl was", "data.sources.b: ", ".train.tokens is missing"
    refused(lambda: verify(words), *names, "validation.sources.c: ", "has no token shards")
