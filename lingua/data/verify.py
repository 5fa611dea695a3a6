"""Whether token shards still are what was written. Each file is read once, and again only when it
has changed since, by its ctime; what was found good is recorded beside the folder of the shards."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from lingua.base.errors import UserError
from lingua.base.files import load_json, write_atomically
from lingua.data.files import IO_THREADS
from lingua.data.shards import SHARDS_MANIFEST, SPLITS, Manifest, Source

READ_BYTES = 2**22  # bytes of one read
REPORTED_BYTES = 2**30  # reading more than this takes long enough to report


def remove_damaged(folder: Path, manifest: Manifest, report: Callable[[str], None]) -> list[str]:
    """Remove the shards whose content is not that of the manifest, which may itself be wrong, and
    the manifest, so that they are built again. Returns their names. Raises OSError."""
    record = folder.with_name(f"{folder.name}.verified")
    verified: dict[str, int] = {}
    with suppress(OSError, ValueError):
        verified = load_json(record)
    files = [shard.files(manifest.dtype) for shard in manifest.shards]  # sizes by name
    now = {name: (folder / name).stat().st_ctime_ns for names in files for name in names}
    todo = [i for i, names in enumerate(files) if any(verified.get(n) != now[n] for n in names)]
    if (size := sum(sum(files[i].values()) for i in todo)) > REPORTED_BYTES:
        report(f"comparing {size / 1e6:,.1f} MB of tokens with the hashes in their manifest")
    damaged = damaged_shards(Source(folder, manifest), todo)
    if damaged:
        for name in (SHARDS_MANIFEST, *(name for i in damaged for name in files[i])):
            (folder / name).unlink(missing_ok=True)
    elif todo:
        with suppress(OSError):  # the cache may be read-only
            write_atomically(record, json.dumps(now))
    return [manifest.shards[i].name for i in damaged]


def damaged_shards(source: Source, numbers: Sequence[int]) -> list[int]:
    """Returns those of the numbered shards whose content is not that of the manifest. Raises
    OSError."""
    with ThreadPoolExecutor(IO_THREADS) as threads:
        good = threads.map(partial(_is_good, source), numbers)
        return [i for i, is_good in zip(numbers, good, strict=True) if not is_good]


def _is_good(source: Source, i: int) -> bool:
    """Whether shard i has the content of the manifest and no token outside the vocabulary."""
    shard, n_values = source.manifest.shards[i], source.manifest.n_values
    for split in SPLITS:
        highest, content = 0, xxhash.xxh3_128()
        with open(source.folder / f"{shard.name}.{split}.tokens", "rb") as file:
            while block := file.read(READ_BYTES):
                content.update(block)
                highest = max(highest, int(np.frombuffer(block, source.dtype).max()))
        if content.hexdigest() != getattr(shard, split).hash or highest >= n_values:
            return False
        try:
            source.documents(i, split)
        except UserError:
            return False
    return True
