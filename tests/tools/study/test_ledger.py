"""The ledger of a study: it only grows, and what was changed, removed or added by hand is found."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from lingua.tools.study.ledger import HEAD, LEDGER, Ledger
from tests.mistakes import refused

pytestmark = pytest.mark.quick


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / LEDGER).touch()
    made = Ledger(tmp_path)
    with made.writing(print):
        made.append("study", effect=0.01)
        for i in range(4):
            made.append("try", **{"try": i}, keys={"optim.lr": [1e-3, 0.1 + 0.2]})
    return made


def problems(folder: Path) -> list[str]:
    return Ledger(folder).problems


def test_what_is_read_is_what_was_written(ledger):
    again = Ledger(ledger.folder)
    assert again.lines == ledger.lines and again.problems == []
    assert [line["try"] for line in again.of("try")] == [0, 1, 2, 3]
    with again.writing(print):
        line = again.append("look", high=math.inf, low=math.nan)
    assert line["high"] is line["low"] is None and Ledger(ledger.folder).lines[-1] == line
    assert again.of("try", **{"try": 2})[0]["keys"] == {"optim.lr": [1e-3, 0.1 + 0.2]}


@pytest.mark.parametrize("at", range(5))
def test_a_line_that_was_changed_or_removed_is_found_and_nothing_is_added_to_it(ledger, at):
    path = ledger.folder / LEDGER
    lines = path.read_text().splitlines(keepends=True)
    changed = lines[at].replace('"kind":"', '"kind":"x')
    for text in (lines[:at] + lines[at + 1 :], [*lines[:at], changed, *lines[at + 1 :]]):
        path.write_text("".join(text))
        assert problems(ledger.folder)
        before = path.read_bytes()
        refused(lambda: ledger.writing(print).__enter__(), LEDGER)
        assert path.read_bytes() == before
    path.write_text("".join([*lines, lines[-1]]))
    assert problems(ledger.folder)
    path.write_text("".join(lines))
    assert not problems(ledger.folder)


def test_hashes_that_were_computed_again_do_not_hide_a_line_that_is_gone(ledger):
    other = ledger.folder / "other"
    other.mkdir()
    (other / LEDGER).touch()
    forged = Ledger(other)
    for line in ledger.lines[:3]:
        forged.append(line["kind"])
    (ledger.folder / LEDGER).write_bytes((other / LEDGER).read_bytes())
    assert HEAD in problems(ledger.folder)[0]


def test_a_kill_between_two_writes_leaves_a_ledger_that_goes_on(ledger):
    path, head = ledger.folder / LEDGER, ledger.folder / HEAD
    before = head.read_bytes()
    with ledger.writing(print):
        ledger.append("look")
    for _ in range(2):
        head.write_bytes(before)  # killed before the head was written
        assert not problems(ledger.folder)
        with Ledger(ledger.folder).writing(print):
            assert head.read_bytes() != before  # so that another kill is none too many
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"ru')  # the power failed
    assert not problems(ledger.folder)
    again = Ledger(ledger.folder)
    with again.writing(print):
        again.append("run")
    assert path.read_bytes().startswith(whole + b'{"kind":"run"') and not problems(ledger.folder)
    with again.writing(print):  # two lines behind the head: one was added by hand
        again.append("run")
    head.write_bytes(before)
    assert problems(ledger.folder)


def test_two_processes_take_turns(ledger):
    code = """
import sys
from pathlib import Path
from lingua.tools.study.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for i in range(10):
    with ledger.writing(lambda line: None):
        ledger.append("look", of=sys.argv[2], number=len(ledger.lines))
"""
    words = [sys.executable, "-c", code, str(ledger.folder)]
    for process in [subprocess.Popen([*words, name]) for name in "ab"]:
        assert process.wait() == 0
    lines = Ledger(ledger.folder)
    assert not lines.problems
    assert [line["number"] for line in lines.of("look")] == list(range(5, 25))
    assert json.loads((ledger.folder / HEAD).read_text())["lines"] == 25
