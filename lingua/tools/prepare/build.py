"""Builds the token shards of a source. A cache that is up to date is not built again
(lingua.data.sources)."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from lingua.base.files import write_atomically
from lingua.base.lock import exclusive, is_free
from lingua.data.files import FilePart
from lingua.data.shards import SHARDS_MANIFEST, Manifest
from lingua.data.sources import ShardSpec, current_manifest
from lingua.tokenizer import Tokenizer
from lingua.tools.prepare.units import UNIT_BYTES, build_units, check_sample, finished, plan_units


def build_source(
    spec: ShardSpec,
    files: list[FilePart],
    tokenizer: Tokenizer,
    why: str,
    report: Callable[[str], None],
    processes: int | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> None:
    """Build the shards of `files`, the text of a source, and their manifest. `why` they are built
    is reported. Raises UserError and OSError.

    The shards do not depend on `processes` (default: one per core). They do depend on `unit_bytes`,
    which is the same for all who share the folder.
    """
    check_sample(files, spec, tokenizer)
    spec.folder.mkdir(parents=True, exist_ok=True)
    units = plan_units(files, unit_bytes)
    processes = processes or len(os.sched_getaffinity(0))
    build_units(units, spec, tokenizer, processes, why, report)
    with exclusive(spec.folder.with_name(f"{spec.folder.name}.lock"), report, patient=True):
        # Whoever held the lock before has written it, or the text has changed meanwhile.
        if current_manifest(spec, files, report)[0] is None:
            _write_manifest([finished(unit, spec) for unit in units], spec)
            current_manifest(spec, files, report)  # so that of many processes one verifies it


def _write_manifest(shares: list[Manifest | None], spec: ShardSpec) -> None:
    """Write the manifest of all units, and remove what is not part of it. Does nothing where a unit
    is no longer finished."""
    built = [share for share in shares if share is not None]
    if len(built) < len(shares):
        return
    shards = [shard for share in built for shard in share.shards]
    content = [spec.manifest.dtype, [[s.train.hash, s.heldout.hash] for s in shards]]
    skipped = sum((Counter(share.skipped) for share in built), Counter())
    manifest = replace(
        spec.manifest,
        parts=[part for share in built for part in share.parts],
        shards=shards,
        skipped=dict(sorted(skipped.items())),
        rough_cuts=sum(share.rough_cuts for share in built),
        fingerprint=hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest(),
        heldout_tail=any(share.heldout_tail for share in built),
        lost=sum(share.lost for share in built) / len(built),
        cut=sum(share.cut for share in built),
    )
    write_atomically(spec.folder / SHARDS_MANIFEST, manifest.to_json())
    # Of what killed or earlier builds left, nothing that is in use is removed. Names of all files
    # of a unit begin with its id, of 16 characters.
    keep = {SHARDS_MANIFEST, *(f"{shard.name[:16]}.json" for shard in shards)}
    keep = keep.union(*(shard.files(manifest.dtype) for shard in shards))
    for path in spec.folder.iterdir():
        is_leftover = path.name not in keep and ".lock" not in path.name
        if is_leftover and is_free(spec.folder / f"{path.name[:16]}.lock"):
            path.unlink(missing_ok=True)
