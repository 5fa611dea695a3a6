"""Text becomes the same shards whoever builds them, however often they are stopped. Those that are
damaged, odd or lost are built again, or an error names the file."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from lingua.base.errors import UserError
from lingua.data.shards import Source
from lingua.data.sources import prepare_source, prepare_sources
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from tests.data.prepared import (
    BOS,
    EOS,
    TEXTS,
    Prepared,
    check,
    contents,
    error_of,
    is_held_out,
    make_args,
    train_tokens,
    write_jsonl,
)
from tests.data.test_forms import LINE_FORMS, write_form
from tests.disk import full_disk
from tests.mistakes import refused


def test_documents_keep_their_order_and_split_by_their_text(corpus):
    source = Prepared(make_args(corpus)).source
    check(source, TEXTS)
    assert sum(map(is_held_out, TEXTS)) == source.manifest.total("heldout", "documents") > 0
    n_bytes = sum(len(text.encode()) for text in TEXTS if not is_held_out(text))
    assert source.manifest.total("train", "bytes") == n_bytes
    assert source.manifest.total("train", "tokens") == source.n_tokens
    assert source.dtype == np.uint16


@pytest.mark.parametrize("bos, eos", [(True, False), (False, True), (False, False)])
def test_bos_and_eos_follow_the_config_and_have_shards_of_their_own(tmp_path, bos, eos):
    write_jsonl(tmp_path / "a.jsonl", ["ab", "c"])
    both = Prepared(make_args(tmp_path)).source
    source = Prepared(make_args(tmp_path, add_bos=bos, add_eos=eos)).source
    before, after = [BOS] * bos, [EOS] * eos
    assert train_tokens(source) == [*before, 97, 98, *after, *before, 99, *after]
    assert source.folder != both.folder


def test_any_number_of_processes_gives_the_same_bytes_of_every_form(corpus, tmp_path_factory):
    for form in LINE_FORMS:
        write_form(corpus / "a" / "forms", form, TEXTS[:200])
    one = Prepared(make_args(corpus), processes=1, unit_bytes=9_000).source
    other_cache = str(tmp_path_factory.mktemp("cache"))
    args = make_args(corpus, cache_dir=other_cache)
    two = Prepared(args, processes=2, unit_bytes=9_000).source
    assert len(one.manifest.shards) > 10
    assert contents(one.folder) == contents(two.folder)


def test_a_preparation_that_an_earlier_version_began_continues(corpus):
    folder = Prepared(make_args(corpus)).source.folder
    (path,) = folder.glob(f"{'?' * 16}.json")
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    record, manifest = json.loads(path.read_text(encoding="utf-8")), json.loads(text)
    (shard,) = manifest["shards"]
    earlier = {"parts": manifest["parts"], "shard": shard, "skipped": {}, "rough_cuts": 0}
    hashes = sorted(xxhash.xxh3_64_intdigest(text.encode()) for text in TEXTS)
    drawn = {"held_out_below": 2**64 // 50, "lowest": hashes[:10]}
    assert record == {**earlier, "heldout_tail": False, "lost": 0.0, "cut": 0, **drawn}
    assert list(record["parts"][0]) == ["path", "begin", "end", "size", "mtime_ns", "hash"]
    assert list(shard) == ["name", "parts", "train", "heldout"]
    assert list(shard["train"]) == ["tokens", "documents", "bytes", "hash"]
    path.write_text(json.dumps(earlier), encoding="utf-8")
    (folder / "manifest.json").unlink()
    again = Prepared(make_args(corpus))
    assert "parts to build: 0 of 1)" in again.lines[0]
    assert (folder / "manifest.json").read_text(encoding="utf-8") == text


def test_the_fingerprint_is_of_the_tokens_not_of_the_machine(corpus, tmp_path):
    first = Prepared(make_args(corpus)).source
    copy = tmp_path / "elsewhere"
    shutil.copytree(corpus / "a", copy / "a")
    assert Prepared(make_args(copy)).source.fingerprint == first.fingerprint
    write_jsonl(copy / "a" / "z.jsonl", [*TEXTS[500:-1], "other"], key="content")
    assert Prepared(make_args(copy)).source.fingerprint != first.fingerprint


def test_the_standard_library_is_there_without_a_download(tmp_path):
    args = make_args(tmp_path, sources={"stdlib": 1.0})
    source = Prepared(args, "stdlib").source
    paths = [file.path for file in source.manifest.parts]
    assert "json/decoder.py" in paths and paths == sorted(paths)
    assert not any("test" in path.split("/") or "site-packages" in path for path in paths)
    assert source.n_tokens > 5_000_000
    decoder = Path(json.decoder.__file__).read_bytes()
    tokens = np.fromfile(source.folder / f"{source.manifest.shards[0].name}.train.tokens", "<u2")
    assert bytes([*decoder]) in tokens.astype(np.uint8).tobytes() or is_held_out(decoder.decode())


def test_the_text_that_a_tokenizer_loses_is_reported_at_each_start(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["abc ab é x", "AB"])  # é, x, A and B are lost
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, " ": 4}
    made = HfTokenizer(models.BPE(vocabulary, merges=[], unk_token="[UNK]"))
    made.add_special_tokens(["[UNK]"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerArgs("hf", str(tmp_path))
    args = make_args(tmp_path, tokenizer=tokenizer, add_bos=False, add_eos=False)
    line = "the tokenizer loses text: decoding does not give back 33.33% of the characters, in a"
    for _ in range(2):
        assert line in Prepared(args).lines[-1]
    assert not any("loses" in line for line in Prepared(make_args(tmp_path)).lines)


def test_a_touched_file_is_read_once_and_kept(corpus):
    Prepared(make_args(corpus))
    os.utime(corpus / "a" / "a.jsonl", (1, 1))
    again = Prepared(make_args(corpus))
    assert not again.built
    parts = Source.open(again.source.folder).manifest.parts
    assert {part.path: part.mtime_ns for part in parts}["a.jsonl"] == 10**9


def test_a_changed_added_or_removed_file_is_seen(corpus):
    Prepared(make_args(corpus), unit_bytes=27_000)
    same_size = [TEXTS[0].replace("Dokument", "dokument"), *TEXTS[1:300]]
    write_jsonl(corpus / "a" / "a.jsonl", same_size)
    changed = Prepared(make_args(corpus), unit_bytes=27_000)
    assert changed.built and "parts to build: 1 of 3)" in changed.lines[0]
    assert "a.jsonl has changed" in changed.lines[0]
    check(changed, same_size + TEXTS[300:])

    (corpus / "a" / "m.txt").write_text("neu\r\n", encoding="utf-8", newline="")
    added = Prepared(make_args(corpus), unit_bytes=27_000)
    assert "m.txt was added, removed or changed" in added.lines[0]
    expected = [*same_size, *TEXTS[300:500], "neu\r\n", *TEXTS[500:]]
    check(added, expected)

    (corpus / "a" / "a.jsonl").unlink()
    removed = Prepared(make_args(corpus), unit_bytes=27_000)
    assert "a.jsonl was added, removed or changed" in removed.lines[0]
    check(removed, expected[300:])
    left = {path.name.split(".")[0] for path in removed.source.folder.glob("*.tokens")}
    assert left == {shard.name for shard in removed.source.manifest.shards}


def test_a_run_in_progress_never_reads_tokens_of_changed_text(corpus):
    running = Prepared(make_args(corpus), unit_bytes=27_000).source
    write_jsonl(corpus / "a" / "a.jsonl", ["other"] * 300)
    Prepared(make_args(corpus), unit_bytes=27_000)
    refused(lambda: train_tokens(running), ".tokens: cannot be read: No such file", " start again")


def test_a_file_that_changes_while_it_is_read_is_an_error(corpus):
    def change(line: str) -> None:
        if "tokenizing" in line:
            write_jsonl(corpus / "a" / "z.jsonl", ["other"])

    args = make_args(corpus)
    with pytest.raises(UserError, match=r"z\.jsonl: changed while it was read; start again"):
        prepare_source("a", args, build_tokenizer(args.tokenizer), change)
    check(Prepared(args), [*TEXTS[:500], "other"])


def test_a_cache_that_cannot_be_written_is_enough_when_it_is_up_to_date(corpus):
    """As root nothing is read-only; a cache whose lock file cannot be made stands for it."""
    first = Prepared(make_args(corpus)).source
    lock = first.folder.with_name(f"{first.folder.name}.lock")
    lock.mkdir()
    again = Prepared(make_args(corpus))
    assert not again.built


def test_a_tokenizer_without_bos_and_eos_is_refused_with_the_names_looked_for(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    made = HfTokenizer(models.BPE(vocab={"x": 0, "<|start|>": 1, "<|end|>": 2}, merges=[]))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerArgs("hf", str(tmp_path))
    args = make_args(tmp_path, tokenizer=tokenizer, sources={"a": 1.0, "b": 1.0})
    message = refused(lambda: prepare_sources(args, build_tokenizer(tokenizer), print))
    heading, bos, eos, source = message.splitlines()
    assert heading == "3 mistakes in the configuration:"
    assert "data.add_bos = true: the hf tokenizer has no bos token (looked for <|begin" in bos
    assert "</s>, " in eos and "name one in data.tokenizer.eos, or set data.add_eos=false" in eos
    assert "data.sources.b: there is no" in source
    named = replace(tokenizer, bos="<|start|>", eos="<|end|>")
    assert train_tokens(Prepared(make_args(tmp_path, tokenizer=named)).source) == [1, 0, 2]


def test_what_cannot_be_prepared_is_one_clear_error(corpus):
    """A file size limit of the operating system stops a write as a full disk does."""
    with full_disk(8192):
        message = error_of(make_args(corpus))
    assert "data.sources.a: cannot be prepared" in message and ".tokens" in message
    assert os.strerror(errno.EFBIG) in message
    assert not list((corpus / ".tokens").glob("a-*/*.tmp-*"))
    (corpus / "file").write_text("", encoding="utf-8")
    message = error_of(make_args(corpus, cache_dir=str(corpus / "file" / "cache")))
    assert str(corpus / "file") in message and os.strerror(errno.ENOTDIR) in message
    (corpus / "b").mkdir()
    write_jsonl(corpus / "a.jsonl", ["x"])
    for name, named in (("a", "a.jsonl"), ("b", "has no files")):
        assert named in error_of(make_args(corpus), name)


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


@pytest.mark.parametrize("column", [0, 1])
def test_counts_of_documents_that_only_modulo_two_to_the_64_have_the_sum_are_refused(
    corpus, column
):
    source = Prepared(make_args(corpus)).source
    path = source.folder / f"{source.manifest.shards[0].name}.train.documents"
    table = np.fromfile(path, "<i8").reshape(-1, 3)
    table[:3, column] = [2**63 - 1, 2**63 - 1, table[:3, column].sum() + 2]
    table.tofile(path)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}: does not have the counts"):
        source.documents(0, "train")


def changed(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *above, last = path.split(".")
    inner: Any = fields
    for key in above:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return fields


ODD_VALUES = {"shards": [], "shards.0.name": "../x", "shards.0.parts": 2, "parts.0.size": 1.5}
ODD_VALUES |= {"shards.0.train.tokens": "9", "dtype": "<f8", "tokenizer": {"vocab_size": 10**9}}


@pytest.mark.parametrize(("path", "value"), [*ODD_VALUES.items(), ("new", 1)])
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
