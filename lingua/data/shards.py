"""Prepared sources on disk: a folder of token shards and the manifest that describes them.

A shard is two files for each of its splits, `train` and `heldout`:
    <name>.<split>.tokens      little-endian unsigned token ids, documents one after another
    <name>.<split>.documents   int64 [documents, 3]: tokens, bytes of text, hash of the text
"""

import functools
import hashlib
import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np

from lingua.base.errors import UserError
from lingua.base.files import load_json, read_into
from lingua.base.format import counted

FORMAT_VERSION = 2
SHARDS_MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
DOCUMENT_COLUMNS = 3
MAX_OPEN_FILES = 256  # files a source keeps open
MIN_HELD_OUT_OF = 10  # different documents of which one is held out at least
Budget = tuple[int, str] | tuple[int, str, int]  # how many tokens or bytes, after how many others
N_KINDS = 3  # kinds of tokens in conversations, see lingua.data.chat


@dataclass
class InputPart:
    """Bytes `begin` to `end` of a file of the source's text: all of them, unless it was split."""

    path: str  # relative to the source's folder, with "/"
    begin: int
    end: int
    size: int  # bytes of the whole file
    mtime_ns: int
    hash: str  # xxh3_128 of bytes begin to end


@dataclass
class Split:
    tokens: int
    documents: int
    bytes: int  # UTF-8 bytes of the text
    hash: str  # xxh3_128 of the token file


@dataclass
class Shard:
    name: str
    parts: int  # how many of the manifest's parts, after those of the shard before
    train: Split
    heldout: Split

    def files(self, dtype: str) -> dict[str, int]:
        """{file name: size in bytes} of its files, with tokens of `dtype`."""
        sizes = {}
        for split in SPLITS:
            counts = getattr(self, split)
            sizes[f"{self.name}.{split}.tokens"] = counts.tokens * np.dtype(dtype).itemsize
            sizes[f"{self.name}.{split}.documents"] = counts.documents * DOCUMENT_COLUMNS * 8
        return sizes


@dataclass
class Manifest:
    version: int
    source: str
    tokenizer: dict[str, Any]  # name, fingerprint, vocab_size, bos_id, eos_id
    add_bos: bool
    add_eos: bool
    dtype: str  # numpy type of the token files, such as "<u2"
    parts: list[InputPart] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)  # bad records by kind
    rough_cuts: int = 0  # cuts inside long documents, see lingua.tools.prepare.pieces
    fingerprint: str = ""  # hash of all token files: equal only for the same rows
    heldout_tail: bool = False  # the source is one document, whose end is held out
    held_out_below: int = 2**64 // 50  # documents are held out by a lower hash
    lowest: list[int] = field(default_factory=list)  # the lowest different hashes of a unit
    lost: float = 0.0  # share of a sample's characters that decoding does not give back
    chat: bool = False  # conversations: each token with its kind, packed (lingua.data.chat)
    cut: int = 0  # number of examples that were longer than a row

    @property
    def n_values(self) -> int:
        """All numbers of the token files are below it."""
        return self.tokenizer["vocab_size"] * (N_KINDS if self.chat else 1)

    @property
    def origin(self) -> tuple[Any, ...]:
        """The fields that are known before shards are built."""
        return self.source, self.tokenizer, self.add_bos, self.add_eos, self.dtype

    def total(self, split: str, field: str) -> int:
        """The sum of `tokens`, `documents` or `bytes` of a split over the shards."""
        return sum(getattr(getattr(shard, split), field) for shard in self.shards)

    def to_json(self) -> str:
        totals = {
            s: {f: self.total(s, f) for f in ("tokens", "documents", "bytes")} for s in SPLITS
        }
        return json.dumps({"totals": totals, **asdict(self)}, indent=1, ensure_ascii=False)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Manifest":
        """Raises ValueError where they are not those of a manifest of this version."""
        try:
            manifest: Manifest = _typed(cls, fields)
        except (AttributeError, KeyError, TypeError):
            raise ValueError("not the fields of a manifest") from None
        n_parts = sum(shard.parts for shard in manifest.shards)
        is_path = any("/" in shard.name for shard in manifest.shards)
        if manifest.version != FORMAT_VERSION or n_parts != len(manifest.parts) or is_path:
            raise ValueError("not a manifest of this version")
        return manifest

    @classmethod
    def load(cls, folder: Path) -> "Manifest | None":
        """The manifest of `folder`, or None where there is none of this version. Raises OSError for
        one that cannot be read."""
        try:
            fields = load_json(folder / SHARDS_MANIFEST)
            fields.pop("totals", None)
            return cls.of_json(fields)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as a `kind`: a dataclass, list, mapping, text, number or true and false."""
    if is_dataclass(kind):
        kinds = {f.name: f.type for f in fields(kind)}
        return kind(**{k: _typed(kinds[k], v) for k, v in value.items()})  # type: ignore[operator]  # a dataclass
    origin = get_origin(kind)
    if kind is not Any and type(value) is not (origin or kind):
        raise TypeError
    if origin is list:
        return [_typed(get_args(kind)[0], v) for v in value]
    return {k: _typed(get_args(kind)[1], v) for k, v in value.items()} if origin is dict else value


class Source:
    """A prepared source. Its train tokens are one virtual array: the shards in order."""

    in_place = False  # whether it is a lingua.data.token_source.TokenSource

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.name, self.fingerprint = manifest.source, manifest.fingerprint
        self.dtype = self._stored = np.dtype(manifest.dtype)
        self.n_tokens = manifest.total("train", "tokens")
        sizes = np.array([shard.train.tokens for shard in manifest.shards], np.int64)
        nonempty = np.flatnonzero(sizes)
        self._files = [f"{manifest.shards[i].name}.train.tokens" for i in nonempty]
        self._sizes = sizes[nonempty]
        self._firsts = np.zeros_like(self._sizes)  # tokens of each file before those of the source
        self._ends = self._sizes.cumsum()
        self.file = functools.lru_cache(maxsize=MAX_OPEN_FILES)(self._open_file)

    @classmethod
    def open(cls, folder: Path) -> "Source":
        """Raises UserError where `folder` holds no valid manifest."""
        reason = "is missing or not valid"
        try:
            if (manifest := Manifest.load(folder)) is not None:
                return cls(folder, manifest)
        except OSError as error:
            reason = f"cannot be read: {error}"
        raise UserError(f"{folder}: is not a folder of token shards ({SHARDS_MANIFEST} {reason})")

    def n_rows(self, seq_len: int, n_views: int) -> int:
        """Returns the number of rows of one epoch. Raises UserError where there is not even one."""
        n_rows = (self.n_tokens - (n_views - 1)) // seq_len
        if n_rows < 1:
            raise UserError(
                f"data.sources.{self.name}: has {self.n_tokens} tokens to train on "
                f"({self.manifest.total('heldout', 'tokens')} more are held out, "
                f"{counted(sum(self.manifest.skipped.values()), 'bad record')} left out), but one "
                f"row needs {seq_len + n_views - 1} (data.seq_len = {seq_len}, data.n_views = "
                f"{n_views})"
            )
        return n_rows

    def read(self, starts: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Copy the tokens that begin at `starts` [n] into the rows out[where], whole rows each."""
        length, size = out.shape[1], self._stored.itemsize
        shards = np.searchsorted(self._ends, starts, side="right")
        inside = starts - (self._ends[shards] - self._sizes[shards])
        places = list(zip(shards.tolist(), inside.tolist(), strict=True))
        # The disk is asked for all of them before the first one is waited for.
        for shard, begin in places:
            with suppress(OSError):  # _read reports it
                file = self.file(self._files[shard]).fileno()
                at = (int(self._firsts[shard]) + begin) * size
                os.posix_fadvise(file, at, length * size, os.POSIX_FADV_WILLNEED)
        for i, (shard, begin) in zip(where.tolist(), places, strict=True):
            row = out[i]
            while len(row):
                n = min(len(row), int(self._sizes[shard]) - begin)
                first = int(self._firsts[shard]) + begin
                row[:n] = self._read(self._files[shard], self._stored, first, n)
                row, shard, begin = row[n:], shard + 1, 0  # the rest is in the next shard

    def _read(self, name: str, dtype: np.dtype, begin: int, n: int) -> np.ndarray:
        """[n], the items of a file from `begin` on. Raises UserError where it has changed."""
        out = np.empty(n, dtype)
        buffer, reason = out.view(np.uint8).data, "is shorter than its manifest says"
        try:
            file = self.file(name).fileno()
            if read_into(file, buffer, begin * dtype.itemsize) == len(buffer):
                return out
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        raise self._lost(name, reason)

    def _lost(self, name: str, reason: str) -> UserError:
        need = "must stay as they are while a run uses them; start again to build what is missing"
        return UserError(f"{self.folder / name}: {reason}. Shards {need}", local=True)

    def _open_file(self, name: str) -> io.FileIO:
        file = io.FileIO(self.folder / name)
        # Rows lie far apart: what the system would read ahead of each, megabytes, is in vain.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return file

    def documents(self, shard: int, split: str) -> np.ndarray:
        """int64 [documents, DOCUMENT_COLUMNS] of a split of a shard, in the order of its tokens.
        Raises UserError where they are not those of the manifest."""
        known = getattr(self.manifest.shards[shard], split)
        name = f"{self.manifest.shards[shard].name}.{split}.documents"
        table = self._read(name, np.dtype("<i8"), 0, known.documents * DOCUMENT_COLUMNS)
        table = table.reshape(-1, DOCUMENT_COLUMNS)
        counts, totals = table[:, :2], [known.tokens, known.bytes]
        if (counts < 0).any() or (counts > totals).any() or counts.sum(0).tolist() != totals:
            raise self._lost(name, "does not have the counts of its manifest")
        return table

    def documents_by_hash(self, splits: Sequence[str], budget: Budget) -> np.ndarray:
        """int64 [documents, 6]: number of the split in `splits`, shard, first token in the file,
        tokens, bytes and hash of the text; in the order of that hash, which depends on nothing but
        the documents themselves. One at least, and no more once they have the `budget`."""
        tables = [np.empty((0, 3 + DOCUMENT_COLUMNS), np.int64)]
        for i, split in enumerate(splits):
            for shard in range(len(self.manifest.shards)):
                table = self.documents(shard, split)
                first = table[:, 0].cumsum() - table[:, 0]
                file = np.full((len(table), 2), (i, shard))
                tables.append(np.column_stack([file, first, table]))
        documents, (n, unit, *skip) = np.concatenate(tables), budget
        documents = documents[np.argsort(documents[:, 5], kind="stable")]
        sizes = documents[:, ("tokens", "bytes").index(unit) + 3]
        begins = np.cumsum(sizes) - sizes
        first = int((begins < sum(skip)).sum())
        return documents[first:][begins[first:] - begins[first : first + 1] < n]

    def document(self, split: str, shard: int, first: int, n: int) -> np.ndarray:
        """Tokens [n] of one document, as `documents_by_hash` locates it."""
        name = f"{self.manifest.shards[shard].name}.{split}.tokens"
        return self._read(name, self.dtype, first, n)

    def text_of(self, documents: np.ndarray) -> tuple[int | None, str]:
        """The bytes of documents, as `documents_by_hash` lists them, None where no text is known,
        and a hash of their text."""
        hashes = np.ascontiguousarray(documents[:, 5], "<i8").tobytes()
        return int(documents[:, 4].sum()), hashlib.blake2b(hashes, digest_size=6).hexdigest()

    def window_documents(self, parts: list[np.ndarray], size: tuple[int, ...]) -> np.ndarray | None:
        """`documents` of the HeldOut of `parts`; of shards, a token shows where one begins."""
        return None
