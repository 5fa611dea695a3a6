"""How runs came about."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from lingua.base.dump_dir import BASE_CONFIG, LAUNCHED_AT
from lingua.run.records import Record


def launched_at(record: Record) -> datetime | None:
    """When a run was decided on: at its first start, or before, when a launch wrote its config, as
    for a sweep whose runs wait for each other. File dates do not count: a copy has others. None:
    not recorded."""
    starts = [event for event in record.events if event["event"] == "start"]
    times = [_time(event.get("created_at")) for event in starts[:1]]
    with suppress(OSError, UnicodeDecodeError), (record.folder / BASE_CONFIG).open() as file:
        times.append(_time(file.readline().removeprefix(LAUNCHED_AT).strip()))
    return min(filter(None, times), default=None)


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError):  # not recorded
        return None
