"""The text of a run: what is checked of its sources, its shards, and its rows.

Text is tokenized once. Shards that are up to date (lingua.data.cache) are only read. Missing and
stale ones are built by lingua.tools.prepare, imported for that.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.errors import UserError, all_of, tool_needed_by
from lingua.base.format import counted
from lingua.data import IGNORE
from lingua.data.args import DataArgs, SourceFiles
from lingua.data.cache import TOKEN_RECORD, current_manifest, shard_folder, shard_spec
from lingua.data.files import TOKEN_FILES, FilePart, find_files, make_local
from lingua.data.rows import CONTENT, HeldOut, OpenData, document_marks
from lingua.data.shards import MIN_HELD_OUT_OF, SHARDS_MANIFEST, SPLITS, Budget, Manifest, Source
from lingua.tokenizer.interface import Tokenizer

logger = logging.getLogger(__name__)
Report = Callable[[str], None]  # logs a line


class TextData:
    """Text, tokenized once into shards and mixed by weight. A lingua.data.rows.Data.

    In the process that checks and prepares a run, the files of a source are found once, and its
    manifest is read once."""

    # (configuration, files that `check` found for `prepare`, sources that `prepare` has ready)
    prepared: Collection[str] = ()
    _known: tuple[Any, dict[str, list[FilePart]] | None, dict[str, Source]] = None, None, {}

    def __init__(self, prepared: Collection[str] = ()) -> None:
        """`prepared`: folders of shards whose text the start before has looked for."""
        self.prepared = prepared

    def folders(self, args: Any, tokenizer: Tokenizer) -> dict[str, str]:
        """The folders of the shards, by source."""
        names = args.data.read_sources(args.validation.sources)
        return {name: str(shard_folder(name, args.data, tokenizer)) for name in names}

    def check(self, args: Any, tokenizer: Tokenizer) -> None:
        folders = self.folders(args, tokenizer) if self.prepared else {"": ""}
        if set(folders.values()) <= set(self.prepared):
            with suppress(UserError):  # they are gone
                self._known = args, None, open_sources(args.data, tokenizer, folders)
                return
        self._known = args, check_sources(args.data, tokenizer, args.validation.sources), {}

    def prepare(self, args: Any, tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
        if self._known[0] is args and self._known[2]:
            report("data: as the start before has prepared it; its text was not looked at")
            return
        files = self._known[1] if self._known[0] is args else None
        validation = args.validation.sources
        ready = prepare_sources(args.data, tokenizer, report, validation=validation, files=files)
        self._known = args, None, ready

    def open(self, args: Any, tokenizer: Tokenizer) -> OpenData:
        ready = self._known[2] if self._known[0] is args else {}
        names = args.data.read_sources(args.validation.sources)
        opened = open_sources(args.data, tokenizer, names, ready)
        sources = {name: opened[name] for name in args.data.used_sources()}
        size = args.validation
        n, unit = (size.bytes, "bytes") if size.tokens is None else (size.tokens, "tokens")
        windows_of, is_text = held_out_windows, args.data.chat is None
        if not is_text:
            from lingua.data.chat import ChatRows, held_out_answers

            windows_of = held_out_answers
        held_out = {}
        for name, source in opened.items():
            splits = ("heldout",) if name in sources else SPLITS
            windows = windows_of(source, args.data.seq_len, (n, unit, size.skip), splits)
            if windows.have_text():
                held_out[name] = windows
                continue
            logger.info(
                f"no document of {name} is held out, so its loss is not measured: shards built of "
                f"{MIN_HELD_OUT_OF} different documents hold out one, token files of 50. Text to "
                "measure the loss on can be named in validation.sources"
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
    files: Mapping[str, list[FilePart]] | None = None,
) -> dict[str, Source]:
    """Every source with a weight above 0 at some step, and those of `validation.sources`, built
    where needed. `files` are what check_sources has found. Raises UserError."""
    files = check_sources(args, tokenizer, validation) if files is None else files
    return {
        name: prepare_source(name, args, tokenizer, report, found, processes=processes)
        for name, found in files.items()
    }


def prepare_source(
    name: str,
    args: DataArgs,
    tokenizer: Tokenizer,
    report: Report,
    files: list[FilePart] | None = None,
    **building: Any,
) -> Source:
    """One source, built if it is missing or its text changed. Raises UserError.

    files: its files, where they are known.
    building: keywords of lingua.tools.prepare.build.build_source.
    """
    spec = shard_spec(name, args, tokenizer)
    try:
        while True:
            files = source_files(name, args) if files is None else files
            if has_tokens(name, args, files):
                from lingua.data.token_files import prepare

                return prepare(name, args, tokenizer, files, report)
            manifest, why = current_manifest(spec, files, report)
            if manifest is not None:
                break
            with tool_needed_by(f"{spec.key}: {why}: tokenizing it"):
                from lingua.tools.prepare.build import build_source
            make_local(files)
            build_source(spec, files, tokenizer, why, report, **building)
            files = None  # the text may have changed meanwhile
    except OSError as error:
        raise _cannot_prepare(spec.key, error, spec.folder) from error
    for line in _summary(manifest, trained_on=name in args.used_sources()):
        report(f"{spec.key}: {line}")
    return Source(spec.folder, manifest)


def check_sources(
    args: DataArgs, tokenizer: Tokenizer, validation: Sequence[str] = ()
) -> dict[str, list[FilePart]]:
    """The files of each source. Raises UserError with all mistakes of all sources: the first may
    take hours to tokenize."""
    names = args.read_sources(validation)
    found: dict[str, list[FilePart]] = {}
    used: dict[str, str] = {}  # the source of each file that is trained on

    def check_files(name: str) -> None:
        files = found[name] = source_files(name, args)
        if has_tokens(name, args, files):
            from lingua.data.token_files import open_files

            open_files(name, args, tokenizer, files)
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
    return found


def open_sources(
    args: DataArgs,
    tokenizer: Tokenizer,
    names: Iterable[str] | None = None,
    ready: Mapping[str, Source] | None = None,
) -> dict[str, Source]:
    """The sources that are prepared, without a look at their text: those to train on, or `names`;
    of `ready` those that this process has prepared."""
    names, ready = args.used_sources() if names is None else names, ready or {}
    return {name: ready.get(name) or _open_source(name, args, tokenizer) for name in names}


def _open_source(name: str, args: DataArgs, tokenizer: Tokenizer) -> Source:
    folder = shard_folder(name, args, tokenizer)
    if (folder / TOKEN_RECORD).exists():
        from lingua.data.token_files import open_recorded

        return open_recorded(name, args, tokenizer)
    return Source.open(folder)


def has_tokens(name: str, args: DataArgs, files: list[FilePart]) -> bool:
    """Whether the files of a source have tokens, not text. Raises UserError."""
    given = args.source_files.get(name, SourceFiles()).format
    if given is None and not any(file.path.endswith(TOKEN_FILES) for file in files):
        return False
    from lingua.data.token_formats import find_form

    return find_form(name, args, make_local(files)) is not None


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
    source: Source, seq_len: int, budget: Budget, splits: Sequence[str] = ("heldout",)
) -> HeldOut:
    """The held-out documents of `source` until `budget` is reached, at least one if it has any.
    With SPLITS as `splits`, of all documents.

    They are in the order of the hash of their text: a random one, the same for every layout of the
    shards. Every token is a target, the ends of documents included. The first input is the token
    that ends a document, which precedes documents in training too, or else the token that begins
    one; a tokenizer with neither makes the first token an input only.
    """
    documents = source.documents_by_hash(splits, budget)
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
