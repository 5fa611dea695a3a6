"""What a run reads, without training:

    python -m lingua.data.show config=apps/main/configs/debug.yaml
    python -m lingua.data.show config=runs/debug/config.yaml step=100
    python -m lingua.data.show config=runs/debug/config.yaml step=100 row=3

Without a step it shows the mixture, else one row as text. The config is that of a training run,
best the resolved one, <dump_dir>/config.yaml; keys that are not about data are ignored. Sources
that are not tokenized yet are tokenized first.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np

from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.config.schema import MOST_STEPS, Announced, Free, Guarded, bounds
from lingua.data.args import DataArgs
from lingua.data.prepare.records import read_records, records_before
from lingua.data.prepare.sources import prepare_sources, source_files
from lingua.data.shards import DocumentSpan, Source
from lingua.data.stream import RowStream, shares
from lingua.format import align, printable
from lingua.parallel.program import run_program
from lingua.tokenizer import Tokenizer, build_tokenizer


@dataclass
class ShowArgs:
    step: Free[int | None] = None  # the step, as metrics.jsonl counts them; null: the mixture
    row: Free[int] = 0  # of the step's global batch, the first is 0
    seed: Guarded[int] = 42  # of the run
    steps: Announced[int] = 1000  # of the whole run
    data: DataArgs = field(default_factory=DataArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        rows = self.data.global_batch_size
        if rows is None:
            need = "must be given here: a training run takes it from its number of devices, and "
            yield "data.global_batch_size", need + "writes it to <dump_dir>/config.yaml"
        elif not 0 <= self.row < rows:
            yield "row", f"must be 0 to {rows - 1}, as data.global_batch_size = {rows}"
        if self.step is None and self.row:
            yield "row", "must be given together with step"
        yield from bounds(self, 1, "step", "steps", most=MOST_STEPS)


def main() -> None:
    args, notices = load(ShowArgs, foreign=META_LINGUA, partial=True)
    report = partial(print, file=sys.stderr, flush=True)
    for line in notices:
        report(line)
    tokenizer = build_tokenizer(args.data.tokenizer)
    sources = prepare_sources(args.data, tokenizer, report)
    stream = args.data.row_stream(sources, args.seed)
    if args.step is None:
        lines = describe_mixture(args, stream, sources)
    else:
        lines = describe_row(args, stream, sources, tokenizer)
    for line in lines:
        print(printable(line))


def describe_row(
    args: ShowArgs, stream: RowStream, sources: dict[str, Source], tokenizer: Tokenizer
) -> Iterator[str]:
    """Where the row of `args` comes from, then its text, a header before each document's part."""
    data = args.data
    assert args.step is not None and data.global_batch_size is not None
    position = np.array([(args.step - 1) * data.global_batch_size + args.row])
    (stage,), (index,), (row,) = stream.stages.stage_of(position), *stream.source_rows(position)
    name = stream.names[index]
    source = sources[name]
    (tokens,) = stream.rows(position)
    start, n_rows = int(row) * data.seq_len, source.n_rows(data.seq_len, data.n_views)
    epoch, number = divmod(stream.counts(int(position[0]))[name], n_rows)
    begun = data.stages[stage - 1].from_step if stage else 0
    yield (
        f"step {args.step}, row {args.row}: position {position[0]:,} of the run, "
        f"in the stage from step {begun}"
    )
    yield (
        f"{name}: row {row:,} of {n_rows:,}, number {number:,} of epoch {epoch}: tokens {start:,} "
        f"to {start + len(tokens) - 1:,} of {source.n_tokens:,}"
    )
    at = 0
    for span in source.spans(start, len(tokens)):
        end = at + span.end - span.first
        before = sum(s.train.documents for s in source.manifest.shards[: span.shard])
        yield (
            f"--- tokens {at:,} to {end - 1:,} of the row: document {before + span.document:,} "
            f"({find_record(source, span, data)}), its tokens {span.first:,} to "
            f"{span.end - 1:,} of {span.n_tokens:,}"
        )
        yield tokenizer.decode(tokens[at:end])
        at = end


def find_record(source: Source, span: DocumentSpan, args: DataArgs) -> str:
    """`file:line`, or of parquet `file:row`, of the document of `span`. The shard's text is read
    again up to there: a few seconds at most, and nothing has to be stored about every document."""
    files = {file.path: file for file in source_files(source.name, args)}
    inputs = source.shard_inputs(span.shard)
    parts = [replace(files[part.path], begin=part.begin, end=part.end) for part in inputs]
    trained = (
        (part, record.number)
        for part in parts
        for record in read_records(part, args.text_keys(source.name))
        if record.wrong is None and (source.manifest.heldout_tail or not record.is_held_out)
    )
    part, number = next(islice(trained, span.document, None))
    return f"{part.full}:{records_before(part) + number}"


def describe_mixture(
    args: ShowArgs, stream: RowStream, sources: dict[str, Source]
) -> Iterator[str]:
    """The size of each source, how much of it the run reads, and the shares of the rows."""
    data = args.data
    assert data.global_batch_size is not None
    n = args.steps * data.global_batch_size
    yield (
        f"{args.steps:,} steps of {data.global_batch_size:,} rows of {data.seq_len:,} tokens: "
        f"{n:,} rows, {n * data.seq_len:,} tokens"
    )
    table = [["source", "documents", "tokens", "rows an epoch", "rows read", "epochs"]]
    for name, read in stream.counts(n).items():
        source = sources[name]
        n_rows = source.n_rows(data.seq_len, data.n_views)
        counts = (source.manifest.total("train", "documents"), source.n_tokens, n_rows, read)
        table.append([name, *(f"{count:,}" for count in counts), f"{read / n_rows:.3f}"])
    yield from align(table, left=1)
    for from_step, weights in [(0, data.sources), *((s.from_step, s.sources) for s in data.stages)]:
        parts = (f"{name} {float(share):.4%}" for name, share in shares(weights).items())
        yield f"shares of the rows from step {from_step}: {', '.join(parts)}"


if __name__ == "__main__":
    run_program(main)
