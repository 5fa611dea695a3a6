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

from lingua.data.shards import MANIFEST, SPLITS, Manifest, Source
from lingua.errors import UserError
from lingua.files import load_json, write_atomically

THREADS = 8
BLOCK = 2**22  # bytes read at once
LONG = 2**30  # bytes that take so long that it is reported


def remove_damaged(folder: Path, manifest: Manifest, report: Callable[[str], None]) -> list[str]:
    """Remove the shards whose content is not that of the manifest, which may itself be wrong, and
    the manifest, so that they are built again. Returns their names. Raises OSError."""
    record = folder.with_name(f"{folder.name}.verified")
    verified: dict[str, int] = {}
    with suppress(OSError, ValueError):
        verified = load_json(record)
    files = [shard.files(manifest.dtype) for shard in manifest.shards]  # with their sizes
    now = {name: (folder / name).stat().st_ctime_ns for of_shard in files for name in of_shard}
    todo = [i for i, names in enumerate(files) if any(verified.get(n) != now[n] for n in names)]
    if (size := sum(sum(files[i].values()) for i in todo)) > LONG:
        report(f"comparing {size / 1e6:,.1f} MB of tokens with the hashes in their manifest")
    with ThreadPoolExecutor(THREADS) as threads:
        good = list(threads.map(partial(_is_good, Source(folder, manifest)), todo))
    damaged = [i for i, is_good in zip(todo, good, strict=True) if not is_good]
    if damaged:
        for name in (MANIFEST, *(name for i in damaged for name in files[i])):
            (folder / name).unlink(missing_ok=True)
    elif todo:
        with suppress(OSError):  # the cache may be read-only
            write_atomically(record, json.dumps(now))
    return [manifest.shards[i].name for i in damaged]


def _is_good(source: Source, i: int) -> bool:
    """Whether shard i has the content of the manifest and no token outside the vocabulary."""
    shard, n_values = source.manifest.shards[i], source.manifest.n_values
    for split in SPLITS:
        highest, content = 0, xxhash.xxh3_128()
        with open(source.folder / f"{shard.name}.{split}.tokens", "rb") as file:
            while block := file.read(BLOCK):
                content.update(block)
                highest = max(highest, int(np.frombuffer(block, source.dtype).max()))
        if content.hexdigest() != getattr(shard, split).hash or highest >= n_values:
            return False
        try:
            source.documents(i, split)
        except UserError:
            return False
    return True
