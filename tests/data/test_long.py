"""Long documents: the tokens of the whole, in memory that does not grow with them."""

import gzip
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from lingua.data.prepare.pieces import CONTEXT, TRIES, Pieces
from lingua.tokenizer import build_tokenizer
from tests.data.prepared import Prepared, error_of, expected_tokens, make_args, train_tokens
from tests.data.test_forms import write_form
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


# ---- documents that are not held in memory

# Long ones are read in blocks of 2**18 bytes: a boundary of these is inside a character.
LONG = ["x" + "😀" * 300_000, 'größer 東京 😀 \\ "x"\n' * 30_000]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "txt.gz"])
def test_long_and_short_documents_mix_in_every_form(tmp_path, form):
    texts = ["short", LONG[0], "short too", LONG[1], ""]
    if form.startswith("txt"):
        compress = gzip.compress if form == "txt.gz" else bytes
        for i, text in enumerate(texts):
            (tmp_path / "a").mkdir(exist_ok=True)
            data = b"\xef\xbb\xbf" + text.encode()
            (tmp_path / "a" / f"{i}.{form}").write_bytes(compress(data))
    else:
        write_form(tmp_path / "a", form, texts)
    source = Prepared(make_args(tmp_path, on_bad_record="skip")).source
    assert train_tokens(source) == expected_tokens(texts[:-1])
    assert source.manifest.skipped == {"empty document": 1}


def test_a_byte_that_is_not_utf_8_in_a_long_text_file_has_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 99_999 + b"caf\xe9\n" + b"line\n" * 99_999)
    assert f"{tmp_path / 'a.txt'}:100000: not UTF-8 (" in error_of(make_args(tmp_path))


# ---- memory

PEAK = """
import resource, sys
from tests.data.prepared import Prepared, make_args
from pathlib import Path
root, warm = map(Path, sys.argv[1:])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
Prepared(make_args(warm), processes=1)
before = peak()
source = Prepared(make_args(root), processes=1).source
print(peak() - before, source.n_tokens, source.manifest.total("heldout", "tokens"))
"""


@pytest.mark.parametrize("form", ["txt", "txt.zst"])
def test_memory_does_not_grow_with_a_file_that_is_one_document(tmp_path, form):
    """One of 50 MB takes at most 30 MB more than a small one; held whole it would be 50 MB as bytes
    and 160 MB as a str, which the emoji makes one of 4 bytes a character."""
    text = 'größer 😀 \\ "words" and a line\n'.encode() * 30_000
    repeats = 50_000_000 // len(text)
    path = tmp_path / "big" / "a" / f"x.{form}"
    path.parent.mkdir(parents=True)
    with pa.output_stream(str(path), compression="zstd" if form == "txt.zst" else None) as file:
        for _ in range(repeats):
            file.write(text)
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "a.txt").write_text("small", encoding="utf-8")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "big"), str(tmp_path / "warm")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    more, *tokens = map(float, done.stdout.split())
    assert sum(tokens) == repeats * len(text) + 2
    assert more < 30
