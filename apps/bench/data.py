"""What preparing text costs over the tokenizer's own library, and how fast rows come.

Text is that of the standard library of this Python, on which the tokenizers are trained.
"""

import base64
import io
import itertools
import json
import multiprocessing
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import sentencepiece
import tiktoken

from apps.bench.report import Report, Spread, quotients, spread
from apps.bench.turns import BySide, Side, Turns, take_round, take_turns
from lingua.base.errors import import_optional
from lingua.data.args import DataArgs
from lingua.data.files import TOKEN_FILES, FilePart
from lingua.data.loader import Loader
from lingua.data.shards import FORMAT_VERSION, SHARDS_MANIFEST, Manifest, Shard, Source, Split
from lingua.data.sources import prepare_source
from lingua.data.stream import RowStream
from lingua.data.token_formats import MEGATRON_HEAD, open_file
from lingua.data.token_source import TokenSource
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.tiktoken import SPLIT
from lingua.tools.inspect.tokenizer import BOS, EOS, train
from lingua.tools.prepare.units import UNIT_BYTES

SAME_OBJECT = "tiktoken, over the object of ours"
TEXT_BYTES = 12_000_000
EXCLUDED = {"site-packages", "test"}  # folders
# How often the text is repeated for each tokenizer: a round takes all of them seconds, and what a
# source costs once, whatever its size (files synced, a look at the disk), is small in it.
TEXT_REPEATS = {"tiktoken": 4, "sp": 2, "bytes": 12}
WARM_UP = 1000  # documents that are encoded before a round
SHARED_PARTS = 16  # parts of one size: as many for each of two processes
TRAINED_ON = 4_000_000  # characters of the text
VOCABULARY = 16_000
SEQ_LEN, ROWS, MICRO_ROWS = 2048, 64, 8
GATHERED_TOKENS = 2**27
DOCUMENT_TOKENS = 1000
VALUES = 50_000  # of these tokens
SPARSE_TOKENS, SPARSE_SHARDS = 10**10, 80


def measure(keys: list[str], repeats: int) -> Report:
    with TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizers = make_tokenizers(work, write_text(work))
        measured = {name: tokenizing(work, name, tokenizers[name], repeats) for name in tokenizers}
        measured["two processes over one"] = two_processes(work, tokenizers["tiktoken"], repeats)
        measured |= reading(work, repeats)
        first_ms, grown_mib = first_batches(work, repeats)
    rows = [{"": name, **speeds(pair)} for name, pair in measured.items()]
    notes = [
        "ours, reference: million tokens a second",
        f"first batch of {ROWS} rows at a random position of {SPARSE_TOKENS:.0e} tokens: "
        f"{first_ms} ms; memory after 200 more: {grown_mib:+.1f} MiB",
        f"medians of {repeats} rounds. The references: a plain loop of the library's encode on "
        "texts in memory (tiktoken: encode_ordinary with Llama 3's pattern, which ours groups "
        "otherwise; then with ours; bytes: to a numpy array), one process of ours, a plain gather "
        "of the same rows from a memory map, shards of the same number of tokens",
    ]
    return Report(rows, notes, {"first batch, ms": first_ms, "memory grown, MiB": grown_mib})


def speeds(pair: BySide) -> dict[str, Spread]:
    """Millions of tokens a second. AssertionError where the sides did not do the same work."""
    ours, reference = pair["ours"], pair["reference"]
    assert ours.results == reference.results and min(ours.results) > 0, pair
    speed = {k: spread(t.results[0] / 1e6 / s for s in t.seconds) for k, t in pair.items()}
    ratio = quotients(reference.seconds, ours.seconds)
    cpu_ratio = quotients(reference.cpu_seconds, ours.cpu_seconds)
    return {**speed, "ratio": ratio, "CPU ratio": cpu_ratio}


def write_text(work: Path) -> list[str]:
    """Documents of some thousand characters as JSON lines, in a source for each tokenizer."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    parts = (f.read_text("utf-8", "replace") for f in files if not EXCLUDED & set(f.parts))
    whole = io.StringIO("\n".join(parts)[:TEXT_BYTES])
    rng = random.Random(0)
    texts = list(iter(lambda: whole.read(int(rng.lognormvariate(8, 0.9)) + 1), ""))
    lines = "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts))
    for name, repeats in TEXT_REPEATS.items():
        (work / f"{name}.jsonl").write_text(lines * repeats, encoding="utf-8")
    return texts


def make_tokenizers(work: Path, texts: list[str]) -> dict[str, TokenizerArgs]:
    """A byte-level BPE as tiktoken ranks and a sentencepiece BPE, trained on some of the text."""
    byte_level = import_optional("transformers.convert_slow_tokenizer", "the measurement")
    byte_of = {character: byte for byte, character in byte_level.bytes_to_unicode().items()}
    sizes = itertools.accumulate(map(len, texts))
    some = [text for text, size in zip(texts, sizes, strict=True) if size <= TRAINED_ON]
    vocabulary = train(iter(some), VOCABULARY).get_vocab()
    tokens = sorted(vocabulary.keys() - {BOS, EOS}, key=vocabulary.__getitem__)
    ranks = (
        base64.b64encode(bytes(byte_of[c] for c in token)) + b" %d\n" % rank
        for rank, token in enumerate(tokens)
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
        SAME_OBJECT: TokenizerArgs("tiktoken", str(work / "ranks")),
    }


def tokenizing(work: Path, name: str, args: TokenizerArgs, repeats: int) -> BySide:
    """Text files to token shards in one process, over the library's encode of the same texts. Each
    round is a process of its own: where tables lie in its memory makes both sides faster or slower
    by some percent, and not by the same."""
    turns = BySide(Turns)
    for _ in range(repeats):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            turns = process.submit(tokenize_round, work, name, args, turns).result()
    return turns


def tokenize_round(work: Path, name: str, args: TokenizerArgs, turns: BySide) -> BySide:
    with open(work / f"{args.name}.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokenizer = build_tokenizer(args)  # once, as in a run
    encode = encoder(name, tokenizer.library)
    for text in texts[:WARM_UP]:
        encode(text)
    sides = {
        "ours": lambda: prepare(work, args, tokenizer, UNIT_BYTES),
        "reference": lambda: sum(len(encode(text)) for text in texts),
    }
    take_round(sides, turns, partial(shutil.rmtree, work / ".tokens", ignore_errors=True))
    return turns


def encoder(name: str, library: Any) -> Callable[[str], Any]:
    """The library's own encode; of tiktoken with Llama 3's pattern, or of the object of ours."""
    if name == "bytes":
        return lambda text: np.frombuffer(text.encode(), np.uint8)
    if name == "sentencepiece":
        return library.encode
    if name == SAME_OBJECT:
        return library.encode_ordinary
    ranks = library._mergeable_ranks
    plain = tiktoken.Encoding("plain", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    return plain.encode_ordinary


def prepare(
    work: Path, args: TokenizerArgs, tokenizer: Tokenizer, unit_bytes: int, processes: int = 1
) -> int:
    """Build the shards of a source; its tokens, without the two that frame a document."""
    source = str(args.name)
    data = DataArgs(root_dir=str(work), sources={source: 1.0}, tokenizer=args)
    prepared = prepare_source(
        source, data, tokenizer, lambda line: None, processes=processes, unit_bytes=unit_bytes
    )
    total = prepared.manifest.total
    return sum(total(s, "tokens") - 2 * total(s, "documents") for s in ("train", "heldout"))


def two_processes(work: Path, args: TokenizerArgs, repeats: int) -> BySide:
    """A preparation with two processes, from before they start, over one with one."""
    unit_bytes = -(-(work / f"{args.name}.jsonl").stat().st_size // SHARED_PARTS)
    one = partial(prepare, work, args, build_tokenizer(args), unit_bytes)
    sides = {"ours": partial(one, processes=2), "reference": one}
    remove = partial(shutil.rmtree, work / ".tokens", ignore_errors=True)
    return take_turns(sides, repeats, "two processes", 0, remove)


def reading(work: Path, repeats: int) -> dict[str, BySide]:
    """Random rows from the page cache to micro-batches: from shards over a plain gather of them,
    and from files of other tools over as many tokens in shards."""
    path = work / "rows" / "0.train.tokens"
    path.parent.mkdir()
    np.random.default_rng(0).integers(0, VALUES, GATHERED_TOKENS, np.uint16).tofile(path)
    memory = np.memmap(path, np.uint16, "r").view(np.ndarray)

    def read_from(source: Source | TokenSource) -> Side:
        return partial(read_rows, open_loader(source, 0), n_steps(source.n_tokens))

    shards = open_shards(path.parent, [GATHERED_TOKENS])
    sides: dict[str, Side] = {"ours": read_from(shards), "reference": partial(gather_rows, memory)}
    measured = {"rows of shards": take_turns(sides, repeats, "rows of shards")}
    for source in token_sources(work / "files", path):
        shards = open_shards(path.parent, [source.n_tokens])
        name = f"rows of {source.form} files over shards"
        sides = {"ours": read_from(source), "reference": read_from(shards)}
        measured[name] = take_turns(sides, repeats, name)
    return measured


def n_steps(n_tokens: int) -> int:
    """Steps that take four fifths of so many tokens."""
    return 8 * n_tokens // (SEQ_LEN * ROWS) // 10


def read_rows(loader: Iterator[Any], steps: int) -> int:
    for _ in range(steps):
        next(loader)
    return steps * ROWS * SEQ_LEN


def gather_rows(memory: np.ndarray) -> int:
    steps, out = n_steps(len(memory)), np.empty((ROWS, SEQ_LEN + 1), np.uint16)
    starts = np.random.default_rng(1).integers(0, len(memory) // SEQ_LEN - 1, steps * ROWS)
    for step in (starts * SEQ_LEN).reshape(steps, ROWS).tolist():
        for i, start in enumerate(step):
            out[i] = memory[start : start + SEQ_LEN + 1]
    return steps * ROWS * SEQ_LEN


def token_sources(folder: Path, tokens: Path) -> Iterator[TokenSource]:
    """The tokens of a plain file as files of other tools, in documents of DOCUMENT_TOKENS."""
    ends = np.arange(DOCUMENT_TOKENS, GATHERED_TOKENS + 1, DOCUMENT_TOKENS)
    ends[-1] = GATHERED_TOKENS
    lengths = np.diff(ends, prepend=0)
    folder.mkdir()
    for name in ("uint16.bin", "megatron.bin", "datatrove.ds"):
        (folder / name).hardlink_to(tokens)
    ends.astype("<i8").tofile(folder / "datatrove.ds.index")
    head = np.array([(b"MMIDIDX", 1, 8, len(ends), len(ends) + 1)], MEGATRON_HEAD)
    bounds = np.arange(len(ends) + 1, dtype="<i8")
    index = head, lengths.astype("<i4"), (2 * (ends - lengths)).astype("<i8"), bounds
    (folder / "megatron.idx").write_bytes(b"".join(part.tobytes() for part in index))
    offsets = np.concatenate([[0], ends[: len(ends) // 8]])
    values = np.fromfile(tokens, np.uint16, offsets[-1]).astype(np.int32)
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, values)})
    with pa.ipc.new_stream(str(folder / "datasets.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)  # rows, as datasets has
    tokenizer = replace(build_tokenizer(TokenizerArgs()), vocab_size=VALUES, eos_id=None)
    for path in sorted(folder.iterdir()):
        if path.suffix in TOKEN_FILES:
            info = path.stat()
            part = FilePart(path.name, str(path), info.st_size, info.st_mtime_ns, 0, 0)
            opened = open_file(path.stem, part, tokenizer.vocab_size, by_name=False)
            yield TokenSource("rows", path.stem, [opened], tokenizer)


def first_batches(work: Path, repeats: int) -> tuple[Spread, float]:
    """(ms from opening the source to the first batch, MiB that memory grows by 200 later ones)."""
    folder, size = work / "sparse", SPARSE_TOKENS // SPARSE_SHARDS
    folder.mkdir()
    for i in range(SPARSE_SHARDS):
        with open(folder / f"{i}.train.tokens", "wb") as file:
            file.truncate(2 * size)
    manifest = open_shards(folder, [size] * SPARSE_SHARDS).manifest
    (folder / SHARDS_MANIFEST).write_text(manifest.to_json())
    rng = random.Random(0)

    def first() -> Iterator[Any]:
        loader = open_loader(Source.open(folder), rng.randrange(10**12))
        next(loader)
        return loader

    turns = take_turns({"first": first}, repeats, "first batches")["first"]
    for _ in range(2):  # the allocator takes some memory once: the second time counts
        before = anonymous_mib()
        read_rows(turns.results[-1], 200)
        grown = anonymous_mib() - before
    return spread(1000 * seconds for seconds in turns.seconds), grown


def open_shards(folder: Path, sizes: list[int]) -> Source:
    none = Split(0, 0, 0, "")
    shards = [Shard(str(i), 0, Split(size, 0, 0, ""), none) for i, size in enumerate(sizes)]
    manifest = Manifest(FORMAT_VERSION, "rows", {}, True, True, "<u2", [], shards, {}, 0, "")
    return Source(folder, manifest)


def open_loader(source: Source | TokenSource, position: int) -> Iterator[Any]:
    stream = RowStream({"rows": source}, {"rows": 1.0}, SEQ_LEN, 2, seed=1)
    return Loader(stream, ROWS, 0, 1, ROWS // MICRO_ROWS, MICRO_ROWS).steps(position)


def anonymous_mib() -> float:
    """Memory of this process that is no file's: pages of the shards belong to the system."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024
