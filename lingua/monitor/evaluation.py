"""Which benchmarks are run. lingua.tools.inference.harness runs them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from lingua.config.schema import MAX_ROWS, MAX_TOKENS, Free, bounds

WAITING = "eval"  # the mark of a checkpoint whose evaluation job has not finished


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
