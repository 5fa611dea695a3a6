"""Trackio as a tracker of a run: a database of this machine for all runs of a project, in trackio's
own folder; with a `space_id`, a Space of Hugging Face."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from numbers import Real
from pathlib import Path
from typing import Any

from lingua.base.dump_dir import TRACKIO_ID
from lingua.monitor.args import TrackioArgs


class Trackio:
    """The trackio run of a dump dir: a new one, or the run that `<dump_dir>/trackio_id` names."""

    def __init__(
        self, args: TrackioArgs, name: str, config: dict[str, Any], folder: Path, step: int
    ) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import get_storage_mode

        self.table, self.storage, self.last_step = trackio.Table, SQLiteStorage, 0
        id_file = folder / TRACKIO_ID
        run_id = id_file.read_text().strip() if id_file.exists() else None
        settings = {**vars(args), "name": name, "config": config, "embed": False}
        settings |= {"auto_log_cpu": False, "auto_log_gpu": False}
        self.run: Any = trackio.init(**settings, resume="allow" if run_id else "never")
        self.run.id = run_id or self.run.id  # another run may have the name, and be the newest
        id_file.write_text(self.run.id + "\n")
        # and not on a Space, or in files that the dashboard puts into a database
        self.local = self.run.url is None and get_storage_mode() == "sqlite"
        if self.local:  # raises where it cannot be written, which trackio only prints
            with closing(sqlite3.connect(SQLiteStorage.init_db(args.project))) as db, db:
                later = "DELETE FROM metrics WHERE run_id = ? AND step > ?"
                db.execute(later, (self.run.id, step))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, Real)}
        self.run.log(numbers, step)
        self.last_step = max(self.last_step, step)

    def samples(self, step: int, source: str, pairs: Sequence[tuple[str, str]]) -> None:
        table = self.table(columns=["prompt", "text"], data=[list(pair) for pair in pairs])
        self.run.log({f"samples/{source}": table}, step)

    def finish(self) -> None:
        self.run.finish()
        if self.local:  # what its thread could not write is lost without an error
            written = self.storage.get_max_step_for_run(self.run.project, run_id=self.run.id)
            if (written or 0) < self.last_step:
                raise OSError(f"its database ends at step {written}")
