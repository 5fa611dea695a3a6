"""Token shards that are damaged, odd or lost: built again, or an error that names the file."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from lingua.base.errors import UserError
from lingua.data.shards import Source
from tests.data.prepared import TEXTS, Prepared, check, contents, error_of, make_args, train_tokens


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [change_byte, cut_off, Path.unlink])
@pytest.mark.parametrize("file", ["train.tokens", "heldout.tokens", "heldout.documents"])
def test_a_damaged_shard_is_built_again(corpus, file, damage):
    args = make_args(corpus)
    first = Prepared(args, unit_bytes=27_000).source
    before = contents(first.folder)
    (name, *_) = [shard.name for shard in first.manifest.shards if shard.heldout.tokens]
    damage(first.folder / f"{name}.{file}")
    again = Prepared(args, unit_bytes=27_000)
    assert name in again.lines[0] and "; parts to build: 1 of 3)" in again.lines[0]
    assert contents(first.folder) == before
    assert not Prepared(args, unit_bytes=27_000).built


def test_shards_are_compared_with_their_hashes_once_until_they_change(corpus):
    args = make_args(corpus)
    folder = Prepared(args, unit_bytes=27_000).source.folder
    verified = folder.with_name(f"{folder.name}.verified")
    before = verified.read_bytes()
    times = {path.name: path.stat().st_ctime_ns for path in folder.glob("*.*.*")}
    assert json.loads(before) == times and len(times) == 12
    written = verified.stat().st_mtime_ns
    Prepared(args)
    assert verified.stat().st_mtime_ns == written
    next(folder.glob("*.train.tokens")).chmod(0o600)
    assert not Prepared(args).built and verified.read_bytes() != before


def test_a_token_outside_the_vocabulary_is_damage_whatever_the_hash(corpus):
    first = Prepared(make_args(corpus)).source
    (shard,) = first.manifest.shards
    path = first.folder / f"{shard.name}.train.tokens"
    tokens = np.fromfile(path, "<u2")
    tokens[5] = 258
    tokens.tofile(path)
    shard.train.hash = xxhash.xxh3_128_hexdigest(tokens.tobytes())
    (first.folder / "manifest.json").write_text(first.manifest.to_json(), encoding="utf-8")
    assert f"{shard.name} was damaged" in Prepared(make_args(corpus)).lines[0]
    check(Source.open(first.folder), TEXTS)


@pytest.mark.parametrize("how", ["shorter", "gone"])
def test_a_shard_that_is_lost_under_a_run_is_an_error_that_names_it(corpus, how):
    source = Prepared(make_args(corpus), unit_bytes=27_000).source
    first, second, _ = source.manifest.shards
    out = np.empty((1, 100), np.uint16)
    source.read(np.array([0]), out, np.array([0]))  # the first shard is open
    lost = first if how == "shorter" else second
    path = source.folder / f"{lost.name}.train.tokens"
    path.unlink() if how == "gone" else os.truncate(path, 1000)
    reason = "is shorter than its manifest says" if how == "shorter" else "cannot be read: No such"
    with pytest.raises(UserError, match=f"{re.escape(str(path))}: {reason}") as error:
        train_tokens(source)
    assert error.value.local and "start again to build what is missing" in str(error.value)


def changed(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *above, last = path.split(".")
    inner: Any = fields
    for key in above:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return fields


@pytest.mark.parametrize(
    "path, value",
    [
        ("shards", []),
        ("shards", None),
        ("shards.0.name", "../x"),
        ("shards.0.parts", 2),
        ("shards.0.train.tokens", "9"),
        ("shards.0.train.tokens", -1),
        ("shards.0.train", []),
        ("parts.0.size", 1.5),
        ("dtype", "<f8"),
        ("tokenizer", {"vocab_size": 10**9}),
        ("skipped", {"x": "y"}),
        ("rough_cuts", True),
        ("new", 1),
    ],
    ids=str,
)
def test_a_manifest_or_record_with_odd_values_is_not_used(corpus, path, value):
    args = make_args(corpus)
    folder = Prepared(args).source.folder
    before = contents(folder)
    for file in (folder / "manifest.json", next(folder.glob("????????????????.json"))):
        fields = json.loads(file.read_text(encoding="utf-8"))
        if file.name != "manifest.json" and path.startswith("shards"):
            fields = {"shards": [fields.pop("shard")], **fields}
        file.write_text(json.dumps(changed(fields, path, value)), encoding="utf-8")
    assert Prepared(args).built
    assert contents(folder) == before


def test_files_that_are_no_files_are_named(corpus):
    (corpus / "a" / "pipe.txt").unlink(missing_ok=True)
    os.mkfifo(corpus / "a" / "pipe.txt")
    assert f"{corpus}/a/pipe.txt: is a pipe, a socket or a device" in error_of(make_args(corpus))
    (corpus / "a" / "pipe.txt").unlink()
    (corpus / "zero").symlink_to("/dev/zero")
    assert f"{corpus}/zero: is a pipe, a socket or a device" in error_of(make_args(corpus), "zero")
    folder = Prepared(make_args(corpus)).source.folder
    for name in ("manifest.json", next(folder.glob("*.train.tokens")).name):
        (folder / name).rename(folder / "moved")
        os.mkfifo(folder / name)
        assert f"{name} is not a file" in error_of(make_args(corpus))
        (folder / "moved").rename(folder / name)
    with open(os.fsencode(corpus / "a") + b"/caf\xe9.txt", "w") as file:
        file.write("x")
    assert "a/caf\\udce9.txt: the name of this file is not UTF-8" in error_of(make_args(corpus))
