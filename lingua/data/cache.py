"""The token shards of a source's text: where they are, and whether they are those of the text.

They are in `<cache_dir>/<source>-<key>`; the key is a hash of the tokenizer, how documents begin
and end, and `data.source_files`.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.files import file_size, load_json, write_atomically
from lingua.data.args import DataArgs, SourceFiles
from lingua.data.files import IO_THREADS, STDLIB, FilePart, hash_part, is_description, make_local
from lingua.data.shards import FORMAT_VERSION, N_KINDS, SHARDS_MANIFEST, Manifest
from lingua.tokenizer.interface import Tokenizer

TOKEN_RECORD = "files.json"  # of a source of token files, in place of a manifest


@dataclass(frozen=True)
class ShardSpec:
    """The specification of a source's shards. It is sent to the processes that build them."""

    args: DataArgs
    folder: Path  # folder of the shards
    manifest: Manifest  # manifest of the shards, without its parts and shards

    @property
    def key(self) -> str:
        """The key by which messages name the source."""
        return self.args.source_key(self.manifest.source)


def shard_folder(name: str, args: DataArgs, tokenizer: Tokenizer) -> Path:
    """The folder of the shards of source `name`."""
    key: list[Any] = [FORMAT_VERSION, tokenizer.fingerprint(), args.add_bos, args.add_eos]
    files = asdict(args.source_files.get(name, SourceFiles()))
    # Without a format, as in earlier versions.
    key.append({key: value for key, value in files.items() if key != "format" or value})
    if args.chat is not None:
        from lingua.data.chat import find_template, special_names

        text, _ = find_template(args.tokenizer, args.chat.template)
        names = special_names(args.tokenizer, tokenizer)
        key.append([text, names, args.chat.on_long_example, args.row_tokens])
        key += ["pairs"] * args.chat.pairs
    if name == STDLIB:  # machines that share the folder may have different ones
        key.append(platform.python_version())
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=6).hexdigest()
    return Path(args.cache_dir or Path(args.root_dir, ".tokens")) / f"{name}-{digest}"


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest and the record of token files have of it."""
    about = {key: getattr(tokenizer, key) for key in ("vocab_size", "bos_id", "eos_id")}
    return {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint(), **about}


def shard_spec(name: str, args: DataArgs, tokenizer: Tokenizer) -> ShardSpec:
    """Returns the specification of the shards of source `name`."""
    n_values = tokenizer.vocab_size * (1 if args.chat is None else N_KINDS)
    manifest = Manifest(
        version=FORMAT_VERSION,
        source=name,
        tokenizer=describe_tokenizer(tokenizer),
        add_bos=args.add_bos,
        add_eos=args.add_eos,
        dtype=np.min_scalar_type(n_values - 1).newbyteorder("<").str,
        chat=args.chat is not None,
    )
    return ShardSpec(args, shard_folder(name, args, tokenizer), manifest)


def current_manifest(
    spec: ShardSpec, files: list[FilePart], report: Callable[[str], None]
) -> tuple[Manifest | None, str]:
    """(the manifest, "") if the shards are those of `files` as they are now, else (None, why)."""
    manifest = Manifest.load(spec.folder)
    if manifest is None:
        return None, "no shards yet"
    before = [part.mtime_ns for part in manifest.parts]
    if why := why_stale(manifest, files, spec):
        return None, why
    if before != [part.mtime_ns for part in manifest.parts]:
        with suppress(OSError):  # only saves reading the files again; the cache may be read-only
            write_atomically(spec.folder / SHARDS_MANIFEST, manifest.to_json())
    if not _is_verified(spec.folder, manifest):
        from lingua.data.verify import remove_damaged

        if damaged := remove_damaged(spec.folder, manifest, report):
            return None, f"{damaged[0]} was damaged"
    return manifest, ""


def _is_verified(folder: Path, manifest: Manifest) -> bool:
    """Whether no file has changed, by its ctime, since its content was last compared with its hash
    (lingua.data.verify)."""
    try:
        verified = load_json(folder.with_name(f"{folder.name}.verified"))
    except (OSError, ValueError):
        return False
    names = [name for shard in manifest.shards for name in shard.files(manifest.dtype)]
    return all((folder / name).stat().st_ctime_ns == verified.get(name) for name in names)


def why_stale(manifest: Manifest, files: Iterable[FilePart], spec: ShardSpec) -> str:
    """Why the manifest's shards are not those of `files` as they are now; "" if they are. A file
    is read only where its stat differs, and the manifest gets its new time."""
    if manifest.origin != spec.manifest.origin:
        return "shards are those of another source"
    if manifest.skipped and spec.args.on_bad_record != "skip":
        return "shards were built with data.on_bad_record: skip"
    for shard in manifest.shards:
        for name, size in shard.files(manifest.dtype).items():
            with suppress(FileNotFoundError):
                if file_size(spec.folder / name) == size:
                    continue
            return f"{name} is missing or not complete"
    by_path = {file.path: file for file in files}
    # Earlier versions read descriptions of the data too: what is gone of them is no change.
    parts = [p for p in manifest.parts if p.path in by_path or not is_description(p.path)]
    sizes = {(part.path, part.size) for part in parts}
    if changed := sizes ^ {(file.path, file.size) for file in by_path.values()}:
        return f"{min(changed)[0]} was added, removed or changed"
    touched = [part for part in parts if part.mtime_ns != by_path[part.path].mtime_ns]
    now = [replace(by_path[part.path], begin=part.begin, end=part.end) for part in touched]
    make_local(now)
    with ThreadPoolExecutor(IO_THREADS) as threads:
        for part, content in zip(touched, threads.map(hash_part, now), strict=True):
            if content != part.hash:
                return f"{part.path} has changed"
            part.mtime_ns = by_path[part.path].mtime_ns
    return ""
