"""When a run saves, what it keeps and what it starts from: the keys of `checkpoint`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lingua.base.urls import wrong_url
from lingua.config.schema import Free, Operational, bounds


@dataclass
class SaveEvery:
    every: Operational[int] = 1000  # steps between two saves; 0 or -1: none
    keep: Operational[int] = -1  # how many of the newest to keep; 0 or -1: all

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, -1, "every", "keep")


@dataclass
class DumpEvery(SaveEvery):
    # and minutes since the last save, by the clock of rank 0; 0 or null: none for that reason
    every_minutes: Operational[float | None] = 30.0

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from bounds(self, 0, "every_minutes")


@dataclass
class CheckpointArgs:
    dump: DumpEvery = field(default_factory=DumpEvery)  # to resume from
    eval: SaveEvery = field(default_factory=lambda: SaveEvery(every=0))  # to evaluate later
    # keep every saved step divisible by this; 0: none for that reason
    keep_every: Operational[int] = 0
    # measure the held-out loss at every save, and keep the checkpoint where it is the lowest
    keep_best: Operational[bool] = False
    path: Operational[str | None] = None  # folder of the checkpoints; null: <dump_dir>/checkpoints
    # URL of a store, such as s3://bucket/runs: checkpoints are uploaded into a folder of the run
    # there, and a start of the run without one here takes the newest; null: none
    mirror: Operational[str | None] = None
    async_save: Operational[bool] = False  # write from a copy in memory, while training goes on
    # a save that fails: `continue` training and try again at the next one, or `stop`; a run whose
    # last save fails ends with an error either way
    on_error: Operational[Literal["continue", "stop"]] = "continue"
    # what is compared with the manifest before loading: sizes and checksums, or sizes alone
    verify: Operational[Literal["full", "size"]] = "full"
    # what a run without a checkpoint of its own starts from: a checkpoint, a dump_dir (its newest),
    # a folder of Hugging Face's transformers, a Meta Lingua checkpoint or a file of torch.save;
    # null: initial weights. A checkpoint and a folder of transformers also give the keys of `model`
    # and of the tokenizer that are left open. init_ckpt_path is another name of this key
    init_from: Free[str | None] = None
    # from init_from take optimizer, step and position as well as the model
    continue_training_from_init: Free[bool] = False
    # parameters or modules, by patterns of names, that init_from may lack: they keep initial values
    init_new: Free[list[str]] = field(default_factory=list)
    # guarded config keys that may differ from the checkpoint's when resuming
    allow_change: Free[list[str]] = field(default_factory=list)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "keep_every")
        if self.mirror is not None and (need := wrong_url(self.mirror)):
            yield "mirror", need
        if self.continue_training_from_init and self.init_from is None:
            yield "init_from", "must be given when continue_training_from_init is true"
        if self.init_new and (self.init_from is None or self.continue_training_from_init):
            yield "init_new", "needs init_from, and a run that takes the model alone from it"

    def overdue(self, seconds: float) -> bool:
        """Whether a save is due `seconds` after the last one, whatever the step."""
        minutes = self.dump.every_minutes or 0
        return 0 < 60 * minutes <= seconds

    def due(self, step: int) -> bool:
        """Whether a save is due once `step` is complete."""
        return any(kind.every > 0 and step % kind.every == 0 for kind in (self.dump, self.eval))
