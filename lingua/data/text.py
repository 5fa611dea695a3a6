"""Rows of text files, as `data` of a configuration describes them."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lingua.data import IGNORE
from lingua.data.chat import ChatRows, held_out_answers
from lingua.data.prepare.sources import check_sources, open_sources, prepare_sources
from lingua.data.rows import HeldOut, OpenData
from lingua.data.shards import SPLITS, Source
from lingua.tokenizer import Tokenizer

CONTENT = "data.content."  # and a source's name: the key of its fingerprint

logger = logging.getLogger(__name__)


class TextData:
    """Text, tokenized once into shards and mixed by weight. A lingua.data.rows.Data."""

    def check(self, args: Any, tokenizer: Tokenizer) -> None:
        check_sources(args.data, tokenizer, args.validation.sources)

    def prepare(self, args: Any, tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
        prepare_sources(args.data, tokenizer, report, validation=args.validation.sources)

    def open(self, args: Any, tokenizer: Tokenizer) -> OpenData:
        sources = open_sources(args.data, tokenizer)
        window = args.data.seq_len, args.validation.tokens
        is_text = args.data.chat is None
        windows_of = held_out_windows if is_text else held_out_answers
        held_out = {name: windows_of(source, *window) for name, source in sources.items()}
        for name, source in open_sources(args.data, tokenizer, args.validation.sources).items():
            held_out[name] = windows_of(source, *window, SPLITS)
        for name in [name for name, windows in held_out.items() if not len(windows.tokens)]:
            del held_out[name]
            logger.info(
                f"{name} has too few documents to hold one out: its loss is not measured. Text "
                "to measure the loss on can be named in validation.sources"
            )
        fingerprints = {f"{CONTENT}{name}": source.fingerprint for name, source in sources.items()}
        stream = args.data.row_stream(sources, args.seed)
        if is_text:
            return OpenData(stream, fingerprints, held_out)
        rows = ChatRows(stream, args.data.seq_len, args.data.n_views, tokenizer.vocab_size)
        return OpenData(rows, fingerprints, held_out, rows.documents)


def held_out_windows(
    source: Source, seq_len: int, max_tokens: int, splits: Sequence[str] = ("heldout",)
) -> HeldOut:
    """The held-out documents of `source` until `max_tokens` tokens are reached, at least one
    document if it has any. With SPLITS as `splits`, of all documents.

    They are in the order of the hash of their text: a random one, the same for every layout of the
    shards. Every token is a target, the ends of documents included. The first input is the token
    that ends a document, which precedes documents in training too, or else the token that begins
    one; a tokenizer with neither makes the first token an input only.
    """
    documents = source.documents_by_hash(splits, max_tokens)
    special, add_eos = source.manifest.tokenizer, source.manifest.add_eos
    first = special["eos_id"] if add_eos else special["bos_id"]
    parts = [source.document(splits[split], *where) for split, *where, _ in documents.tolist()]
    if first is not None:
        parts.insert(0, np.array([first]))
    stream = np.concatenate(parts or [np.empty(0)]).astype(np.int64)
    n_targets = max(0, len(stream) - 1)
    tokens = np.zeros((-(-n_targets // seq_len), seq_len), np.int64)  # 0: valid after the end too
    targets = np.full_like(tokens, IGNORE)
    tokens.flat[:n_targets] = stream[:-1]
    targets.flat[:n_targets] = stream[1:]
    return HeldOut(tokens, targets, n_bytes=int(documents[:, 4].sum()))
