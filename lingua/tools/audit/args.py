"""Keys of an audit."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lingua.config.schema import Free, bounds


@dataclass
class AuditArgs:
    steps: Free[str | None] = None  # the steps to compute again, A..B; null: a sample
    sample: Free[int] = 5  # segments between saved steps that are drawn at random
    seed: Free[int | None] = None  # seed of the sample; null: today's date
    heldout: Free[bool] = True  # measure the held-out losses of these steps again
    # run_hash of an earlier copy of the run's receipt: another history than that one differs
    expect: Free[str | None] = None
    run: Free[bool] = True  # compute steps; false: check the files alone, all checkpoints included
    # file of Python that computes the steps, in a process that cannot import lingua, such as
    # apps/onefile/train.py; null: the training program
    by: Free[str | None] = None
    out: Free[str | None] = None  # file of JSON for the verdict; null: none
    # write the verdict to audit.json in the run's folder, for `lingua runs` and the report
    record: Free[bool] = False

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "sample")
        if self.expect is not None and not re.fullmatch("[0-9a-f]{32}", self.expect):
            yield "expect", "must be the run_hash of a receipt, 32 hexadecimal digits"
        if self.by is not None and not self.run:
            yield "by", "must be null with run = false, which computes nothing"
