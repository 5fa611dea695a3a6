"""No row twice and none left out, over a run with every kind of stop: counted from the rows that
its ranks put through forward, each start on another topology. What counts of a step is what the
last start that made it consumed: what earlier ones did of it was undone."""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from apps.main.transformer import build
from lingua.app import Built
from tests.apps.meshes import Sizes
from tests.apps.runs import (
    GLOBAL_BATCH,
    Interrupt,
    NanAt,
    Outcome,
    Runs,
    Twist,
    differs,
    train_here,
)
from tests.ranks import Ranks

BAD_STEP, END = 18, 22
SETTINGS: dict[str, Any] = {
    "steps": 30,
    "stop_at": END,
    "data.batch_size": 4,
    "checkpoint.dump.every": 2,
    "validation.every": 5,  # whose rows are others, and do not count
}


@dataclass
class Start:
    sizes: Sizes
    build: Callable[[Any], Built] = build
    settings: dict[str, Any] = field(default_factory=dict)
    killed: bool = False
    refused: bool = False


def starts(bad_row: list[int]) -> list[Start]:
    """Every start of the run, by how it ends."""
    return [
        Start((1, 1, 1), settings={"stop_at": 3}),
        Start((1, 2, 1), Interrupt(signal.SIGTERM, forward=3, rank=1)),
        Start((2, 1, 1), Interrupt(signal.SIGKILL, forward=4, rank=0), killed=True),
        Start((1, 1, 2), Interrupt(signal.SIGUSR2, forward=5, rank=None)),
        Start((1, 3, 1), NanAt(bad_row), refused=True),
        Start((2, 2, 1), Interrupt(signal.SIGINT, forward=2, rank=3)),
        Start((1, 2, 1), Interrupt(signal.SIGKILL, forward=None, rank=1), killed=True),
        Start((2, 1, 1)),
    ]


def consumed(folders: list[Path]) -> list[dict[int, dict[str, str]]]:
    """Of each start, by step, the rows and a hash of what they held; tp ranks held the same."""
    of_starts = []
    for folder in folders:
        parts: dict[tuple[int, int], dict[str, str]] = {}
        for file in sorted(folder.iterdir()):
            for line in map(json.loads, file.read_text().splitlines()):
                rows = parts.setdefault((line["step"], line["dp"]), line["rows"])
                assert rows == line["rows"]
        steps: dict[int, dict[str, str]] = {}
        for (step, _), rows in sorted(parts.items()):
            assert not rows.keys() & steps.get(step, {}).keys()
            steps.setdefault(step, {}).update(rows)
        of_starts.append(steps)
    return of_starts


def survived(of_starts: list[dict[int, dict[str, str]]]) -> list[tuple[int, str]]:
    """Rows, in the order of steps, whose update is in the final run."""
    last = {step: rows for steps in of_starts for step, rows in steps.items()}
    return [(int(row), held) for _, rows in sorted(last.items()) for row, held in rows.items()]


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("whole") / "rows"
    return runs.train((1, 1, 1), SETTINGS, twist=Twist(consumed=folder)), folder


def test_no_row_is_used_twice_and_none_is_skipped_over_every_kind_of_stop(runs, whole, tmp_path):
    bad_row = runs.stream().rows([(BAD_STEP - 1) * GLOBAL_BATCH + 3])[0, :16].tolist()
    folders: list[Path] = []
    for start in starts(bad_row):
        folders.append(tmp_path / str(len(folders)))
        where = SETTINGS | start.settings | {"dump_dir": tmp_path / "run"}
        twist = Twist(consumed=folders[-1])
        if start.killed:
            config = runs.config(start.sizes, where)
            mortal = Ranks()
            with pytest.raises(AssertionError, match="its process ended"):
                mortal.run(2, train_here, config, start.build, twist)
            mortal.close()
        else:
            runs.train(
                start.sizes, where, build=start.build, twist=twist,
                dump_dir=tmp_path / "run", refused=start.refused,
            )  # fmt: skip
    run = Outcome(tmp_path / "run", [])
    assert differs(run, whole[0]) == []
    assert len([line for line in run.events if line["event"] == "topology"]) == 7

    of_starts = consumed(folders)
    assert all(of_starts) and BAD_STEP in of_starts[4]
    again = [set(a) & {s for b in of_starts[:i] for s in b} for i, a in enumerate(of_starts)]
    assert again[3] and again[5] == {BAD_STEP}  # stops that undid what was consumed
    rows = survived(of_starts)
    assert sorted(row for row, _ in rows) == list(range(END * GLOBAL_BATCH))
    assert len({held for _, held in rows}) == END * GLOBAL_BATCH  # less than an epoch
    assert sorted(rows) == sorted(survived(consumed([whole[1]])))


def test_a_row_left_out_and_one_too_many_are_seen(runs, tmp_path):
    folders = [tmp_path / "before", tmp_path / "after"]
    run = runs.train((1, 2, 1), {"stop_at": 2}, twist=Twist(consumed=folders[0]))
    late = Twist(consumed=folders[1], shift=1)
    runs.train((1, 1, 2), {"stop_at": 3}, dump_dir=run.dump_dir, twist=late)
    rows = {row for row, _ in survived(consumed(folders))}
    assert rows ^ set(range(3 * GLOBAL_BATCH)) == {2 * GLOBAL_BATCH, 3 * GLOBAL_BATCH}
