"""Held-out windows: every token of whole documents a target once, bytes those of the text."""

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from lingua.data import IGNORE
from lingua.data.args import ValidationArgs
from lingua.data.sources import TextData, held_out_windows
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.prepare import records, units
from tests.data.prepared import (
    BOS,
    EOS,
    Prepared,
    contents,
    is_held_out,
    make_args,
    train_tokens,
    write_jsonl,
)
from tests.mistakes import refused

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

TEXTS = [f"{i} größer als 東京 😀 {'y' * (i % 50)}" for i in range(3000)]


@pytest.fixture
def corpus(tmp_path):
    for i in range(3):
        write_jsonl(tmp_path / "a" / f"{i}.jsonl", TEXTS[i * 1000 : (i + 1) * 1000])
    return tmp_path


def held_out_in_order():
    return sorted(filter(is_held_out, TEXTS), key=lambda t: xxhash.xxh3_64_intdigest(t.encode()))


@pytest.mark.parametrize(
    "bos, eos, first", [(True, True, EOS), (False, True, EOS), (True, False, BOS)]
)
@pytest.mark.parametrize("seq_len", [16, 100_000])
def test_every_token_of_the_documents_is_a_target_once(corpus, seq_len, bos, eos, first):
    args = make_args(corpus, add_bos=bos, add_eos=eos)
    source = Prepared(args, processes=1, unit_bytes=50_000).source
    windows = held_out_windows(source, seq_len, (10**9, "tokens"))
    texts = held_out_in_order()
    stream = [t for s in texts for t in [*[BOS] * bos, *s.encode(), *[EOS] * eos]]
    flat = windows.targets.reshape(-1)
    assert flat[flat != IGNORE].tolist() == stream
    assert (flat[len(stream) :] == IGNORE).all() and len(flat) - len(stream) < seq_len
    assert windows.tokens.reshape(-1)[: len(stream)].tolist() == [first, *stream[:-1]]
    assert windows.tokens.shape == windows.targets.shape == (-(-len(stream) // seq_len), seq_len)
    assert windows.tokens.dtype == windows.targets.dtype == np.int64
    assert windows.n_bytes == sum(len(text.encode()) for text in texts)


def test_the_budget_takes_whole_documents_in_an_order_of_their_own(corpus, tmp_path_factory):
    source = Prepared(make_args(corpus), processes=1, unit_bytes=50_000).source
    texts = held_out_in_order()
    lengths = np.cumsum([len(text.encode()) + 2 for text in texts])
    for budget, documents in ((1, 1), (lengths[3], 4), (lengths[3] + 1, 5)):
        windows = held_out_windows(source, 32, (int(budget), "tokens"))
        assert (windows.targets != IGNORE).sum() == lengths[documents - 1]
        # What a skip of this budget leaves are all the others.
        rest = held_out_windows(source, 32, (10**9, "tokens", int(budget)))
        assert (rest.targets != IGNORE).sum() == lengths[-1] - lengths[documents - 1]
        assert bytes(rest.targets.flat[1:20].tolist()) == texts[documents].encode()[:19]
        second = held_out_windows(source, 32, (1, "tokens", int(budget)))
        assert second.n_bytes == len(texts[documents].encode())
    assert not held_out_windows(source, 32, (1, "tokens", int(lengths[-1]))).have_text()
    # Other files, other shards: the same documents.
    other = tmp_path_factory.mktemp("other")
    write_jsonl(other / "a.jsonl", TEXTS[::-1])
    rearranged = held_out_windows(Prepared(make_args(other)).source, 32, (500, "tokens"))
    windows = held_out_windows(source, 32, (500, "tokens"))
    assert np.array_equal(rearranged.tokens, windows.tokens)
    assert np.array_equal(rearranged.targets, windows.targets)


BOOK = "".join(random.Random(0).choices(["word ", "line\n", "größe "], k=20_000))


def held_out_tokens(source) -> list[int]:
    windows = held_out_windows(source, 64, (1, "tokens"))
    flat = windows.targets.reshape(-1)
    return flat[flat != IGNORE].tolist()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_the_end_of_a_source_that_is_one_long_document_is_held_out(tmp_path, name):
    if name == "a.txt":
        (tmp_path / name).write_text(BOOK, encoding="utf-8")
    else:
        write_jsonl(tmp_path / name, [BOOK])
    prepared = Prepared(make_args(tmp_path))
    train, held_out = train_tokens(prepared.source), held_out_tokens(prepared.source)
    head, tail = bytes(train[1:-1]).decode(), bytes(held_out[1:-1]).decode()
    assert [train[0], train[-1], held_out[0], held_out[-1]] == [BOS, EOS, BOS, EOS]
    assert head + tail == BOOK  # each token is in one of them
    assert 0.015 < len(tail) / len(BOOK) < 0.021 and tail[0] in " wlg"  # where a word begins
    assert held_out_windows(prepared.source, 64, (1, "tokens")).n_bytes == len(tail.encode())
    assert prepared.source.manifest.heldout_tail
    line = f"1 document, {len(train) + len(held_out):,} tokens (1.00 bytes a token); held out the "
    assert line + f"end of it, {len(held_out):,} tokens" in prepared.lines[-1]
    again = Prepared(make_args(tmp_path))
    assert not again.built and again.lines[-1] == prepared.lines[-1]


@pytest.mark.parametrize("text", [BOOK[:40_000], next(t for t in TEXTS if is_held_out(t))])
def test_a_short_source_of_one_document_is_trained_on_whatever_its_hash(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    source = Prepared(make_args(tmp_path)).source
    assert train_tokens(source) == [BOS, *text.encode(), EOS]
    assert not held_out_tokens(source) and not source.manifest.heldout_tail


def test_a_document_that_is_joined_by_others_is_held_out_or_not_by_its_hash(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text(BOOK, encoding="utf-8")
    assert Prepared(make_args(tmp_path), unit_bytes=1).source.manifest.heldout_tail
    (tmp_path / "a" / "2.txt").write_text("another", encoding="utf-8")
    both = Prepared(make_args(tmp_path), unit_bytes=1).source
    assert train_tokens(both) == [BOS, *BOOK.encode(), EOS, BOS, *b"another", EOS]
    assert not held_out_tokens(both) and not both.manifest.heldout_tail


def test_shards_of_an_earlier_version_keep_the_end_of_their_document(tmp_path, monkeypatch):
    """As lingua 0.1.0 wrote them: of one document it held out nothing, and recorded nothing."""
    (tmp_path / "a.txt").write_text(BOOK, encoding="utf-8")
    args, tokens = make_args(tmp_path), [BOS, *BOOK.encode(), EOS]
    with monkeypatch.context() as earlier:
        earlier.setattr(records, "MIN_TAIL", len(BOOK))
        folder = Prepared(args).source.folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert not manifest.pop("heldout_tail")
    for path in (folder.with_name(f"{folder.name}.verified"), *folder.glob("*.json")):
        path.unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": "of then"}))
    before = contents(folder)
    prepared = Prepared(args)
    assert not prepared.built and prepared.source.fingerprint == "of then"
    assert train_tokens(prepared.source) == tokens and not held_out_tokens(prepared.source)
    assert {name: contents(folder)[name] for name in before} == before
    (folder / "manifest.json").unlink()  # the control: shards that are built now
    assert train_tokens(Prepared(args).source) != tokens


UNLUCKY = [text for text in TEXTS if not is_held_out(text)][:30]  # none is one of fifty


def one_of(texts):
    """Its train and held-out tokens where the text of the lowest hash is held out."""
    lowest = min(texts, key=lambda text: xxhash.xxh3_64_intdigest(text.encode()))
    kept = [t for text in texts if text != lowest for t in (BOS, *text.encode(), EOS)]
    return kept, [BOS, *lowest.encode(), EOS]


@pytest.mark.parametrize("unit_bytes", [1, 10**6])  # a file, or all of them, in a shard
def test_one_of_ten_documents_is_held_out_at_least(tmp_path, unit_bytes):
    def prepare(n):
        for i, text in enumerate(UNLUCKY[:n]):
            (tmp_path / "a").mkdir(exist_ok=True)
            (tmp_path / "a" / f"{i:02}.txt").write_text(text, encoding="utf-8", newline="")
        made = Prepared(make_args(tmp_path), unit_bytes=unit_bytes)
        return made, (train_tokens(made.source), held_out_tokens(made.source))

    every = [t for text in UNLUCKY[:9] for t in (BOS, *text.encode(), EOS)]
    assert prepare(9)[1] == (every, [])
    for n in (10, 20, 30):
        made, tokens = prepare(n)
        assert tokens == one_of(UNLUCKY[:n])
        assert f"held out 1 document ({1 / n:.2%})" in made.lines[-1]
    again, tokens = prepare(30)
    assert not again.built and tokens == one_of(UNLUCKY)
    lucky = held_out_in_order()[0]  # with which nothing else is held out
    (tmp_path / "a" / "99.txt").write_text(lucky, encoding="utf-8", newline="")
    every = [t for text in UNLUCKY for t in (BOS, *text.encode(), EOS)]
    assert prepare(30)[1] == (every, [BOS, *lucky.encode(), EOS])
    names = {shard.name for shard in prepare(30)[0].source.manifest.shards}
    left = {path.name.split(".")[0] for path in made.source.folder.glob("*.tokens")}
    assert left == names  # nothing of the shards before


def test_equal_documents_are_held_out_together_or_none(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", UNLUCKY[:9] * 20)
    assert not held_out_tokens(Prepared(make_args(tmp_path)).source)
    write_jsonl(tmp_path / "b.jsonl", UNLUCKY[:10] * 2)
    source = Prepared(make_args(tmp_path), "b", unit_bytes=100).source
    kept, lowest = one_of(UNLUCKY[:10])
    assert train_tokens(source) == kept * 2 and held_out_tokens(source) == lowest
    assert source.manifest.total("heldout", "documents") == 2


def test_a_source_of_too_few_documents_is_named_with_how_many_it_takes(tmp_path, caplog):
    caplog.set_level("INFO")
    write_jsonl(tmp_path / "a.jsonl", UNLUCKY[:9])
    data = make_args(tmp_path, seq_len=32, global_batch_size=4)
    args = SimpleNamespace(data=data, seed=1, validation=ValidationArgs())
    tokenizer = build_tokenizer(data.tokenizer)
    TextData().prepare(args, tokenizer, lambda line: None)
    assert TextData().open(args, tokenizer).held_out == {}
    said = "no document of a is held out, so its loss is not measured: shards built of 10 different"
    assert said in caplog.text and "validation.sources" in caplog.text


def test_text_that_the_start_before_has_prepared_is_not_looked_for(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:500])
    data = make_args(tmp_path, seq_len=32, global_batch_size=4)
    args = SimpleNamespace(data=data, seed=1, validation=ValidationArgs())
    tokenizer, lines = build_tokenizer(data.tokenizer), []
    TextData().prepare(args, tokenizer, lines.append)
    folders = TextData().folders(args, tokenizer).values()
    (tmp_path / "a.jsonl").unlink()
    for unknown in ((), ["elsewhere"]):
        refused(lambda known=unknown: TextData(known).check(args, tokenizer), "data.sources.a")
    text = TextData(folders)
    text.check(args, tokenizer)
    text.prepare(args, tokenizer, lines.append)
    assert "its text was not looked at" in lines[-1]
    assert text.open(args, tokenizer).fingerprints.keys() == {"data.content.a"}
    for folder in folders:
        shutil.rmtree(folder)
    refused(lambda: TextData(folders).check(args, tokenizer), "data.sources.a")


def test_shards_of_an_earlier_version_that_hold_out_nothing_keep_their_rows(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", UNLUCKY)
    args = make_args(tmp_path)
    with monkeypatch.context() as earlier:
        earlier.setattr(units, "MIN_HELD_OUT_OF", len(UNLUCKY) + 1)
        folder = Prepared(args).source.folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.pop("lowest") == [] and manifest.pop("held_out_below") == 2**64 // 50
    (folder / "manifest.json").write_text(json.dumps(manifest))
    before = contents(folder)
    prepared = Prepared(args)
    assert not prepared.built and contents(folder) == before
    assert train_tokens(prepared.source) == [
        t for text in UNLUCKY for t in (BOS, *text.encode(), EOS)
    ]


def test_a_budget_of_bytes_is_the_same_text_under_every_tokenizer(corpus):
    vocabulary = {"[UNK]": 0} | {chr(c): c for c in range(32, 127)}
    made = HfTokenizer(models.BPE(vocabulary, merges=[], unk_token="[UNK]"))  # a token a character
    made.save(str(corpus / "tokenizer.json"))
    other = TokenizerArgs("hf", str(corpus))
    sources = [
        Prepared(make_args(corpus, **keys)).source
        for keys in ({}, {"tokenizer": other, "add_bos": False, "add_eos": False})
    ]
    sizes = np.cumsum([len(text.encode()) for text in held_out_in_order()])
    for budget, documents in ((1, 1), (sizes[5], 6), (sizes[5] + 1, 7)):
        windows = [held_out_windows(s, 32, (int(budget), "bytes")) for s in sources]
        assert [w.n_bytes for w in windows] == [sizes[documents - 1]] * 2
        assert windows[0].text == windows[1].text
    by_tokens = [held_out_windows(s, 32, (int(sizes[5]), "tokens")) for s in sources]
    assert by_tokens[0].n_bytes != by_tokens[1].n_bytes and by_tokens[0].text != by_tokens[1].text


def test_validation_sources_are_measured_whole_and_never_trained_on(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:500])
    write_jsonl(tmp_path / "v" / "1.jsonl", TEXTS[500:600])
    data = make_args(tmp_path, seq_len=32, global_batch_size=4)
    args = SimpleNamespace(data=data, seed=1, validation=ValidationArgs(bytes=10**6, sources=["v"]))
    tokenizer, lines = build_tokenizer(data.tokenizer), []
    TextData().check(args, tokenizer)
    TextData().prepare(args, tokenizer, lines.append)
    opened = TextData().open(args, tokenizer)
    measured = opened.held_out["v"]
    hashes = [xxhash.xxh3_64_intdigest(text.encode()) for text in TEXTS[500:600]]
    signed = np.array(hashes, np.uint64).view(np.int64).tolist()
    order = [text for _, text in sorted(zip(signed, TEXTS[500:600], strict=True))]
    expected = [t for text in order for t in (BOS, *text.encode(), EOS)]
    flat = measured.targets.reshape(-1)
    assert flat[flat != IGNORE].tolist() == expected
    assert measured.n_bytes == sum(len(text.encode()) for text in order)
    text, tokens = measured.n_bytes, len(expected)
    whole = f"100 documents, {tokens:,} tokens ({text / tokens:.2f} bytes a token)"
    assert f"validation.sources.v: {whole}" in lines  # all of it is measured
    assert any(line.startswith("data.sources.a: 500 documents, ") for line in lines)
    assert opened.rows.names == ("a",) and list(opened.fingerprints) == ["data.content.a"]
    assert set(opened.held_out) == {"a", "v"}
    parts = []
    for size, skip in ((999, 0), (10**6, 999)):  # of each source, what lies behind the first part
        args.validation = ValidationArgs(bytes=size, skip=skip, sources=["v"])
        parts.append(TextData().open(args, tokenizer).held_out["v"].n_bytes)
    assert 999 <= parts[0] < text == sum(parts)
