"""What a run reads, as text: where a row comes from and what it says, and what a mixture gives."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from lingua.base.errors import UserError
from lingua.base.format import align, counted
from lingua.data.args import DataArgs
from lingua.data.chat import ChatRows
from lingua.data.files import make_local
from lingua.data.rows import Rows
from lingua.data.shards import Source
from lingua.data.sources import source_files
from lingua.data.stream import RowStream, shares
from lingua.data.token_source import TokenSource
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.prepare.conversations import open_conversations
from lingua.tools.prepare.records import read_records, records_before, text_keys

MARKS = ("\u27e6", "\u27e7")  # begin and end of text that carries loss


@dataclass(frozen=True)
class DocumentSpan:
    """Consecutive tokens of one train document: first ... end - 1 of its n_tokens."""

    shard: int
    document: int  # its number in the shard's train split, from 0
    first: int
    end: int
    n_tokens: int


def document_spans(source: Source, start: int, n: int) -> Iterator[DocumentSpan]:
    """The documents of train tokens start ... start + n - 1 of a source, in order."""
    shard_begin = 0
    for shard, counts in enumerate(source.manifest.shards):
        if shard_begin < start + n and start < shard_begin + counts.train.tokens:
            lengths = source.documents(shard, "train")[:, 0]
            begins = shard_begin + lengths.cumsum() - lengths
            firsts = np.maximum(start - begins, 0)
            ends = np.minimum(start + n - begins, lengths)
            for d in np.flatnonzero(firsts < ends).tolist():
                yield DocumentSpan(shard, d, int(firsts[d]), int(ends[d]), int(lengths[d]))
        shard_begin += counts.train.tokens


def describe_row(
    data: DataArgs, rows: Rows, tokenizer: Tokenizer, step: int, row: int, position: int
) -> Iterator[str]:
    """The row at `position`, number `row` of the step: where it comes from, then its text, a header
    before each document's part; of conversations, what carries loss is between MARKS. Rows that are
    not of files are text alone."""
    where, at = f"step {step}, row {row}: position {position:,} of the run", np.array([position])
    (tokens,) = rows.rows(at)
    if (stream := stream_of(rows)) is None:
        yield where
        yield tokenizer.decode(tokens)
        return
    (stage,), (index,), (row_in,) = stream.stages.stage_of(at), *stream.source_rows(at)
    name = stream.names[index]
    source = stream.sources[name]
    start, n_rows = int(row_in) * stream.seq_len, source.n_rows(stream.seq_len, stream.n_views)
    epoch, number = divmod(stream.counts(position)[name], n_rows)
    begun = data.stages[stage - 1].from_step if stage else 0
    yield f"{where}, in the stage from step {begun}"
    yield (
        f"{name}: row {row_in:,} of {n_rows:,}, number {number:,} of epoch {epoch}: tokens "
        f"{start:,} to {start + len(tokens) - 1:,} of {source.n_tokens:,}"
    )
    if isinstance(source, TokenSource):
        yield from _token_parts(source, start, tokens, tokenizer)
        return
    begin = 0
    for span in document_spans(source, start, len(tokens)):
        end = begin + span.end - span.first
        before = sum(s.train.documents for s in source.manifest.shards[: span.shard])
        yield (
            f"--- tokens {begin:,} to {end - 1:,} of the row: document {before + span.document:,} "
            f"({find_record(source, span, data, tokenizer)}), its tokens {span.first:,} to "
            f"{span.end - 1:,} of {span.n_tokens:,}"
        )
        part = slice(begin, end)
        if isinstance(rows, ChatRows):
            yield _marked(
                tokens[part], rows.is_target(at)[0, part], rows.documents(at)[0, part], tokenizer
            )
        else:
            yield tokenizer.decode(tokens[part])
        begin = end


def _token_parts(
    source: TokenSource, start: int, tokens: np.ndarray, tokenizer: Tokenizer
) -> Iterator[str]:
    """The documents of a row of token files, each after where it is; `start` is its first train
    token."""
    begin = 0
    for name, first, n, document in source.train_spans(start, len(tokens)):
        which = "" if document is None else f"document {document:,}, "
        yield (
            f"--- tokens {begin:,} to {begin + n - 1:,} of the row: {which}tokens {first:,} to "
            f"{first + n - 1:,} of {name}"
        )
        yield tokenizer.decode(tokens[begin : begin + n])
        begin += n


def stream_of(rows: Rows) -> RowStream | None:
    """The stream that the rows are read from; None for those of an app that are not of files."""
    stream = rows.stream if isinstance(rows, ChatRows) else rows
    return stream if isinstance(stream, RowStream) else None


def _marked(
    tokens: np.ndarray, is_target: np.ndarray, documents: np.ndarray, tokenizer: Tokenizer
) -> str:
    """An example as text: what carries loss between MARKS, and without padding."""
    n = int((documents <= documents[is_target].max()).sum())
    cuts = np.flatnonzero(np.diff(is_target[:n])) + 1
    text = ""
    for part, (has_loss, *_) in zip(
        np.split(tokens[:n], cuts), np.split(is_target[:n], cuts), strict=True
    ):
        decoded = tokenizer.decode(part)
        text += decoded.join(MARKS) if has_loss else decoded
    return text + f"\n--- {counted(len(tokens) - n, 'token')} of padding" * (n < len(tokens))


def find_record(source: Source, span: DocumentSpan, args: DataArgs, tokenizer: Tokenizer) -> str:
    """`file:line`, or of parquet `file:row`, of the document of `span`. The shard's text is read
    again up to there: a few seconds at most, and nothing has to be stored about every document. It
    may be another text by now, which is said."""
    shards = source.manifest.shards
    first = sum(before.parts for before in shards[: span.shard])
    inputs = source.manifest.parts[first : first + shards[span.shard].parts]
    known = int(source.documents(span.shard, "train")[span.document, 2]) % 2**64  # its text's hash
    below = source.manifest.held_out_below
    try:
        examples = open_conversations(args, tokenizer, source.name)
        files = {file.path: file for file in source_files(source.name, args)}
        here = make_local([files[part.path] for part in inputs])
        parts = [replace(f, begin=p.begin, end=p.end) for f, p in zip(here, inputs, strict=True)]
        trained = (
            (part, record)
            for part in parts
            for record in read_records(
                part, text_keys(args, source.name), None, examples, tokenizer
            )
            if record.wrong is None and (source.manifest.heldout_tail or record.draw >= below)
        )
        if examples is not None:  # packed in another order
            trained = (pair for pair in trained if pair[1].hash == known)
        part, record = next(islice(trained, 0 if examples else span.document, None))
        # A document with a held-out tail is stored by the hash of the part that is trained on.
        if record.hash == known or source.manifest.heldout_tail:
            return f"{part.full}:{records_before(part) + record.number}"
    except (UserError, OSError, KeyError, StopIteration):
        pass
    names = ", ".join(sorted({part.path for part in inputs}))
    return f"of {names}, which has changed since it was tokenized"


def describe_mixture(data: DataArgs, stream: RowStream, steps: int) -> Iterator[str]:
    """The size of each source, how much of it `steps` steps read, and the shares of the rows."""
    n = steps * data.step_rows
    yield (
        f"{steps:,} steps of {data.step_rows:,} rows of {data.seq_len:,} tokens: "
        f"{n:,} rows, {n * data.seq_len:,} tokens"
    )
    table = [["source", "documents", "tokens", "rows an epoch", "rows read", "epochs"]]
    for name, read in stream.counts(n).items():
        source = stream.sources[name]
        n_rows = source.n_rows(stream.seq_len, stream.n_views)
        documents = f"{source.manifest.total('train', 'documents'):,}"
        if isinstance(source, TokenSource) and not source.stores_documents:
            documents = "not stored"
        counts = (f"{count:,}" for count in (source.n_tokens, n_rows, read))
        table.append([name, documents, *counts, f"{read / n_rows:.3f}"])
    yield from align(table, left=1)
    for from_step, weights in [(0, data.sources), *((s.from_step, s.sources) for s in data.stages)]:
        parts = (f"{name} {float(share):.4%}" for name, share in shares(weights).items())
        yield f"shares of the rows from step {from_step}: {', '.join(parts)}"
