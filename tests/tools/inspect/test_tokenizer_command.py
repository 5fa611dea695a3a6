"""`python -m lingua tokenizer`: a tokenizer learned from the sources of a run, by their weights."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash
from transformers import AutoTokenizer

from lingua.data.args import DataArgs
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.commands.tokenizer import main
from lingua.tools.inspect.tokenizer import mixture_texts
from tests.tokenizer.test_tokenizer import TEXTS

pytestmark = pytest.mark.quick


def hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, of which one has several files, and a config."""
    root = tmp_path_factory.mktemp("text")
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 7))) for _ in range(60)]
    (root / "a").mkdir()
    for name, n in (("a/1", 300), ("a/2", 100), ("b", 60)):
        texts = [f"{name[0]} {' '.join(chance.choices(words, k=9))}" for _ in range(n)]
        lines = [json.dumps({"text": t}) + "\n" for t in texts]
        (root / f"{name}.jsonl").write_text("".join(lines))
    (root / "c.yaml").write_text(
        f"model: {{dim: 8}}\ndata:\n  root_dir: {root}\n  sources: {{a: 3, b: 1}}\n"
        f"  tokenizer: {{name: hf, path: {root}/made}}\n"  # which is made here
    )
    return root


@pytest.fixture(scope="module")
def made(text: Path) -> Path:
    main(["train", f"config={text}/c.yaml", "vocab_size=400", f"out={text}/made"])
    return text / "made"


def test_sources_give_text_by_their_weights_and_nothing_that_is_held_out(text):
    args = DataArgs(root_dir=str(text), sources={"a": 3.0, "b": 1.0, "c": 0.0})
    for max_bytes in (4_000, 10**9):  # less and more than there is
        sizes: Counter[str] = Counter()
        found = list(mixture_texts(args, max_bytes))
        for document in found:
            assert hash_of(document) >= 2**64 // 50
            sizes[document[0]] += len(document)
        assert sizes.total() == pytest.approx(min(max_bytes, 40_000), rel=0.2)
        assert sizes["a"] / sizes.total() == pytest.approx(3 / 4, rel=0.05)
    assert len(set(found)) > 440 and max(Counter(found).values()) > 1  # all, some of them again
    lines = [line for f in ("a/1", "a/2") for line in (text / f"{f}.jsonl").open()]
    half = DataArgs(root_dir=str(text), sources={"a": 1.0})
    taken = [lines.index(json.dumps({"text": t}) + "\n") for t in mixture_texts(half, 8_000)]
    assert len(set(taken)) == len(taken) and min(taken) < 300 <= max(taken)  # of both files


def test_the_only_document_that_is_held_out_is_not_learned_from(tmp_path):
    """Of few documents, of which no hash is of the lowest fiftieth."""
    texts = [t for t in map(str, range(40)) if hash_of(t) >= 2**64 // 50][:12]
    for i in range(12):  # one by one, and in one file
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{i:02}.txt").write_text(texts[i])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    for name in "ab":
        args = DataArgs(root_dir=str(tmp_path), sources={name: 1.0})
        assert set(mixture_texts(args, 1000)) == set(texts) - {min(texts, key=hash_of)}


def test_an_interrupt_ends_it_at_once_and_leaves_nothing(text):
    words = ["train", f"config={text}/c.yaml", f"out={text}/left", "text_bytes=1e12"]
    endless = "data.sources={a: 1e-9, b: 1}"  # b again and again
    command = [sys.executable, "-m", "lingua", "tokenizer", *words, endless]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as program:
        try:
            while b"documents read" not in os.read(program.stderr.fileno(), 4096):
                assert program.poll() is None
            program.send_signal(signal.SIGINT)
            assert b"Traceback" not in program.communicate(timeout=10)[1]
        finally:
            program.kill()
    assert program.returncode == -signal.SIGINT and not (text / "left").exists()


def test_it_keeps_every_text_and_has_bos_and_eos_here_and_in_transformers(made):
    tokenizer = build_tokenizer(TokenizerArgs(name="hf", path=str(made)))
    theirs = AutoTokenizer.from_pretrained(made)
    assert tokenizer.vocab_size == 400 and (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    for sample in TEXTS:
        ids = tokenizer.encode(sample)
        assert tokenizer.decode(ids) == sample and not np.isin(ids, (0, 1)).any()
        if "<|" not in sample:  # text here
            assert theirs.encode(sample, add_special_tokens=False) == ids.tolist()
            assert theirs.encode(sample) == [0, *ids.tolist()]  # as data.add_bos
    assert tokenizer.encode("a", bos=True, eos=True)[[0, -1]].tolist() == [0, 1]
