"""What can be found wrong with a run from its files alone, without computing a step."""

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lingua.base.dump_dir import CONFIG, METRICS, RECEIPT, STEP_FOLDER, VALIDATION
from lingua.base.errors import UserError
from lingua.base.format import counted
from lingua.checkpoint.folder import Checkpoint, find
from lingua.checkpoint.origin import content
from lingua.checkpoint.saved import damage, flat_config
from lingua.checkpoint.source import TensorSource, open_checkpoint
from lingua.config.values import shorten
from lingua.monitor.metrics import Chain
from lingua.run.receipt import (
    checkpoint_folder,
    hash_of,
    receipt_of,
    reproduced_config,
    saved_state,
)
from lingua.tools.audit.due import wrong_configs, wrong_held_out, wrong_lines
from lingua.tools.audit.files import RunFiles, numbered_lines


class Finding(NamedTuple):
    """What one look at the files has shown."""

    text: str
    fits: bool | None = True  # None: there is nothing to compare


def check_lines(record: RunFiles) -> list[Finding]:
    """The receipt, and the lines one by one; reads no checkpoint's tensors."""
    receipt, finding = check_receipt(record)
    findings = [finding, *(check_chain(record, file, receipt) for file in (METRICS, VALIDATION))]
    for check in (wrong_lines, wrong_held_out, wrong_configs):
        findings += [Finding(text, False) for text in islice(check(record), 1)]
    if receipt:
        findings += _differences(receipt, receipt_of(record.folder))
    return findings


def check_checkpoints(record: RunFiles, chosen: Collection[str] | None = None) -> Iterator[Finding]:
    """Every file of the checkpoints, or of those with the `chosen` paths. In a process group of
    one."""
    skipped: list[Finding] = []

    def report(line: str) -> None:
        if STEP_FOLDER.fullmatch(Path(line.split(" is not")[0]).name):
            skipped.append(Finding(line.removesuffix(": skipped"), False))

    find(checkpoint_folder(record.folder, record.config), report)
    yield from skipped
    receipt, _ = check_receipt(record)
    for checkpoint in record.checkpoints:
        if chosen is None or str(checkpoint.path) in chosen:
            yield check_checkpoint(checkpoint, record, receipt)


def check_receipt(record: RunFiles) -> tuple[dict[str, Any], Finding]:
    """(the receipt of a run, empty where it has none to use, what is to say about it)."""
    path, receipt = record.folder / RECEIPT, record.receipt
    if not receipt:
        return {}, Finding(f"{path}: does not exist; a run writes it when it is finished", None)
    hashes = hash_of({k: v for k, v in receipt.items() if k != "hash"}), hash_of(receipt["run"])
    if hashes != (receipt.get("hash"), receipt.get("run_hash")):
        return {}, Finding(f"{path}: does not fit its own hash", False)
    return receipt, Finding(f"{path}: fits its own hash")


def check_expected(record: RunFiles, run_hash: str) -> Finding:
    """Whether the receipt of a run is that of an earlier copy, whose `run_hash` this is."""
    receipt, _ = check_receipt(record)
    if not receipt:
        return Finding(f"expect = {run_hash}: there is no receipt to compare with", None)
    if receipt["run_hash"] != run_hash:
        now = receipt["run_hash"]
        return Finding(
            f"expect = {run_hash}: this is another history, whose run_hash is {now}", False
        )
    return Finding(f"{record.folder / RECEIPT}: is of the history that is expected")


def check_chain(record: RunFiles, file: str, receipt: dict[str, Any]) -> Finding:
    """The first line of a file that does not fit the lines before it, if there is one."""
    path, last, counts = record.folder / file, Chain(), [0, 0]
    nothing: dict[str, Any] = {"lines": 0}
    known = receipt["run"]["chains"].get(file) if receipt else None
    expected = known or nothing, (receipt.get("events") if file == METRICS else None) or nothing
    for number, line in numbered_lines(path):
        next_link, chain, of_events = last.link(line), line.get("chain"), "event" in line
        if next_link is None or (chain is None and not last[of_events]):
            continue  # of an app, or of a version without a chain
        if chain != next_link:
            why = "this line was changed, or lines before it were changed, removed or added"
            return Finding(f"{path}:{number}: does not fit the lines before it: {why}", False)
        last, known = last.after(line), expected[of_events]
        counts[of_events] += 1
        if counts[of_events] == known["lines"] and chain != known.get("chain"):
            why = "these lines were written anew after the run"
            return Finding(f"{path}:{number}: its link is not that of {RECEIPT}: {why}", False)
    for n, known, what in zip(counts, expected, ("line", "event"), strict=True):
        if n < known["lines"]:
            missing = counted(known["lines"] - n, what)
            return Finding(f"{path}: {missing} at its end are missing, as {RECEIPT} shows", False)
    if not counts[0]:
        return Finding(f"{path}: has no line with a link", None)
    events = f" and {counted(counts[1], 'event')}" if counts[1] else ""
    return Finding(f"{path}: {counted(counts[0], 'line')}{events}, each fits those before it")


def check_checkpoint(checkpoint: Checkpoint, record: RunFiles, receipt: dict[str, Any]) -> Finding:
    """The files of a checkpoint, its tensors, and whether it is of this run."""
    where, state = checkpoint.path, saved_state(checkpoint.path)
    if why := damage(checkpoint):
        return Finding(why, False)
    try:
        found = digest_of_files(open_checkpoint(checkpoint))
        config = reproduced_config(flat_config(where / CONFIG, record.config))
    except UserError as error:
        return Finding(f"{where}: cannot be read: {error}", False)
    recorded = {
        "its train_state.json": state.get("tensors"),
        RECEIPT: tensors_of(receipt).get(str(checkpoint.step)),
    }
    for place, expected in recorded.items():
        if expected and expected != found:
            why = f"its tensors have the hash {found}, {place} has {expected}"
            return Finding(f"{where}: damaged, or that of another run: {why}", False)
    now = reproduced_config(record.config)
    other = [k for k in ("seed", *now) if k in config and config[k] != now.get(k)]
    if other and not any("config" in start for start in record.starts):  # see wrong_configs
        key = other[0]
        why = f"its {CONFIG} has {key}: {config[key]}, that of the run {now.get(key)}"
        is_other = key == "seed" and len(record.starts) == 1  # a later start may have changed it
        return Finding(f"{where}: files and tensors fit; {why}", not is_other)
    known = " and ".join(place for place, expected in recorded.items() if expected)
    return Finding(f"{where}: files fit; tensors {found}" + (f", as in {known}" if known else ""))


def digest_of_files(source: TensorSource) -> str:
    """The `digest` of tensors that are stored, read by this process alone. Raises UserError."""
    return content(source, source.tensors, alone=True)


def tensors_of(receipt: dict[str, Any]) -> dict[str, str]:
    """The hashes of tensors that a receipt has, by step; empty where there is no receipt."""
    return (receipt.get("checkpoints") or {}) | receipt["run"]["tensors"] if receipt else {}


def _differences(receipt: dict[str, Any], now: dict[str, Any]) -> Iterator[Finding]:
    """What the files of the run say now that the receipt does not. Chains are compared line by
    line; a run that went on has more of everything, and removed checkpoints are no fault."""
    then, run = receipt["run"], now["run"]
    went_on = len(now["starts"]) > len(receipt["starts"])  # earlier versions keep the receipt then
    for group in () if went_on else ("config", "data"):
        for key in then[group].keys() | run[group].keys():
            a, b = (part[group].get(key, "(absent)") for part in (then, run))
            if a != b and not (group == "data" and not run[group]):
                shown = f"{shorten(str(a))} in {RECEIPT}, {shorten(str(b))} in the run"
                yield Finding(f"{group}: {key}: {shown}", False)
    if then["chains"] == run["chains"] and then["held_out"] != run["held_out"]:
        yield Finding(f"held-out losses are not those of {RECEIPT}", False)
    hashes, n = tensors_of(now), len(receipt["starts"])
    for step, then_hash in tensors_of(receipt).items():
        if hashes.get(step, then_hash) != then_hash:
            yield Finding(f"the checkpoint of step {step} is not that of {RECEIPT}", False)
    if now["starts"][:n] != receipt["starts"]:
        yield Finding(f"the starts in {METRICS} are not those of {RECEIPT}", False)
