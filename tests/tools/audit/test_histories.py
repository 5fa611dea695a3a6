"""Runs with a history: killed after the last checkpoint, pruned, changed as they were allowed to;
and a cache of shards that others share."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.apps.runs import Outcome, Runs
from tests.tools.audit.audits import (
    METRICS,
    ONE,
    RECEIPT,
    SETTINGS,
    VALIDATION,
    Forger,
    audit,
    contents,
    found_wrong,
    is_step,
    verdict,
)


def receipt_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RECEIPT).read_text())


def test_a_run_that_is_killed_after_its_last_checkpoint_is_finished_by_the_next_start(
    runs: Runs, tmp_path: Path
) -> None:
    whole = runs.train(ONE, SETTINGS)
    samples, receipt = whole.samples, receipt_of(whole.dump_dir)
    assert {line["step"] for line in samples} == {8}
    for left in (0, 1):  # samples that the killed process has written
        killed = whole.copy(tmp_path / str(left)).dump_dir
        (killed / RECEIPT).unlink()
        for file, kept in (("samples.jsonl", left), (METRICS, -1)):  # without the event of the end
            lines = (killed / file).read_text().splitlines(keepends=True)
            (killed / file).write_text("".join(lines[:kept]))
        again = runs.train(ONE, SETTINGS, dump_dir=killed)
        texts = [
            [{**line, "created_at": None, "start_number": None} for line in run.samples]
            for run in (whole, again)
        ]
        assert texts[0] == texts[1]
        assert receipt_of(killed)["run_hash"] == receipt["run_hash"]
        assert audit(runs, killed, f"expect={receipt['run_hash']}", "run=false")[0] == 0
        before = contents(killed)
        runs.train(ONE, SETTINGS, dump_dir=killed)  # finished: nothing is made again
        del before[killed / "train.log"]
        assert before.items() <= contents(killed).items()
    longer, earlier = SETTINGS | {"steps": 10}, (killed / RECEIPT).read_text()
    runs.train(ONE, longer | {"stop_at": 9}, dump_dir=killed)
    assert not (killed / RECEIPT).exists()
    (killed / RECEIPT).write_text(earlier)  # as earlier versions left it
    assert audit(runs, killed, "run=false")[0] == 0
    runs.train(ONE, longer, dump_dir=killed)
    assert receipt_of(killed)["run"]["config"]["steps"] == 10


def test_run_hash_does_not_depend_on_the_checkpoints_that_are_kept(runs: Runs) -> None:
    kept = [runs.train(ONE, SETTINGS | {"checkpoint.dump.keep": n}).dump_dir for n in (-1, 1)]
    assert [len(list(run.glob("checkpoints/*/"))) for run in kept] == [3, 1]
    one, other = map(receipt_of, kept)
    assert one["run_hash"] == other["run_hash"]
    assert len(one["checkpoints"]) == 2 and not other["checkpoints"]
    other_run = receipt_of(runs.train(ONE, SETTINGS | {"optim.lr": 3e-3}).dump_dir)
    assert other_run["run_hash"] != one["run_hash"]


@pytest.fixture(scope="module")
def changed(runs: Runs) -> Outcome:
    """A run that was stopped at step 4, and went on with another seed and rate, as it was allowed
    to; a third start follows at step 5, without a change."""
    run = runs.train(ONE, SETTINGS | {"stop_at": 4, "checkpoint.async_save": True})
    other = SETTINGS | {"seed": 7, "optim.lr": 1e-3, "logging.freq": 3}
    allowed = {"checkpoint.allow_change": "[seed]", "stop_at": 5}
    runs.train(ONE, other | allowed, dump_dir=run.dump_dir)
    return runs.train(ONE, other, dump_dir=run.dump_dir)


def test_a_run_with_an_allowed_change_is_audited_where_it_changed(
    runs: Runs, changed: Outcome, tmp_path: Path
) -> None:
    code, said = audit(runs, changed.dump_dir, "steps=1..8")
    assert (code, verdict(said)) == (0, "equal to the bit"), said
    pruned = changed.copy(tmp_path / "pruned").dump_dir
    for step in (4, 5):  # one segment with three starts
        shutil.rmtree(pruned / f"checkpoints/{step:010d}")
    code, said = audit(runs, pruned, "steps=4..6")
    assert code == 0 and "steps 4 to 6: equal to the bit" in said
    forger = Forger(pruned)
    forger.configs(lambda text: text.replace("seed: 7", "seed: 8"))
    found_wrong(runs, forger.sign(), "steps=4..6", named="differs from step 5 on, rows first")


def test_held_out_losses_of_saves_are_measured_again(runs: Runs) -> None:
    """With keep_best every save is measured, here 3, 6 and 8, also outside of the period of 4."""
    settings = SETTINGS | {"checkpoint.keep_best": True, "validation.every": 4}
    run = runs.train(ONE, settings).dump_dir
    code, said = audit(runs, run, "steps=1..6")
    assert code == 0 and "steps 4 to 6: equal to the bit" in said
    forger = Forger(run)
    assert sorted({line["step"] for line in forger.lines(VALIDATION)}) == [3, 4, 6, 8]
    forger.change(is_step(6), VALIDATION, nats_per_token=lambda n: n * 1.001)
    named = "differs from step 6 on, held-out nats_per_token of one first: "
    found_wrong(runs, forger.sign(), "steps=4..6", named=named)


def test_where_no_number_is_recorded_before_the_first_that_differs(runs: Runs) -> None:
    settings = SETTINGS | {"logging.freq": 4, "checkpoint.dump.every": 8}
    forger = Forger(runs.train(ONE, settings).dump_dir)
    forger.change(is_step(8), loss=lambda n: n * 1.001)
    said = found_wrong(runs, forger.sign(), named="differs from step 8 on, loss first: ")
    assert verdict(said).endswith(" here; of steps 5 to 7 no number is recorded")


def test_an_audit_writes_nothing_into_a_cache_that_others_share(runs: Runs, tmp_path: Path) -> None:
    text, cache = shutil.copytree(runs.text, tmp_path / "text"), tmp_path / "cache"
    (text / ".tokens").rename(cache)
    settings = {"data.root_dir": text, "data.cache_dir": cache}
    run = runs.train(ONE, SETTINGS | settings).dump_dir

    def state() -> dict[Path, tuple[bytes, int]]:
        return {path: (data, path.stat().st_mtime_ns) for path, data in contents(cache).items()}

    os.utime(text / "one.jsonl", ns=(1, 1))  # its shards are up to date, and their manifest is not
    before = state()
    assert audit(runs, run, "steps=4..6")[0] == 0 and state() == before
    damaged = next(path for path in sorted(cache.rglob("*.train.tokens")) if "one-" in str(path))
    damaged.write_bytes(bytes(len(damaged.read_bytes())))
    before = state()
    assert audit(runs, run, "steps=4..6")[0] == 0 and state() == before  # made elsewhere
    shutil.rmtree(cache)
    assert audit(runs, run, "steps=4..6")[0] == 0 and not cache.exists()


def test_a_run_of_an_earlier_version_is_not_accused_of_what_it_did_not_record(
    runs: Runs, tmp_path: Path
) -> None:
    sample = Path(__file__).parents[2] / "samples/0.1.0"
    run = shutil.copytree(sample / "run", tmp_path / "run")
    said = audit(runs, run, f"data.root_dir={sample}/text")[1]
    assert "differs" not in verdict(said), said
