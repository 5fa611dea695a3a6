"""Files of tokens that other tools make: their rows, documents and held-out text are those of the
same tokens in shards of ours."""

import json
import logging
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lingua.data import IGNORE
from lingua.data.args import ChatArgs, SourceFiles
from lingua.data.cache import TOKEN_RECORD, shard_folder
from lingua.data.documents import DocumentMarks
from lingua.data.shards import SPLITS
from lingua.data.sources import (
    check_sources,
    held_out_windows,
    open_sources,
    prepare_sources,
    source_files,
)
from lingua.data.stream import RowStream
from lingua.data.token_files import open_files
from lingua.data.token_source import TokenSource, documents_of
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.commands.data_verify import verify_source
from lingua.tools.inspect.tokenizer import mixture_texts
from tests.data.prepared import BOS, EOS, Prepared, make_args, train_tokens, write_jsonl
from tests.data.sources import make_source
from tests.data.token_writers import (
    write_datasets,
    write_datatrove,
    write_llmc,
    write_megatron,
    write_plain,
)
from tests.mistakes import refused

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

TEXTS = [f"{i}: größer {'x' * (i * 7 % 90)}\n" for i in range(2500)]
FIRST_SIZES = np.cumsum([len(text.encode()) for text in TEXTS[:9]])
DOCUMENTS = [np.array([*text.encode(), EOS]) for text in TEXTS]
BYTES = build_tokenizer(TokenizerArgs("bytes"))
SEQ_LEN = 100


# writer, file or folder of the source, what the writer gets; the form where it must be given
KINDS = {
    "uint16": (write_plain, "a.bin", {}, None),
    "uint32": (write_plain, "a.bin", {"kind": "u4"}, "uint32"),
    "llm.c": (write_llmc, "a.bin", {}, None),
    "llm.c of llama 3": (write_llmc, "a.bin", {"kind": "u4"}, None),
    **{
        f"megatron {t.__name__}": (write_megatron, "a.bin", {"dtype": t}, None)
        for t in (np.int16, np.int32, np.int64, np.uint16)
    },
    "megatron in sentences": (write_megatron, "a.bin", {"sentences": 3}, None),
    "datatrove": (write_datatrove, "a.ds", {}, None),
    "datatrove of 4 bytes": (write_datatrove, "a.ds", {"size": 4}, None),
    "datasets": (write_datasets, "a", {}, None),
    "datasets int64": (write_datasets, "a", {"kind": "int64"}, None),
}
STORED = [kind for kind in KINDS if kind[:4] in ("mega", "data")]


def write(folder, kind, documents=DOCUMENTS, **changes):
    """The arguments of a source of this kind."""
    writer, name, options, form = KINDS[kind]
    writer(folder / name, documents, **options)
    if form:
        changes["source_files"] = {"a": SourceFiles([name], format=form)}
    return make_args(folder, global_batch_size=8, seq_len=SEQ_LEN, **changes)


def prepare(args, tokenizer=BYTES, lines=None) -> TokenSource:
    """The source as another process opens it."""
    prepare_sources(args, tokenizer, (lines if lines is not None else []).append)
    return open_sources(args, tokenizer)["a"]


def hashed(number: int) -> int:
    """32 bits of Stafford's Mix13, as the order of rows has it, of the golden ratio's key."""
    mask = 2**64 - 1
    h = (number ^ 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & mask
    h = (h ^ h >> 32) * 0x94D049BB133111EB & mask
    return h >> 32


def held_out(n: int) -> list[int]:
    return sorted((i for i in range(n) if hashed(i) < 2**32 // 50), key=hashed)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_documents_and_held_out_text_are_those_of_shards_of_the_same_tokens(tmp_path, kind):
    lines = []
    source = prepare(write(tmp_path, kind, document_mask="keep"), lines=lines)
    whole = np.concatenate(DOCUMENTS)
    if source.stores_documents:
        held = held_out(len(DOCUMENTS))
        trained = [d for i, d in enumerate(DOCUMENTS) if i not in set(held)]
        measured = [DOCUMENTS[i] for i in held]
        assert "2,500 documents" in lines[-1] and f"out {len(held)} documents" in lines[-1]
    else:  # blocks of 1024 tokens, from a document's first token to that of the next block's
        starts = np.flatnonzero(np.concatenate([[EOS], whole[:-1]]) == EOS)
        n_blocks = -(-len(whole) // 1024)
        at = [starts[np.searchsorted(starts, 1024 * i)] for i in range(n_blocks)] + [len(whole)]
        blocks = [whole[i:j] for i, j in pairwise(at)]
        held = held_out(n_blocks)
        trained = [block for i, block in enumerate(blocks) if i not in set(held)]
        measured = [blocks[i] for i in held]
        assert 0 < sum(map(len, measured)) < len(whole) / 25
    expected = make_source(tmp_path, "rows", [np.concatenate(trained).astype("<u2")])
    assert source.n_tokens == expected.n_tokens
    positions = np.random.default_rng(0).integers(0, 3 * source.n_tokens // SEQ_LEN, 300)
    stream, same = (RowStream({"a": s}, {"a": 1.0}, SEQ_LEN, 2, seed=1) for s in (source, expected))
    rows = same.rows(positions)
    assert np.array_equal(stream.rows(positions), rows)
    marks = DocumentMarks(None, EOS, ignores_first=False)
    assert np.array_equal(documents_of(stream, marks)(positions), marks.index(rows))

    windows = held_out_windows(source, SEQ_LEN, (10**9, "bytes"))
    flat = windows.targets[windows.targets != IGNORE]
    assert np.array_equal(flat, np.concatenate(measured))
    assert windows.n_bytes == sum(len(part) - (part == EOS).sum() for part in measured)
    index = marks.index(np.where(windows.targets == IGNORE, 0, windows.tokens))
    assert np.array_equal(windows.documents, index)
    for size, skip in ((1, 1), (900, 300)):  # several documents of a block
        parts = [held_out_windows(source, 9, b) for b in ((skip, "tokens"), (size, "tokens", skip))]
        both = [part.targets[part.targets != IGNORE] for part in parts]
        assert np.array_equal(np.concatenate(both), flat[: sum(map(len, both))])
        assert len(both[0]) >= skip and len(both[1]) >= size
    # Never trained on, a source is measured whole.
    assert held_out_windows(source, SEQ_LEN, (10**9, "bytes"), SPLITS).n_bytes == sum(
        len(text.encode()) for text in TEXTS
    )
    # Tokens that are shifted by one are noticed.
    shifted = make_source(tmp_path, "shifted", [np.roll(np.concatenate(trained), 1).astype("<u2")])
    assert not np.array_equal(
        RowStream({"a": shifted}, {"a": 1.0}, SEQ_LEN, 2, seed=1).rows(positions), rows
    )


def test_one_document_at_least_of_fifty_is_held_out(tmp_path):
    number = min(range(79), key=hashed)
    assert not [i for i in range(79) if hashed(i) < 2**32 // 50]
    source = prepare(write(tmp_path, "datatrove", DOCUMENTS[:79]))
    windows = held_out_windows(source, 999, (1, "bytes"))
    assert windows.targets[0][: len(DOCUMENTS[number])].tolist() == DOCUMENTS[number].tolist()


@pytest.mark.parametrize("kind", ["megatron int32", "datatrove", "datasets", "uint16"])
def test_documents_that_no_token_ends_are_masked_where_they_are_stored(tmp_path, kind):
    documents = [document[:-1] for document in DOCUMENTS]
    args = write(tmp_path, kind, documents, document_mask="ignore")
    if kind == "uint16":
        refused(lambda: prepare(args), "data.document_mask = ignore", "data.sources.a", "eos")
        assert prepare(replace(args, document_mask="none")).eos_id is None
        return
    source = prepare(args)
    stream = RowStream({"a": source}, {"a": 1.0}, SEQ_LEN, 2, seed=1)
    positions = np.arange(500)
    held = set(held_out(len(documents)))
    trained = [d for i, d in enumerate(documents) if i not in held]
    number = np.repeat(np.arange(len(trained)), list(map(len, trained)))
    starts = stream.source_rows(positions)[1] * SEQ_LEN
    expected = number[starts[:, None] + np.arange(SEQ_LEN + 1)]
    made = documents_of(stream, DocumentMarks(None, EOS, False))(positions)
    assert np.array_equal(made, expected - expected[:, :1])
    assert made.max() > 0 and not np.array_equal(made, np.roll(expected, 1, 1) - expected[:, :1])
    windows = held_out_windows(source, SEQ_LEN, (10**9, "tokens"))
    first = np.concatenate([[0], np.cumsum([len(documents[i]) for i in held_out(len(documents))])])
    begins = np.flatnonzero(np.diff(windows.documents.reshape(-1), prepend=-1) > 0)
    assert set(begins) - set(range(0, windows.tokens.size, SEQ_LEN)) <= set(first.tolist())


def cut(path, n):
    os.truncate(path, path.stat().st_size + n)


def put(path, at, value, kind):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(np.array(value, kind).tobytes())


def exchange(path, old, new):
    """Put the bytes `new` wherever a file has `old`."""
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def arrow_of(folder):
    """The first .arrow file; its offsets of 99 documents, and a header's row count, as bytes."""
    path = min(folder.glob("a/*.arrow"))
    offsets = np.cumsum([0, *map(len, DOCUMENTS[:99])]).astype("<i4")
    return path, offsets, np.int64(next(iter(pa.ipc.open_stream(path))).num_rows).tobytes()


def claim_rows(folder, n):
    path, _, rows = arrow_of(folder)
    exchange(path, rows, np.int64(n).tobytes())


def set_offset(folder, i, value):
    path, offsets, _ = arrow_of(folder)
    exchange(path, offsets.tobytes(), np.where(np.arange(100) == i, value, offsets).tobytes())


def write_arrow(folder, columns):
    path, table = arrow_of(folder)[0], pa.table(*columns)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


# Ends that go up and down, and whose differences in 64 bits are none below 0.
WRAPPING = [2**63 - 1, -(2**63), -1]

# what is done to the folder of a source, and what the refusal names
DAMAGE = {
    "uint16": [
        (lambda f: cut(f / "a.bin", -1), ("a.bin", "no multiple of 2")),
        (lambda f: (f / "a.bin").write_bytes(b""), ("a.bin: has no tokens",)),
        (
            lambda f: put(f / "a.bin", 40, 999, "<u2"),
            ("a.bin: byte 40: token 999", "of 258"),
        ),
    ],
    "llm.c": [
        (lambda f: cut(f / "a.bin", -2), ("a.bin", "of its header need")),
        (lambda f: cut(f / "a.bin", 2), ("a.bin", "of its header need")),
        (
            lambda f: (put(f / "a.bin", 8, -9, "<i4"), os.truncate(f / "a.bin", 1024 - 18)),
            ("a.bin: has no tokens",),
        ),
    ],
    "megatron int32": [
        (lambda f: cut(f / "a.bin", -4), ("a.idx", "a.bin has")),
        (lambda f: cut(f / "a.bin", -3), ("a.bin", "no multiple of 4")),
        (lambda f: cut(f / "a.idx", -8), ("a.idx", "2,500 sequences need")),
        (lambda f: cut(f / "a.idx", -(10**4)), ("a.idx", "sequences need")),
        (lambda f: (f / "a.idx").write_bytes(b""), ("a.idx", "MMIDIDX")),
        (lambda f: (f / "a.idx").write_bytes(b"x" * 99), ("a.idx", "MMIDIDX")),
        (lambda f: put(f / "a.idx", 17, 6, "u1"), ("a.idx", "type 6", "whole numbers")),
        (lambda f: put(f / "a.idx", 34, 9, "<i4"), ("a.idx", "do not follow one another")),
        (lambda f: put(f / "a.idx", 34 + 12 * 2500 + 800, WRAPPING, "<i8"), ("do not cover",)),
        (lambda f: put(f / "a.bin", 0, -1, "<i4"), ("a.bin: byte 0: token 4,294,967,295",)),
    ],
    "datatrove": [
        (lambda f: (f / "a.ds.index").unlink(), ("a.ds.index: cannot be read (No such file",)),
        (lambda f: cut(f / "a.ds", -2), ("a.ds.index", "a.ds has")),
        (lambda f: cut(f / "a.ds.index", -4), ("a.ds.index", "no multiple of 8")),
        (lambda f: cut(f / "a.ds.index", -8), ("a.ds.index", "a.ds.metadata")),
        (lambda f: put(f / "a.ds.index", 0, 10**6, "<u8"), ("a.ds.index",)),
        (lambda f: put(f / "a.ds.index", 800, WRAPPING, "<i8"), ("a.ds.index", "a.ds has")),
        (lambda f: (f / "a.ds.metadata").write_text("x"), ("a.ds.metadata",)),
    ],
    "datasets": [
        (lambda f: cut(next((f / "a").glob("*00001-of*.arrow")), -9000), (".arrow",)),
        (lambda f: claim_rows(f, 10**6), (".arrow: is cut or damaged",)),
        (lambda f: claim_rows(f, 1700), (".arrow: is cut or damaged",)),
        (lambda f: claim_rows(f, -1), (".arrow: is cut or damaged",)),
        (lambda f: set_offset(f, 50, 2**30), (".arrow: is cut or damaged", "offset")),
        (lambda f: set_offset(f, 50, 2), (".arrow: is cut or damaged", "offset")),
        (lambda f: set_offset(f, 0, -9), (".arrow: is cut or damaged", "offset")),
        (lambda f: put(arrow_of(f)[0], 24, [255] * 8, "u1"), (".arrow: cannot be read as Arrow",)),
        (
            lambda f: exchange(arrow_of(f)[0], b"input_ids", b"input_id\xff"),
            (".arrow: cannot be read as Arrow",),
        ),
        (
            lambda f: write_arrow(f, ([[[1]], [[2]]], ["input_ids"] * 2)),
            (".arrow: its input_ids are null",),
        ),
    ],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused_by_file_and_place(tmp_path, kind):
    for number, (damage, names) in enumerate(DAMAGE[kind]):
        folder = tmp_path / str(number)
        folder.mkdir()
        args = write(folder, kind)
        damage(folder)
        refused(lambda args=args: prepare(args), *names)


OBSTACLES = {
    "pipe": (os.mkfifo, "is not a file"),
    "folder": (os.mkdir, "is not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a file"),
    "broken link": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "circular link": (lambda path: path.symlink_to(path), "symbolic links"),
    "no permission": (lambda path: path.touch(0), "Permission denied"),
}


@pytest.mark.parametrize("name", ["a.idx", "a.ds.index", "a.ds.metadata"])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_read_beside_the_tokens_must_be_a_file(tmp_path, name, obstacle):
    if obstacle == "no permission" and os.geteuid() == 0:
        pytest.skip("root may read every file")
    args = write(tmp_path, "megatron int32" if name == "a.idx" else "datatrove", DOCUMENTS[:9])
    (tmp_path / name).unlink()
    make, reason = OBSTACLES[obstacle]
    make(tmp_path / name)
    wrong = f"{tmp_path / name}: cannot be read ("
    refused(lambda: check_sources(args, BYTES), wrong, reason)


@pytest.mark.parametrize("kind", ["uint16", "llm.c", "megatron int32", "datatrove", "datasets"])
def test_a_token_file_that_cannot_be_read_is_named(tmp_path, kind):
    args = write(tmp_path, kind, DOCUMENTS[:9])
    files = source_files("a", args)
    path = Path(files[-1].full)
    path.unlink()
    path.mkdir()
    refused(lambda: open_files("a", args, BYTES, files), path)


@pytest.mark.parametrize("kind", ["megatron int32", "datatrove"])
def test_an_index_that_changes_changes_no_row_of_a_run_and_is_refused_at_its_start(tmp_path, kind):
    args = write(tmp_path, kind)
    index = tmp_path / ("a.idx" if kind != "datatrove" else "a.ds.index")
    source = prepare(args)

    def rows():
        stream = RowStream({"a": source}, {"a": 1.0}, SEQ_LEN, 2, seed=1)
        index = documents_of(stream, DocumentMarks(None, EOS, False))(np.arange(200))
        return np.stack([stream.rows(np.arange(200)), index])

    before = rows()
    # An index of the same tokens: the first two documents are one.
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", kind, [np.concatenate(DOCUMENTS[:2]), *DOCUMENTS[2:]])
    index.write_bytes((tmp_path / "other" / index.name).read_bytes())
    assert np.array_equal(rows(), before)
    refused(lambda: open_sources(args, BYTES), "data.sources.a: the index", "has changed")
    assert not np.array_equal(prepare(args).files[0].ends, source.files[0].ends)
    os.truncate(index, 0)
    assert np.array_equal(rows(), before)
    refused(lambda: open_sources(args, BYTES), f"{index}: is not the index")


@pytest.mark.parametrize(
    "change",
    [lambda f: put(f, 2 * 5000, 98, "<u2"), lambda f: cut(f, 2), lambda f: cut(f, -2)],
    ids=["overwritten", "longer", "shorter"],
)
@pytest.mark.parametrize("kind", ["uint16", "datatrove", "datasets"])
def test_tokens_that_change_during_a_run_end_it_by_name(tmp_path, kind, change):
    source = prepare(write(tmp_path, kind))
    stream = RowStream({"a": source}, {"a": 1.0}, SEQ_LEN, 2, seed=1)
    stream.rows(np.arange(16))
    path = Path(source.files[0].part.full)
    change(path)
    refused(lambda: stream.rows(np.arange(16)), f"{path}: ", "while a run uses them")


@pytest.mark.parametrize("kind", ["megatron int32", "datatrove", "datasets"])
def test_documents_without_tokens_are_none(tmp_path, kind):
    none = np.empty(0, np.int64)
    documents = [none, *DOCUMENTS[:60], none, none, *DOCUMENTS[60:150], *[none] * 70]
    source = prepare(write(tmp_path, kind, documents))
    flat = held_out_windows(source, SEQ_LEN, (10**9, "bytes"), SPLITS).targets
    measured = [documents[i] for i in sorted(range(len(documents)), key=hashed)]
    assert np.array_equal(flat[flat != IGNORE], np.concatenate(measured))
    trained = [d for i, d in enumerate(documents) if i not in set(held_out(len(documents)))]
    assert np.array_equal(train_tokens(source), np.concatenate(trained))
    spans = list(source.train_spans(0, source.n_tokens))
    assert [n for _, _, n, _ in spans] == [len(d) for d in trained if len(d)]


def test_files_of_several_forms_and_uses_that_need_text_are_refused(tmp_path):
    args = write(tmp_path, "uint16")
    write_megatron(tmp_path / "b.bin", DOCUMENTS[:9])
    both = SourceFiles(["a.bin", "b.bin"])
    refused(
        lambda: prepare(replace(args, source_files={"a": both})), "a.bin (uint16)", "b.bin (meg"
    )
    write_llmc(tmp_path / "c.bin", DOCUMENTS, "u4")
    write_llmc(tmp_path / "d.bin", DOCUMENTS)
    sizes = SourceFiles(["c.bin", "d.bin"])
    refused(lambda: prepare(replace(args, source_files={"a": sizes})), "c.bin of 4", "d.bin of 2")
    refused(lambda: prepare(args, replace(BYTES, vocab_size=10**5)), "a.bin", "uint16 or uint32")
    refused(lambda: list(mixture_texts(args, 10**6)), "data.sources.a: has files of tokens")
    talk = replace(args, chat=ChatArgs())
    refused(lambda: open_files("a", talk, BYTES, source_files("a", talk)), "a.bin has tokens")


def test_what_a_sample_does_not_have_is_found_in_its_row_and_by_verify(tmp_path):
    args = write(tmp_path, "uint16")
    source, file = prepare(args), tmp_path / "a.bin"
    at = 2 * 5000  # between the first two of the places that are sampled
    put(file, at, 999, "<u2")
    os.utime(file, ns=(0, 0))
    names = ("a.bin: byte 10,000: token 999", "vocabulary of 258")
    refused(lambda: train_tokens(source), "a.bin: has changed")
    refused(lambda: open_sources(args, BYTES), "a.bin: has changed")
    refused(lambda: train_tokens(prepare(args)), *names)
    refused(lambda: verify_source("a", args, BYTES), *names)
    put(file, at, 97, "<u2")
    assert "1 file, 152,480 tokens" in (said := verify_source("a", args, BYTES))
    assert "hashes recorded" in said and "as recorded" in verify_source("a", args, BYTES)
    os.utime(file, ns=(1, 1))  # touched: read again, and the same
    assert prepare(args).fingerprint == source.fingerprint
    put(file, at, 98, "<u2")
    os.utime(file, ns=(2, 2))
    record = shard_folder("a", args, BYTES) / TOKEN_RECORD
    for look in (lambda: prepare(args), lambda: verify_source("a", args, BYTES)):
        refused(look, "a.bin: has changed since", record)
    record.unlink()
    assert prepare(args).fingerprint == source.fingerprint  # which is that of the sample
    put(file, 0, 98, "<u2")
    assert prepare(args).fingerprint != source.fingerprint
    file.unlink()  # text takes the place of the tokens, and tokens that of the text
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert Prepared(args).built and not open_sources(args, BYTES)["a"].in_place
    (tmp_path / "a.jsonl").unlink()
    assert prepare(write(tmp_path, "uint16")).in_place


def test_the_record_has_the_tokenizer_as_the_manifest_of_shards_has_it(tmp_path):
    args = write(tmp_path, "uint16")
    source, record = prepare(args), shard_folder("a", args, BYTES) / TOKEN_RECORD
    prepared = record.read_bytes()
    about = {"fingerprint": BYTES.fingerprint(), "vocab_size": 258, "bos_id": BOS, "eos_id": EOS}
    assert json.loads(prepared)["tokenizer"] == {"name": "bytes", **about}
    write_jsonl(tmp_path / "b.jsonl", TEXTS)
    of_shards = Prepared(make_args(tmp_path), "b").source.manifest.tokenizer
    assert json.loads(prepared)["tokenizer"] == of_shards
    del (earlier := json.loads(prepared))["tokenizer"]  # a record of an earlier version
    record.write_text(json.dumps(earlier))
    assert open_sources(args, BYTES)["a"].fingerprint == source.fingerprint
    verify_source("a", args, BYTES)
    assert json.loads(record.read_bytes())["tokenizer"] == of_shards


def test_records_of_tokens_and_arrow_files_of_text_become_the_shards_of_their_text(tmp_path):
    from datasets import Dataset

    write_jsonl(tmp_path / "text.jsonl", TEXTS)
    ids = [[BOS, *text.encode(), EOS] for text in TEXTS]
    Dataset.from_dict({"input_ids": ids}).to_parquet(str(tmp_path / "ids.parquet"))
    Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "arrow"))
    names = ("text", "ids", "arrow")
    made = {name: Prepared(make_args(tmp_path), name).source for name in names}
    assert len({source.fingerprint for source in made.values()}) == 1
    assert len({held_out_windows(s, 100, (9**9, "bytes")).text for s in made.values()}) == 1
    text = made["text"].fingerprint
    for kind in (
        pa.large_list(pa.int64()),
        pa.list_view(pa.int32()),
        pa.large_list_view(pa.uint16()),
    ):
        pq.write_table(pa.table({"input_ids": pa.array(ids, kind)}), tmp_path / "ids.parquet")
        assert Prepared(make_args(tmp_path), "ids").source.fingerprint == text
    floats = pa.array([[1.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"input_ids": floats}), tmp_path / "floats.parquet")
    wrong = "floats.parquet:1: tokens are not whole numbers (column input_ids is list<"
    assert "text_key" not in refused(lambda: Prepared(make_args(tmp_path), "floats"), wrong)
    Dataset.from_dict({"input_ids": [[1], [258]]}).to_parquet(str(tmp_path / "b.parquet"))
    wrong = "b.parquet:2: token outside the vocabulary"
    refused(lambda: Prepared(make_args(tmp_path), "b"), wrong)


@pytest.mark.parametrize(
    "kind, old, new",
    [
        (pa.string(), np.int64(2500), np.int64(10**6)),  # rows
        (pa.string(), FIRST_SIZES.astype("<i4"), np.full(9, 2**30, "<i4")),  # offsets
        (pa.large_string(), FIRST_SIZES, np.full(9, 2**50)),
        (
            pa.dictionary(pa.int32(), pa.string()),
            FIRST_SIZES.astype("<i4"),
            np.full(9, 9**9, "<i4"),
        ),
    ],
    ids=["rows", "offsets", "long", "dictionary"],
)
def test_an_arrow_file_of_text_that_points_outside_itself_is_damaged(tmp_path, kind, old, new):
    (tmp_path / "a").mkdir()
    path, table = tmp_path / "a" / "0.arrow", pa.table({"text": pa.array(TEXTS).cast(kind)})
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    exchange(path, old.tobytes(), new.tobytes())
    refused(lambda: Prepared(make_args(tmp_path)), f"{path}:1: damaged file (as arrow: ")


def test_a_tokenizer_that_does_not_decode_gives_nats_per_token_alone(tmp_path, caplog):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {chr(i): i for i in range(256)} | {"<s>": 256, "</s>": 257}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.save(str(tmp_path / "tokenizer.json"))
    args = TokenizerArgs("hf", str(tmp_path / "tokenizer.json"))
    source = prepare(write(tmp_path, "datatrove", tokenizer=args), build_tokenizer(args))
    with caplog.at_level(logging.INFO, "lingua"):
        windows = held_out_windows(source, SEQ_LEN, (10**4, "bytes"))
    assert windows.n_bytes is None and windows.have_text() and windows.text
    assert caplog.text.count("nats per token alone") == 1
