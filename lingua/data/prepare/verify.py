"""Whether token shards still are what was written. Each file is read once, and again only when it
has changed since, by its ctime; what was found good is recorded beside the folder of the shards."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from lingua.data.shards import DOCUMENT_COLUMNS, SPLITS, Manifest, Shard
from lingua.files import load_json, write_atomically

THREADS = 8
BLOCK = 2**22  # bytes read at once
LONG = 2**30  # bytes that take so long that it is reported


def remove_damaged(folder: Path, manifest: Manifest, report: Callable[[str], None]) -> list[str]:
    """Remove the shards whose content is not that of the manifest, so that they are built again.
    Returns their names. Raises OSError."""
    record = folder.with_name(f"{folder.name}.verified")
    verified: dict[str, int] = {}
    with suppress(OSError, ValueError):
        verified = load_json(record)
    now = {
        name: (folder / name).stat().st_ctime_ns
        for shard in manifest.shards
        for name in shard.files(manifest.dtype)
    }
    files = {shard.name: shard.files(manifest.dtype) for shard in manifest.shards}
    todo = [s for s in manifest.shards if any(verified.get(f) != now[f] for f in files[s.name])]
    if (size := sum(sum(files[shard.name].values()) for shard in todo)) > LONG:
        report(f"comparing {size / 1e6:,.1f} MB of tokens with the hashes in their manifest")
    with ThreadPoolExecutor(THREADS) as threads:
        good = list(threads.map(partial(_is_good, folder, manifest), todo))
    damaged = [shard.name for shard, is_good in zip(todo, good, strict=True) if not is_good]
    for name in (name for shard in damaged for name in files[shard]):
        (folder / name).unlink()
    if todo and not damaged:
        with suppress(OSError):  # the cache may be read-only
            write_atomically(record, json.dumps(now))
    return damaged


def _is_good(folder: Path, manifest: Manifest, shard: Shard) -> bool:
    for split in SPLITS:
        known, highest, content = getattr(shard, split), 0, xxhash.xxh3_128()
        with open(folder / f"{shard.name}.{split}.tokens", "rb") as file:
            while block := file.read(BLOCK):
                content.update(block)
                highest = max(highest, int(np.frombuffer(block, manifest.dtype).max()))
        table = np.fromfile(folder / f"{shard.name}.{split}.documents", "<i8")
        columns = table.reshape(-1, DOCUMENT_COLUMNS)[:, :2]
        if (
            content.hexdigest() != known.hash
            or highest >= manifest.tokenizer["vocab_size"]
            or columns.sum(0).tolist() != [known.tokens, known.bytes]
            or (columns < 0).any()
        ):
            return False
    return True
