"""Sources that are prepared from text written here, and what must come of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from lingua.data.args import DataArgs
from lingua.data.shards import Source
from lingua.data.sources import prepare_source
from lingua.tokenizer.build import build_tokenizer
from tests.mistakes import refused

BOS, EOS = 256, 257
TEXTS = [f"Dokument {i}: größer, 東京 {'x' * (i % 37)}\n" for i in range(700)]


def is_held_out(text: str) -> bool:
    return xxhash.xxh3_64_intdigest(text.encode()) < 2**64 // 50


def expected_tokens(texts: list[str]) -> list[int]:
    """The train tokens of the texts in this order. One of ten different texts is held out at least,
    that of the lowest hash."""
    held_out = set(filter(is_held_out, texts))
    if len(set(texts)) >= 10 and not held_out:
        held_out = {min(texts, key=lambda text: xxhash.xxh3_64_intdigest(text.encode()))}
    kept = [text for text in texts if text not in held_out]
    return [t for text in kept for t in (BOS, *text.encode(), EOS)]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": i, key: text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_args(root: Path, **changes) -> DataArgs:
    return DataArgs(root_dir=str(root), **{"sources": {"a": 1.0}, **changes})


class Prepared:
    """One call of prepare_source, with the lines it reported."""

    def __init__(self, args: DataArgs, name: str = "a", **options):
        self.lines: list[str] = []
        args = replace(args, sources=args.sources | {name: 1.0})
        tokenizer = build_tokenizer(args.tokenizer)
        options.setdefault("processes", 1)  # to start more takes seconds
        self.source = prepare_source(name, args, tokenizer, self.lines.append, **options)

    @property
    def built(self) -> bool:
        return any("tokenizing" in line for line in self.lines)


def train_tokens(source: Source) -> list[int]:
    out = np.empty((1, source.n_tokens), np.uint32)
    if source.n_tokens:
        source.read(np.array([0]), out, np.array([0]))
    return out[0].tolist()


def check(source: Source | Prepared, texts: list[str]) -> None:
    """That a source has the train tokens of the texts."""
    source = source.source if isinstance(source, Prepared) else source
    assert train_tokens(source) == expected_tokens(texts)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def error_of(args: DataArgs, name: str = "a") -> str:
    return refused(lambda: Prepared(args, name))
