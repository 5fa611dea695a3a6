"""`python -m lingua data show`: a row's text and where it comes from, and sums of a mixture."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xxhash

from lingua.config.load import load, meta_lingua
from lingua.data.args import DataArgs, Stage
from lingua.data.sources import prepare_sources
from lingua.tokenizer.build import build_tokenizer
from lingua.tools.commands.data_show import ShowArgs
from lingua.tools.inspect.describe import describe_mixture, describe_row
from tests.mistakes import refused
from tests.programs import python

HEADER = re.compile(
    r"--- tokens (\d+) to (\d+) of the row: document (\d+) \((.*)\), "
    r"its tokens (\d+) to (\d+) of (\d+)"
)


class Corpus:
    """Two sources, and for every train token of them where it stands, found without the shards."""

    def __init__(self, root: Path):
        self.root = root
        (root / "b").mkdir(parents=True)
        # In the order of their names. Texts repeat, in a file and across files.
        self.texts = {
            root / "a.jsonl": [f"{i}: größer {'東京' * (i % 7)}\n" for i in range(400)],
            root / "b" / "1.jsonl": [f"line {i % 50}\r\n" for i in range(300)],
            root / "b" / "2.txt": ["One document.\n\nNo lines of JSON. " * 20],
            root / "b" / "3.jsonl": [f"line {i % 70}\r\n" for i in range(200)],
        }
        for path, texts in self.texts.items():
            if path.suffix == ".txt":
                path.write_bytes(texts[0].encode())
                continue
            lines = [json.dumps({"text": text}) for text in texts]
            lines.insert(10, "not JSON")  # left out, yet a line of the file
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.data = DataArgs(
            root_dir=str(root), sources={"a": 3.0, "b": 1.0}, seq_len=48, n_views=3,
            global_batch_size=8, stages=[Stage(20, {"b": 1.0})], on_bad_record="skip",
        )  # fmt: skip

    def documents(self, source: str) -> list[tuple[str, list[int]]]:
        """(file:line, tokens) of every train document."""
        found = []
        for path, texts in self.texts.items():
            if path.relative_to(self.root).parts[0].removesuffix(".jsonl") != source:
                continue
            for i, text in enumerate(texts):
                if xxhash.xxh3_64_intdigest(text.encode()) >= 2**64 // 50:
                    line = i + 1 + (i >= 10)
                    found.append((f"{path}:{line}", [256, *text.encode(), 257]))
        return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def opened(corpus):
    tokenizer = build_tokenizer(corpus.data.tokenizer)
    sources = prepare_sources(corpus.data, tokenizer, lambda line: None)
    return tokenizer, corpus.data.row_stream(sources, seed=5)


def test_a_row_has_the_lines_of_a_source_that_holds_out_its_lowest_hash_alone(tmp_path):
    def hash_of(text: str) -> int:
        return xxhash.xxh3_64_intdigest(text.encode())

    texts = [t for t in map(str, range(60)) if hash_of(t) >= 2**64 // 50][:12]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    n_tokens = sum(len(t) + 2 for t in texts if t != min(texts, key=hash_of))
    known = {"seq_len": n_tokens - 1, "n_views": 2, "global_batch_size": 1}
    args = DataArgs(root_dir=str(tmp_path), sources={"a": 1.0}, **known)
    tokenizer = build_tokenizer(args.tokenizer)
    stream = args.row_stream(prepare_sources(args, tokenizer, lambda line: None), seed=1)
    shown = "\n".join(describe_row(args, stream, tokenizer, 1, 0, 0))
    lines = [int(line) for line in re.findall(r"a\.jsonl:(\d+)", shown)]
    assert [texts[line - 1] for line in lines] == [t for t in texts if t != min(texts, key=hash_of)]


def test_a_row_is_shown_with_the_text_files_lines_and_documents_it_is_made_of(corpus, opened):
    tokenizer, stream = opened
    documents = {name: corpus.documents(name) for name in "ab"}
    lengths = {name: [len(tokens) for _, tokens in documents[name]] for name in "ab"}
    of_token = {k: [(i, j) for i, n in enumerate(v) for j in range(n)] for k, v in lengths.items()}
    seen = set()
    for step, row in ((1, 0), (2, 7), (20, 3), (21, 0), (21, 1), (30, 5), (10**9, 2)):
        position = (step - 1) * 8 + row
        shown = describe_row(corpus.data, stream, tokenizer, step, row, position)
        first, second, *rest = shown
        assert f"step {step}, row {row}: position {position:,} of the run" in first
        assert f"the stage from step {20 if step > 20 else 0}" in first
        name = second[0]
        seen.add(name)
        start = int(re.search(r"tokens ([\d,]+) to", second)[1].replace(",", ""))
        assert start % 48 == 0 and f"tokens {start:,} to {start + 49:,} of" in second

        where = of_token[name][start : start + 50]
        text = []
        for i, (header, shown) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
            begin, end, number, record, inside, inside_end, n = HEADER.fullmatch(header).groups()
            pieces = where[int(begin) : int(end) + 1]
            assert pieces[0] == (int(number), int(inside))
            assert pieces[-1] == (int(number), int(inside_end))
            expected_record, tokens = documents[name][int(number)]
            assert record == expected_record and int(n) == len(tokens)
            part = bytes(tokens[j] for _, j in pieces if tokens[j] < 256)
            assert shown == part.decode("utf-8", errors="replace")
            text.append(shown)
            assert i or begin == "0"
        assert int(end) == 49
        (row_tokens,) = stream.rows([position])
        assert [documents[name][i][1][j] for i, j in where] == row_tokens.tolist()
    assert seen == {"a", "b"}


def test_the_summary_is_what_counting_by_hand_gives(corpus, opened):
    _, stream = opened
    first, _, a, b, *rest = describe_mixture(corpus.data, stream, steps=300)
    assert first == "300 steps of 8 rows of 48 tokens: 2,400 rows, 115,200 tokens"
    read = {"a": 120, "b": 40 + 280 * 8}  # 160 rows at 3 to 1, then b alone
    for name, line in (("a", a), ("b", b)):
        documents = corpus.documents(name)
        tokens = sum(len(tokens) for _, tokens in documents)
        n_rows = (tokens - 2) // 48
        numbers = [len(documents), tokens, n_rows, read[name]]
        expected = [name, *(f"{n:,}" for n in numbers), f"{read[name] / n_rows:.3f}"]
        assert line.split() == expected
    assert "shares of the rows from step 0: a 75.0000%, b 25.0000%" in rest
    assert "shares of the rows from step 20: b 100.0000%" in rest


def test_it_runs_on_a_training_config_and_prepares_what_is_missing(corpus, tmp_path):
    (tmp_path / "c.yaml").write_text(
        f"model: {{dim: 8}}\noptim: {{lr: 1}}\nmyapp: {{x: 1}}\nsteps: 40\nseed: 5\n"
        f"data:\n  root_dir: {corpus.root}\n  cache_dir: {tmp_path / 'cache'}\n"
        "  sources: {a: 3, b: 1}\n  stages: [{from_step: 20, sources: {b: 1}}]\n"
        "  seq_len: 48\n  n_views: 3\n  on_bad_record: skip\n  prefetch_size: 4\n"
    )
    command = [*python(), "-m", "lingua", "data", "show", f"config={tmp_path / 'c.yaml'}"]
    options = {"capture_output": True, "encoding": "utf-8", "timeout": 120}
    done = subprocess.run([*command, "data.global_batch_size=8", "step=2", "row=7"], **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 2, row 7: position 15 of the run")
    assert "tokenizing" in done.stderr and "data.prefetch_size has no effect" in done.stderr
    with subprocess.Popen([*command, "data.global_batch_size=8"], stdout=-1, stderr=-1) as process:
        process.stdout.close()  # as `| head` does
        assert b"Error" not in process.stderr.read() and process.wait() == 141
    read = lambda: load(ShowArgs, command[-1:], meta_lingua, partial=True)  # noqa: E731
    refused(read, "data.global_batch_size", "config.yaml")  # a device count would be needed


def test_a_document_whose_text_has_changed_is_shown_from_its_tokens(corpus, opened):
    tokenizer, stream = opened
    path = corpus.root / "a.jsonl"
    before = path.read_bytes()
    position = 1 + [stream.names[i] for i in stream.source_rows(np.arange(1, 8))[0]].index("a")
    shown = corpus.data, stream, tokenizer, 1, position, position
    _, _, header, text, *_ = describe_row(*shown)
    assert f"({path}:" in header
    try:
        for changed in (before.replace(b": gr", b": Gr"), b"", None):
            path.unlink() if changed is None else path.write_bytes(changed)
            _, _, now, same, *_ = describe_row(*shown)
            assert "(of a.jsonl, which has changed since it was tokenized)" in now and same == text
    finally:
        path.write_bytes(before)
