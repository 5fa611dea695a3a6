"""What a run reads, as text: where a row comes from and what it says, and what a mixture gives."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from lingua.data.args import DataArgs
from lingua.data.prepare.records import read_records, records_before
from lingua.data.prepare.sources import source_files
from lingua.data.rows import Rows
from lingua.data.shards import DocumentSpan, Source
from lingua.data.stream import RowStream, shares
from lingua.errors import UserError
from lingua.format import align
from lingua.tokenizer import Tokenizer


def describe_row(
    data: DataArgs, rows: Rows, tokenizer: Tokenizer, step: int, row: int, position: int
) -> Iterator[str]:
    """The row at `position`, number `row` of the step: where it comes from, then its text, a header
    before each document's part. Rows that are not of text files are text alone."""
    where, at = f"step {step}, row {row}: position {position:,} of the run", np.array([position])
    (tokens,) = rows.rows(at)
    if not isinstance(rows, RowStream):
        yield where
        yield tokenizer.decode(tokens)
        return
    (stage,), (index,), (row_in,) = rows.stages.stage_of(at), *rows.source_rows(at)
    name = rows.names[index]
    source = rows.sources[name]
    start, n_rows = int(row_in) * data.seq_len, source.n_rows(data.seq_len, data.n_views)
    epoch, number = divmod(rows.counts(position)[name], n_rows)
    begun = data.stages[stage - 1].from_step if stage else 0
    yield f"{where}, in the stage from step {begun}"
    yield (
        f"{name}: row {row_in:,} of {n_rows:,}, number {number:,} of epoch {epoch}: tokens "
        f"{start:,} to {start + len(tokens) - 1:,} of {source.n_tokens:,}"
    )
    begin = 0
    for span in source.spans(start, len(tokens)):
        end = begin + span.end - span.first
        before = sum(s.train.documents for s in source.manifest.shards[: span.shard])
        yield (
            f"--- tokens {begin:,} to {end - 1:,} of the row: document {before + span.document:,} "
            f"({find_record(source, span, data)}), its tokens {span.first:,} to "
            f"{span.end - 1:,} of {span.n_tokens:,}"
        )
        yield tokenizer.decode(tokens[begin:end])
        begin = end


def find_record(source: Source, span: DocumentSpan, args: DataArgs) -> str:
    """`file:line`, or of parquet `file:row`, of the document of `span`. The shard's text is read
    again up to there: a few seconds at most, and nothing has to be stored about every document. It
    may be another text by now, which is said."""
    inputs = source.shard_inputs(span.shard)
    known = int(source.documents(span.shard, "train")[span.document, 2]) % 2**64  # its text's hash
    try:
        files = {file.path: file for file in source_files(source.name, args)}
        parts = [replace(files[part.path], begin=part.begin, end=part.end) for part in inputs]
        trained = (
            (part, record)
            for part in parts
            for record in read_records(part, args.text_keys(source.name))
            if record.wrong is None and (source.manifest.heldout_tail or not record.is_held_out)
        )
        part, record = next(islice(trained, span.document, None))
        if record.hash == known or source.manifest.heldout_tail:  # whose hash is that of a part
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
        n_rows = source.n_rows(data.seq_len, data.n_views)
        counts = (source.manifest.total("train", "documents"), source.n_tokens, n_rows, read)
        table.append([name, *(f"{count:,}" for count in counts), f"{read / n_rows:.3f}"])
    yield from align(table, left=1)
    for from_step, weights in [(0, data.sources), *((s.from_step, s.sources) for s in data.stages)]:
        parts = (f"{name} {float(share):.4%}" for name, share in shares(weights).items())
        yield f"shares of the rows from step {from_step}: {', '.join(parts)}"
