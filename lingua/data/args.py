"""What the user says about data."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lingua.args import Announced, Free, Guarded
from lingua.data.stream import weight_problems
from lingua.tokenizer import TokenizerArgs


@dataclass
class DataArgs:
    root_dir: Free[str] = "data"  # folder of the sources' text
    cache_dir: Free[str | None] = None  # folder of the token shards; null: <root_dir>/.tokens
    # {name: weight}: a folder, .jsonl or .txt file of root_dir, or stdlib, the modules of the
    # running Python; the weights are shares of rows
    sources: Guarded[dict[str, float]] = field(default_factory=dict)
    seq_len: Guarded[int] = 2048  # tokens of one view of a row
    # a row is seq_len + n_views - 1 tokens: view 0 the input, the others targets, one token on each
    n_views: Guarded[int] = 2
    batch_size: Free[int] = 2  # largest number of rows in one forward pass of one rank
    # rows of one optimizer step; null: batch_size * data-parallel ranks * grad_acc_steps
    global_batch_size: Guarded[int | None] = None
    add_bos: Guarded[bool] = True  # begin every document with the tokenizer's bos
    add_eos: Guarded[bool] = True  # end every document with the tokenizer's eos
    tokenizer: TokenizerArgs = field(default_factory=TokenizerArgs)
    # documents of a row: `none`, they see each other; `ignore` and `keep`, attention and positions
    # start anew with each, and its first token is no target (ignore) or is one (keep)
    document_mask: Guarded[Literal["none", "ignore", "keep"]] = "none"
    workers: Free[int] = 1  # threads that read rows ahead; 0: the training thread reads them
    # a record that is no JSON, has no text, is not UTF-8 or is empty: stop there, or skip and count
    on_bad_record: Announced[Literal["stop", "skip"]] = "stop"

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is required of it) for every value out of range."""
        for name, least in (("seq_len", 1), ("n_views", 2), ("batch_size", 1), ("workers", 0)):
            if getattr(self, name) < least:
                yield name, f"must be at least {least}"
        if self.global_batch_size is not None and self.global_batch_size < 1:
            yield "global_batch_size", "must be at least 1, or null"
        for name in self.sources:
            if not name or name[0] == "." or any(part in name for part in ("/", "\\", "\0")):
                need = "the name must be that of a file or folder in data.root_dir, without a path"
                yield f"sources.{name}", need
        for key, _, need in weight_problems(self.sources):
            yield key, need

    def cache_path(self) -> Path:
        """The folder that holds the folders of token shards."""
        return Path(self.root_dir) / ".tokens" if self.cache_dir is None else Path(self.cache_dir)
