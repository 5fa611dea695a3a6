"""What a run measures and reports: the keys of `logging`, `profiling` and `eval`."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lingua.config.schema import MAX_ROWS, MAX_TOKENS, Free, bounds

WAITING = "eval"  # the mark of a checkpoint whose evaluation job has not finished


@dataclass
class WandbArgs:
    """Arguments of wandb.init."""

    project: Free[str] = "lingua"  # project of the run
    entity: Free[str | None] = None  # user or team; null: the account's default
    name: Free[str | None] = None  # displayed name of the run; null: the config's `name`
    group: Free[str | None] = None  # runs that are displayed together
    job_type: Free[str | None] = None  # label within a group
    tags: Free[list[str] | None] = None  # labels to search for
    notes: Free[str | None] = None  # a longer description
    # null: WANDB_MODE or the setting of `wandb` itself, else online
    mode: Free[Literal["online", "offline", "disabled"] | None] = None
    dir: Free[str | None] = None  # folder of wandb's own files; null: the dump dir


@dataclass
class TrackioArgs:
    project: Free[str] = "lingua"  # project of the run
    # Space of Hugging Face that gets everything; null: TRACKIO_SPACE_ID, else this machine alone
    space_id: Free[str | None] = None


@dataclass
class LoggingArgs:
    freq: Free[int] = 10  # steps per line of metrics.jsonl and of the console
    # what gets the numbers besides the files of the dump dir; a group below names its own too
    to: Free[list[Literal["wandb", "tensorboard", "trackio"]]] = field(default_factory=list)
    wandb: Free[WandbArgs | None] = None  # Weights & Biases, when given
    trackio: Free[TrackioArgs | None] = None  # Trackio, when given: arguments of trackio.init

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "freq")

    @property
    def trackers(self) -> dict[str, Any]:
        """The group of each tracker that gets the numbers, by the name of its package."""
        groups = {"wandb": self.wandb, "tensorboard": None, "trackio": self.trackio}
        return {name: group for name, group in groups.items() if group or name in self.to}


@dataclass
class ProfilingArgs:
    run: Free[bool] = False  # write the traces, snapshots and counts described below
    mem_warmup: Free[int] = 0  # steps after the start before CUDA memory is recorded
    mem_steps: Free[int] = 2  # steps whose CUDA allocations are recorded; 0 for none
    # Steps after the start before the trace. In the last of them, which that slows down,
    # collectives are counted and the profiler warms up; 0 is therefore taken as 1.
    profile_warmup: Free[int] = 10
    profile_steps: Free[int] = 2  # steps that are traced; 0 for neither a trace nor a count

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "mem_warmup", "mem_steps", "profile_warmup", "profile_steps")


@dataclass
class HarnessArgs:
    # names of tasks, groups and tags of the harness or of task_dir, or YAML files of tasks. The
    # files of tasks execute code (`!function`, templates): use those that you trust
    tasks: Free[list[str]] = field(default_factory=list)
    task_dir: Free[str | None] = None  # folder of your own task files, which execute code
    num_fewshot: Free[int | None] = None  # solved examples in each prompt; null: each task's own
    # documents of each task at most; below 1 the share of them; null: all
    limit: Free[float | None] = None
    batch_size: Free[int] = 32  # texts of one forward on each data-parallel rank
    max_gen_tokens: Free[int] = 256  # tokens generated at most, for tasks that set no limit
    seed: Free[int] = 1234  # seeds the choice of solved examples, and sampling

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.tasks:
            yield "tasks", "must name at least one task"
        if self.task_dir is not None and not os.path.isdir(self.task_dir):
            yield "task_dir", "must be a folder of task files"
        yield from bounds(self, 0, "num_fewshot")
        if self.limit is not None and not (0 < self.limit < 1 or self.limit % 1 == 0 < self.limit):
            yield "limit", "must be a whole number, a share between 0 and 1, or null"
        yield from bounds(self, 1, "batch_size", maximum=MAX_ROWS)
        yield from bounds(self, 1, "max_gen_tokens", maximum=MAX_TOKENS)
        yield from bounds(self, 0, "seed", maximum=2**32 - 1)  # as numpy's generators ask
