"""What preparing text costs over the tokenizer's own library, and how fast rows come.

Everything is made on the spot: text from the standard library of this Python, tokenizers trained on
it, token shards. Each measurement alternates with its reference in one process, so that what else
the machine does affects both equally. CPU seconds are reported too: other processes change them
less.
"""

import base64
import functools
import io
import json
import multiprocessing
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tiktoken

from apps.bench.report import Report, Spread, spread
from lingua.data.args import DataArgs
from lingua.data.loader import Loader
from lingua.data.prepare.sources import prepare_source
from lingua.data.prepare.units import UNIT_BYTES
from lingua.data.shards import FORMAT_VERSION, MANIFEST, Manifest, Shard, Source, Split
from lingua.data.stream import RowStream
from lingua.format import align
from lingua.tokenizer import SPLIT, Tokenizer, TokenizerArgs, build_tokenizer

SAME_OBJECT = "tiktoken, over the object of ours"
TEXT_BYTES = 12_000_000
# How often the text comes in what each tokenizer is given: a round takes all of them seconds, and
# what a source costs once, whatever its size (files synced, a look at the disk), is small in it.
TEXT_REPEATS = {"tiktoken": 4, "sentencepiece": 2, "bytes": 12}
WARM_UP = 1000  # documents that are encoded before a round
SHARED_PARTS = 16  # of one size: as many for each of two processes
TRAINED_ON = 4_000_000  # characters of the text
VOCABULARY = 16_000
SEQ_LEN, ROWS, MICRO_ROWS = 2048, 64, 8
GATHERED_TOKENS = 2**27
SPARSE_TOKENS, SPARSE_SHARDS = 10**10, 80


def measure(keys: list[str], repeats: int = 8) -> Report:
    """`keys` are those of a training run, on which nothing here depends."""
    rows: list[tuple[str, ...]] = [("", "ours", "reference", "ratio", "range", "CPU ratio")]
    results: dict[str, Any] = {"repeats": repeats}
    with TemporaryDirectory() as folder:
        work = Path(folder)
        texts = write_text(work)
        tokenizers = make_tokenizers(work, texts)
        for name, tokenizer in tokenizers.items():
            _say(f"tokenizing with {name}")
            results[name] = measured = tokenizing(work, name, tokenizer, plain_encode, repeats)
            rows.append(_row(f"{name}, million tokens/s", measured))
        _say(SAME_OBJECT)
        tokenizer = tokenizers["tiktoken"]
        results[SAME_OBJECT] = measured = tokenizing(
            work, "tiktoken", tokenizer, same_encode, repeats
        )
        rows.append(_row(SAME_OBJECT, measured))
        _say("two processes")
        results["two processes"] = measured = two_processes(work, tokenizer, repeats)
        rows.append(_row("two processes over one, million tokens/s", measured))
        _say("rows")
        results["rows"] = measured = gathering(work, repeats)
        rows.append(_row("rows to micro-batches, million tokens/s", measured))
        _say("first batches")
        first_ms, grown_mib = first_batches(work, repeats)
        results |= {"first batch, ms": first_ms, "memory grown, MiB": grown_mib}
    lines = [
        *align(rows, left=1),
        "",
        f"first batch of {ROWS} rows at a random position of {SPARSE_TOKENS:.0e} tokens: "
        f"{first_ms.median:.1f} ms ({first_ms.low:.1f} to {first_ms.high:.1f}); memory after 200 "
        f"more: {grown_mib:+.1f} MiB",
        f"medians of {repeats} rounds. The references: a plain loop of the library's encode on "
        "texts in memory (tiktoken: encode_ordinary with Llama 3's pattern, which ours groups "
        "otherwise; then with ours; bytes: to a numpy array), one process of ours, a plain gather "
        "of the same rows from a memory map",
    ]
    return Report(lines, results)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _row(name: str, measured: dict[str, Spread]) -> tuple[str, ...]:
    ratio = measured["ratio"]
    return (
        name,
        f"{measured['ours'].median / 1e6:.2f}",
        f"{measured['reference'].median / 1e6:.2f}",
        f"{ratio.median:.2f}",
        f"{ratio.low:.2f} to {ratio.high:.2f}",
        f"{measured['cpu_ratio'].median:.2f}",
    )


@dataclass
class Round:
    """Units of work a second of ours and of the reference, by the clock and by processor time."""

    wall: dict[str, float]
    cpu: dict[str, float]


def alternate(
    ours: Callable[[], int], reference: Callable[[], int], turns: Iterable[int]
) -> list[Round]:
    """A round for each of `turns`, which takes them in the other order than the one before. Each
    function returns how much it did, which must be the same."""
    rounds = []
    for turn in turns:
        work, wall, cpu = {}, {}, {}
        for name, function in (("ours", ours), ("reference", reference))[:: 1 if turn % 2 else -1]:
            wall_0, cpu_0 = time.perf_counter(), time.process_time()
            work[name] = function()
            wall[name] = work[name] / (time.perf_counter() - wall_0)
            cpu[name] = work[name] / (time.process_time() - cpu_0)
        assert work["ours"] == work["reference"] > 0, work
        rounds.append(Round(wall, cpu))
    return rounds


def spreads(rounds: list[Round]) -> dict[str, Spread]:
    return {
        "ours": spread([r.wall["ours"] for r in rounds]),
        "reference": spread([r.wall["reference"] for r in rounds]),
        "ratio": spread([r.wall["ours"] / r.wall["reference"] for r in rounds]),
        "cpu_ratio": spread([r.cpu["ours"] / r.cpu["reference"] for r in rounds]),
    }


# ---- text and tokenizers


def write_text(work: Path) -> list[str]:
    """Documents of some thousand characters as JSON lines, in a source for each tokenizer."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [file for file in files if not {"site-packages", "test"} & set(file.parts)]
    whole = "\n".join(file.read_text("utf-8", errors="replace") for file in files)[:TEXT_BYTES]
    rng, texts, at = random.Random(0), [], 0
    while at < len(whole):
        length = int(rng.lognormvariate(8, 0.9)) + 1
        texts.append(whole[at : at + length])
        at += length
    lines = "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts))
    for name, repeats in TEXT_REPEATS.items():
        with open(_text_file(work, name), "w", encoding="utf-8") as file:
            for _ in range(repeats):
                file.write(lines)
    return texts


def _text_file(work: Path, source: str) -> Path:
    return work / f"{source}.jsonl"


def make_tokenizers(work: Path, texts: list[str]) -> dict[str, TokenizerArgs]:
    """A byte-level BPE as tiktoken ranks and a sentencepiece BPE, trained on some of the text."""
    import sentencepiece
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    some, size = [], 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size > TRAINED_ON:
            break
    bpe = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), level]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        some,
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    # The library spells a byte as itself where that is printable, else as the next free character.
    spelled = [b for b in range(256) if chr(b) in alphabet]
    byte_of = {chr(b): b for b in spelled}
    byte_of |= {chr(256 + i): b for i, b in enumerate(set(range(256)) - set(spelled))}
    vocabulary = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    ranks = (
        base64.b64encode(bytes(byte_of[c] for c in token)) + b" %d\n" % rank
        for token, rank in vocabulary
    )
    (work / "ranks").write_bytes(b"".join(ranks))

    model = io.BytesIO()
    lines = (line[:4000] for text in some for line in text.split("\n") if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=VOCABULARY, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    (work / "model").write_bytes(model.getvalue())
    return {
        "tiktoken": TokenizerArgs("tiktoken", str(work / "ranks")),
        "sentencepiece": TokenizerArgs("sp", str(work / "model")),
        "bytes": TokenizerArgs("bytes"),
    }


def plain_encode(args: TokenizerArgs) -> Callable[[str], Any]:
    """The library's own encode."""
    library = _built(args.name, args.path).library
    if args.name == "tiktoken":
        ranks = library._mergeable_ranks
        plain = tiktoken.Encoding("plain", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
        return plain.encode_ordinary
    if args.name == "sp":
        return library.encode
    return lambda text: np.frombuffer(text.encode(), np.uint8)


def same_encode(args: TokenizerArgs) -> Callable[[str], Any]:
    """tiktoken's own encode, of the object that ours uses too."""
    return _built(args.name, args.path).library.encode_ordinary


# ---- tokenizing


def tokenizing(
    work: Path,
    name: str,
    tokenizer: TokenizerArgs,
    reference: Callable[[TokenizerArgs], Callable[[str], Any]],
    repeats: int,
) -> dict[str, Spread]:
    """Text files to token shards in one process, over the library's encode of the same texts.

    Each round is a process of its own: where the tables happen to lie in its memory makes both
    sides some percent faster or slower, and not by the same."""
    rounds: list[Round] = []
    context = multiprocessing.get_context("spawn")
    for turn in range(repeats):
        with ProcessPoolExecutor(1, context) as process:
            rounds += process.submit(_tokenize, work, name, tokenizer, reference, turn).result()
    return spreads(rounds)


def _tokenize(
    work: Path,
    name: str,
    tokenizer: TokenizerArgs,
    plain: Callable[[TokenizerArgs], Callable[[str], Any]],
    turn: int,
) -> list[Round]:
    with open(_text_file(work, name), encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    encode = plain(tokenizer)

    def reference() -> int:
        return sum(len(encode(text)) for text in texts)

    def ours() -> int:
        return prepare(work, name, tokenizer, UNIT_BYTES)

    for text in texts[:WARM_UP]:
        encode(text)
    _remove_shards(work)
    return alternate(ours, reference, [turn])


def _remove_shards(work: Path) -> None:
    shutil.rmtree(work / ".tokens", ignore_errors=True)


def prepare(work: Path, source: str, tokenizer: TokenizerArgs, unit_bytes: int) -> int:
    """Build the shards of a source; its tokens, without the two that frame a document."""
    args = DataArgs(root_dir=str(work), sources={source: 1.0}, tokenizer=tokenizer)
    built = _built(tokenizer.name, tokenizer.path)
    manifest = prepare_source(
        source, args, built, _quiet, processes=1, unit_bytes=unit_bytes
    ).manifest
    return sum(
        manifest.total(split, "tokens") - 2 * manifest.total(split, "documents")
        for split in ("train", "heldout")
    )


@functools.cache
def _built(name: Any, path: str | None) -> Tokenizer:
    """Built once, as in a run: reading its file is no part of tokenizing."""
    return build_tokenizer(TokenizerArgs(name, path))


def _quiet(line: str) -> None:
    pass


def two_processes(work: Path, tokenizer: TokenizerArgs, repeats: int) -> dict[str, Spread]:
    """Two processes that were started by hand, over one, both from when they are ready."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=_worker, args=(of_worker, work, tokenizer), daemon=True)
        for _, of_worker in ends
    ]
    for process, (_, of_worker) in zip(processes, ends, strict=True):
        process.start()
        of_worker.close()  # in this process: else recv would wait for a process that has failed
    pipes = [own for own, _ in ends]
    for pipe in pipes:
        pipe.recv()
    rounds = []
    for turn in range(repeats + 1):
        wall, cpu = {}, {}
        for name, n in (("ours", 2), ("reference", 1))[:: 1 if turn % 2 else -1]:
            _remove_shards(work)
            begin = time.perf_counter()
            for pipe in pipes[:n]:
                pipe.send("go")
            done = [pipe.recv() for pipe in pipes[:n]]
            wall[name] = done[0][0] / (time.perf_counter() - begin)
            cpu[name] = n * done[0][0] / sum(seconds for _, seconds in done)
        rounds.append(Round(wall, cpu))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return spreads(rounds[1:])  # the first warms up


def _worker(pipe: Any, work: Path, tokenizer: TokenizerArgs) -> None:
    _built(tokenizer.name, tokenizer.path)
    unit_bytes = -(-_text_file(work, "tiktoken").stat().st_size // SHARED_PARTS)
    pipe.send("ready")
    while pipe.recv():
        cpu = time.process_time()
        pipe.send((prepare(work, "tiktoken", tokenizer, unit_bytes), time.process_time() - cpu))


# ---- rows


def gathering(work: Path, repeats: int) -> dict[str, Spread]:
    """Rows in random order from the page cache to micro-batches, over a plain gather of them."""
    path = work / "rows" / "0.train.tokens"
    path.parent.mkdir()
    tokens = np.random.default_rng(0).integers(0, 2**16, GATHERED_TOKENS, np.uint16)
    tokens.tofile(path)
    source = _source(path.parent, [GATHERED_TOKENS])
    stream = RowStream({"rows": source}, {"rows": 1.0}, SEQ_LEN, 2, seed=1)
    steps = 8 * GATHERED_TOKENS // (SEQ_LEN * ROWS) // 10
    memory = np.memmap(path, np.uint16, "r").view(np.ndarray)
    loader = _loader(stream, 0)

    def ours() -> int:
        for _ in range(steps):
            next(loader)
        return steps * ROWS * SEQ_LEN

    def reference() -> int:
        out = np.empty((ROWS, SEQ_LEN + 1), np.uint16)
        starts = np.random.default_rng(1).integers(0, len(memory) // SEQ_LEN - 1, steps * ROWS)
        for step in (starts * SEQ_LEN).reshape(steps, ROWS).tolist():
            for i, start in enumerate(step):
                out[i] = memory[start : start + SEQ_LEN + 1]
        return steps * ROWS * SEQ_LEN

    return spreads(alternate(ours, reference, range(repeats + 1))[1:])  # the first warms up


def first_batches(work: Path, repeats: int) -> tuple[Spread, float]:
    """(ms from opening the source to the first batch, MiB that memory grows by 200 later ones)."""
    folder, size = work / "sparse", SPARSE_TOKENS // SPARSE_SHARDS
    folder.mkdir()
    for i in range(SPARSE_SHARDS):
        with open(folder / f"{i}.train.tokens", "wb") as file:
            file.truncate(2 * size)
    (folder / MANIFEST).write_text(_source(folder, [size] * SPARSE_SHARDS).manifest.to_json())
    rng, seconds = random.Random(0), []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        source = Source.open(folder)
        stream = RowStream({"rows": source}, {"rows": 1.0}, SEQ_LEN, 2, seed=1)
        loader = _loader(stream, rng.randrange(10**12))
        next(loader)
        seconds.append(1000 * (time.perf_counter() - begin))
    grown = 0.0
    for _ in range(2):  # first what the allocator takes once, then what is asked
        before = _anonymous_mib()
        for _ in range(200):
            next(loader)
        grown = _anonymous_mib() - before
    return spread(seconds[1:]), grown


def _source(folder: Path, sizes: list[int]) -> Source:
    none = Split(0, 0, 0, "")
    shards = [Shard(str(i), 0, Split(size, 0, 0, ""), none) for i, size in enumerate(sizes)]
    manifest = Manifest(FORMAT_VERSION, "rows", {}, True, True, "<u2", [], shards, {}, 0, "")
    return Source(folder, manifest)


def _loader(stream: RowStream, position: int) -> Iterator[Any]:
    return Loader(stream, ROWS, 0, 1, ROWS // MICRO_ROWS, MICRO_ROWS).steps(position)


def _anonymous_mib() -> float:
    """Memory of this process that is no file's: pages of the shards belong to the system."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024
