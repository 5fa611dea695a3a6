"""`python -m lingua.tokenizer`: a tokenizer learned from the sources of a run, by their weights."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from transformers import AutoTokenizer

from lingua.data.args import DataArgs
from lingua.data.prepare.records import HELD_OUT_BELOW
from lingua.errors import UserError
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from lingua.tokenizer.__main__ import main, mixture_texts
from tests.test_tokenizer import TEXTS

pytestmark = pytest.mark.quick

REPO = Path(__file__).parents[1]


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


def command(*words: object, **env: str) -> None:
    line = [sys.executable, "-m", "lingua.tokenizer", *map(str, words)]
    subprocess.run(line, cwd=REPO, env=os.environ | env, check=True, timeout=60)


@pytest.fixture(scope="module")
def made(text: Path) -> Path:
    main(["train", f"config={text}/c.yaml", "vocab_size=400", f"out={text}/made"])
    return text / "made"


def test_sources_give_text_by_their_weights_and_nothing_that_is_held_out(text: Path) -> None:
    args = DataArgs(root_dir=str(text), sources={"a": 3.0, "b": 1.0, "c": 0.0})
    for most in (4_000, 10**9):  # less and more than there is
        sizes: Counter[str] = Counter()
        found = list(mixture_texts(args, most))
        for document in found:
            assert xxhash.xxh3_64_intdigest(document.encode()) >= HELD_OUT_BELOW
            sizes[document[0]] += len(document)
        assert sizes.total() == pytest.approx(min(most, 40_000), rel=0.2)
        assert sizes["a"] / sizes.total() == pytest.approx(3 / 4, rel=0.05)
    assert len(set(found)) > 440 and max(Counter(found).values()) > 1  # all, some of them again
    lines = [line for f in ("a/1", "a/2") for line in (text / f"{f}.jsonl").open()]
    half = DataArgs(root_dir=str(text), sources={"a": 1.0})
    taken = [lines.index(json.dumps({"text": t}) + "\n") for t in mixture_texts(half, 8_000)]
    assert len(set(taken)) == len(taken) and min(taken) < 300 <= max(taken)  # of both files


def test_it_keeps_every_text_and_has_bos_and_eos_here_and_in_transformers(made: Path) -> None:
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


def test_the_most_frequent_pair_is_merged_first(text: Path, made: Path) -> None:
    args = DataArgs(root_dir=str(text), sources={"a": 3.0, "b": 1.0})
    pairs: Counter[tuple[str, str]] = Counter()
    for document in mixture_texts(args, 10**9):
        for word in re.findall(r" ?[a-z]+", document):  # with the space before it
            pairs.update(pairwise(word.replace(" ", "\u0120")))  # as the file writes a space
    merges = json.loads((made / "tokenizer.json").read_text())["model"]["merges"]
    assert tuple(merges[0]) == pairs.most_common(1)[0][0]


def test_the_same_text_gives_the_same_files(text: Path, made: Path, tmp_path: Path) -> None:
    for n, seed in ((1, "1"), (4, "2")):
        out = tmp_path / seed
        command(
            "train", f"config={text}/c.yaml", "vocab_size=400", f"out={out}",
            RAYON_NUM_THREADS=str(n), PYTHONHASHSEED=seed,
        )  # fmt: skip
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (out / file).read_bytes() == (made / file).read_bytes()
    assert sorted(p.name for p in made.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_the_tokens_of_a_text_are_shown(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "a größer", "name=hf", f"path={made}"])
    first, *lines = capsys.readouterr().out.splitlines()
    n = len(lines) - 2
    assert first.startswith(f"hf: 400 tokens; the text is {n} tokens of 10 bytes, ")
    assert lines[0].split() == ["0", "bos"] and lines[-1].split() == ["1", "eos"]
    assert lines[1].endswith('"a"')
    main(["show", "hi", f"config={made.parent}/c.yaml"])
    assert "hf: 400 tokens; the text is 2 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], '"trian": must be train or show (did you mean "train"?)'),
        (["show"], "show: must have one text"),
        (["show", "two", "texts"], "show: must have one text"),
        (["show", "hi", "name=hf"], "path = null: must be given for the tokenizer hf"),
        (["train", "out={text}/new", "vocab_size=257"], "vocab_size = 257: must be at least 258"),
        (["train", "out={text}/a"], "exists already; must be a new or empty folder"),
        (["train", "out=/proc/none"], "out = /proc/none: cannot be made"),
        (["show", "hi", "path={text}/made"], "needs name=hf, sp or tiktoken; bytes has no file"),
        (["train", "vocab_size=300"], "out: must be given"),
        (["train", "out={text}/new", "data.sources={{no: 1}}"], "data.sources.no: there is no"),
        (["train", "out={text}/new", "data.sources={{bad: 1}}"], "bad.jsonl:2: not JSON"),
        (["train", "out={text}/new", "data.sources={{empty: 1}}"], "has no text to learn from"),
    ],
)
def test_what_cannot_be_made_or_shown_is_refused(
    text: Path, words: list[str], message: str
) -> None:
    (text / "bad.jsonl").write_text('{"text": "a line"}\n{"text": \n')
    (text / "empty.jsonl").write_text("")
    of_config = [f"config={text}/c.yaml"] if words[0] == "train" else []
    with pytest.raises(UserError) as refused:
        main([*(word.format(text=text) for word in words), *of_config])
    assert message in str(refused.value)
    assert not (text / "new").exists()


def test_a_small_text_gives_fewer_tokens_and_says_so(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text / "few.jsonl").write_text('{"text": "a few words"}\n' * 3)
    words = [f"config={text}/c.yaml", "data.sources={few: 1}", f"out={tmp_path / 'few'}"]
    main(["train", *words])
    assert "vocab_size = 32,000 needs more" in capsys.readouterr().out
