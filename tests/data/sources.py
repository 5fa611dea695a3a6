"""Prepared sources written by hand, so that tests of the readers do not rest on the builder."""

from pathlib import Path

import numpy as np

from lingua.data.shards import Manifest, Shard, Source, Split


def make_source(folder: Path, name: str, shards: list[np.ndarray]) -> Source:
    """A prepared source with the given train tokens, written without the code under test."""
    folder = folder / name
    folder.mkdir()
    records = []
    for i, tokens in enumerate(shards):
        tokens.tofile(folder / f"{i}.train.tokens")
        records.append(Shard(str(i), 1, Split(len(tokens), 1, len(tokens), ""), Split(0, 0, 0, "")))
    dtype = shards[0].dtype.str
    return Source(folder, Manifest(2, name, {}, True, True, dtype, [], records, {}, 0, ""))
