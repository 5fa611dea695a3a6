"""Held-out windows: every token of whole documents a target once, bytes those of the text."""

import numpy as np
import pytest
import xxhash

from lingua.data import IGNORE
from lingua.data.heldout import held_out_windows
from tests.data.prepared import BOS, EOS, Prepared, is_held_out, make_args, write_jsonl

pytestmark = pytest.mark.quick

TEXTS = [f"{i} größer als 東京 😀 {'y' * (i % 50)}" for i in range(3000)]


@pytest.fixture
def corpus(tmp_path):
    for i in range(3):
        write_jsonl(tmp_path / "a" / f"{i}.jsonl", TEXTS[i * 1000 : (i + 1) * 1000])
    return tmp_path


def held_out_in_order():
    return sorted(
        filter(is_held_out, TEXTS), key=lambda text: xxhash.xxh3_64_intdigest(text.encode())
    )


@pytest.mark.parametrize(
    "bos, eos, first", [(True, True, EOS), (False, True, EOS), (True, False, BOS)]
)
@pytest.mark.parametrize("seq_len", [16, 100_000])
def test_every_token_of_the_documents_is_a_target_once(corpus, seq_len, bos, eos, first):
    args = make_args(corpus, add_bos=bos, add_eos=eos)
    source = Prepared(args, processes=1, unit_bytes=50_000).source
    windows = held_out_windows(source, seq_len, max_tokens=10**9)
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
        windows = held_out_windows(source, 32, int(budget))
        assert (windows.targets != IGNORE).sum() == lengths[documents - 1]
    # Other files, other shards: the same documents.
    other = tmp_path_factory.mktemp("other")
    write_jsonl(other / "a.jsonl", TEXTS[::-1])
    rearranged = held_out_windows(Prepared(make_args(other)).source, 32, 500)
    windows = held_out_windows(source, 32, 500)
    assert np.array_equal(rearranged.tokens, windows.tokens)
    assert np.array_equal(rearranged.targets, windows.targets)


def test_a_source_without_held_out_documents_has_no_windows(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["abc"])
    windows = held_out_windows(Prepared(make_args(tmp_path)).source, 8, 1000)
    assert windows.tokens.shape == windows.targets.shape == (0, 8)
    assert windows.n_bytes == 0
