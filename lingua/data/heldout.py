"""The held-out documents of a source, as windows to measure the loss on."""

from dataclasses import dataclass

import numpy as np

from lingua.data import IGNORE
from lingua.data.shards import Source


@dataclass
class HeldOut:
    """Whole documents, one after another, cut into windows that do not overlap."""

    tokens: np.ndarray  # int64 [windows, S]
    targets: np.ndarray  # int64 [windows, S], IGNORE after the last token
    n_bytes: int  # of the documents' text in UTF-8


def held_out_windows(source: Source, seq_len: int, max_tokens: int) -> HeldOut:
    """The held-out documents of `source` until `max_tokens` tokens are reached, at least one
    document if it has any.

    They are in the order of the hash of their text: a random one, the same for every layout of the
    shards. Every token is a target, the ends of documents included. The first input is the token
    that ends a document, which precedes documents in training too, or else the token that begins
    one; a tokenizer with neither makes the first token an input only.
    """
    documents = source.heldout_documents()
    before = np.cumsum(documents[:, 2]) - documents[:, 2]
    documents = documents[: max(1, int((before < max_tokens).sum()))]
    special, add_eos = source.manifest.tokenizer, source.manifest.add_eos
    first = special["eos_id"] if add_eos else special["bos_id"]
    parts = [source.heldout_tokens(shard, at, n) for shard, at, n, _ in documents.tolist()]
    if first is not None:
        parts.insert(0, np.array([first]))
    stream = np.concatenate(parts or [np.empty(0)]).astype(np.int64)
    n_targets = max(0, len(stream) - 1)
    tokens = np.zeros((-(-n_targets // seq_len), seq_len), np.int64)  # 0: valid after the end too
    targets = np.full_like(tokens, IGNORE)
    tokens.flat[:n_targets] = stream[:-1]
    targets.flat[:n_targets] = stream[1:]
    return HeldOut(tokens, targets, n_bytes=int(documents[:, 3].sum()))
