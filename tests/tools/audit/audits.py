"""What the tests of audits share: the command in real ranks, and somebody who forges runs."""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lingua.base.errors import UserError
from lingua.monitor.metrics import NOT_CHAINED
from lingua.run.receipt import write_receipt
from lingua.tools.commands.audit import main as audit_command
from tests.apps.runs import Runs
from tests.checkpoints import resign

ONE, SHARDS, TP = (1, 1, 1), (1, 2, 1), (1, 1, 2)
SETTINGS: dict[str, Any] = {"steps": 8, "stop_at": "null", "checkpoint.dump.every": 3}
METRICS, VALIDATION, RECEIPT = "metrics.jsonl", "metrics.validation.jsonl", "receipt.json"
CONFIG = "config.yaml"
UNFORESEEN = "which no check has foreseen"  # behind an error that is not a UserError
OF_THE_RUN = ("start", "topology", "stop")  # events that are links


def audit_here(argv: list[str]) -> tuple[int, str]:
    """(exit code, output) of the command in this process."""
    said = io.StringIO()
    environment = dict(os.environ)
    try:
        with redirect_stdout(said):
            audit_command(argv)
    except SystemExit as left:
        return int(left.code or 0), said.getvalue()
    except UserError as error:  # as the program does
        return 2, str(error)
    finally:
        os.environ.update(environment)
    raise AssertionError("the command ends with an exit code")


def audit(runs: Runs, folder: Path, *words: str, n: int = 1) -> tuple[int, str]:
    """(exit code, output) of the command on n ranks. It changes no file of the run."""
    before = contents(folder)
    code, said = runs.ranks.run(n, audit_here, [str(folder), *words])[0]
    assert contents(folder) == before and UNFORESEEN not in said, said
    return code, said


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def found_wrong(
    runs: Runs, folder: Path, *words: str, named: str, code: int = 1, n: int = 1
) -> str:
    """The output of an audit on n ranks, whose verdict is that something is wrong, and what."""
    left, said = audit(runs, folder, *words, n=n)
    assert left == code and named in verdict(said), said
    return said


def verdict(said: str) -> str:
    return said.rpartition("verdict: ")[2].rstrip()


def edit(file: Path, change: Callable[[str], str]) -> None:
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))


# ---- a forger, who makes all hashes anew


Line = dict[str, Any]


@dataclass
class Forger:
    """Changes what a run has recorded, and then all hashes, so that they fit."""

    folder: Path

    def lines(self, file: str = METRICS) -> list[Line]:
        return [orjson.loads(text) for text in (self.folder / file).read_bytes().splitlines()]

    def write(self, lines: list[Line], file: str = METRICS) -> None:
        text = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        (self.folder / file).write_bytes(text)

    def change(self, of: Callable[[Line], bool], file: str = METRICS, **values: Any) -> None:
        """Set values of the lines that are meant; None removes one, a function gets the old one."""
        lines = self.lines(file)
        assert any(map(of, lines))
        for line in filter(of, lines):
            for key, value in values.items():
                line[key] = value(line[key]) if callable(value) else value
                if line[key] is None:
                    del line[key]
        self.write(lines, file)

    def edit_lines(self, change: Callable[[list[Line]], object], file: str = METRICS) -> None:
        lines = self.lines(file)
        change(lines)
        self.write(lines, file)

    def state(self, step: int, change: Callable[[Line], object]) -> None:
        path = self.folder / f"checkpoints/{step:010d}/train_state.json"
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))

    def configs(self, change: Callable[[str], str], of_starts: bool = True) -> None:
        """Edit every config file and, `of_starts`, what the starts have recorded of them."""
        edit(self.folder / CONFIG, change)
        for path in self.folder.glob(f"checkpoints/*/{CONFIG}"):
            path.write_text(change(path.read_text()))
        if of_starts and any("config" in line for line in self.lines()):
            self.change(is_event("start"), config=change)

    def sign(self) -> Path:
        """Make all hashes anew: those of lines and events that have one, of the files of
        checkpoints, and the receipt."""
        for file in (METRICS, VALIDATION):
            lines, last, last_event = self.lines(file), "", ""
            for line in lines:
                if "chain" not in line:
                    continue
                if "event" not in line:
                    line["chain"] = last = link(last, line)
                elif line["event"] in OF_THE_RUN:
                    line["chain"] = last_event = link(last_event + last, line)
            self.write(lines, file)
        for manifest in self.folder.glob("checkpoints/*/manifest.json"):
            resign(manifest.parent)
        write_receipt(self.folder)
        return self.folder


def link(previous: str, line: Line) -> str:
    kept = {key: value for key, value in line.items() if key not in NOT_CHAINED}
    text = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(previous.encode() + text, digest_size=8).hexdigest()


def is_step(step: int) -> Callable[[Line], bool]:
    return lambda line: "event" not in line and line["step"] == step


def is_event(event: str) -> Callable[[Line], bool]:
    return lambda line: line.get("event") == event


def index_of(lines: list[Line], step: int) -> int:
    return next(i for i, line in enumerate(lines) if is_step(step)(line))


def not_exact(text: str) -> str:
    return re.sub("deterministic: mesh", "deterministic: false", text)


def copy_of(run: Path, folder: Path) -> Path:
    return shutil.copytree(run, folder)
