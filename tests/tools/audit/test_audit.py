"""`lingua audit`: a run is computed again on other meshes, and what is wrong with one is named."""

import json
import re
import shutil
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest

from apps.main import app as main
from apps.mtp import app as mtp
from apps.sft import app as sft
from lingua.app import App
from lingua.base.errors import UserError
from lingua.base.lock import claimed
from lingua.run.receipt import hash_of, write_receipt
from lingua.tools.audit.ranks import Ranks
from lingua.tools.commands.runs import main as print_table
from lingua.tools.runs.records import open_runs
from lingua.tools.runs.report.content import page_content
from tests.apps.meshes import Sizes, mesh
from tests.apps.runs import Outcome, Runs
from tests.checkpoints import resign
from tests.forks import mingru
from tests.tools.audit.audits import (
    METRICS,
    ONE,
    RECEIPT,
    SETTINGS,
    SHARDS,
    TP,
    Forger,
    audit,
    audit_here,
    edit,
    found_wrong,
    is_event,
    is_step,
    verdict,
)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Outcome:
    """A finished run of one process. Tests copy it, or only read."""
    return runs.train(ONE, SETTINGS)


@pytest.fixture
def copy(whole: Outcome, tmp_path: Path) -> Path:
    return whole.copy(tmp_path / "run").dump_dir


# ---- runs that are right


def stop_and_resume(runs: Runs, app: App, settings: dict[str, Any]) -> Path:
    """A run that two meshes have trained; the second start has another micro-batch."""
    keys = SETTINGS | settings
    stopped = runs.train(SHARDS, keys | {"stop_at": 4}, app=app)
    keys |= {"data.batch_size": 2}
    return runs.train(ONE, keys, app=app, dump_dir=stopped.dump_dir).dump_dir


@pytest.mark.parametrize(
    ("app", "settings", "meshes"),
    [
        pytest.param(main, {"model.dropout": 0.1}, [TP], id="main"),
        pytest.param(main, {"data.document_mask": "ignore"}, [SHARDS], id="main, documents",
                     marks=pytest.mark.soak),
        pytest.param(sft, {}, [ONE, SHARDS, TP], id="sft", marks=pytest.mark.soak),
        pytest.param(mtp, {"data.n_views": 3, "model.n_layers": 3, "model.head_layers": 2},
                     [ONE, SHARDS, TP], id="mtp", marks=pytest.mark.soak),
        pytest.param(main, {"distributed.model_dtype": "bf16"}, [ONE, SHARDS, TP], id="bf16",
                     marks=pytest.mark.soak),
        pytest.param(mingru.app, {}, [ONE, SHARDS], id="a fork", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_a_run_that_was_stopped_and_resumed_is_computed_again_on_other_meshes(
    runs: Runs, request: pytest.FixtureRequest, app: App, settings: dict[str, Any],
    meshes: list[Sizes],
) -> None:  # fmt: skip
    if app is sft:
        settings = settings | request.getfixturevalue("talk")
    folder = stop_and_resume(runs, app, settings)
    code, said = audit(runs, folder, "run=false")
    assert (code, verdict(said)) == (0, "the files fit")
    assert said.count("as in its train_state.json and receipt.json") == 4  # 3, 4, 6, 8
    named = [f"app={app.path}"] if app is mingru.app else []  # a file may not name it
    for i, sizes in enumerate(meshes):
        words = [f"{key}={size}" for key, size in mesh(sizes).items()]
        code, said = audit(runs, folder, *words, f"seed={i}", "sample=2", *named, n=prod(sizes))
        assert code == 0, said
        assert verdict(said).startswith(("equal up to rounding: at most ", "equal to the bit"))
    assert re.search(
        r"topology: \[1, 2, 1\] recorded, ", audit(runs, folder, "steps=1..3", *named)[1]
    )


def test_a_segment_on_the_mesh_of_the_run_is_equal_to_the_bit(runs: Runs, whole: Outcome) -> None:
    code, said = audit(runs, whole.dump_dir)
    lines = [f"steps {a} to {b}: equal to the bit" for a, b in ((1, 3), (4, 6), (7, 8))]
    assert code == 0 and said.splitlines()[-4:] == [*lines, "verdict: equal to the bit"]
    code, said = audit(runs, whole.dump_dir, "steps=5")
    assert code == 0 and "steps 4 to 5: equal to the bit" in said
    assert "no checkpoint of step 5: weights are not compared" in said


def test_an_exact_run_is_equal_to_the_bit_on_another_mesh(runs: Runs) -> None:
    exact = {"deterministic": "mesh", "data.batch_size": 2}
    folder = runs.train(SHARDS, SETTINGS | exact).dump_dir
    code, said = audit(runs, folder, "seed=0")
    assert code == 0 and verdict(said) == "equal to the bit"
    assert said.count("topology: [1, 2, 1] recorded, [1, 1, 1] here") == 3
    forger = Forger(folder)
    forger.change(is_step(5), loss=lambda loss: loss * (1 + 1e-15))  # less than any tolerance
    found_wrong(runs, forger.sign(), "steps=4..6", named="differs from step 5 on, loss first")


def test_a_run_that_was_killed_and_resumed_has_the_receipt_of_one_that_was_not(
    runs: Runs, whole: Outcome, copy: Path
) -> None:
    receipt = json.loads((copy / RECEIPT).read_text())
    (copy / RECEIPT).unlink()
    for step in (6, 8):  # as it is when the run is killed in step 6
        shutil.rmtree(copy / f"checkpoints/{step:010d}")
    (copy / "metrics.validation.jsonl").unlink()
    lines = (copy / METRICS).read_text().splitlines(keepends=True)
    (copy / METRICS).write_text("".join(lines[:6]) + lines[6][:20])
    runs.train(ONE, SETTINGS, dump_dir=copy)
    again = json.loads((copy / RECEIPT).read_text())
    assert again["run"] == receipt["run"] and again["run_hash"] == receipt["run_hash"]
    assert len(again["starts"]) == 2 and len(receipt["starts"]) == 1
    other = runs.train(ONE, SETTINGS | {"seed": 1}).dump_dir
    assert json.loads((other / RECEIPT).read_text())["run_hash"] != receipt["run_hash"]


def test_an_audit_is_shown_where_it_is_recorded(
    runs: Runs, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table([str(copy)])
    assert "audited" not in capsys.readouterr().out
    words = [str(copy), "run=false", "record=true", f"out={tmp_path}/verdict.json"]
    runs.ranks.run(1, audit_here, words)
    entry = json.loads((tmp_path / "verdict.json").read_text())
    assert entry == json.loads((copy / "audit.json").read_text())
    print_table([str(copy)])
    shown = f"{entry['date'][:10]}, files: the files fit"
    assert shown in capsys.readouterr().out
    header, row = page_content(open_runs([copy]))["overview"]
    assert row[header.index("audited")] == shown


# ---- faults, each named for what it is


def test_one_changed_line_of_metrics(runs: Runs, copy: Path) -> None:
    forger = Forger(copy)
    forger.change(is_step(5), loss=lambda loss: loss * 1.001)
    named = f"{copy}/{METRICS}:6: does not fit"  # after the start
    found_wrong(runs, copy, "run=false", named=named)
    receipt = (copy / RECEIPT).read_text()
    forger.sign()
    (copy / RECEIPT).write_text(receipt)
    named = f"{METRICS}:9: its link is not that of receipt.json"
    found_wrong(runs, copy, "run=false", named=named)
    write_receipt(copy)  # nothing but computing shows it now
    assert audit(runs, copy, "run=false")[0] == 0
    found_wrong(runs, copy, "steps=4..6", named="differs from step 5 on, loss first")
    run_hash = json.loads((copy / RECEIPT).read_text())["run_hash"]
    edit(copy / RECEIPT, lambda text: text.replace(run_hash, hash_of({})))
    found_wrong(runs, copy, "run=false", named="receipt.json: does not fit its own hash")


def test_lines_that_were_removed(runs: Runs, copy: Path) -> None:
    lines = (copy / METRICS).read_text().splitlines(keepends=True)
    (copy / METRICS).write_text("".join(lines[:4] + lines[5:]))
    found_wrong(runs, copy, "run=false", named=f"{METRICS}:5: does not fit")
    (copy / METRICS).write_text("".join(lines[:7]))
    found_wrong(runs, copy, "run=false", named="2 lines at its end are missing")


def test_a_damaged_tensor_and_a_swapped_checkpoint(runs: Runs, copy: Path) -> None:
    checkpoint = copy / "checkpoints/0000000006"
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for words in ("run=false", "steps=7..8"):
        found_wrong(runs, copy, words, named=f"{checkpoint} is damaged (__0_0.distcp: wrong")
    shutil.rmtree(checkpoint)
    other = runs.train(ONE, SETTINGS | {"optim.lr": 3e-3}).dump_dir
    shutil.copytree(other / "checkpoints/0000000006", checkpoint)
    found_wrong(runs, copy, "run=false", named=f"{checkpoint}: damaged, or that of another run")
    (copy / RECEIPT).unlink()
    named = f"{checkpoint}/config.yaml: "
    found_wrong(runs, copy, "run=false", named=named)
    shutil.copy(copy / "config.yaml", checkpoint)  # nothing but computing shows it now
    resign(checkpoint)
    found_wrong(runs, copy, "steps=7..8", named="differs from step 7 on, loss first: ")
    said = found_wrong(runs, copy, "steps=4..6", named="differs from step 6 on, weights first: ")
    assert "it is damaged, or that of another run" in said


def test_one_changed_document_of_the_text(runs: Runs, copy: Path, tmp_path: Path) -> None:
    text = shutil.copytree(runs.text, tmp_path / "text")
    words = f"data.root_dir={text}", "steps=4..6"
    assert audit(runs, copy, *words)[0] == 0
    edit(text / "one.jsonl", lambda t: "".join(f"{line}\n" for line in t.splitlines()[:-40]))
    said = found_wrong(runs, copy, *words, named=" on, rows first: ")
    assert "known to differ: data: data.content.one: " in verdict(said)


def test_another_seed(runs: Runs, copy: Path) -> None:
    forger, receipt = Forger(copy), (copy / RECEIPT).read_text()
    forger.configs(lambda text: text.replace("seed: 42", "seed: 43"))
    found_wrong(runs, forger.sign(), "steps=1..3", named="differs from step 1 on, rows first")
    (copy / RECEIPT).write_text(receipt)
    named = "config: seed: 42 in receipt.json, 43 in the run"
    found_wrong(runs, copy, "run=false", named=named)


def test_a_changed_block_and_another_version_of_torch(runs: Runs, copy: Path) -> None:
    words = "app=tests.forks.mingru", "steps=1..3"
    said = found_wrong(runs, copy, *words, named="from step 1 on, loss first: ")
    assert re.search(r"known to differ: code: \w{12} recorded, \w{12} here", verdict(said))
    forger = Forger(copy)
    forger.change(is_event("start"), torch="1.0")
    forger.sign()
    code, said = audit(runs, copy, "steps=1..3")
    assert code == 0 and "torch: 1.0 recorded, " in said


# ---- what cannot be audited


def test_a_run_whose_data_origin_or_app_is_gone_cannot_be_compared(runs: Runs, copy: Path) -> None:
    def not_compared(*words: str) -> str:
        code, said = audit(runs, copy, *words)
        assert code == 2 and verdict(said).startswith("cannot be compared: steps 1 to 3: ")
        return verdict(said)

    gone = not_compared("data.root_dir=/nowhere", "steps=1..3")
    assert "data.sources.one: there is no /nowhere/one" in gone
    assert "checkpoint.init_from: /nowhere" in not_compared(
        "checkpoint.init_from=/nowhere", "steps=1..3"
    )
    forger = Forger(copy)
    forger.configs(lambda text: re.sub("app: .*", "app: gone", text))
    forger.sign()
    assert "app = gone" in not_compared("steps=1..3")


def test_steps_without_a_checkpoint_are_computed_from_the_start_of_a_running_run(
    runs: Runs, copy: Path
) -> None:
    shutil.rmtree(copy / "checkpoints")
    (copy / RECEIPT).unlink()
    with claimed(copy / "run.lock"):
        code, said = audit(runs, copy, "steps=5..6")
    assert code == 0 and "steps 1 to 6: equal to the bit" in said
    assert f"{copy} is running: what it has recorded so far is checked" in said


def refuse_here() -> str:
    """The mistake that ranks share, which rank 0 has found before the others ask for it."""
    ranks = Ranks()
    time.sleep(ranks.rank / 2)

    def refuse() -> None:
        raise UserError("wrong")

    with pytest.raises(UserError) as raised:
        ranks.share("checks", refuse)
    return str(raised.value)


def test_rank_0_whose_process_has_the_store_ends_after_the_others_know_a_mistake(
    runs: Runs,
) -> None:
    assert runs.ranks.run(3, refuse_here) == ["wrong"] * 3
