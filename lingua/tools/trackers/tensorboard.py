"""TensorBoard as a tracker of a run: event files in the dump dir, one for each start.

Records are written here and not by torch's SummaryWriter, whose file another thread writes, up to
two minutes later: what is logged before a checkpoint is in the file when that is saved, and a full
disk is noticed at once. TensorFlow, which that writer imports where it exists, is not needed.
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from textwrap import indent
from typing import Any

from lingua.base.dump_dir import TENSORBOARD


class TensorBoard:
    """An event file: scalars, text, and the config as hyperparameters."""

    def __init__(
        self, args: None, name: str, config: dict[str, Any], folder: Path, step: int
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams, text

        self.event, self.summary, self.text = Event, Summary, text
        (folder / TENSORBOARD).mkdir(exist_ok=True)
        place = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        file = open(folder / TENSORBOARD / f"events.out.tfevents.{place}", "xb")  # noqa: SIM115
        self.records = RecordWriter(file)
        self._write(file_version="brain.Event:2")
        # What earlier files have of later steps is not shown.
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        sources = [*config.get("data.sources", ()), *config.get("validation.sources", ())]
        metrics = ["loss", *(f"validation/{source}/nats_per_byte" for source in sources)]
        experiment, session, _ = hparams(_hyperparameters(config), dict.fromkeys(metrics, 0.0))
        self._write(summary=experiment)
        self._write(summary=session)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {tag: float(value) for tag, value in values.items() if isinstance(value, Real)}
        scalars = [self.summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
        self._write(step=step, summary=self.summary(value=scalars))

    def samples(self, step: int, source: str, pairs: Sequence[tuple[str, str]]) -> None:
        # as blocks of code in Markdown
        blocks = [indent(prompt + written, "    ") for prompt, written in pairs]
        self._write(step=step, summary=self.text(f"samples/{source}", "\n\n---\n\n".join(blocks)))

    def finish(self) -> None:
        self.records.close()

    def _write(self, **fields: Any) -> None:
        self.records.write(self.event(wall_time=time.time(), **fields).SerializeToString())
        self.records.flush()


def _hyperparameters(config: Mapping[str, Any]) -> dict[str, float | str | None]:
    """The config's values as the plugin takes them: numbers, and all others but null as text."""
    plain = int, float, str, type(None)
    return {
        key: value if type(value) in plain else json.dumps(value, default=str)
        for key, value in config.items()
    }
