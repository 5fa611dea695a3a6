"""The `data` group of a configuration: sources, weights, rows and batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Literal

from lingua.base.errors import UserError
from lingua.base.format import counted
from lingua.base.urls import is_url
from lingua.config.schema import (
    MAX_ROWS,
    MAX_TOKENS,
    Additions,
    Announced,
    Free,
    Guarded,
    Operational,
    bounds,
)
from lingua.tokenizer.interface import TokenizerArgs

if TYPE_CHECKING:  # --help, which lists these keys, needs no numpy
    from lingua.data.shards import Source
    from lingua.data.stream import RowStream

SourceName = Annotated[str, "names in data.root_dir"]


@dataclass
class Stage:
    """Other weights, from a step on until the next stage."""

    from_step: int  # completed steps before it: with 1000, step 1001 is the first to use them
    sources: dict[SourceName, float]


@dataclass
class SourceFiles:
    """The files of a source, where its name does not lead to them, and the key of its text."""

    # patterns such as web/**/*.jsonl.zst, relative to data.root_dir, or s3://bucket/web/*.jsonl.zst;
    # a folder means all files in it
    files: list[str] = field(default_factory=list)
    text_key: str | None = None  # key or column of the text; null: text, or else content
    # text, or the form of files of tokens (docs/data.md); null: by their names and first bytes
    format: (
        Literal["text", "uint16", "uint32", "llmc", "megatron", "datatrove", "datasets"] | None
    ) = None


@dataclass
class ChatArgs:
    """Sources of conversations, which a chat template renders; only answers carry loss."""

    # file of the chat template, in Jinja; null: the tokenizer's own
    template: Guarded[str | None] = None
    # an example of more tokens than a row: a bad record, or cut at its end and counted
    on_long_example: Guarded[Literal["refuse", "cut"]] = "refuse"
    # records are pairs of answers, chosen and rejected: two conversations that stay in one row
    pairs: Guarded[bool] = False


@dataclass
class DataArgs:
    root_dir: Operational[str] = "data"  # folder of the sources' text
    # folder of the token shards; null: <root_dir>/.tokens
    cache_dir: Operational[str | None] = None
    # {name: weight}: a file or folder of root_dir with .jsonl, .json, .csv, .tsv, .parquet or text
    # files, which may be compressed as .gz or .zst, or stdlib, the modules of the running Python;
    # weights are shares of rows
    sources: Guarded[dict[SourceName, float]] = field(default_factory=dict)
    # {name: {files: [patterns], text_key: key}} for sources in other places (files such as
    # web/**/*.jsonl.zst) or with another key for the text than text or content
    source_files: Free[dict[str, SourceFiles]] = field(default_factory=dict)
    # other weights later in the run: [{from_step: 1000, sources: {name: weight}}]
    stages: Guarded[list[Stage]] = field(default_factory=list)
    seq_len: Guarded[int] = 2048  # tokens of one view of a row
    # a row is seq_len + n_views - 1 tokens: view 0 the input, the others targets, one token on each
    n_views: Guarded[int] = 2
    batch_size: Additions[int] = 2  # largest number of rows in one forward pass of one rank
    # rows of one optimizer step; null: batch_size * data-parallel ranks * grad_acc_steps
    global_batch_size: Guarded[int | None] = None
    add_bos: Guarded[bool] = True  # begin every document with the tokenizer's bos
    add_eos: Guarded[bool] = True  # end every document with the tokenizer's eos
    tokenizer: TokenizerArgs = field(default_factory=TokenizerArgs)
    # {}: the sources are conversations, records of messages or of prompt and completion, and the
    # loss is on answers alone; null: they are text
    chat: Guarded[ChatArgs | None] = None
    # documents of a row: `none`, they see each other; `ignore` and `keep`, attention and positions
    # restart with each, and its first token is not a target (ignore) or is one (keep)
    document_mask: Guarded[Literal["none", "ignore", "keep"]] = "none"
    workers: Operational[int] = 1  # threads that read rows ahead; 0: the training thread reads them
    # a record that is not JSON, not UTF-8, without text or empty: stop there, or skip and count it
    on_bad_record: Announced[Literal["stop", "skip"]] = "stop"
    # a global batch without a target: stop before it, or count its step, which changes nothing
    on_no_targets: Announced[Literal["stop", "skip"]] = "stop"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "seq_len", maximum=MAX_TOKENS)
        yield from bounds(self, 2, "n_views", maximum=1000)
        yield from bounds(self, 1, "batch_size", "global_batch_size", maximum=MAX_ROWS)
        yield from bounds(self, 0, "workers", maximum=256)
        if is_url(self.root_dir):
            yield "root_dir", "must be a folder here; data.source_files may name URLs"
        marked = self.add_bos or self.add_eos or self.chat is not None
        if self.document_mask != "none" and not marked:
            need = "must be none where documents have neither a first nor a last token; "
            yield "document_mask", need + "set data.add_bos or data.add_eos to true"
        if self.sources or self.stages:  # an app whose rows are no text has none
            yield from _validate_weights(self.sources)
        before = 0
        for i, stage in enumerate(self.stages):
            key = f"stages[{i}].from_step"
            if stage.from_step < 1:
                yield key, "must be at least 1; the weights from the first step on are data.sources"
            elif stage.from_step <= before:
                yield key, f"must be above that of the stage before it, {before}"
            before = max(before, stage.from_step)
            for name, need in _validate_weights(stage.sources):
                yield f"stages[{i}].{name}", need

    def source_key(self, name: str) -> str:
        """Returns the key by which messages name a source."""
        group = "data" if name in self.used_sources() else "validation"
        return f"{group}.sources.{name}"

    @property
    def step_rows(self) -> int:
        """`global_batch_size`, once it is resolved."""
        assert self.global_batch_size is not None
        return self.global_batch_size

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, those of all its views."""
        return self.seq_len + self.n_views - 1

    def used_sources(self) -> list[str]:
        """Every source that has a weight above 0 at some step, sorted."""
        weights = [self.sources, *(stage.sources for stage in self.stages)]
        return sorted({name for w in weights for name, weight in w.items() if weight > 0})

    def read_sources(self, validation: Sequence[str] = ()) -> list[str]:
        """Every source of text that a run reads: those used, and those of `validation.sources`.
        Raises UserError where none is trained on."""
        used = self.used_sources()
        if not used:
            raise UserError(f"data.sources = {{}}: {NO_SOURCE}")
        return [*used, *validation]

    def row_stream(self, sources: "dict[str, Source]", seed: int) -> "RowStream":
        """The rows of a run that reads these prepared sources. Needs `global_batch_size`."""
        from lingua.data.stream import RowStream

        stages = [(stage.from_step * self.step_rows, stage.sources) for stage in self.stages]
        # Rows of conversations are packed when they are prepared, and do not share a token.
        cut = (self.seq_len, self.n_views) if self.chat is None else (self.row_tokens, 1)
        return RowStream(sources, self.sources, *cut, seed, stages)


@dataclass
class ValidationArgs:
    every: Free[int] = 0  # steps between two measurements; 0: at the end of the run only
    # held-out text of each source that is measured, at least: the same for every tokenizer
    bytes: Free[int] = 500_000
    # as tokens, in place of `bytes`; so began the runs of earlier versions
    tokens: Free[int | None] = None
    skip: Free[int] = 0  # so many before, bytes or tokens, are left out: then it is another text
    # names of further sources, as in data.sources, whose loss is measured and that are never
    # trained on
    sources: Free[list[str]] = field(default_factory=list)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "every", "skip")
        yield from bounds(self, 1, "bytes", "tokens")
        for i, name in enumerate(self.sources):
            if not _is_name(name):
                yield f"sources[{i}]", SOURCE_NAME
            if name in self.sources[:i]:
                yield f"sources[{i}]", "is given twice"


NO_SOURCE = "must name at least one source with a weight above 0"
SOURCE_NAME = "the name must be that of a file or folder in data.root_dir, without a path"


def _is_name(name: str) -> bool:
    return name[:1] not in ("", ".") and not any(c in name for c in ("/", "\\", "\0"))


def _validate_weights(weights: dict[str, float]) -> Iterator[tuple[str, str]]:
    for name, weight in weights.items():
        if not _is_name(name):
            yield f"sources.{name}", SOURCE_NAME
        if not (isfinite(weight) and weight >= 0):
            yield f"sources.{name}", "must be a finite number, at least 0"
    if not any(weight > 0 for weight in weights.values()):
        yield "sources", NO_SOURCE


def micro_steps(
    global_batch_size: int,
    dp_size: int,
    batch_size: int,
    grad_acc_steps: int | None = None,
    grains: bool = False,
) -> tuple[int, int]:
    """(micro-steps per step, rows per micro-batch), the same on every rank; rows <= batch_size.
    Without `grad_acc_steps`, as few micro-steps as `batch_size` allows. With `grains`, the rows do
    not depend on `dp_size`. Raises UserError."""
    if grains:
        rows = min(batch_size, global_batch_size)
        n_micro = -(-n_grains(global_batch_size, rows) // dp_size)
        if grad_acc_steps not in (None, n_micro):
            raise UserError(
                f"grad_acc_steps = {grad_acc_steps}: must be {n_micro} here, or null, with "
                "deterministic = mesh, which derives it from data.batch_size"
            )
        return n_micro, rows
    max_rows = -(-global_batch_size // dp_size)  # rows on the fullest rank
    min_steps = -(-max_rows // batch_size)
    n_micro = grad_acc_steps or min_steps
    if not min_steps <= n_micro <= max_rows:  # too few for the rows, or one would have no row
        raise UserError(
            f"grad_acc_steps = {n_micro}: must be {min_steps} to {max_rows}, or null to derive it, "
            f"since data.global_batch_size = {global_batch_size} gives "
            f"{counted(max_rows, 'row')} a rank, on {counted(dp_size, 'data-parallel rank')}, and "
            f"data.batch_size = {batch_size}"
        )
    return n_micro, -(-max_rows // n_micro)


def n_grains(global_batch_size: int, rows: int) -> int:
    """Micro-batches of `rows` that a global batch consists of, the last one perhaps padded."""
    return -(-global_batch_size // rows)
