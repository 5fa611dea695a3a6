"""The receipt of a finished run, `receipt.json` in its dump dir: what the run is and what came of
it, with hashes, as a function of the files in the dump dir. `run` is the same for a run that was
stopped and resumed, where its numbers are, whatever checkpoints it has kept; `starts` are where and
with what code it was computed.

It shows damage and mistakes. It is no signature: who changes the files can write another.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from lingua.base.dump_dir import CHECKPOINTS, METRICS, RECEIPT, STATE, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import load_json, write_atomically
from lingua.checkpoint.folder import Checkpoint, find
from lingua.monitor.metrics import LINKED_EVENTS, NOT_CHAINED
from lingua.run.args import kind_of
from lingua.run.files import grouped, parse_lines, read_config, read_lines

FORMAT = 2  # 1: the tensors of kept checkpoints are in `run`, and events have no chain


def write_receipt(folder: Path) -> None:
    """Write the receipt of the run in a dump dir. Raises UserError where the disk is full."""
    try:
        write_atomically(folder / RECEIPT, json.dumps(receipt_of(folder), indent=1))
    except OSError as error:
        raise UserError(f"{folder / RECEIPT}: cannot be written: {error}") from None


def is_written(folder: Path, step: int, steps: int) -> bool:
    """Whether a run of `steps` steps that has saved `step` is not at its end, or has a receipt."""
    try:
        return step != steps or load_json(folder / RECEIPT)["run"]["config"]["steps"] == steps
    except (OSError, ValueError, LookupError, TypeError):
        return False


def receipt_of(folder: Path) -> dict[str, Any]:
    """The receipt that the files of a run give now, as values of JSON."""
    config, _ = read_config(folder)
    events, held_out = list(_lines(folder / METRICS, b'"event"')), read_lines(folder / VALIDATION)
    states = {c.step: saved_state(c.path) for c in checkpoints_of(folder, config)}
    newest = states[max(states)] if states else {}
    tensors = {str(step): state.get("tensors", "") for step, state in states.items()}
    last = str(config.get("steps"))
    run = {
        "config": reproduced_config(config),
        "data": newest.get("data", {}),
        "chains": {METRICS: chain_of(_lines(folder / METRICS)), VALIDATION: chain_of(held_out)},
        "tensors": {step: text for step, text in tensors.items() if step == last},
        "held_out": {
            source: {k: v for k, v in measured[-1].items() if k not in NOT_CHAINED}
            for source, measured in sorted(grouped(held_out, "source").items())
        },
    }
    starts = [line for line in events if line.get("event") == "start"]
    receipt = {
        "format": FORMAT,
        "run": run,
        "run_hash": hash_of(run),
        "checkpoints": {step: text for step, text in tensors.items() if step != last},
        "events": chain_of(events, LINKED_EVENTS),
        "starts": [{k: v for k, v in start.items() if k != "config"} for start in starts],
    }
    return json.loads(orjson.dumps(receipt | {"hash": hash_of(receipt)}))


def _lines(path: Path, marked: bytes = b"") -> Iterator[dict[str, Any]]:
    """The lines that contain `marked`, one in memory at a time: there may be millions."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        yield from parse_lines((text for text in file if marked in text), str(path), [])


def chain_of(
    lines: Iterable[dict[str, Any]], events: Collection[str | None] = (None,)
) -> dict[str, Any]:
    """The number of lines that have a link, and the last link: of lines about steps, or of those
    about `events`."""
    links = (line["chain"] for line in lines if line.get("chain") and line.get("event") in events)
    n, last = max(enumerate(links, 1), default=(0, ""), key=lambda pair: pair[0])
    return {"lines": n, "chain": last}


def reproduced_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that the numbers of a run depend on, by more than rounding."""
    return {key: value for key, value in config.items() if kind_of(key) is None}


def checkpoints_of(folder: Path, config: dict[str, Any]) -> list[Checkpoint]:
    """The whole checkpoints of the run in a dump dir, by step."""
    return sorted(find(checkpoint_folder(folder, config)), key=lambda c: c.step)


def checkpoint_folder(folder: Path, config: dict[str, Any]) -> Path:
    return Path(config.get("checkpoint.path") or folder / CHECKPOINTS)


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """`train_state.json` of a checkpoint; empty where it cannot be read."""
    try:
        return load_json(checkpoint / STATE)
    except (OSError, ValueError):
        return {}


def hash_of(values: dict[str, Any]) -> str:
    """A hash of values of JSON, 32 hexadecimal digits."""
    text = orjson.dumps(values, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(text, digest_size=16).hexdigest()
