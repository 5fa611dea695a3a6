"""The text of a run: its token shards, whether they are those of their text, and their rows.

Text is tokenized once. The shards of a source are in `<cache_dir>/<source>-<key>`; the key is a
hash of the tokenizer, how documents begin and end, and `data.source_files`. Shards that are up to
date are only read. Missing and stale ones are built by lingua.tools.prepare, imported for that.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.errors import UserError, all_of, tool_needed_by
from lingua.base.files import file_size, load_json, write_atomically
from lingua.base.format import counted
from lingua.data import IGNORE
from lingua.data.args import DataArgs, SourceFiles
from lingua.data.files import STDLIB, TOKEN_FILES, FilePart, find_files, hash_part, is_description
from lingua.data.rows import CONTENT, HeldOut, OpenData, document_marks
from lingua.data.shards import FORMAT_VERSION, N_KINDS, SHARDS_MANIFEST, SPLITS, Manifest, Source
from lingua.tokenizer.interface import Tokenizer

logger = logging.getLogger(__name__)

TOKEN_RECORD = "files.json"  # of a source of token files, in place of a manifest
IO_THREADS = 8  # threads that wait for the file system

Report = Callable[[str], None]  # logs a line


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


class TextData:
    """Text, tokenized once into shards and mixed by weight. A lingua.data.rows.Data."""

    def check(self, args: Any, tokenizer: Tokenizer) -> None:
        check_sources(args.data, tokenizer, args.validation.sources)

    def prepare(self, args: Any, tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
        prepare_sources(args.data, tokenizer, report, validation=args.validation.sources)

    def open(self, args: Any, tokenizer: Tokenizer) -> OpenData:
        sources = open_sources(args.data, tokenizer)
        size = args.validation
        budget = (size.bytes, "bytes") if size.tokens is None else (size.tokens, "tokens")
        is_text = args.data.chat is None
        if is_text:
            windows_of = held_out_windows
        else:
            from lingua.data.chat import ChatRows, held_out_answers

            windows_of = held_out_answers
        held_out = {n: windows_of(s, args.data.seq_len, budget) for n, s in sources.items()}
        for name, source in open_sources(args.data, tokenizer, args.validation.sources).items():
            held_out[name] = windows_of(source, args.data.seq_len, budget, SPLITS)
        for name in [name for name, windows in held_out.items() if not windows.have_text()]:
            del held_out[name]
            logger.info(
                f"{name} has too few documents to hold one out: its loss is not measured. Text "
                "to measure the loss on can be named in validation.sources"
            )
        fingerprints = {f"{CONTENT}{name}": source.fingerprint for name, source in sources.items()}
        stream = args.data.row_stream(sources, args.seed)
        if is_text:
            marks, documents = document_marks(args.data, tokenizer), None
            if marks is not None and any(source.in_place for source in sources.values()):
                from lingua.data.token_source import documents_of

                documents = documents_of(stream, marks)
            return OpenData(stream, fingerprints, held_out, documents)
        rows = ChatRows(stream, args.data.seq_len, args.data.n_views, tokenizer.vocab_size)
        return OpenData(rows, fingerprints, held_out, rows.documents)


def prepare_sources(
    args: DataArgs,
    tokenizer: Tokenizer,
    report: Report,
    processes: int | None = None,
    validation: Sequence[str] = (),
) -> dict[str, Source]:
    """Every source with a weight above 0 at some step, and those of `validation.sources`, built
    where needed. Raises UserError."""
    check_sources(args, tokenizer, validation)
    return {
        name: prepare_source(name, args, tokenizer, report, processes=processes)
        for name in args.read_sources(validation)
    }


def prepare_source(
    name: str, args: DataArgs, tokenizer: Tokenizer, report: Report, **building: Any
) -> Source:
    """One source, built if it is missing or its text changed. Raises UserError.

    building: keywords of lingua.tools.prepare.build.build_source.
    """
    spec = shard_spec(name, args, tokenizer)
    try:
        while True:
            files = source_files(name, args)
            if (tokens := token_files(name, args, files)) is not None:
                return tokens.prepare(name, args, tokenizer, files, report)
            manifest, why = current_manifest(spec, files, report)
            if manifest is not None:
                break
            with tool_needed_by(f"{spec.key}: {why}: tokenizing it"):
                from lingua.tools.prepare.build import build_source
            build_source(spec, files, tokenizer, why, report, **building)
    except OSError as error:
        raise _cannot_prepare(spec.key, error, spec.folder) from error
    for line in _summary(manifest, trained_on=name in args.used_sources()):
        report(f"{spec.key}: {line}")
    return Source(spec.folder, manifest)


def check_sources(args: DataArgs, tokenizer: Tokenizer, validation: Sequence[str] = ()) -> None:
    """Raises UserError with all mistakes of all sources: the first may take hours to tokenize."""
    names = args.read_sources(validation)
    used: dict[str, str] = {}  # the source of each file that is trained on

    def check_files(name: str) -> None:
        files = source_files(name, args)
        if (tokens := token_files(name, args, files)) is not None:
            tokens.open_files(name, args, tokenizer, files)
        paths = [os.path.realpath(file.full) for file in files]
        if name not in validation:
            used.update(dict.fromkeys(paths, name))
        elif shared := next((path for path in paths if path in used), None):
            raise UserError(
                f"{args.source_key(name)}: {shared} is also trained on, as {used[shared]}"
            )

    checks: list[Callable[[], object]] = []
    if args.chat is None:
        checks.append(partial(tokenizer.encode, "", bos=args.add_bos))
        checks.append(partial(tokenizer.encode, "", eos=args.add_eos))
    elif not all(
        (shard_folder(name, args, tokenizer) / SHARDS_MANIFEST).exists() for name in names
    ):  # else the shards, whose key has the template, were made with it
        with tool_needed_by("data.chat: reading its template"):
            from lingua.tools.chat_template import open_chat
        checks.append(partial(open_chat, args.tokenizer, tokenizer, args.chat.template))
    checks += [partial(check_files, name) for name in names]
    mistakes: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise all_of(mistakes)


def open_sources(
    args: DataArgs, tokenizer: Tokenizer, names: Iterable[str] | None = None
) -> dict[str, Source]:
    """The sources that another process has prepared, without a look at their text: those to train
    on, or `names`."""
    names = args.used_sources() if names is None else names
    return {name: _open_source(name, args, tokenizer) for name in names}


def _open_source(name: str, args: DataArgs, tokenizer: Tokenizer) -> Source:
    folder = shard_folder(name, args, tokenizer)
    if (folder / TOKEN_RECORD).exists():
        return import_module("lingua.data.token_files").open_recorded(name, args, tokenizer)
    return Source.open(folder)


def token_files(name: str, args: DataArgs, files: list[FilePart]) -> Any:
    """lingua.data.token_files, which opens sources of token files; None for one of text. Raises
    UserError."""
    given = args.source_files.get(name, SourceFiles()).format
    if given is None and not any(file.path.endswith(TOKEN_FILES) for file in files):
        return None
    module = import_module("lingua.data.token_files")
    return module if module.find_form(name, args, files) else None


def source_files(name: str, args: DataArgs) -> list[FilePart]:
    """The whole files of a source. Raises UserError."""
    patterns = args.source_files.get(name, SourceFiles()).files
    try:
        return find_files(name, Path(args.root_dir), patterns, args.source_key(name))
    except OSError as error:
        raise _cannot_prepare(args.source_key(name), error, args.root_dir) from error


def _cannot_prepare(key: str, error: OSError, place: str | Path) -> UserError:
    reason = f"{error.filename or place}: {error.strerror or error}"
    return UserError(f"{key}: cannot be prepared: {reason}")


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


def shard_spec(name: str, args: DataArgs, tokenizer: Tokenizer) -> ShardSpec:
    """Returns the specification of the shards of source `name`."""
    n_values = tokenizer.vocab_size * (1 if args.chat is None else N_KINDS)
    manifest = Manifest(
        version=FORMAT_VERSION,
        source=name,
        tokenizer={
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        add_bos=args.add_bos,
        add_eos=args.add_eos,
        dtype=np.min_scalar_type(n_values - 1).newbyteorder("<").str,
        chat=args.chat is not None,
    )
    return ShardSpec(args, shard_folder(name, args, tokenizer), manifest)


def current_manifest(
    spec: ShardSpec, files: list[FilePart], report: Report
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
    with ThreadPoolExecutor(IO_THREADS) as threads:
        for part, content in zip(touched, threads.map(hash_part, now), strict=True):
            if content != part.hash:
                return f"{part.path} has changed"
            part.mtime_ns = by_path[part.path].mtime_ns
    return ""


def _summary(manifest: Manifest, trained_on: bool) -> Iterator[str]:
    """Totals of both splits, of a source that is trained on the held-out one too, and what was left
    out."""
    held_out, held_out_tokens = (manifest.total("heldout", w) for w in ("documents", "tokens"))
    documents, tokens, n_bytes = (
        sum(manifest.total(split, what) for split in SPLITS)
        for what in ("documents", "tokens", "bytes")
    )
    if manifest.heldout_tail:
        documents, part = 1, "the end of it"
    else:
        part = f"{counted(held_out, 'document')} ({held_out / max(1, documents):.2%})"
    total = (
        f"{counted(documents, 'document')}, {counted(tokens, 'token')} "
        f"({n_bytes / max(1, tokens):.2f} bytes a token)"
    )
    share = f"{counted(held_out_tokens, 'token')} ({held_out_tokens / max(1, tokens):.2%})"
    yield f"{total}; held out {part}, {share}" if trained_on else total
    if manifest.skipped:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in manifest.skipped.items())
        yield f"{counted(sum(manifest.skipped.values()), 'bad record')} left out ({kinds})"
    if manifest.cut:
        yield f"{counted(manifest.cut, 'example')} longer than a row cut at the end"
    if manifest.lost:
        yield (
            f"the tokenizer loses text: decoding does not give back {manifest.lost:.2%} of the "
            "characters, in a sample"
        )
    if manifest.rough_cuts:
        yield (
            "long documents were tokenized in pieces; the tokens at "
            f"{counted(manifest.rough_cuts, 'cut')} where no word begins may differ from those of "
            "the whole document"
        )


def held_out_windows(
    source: Source, seq_len: int, budget: tuple[int, str], splits: Sequence[str] = ("heldout",)
) -> HeldOut:
    """The held-out documents of `source` until `budget` is reached, (number, "tokens" or "bytes"),
    at least one document if it has any. With SPLITS as `splits`, of all documents.

    They are in the order of the hash of their text: a random one, the same for every layout of the
    shards. Every token is a target, the ends of documents included. The first input is the token
    that ends a document, which precedes documents in training too, or else the token that begins
    one; a tokenizer with neither makes the first token an input only.
    """
    documents = source.documents_by_hash(splits, *budget)
    special, add_eos = source.manifest.tokenizer, source.manifest.add_eos
    first = special["eos_id"] if add_eos else special["bos_id"]
    parts = [source.document(splits[i], *where) for i, *where, _, _ in documents.tolist()]
    if first is not None:
        parts.insert(0, np.array([first]))
    stream = np.concatenate(parts or [np.empty(0)]).astype(np.int64)
    n_targets = max(0, len(stream) - 1)
    tokens = np.zeros((-(-n_targets // seq_len), seq_len), np.int64)  # 0: valid after the end too
    targets = np.full_like(tokens, IGNORE)
    tokens.flat[:n_targets] = stream[:-1]
    targets.flat[:n_targets] = stream[1:]
    index = source.window_documents(parts, tokens.shape)
    return HeldOut(tokens, targets, *source.text_of(documents), documents=index)
