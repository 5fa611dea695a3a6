"""Forged runs, all hashes of which fit: what computing them again finds, and what no audit can."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lingua.parallel.alone import one_process
from lingua.tools.audit.again import open_saved
from lingua.tools.audit.records import digest_of_files
from lingua.tools.audit.segments import Part, Segment
from lingua.tools.audit.verdict import limit_of
from tests.apps.runs import Runs
from tests.checkpoints import resign
from tests.tools.audit.audits import (
    METRICS,
    ONE,
    RECEIPT,
    SETTINGS,
    VALIDATION,
    Forger,
    audit,
    copy_of,
    found_wrong,
    index_of,
    is_event,
    is_step,
    not_exact,
    verdict,
)

# A line of every second step, a held-out loss of every fourth, checkpoints of 3, 6 and 8.
EXACT = SETTINGS | {
    "deterministic": "mesh",
    "logging.freq": 2,
    "validation.every": 4,
    "data.batch_size": 4,
}
LESS = 1 + 1e-9  # a factor of a forged loss: less than any tolerance


@pytest.fixture(scope="module")
def exact(runs: Runs) -> Path:
    """A run that promises bits. Tests copy it, or only read."""
    return runs.train(ONE, EXACT).dump_dir


@pytest.fixture
def forger(exact: Path, tmp_path: Path) -> Forger:
    return Forger(copy_of(exact, tmp_path / "run"))


def test_an_honest_run_is_equal_to_the_bit_with_its_hashes_made_anew(
    runs: Runs, exact: Path, forger: Forger
) -> None:
    run_hash = json.loads((exact / RECEIPT).read_text())["run_hash"]
    for folder in (exact, forger.sign()):
        code, said = audit(runs, folder, f"expect={run_hash}")
        assert (code, verdict(said)) == (0, "equal to the bit")
    assert (forger.folder / METRICS).read_bytes() == (exact / METRICS).read_bytes()
    code, said = audit(runs, exact, "heldout=false", "steps=4..6")
    left_out = "3 of 8 steps computed again; held-out losses not computed again"
    assert (code, verdict(said)) == (0, f"equal to the bit; {left_out}")


def remove(step: int, file: str = METRICS) -> Callable[[Forger], None]:
    return lambda f: f.edit_lines(lambda lines: lines.pop(index_of(lines, step)), file)


def repeat(step: int, file: str = METRICS, as_step: int | None = None) -> Callable[[Forger], None]:
    """A copy of a line behind it, with its own step or another."""

    def change(lines: list[dict]) -> None:
        i = index_of(lines, step)
        behind = i + (2 if file == VALIDATION else 1)  # both sources of the step
        lines.insert(behind, lines[i] | {"step": as_step or step})

    return lambda f: f.edit_lines(change, file)


def move_on(state: dict) -> None:
    state["progress"]["position"] += 7
    state["tokens"] += 7 * 16


def remove_events(lines: list[dict]) -> None:
    lines[:] = [line for line in lines if "event" not in line]


def hide(lines: list[dict]) -> None:
    line = lines[index_of(lines, 6)]
    line |= {"event": None, "loss": 1.0}
    del line["chain"]


@pytest.mark.parametrize(
    ("forge", "words", "named"),
    [
        (remove(4), "run=false", f"{METRICS}: the line of step 4 is missing"),
        (remove(8), "run=false", f"{METRICS}: the line of step 8 is missing"),
        (repeat(4), "run=false", f"{METRICS}: the line of step 4 is there twice"),
        (repeat(4, as_step=5), "run=false", f"{METRICS}: the line of step 5 is not due"),
        (repeat(8, as_step=10), "run=false", f"{METRICS}: the line of step 10 is not due"),
        (remove(4, VALIDATION), "run=false", f"{VALIDATION}: the line of step 4, one is missing"),
        (repeat(4, VALIDATION), "run=false", f"{VALIDATION}: the line of step 4, one is there t"),
        (repeat(4, VALIDATION, as_step=5), "run=false", "the line of step 5, one is not due"),
        (lambda f: f.change(is_step(4), tokens=lambda n: n + 1), "steps=4..6",
         "differs from step 4 on, tokens first: 449 recorded, 448 here"),
        (lambda f: f.change(is_step(6), loss=lambda n: n * LESS), "steps=4..6",
         "differs from step 6 on, loss first: "),
        (lambda f: f.change(is_step(8), grad_norm=None), "steps=7..8",
         "differs from step 8 on, gradient norm first: None recorded"),
        (lambda f: f.change(is_step(8), extra=1.0), "steps=7..8",
         "differs from step 8 on, extra first: 1.0 recorded, None here"),
        (lambda f: f.state(6, move_on), "steps=4..6",
         "differs from step 6 on, position of its progress in the checkpoint first: 49 "),
        (lambda f: f.state(3, move_on), "steps=4..6", "differs from step 4 on, rows first"),
        (lambda f: f.change(is_step(4), VALIDATION, nats_per_byte=lambda n: n * LESS), "steps=4..6",
         "differs from step 4 on, held-out nats_per_byte of one first: "),
        (lambda f: f.change(is_step(8), VALIDATION, text="another"), "steps=7..8",
         "differs from step 8 on, held-out text of one first: another recorded"),
        (lambda f: f.state(8, lambda state: state.update(held_out=state["held_out"] * LESS)),
         "steps=7..8", "differs from step 8 on, held-out loss in the checkpoint first: "),
        (lambda f: f.edit_lines(remove_events), "steps=4..6",
         f"{METRICS}: the line of step 2 is before any start"),
        (lambda f: f.edit_lines(hide), "run=false",
         f"{METRICS}:4: is no line of a run: event = null: must be text"),
    ],
)  # fmt: skip
def test_a_forged_record_differs(
    runs: Runs, forger: Forger, forge: Callable[[Forger], None], words: str, named: str
) -> None:
    forge(forger)
    found_wrong(runs, forger.sign(), words, named=named)


def test_steps_after_the_newest_checkpoint_are_drawn_too(runs: Runs, forger: Forger) -> None:
    shutil.rmtree(forger.folder / "checkpoints/0000000008")
    code, said = audit(runs, forger.sign())
    assert (code, verdict(said)) == (
        0,
        "equal to the bit; there is no checkpoint of the last step, 8",
    )
    forger.change(is_step(8), loss=lambda n: n * LESS)
    found_wrong(runs, forger.sign(), named="differs from step 8 on, loss first: ")


def test_held_out_lines_of_one_start_that_are_gone(runs: Runs) -> None:
    stopped = runs.train(ONE, EXACT | {"stop_at": 4}).dump_dir
    forger = Forger(runs.train(ONE, EXACT, dump_dir=stopped).dump_dir)
    assert audit(runs, forger.sign(), "run=false")[0] == 0
    remove(8, VALIDATION)(forger)
    named = f"{VALIDATION}: the line of step 8, one is missing"
    found_wrong(runs, forger.sign(), "run=false", named=named)


def test_a_tensor_with_a_value_that_is_no_number_differs(runs: Runs, forger: Forger) -> None:
    forger.configs(not_exact)
    assert audit(runs, forger.sign(), "steps=4..6")[0] == 0
    folder = forger.folder / "checkpoints/0000000006"
    name = "model.norm.weight"
    with one_process():
        value = open_saved(folder).whole([name])[name].numpy().tobytes()
        [file] = [path for path in folder.glob("*.distcp") if value in path.read_bytes()]
        no_number = np.float32("nan").tobytes() + value[4:]
        file.write_bytes(file.read_bytes().replace(value, no_number))
        resign(folder)
        digest = digest_of_files(open_saved(folder))
    forger.state(6, lambda state: state.update(tensors=digest))
    named = f"differs from step 6 on, weights first: {name} is inf apart"
    found_wrong(runs, forger.sign(), "steps=4..6", named=named)


def test_a_tensor_of_zeros_is_not_equal_up_to_rounding_however_long_the_segment_is() -> None:
    part = Part(10**6, "distributed: {model_dtype: bf16}", [1, 1, 1])
    assert limit_of("weights", Segment(None, 1, 10**6, None, [part]), 10**6) < 1


def test_an_edited_event_is_no_link(runs: Runs, forger: Forger) -> None:
    forger.change(is_event("start"), torch="1.0")
    named = f"{METRICS}:1: does not fit the lines before it"
    found_wrong(runs, forger.folder, "run=false", named=named)


def test_other_versions_of_a_run_that_promised_bits_do_not_lower_the_bar(
    runs: Runs, forger: Forger
) -> None:
    forger.change(is_event("start"), torch="1.0")
    code, said = audit(runs, forger.sign(), "steps=4..6")
    assert code == 0 and "torch: 1.0 recorded, " in said  # bits are compared, and equal
    forger.change(is_step(6), loss=lambda n: n * LESS)
    said = found_wrong(
        runs, forger.sign(), "steps=4..6", code=2, named="bits are promised, and torch: 1.0 recorde"
    )
    assert "equal up to rounding, at most 1.0e-09 apart, loss of step 6" in verdict(said)


def test_a_config_that_promises_less_than_that_of_the_start_does_not_fit(
    runs: Runs, forger: Forger
) -> None:
    forger.configs(not_exact, of_starts=False)
    named = "config.yaml: deterministic: False, in the event of its start mesh"
    found_wrong(runs, forger.sign(), "run=false", named=named)


def test_a_key_given_to_the_audit_does_not_lower_the_bar(runs: Runs, forger: Forger) -> None:
    forger.change(is_step(6), loss=lambda n: n * LESS)
    words = "steps=4..6", "deterministic=false"
    named = "bits are promised, and deterministic: mesh recorded, false here, as given"
    found_wrong(runs, forger.sign(), *words, named=named, code=2)


def test_who_rewrites_everything_is_known_by_an_earlier_hash_alone(
    runs: Runs, exact: Path, forger: Forger
) -> None:
    run_hash = json.loads((exact / RECEIPT).read_text())["run_hash"]
    forger.configs(not_exact)
    forger.change(is_step(6), loss=lambda n: n * LESS)
    code, said = audit(runs, forger.sign(), "steps=4..6")
    assert code == 0 and "; bits not promised, compared to rounding" in verdict(said)
    expected = f"expect={run_hash}"
    said = found_wrong(runs, forger.folder, expected, "run=false", named="this is another history")
    (forger.folder / RECEIPT).unlink()
    named = "there is no receipt to compare with"
    found_wrong(runs, forger.folder, expected, "steps=4..6", named=named, code=2)


def other_text(state: dict) -> None:
    state["data"]["data.content.one"] = "0" * 32


def test_other_code_and_other_text_are_in_the_verdict_and_its_exit_code(
    runs: Runs, forger: Forger
) -> None:
    forger.change(is_event("start"), code="0123456789ab")
    named = "cannot be compared: steps 4 to 6: code: 0123456789ab recorded, "
    said = found_wrong(runs, forger.sign(), "steps=4..6", named=named, code=2)
    assert "the numbers computed here are equal to the bit" in verdict(said)
    forger.change(is_event("start"), code=None)
    named = "cannot be compared: steps 4 to 6: code: None recorded, "
    found_wrong(runs, forger.sign(), "steps=4..6", named=named, code=2)


def test_other_text_is_in_the_verdict_and_its_exit_code(runs: Runs, forger: Forger) -> None:
    forger.state(6, other_text)
    named = "cannot be compared: steps 4 to 6: data: data.content.one: 00000"
    found_wrong(runs, forger.sign(), "steps=4..6", named=named, code=2)


def test_a_run_without_links_of_events_is_said_to_be_of_an_earlier_version(
    runs: Runs, forger: Forger
) -> None:
    """As earlier versions have recorded it, or as somebody who hides what a start has recorded."""
    forger.change(lambda line: "event" in line, chain=None)
    forger.change(is_event("start"), config=None)
    code, said = audit(runs, forger.sign())
    said_so = "recorded by an earlier version: events are not part of the chain"
    assert (code, verdict(said)) == (0, f"equal to the bit; {said_so}")
    remove(4)(forger)
    found_wrong(runs, forger.sign(), "run=false", named="the line of step 4 is missing")
