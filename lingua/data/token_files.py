"""Opening, checking and recording the token files of a source (lingua.data.token_source).

A record in the cache has the source's fingerprint, its tokenizer, the files with their sizes and
times, and the hashes of those that `lingua data verify` has read whole.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lingua.base.errors import UserError
from lingua.base.files import load_json, read_bytes, write_atomically
from lingua.base.format import counted, human_bytes
from lingua.data.args import DataArgs
from lingua.data.cache import TOKEN_RECORD, describe_tokenizer, shard_folder
from lingua.data.files import IO_THREADS, FilePart, hash_part, make_local
from lingua.data.shards import SHARDS_MANIFEST, SPLITS
from lingua.data.token_formats import find_form, open_file
from lingua.data.token_source import TokenSource
from lingua.tokenizer.interface import Tokenizer


def open_files(
    name: str, args: DataArgs, tokenizer: Tokenizer, files: list[FilePart]
) -> TokenSource:
    """The source of these files, checked: their sizes, their index, and a sample of the tokens.
    Raises UserError."""
    key, form = args.source_key(name), find_form(name, args, files)
    assert form is not None
    if args.chat is not None:
        raise UserError(f"{key}: {files[0].full} has tokens; conversations must be text")
    by_name = name not in args.source_files or args.source_files[name].format is None
    with ThreadPoolExecutor(IO_THREADS) as threads:
        opened = list(
            threads.map(lambda part: open_file(form, part, tokenizer.vocab_size, by_name), files)
        )
    other = next((file for file in opened if file.dtype != opened[0].dtype), None)
    if other is not None:
        shown = (f"{f.part.full} of {f.dtype.itemsize} bytes" for f in (opened[0], other))
        raise UserError(f"{key}: has tokens of several sizes ({', '.join(shown)}); must be of one")
    source = TokenSource(name, form, opened, tokenizer)
    if args.document_mask != "none" and not source.stores_documents and source.eos_id is None:
        raise UserError(
            f"data.document_mask = {args.document_mask}: {key} does not store where documents end, "
            f"and a sample of its tokens has no eos of the tokenizer; must be none"
        )
    return source


def prepare(
    name: str,
    args: DataArgs,
    tokenizer: Tokenizer,
    files: list[FilePart],
    report: Callable[[str], None],
) -> TokenSource:
    """Check the files and write their record. A file whose whole content is known, and whose time
    has changed, is read again. Raises UserError and OSError."""
    source = open_files(name, args, tokenizer, files)
    folder = shard_folder(name, args, tokenizer)
    record = folder / TOKEN_RECORD
    known = _known_hashes(record)
    touched = [f for f in files if f.path in known and known[f.path][0] != f.mtime_ns]
    with ThreadPoolExecutor(IO_THREADS) as threads:
        for file, content in zip(touched, threads.map(hash_part, touched), strict=True):
            if content != known[file.path][1]:
                raise _changed(file, record)
    hashes = {path: content for path, (_, content) in known.items()}
    _write_record(record, source, tokenizer, hashes)
    (folder / SHARDS_MANIFEST).unlink(missing_ok=True)  # of text that was there before
    total = source.manifest.total
    n_tokens, held_out = (total("train", "tokens"), total("heldout", "tokens"))
    tokens = counted(n_tokens + held_out, "token")
    share = f"{counted(held_out, 'token')} ({held_out / (n_tokens + held_out):.2%})"
    if source.stores_documents:
        documents = total("heldout", "documents")
        tokens = f"{counted(total('train', 'documents') + documents, 'document')}, {tokens}"
        share = f"{counted(documents, 'document')}, {share}"
    report(
        f"{args.source_key(name)}: {tokens} in {counted(len(files), 'file')} of the form "
        f"{source.form}, read in place; held out {share}"
    )
    return source


def open_recorded(name: str, args: DataArgs, tokenizer: Tokenizer) -> TokenSource:
    """The source that another process has prepared. Raises UserError."""
    record = shard_folder(name, args, tokenizer) / TOKEN_RECORD
    try:
        content = load_json(record)
        files = [FilePart(**f, begin=0, end=f["size"]) for f in content["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record}: the files that it records cannot be read: {error}") from None
    files = make_local(files)  # another machine may have prepared them
    source = open_files(name, args, tokenizer, files)
    if source.fingerprint != content.get("fingerprint", source.fingerprint):
        changed = "the index of its files has changed since the run was prepared; start again"
        raise UserError(f"{args.source_key(name)}: {changed}", local=True)
    return source


def verify(name: str, args: DataArgs, tokenizer: Tokenizer, files: list[FilePart]) -> str:
    """Read every token and record the hash of each file. Returns a summary. Raises UserError where
    one is outside the vocabulary or a file is not what was recorded, and OSError."""
    source = open_files(name, args, tokenizer, files)
    record = shard_folder(name, args, tokenizer) / TOKEN_RECORD
    known = _known_hashes(record)

    def read(i: int) -> str:
        source.check_file(i)
        content = hash_part(files[i])
        if known.get(files[i].path, (0, content))[1] != content:
            raise _changed(files[i], record)
        return content

    with ThreadPoolExecutor(IO_THREADS) as threads:
        hashes = list(threads.map(read, range(len(files))))
    new = [file.path for file in files if file.path not in known]
    hashed = {f.path: h for f, h in zip(files, hashes, strict=True)}
    _write_record(record, source, tokenizer, hashed)
    tokens = sum(source.manifest.total(split, "tokens") for split in SPLITS)
    size = human_bytes(sum(file.size for file in files))
    state = "hashes recorded" if new else "as recorded"
    return f"{counted(len(files), 'file')}, {counted(tokens, 'token')}, {size}; {state}"


def _changed(file: FilePart, record: Path) -> UserError:
    return UserError(
        f"{file.full}: has changed since `lingua data verify` recorded its hash; remove {record} "
        "if this is meant"
    )


def _known_hashes(record: Path) -> dict[str, tuple[int, str]]:
    """(time, hash) of the files that were read whole, by their paths."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = load_json(record)
        times = {file["path"]: file["mtime_ns"] for file in content["files"]}
        return {path: (times[path], h) for path, h in content["hashes"].items() if path in times}
    return {}


def _write_record(
    record: Path, source: TokenSource, tokenizer: Tokenizer, hashes: dict[str, str]
) -> None:
    files = [file.part for file in source.files]
    kept = {file.path: hashes[file.path] for file in files if file.path in hashes}
    fields = ("path", "full", "size", "mtime_ns")
    listed = [{key: getattr(file, key) for key in fields} for file in files]
    about = describe_tokenizer(tokenizer)
    content: dict[str, Any] = {"fingerprint": source.fingerprint, "tokenizer": about}
    content |= {"files": listed, "hashes": kept}
    text = json.dumps(content, indent=1)
    with suppress(OSError):
        if read_bytes(record) == text.encode():
            return
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, text)
