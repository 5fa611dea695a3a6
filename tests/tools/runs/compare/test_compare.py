"""The command: which runs are compared at which step, what it prints, and runs that it cannot
compare."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.main.config import TrainArgs
from lingua.base.dump_dir import LAUNCHED_AT
from lingua.config.load import resume_classes
from lingua.run.args import kind_of
from lingua.run.records import Record
from lingua.tools.commands.compare import main
from lingua.tools.runs.compare.arms import find_arms
from lingua.tools.runs.held_out import heldout
from lingua.tools.runs.records import open_runs
from lingua.tools.runs.report.verdict import compare_for_page
from tests.mistakes import refused
from tests.tools.runs.compare.pool import LOSSES, SEEDS, STEPS, write_pool, write_run

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[4]


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command in a folder of its own; its output, with lines joined, which has each of
    `shows` and none of `lacks`."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, shows: tuple[str, ...] = (), lacks: tuple[str, ...] = ()) -> Any:
        main(words)
        text = capsys.readouterr().out
        if "--json" in words and not shows:
            return json.loads(text)["needs" if words[0] == "plan" else "comparisons"]
        assert "--json" in words or max(map(len, text.splitlines())) <= 110, text
        text = " ".join(text.split())
        assert [part for part in shows if part not in text] == [], text
        assert [part for part in lacks if part in text] == [], text
        return text

    return run


def arm(name: str, value: float, losses: Any, steps: Any = (10, 20)) -> None:
    """Runs `<name>-<seed>` with these losses by seed, or with 3.0 and then one of a list."""
    if not isinstance(losses, dict):
        losses = {seed: [3.0, loss] for seed, loss in enumerate(losses)}
    for seed, values in losses.items():
        words = [f"optim.lr={value}", f"seed={seed}", f"steps={steps[-1]}"]
        write_run(Path(f"{name}-{seed}"), words, list(steps)[: len(values)], values)


CASES = Path(__file__).with_name("cases.txt").read_text().split("\n== ")[1:]


@pytest.mark.parametrize("case", CASES, ids=[case.partition("\n")[0] for case in CASES])
def test_a_comparison_prints(out, case):
    for block in case.split("\n$ ")[1:]:
        line, *parts = (part for part in block.splitlines() if part and part[0] != "#")
        program, *words = line.split(" ")
        if program == "compare":
            lacks = tuple(p.removeprefix("not: ") for p in parts if p.startswith("not: "))
            shows = tuple(p for p in parts if not p.startswith("not: "))
            if shows[0].startswith("error: "):
                named = (part.removeprefix("error: ") for part in shows)
                refused(lambda words=words: out(*words), *named)
            else:
                out(*words, shows=shows, lacks=lacks)
        elif program == "arm":
            write_arm(*words)
        elif program == "event":
            values = dict(word.split("=") for word in words[1:])
            with Path(words[0], "metrics.jsonl").open("a") as file:
                file.write(json.dumps(values | {"step": int(values.get("step", 0))}) + "\n")
        else:
            subprocess.run(["bash", "-euc", line], check=True)


def write_arm(name: str, value: str, *words: str) -> None:
    """The command `arm` of cases.txt."""
    first, steps, losses = 0, (10, 20), []
    for word in words:
        key, _, number = word.rpartition("=")
        if key == "first":
            first = int(number)
        elif key == "steps":
            steps = (10, int(number))
        else:
            several = f"[{word.strip(',')}]" if "," in word else f"[3.0, {word}]"
            losses.append(json.loads(several))
    longest = max(map(len, losses))
    by_seed = dict(enumerate(losses, first))
    arm(name, float(value), by_seed, (10, 20, 30) if longest == 3 else steps)


def test_the_difference_of_the_pool_is_printed_with_both_intervals(out, tmp_path):
    write_pool(tmp_path / "pool", ["base", "learning rate"])
    difference = (LOSSES["learning rate"] - LOSSES["base"])[:, -1]
    words = "pool/learning*", "--against", "pool/base*"
    out(*words, shows=(
        f"held-out loss after step {STEPS[-1]} in nats per byte",
        f"optim.lr=0.005 is better than optim.lr=0.004 by {-difference.mean():.4f} nats per byte",
        f"{SEEDS} pairs.", f"unpaired {difference.mean():+.4f}", "smallest detectable effect",
    ))  # fmt: skip
    out(*words[::-1], shows=("optim.lr=0.004 is worse than optim.lr=0.005",))
    [one] = out(*words, "--json")
    assert one["paired"]["mean"] == pytest.approx(difference.mean())
    both = np.var([LOSSES["base"][:, -1], LOSSES["learning rate"][:, -1]], axis=1, ddof=1).sum()
    ratio = both / np.var(difference, ddof=1)
    gain = one["unpaired_over_paired_variance"]
    assert gain[0] == pytest.approx(ratio) and 1 < gain[1] < 5 and gain[2] > 30
    out(*words, shows=(f"{ratio:.2g} times as large (95 %: {gain[1]:.2g} to {gain[2]:.2g})",))
    four = [f"pool/{name}-[0-3]" for name in ("learning-rate", "base")]
    out(four[0], "--against", four[1], shows=("4 pairs",), lacks=("common seeds",))
    assert [line["step"] for line in one["along"]] == STEPS
    assert len(one["pairs"]) == SEEDS


def test_the_seeds_and_hours_of_a_difference_are_planned_from_a_pilot(out):
    """By the tables of the power of a t test, half a deviation takes 34 pairs and a whole one 10,
    if it was the true one; test_rates simulates what it takes in the mean over those possible."""
    losses = {"a": (2.0, 2.1, 2.3, 2.0), "b": (2.5, 2.4, 2.9, 2.6)}
    for name, values in losses.items():
        arm(name, ord(name), values)
    deviation = np.subtract(losses["a"], losses["b"]).std(ddof=1)
    plan = "plan", f"effect={deviation / 2}", "pilot=."
    small, enough = out(*plan, "--json")
    assert (small["pairs"], small["runs"]) == (60, 120) and 34 < enough["pairs"] < 60
    several, _ = out(*plan, "arms=4", "--json")
    assert several["pairs"] > 60 and several["runs"] == 4 * several["pairs"]
    out(*plan, "arms=4", shows=("the base and one of 3 others",))
    for path in Path().glob("*/metrics.jsonl"):  # a step takes 90 s in the mean of the runs
        seconds = f'"step_time_s": {60 if path.parts[0][0] == "a" else 120}, "loss"'
        path.write_text(path.read_text().replace('"loss"', seconds))
    out(*plan, shows=(
        "seeds runs training this one 60 120 2.5d 5 seeds, if they measured the same",
        f"{deviation:.4g}, of 4 pairs", "30m each in the pilot",  # 120 runs of 20 steps
        "This is about step 20; it says nothing about step 200.",
    ))  # fmt: skip
    # Without pairs, differences have the variance of both arms.
    alone = np.sqrt(2) * np.std(losses["a"], ddof=1)
    plan = "plan", f"effect={alone}", "pilot=a-*"
    assert 10 < out(*plan, "--json")[0]["pairs"] < 20
    out(*plan, shows=(f"{alone:.4g}, of 4 runs without pairs",))
    for name in "cd":  # in arms whose seeds differ by rounding nothing is measured
        arm(name, ord(name), (3.0, 3.000001, 2.999999))
    both = np.sqrt(sum(np.var(values, ddof=1) for values in losses.values()))
    out("plan", "effect=1", "pilot=.", shows=(f"{both:.4g}, of 8 runs without pairs",))
    refused(lambda: out("plan", "effect=1", "pilot=c-*"), "the seed has no effect")


def timed(run: str, start: int, result: int) -> None:
    """Gives a run the minutes of its first start and of its first held-out loss; it ends later."""
    event = {"event": "start", "step": 0, "flops_per_token": 6.0}
    for file, lines, minute in (("metrics", [event], start), ("metrics.validation", [], result)):
        path = Path(run) / f"{file}.jsonl"
        lines += [json.loads(line) for line in path.read_text().splitlines()]
        for i, line in enumerate(lines):
            line["created_at"] = f"2026-01-01T00:{min(59, minute + 9 * i):02}:00+00:00"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_that_were_launched_after_a_result_have_the_anytime_interval(out):
    rng = np.random.default_rng(2)
    for name, mean in (("a", 2.0), ("b", 2.5)):
        arm(name, mean, mean + 0.1 * rng.normal(size=6))
        for seed in range(6):  # from the last seed on, all at once
            timed(f"{name}-{seed}", 10 - seed, 30)
    words = "a-*", "--against", "b-*"
    out(*words, shows=("rule: paired",), lacks=("anytime",))
    timed("a-0", 40, 50)
    rule = "rule: anytime, as a-0 was launched after a-1 and b-0 had a result"
    price = "12, 6, 5 pairs in half of the cases and by 18, 8, 6 in 80 %"
    out(*words, shows=(rule, "95 % anytime interval", "> anytime", price))
    # A run that is continued writes later lines, and a copy may have any file date.
    for path in Path().glob("*/metrics*.jsonl"):
        line = json.loads(path.read_text().splitlines()[-1])
        line |= {"step": 30, "created_at": "2026-01-01T00:59:00+00:00"}
        path.write_text(path.read_text() + json.dumps(line) + "\n")
    launched = Path("a-0/base_config.yaml")
    launched.write_text("steps: 20\n")
    os.utime(launched, (0, 0))
    out(*words, shows=(rule,))
    launched.write_text(f"{LAUNCHED_AT}2026-01-01T00:00:01+00:00\n")  # a sweep's runs wait
    out(*words, shows=("rule: paired",), lacks=("anytime",))
    for run in Path().glob("[ab]-*"):
        launch = f"{LAUNCHED_AT}2026-01-01T00:00:01+00:00 variance=equal\n"
        (run / "base_config.yaml").write_text(launch)
    out(*words, shows=("which was assumed at the launch",))
    again = launch.replace("2026", "2027")  # by somebody who may have seen results
    Path("b-0/base_config.yaml").write_text(again)
    out(*words, shows=("rule: paired",))
    for run in Path().glob("[ab]-*"):
        (run / "base_config.yaml").unlink()
    out(*words, "anytime=false", shows=("rule: paired", "note: a-0 was launched after a-1"))
    shutil.rmtree("b-0")
    out("a-0", "a-1", "a-2", *words[1:], "anytime=true", shows=("without ends yet",))
    words = "a-0", "a-1", "--against", "b-2", "b-3"
    out(*words, shows=("decides, as a-0 was launched after a-1 and b-2 had a result, and",))
    out(*words, "anytime=false", shows=("rule: unpaired",))


@pytest.mark.parametrize(
    ("by", "place", "later", "most"),
    [("tokens", "1,500 tokens", "15,000 tokens", "largest number of tokens"),
     ("flops", "9000 FLOPs", "9e+04 FLOPs", "largest number of FLOPs"),
     ("time", "3 s of training", "30 s of training", "longest training time")],
)  # fmt: skip
def test_runs_are_compared_at_the_largest_amount_that_all_have(out, by, place, later, most):
    """Runs of b train twice as many tokens in a step as those of a, in twice the time, and stop at
    half as many steps and a quarter less of both: a is interpolated, b is as measured."""
    for name, tokens, steps in (("a", 50, (10, 20, 40)), ("b", 100, (5, 15))):
        for seed in range(3):
            losses = [3.0, 2.0 + 0.1 * seed, 1.0 + 0.15 * seed][: len(steps)]
            words = [f"optim.lr={tokens}", f"seed={seed}"]
            run = write_run(Path(f"{name}-{seed}"), words, list(steps), losses)
            path = run / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                line |= {"tokens": tokens * line["step"], "step_time_s": tokens / 500}
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            timed(str(run), 0, 9)
    words = "a-*", "--against", "b-*", f"by={by}"
    after = f"held-out loss after {place}"
    out(*words, shows=(
        after, f"This is about losses after {place}; it says nothing about losses after {later}.",
        f"note: this is the {most} that all runs have reached; b-0, b-1, b-2 have no later loss,",
    ))  # fmt: skip
    [numbers] = out(*words, "--json")
    losses = [[3.0, 2.0 + 0.1 * seed, 1.0 + 0.15 * seed] for seed in range(3)]
    parabolas = np.polyfit(np.log([10, 20, 40]), np.transpose(losses), 2)
    expected = np.vander([np.log(30)], 3) @ parabolas  # a after 1,500 tokens is after step 30
    assert numbers["losses"]["arm"] == pytest.approx(expected[0].tolist())
    assert numbers["losses"]["base"] == pytest.approx([2.0, 2.1, 2.2])
    with Path("b-1/metrics.jsonl").open("a") as file:
        file.write('{"event": "stop", "step": 5, "reason": "error", "error": "x"}\n')
    path = Path("b-1/metrics.validation.jsonl")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    out(*words, shows=(after,))
    Path("a-1/metrics.jsonl").write_text("")
    refused(lambda: out(*words), f"by={by}", "a-1 has not recorded it")


def test_the_report_has_the_rule_of_compare_and_refuses_what_it_refuses(out):
    for name, losses in (("a", [2.0, 2.1]), ("b", [2.5, 2.52])):
        arm(name, losses[0], losses)
    assert "rule: paired" in str(compare_for_page(open_runs(["."])))
    Path("a-2").mkdir()
    Path("a-2/base_config.yaml").write_text("optim: {lr: 2.0}\nseed: 2\nsteps: 20\n")
    assert "rule: anytime, as a-2 has not begun" in str(compare_for_page(open_runs(["."])))
    path = Path("b-1/metrics.validation.jsonl")
    path.write_text(path.read_text().replace('"bytes": 1000', '"bytes": 900'))
    page = compare_for_page(open_runs(["."]))
    assert "different held-out text" in str(page["heading"]) and page["rows"] == []


WITHOUT_TORCH = """
import sys
from dataclasses import make_dataclass
import lingua, lingua.stool, lingua.run.records
from lingua.config.load import load
from lingua.tools.commands import compare, runs
from lingua.tools.runs.report import page
lingua.load
load(make_dataclass("Config", [("name", str)]), ["name=x"])
runs.main(["."])
page.main([".", "out=page.html"])
compare.main(["a-0", "a-1", "--against", "b-0", "b-1"])
sys.exit(str({"torch", "omegaconf"} & set(sys.modules) or ""))
"""


def test_configs_are_read_and_runs_compared_without_torch(out, tmp_path):
    for name, value in (("a", 0.1), ("b", 0.2)):
        arm(name, value, {s: [3.0, 2.0 + s / 7] for s in range(2)})
    command, env = [sys.executable, "-c", WITHOUT_TORCH], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stderr.strip() == ""


KEYS = Path(__file__).with_name("keys.txt").read_text().splitlines()


@pytest.mark.parametrize(("ours", "theirs", "arms"), [re.split("  +", line) for line in KEYS[1:]])
def test_a_key_splits_arms_where_a_number_may_depend_on_it(tmp_path, ours, theirs, arms):
    for i, words in enumerate((ours, theirs, theirs)):
        write_run(tmp_path / f"{i}", ["name=x", f"seed={i}", words], [1], [2.0])
    found = find_arms(open_runs([tmp_path]))
    assert len(found) == int(arms) and sum(len(one.runs) for one in found) == 3


def test_every_key_that_splits_no_arms_is_declared_free_and_the_others_are_known():
    free = {k for k, resume in resume_classes(TrainArgs).items() if resume == "free"}
    operational = {k for k in resume_classes(TrainArgs) if kind_of(k) == "operational"}
    assert operational <= free
    others = {"app", "deterministic", "data.source_files", "checkpoint.allow_change",
              "checkpoint.init_from", "checkpoint.init_new",
              "checkpoint.continue_training_from_init"}  # fmt: skip
    assert {k for k in free - operational if kind_of(k) != "additions"} == others


def test_a_source_whose_loss_was_never_finite_counts(tmp_path):
    folder = write_run(tmp_path / "a", ["seed=1"], [10], [2.0])
    with (folder / "metrics.validation.jsonl").open("a") as file:
        line = {"step": 10, "source": "b", "nats_per_byte": None, "tokens": 1, "bytes": 1}
        file.write(json.dumps(line) + "\n")
    steps, losses = heldout(Record(folder))
    assert steps.tolist() == [10] and np.isnan(losses).all()
