"""What preparing text costs over the tokenizer's own library, and how fast rows come.

Everything is made on the spot: text from the standard library of this Python, tokenizers trained on
it, token shards. CPU seconds are reported too: other processes change them less.
"""

import base64
import functools
import io
import itertools
import json
import multiprocessing
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import tiktoken

from apps.bench.report import Report, Spread, quotients, spread
from apps.bench.turns import Turn, take_round, take_turns
from lingua.base.format import align
from lingua.data.args import DataArgs
from lingua.data.files import TOKEN_FILES, FilePart
from lingua.data.loader import Loader
from lingua.data.shards import FORMAT_VERSION, SHARDS_MANIFEST, Manifest, Shard, Source, Split
from lingua.data.sources import prepare_source
from lingua.data.stream import RowStream
from lingua.data.token_formats import MEGATRON_HEAD, open_file
from lingua.data.token_source import TokenSource
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer
from lingua.tokenizer.tiktoken import SPLIT
from lingua.tools.inspect.tokenizer import BOS, EOS, train
from lingua.tools.prepare.units import UNIT_BYTES

SAME_OBJECT = "tiktoken, over the object of ours"
TEXT_BYTES = 12_000_000
EXCLUDED = {"site-packages", "test"}  # folders
# How often the text is repeated for each tokenizer: a round takes all of them seconds, and what a
# source costs once, whatever its size (files synced, a look at the disk), is small in it.
TEXT_REPEATS = {"tiktoken": 4, "sentencepiece": 2, "bytes": 12}
WARM_UP = 1000  # documents that are encoded before a round
SHARED_PARTS = 16  # parts of one size: as many for each of two processes
TRAINED_ON = 4_000_000  # characters of the text
VOCABULARY = 16_000
SEQ_LEN, ROWS, MICRO_ROWS = 2048, 64, 8
GATHERED_TOKENS = 2**27
DOCUMENT_TOKENS = 1000
VALUES = 50_000  # of these tokens
SPARSE_TOKENS, SPARSE_SHARDS = 10**10, 80

Rounds = Iterable[dict[str, Turn]]  # turns of `ours` and `reference`, each with its amount of work


def measure(keys: list[str], repeats: int) -> Report:
    rows: list[tuple[str, ...]] = [("", "ours", "reference", "ratio", "range", "CPU ratio")]
    results: dict[str, Any] = {"repeats": repeats}
    with TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizers = make_tokenizers(work, write_text(work))

        def add(name: str, label: str, rounds: Rounds) -> None:
            results[name] = s = speeds(rounds)
            sides = (f"{s[side].median / 1e6:.2f}" for side in ("ours", "reference"))
            rows.append((label, *sides, *s["ratio"].cells(), s["cpu_ratio"].cells()[0]))

        million = "million tokens/s"
        for name, tokenizer in tokenizers.items():
            add(name, f"{name}, {million}", tokenizing(work, name, tokenizer, repeats))
        tiktoken_args = tokenizers["tiktoken"]
        rounds = tokenizing(work, "tiktoken", tiktoken_args, repeats, same_object=True)
        add(SAME_OBJECT, SAME_OBJECT, rounds)
        rounds = two_processes(work, tiktoken_args, repeats)
        add("two processes", f"two processes over one, {million}", rounds)
        add("rows", f"rows to micro-batches, {million}", gathering(work, repeats))
        for form, source in token_sources(work):
            label = f"rows of {form} files over those of shards, {million}"
            add(form, label, reading_files(work, source, repeats))
        first_ms, grown_mib = first_batches(work, repeats)
        results |= {"first batch, ms": first_ms, "memory grown, MiB": grown_mib}
    median, extremes = first_ms.cells(".1f")
    lines = [
        *align(rows, left=1),
        "",
        f"first batch of {ROWS} rows at a random position of {SPARSE_TOKENS:.0e} tokens: "
        f"{median} ms ({extremes}); memory after 200 more: {grown_mib:+.1f} MiB",
        f"medians of {repeats} rounds. The references: a plain loop of the library's encode on "
        "texts in memory (tiktoken: encode_ordinary with Llama 3's pattern, which ours groups "
        "otherwise; then with ours; bytes: to a numpy array), one process of ours, a plain gather "
        "of the same rows from a memory map, shards of the same number of tokens",
    ]
    return Report(lines, results)


def speeds(rounds: Rounds) -> dict[str, Spread]:
    """Units of work a second. AssertionError where the sides did not do the same work."""
    ours, reference = zip(*((r["ours"], r["reference"]) for r in rounds), strict=True)
    for a, b in zip(ours, reference, strict=True):
        assert a.result == b.result > 0, (a.result, b.result)
    return {
        "ours": spread(turn.result / turn.seconds for turn in ours),
        "reference": spread(turn.result / turn.seconds for turn in reference),
        "ratio": quotients((t.seconds for t in reference), (t.seconds for t in ours)),
        "cpu_ratio": quotients((t.cpu_seconds for t in reference), (t.cpu_seconds for t in ours)),
    }


def write_text(work: Path) -> list[str]:
    """Documents of some thousand characters as JSON lines, in a source for each tokenizer."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    parts = (f.read_text("utf-8", "replace") for f in files if not EXCLUDED & set(f.parts))
    whole = "\n".join(parts)[:TEXT_BYTES]
    rng, texts, at = random.Random(0), [], 0
    while at < len(whole):
        length = int(rng.lognormvariate(8, 0.9)) + 1
        texts.append(whole[at : at + length])
        at += length
    lines = "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts))
    for name, repeats in TEXT_REPEATS.items():
        (work / f"{name}.jsonl").write_text(lines * repeats, encoding="utf-8")
    return texts


def make_tokenizers(work: Path, texts: list[str]) -> dict[str, TokenizerArgs]:
    """A byte-level BPE as tiktoken ranks and a sentencepiece BPE, trained on some of the text."""
    import sentencepiece
    from tokenizers.pre_tokenizers import ByteLevel

    sizes = itertools.accumulate(map(len, texts))
    some = [text for text, size in zip(texts, sizes, strict=True) if size <= TRAINED_ON]
    # The library spells a byte as itself where that is printable, else as the next free character.
    spelled = [b for b in range(256) if chr(b) in ByteLevel.alphabet()]
    byte_of = {chr(b): b for b in spelled}
    byte_of |= {chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(spelled)))}
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
    }


def encoder(args: TokenizerArgs, same_object: bool) -> Callable[[str], Any]:
    """The library's own encode; of tiktoken with Llama 3's pattern, or of the object of ours."""
    library = _built(args.name, args.path).library
    if args.name == "sp":
        return library.encode
    if args.name == "bytes":
        return lambda text: np.frombuffer(text.encode(), np.uint8)
    ranks = library._mergeable_ranks
    plain = tiktoken.Encoding("plain", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    return (library if same_object else plain).encode_ordinary


@functools.cache
def _built(name: Any, path: str | None) -> Tokenizer:
    """Built once, as in a run: reading its file is no part of tokenizing."""
    return build_tokenizer(TokenizerArgs(name, path))


def tokenizing(
    work: Path, name: str, tokenizer: TokenizerArgs, repeats: int, same_object: bool = False
) -> Rounds:
    """Text files to token shards in one process, over the library's encode of the same texts. Each
    round is a process of its own: where tables lie in its memory makes both sides faster or slower
    by some percent, and not by the same."""
    context = multiprocessing.get_context("spawn")
    for i in range(repeats):
        with ProcessPoolExecutor(1, context) as process:
            yield process.submit(_tokenize, work, name, tokenizer, same_object, i).result()


def _tokenize(
    work: Path, name: str, tokenizer: TokenizerArgs, same_object: bool, i: int
) -> dict[str, Turn]:
    with open(work / f"{name}.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    encode = encoder(tokenizer, same_object)
    for text in texts[:WARM_UP]:
        encode(text)
    _remove_shards(work)
    sides = {
        "ours": lambda: prepare(work, name, tokenizer, UNIT_BYTES),
        "reference": lambda: sum(len(encode(text)) for text in texts),
    }
    return take_round(sides, i)


def _remove_shards(work: Path) -> None:
    shutil.rmtree(work / ".tokens", ignore_errors=True)


def prepare(
    work: Path, source: str, tokenizer: TokenizerArgs, unit_bytes: int, processes: int = 1
) -> int:
    """Build the shards of a source; its tokens, without the two that frame a document."""
    args = DataArgs(root_dir=str(work), sources={source: 1.0}, tokenizer=tokenizer)
    built, report = _built(tokenizer.name, tokenizer.path), lambda line: None
    building = {"processes": processes, "unit_bytes": unit_bytes}
    prepared = prepare_source(source, args, built, report, **building)
    total = prepared.manifest.total
    return sum(total(s, "tokens") - 2 * total(s, "documents") for s in ("train", "heldout"))


def two_processes(work: Path, tokenizer: TokenizerArgs, repeats: int) -> Rounds:
    """A preparation with two processes, from before they start, over one with one."""
    unit_bytes = -(-(work / "tiktoken.jsonl").stat().st_size // SHARED_PARTS)
    build = partial(prepare, work, "tiktoken", tokenizer, unit_bytes)
    sides: dict[str, Callable[[], int]] = {"ours": lambda: build(processes=2), "reference": build}
    for i in range(repeats):
        yield take_round(sides, i, before=partial(_remove_shards, work))


def gathering(work: Path, repeats: int) -> Rounds:
    """Rows in random order from the page cache to micro-batches, over a plain gather of them."""
    path = work / "rows" / "0.train.tokens"
    path.parent.mkdir()
    tokens = np.random.default_rng(0).integers(0, VALUES, GATHERED_TOKENS, np.uint16)
    tokens.tofile(path)
    steps = 8 * GATHERED_TOKENS // (SEQ_LEN * ROWS) // 10
    memory = np.memmap(path, np.uint16, "r").view(np.ndarray)
    loader = _loader(_source(path.parent, [GATHERED_TOKENS]), 0)

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

    return take_turns({"ours": ours, "reference": reference}, repeats, "rows")


def token_sources(work: Path) -> Iterator[tuple[str, TokenSource]]:
    """The tokens of `gathering` as files of other tools, in documents of DOCUMENT_TOKENS."""
    plain = work / "rows" / "0.train.tokens"
    ends = np.arange(DOCUMENT_TOKENS, GATHERED_TOKENS + 1, DOCUMENT_TOKENS)
    ends[-1] = GATHERED_TOKENS
    lengths = np.diff(ends, prepend=0)
    folder = work / "files"
    folder.mkdir()
    for name in ("uint16.bin", "megatron.bin", "datatrove.ds"):
        (folder / name).hardlink_to(plain)
    ends.astype("<i8").tofile(folder / "datatrove.ds.index")
    head = np.array([(b"MMIDIDX", 1, 8, len(ends), len(ends) + 1)], MEGATRON_HEAD)
    bounds = np.arange(len(ends) + 1, dtype="<i8")
    index = head, lengths.astype("<i4"), (2 * (ends - lengths)).astype("<i8"), bounds
    (folder / "megatron.idx").write_bytes(b"".join(part.tobytes() for part in index))
    offsets = np.concatenate([[0], ends[: len(ends) // 8]])
    values = np.fromfile(plain, np.uint16, offsets[-1]).astype(np.int32)
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, values)})
    with pa.ipc.new_stream(str(folder / "datasets.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)  # rows, as datasets has
    tokenizer = replace(build_tokenizer(TokenizerArgs()), vocab_size=VALUES, eos_id=None)
    for path in sorted(folder.iterdir()):
        if path.suffix in TOKEN_FILES:
            part = FilePart(path.name, str(path), path.stat().st_size, 0, 0, 0)
            opened = open_file(path.stem, part, tokenizer.vocab_size, by_name=False)
            yield path.stem, TokenSource("rows", path.stem, [opened], tokenizer)


def reading_files(work: Path, source: TokenSource, repeats: int) -> Rounds:
    """Rows in random order from the page cache to micro-batches, over those of shards with as many
    tokens."""
    shards = _source(work / "rows", [source.n_tokens])
    steps = 8 * source.n_tokens // (SEQ_LEN * ROWS) // 10

    def read(loader: Iterator[Any]) -> int:
        for _ in range(steps):
            next(loader)
        return steps * ROWS * SEQ_LEN

    both = {"ours": source, "reference": shards}
    sides = {side: partial(read, _loader(opened, 0)) for side, opened in both.items()}
    return take_turns(sides, repeats, source.form)


def first_batches(work: Path, repeats: int) -> tuple[Spread, float]:
    """(ms from opening the source to the first batch, MiB that memory grows by 200 later ones)."""
    folder, size = work / "sparse", SPARSE_TOKENS // SPARSE_SHARDS
    folder.mkdir()
    for i in range(SPARSE_SHARDS):
        with open(folder / f"{i}.train.tokens", "wb") as file:
            file.truncate(2 * size)
    manifest = _source(folder, [size] * SPARSE_SHARDS).manifest
    (folder / SHARDS_MANIFEST).write_text(manifest.to_json())
    rng = random.Random(0)

    def first() -> Iterator[Any]:
        loader = _loader(Source.open(folder), rng.randrange(10**12))
        next(loader)
        return loader

    turns = [taken["first"] for taken in take_turns({"first": first}, repeats, "first batches")]
    loader = turns[-1].result
    grown = 0.0
    for _ in range(2):  # the allocator takes some memory once: the second time counts
        before = _anonymous_mib()
        for _ in range(200):
            next(loader)
        grown = _anonymous_mib() - before
    return spread(1000 * turn.seconds for turn in turns), grown


def _source(folder: Path, sizes: list[int]) -> Source:
    none = Split(0, 0, 0, "")
    shards = [Shard(str(i), 0, Split(size, 0, 0, ""), none) for i, size in enumerate(sizes)]
    manifest = Manifest(FORMAT_VERSION, "rows", {}, True, True, "<u2", [], shards, {}, 0, "")
    return Source(folder, manifest)


def _loader(source: Source, position: int) -> Iterator[Any]:
    stream = RowStream({"rows": source}, {"rows": 1.0}, SEQ_LEN, 2, seed=1)
    return Loader(stream, ROWS, 0, 1, ROWS // MICRO_ROWS, MICRO_ROWS).steps(position)


def _anonymous_mib() -> float:
    """Memory of this process that is no file's: pages of the shards belong to the system."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024
