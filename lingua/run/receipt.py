"""The receipt of a finished run, `receipt.json` in its dump dir: what the run is and what came of
it, with hashes, as a function of the files in the dump dir. `run` is the same for a run that was
stopped and resumed, where its numbers are, whatever checkpoints it has kept; `starts` are where and
with what code it was computed.

It shows damage and mistakes. It is no signature: who changes the files can write another.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import orjson
import torch

from lingua.base.dump_dir import CHECKPOINTS, METRICS, RECEIPT, STATE, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import load_json, write_atomically
from lingua.checkpoint.digest import digest_text, hash_part
from lingua.checkpoint.folder import Checkpoint, find
from lingua.checkpoint.source import TensorSource
from lingua.checkpoint.tensors import local_parts
from lingua.monitor.metrics import LINKED_EVENTS, NOT_CHAINED
from lingua.run.args import kind_of
from lingua.run.records import Record, grouped

FORMAT = 2  # 1: the tensors of kept checkpoints are in `run`, and events have no chain


def write_receipt(folder: Path) -> None:
    """Write the receipt of the run in a dump dir. Raises UserError where the disk is full."""
    try:
        write_atomically(folder / RECEIPT, json.dumps(receipt_of(Record(folder)), indent=1))
    except OSError as error:
        raise UserError(f"{folder / RECEIPT}: cannot be written: {error}") from None


def is_written(folder: Path, step: int, steps: int) -> bool:
    """Whether a run of `steps` steps that has saved `step` is not at its end, or has a receipt."""
    try:
        return step != steps or load_json(folder / RECEIPT)["run"]["config"]["steps"] == steps
    except (OSError, ValueError, LookupError, TypeError):
        return False


def receipt_of(record: Record) -> dict[str, Any]:
    """The receipt that the files of a run give now, as values of JSON."""
    states = {c.step: saved_state(c.path) for c in checkpoints_of(record)}
    newest = states[max(states)] if states else {}
    tensors = {str(step): state.get("tensors", "") for step, state in states.items()}
    last = str(record.config.get("steps"))
    run = {
        "config": reproduced_config(record.config),
        "data": newest.get("data", {}),
        "chains": {file: chain_of(record, file) for file in (METRICS, VALIDATION)},
        "tensors": {step: text for step, text in tensors.items() if step == last},
        "held_out": {
            source: {k: v for k, v in lines[-1].items() if k not in NOT_CHAINED}
            for source, lines in sorted(grouped(record.lines(VALIDATION), "source").items())
        },
    }
    starts = [event for event in record.events if event["event"] == "start"]
    receipt = {
        "format": FORMAT,
        "run": run,
        "run_hash": hash_of(run),
        "checkpoints": {step: text for step, text in tensors.items() if step != last},
        "events": chain_of(record, METRICS, of_events=True),
        "starts": [{k: v for k, v in start.items() if k != "config"} for start in starts],
    }
    return json.loads(orjson.dumps(receipt | {"hash": hash_of(receipt)}))


def tensors_of(receipt: dict[str, Any]) -> dict[str, str]:
    """The hashes of tensors that a receipt has, by step; empty where there is no receipt."""
    return receipt.get("checkpoints", {}) | receipt["run"]["tensors"] if receipt else {}


def digest_of_files(source: TensorSource) -> str:
    """The `digest` of tensors that are stored, read by this process alone. What a damaged file
    raises is raised."""
    total = torch.zeros((), dtype=torch.int64)
    for name, t in source.tensors.items():  # one in memory at a time
        for part in local_parts({name: torch.empty_like(t, device="cpu")}):
            source.read_parts([part])
            total += hash_part(part)
    return digest_text(source.tensors, total)


def chain_of(record: Record, file: str, of_events: bool = False) -> dict[str, Any]:
    """The number of lines of a file that have a link, and the last link: of lines about steps, or
    of events."""
    links = [
        line["chain"]
        for line in record.lines(file)
        if line.get("chain") and line.get("event") in (LINKED_EVENTS if of_events else (None,))
    ]
    return {"lines": len(links), "chain": links[-1] if links else ""}


def reproduced_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that the numbers of a run depend on, by more than rounding."""
    return {key: value for key, value in config.items() if kind_of(key) is None}


def checkpoints_of(record: Record) -> list[Checkpoint]:
    """The whole checkpoints of a run, by step."""
    return sorted(find(checkpoint_folder(record)), key=lambda c: c.step)


def checkpoint_folder(record: Record) -> Path:
    return Path(record.config.get("checkpoint.path") or record.folder / CHECKPOINTS)


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
