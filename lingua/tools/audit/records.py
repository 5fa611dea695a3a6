"""What can be found wrong with a run from its files alone, without computing a step."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lingua.base.dump_dir import CONFIG, METRICS, RECEIPT, STEP_FOLDER, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import load_json, read_bytes
from lingua.base.format import counted
from lingua.checkpoint.folder import Checkpoint, damage, find
from lingua.checkpoint.resume import flat_config
from lingua.checkpoint.source import open_checkpoint
from lingua.monitor.metrics import link
from lingua.tools.audit.receipt import (
    checkpoint_folder,
    checkpoints_of,
    digest_of_files,
    hash_of,
    receipt_of,
    reproduced_config,
    saved_state,
)
from lingua.tools.runs.records import Record


class Finding(NamedTuple):
    """What one look at the files has shown."""

    text: str
    fits: bool | None = True  # None: there is nothing to compare


def check_lines(record: Record) -> list[Finding]:
    """The receipt, and the lines one by one; reads no checkpoint's tensors."""
    receipt, findings = read_receipt(record)
    findings += [check_chain(record.folder / file, file, receipt) for file in (METRICS, VALIDATION)]
    if receipt:
        findings += _differences(receipt, receipt_of(record))
    return findings


def check_checkpoints(record: Record, chosen: Collection[str] | None = None) -> list[Finding]:
    """Every file of the checkpoints, or of those with the `chosen` paths. In a process group of
    one."""
    receipt, _ = read_receipt(record)
    skipped: list[Finding] = []

    def report(line: str) -> None:
        if STEP_FOLDER.fullmatch(Path(line.split(" is not")[0]).name):
            skipped.append(Finding(line.removesuffix(": skipped"), False))

    find(checkpoint_folder(record), report)
    checkpoints = checkpoints_of(record)
    if chosen is not None:
        checkpoints = [c for c in checkpoints if str(c.path) in chosen]
    return skipped + [check_checkpoint(c, record, receipt) for c in checkpoints]


def read_receipt(record: Record) -> tuple[dict[str, Any], list[Finding]]:
    """(the receipt of a run, empty where it has none to use, what is to say about it)."""
    path = record.folder / RECEIPT
    if not path.exists():
        return {}, [Finding(f"{path}: does not exist; a run writes it when it is finished", None)]
    try:
        receipt = load_json(path)
        unhashed = {k: v for k, v in receipt.items() if k != "hash"}
        if receipt["hash"] != hash_of(unhashed) or receipt["run_hash"] != hash_of(receipt["run"]):
            return {}, [Finding(f"{path}: does not fit its own hash", False)]
    except (OSError, ValueError, KeyError) as error:
        return {}, [Finding(f"{path}: cannot be read: {error}", False)]
    return receipt, [Finding(f"{path}: fits its own hash")]


def check_chain(path: Path, file: str, receipt: dict[str, Any]) -> Finding:
    """The first line of a file that does not fit the lines before it, if there is one."""
    try:
        texts = read_bytes(path).split(b"\n") if path.exists() else []
    except OSError as error:
        return Finding(f"{path}: cannot be read: {error}", False)
    previous, n_links = "", 0
    expected: dict[str, Any] = {"lines": 0, "chain": ""}
    if receipt:
        expected = receipt["run"]["chains"][file]
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = orjson.loads(text)
            is_event, chain = "event" in line, line.get("chain")
        except (ValueError, AttributeError, TypeError):
            if number == len(texts):  # cut off by a kill: the next start removes it
                break
            return Finding(f"{path}:{number}: is no line of a run", False)
        if is_event or (chain is None and not previous):  # of a version without a chain
            continue
        if chain != link(previous, line):
            why = "this line was changed, or lines before it were changed, removed or added"
            return Finding(f"{path}:{number}: does not fit the lines before it: {why}", False)
        previous, n_links = chain, n_links + 1
        if n_links == expected["lines"] and chain != expected["chain"]:
            why = "these lines were written anew after the run"
            return Finding(f"{path}:{number}: its link is not that of {RECEIPT}: {why}", False)
    if n_links < expected["lines"]:
        missing = counted(expected["lines"] - n_links, "line")
        return Finding(f"{path}: {missing} at its end are missing, as {RECEIPT} shows", False)
    if not n_links:
        return Finding(f"{path}: has no line with a link", None)
    return Finding(f"{path}: {counted(n_links, 'line')}, each fits those before it")


def check_checkpoint(checkpoint: Checkpoint, record: Record, receipt: dict[str, Any]) -> Finding:
    """The files of a checkpoint, its tensors, and whether it is of this run."""
    where, state = checkpoint.path, saved_state(checkpoint.path)
    if why := damage(checkpoint):
        return Finding(why, False)
    try:
        found = digest_of_files(open_checkpoint(checkpoint))
        config = reproduced_config(flat_config(where / CONFIG, record.config))
    except (UserError, OSError, ValueError, KeyError) as error:
        return Finding(f"{where}: cannot be read: {error}", False)
    recorded = {
        "its train_state.json": state.get("tensors"),
        RECEIPT: receipt["run"]["tensors"].get(str(checkpoint.step)) if receipt else None,
    }
    for place, expected in recorded.items():
        if expected and expected != found:
            why = f"its tensors have the hash {found}, {place} has {expected}"
            return Finding(f"{where}: damaged, or that of another run: {why}", False)
    now = reproduced_config(record.config)
    other = [k for k in ("seed", *now) if k in config and config[k] != now.get(k)]
    if other:
        key = other[0]
        why = f"its {CONFIG} has {key}: {config[key]}, that of the run {now.get(key)}"
        return Finding(f"{where}: files and tensors fit; {why}", key != "seed")
    known = " and ".join(place for place, expected in recorded.items() if expected)
    return Finding(f"{where}: files fit; tensors {found}" + (f", as in {known}" if known else ""))


def _differences(receipt: dict[str, Any], now: dict[str, Any]) -> Iterator[Finding]:
    """What the files of the run say now that the receipt does not. Chains are compared line by
    line; a run that went on has more of everything, and removed checkpoints are no fault."""
    then, run = receipt["run"], now["run"]
    for group in ("config", "data"):
        for key in then[group].keys() | run[group].keys():
            a, b = (part[group].get(key, "(absent)") for part in (then, run))
            if a != b and not (group == "data" and not run[group]):
                yield Finding(f"{group}: {key}: {a} in {RECEIPT}, {b} in the run", False)
    if then["chains"] == run["chains"] and then["held_out"] != run["held_out"]:
        yield Finding(f"held-out losses are not those of {RECEIPT}", False)
    n = len(receipt["starts"])
    if now["starts"][:n] != receipt["starts"]:
        yield Finding(f"the starts in {METRICS} are not those of {RECEIPT}", False)
