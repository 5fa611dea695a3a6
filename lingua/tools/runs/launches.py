"""How runs came about and how they ended: what one who saw results may have decided by them."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from lingua.base.dump_dir import BASE_CONFIG, CODE_COMMIT, LAUNCHED_AT
from lingua.base.files import read_bytes
from lingua.run.records import Record


def was_stopped(record: Record, step: float | None) -> bool:
    """Whether a run was left before its end, or by `stop_at` before `step`."""
    newest, steps = record.newest.get("step", 0), record.config.get("steps")
    if record.state == "finished" and step is not None and isinstance(steps, int):
        return newest < step <= steps
    return record.state == "stopped" and record.end is not None


def unfinished(record: Record, step: float | None = None) -> str:
    """How a run is not over, or was ended from outside, by `stop_at` before `step`; empty where it
    is over by itself, or trains nothing."""
    if record.end is None:
        return ""
    if was_stopped(record, step):
        return f"was stopped at step {record.newest.get('step', 0):,}"
    if record.state == "failed" and "error" not in record.newest:
        return "was killed"
    return {"running": "is running", "not started": "has not begun"}.get(record.state, "")


def launched_at(record: Record) -> datetime | None:
    """When a run was decided on: at its first start, or before, when a launch wrote its config, as
    for a sweep whose runs wait for each other. File dates do not count: a copy has others. None:
    not recorded."""
    starts = [event for event in record.events if event["event"] == "start"]
    times = [_time(event.get("created_at")) for event in starts[:1]]
    times += map(_time, _launch(record)[:1])
    return min(filter(None, times), default=None)


def assumes_equal(runs: Sequence[Record]) -> bool:
    """Whether the assumption that all arms vary alike was recorded for all runs before they first
    started: who launches runs again may have seen results."""
    launches = [(_launch(run), launched_at(run)) for run in runs]
    return all("variance=equal" in words and _time(words[0]) == at for words, at in launches)


def _launch(record: Record) -> list[str]:
    """What a launch has written before the config: its time, and assumptions."""
    with suppress(OSError, UnicodeDecodeError):
        if place := record.resolve(record.folder / BASE_CONFIG):
            first_line = read_bytes(place).decode().partition("\n")[0]
            return first_line.removeprefix(LAUNCHED_AT).split()
    return []


def first_result(runs: Sequence[Record]) -> tuple[datetime, str] | None:
    """When the first of the runs wrote its first held-out loss, which continuing it does not move,
    and its name. None: not recorded."""
    first = ((lines.text("created_at")[0], r.name) for r in runs for lines in r.validation.values())
    times = ((time, name) for text, name in first if (time := _time(text)))
    return min(times, default=None)


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError):  # not recorded
        return None


def not_given(runs: Sequence[Record]) -> dict[str, list[str]]:
    """{name of a launch of several runs: the names of those that are not among `runs`}, of launches
    of which some are. Reads names of files alone."""
    given = {run.folder.resolve() for run in runs}
    others: dict[str, list[str]] = {}
    for launch in sorted({folder.parent for folder in given}):
        if (launch / CODE_COMMIT).exists():
            launched = sorted(path.parent for path in launch.glob(f"*/{BASE_CONFIG}"))
            others[launch.name] = [folder.name for folder in launched if folder not in given]
    return {launch: names for launch, names in others.items() if names}
