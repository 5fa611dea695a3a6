"""Long documents, tokenized in pieces, have the tokens of the whole."""

import gzip
import random

import numpy as np
import pytest

from lingua.tokenizer.build import build_tokenizer
from lingua.tools.prepare.pieces import CONTEXT, TRIES, Pieces
from tests.data.prepared import Prepared, check, error_of, make_args
from tests.data.test_forms import write_form
from tests.tokenizer.test_tokenizer import CORPUS, KINDS, paths  # noqa: F401 - a fixture

pytestmark = pytest.mark.quick

WORDS = [word for text in CORPUS[:5] for word in text.split(" ")]
WORDS += ["\n", "\n\n", "  ", "   ", "1234567", "\r\n", "\t", "日本語の文章です。漢字"]
WORDS += ["'ll", "!\n"]


def long_documents() -> dict[str, str]:
    rng = random.Random(0)
    return {
        "words": " ".join(rng.choice(WORDS) for _ in range(4_000)),
        "lines": "".join(CORPUS) * 6,
        "without spaces": "".join(rng.choice("日本語文章 。、漢字") for _ in range(15_000)),
        "one letter": "x" * 10_000,
        "no pattern": "".join(rng.choice("abc日1,") for _ in range(15_000)),
        "spaces": " " * 10_000 + "a b",
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", long_documents())
def test_a_document_in_pieces_has_the_tokens_of_the_whole(kind, what, paths):  # noqa: F811
    tokenizer = build_tokenizer(paths[kind])
    text = long_documents()[what]
    whole = tokenizer.encode(text)
    for piece in (3000, 2 * CONTEXT + 2 * TRIES):
        pieces = Pieces(tokenizer, piece)
        parts = list(pieces.encode(text))
        assert len(parts) >= len(text) // piece
        ids = np.concatenate(parts)
        rough = what in ("one letter", "no pattern", "spaces")
        assert bool(pieces.rough_cuts) == rough
        # Ties of a unigram model may fall otherwise, and the phase of a run of spaces.
        if kind == "bytes" or not (kind == "sp-unigram" or what == "spaces"):
            assert np.array_equal(ids, whole)
        assert tokenizer.decode(ids) == tokenizer.decode(whole)


def test_a_cut_that_no_place_allows_is_counted_and_loses_no_text():
    """Tokens of three characters, counted from the document's start: there is no place to cut."""

    class Threes:
        def encode(self, text: str) -> np.ndarray:
            return np.array([sum(map(ord, text[i : i + 3])) for i in range(0, len(text), 3)])

    text = "".join(random.Random(0).choices("abcdefgh", k=10_000))
    pieces = Pieces(Threes(), piece=2000)
    ids = np.concatenate(list(pieces.encode(text)))
    assert pieces.rough_cuts >= 4
    assert ids.sum() == sum(map(ord, text))


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
    check(source, texts[:-1])
    assert source.manifest.skipped == {"empty document": 1}


def test_a_byte_that_is_not_utf_8_in_a_long_text_file_has_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 99_999 + b"caf\xe9\n" + b"line\n" * 99_999)
    assert f"{tmp_path / 'a.txt'}:100000: not UTF-8 (" in error_of(make_args(tmp_path))
