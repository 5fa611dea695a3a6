"""The unit of preparation: neighbouring files, or a part of a large one, that becomes one shard.

A finished unit leaves a record beside its shard, its share of the manifest, so that an interrupted
preparation continues after it. A shard's name carries a hash of its text, so that a changed one
never takes the place of one in use.
"""

import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import xxhash

from lingua.base.errors import UserError
from lingua.base.files import load_json, open_synced, temporary, write_atomically
from lingua.data.args import DataArgs
from lingua.data.cache import ShardSpec, why_stale
from lingua.data.files import IO_THREADS, FilePart, hash_part
from lingua.data.shards import MIN_HELD_OUT_OF, SPLITS, InputPart, Manifest, Shard, Split
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.prepare.conversations import open_conversations, packed
from lingua.tools.prepare.pieces import PIECE, Pieces
from lingua.tools.prepare.records import (
    Examples,
    OnRead,
    SourceRecord,
    encode_batch,
    read_records,
    records_before,
    split_file,
    split_tail,
    text_keys,
)

UNIT_BYTES = 128 * 2**20  # small files are grouped and large ones split by this size
MAX_SAMPLE = 1000  # records of each file that check_sample reads
BATCH_BYTES = PIECE  # text tokenized at once; a longer document is a batch by itself
_DOCUMENT = struct.Struct("<qqQ")  # tokens, bytes, hash; the hash is read as int64: the same bits


@dataclass(frozen=True)
class Unit:
    parts: tuple[FilePart, ...]
    is_all: bool  # the source has no other

    @cached_property
    def id(self) -> str:
        places = json.dumps([(part.path, part.begin, part.end) for part in self.parts])
        return hashlib.blake2b(places.encode(), digest_size=8).hexdigest()

    def record_path(self, folder: Path) -> Path:
        return folder / f"{self.id}.json"


def plan_units(files: list[FilePart], unit_bytes: int) -> list[Unit]:
    """Neighbouring files together while they are at most `unit_bytes`; each part of a file that is
    split is a unit, since its size on disk need not be that of its text."""
    with ThreadPoolExecutor(IO_THREADS) as threads:
        split = list(threads.map(partial(split_file, max_bytes=unit_bytes), files))
    groups: list[list[FilePart]] = []
    room = -1  # bytes that may still join the last group
    for parts in split:
        if len(parts) == 1 and parts[0].size <= room:
            groups[-1] += parts
            room -= parts[0].size
        else:
            groups += [[part] for part in parts]
            room = unit_bytes - parts[0].size if len(parts) == 1 else -1
    return [Unit(tuple(group), is_all=len(groups) == 1) for group in groups]


def finished(unit: Unit, spec: ShardSpec) -> Manifest | None:
    """The unit's share of the manifest, if it is built from its files as they are now."""
    try:
        fields = load_json(unit.record_path(spec.folder))
        fields["shards"] = [fields.pop("shard", None)]
        manifest = Manifest.of_json(asdict(spec.manifest) | fields)
    except (FileNotFoundError, ValueError):
        return None
    was_alone = manifest.heldout_tail and not unit.is_all
    if was_alone or manifest.held_out_below > spec.manifest.held_out_below:
        return None  # now the source may have other documents to hold out
    return None if why_stale(manifest, unit.parts, spec) else manifest


# ---- building


def build_unit(unit: Unit, spec: ShardSpec, tokenizer: Tokenizer, on_read: OnRead) -> None:
    """Raises UserError at a bad record unless they are skipped, and for a file that changes
    meanwhile."""
    unfinished = temporary(Path(unit.id)).name
    inputs: list[InputPart] = []
    skipped: Counter[str] = Counter()
    lowest: list[int] = []
    pieces = Pieces(tokenizer)
    writers = {split: _SplitWriter(spec, tokenizer, unfinished, split) for split in SPLITS}
    lost: float | None = None
    has_tail, n_cut, below = False, 0, spec.manifest.held_out_below
    examples = open_conversations(spec.args, tokenizer, spec.manifest.source)
    try:
        records = _good_records(unit, spec, tokenizer, inputs, skipped, on_read, examples, lowest)
        if examples is not None:
            row_tokens, vocab_size = spec.args.row_tokens, tokenizer.vocab_size
            for record, parts in packed(records, row_tokens, vocab_size, below):
                writers["heldout" if record.draw < below else "train"].add(record, parts)
                n_cut += record.is_cut
        else:
            if unit.is_all:
                records, has_tail = hold_out_tail(records)
            for batch in _batches(records):
                texts = [record.text for record in batch]
                if lost is None:
                    lost = _lost_share(texts, tokenizer)
                if len(texts[0]) > PIECE and batch[0].tokens is None:
                    encoded: list[Iterable[np.ndarray]] = [pieces.encode(texts[0])]
                else:
                    encoded = [[ids] for ids in encode_batch(batch, tokenizer)]
                for record, ids in zip(batch, encoded, strict=True):
                    writers["heldout" if record.draw < below else "train"].add(record, ids)
        splits = {split: writer.finish() for split, writer in writers.items()}
        contents = "".join(known.hash for known in inputs) + "tail" * has_tail
        contents += "lowest" * (below != Manifest.held_out_below)
        content = xxhash.xxh3_64_hexdigest(contents.encode())
        shard = Shard(f"{unit.id}-{content[:8]}", len(inputs), **splits)
        for final in shard.files(spec.manifest.dtype):
            os.replace(spec.folder / final.replace(shard.name, unfinished, 1), spec.folder / final)
    finally:
        for writer in writers.values():
            writer.discard()
    fields = {
        "parts": [asdict(part) for part in inputs],
        "shard": asdict(shard),
        "skipped": dict(sorted(skipped.items())),
        "rough_cuts": pieces.rough_cuts,
        "heldout_tail": has_tail,
        "held_out_below": below,
        "lowest": lowest,
        "lost": lost or 0.0,
        "cut": n_cut,
    }
    write_atomically(unit.record_path(spec.folder), json.dumps(fields, indent=1))


def least_bound(draws: Iterable[int]) -> int:
    """Below which draw a source holds documents out that has these, its lowest: the usual one, or
    the least that holds out one of MIN_HELD_OUT_OF different ones."""
    lowest = sorted(set(draws))
    least = lowest[0] + 1 if len(lowest) >= MIN_HELD_OUT_OF else 0
    return max(least, Manifest.held_out_below)


def _lost_share(texts: list[str], tokenizer: Tokenizer) -> float:
    """The share of the characters at the beginnings of some texts that tokens do not give back."""
    texts = [text[:1000] for text in texts[:100]]
    decoded = map(tokenizer.decode, tokenizer.encode_batch(texts))
    lost = sum((Counter(a) - Counter(b)).total() for a, b in zip(texts, decoded, strict=True))
    return lost / sum(map(len, texts))


def hold_out_tail(records: Iterator[SourceRecord]) -> tuple[Iterator[SourceRecord], bool]:
    """The documents of a source, and whether they are the two parts of a single long one."""
    first = list(islice(records, 2))
    if len(first) != 1:
        return chain(first, records), False
    parts = split_tail(first[0])
    return iter(parts), len(parts) == 2


def _good_records(
    unit: Unit,
    spec: ShardSpec,
    tokenizer: Tokenizer,
    inputs: list[InputPart],
    skipped: Counter[str],
    on_read: OnRead,
    examples: Examples | None,
    lowest: list[int],
) -> Iterator[SourceRecord]:
    """Every document of the unit. Parts that were read are added to `inputs`, bad records are
    counted in `skipped`, and `lowest` gets the MIN_HELD_OUT_OF lowest draws, each once."""
    source, any_good = spec.manifest.source, False
    for part in unit.parts:
        keys = text_keys(spec.args, source)
        for record in read_records(part, keys, on_read, examples, tokenizer):
            if record.wrong is None:
                any_good = True
                if len(lowest) < MIN_HELD_OUT_OF or record.draw < lowest[-1]:
                    lowest[:] = sorted({*lowest, record.draw})[:MIN_HELD_OUT_OF]
                yield record
            elif spec.args.on_bad_record == "skip":
                skipped[record.wrong.kind] += 1
            else:
                raise bad_record(part, record, spec.args, source, any_good)
        content, now = hash_part(part), os.stat(part.full)
        if (now.st_size, now.st_mtime_ns) != (part.size, part.mtime_ns):
            raise UserError(f"{part.full}: changed while it was read; start again")
        known = part.path, part.begin, part.end, part.size, part.mtime_ns
        inputs.append(InputPart(*known, hash=content))


def check_sample(files: list[FilePart], spec: ShardSpec, tokenizer: Tokenizer) -> None:
    """Raise UserError where the source has no good record, or a sample of it MAX_SAMPLE bad ones
    and no good one: to find that out by reading everything may take hours."""
    bad: list[tuple[FilePart, SourceRecord]] = []
    keys = text_keys(spec.args, spec.manifest.source)
    examples = open_conversations(spec.args, tokenizer, spec.manifest.source)
    apart = -(-len(files) // 10)
    for i in sorted(range(len(files)), key=lambda i: i % apart > 0):  # ten files first
        if i % apart and len(bad) >= MAX_SAMPLE:
            break
        records = read_records(files[i], keys, None, examples, tokenizer)
        for record in islice(records, MAX_SAMPLE):
            if record.wrong is None:
                return
            bad.append((files[i], record))
    if bad:
        raise bad_record(*bad[0], spec.args, spec.manifest.source)
    raise UserError(f"{spec.key}: has no documents: {files[0].full} is empty")


def bad_record(
    part: FilePart, record: SourceRecord, args: DataArgs, source: str, any_good: bool = False
) -> UserError:
    """Returns the message that says where a record is and what is wrong with it. any_good: whether
    another one is right."""
    wrong = record.wrong
    assert wrong is not None
    advice = "data.on_bad_record: skip leaves such records out and counts them"
    if wrong.lacks_key and not any_good:  # skip might leave out the whole source
        key = f"data.source_files.{source}.text_key"
        advice = f"name the one that has the text in {key}"
    elif args.on_bad_record == "skip":
        advice = "no other record of a sample has a text either"
    what = f"{wrong.kind} ({wrong.detail})" if wrong.detail else wrong.kind
    return UserError(f"{part.full}:{records_before(part) + record.number}: {what}; {advice}")


def _batches(records: Iterator[SourceRecord]) -> Iterator[list[SourceRecord]]:
    """The documents in order: about BATCH_BYTES together, a long one by itself."""
    batch: list[SourceRecord] = []
    size = 0
    for record in records:
        if batch and (size >= BATCH_BYTES or len(record.text) > PIECE):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += record.n_bytes
    if batch:
        yield batch


class _SplitWriter:
    """The two files of one split of a shard, under a temporary name."""

    def __init__(self, spec: ShardSpec, tokenizer: Tokenizer, name: str, split: str) -> None:
        self._dtype = np.dtype(spec.manifest.dtype)
        is_text = spec.args.chat is None  # a chat template writes bos and eos itself
        self._bos = [tokenizer.bos_id] if is_text and spec.args.add_bos else []
        self._eos = [tokenizer.eos_id] if is_text and spec.args.add_eos else []
        self._paths = [spec.folder / f"{name}.{split}.{what}" for what in ("tokens", "documents")]
        self._tokens, self._documents = map(open_synced, self._paths)
        self._counts = Split(tokens=0, documents=0, bytes=0, hash="")
        self._content = xxhash.xxh3_128()

    def add(self, record: SourceRecord, ids: Iterable[np.ndarray]) -> None:
        """A document, whose ids come in one or more arrays."""
        n_tokens = 0
        for part in chain([self._bos], ids, [self._eos]):
            tokens = np.asarray(part, self._dtype)
            self._tokens.write(tokens.data)
            self._content.update(tokens.data)
            n_tokens += len(tokens)
        self._documents.write(_DOCUMENT.pack(n_tokens, record.n_bytes, record.hash))
        self._counts.tokens += n_tokens
        self._counts.documents += 1
        self._counts.bytes += record.n_bytes

    def finish(self) -> Split:
        self._tokens.close()
        self._documents.close()
        self._counts.hash = self._content.hexdigest()
        return self._counts

    def discard(self) -> None:
        """Remove what still has its temporary name."""
        for file, path in zip((self._tokens, self._documents), self._paths, strict=True):
            with suppress(OSError):  # a full disk takes no more of the buffer
                file.close()
            path.unlink(missing_ok=True)
