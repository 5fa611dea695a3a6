"""How far the preparation of a source is, whoever works on it."""

import os
import sys
import time

from tqdm import tqdm

from lingua.data.prepare.units import Job, Unit, record_path

LOOK_S = 2.0  # between two looks at what other processes have finished


class Progress:
    """A bar on stderr: the bytes of the finished units, with those that this machine has read of
    others, the rate and the time left. In a log file it is a line now and then."""

    def __init__(self, units: list[Unit], job: Job, enabled: bool):
        self._folder, self._looked = job.folder, 0.0
        self._sizes = {record_path(unit, job).name: unit.size for unit in units}
        self._finished = self._look()
        self._bar = tqdm(
            total=sum(self._sizes.values()),
            initial=self._finished,
            desc=f"tokenizing {job.source}",
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            mininterval=0.2 if sys.stderr.isatty() else 30,
            disable=not enabled,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, n_read: int) -> None:
        """`n_read` bytes of units that are not finished were read on this machine."""
        if self._bar.disable:
            return
        if not n_read or time.monotonic() > self._looked + LOOK_S:
            self._finished = self._look()
        self._bar.update(self._finished + n_read - self._bar.n)

    def _look(self) -> int:
        self._looked = time.monotonic()
        with os.scandir(self._folder) as entries:
            return sum(self._sizes.get(entry.name, 0) for entry in entries)
