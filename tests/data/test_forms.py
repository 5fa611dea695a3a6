"""Which files a source has. The same text in any form gives the same documents; a fault is named
with its line or row."""

import gzip
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lingua.base.errors import UserError
from lingua.data.args import SourceFiles
from lingua.data.files import find_files
from lingua.tools.prepare.records import read_records
from tests.data.prepared import (
    TEXTS,
    Prepared,
    check,
    error_of,
    expected_tokens,
    make_args,
    train_tokens,
    write_jsonl,
)
from tests.mistakes import refused

ODD = ["\x00 nul", 'quo"te \\ back', "\u2028 line\r\nends\n", "\U0001f600" * 50, "x" * 5000]


def json_lines(texts: list[str], **more: object) -> bytes:
    return b"".join(json.dumps({"text": t, **more}).encode() + b"\n" for t in texts)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def write_form(folder: Path, form: str, texts: list[str], key: str = "text") -> Path:
    """A file that holds the texts, written by libraries other than those that read it where there
    are any."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"f.{form}"
    half = len(texts) // 2  # compressed files may consist of several
    records = [{"n": None, key: text} for text in texts]
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    halves = b"".join(lines[:half]), b"".join(lines[half:])
    if form == "parquet":
        table = pa.table({"n": list(range(len(texts))), key: texts})
        pq.write_table(table, path, row_group_size=100, compression="zstd")
    elif form == "json":
        path.write_text(json.dumps(records, indent=2), encoding="utf-8-sig")
    elif form in ("csv", "csv.gz", "tsv"):
        separator = "\t" if form == "tsv" else ","
        pd.DataFrame(records).to_csv(path, index=False, sep=separator)
    elif form == "json.zst":
        path.write_bytes(zstd(json.dumps(records).encode()))
    elif form.endswith(".gz"):
        path.write_bytes(b"".join(map(gzip.compress, halves)))
    elif form.endswith(".zst"):
        path.write_bytes(b"".join(map(zstd, halves)))
    else:
        path.write_bytes(b"".join(halves))
    return path


LINE_FORMS = ["jsonl", "jsonl.gz", "jsonl.zst", "json.gz", "json.zst", "parquet"]
LINE_FORMS += ["json", "csv", "csv.gz", "tsv"]


@pytest.mark.parametrize(
    ("form", "unit_bytes"),
    [*((form, 3000) for form in LINE_FORMS), ("jsonl", 10**9), ("parquet", 10**9)],
)
def test_every_form_gives_the_same_documents(tmp_path, form, unit_bytes):
    write_form(tmp_path / "a", form, [*TEXTS, *ODD])
    source = Prepared(make_args(tmp_path), unit_bytes=unit_bytes).source
    check(source, [*TEXTS, *ODD])
    is_cut = unit_bytes == 3000 and form in ("jsonl", "parquet")
    assert (len(source.manifest.shards) > 5) == is_cut


@pytest.mark.parametrize("form", [*LINE_FORMS, "txt", "txt.gz"])
def test_progress_ends_at_the_size_of_a_file_of_any_form(tmp_path, form):
    size = write_form(tmp_path / "a", form, TEXTS).stat().st_size
    read: list[int] = []
    [file] = find_files("a", tmp_path)
    assert list(read_records(file, ("text",), read.append)) and sum(read) == size


@pytest.mark.parametrize("suffix", ["ndjson", "jsonlines", "ldjson", "ndjson.gz"])
def test_lines_of_json_have_other_names_too(tmp_path, suffix):
    write_form(tmp_path / "a", suffix, TEXTS)
    check(Prepared(make_args(tmp_path)).source, TEXTS)


@pytest.mark.parametrize("name", ["x.jsonl.bak", "x.jsonl~", "0a1b", "x.txt.gz"])
def test_records_in_a_file_of_text_are_refused_by_its_name(tmp_path, name):
    (tmp_path / "a").mkdir()
    text = gzip.compress(json_lines(TEXTS)) if name.endswith(".gz") else json_lines(TEXTS)
    (tmp_path / "a" / name).write_bytes(text)
    said = error_of(make_args(tmp_path))
    assert f"{tmp_path}/a/{name}:1: JSON lines in a file of text (line 1 has the key text" in said
    assert "name the file .jsonl" in said
    text = '{"text": is no record}\n'
    (tmp_path / "a" / name).write_bytes(
        gzip.compress(text.encode()) if ".gz" in name else text.encode()
    )
    check(Prepared(make_args(tmp_path)).source, [text])


def test_in_the_cache_of_a_hub_each_file_is_read_once(tmp_path):
    for place, content in (("blobs/0a1b", json_lines(TEXTS)), ("refs/main", b"1")):
        (tmp_path / "a" / place).parent.mkdir(parents=True)
        (tmp_path / "a" / place).write_bytes(content)
    (tmp_path / "a/snapshots/1").mkdir(parents=True)
    os.symlink("../../blobs/0a1b", tmp_path / "a/snapshots/1/train.jsonl")
    check(Prepared(make_args(tmp_path)).source, TEXTS)


@pytest.mark.parametrize("codec", ["", ".gz", ".zst"])
def test_other_files_are_one_document_as_it_is(tmp_path, codec):
    text = "zwei\r\nZeilen \u00fc\n" * 1000
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[codec]
    (tmp_path / f"a.py{codec}").write_bytes(compress(f"\ufeff{text}".encode()))
    args = make_args(tmp_path, sources={f"a.py{codec}": 1.0})
    check(Prepared(args, f"a.py{codec}"), [text])


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_every_kind_of_text_column_is_read(tmp_path, kind):
    column = pa.array(TEXTS[:50]).cast(kind)
    pq.write_table(pa.table({"content": column}), tmp_path / "a.parquet")
    source = Prepared(make_args(tmp_path)).source
    check(source, TEXTS[:50])


@pytest.mark.parametrize("form", LINE_FORMS)
def test_the_texts_key_can_be_given(tmp_path, form):
    write_form(tmp_path / "a", form, TEXTS[:20], key="body")
    keyed = make_args(tmp_path, source_files={"a": SourceFiles(text_key="body")})
    check(Prepared(keyed), TEXTS[:20])
    what = "column" if form == "parquet" else "key"
    named = f":1: no text (neither {what} text nor content, but n, body)"
    refused(lambda: Prepared(make_args(tmp_path)), named, "data.source_files.a.text_key")
    keyed.source_files["a"].text_key = "txt"
    refused(lambda: Prepared(keyed), f":1: no text (no {what} txt, but n, body)")


def test_a_folder_of_source_files_is_read_in_byte_order_with_what_it_links_to(tmp_path):
    folder = tmp_path / "a"
    texts = {"Z.py": "1", "a.md": "2", "a/b.c": "3", "a0": "4", "\u00e9.txt": "5"}
    hidden = [".git/config", "x/.hidden.py", "__pycache__/a.pyc"]
    for path in [*texts, *hidden]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(texts.get(path, "hidden"), encoding="utf-8")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "x.txt").write_text("6", encoding="utf-8")
    os.symlink(folder, folder / "circle")
    os.symlink(tmp_path / "far", folder / "linked")
    os.symlink(tmp_path / "far" / "x.txt", folder / "y.txt")
    texts |= {"linked/x.txt": "6", "y.txt": "6"}
    found = [file.path for file in find_files("a", tmp_path)]
    assert found == sorted(texts, key=lambda path: path.encode())
    tokens = train_tokens(Prepared(make_args(tmp_path)).source)
    assert tokens == expected_tokens([texts[path] for path in found])


def test_a_description_is_no_text_and_shards_that_have_one_stay(tmp_path):
    write_jsonl(tmp_path / "a" / "x.jsonl", ["x"])
    for name in ("README.md", "readme", "LICENSE", "in/README.txt", "dataset_infos.json"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text("about the data")
    first = Prepared(make_args(tmp_path)).source
    check(first, ["x"])
    manifest = first.folder / "manifest.json"  # as an earlier version wrote it
    fields = json.loads(manifest.read_text())
    fields["parts"].append(fields["parts"][0] | {"path": "README.md"})
    fields["shards"][0]["parts"] += 1
    manifest.write_text(json.dumps(fields))
    assert not Prepared(make_args(tmp_path)).built
    assert [file.path for file in find_files("README.md", tmp_path / "a")] == ["README.md"]


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_name_may_leave_out_the_suffix(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_text(json.dumps({"text": "x"}), encoding="utf-8")
    for name in ("a", f"a{suffix}"):
        assert [Path(file.full).name for file in find_files(name, tmp_path)] == [f"a{suffix}"]


def test_patterns_say_which_files_a_source_has(tmp_path):
    for path in ("web/1/x.jsonl", "web/2/x.jsonl", "web/2/README.md", "books/b.jsonl"):
        write_jsonl(tmp_path / path, [path])
    elsewhere = tmp_path.parent / f"{tmp_path.name}-else"
    write_jsonl(elsewhere / "far.jsonl", ["far"])

    def found(*patterns: str) -> list[str]:
        return [file.path for file in find_files("a", tmp_path, patterns)]

    assert found("web/**/*.jsonl") == ["web/1/x.jsonl", "web/2/x.jsonl"]
    both = ["web/1/x.jsonl", "web/2/x.jsonl"]
    assert found("web/*/x.jsonl", "books", "./web/1/*") == ["books/b.jsonl", *both]
    assert found("web/2") == found("web/2/*") == ["web/2/x.jsonl"]
    assert found("web/2", "web/2/README.md") == ["web/2/README.md", "web/2/x.jsonl"]
    assert found(f"{elsewhere}/*.jsonl") == [f"{elsewhere}/far.jsonl"]
    with pytest.raises(UserError, match=r"source_files\.a\.files: web/\*\.parquet matches no file"):
        found("books", "web/*.parquet")


def test_bad_records_stop_it_or_are_counted_at_each_start(tmp_path):
    """What is one: the lines `record` of tests/mistakes.txt."""
    good, file = b'{"text": "ok"}\n', tmp_path / "a.jsonl"
    file.write_bytes(good + b"[" * 100_000 + b"\n" + good + b"\n")
    stopping, skipping = make_args(tmp_path), make_args(tmp_path, on_bad_record="skip")
    refused(lambda: Prepared(stopping), f"{file}:2: not JSON", "data.on_bad_record")
    first, again = Prepared(skipping), Prepared(skipping)
    check(first, ["ok", "ok"])
    line = "data.sources.a: 2 bad records left out (1 blank line, 1 not JSON)"
    assert line in first.lines and line in again.lines and not again.built
    refused(lambda: Prepared(stopping), f"{file}:2: not JSON")  # of what was built too
    file.write_bytes(good)  # without any, both settings have the same shards
    assert Prepared(stopping).built and not Prepared(skipping).built


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_line_ends_and_byte_order_mark_are_no_part_of_a_record(tmp_path, end):
    lines = [b'\xef\xbb\xbf{"text": "one\\r\\n"}', b'{"text": "two", "content": "not this"}']
    (tmp_path / "a.jsonl").write_bytes((end or b"\n").join(lines) + end)
    check(Prepared(make_args(tmp_path)), ["one\r\n", "two"])


def test_a_change_in_one_part_builds_that_part_again(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = Prepared(make_args(tmp_path), unit_bytes=10_000).source
    n = len(first.manifest.shards)
    assert n > 5
    changed = [*TEXTS[:650], TEXTS[650].replace("Dokument", "dokument"), *TEXTS[651:]]
    write_jsonl(tmp_path / "a.jsonl", changed)
    again = Prepared(make_args(tmp_path), unit_bytes=10_000)
    assert f"parts to build: 1 of {n})" in again.lines[0]
    check(again, changed)
    removed = [*TEXTS[:400], *TEXTS[401:]]
    write_jsonl(tmp_path / "a.jsonl", removed)
    again = Prepared(make_args(tmp_path), unit_bytes=10_000)
    check(again, removed)


@pytest.mark.parametrize("seed", range(8))
def test_cutting_a_file_anywhere_loses_and_repeats_nothing(tmp_path, seed):
    rng = random.Random(seed)
    texts = ["y" * int(rng.expovariate(0.01)) + "z" for _ in range(rng.randrange(1, 60))]
    data = json_lines(texts, id=seed)
    (tmp_path / "a.jsonl").write_bytes(data.removesuffix(b"\n") if seed % 2 else data)
    unit_bytes = rng.randrange(1, 2000)
    source = Prepared(make_args(tmp_path), processes=1, unit_bytes=unit_bytes).source
    check(source, texts)
    totals = [source.manifest.total(split, "documents") for split in ("train", "heldout")]
    assert sum(totals) == len(texts)


def test_an_error_in_a_later_part_has_the_line_of_the_file(tmp_path):
    lines = json_lines(TEXTS).splitlines(keepends=True)
    lines[567] = b'{"text": 5}\n'
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl:568: text is not a string"):
        Prepared(make_args(tmp_path), processes=1, unit_bytes=4000)
    table = pa.table({"text": [*TEXTS[:567], None, *TEXTS[568:]]})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=50)
    with pytest.raises(UserError, match=r"b\.parquet:568: null text \(column text\)"):
        Prepared(make_args(tmp_path), "b", processes=1, unit_bytes=4000)


def test_a_source_without_any_text_is_refused_before_all_of_it_is_read(tmp_path):
    """Also where bad records are skipped: millions of them would be left out one by one."""
    args = make_args(tmp_path, on_bad_record="skip")
    for lines, detail, advice in (
        (b'{"body": "x"}\n', ":1: no text (neither key text nor", "data.source_files.a.text_key"),
        (b"\n", ":1: blank line; ", "no other record of a sample has a text either"),
    ):
        (tmp_path / "a.jsonl").write_bytes(lines * 2_000_000)
        message = error_of(args)
        assert detail in message and message.endswith(advice)
        assert not (tmp_path / ".tokens").exists()
    folder = tmp_path / "few"
    write_form(folder, "csv", ["x"], key="body")
    (folder / "0.jsonl").touch()
    message = error_of(args, "few")
    assert "f.csv:1: no text (neither key text nor content, but n, body); name the one" in message
    (folder / "f.csv").unlink()
    assert error_of(args, "few") == f"data.sources.few: has no documents: {folder}/0.jsonl is empty"
    assert not (tmp_path / ".tokens").exists()
    (tmp_path / "a.jsonl").write_bytes(b"\n" * 999 + b'{"text": "x"}\n')
    assert Prepared(args).source.manifest.skipped == {"blank line": 999}


def damaged(data: bytes, how: str) -> bytes:
    if how == "cut":
        return data[: len(data) * 2 // 3]
    if how == "last byte":
        return data[:-1]
    if how == "overwritten":
        middle = len(data) // 2
        return data[:middle] + bytes(b ^ (i % 5 == 0) for i, b in enumerate(data[middle:]))
    return b"not what the name says, at all. " * 20


@pytest.mark.parametrize("form", ["jsonl.gz", "jsonl.zst", "parquet", "txt.gz", "txt.zst"])
@pytest.mark.parametrize("how", ["cut", "last byte", "overwritten", "something else"])
def test_a_damaged_file_is_named_with_line_or_row(tmp_path, form, how):
    rng = np.random.default_rng(0)
    texts = [f"{i} {rng.bytes(40).hex()}" for i in range(3000)]
    if form.startswith("txt"):
        compress = gzip.compress if form.endswith(".gz") else zstd
        path = tmp_path / f"f.{form}"
        path.write_bytes(compress("\n".join(texts).encode()))
    elif form == "parquet":
        path = tmp_path / "f.parquet"
        table = pa.table({"text": texts})
        pq.write_table(table, path, row_group_size=100, write_page_checksum=True)
    else:
        path = write_form(tmp_path, form, texts)
    path.write_bytes(damaged(path.read_bytes(), how))
    write_jsonl(tmp_path / "good.jsonl", ["good"])
    files = {"a": SourceFiles([path.name, "good.jsonl"])}
    message = error_of(make_args(tmp_path, source_files=files))
    where = re.escape(str(path))
    line = re.search(rf"{where}:(\d+): damaged file \(as (gzip|zstd|parquet): .+\)", message)
    assert line, message
    skipping = Prepared(make_args(tmp_path, source_files=files, on_bad_record="skip"))
    assert skipping.source.manifest.skipped == {"damaged file": 1}
    n_good = sum(skipping.source.manifest.total(s, "documents") for s in ("train", "heldout"))
    n_read = int(line[1]) - 1
    assert n_good == n_read + 1 <= len(texts)
    check(skipping, [*texts[:n_read], "good"])


@pytest.mark.parametrize(
    "column, kind",
    [
        (pa.array([1, 2]), "text is not a string (column text is int64)"),
        (pa.array([["x"], ["y"]]), "text is not a string (column text is list<"),
        (pa.array([b"x", b"y"]), "text is not a string (column text is binary)"),
        (pa.array([None, None], pa.string()), "null text (column text)"),
        (pa.array(["", ""]), "empty document"),
        (pa.array([b"\xff", b"\xff"]).view(pa.string()), "not UTF-8 (invalid start byte 0xff at"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_column_or_value_of_parquet_is_named(tmp_path, column, kind):
    good = pa.table({"text": ["good"]})
    (tmp_path / "a").mkdir()
    pq.write_table(good, tmp_path / "a" / "0.parquet")
    pq.write_table(pa.table({"text": column}), tmp_path / "a" / "1.parquet")
    assert f"{tmp_path}/a/1.parquet:1: {kind}" in error_of(make_args(tmp_path))
    skipping = Prepared(make_args(tmp_path, on_bad_record="skip")).source
    assert skipping.manifest.skipped == {kind.split(" (")[0]: 2}
    check(skipping, ["good"])
