"""What an arm is: keys, code, machines, rows and text of all its runs, and how they ended."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from apps.main.config import TrainArgs
from lingua.config.load import resume_classes
from lingua.tools.runs.compare.arms import find_arms
from lingua.tools.runs.compare.differences import ADDITIONS
from lingua.tools.runs.records import OPERATIONAL, Record, heldout, open_runs
from tests.locks import hold_lock
from tests.mistakes import refused
from tests.tools.runs.compare.pool import config_of, write_run
from tests.tools.runs.compare.test_compare import arm, event, out, rising

__all__ = ["out"]  # a fixture
pytestmark = pytest.mark.quick


def edited(name: str, *words: str) -> None:
    """Lays keys over the config of a run."""
    path = Path(name, "config.yaml")
    config = yaml.safe_load(path.read_text())
    for group, values in config_of(list(words)).items():
        mapping = isinstance(values, dict) and isinstance(config.get(group), dict)
        config[group] = config[group] | values if mapping else values
    path.write_text(yaml.safe_dump(config))


def arms_of(*folders: str) -> list[list[str]]:
    return [[run.name for run in one.runs] for one in find_arms(open_runs(folders))]


SCALING = "model.rope_scaling={rope_type: llama3, factor: 8.0}"


@pytest.mark.parametrize(("ours", "theirs", "arms"), [
    ("optim.lr=0.1", "optim.lr=0.2", 2),
    ("optim.lr=0.1", "optim.momentum=0.9", 2),  # each lacks a key of the other
    ("model.rope_scaling=null", SCALING, 2),
    (SCALING.replace("8", "4"), SCALING, 2),
    ("steps=10", "steps=20", 2),
    ("app=null", "app=my_app", 2),
    ("checkpoint.allow_change=[]", "checkpoint.allow_change=[optim.name]", 2),
    ("data.batch_size=2", "data.batch_size=4", 2),  # the order of additions
    ("logging.freq=10", "logging.freq=1", 1),
    ("logging.wandb=null", "logging.wandb={project: p}", 1),
    ("eval=null", "eval={tasks: [a], every: 10}", 1),
    ("validation.every=5", "validation.every=10", 1),
    ("validation.tokens=5", "validation.bytes=10", 1),  # the text itself is compared
    ("checkpoint.dump.every=5", "checkpoint.dump.every=10", 1),
    ("data.workers=0", "distributed.step_timeout_s=9.0", 1),
    ("model.vocab_size=-1", "model.vocab_size=256", 1),
    ("data.global_batch_size=null", "data.global_batch_size=8", 1),
])  # fmt: skip
def test_a_key_splits_arms_where_a_number_may_depend_on_it(tmp_path, ours, theirs, arms):
    for i, words in enumerate((ours, theirs, theirs)):
        write_run(tmp_path / f"{i}", ["name=x", f"seed={i}", words], [1], [2.0])
    found = find_arms(open_runs([tmp_path]))
    assert len(found) == arms and sum(len(one.runs) for one in found) == 3


def test_every_key_that_splits_no_arms_is_declared_free_and_the_others_are_known():
    free = {k for k, resume in resume_classes(TrainArgs).items() if resume == "free"}
    operational = {k for k in resume_classes(TrainArgs) if OPERATIONAL.fullmatch(k)}
    assert operational <= free
    others = {"app", "deterministic", "data.source_files", "checkpoint.allow_change",
              "checkpoint.init_from", "checkpoint.continue_training_from_init"}  # fmt: skip
    assert {k for k in free - operational if not ADDITIONS.fullmatch(k)} == others


def test_what_differs_besides_the_named_keys_is_in_the_first_lines_for_all_runs(out):
    arm("a", 0.1, {s: [3.0, 2.0 + s / 100] for s in range(3)})
    arm("b", 0.2, {s: [3.0, 2.5 + s / 70] for s in range(3)})
    for name in ("a-0", "a-1", "a-2", "b-0", "b-1", "b-2"):
        torch, device = "2.12" if name == "a-2" else "2.13", "H200" if name[0] == "a" else "cpu"
        event(name, event="start", code="x", torch=torch, device=device)
    metrics = Path("b-1/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"batch_hash": "a20"', '"batch_hash": "b20"'))
    edited("b-1", "logging.freq=3")
    text = out("a-*", "--against", "b-*")
    first, _, verdict = text.partition("optim.lr=0.1 is better than")
    assert verdict
    assert "torch is not the same (optim.lr=0.1: 2.13 in 2 runs, 2.12 in 1 run; " in first
    assert "device is not the same (optim.lr=0.1: H200; optim.lr=0.2: cpu)" in first
    assert "the rows of 1 of 3 pairs differ" in first
    assert "keys that change no number differ: logging.freq" in first and "code" not in first
    [numbers] = out("a-*", "--against", "b-*", "--json")
    assert len(numbers["unlike"]) == 4 and all(x in numbers["verdict"] for x in numbers["unlike"])
    event("a-0", event="start", code="y")  # resumed with other code
    assert open_runs(["a-0"])[0].settings["code"] == "x then y"


@pytest.mark.parametrize("change", [('"bytes": 1000', '"bytes": 900'), ("one", "two")])
def test_different_held_out_text_is_refused_unless_it_is_ignored(out, change):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        arm(name, lr, rising(2.0 + lr, 0.1))
        for seed in range(3):
            path = Path(f"{name}-{seed}/metrics.validation.jsonl")
            path.write_text(path.read_text().replace('"tokens"', '"text": "one", "tokens"'))
    words = "a-*", "--against", "b-*"
    out(*words, lacks=("held-out text",))
    path = Path("b-2/metrics.validation.jsonl")
    path.write_text(path.read_text().replace(*change))
    refused(lambda: out(*words), "different held-out text", "text=ignore", "b-2")
    other = "held-out text is not the same (optim.lr=0.1: 1,000 bytes one; "
    out(*words, "text=ignore", shows=(other,))


@pytest.mark.parametrize("killed", [False, True])
def test_runs_that_failed_are_outcomes_before_any_mean(out, killed):
    """After step 20 the arm was ahead, and then four of its five runs failed."""
    arm("a", 0.1, {s: [3.0, 1.0 + s / 100] for s in range(4)}, (10, 20, 30))
    arm("a", 0.1, {4: [3.0, 1.0, 1.9]}, (10, 20, 30))
    arm("b", 0.2, {s: [3.0, 2.5 + s / 100, 1.5 + s / 90] for s in range(5)}, (10, 20, 30))
    for seed in range(4):
        edited(f"a-{seed}", "steps=30")
        if killed:
            with hold_lock(Path(f"a-{seed}/run.lock").absolute()) as process:
                process.kill()
        else:
            event(f"a-{seed}", step=21, event="stop", reason="error", error="RuntimeError: x")
    text = out("a-*", "--against", "b-*")
    assert "after step 30" in text and "is better than" not in text and "% interval" not in text
    low, high = stats.binomtest(4, 5).proportion_ci(0.95)
    expected = (
        f"optim.lr=0.1 failed in 4 of 5 runs (95 %: {100 * low:.0f} to {100 * high:.0f} %), "
        "optim.lr=0.2 in 0 of 5 runs: a-0, a-1, a-2, a-3 "
    )
    assert expected in text and "(95 %: 28 to 99 %)" in text
    assert "Of the runs that survived: One pair says nothing about chance; a-4 differs by +" in text
    assert text.index("failed in 4") < text.index("Of the runs that survived")
    [numbers] = out("a-*", "--against", "b-*", "--json")
    assert numbers["outcomes"][0]["failed"] == ["a-0", "a-1", "a-2", "a-3"]
    at_20 = out("a-*", "--against", "b-*", "step=20")  # where all were measured
    assert "failed in 4 of 5" in at_20 and "5 pairs" in at_20 and "survived" not in at_20


def test_a_source_whose_loss_was_never_finite_counts(tmp_path):
    folder = write_run(tmp_path / "a", ["seed=1"], [10], [2.0])
    with (folder / "metrics.validation.jsonl").open("a") as file:
        line = {"step": 10, "source": "b", "nats_per_byte": None, "tokens": 1, "bytes": 1}
        file.write(json.dumps(line) + "\n")
    steps, losses = heldout(Record(folder))
    assert steps.tolist() == [10] and np.isnan(losses).all()
