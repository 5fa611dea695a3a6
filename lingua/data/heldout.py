"""The held-out documents of a source, as windows to measure the loss on."""

from dataclasses import dataclass

import numpy as np

from lingua.data import IGNORE
from lingua.data.shards import Source


@dataclass
class HeldOut:
    """Whole documents, one after another, cut into windows that overlap in nothing.

    With S tokens a window: the loss of all targets, summed and divided by `n_targets`, is nats per
    token; divided by `n_bytes` it is nats per byte.
    """

    tokens: np.ndarray  # int64 [windows, S]
    targets: np.ndarray  # int64 [windows, S], IGNORE after the last token
    n_targets: int  # every token of the documents, their ends included
    n_bytes: int  # of the documents' text in UTF-8
    n_documents: int


def held_out_windows(source: Source, seq_len: int, max_tokens: int) -> HeldOut:
    """The held-out documents of `source` until `max_tokens` tokens are reached, at least one
    document if there is one.

    They come in the order of the hash of their text, which is a random one, the same for every
    layout of the shards. The first input is the token that ends documents, as it stands before a
    document in training, or else the one that begins them; a tokenizer with neither makes the
    first token of all the only one that is no target.
    """
    documents = source.heldout_documents()
    before = np.cumsum(documents[:, 2]) - documents[:, 2]
    documents = documents[: max(1, int((before < max_tokens).sum()))]
    parts = [source.heldout_tokens(s, first, n) for s, first, n, _ in documents.tolist()]
    if parts:
        parts.insert(0, _first_input(source))
    stream = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
    n_targets = max(0, len(stream) - 1)
    n_windows = -(-n_targets // seq_len)
    tokens = np.zeros(n_windows * seq_len, np.int64)  # 0: a valid token after the end
    targets = np.full(n_windows * seq_len, IGNORE, np.int64)
    tokens[:n_targets] = stream[:-1]
    targets[:n_targets] = stream[1:]
    return HeldOut(
        tokens.reshape(n_windows, seq_len),
        targets.reshape(n_windows, seq_len),
        n_targets=n_targets,
        n_bytes=int(documents[:, 3].sum()),
        n_documents=len(documents),
    )


def _first_input(source: Source) -> list[int]:
    manifest = source.manifest
    eos, bos = manifest.tokenizer["eos_id"], manifest.tokenizer["bos_id"]
    if manifest.add_eos:
        return [eos]
    return [] if bos is None else [bos]
