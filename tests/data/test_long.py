"""Long documents: the tokens of the whole, in memory that does not grow with them."""

import io
import json
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from lingua.data.prepare import long_text, records
from lingua.data.prepare.long_text import LongText, elided_json, gathered, split_lines
from lingua.data.prepare.pieces import CONTEXT, TRIES, Pieces
from lingua.tokenizer import build_tokenizer
from tests.data.test_forms import write_form
from tests.data.test_prepare import Prepared, error_of, expected_tokens, make_args, train_tokens
from tests.test_tokenizer import CORPUS, KINDS, paths  # noqa: F401 - a fixture

WORDS = [word for text in CORPUS[:5] for word in text.split(" ")]
WORDS += [
    "\n",
    "\n\n",
    "  ",
    "   ",
    "1234567",
    "\r\n",
    "\t",
    "日本語の文章です。漢字",
    "'ll",
    "!\n",
]


def long_documents() -> dict[str, str]:
    rng = random.Random(0)
    return {
        "words": " ".join(rng.choice(WORDS) for _ in range(20_000)),
        "lines": "".join(CORPUS) * 30,
        "without spaces": "".join(rng.choice("日本語文章 。、漢字") for _ in range(60_000)),
        "one letter": "x" * 40_000,
        "no pattern": "".join(rng.choice("abc日1,") for _ in range(60_000)),
        "spaces": " " * 30_000 + "a b",
    }


# ---- pieces


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", long_documents())
def test_a_document_in_pieces_has_the_tokens_of_the_whole(kind, what, paths):  # noqa: F811
    tokenizer = build_tokenizer(paths[kind])
    text = long_documents()[what]
    whole = tokenizer.encode(text)
    for piece, block in ((3000, 1000), (3001, 10**6), (2 * CONTEXT + 2 * TRIES, 77)):
        pieces = Pieces(tokenizer, piece)
        blocks = (text[i : i + block] for i in range(0, len(text), block))
        parts = list(pieces.encode(blocks))
        assert len(parts) >= len(text) // piece
        ids = np.concatenate(parts)
        rough = what in ("one letter", "no pattern", "spaces")
        assert bool(pieces.rough_cuts) == rough
        # Ties of a unigram model may fall otherwise, and the phase of a run of spaces.
        if kind == "bytes" or not (kind == "sp-unigram" or what == "spaces"):
            assert np.array_equal(ids, whole)
        assert tokenizer.decode(ids) == tokenizer.decode(whole)


def test_a_cut_that_no_place_allows_is_the_same_every_time_and_counted():
    """Tokens of three characters, counted from the document's start: there is no place to cut."""

    class Threes:
        def encode(self, text: str) -> np.ndarray:
            return np.array([sum(map(ord, text[i : i + 3])) for i in range(0, len(text), 3)])

    text = "".join(random.Random(0).choices("abcdefgh", k=10_000))
    found = []
    for block in (13, 4096, 10**6):
        pieces = Pieces(Threes(), piece=2000)
        blocks = (text[i : i + block] for i in range(0, len(text), block))
        found.append(np.concatenate(list(pieces.encode(blocks))))
        assert pieces.rough_cuts >= 4
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


# ---- lines and files that are not held in memory


@pytest.fixture
def tiny(monkeypatch):
    """What is long and what is a block are a few bytes."""
    monkeypatch.setattr(long_text, "LONG", 40)
    monkeypatch.setattr(long_text, "ELIDED", 6)
    monkeypatch.setattr(long_text, "BLOCK", 7)
    monkeypatch.setattr(records, "BLOCK", 16)


@pytest.mark.parametrize("seed", range(30))
def test_lines_of_any_length_come_whole_from_any_blocks(tmp_path, tiny, seed):
    rng = random.Random(seed)
    lines = [b"x" * int(rng.expovariate(0.02)) for _ in range(40)]
    data = b"\n".join(lines)
    size = rng.randrange(1, 60)
    blocks = (data[i : i + size] for i in range(0, len(data), size))
    found = []
    for line in split_lines(blocks, tmp_path):
        if not isinstance(line, bytes):
            line.seek(0)
            line = line.read()
        found.append(line)
    assert found == (lines if lines[-1] else lines[:-1])
    whole = gathered((data[i : i + size] for i in range(0, len(data), size)), tmp_path)
    assert (whole if isinstance(whole, bytes) else whole.read()) == data


ALPHABET = ["a", "ü", "東", "😀", '"', "\\", "\n", "\t", "/", "\x01", "\u2028", "{", "u0041"]


@pytest.mark.parametrize("seed", range(200))
def test_text_in_a_long_line_of_json_is_what_a_plain_parser_finds(tiny, seed):
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choice(ALPHABET) for _ in range(int(rng.expovariate(0.05))))

    record = {text(): text(), "text": text(), "more": [text(), {"text": text()}], "n": 1.5}
    line = json.dumps(record, ensure_ascii=rng.random() < 0.5)
    short, texts = elided_json(io.BytesIO(line.encode()))
    parsed = json.loads(short)
    assert list(parsed)[1:] == list(record)[1:] or len(record) < 4
    found = texts.get(parsed["text"])
    assert (parsed["text"] if found is None else "".join(found)) == record["text"]
    assert (found is None) or found.measure()[0] == len(record["text"].encode())


@pytest.mark.parametrize(
    "line, kind",
    [
        (b'{"text": "' + b"x" * 60 + b'\\ud800 y"}', "not UTF-8"),
        (b'{"text": "' + b"x" * 60 + b'\\ud800"}', "not UTF-8"),
        (b'{"text": "' + b"x" * 60 + b'\\u12"}', "not JSON"),
        (b'{"text": "' + b"x" * 60 + b"\\q" + b"y" * 60 + b'"}', "not JSON"),
        (b'{"text": "' + b"x" * 60 + b"\xff" + b'"}', "not UTF-8"),
        (b'{"text": "' + "é".encode() * 60 + b'\xc3"}', "not UTF-8"),
        (b'{"text": "' + b"x" * 60, "not JSON"),
        (b'{"text": "' + b"x" * 60 + b'", }', "not JSON"),
        (b'{"text": null, "more": "' + b"x" * 60 + b'"}', "null text"),
        (b'{"more": "' + b"x" * 60 + b'"}', "no text"),
        (b'["' + b"x" * 60 + b'"]', "no text"),
        (b"y" * 90, "not JSON"),
        (b" " * 90, "blank line"),
    ],
    ids=lambda value: str(value)[-24:],
)
def test_a_bad_long_line_is_named_like_a_short_one(tmp_path, tiny, line, kind):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + line + b'\n{"text": "ok"}\n')
    assert f"{tmp_path / 'a.jsonl'}:2: {kind}" in error_of(make_args(tmp_path))
    skipping = Prepared(make_args(tmp_path, on_bad_record="skip")).source
    assert skipping.manifest.skipped == {kind: 1}
    assert train_tokens(skipping) == expected_tokens(["ok", "ok"])


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_long_and_short_documents_mix_in_every_form(tmp_path, tiny, form):
    texts = ["short", 'größer 東京 😀 \\ "x"\n' * 500, "short too", "y" * 41, "z" * 300_000]
    if form == "txt":
        for i, text in enumerate(texts):
            (tmp_path / "a").mkdir(exist_ok=True)
            (tmp_path / "a" / f"{i}.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    else:
        write_form(tmp_path / "a", form, texts)
    assert train_tokens(Prepared(make_args(tmp_path)).source) == expected_tokens(texts)


def test_a_byte_that_is_not_utf_8_in_a_long_text_file_has_its_line(tmp_path, tiny):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 50 + b"caf\xe9\n" + b"line\n" * 50)
    assert f"{tmp_path / 'a.txt'}:51: not UTF-8 (" in error_of(make_args(tmp_path))


def test_plain_blocks_part_no_character(tiny):
    text = "aü東😀" * 50
    assert "".join(LongText(io.BytesIO(text.encode()))) == text


# ---- memory

PEAK = """
import resource, sys
from tests.data.test_prepare import Prepared, make_args
from pathlib import Path
root, warm = map(Path, sys.argv[1:])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
Prepared(make_args(warm), processes=1)
before = peak()
source = Prepared(make_args(root), processes=1).source
print(peak() - before, source.n_tokens, source.manifest.total("heldout", "tokens"))
"""


@pytest.mark.parametrize("form", ["txt", "jsonl.zst"])
def test_memory_does_not_grow_with_a_document(tmp_path, form):
    """One document of 100 MB takes at most 80 MB more than small ones; held whole it would be 100
    MB as bytes and 400 MB as a str, which the emoji makes one of 4 bytes a character."""
    text = 'größer 😀 \\ "words" and a line\n' * 30_000
    repeats = 100_000_000 // len(text.encode())
    body = text.encode() if form == "txt" else json.dumps(text, ensure_ascii=False)[1:-1].encode()
    (tmp_path / "big").mkdir()
    path = tmp_path / "big" / f"a.{form}"
    codec = "zstd" if form.endswith("zst") else None
    with pa.output_stream(str(path), compression=codec) as file:
        if form != "txt":
            file.write(b'{"text": "')
        for _ in range(repeats):
            file.write(body)
        if form != "txt":
            file.write(b'", "id": 1}\n')
    write_form(tmp_path / "warm", "jsonl", ["small"]).rename(tmp_path / "warm" / "a.jsonl")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "big"), str(tmp_path / "warm")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    more, *tokens = map(float, done.stdout.split())
    assert sum(tokens) == repeats * len(text.encode()) + 2
    assert more < 80
