"""The command: which runs are compared at which step, what it prints, and runs that it cannot
compare."""

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingua.base.errors import UserError
from lingua.tools.commands.compare import main
from tests.mistakes import refused
from tests.tools.runs.compare.pool import LOSSES, SEEDS, STEPS, write_pool, write_run

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[4]


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command in a folder of its own; its output, with lines joined."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        main(words)
        text = capsys.readouterr().out
        if "--json" in words:
            return text
        assert all(len(line) <= 110 for line in text.splitlines()), text
        return " ".join(text.split())

    return run


def arm(
    name: str, value: float, losses: dict[int, list[Any]], steps: tuple[int, ...] = (10, 20)
) -> None:
    """Runs `<name>-<seed>` with these losses by seed."""
    for seed, values in losses.items():
        words = [f"optim.lr={value}", f"seed={seed}", f"steps={steps[-1]}"]
        write_run(Path(f"{name}-{seed}"), words, list(steps)[: len(values)], values)


def test_the_difference_of_the_pool_is_printed_with_both_intervals(out, tmp_path):
    write_pool(tmp_path / "pool", ["base", "learning rate"])
    text = out("pool/learning*", "--against", "pool/base*")
    difference = (LOSSES["learning rate"] - LOSSES["base"])[:, -1]
    assert f"held-out loss after step {STEPS[-1]} in nats per byte" in text
    best = f"optim.lr=0.005 is better than optim.lr=0.004 by {-difference.mean():.4f} nats per byte"
    assert best in text and f"{SEEDS} pairs." in text
    assert f"unpaired {difference.mean():+.4f}" in text and "smallest detectable effect" in text
    reverse = out("pool/base*", "--against", "pool/learning*")
    assert "optim.lr=0.004 is worse than optim.lr=0.005" in reverse
    found = json.loads(out("pool/learning*", "--against", "pool/base*", "--json"))
    [one] = found["comparisons"]
    assert one["paired"]["mean"] == pytest.approx(difference.mean())
    both = np.var([LOSSES["base"][:, -1], LOSSES["learning rate"][:, -1]], axis=1, ddof=1).sum()
    ratio = both / np.var(difference, ddof=1)
    assert one["unpaired_over_paired_variance"] == pytest.approx(ratio)
    assert [line["step"] for line in one["along"]] == STEPS
    assert len(one["pairs"]) == SEEDS


def test_arms_are_found_by_their_configs_and_all_intervals_hold_together(out, tmp_path):
    write_pool(tmp_path / "pool", ["base", "learning rate", "width", "optimizer"], 4)
    text = out("pool")
    assert "3 arms are compared with one: their intervals hold all together with 95 %" in text
    assert "rule: one variance of all arms" in text and "seeds as blocks, and Dunnett's" in text
    assert "95 % interval" in text
    alone = out("pool", "variance=separate")  # Bonferroni's correction
    assert "98.33 % interval" in alone and "95 % interval" not in alone and "Dunnett" not in alone
    for label in ("optim.lr=0.005", "model.dim=80", "optim.name=muon"):  # each against the base
        assert label in text
    assert "optim.lr=0.004" in text and "model.dim=64" in text


def test_arms_that_cannot_be_told_apart_say_how_many_pairs_would_show_what(out):
    arm("a", 0.1, {s: [3.0, 2.0 + x] for s, x in enumerate((0.01, -0.01, 0.012, -0.009, 0.0))})
    arm("b", 0.2, {s: [3.0, 2.0] for s in range(5)})
    assert "cannot be told apart" in out(".") and "pairs would show" not in out(".")
    text = out(".", "effect=0.005")
    # By the deviation 0.0103, of which 35 pairs have a power of 0.798, and by its bound 0.0199.
    assert "About 36 to 127 new pairs, looked at once, would show 0.005." in text
    assert "About 10,000+ new pairs" in out(".", "effect=1e-6")


def test_the_same_run_is_named_so_without_an_interval_and_one_changed_digit_is_found(out):
    arm("a", 0.1, {s: [3.0, 2.0 + s] for s in range(3)})
    for seed in range(3):
        shutil.copytree(f"a-{seed}", f"copy-{seed}")
    text = out("copy-*", "--against", "a-*")
    assert "are the same run in each of 3 pairs" in text and "interval" not in text
    text = out("copy-0", "--against", "a-0")
    assert "copy-0 and a-0 are the same run: all that both recorded is identical" in text
    assert "why: nothing that is recorded differs" in text
    path = Path("copy-0/metrics.jsonl")
    path.write_text(path.read_text().replace('"loss": 2.0', '"loss": 2.0000000000000004'))
    text = out("copy-0", "--against", "a-0")
    assert "the same run" not in text
    assert "loss step 20; equal at step 10 2.0000000000000004 and 2" in text


def test_one_pair_says_nothing_about_chance_and_every_verdict_says_of_which_step(out):
    arm("a", 0.1, {7: [3.0, 2.0]})
    arm("b", 0.2, {7: [3.0, 2.5]})
    text = out("a-7", "--against", "b-7")
    assert "One pair says nothing about chance; a-7 differs by -0.5000 nats per byte" in text
    assert "better" not in text.partition("where")[0].replace("lower is better", "")
    assert "% interval" not in text and "smallest detectable effect" not in text
    assert "This is about step 20; it says nothing about step 200." in text


def test_losses_that_do_not_depend_on_the_seed_say_so(out):
    arm("a", 0.1, {s: [3.0, 2.0] for s in range(3)})
    arm("b", 0.2, {s: [3.0, 2.5] for s in range(3)})
    text = out("a-*", "--against", "b-*")
    assert "The seed has no effect: all runs of optim.lr=0.1 and of optim.lr=0.2 have one" in text
    assert "optim.lr=0.1 differs by -0.5000" in text and "% interval" not in text
    arm("c", 0.3, {s: [3.0, 2.5 + s] for s in range(3)})
    text = out("a-*", "--against", "c-*")
    assert "note: the seed has no effect in optim.lr=0.1: all of its runs have one loss" in text
    arm("d", 0.4, {s: [3.0, 3.0 + s] for s in range(3)})
    assert "All 3 differences are equal" in out("c-*", "--against", "d-*")


def test_pairs_decide_where_they_are_two_and_half_of_the_smaller_arm_and_the_rule_is_printed(out):
    rng = np.random.default_rng(0)
    arm("a", 0.1, {s: [3.0, 2.0 + x] for s, x in enumerate(rng.normal(size=5))})
    for name, first in (("b", 2), ("c", 3)):
        losses = {first + s: [3.0, 2.0 + x] for s, x in enumerate(rng.normal(size=5))}
        arm(name, first, losses)
    text = out("b-*", "--against", "a-*")
    assert "rule: paired, as 3 of 5 runs of the smaller arm are in pairs; paired takes two" in text
    text = out("c-*", "--against", "a-*")
    assert "rule: Welch, as 2 of 5 runs of the smaller arm are in pairs" in text
    decides = json.loads(out("c-*", "--against", "a-*", "--json"))["comparisons"][0]["decides"]
    assert decides == "unpaired"
    text = out("c-6", "c-7", "--against", "a-*")
    assert "Welch's interval of 2 against 5 runs is refused" in text and "% interval" not in text


def test_the_seeds_and_hours_of_a_difference_are_planned_from_a_pilot(out):
    """By the tables of the power of a t test: 34 pairs for half a deviation, 10 for one."""
    losses = {"a": (2.0, 2.1, 2.3, 2.0), "b": (2.5, 2.4, 2.9, 2.6)}
    for name, values in losses.items():
        arm(name, ord(name), {s: [3.0, x] for s, x in enumerate(values)})
    deviation = np.subtract(losses["a"], losses["b"]).std(ddof=1)
    found = json.loads(out("plan", f"effect={deviation / 2}", "pilot=.", "--json"))
    measured, most = found["needs"]
    assert (measured["pairs"], measured["runs"]) == (34, 68) and most["pairs"] > 100
    assert measured["deviation"] == pytest.approx(deviation)
    for name in losses:
        for seed in range(4):  # a step takes 90 s in the mean of the runs
            path = Path(f"{name}-{seed}/metrics.jsonl")
            seconds = f'"step_time_s": {60 if name == "a" else 120}, "loss"'
            path.write_text(path.read_text().replace('"loss"', seconds))
    text = out("plan", f"effect={deviation / 2}", "pilot=.")
    assert "seeds runs training measured" in text and " 34 68 1.4d" in text  # 68 runs of 20 steps
    assert "deviation: of 4 pairs" in text and "30m each in the pilot" in text
    assert "This is about step 20; it says nothing about step 200." in text
    # Without pairs, differences have the variance of both arms.
    alone = np.sqrt(2) * np.std(losses["a"], ddof=1)
    found = json.loads(out("plan", f"effect={alone}", "pilot=a-*", "--json"))
    assert found["needs"][0]["pairs"] == 10 and "without pairs" in found["measured_by"]


def test_a_pair_far_from_the_rest_is_named_with_the_result_without_it(out):
    rng = np.random.default_rng(1)
    noise = 0.01 * rng.normal(size=10)
    noise[4] += 1.0
    arm("a", 0.1, {s: [3.0, 2.0 + x] for s, x in enumerate(noise)})
    arm("b", 0.2, {s: [3.0, 2.5] for s in range(10)})
    text = out("a-*", "--against", "b-*")
    assert "note: a-4 and b-4 differ by +0.5" in text and "far from the other pairs" in text
    rest = np.delete(noise, 4).mean() - 0.5
    assert f"without them the difference would be {rest:.4f}, interval" in text
    assert "the differences are not normally distributed" in text
    assert "sign-flip test of the pairs: p = 0.0" in text
    [numbers] = json.loads(out("a-*", "--against", "b-*", "--json"))["comparisons"]
    assert numbers["far_pair"] == {"arm": "a-4", "base": "b-4"} and not numbers["is_normal"]


def started(run: str, first: int, last: int) -> None:
    """Gives a run the minutes of its start and of its last line."""
    path = Path(run) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines.insert(0, json.dumps({"event": "start", "step": 0, "flops_per_token": 6.0}))
    for i, minute in ((0, first), (-1, last)):
        lines[i] = lines[i][:-1] + f', "created_at": "2026-01-01T00:{minute:02}:00+00:00"}}'
    path.write_text("".join(line + "\n" for line in lines))


def test_pairs_that_were_added_after_others_had_ended_have_the_anytime_interval(out):
    rng = np.random.default_rng(2)
    for name, mean in (("a", 2.0), ("b", 2.5)):
        arm(name, mean, {s: [3.0, mean + x] for s, x in enumerate(0.1 * rng.normal(size=6))})
        for seed in range(6):  # from the last seed on, all at once
            started(f"{name}-{seed}", 10 - seed, 30)
    text = out("a-*", "--against", "b-*")
    assert "rule: paired" in text and "anytime" not in text
    numbers = json.loads(out("a-*", "--against", "b-*", "anytime=true", "--json"))
    assert numbers["comparisons"][0]["pairs"][0]["arm"] == "a-5"
    started("a-0", 40, 50)
    text = out("a-*", "--against", "b-*")
    assert "rule: anytime, as a-0 started after a-5 and b-5 had ended" in text
    assert "95 % anytime interval" in text and "> anytime" in text
    launched = Path("a-0/base_config.yaml")  # a sweep's runs wait for each other
    launched.touch()
    os.utime(launched, (datetime(2026, 1, 1, tzinfo=UTC).timestamp(),) * 2)
    assert "rule: paired" in out("a-*", "--against", "b-*")
    launched.unlink()
    assert "12, 6, 5 pairs in half of the cases and by 18, 8, 6 in 80 %" in text
    assert "rule: paired" in out("a-*", "--against", "b-*", "anytime=false")
    shutil.rmtree("b-0")
    assert "without ends yet" in out("a-0", "a-1", "a-2", "--against", "b-*", "anytime=true")
    text = out("a-0", "a-1", "--against", "b-2", "b-3", "anytime=true")
    assert "An anytime interval needs pairs." in text


@pytest.mark.parametrize(
    ("by", "place", "later"),
    [("tokens", "1,500 tokens", "15,000 tokens"), ("flops", "9000 FLOPs", "9e+04 FLOPs"),
     ("time", "3 s of training", "30 s of training")],
)  # fmt: skip
def test_runs_are_compared_at_the_largest_amount_that_all_have(out, by, place, later):
    """Runs of b train twice as many tokens in a step as those of a, in twice the time, and stop at
    half as many steps and a quarter less of both: a is interpolated, b is as measured."""
    for name, tokens, steps in (("a", 50, (10, 20, 40)), ("b", 100, (5, 15))):
        for seed in range(3):
            losses = [3.0, 2.0 + 0.1 * seed, 1.0 + 0.15 * seed][: len(steps)]
            run = write_run(Path(f"{name}-{seed}"), [f"optim.lr={tokens}", f"seed={seed}"],
                            list(steps), losses)  # fmt: skip
            path = run / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                line |= {"tokens": tokens * line["step"], "step_time_s": tokens / 500}
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            started(str(run), 0, 9)
    text = out("a-*", "--against", "b-*", f"by={by}")
    assert f"held-out loss after {place} in nats per byte" in text
    assert f"This is about {place}; it says nothing about {later}." in text
    [numbers] = json.loads(out("a-*", "--against", "b-*", f"by={by}", "--json"))["comparisons"]
    # a after 1,500 tokens, step 30 of 20 to 40: half of each loss
    assert numbers["losses"]["arm"] == pytest.approx([1.5 + 0.125 * s for s in range(3)])
    assert numbers["losses"]["base"] == pytest.approx([2.0 + 0.1 * s for s in range(3)])
    started("b-1", 0, 9)
    path = Path("b-1/metrics.jsonl")
    path.write_text(
        path.read_text() + '{"event": "stop", "step": 5, "reason": "error", "error": "x"}\n'
    )
    path = Path("b-1/metrics.validation.jsonl")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert f"held-out loss after {place}" in out("a-*", "--against", "b-*", f"by={by}")
    Path("a-1/metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=f"by={by}: a-1 has not recorded it"):
        out("a-*", "--against", "b-*", f"by={by}")


def test_runs_without_a_common_seed_are_compared_unpaired(out):
    arm("a", 0.1, {s: [3.0, 2.0 + s / 1000] for s in range(3)})
    arm("b", 0.2, {s: [3.0, 2.5 + s / 1000] for s in range(3, 6)})
    text = out("a-*", "--against", "b-*")
    assert (
        "optim.lr=0.1 is better than optim.lr=0.2" in text
        and "3 runs against 3, not paired" in text
    )
    text = out("a-0", "--against", "b-3")
    assert "1 run and 1, without a common seed. Run both with the same seeds" in text


def test_unequal_runs_are_compared_at_the_last_step_of_all_which_names_the_short_one(out):
    arm("a", 0.1, {0: [3.0, 2.0, 1.0], 1: [3.1, 2.1], 2: [3.2, 2.2, 1.3]}, (10, 20, 30))
    arm("b", 0.2, {s: [3.5, 2.5 + s / 10, 1.5] for s in range(3)}, (10, 20, 30))
    text = out("a-*", "--against", "b-*")
    assert "after step 20" in text and "a-1 has no later one, others have" in text
    text = out("a-*", "--against", "b-*", "step=30")
    assert "after step 30" in text and "2 pairs" in text
    assert "a-1 has no held-out loss at step 30 (2 measurements, the last at step 20)" in text
    with pytest.raises(UserError, match="no step at which all runs have a held-out loss"):
        out("a-*", "--against", "b-*", "step=15")


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_diverged_runs_are_named_and_in_no_mean(out, bad):
    arm("a", 0.1, {0: [3.0, 2.0], 1: [3.0, 2.1], 2: [3.0, bad]})
    arm("b", 0.2, {s: [3.0, 2.5 + s / 100] for s in range(3)})
    text = out("a-*", "--against", "b-*")
    assert "optim.lr=0.1 diverged in 1 of 3 runs (95 %: 1 to 91 %), optim.lr=0.2 in 0 of 3" in text
    assert "Of the runs that survived: optim.lr=0.1" in text and "2 pairs" in text
    assert "2 pairs" in text and "nan" not in text and "inf" not in text
    numbers = json.loads(out("a-*", "--against", "b-*", "--json"))["comparisons"][0]
    assert [outcome["diverged"] for outcome in numbers["outcomes"]] == [["a-2"], []]
    shutil.rmtree("a-0")
    shutil.rmtree("a-1")
    assert "Nothing is left to compare" in out("a-2", "--against", "b-*")


def test_rounding_is_told_from_a_difference_by_rows_and_configs(out):
    for seed in range(3):
        for name, size, more in (("a", 8, 0.0), ("b", 3, 1e-8 * seed)):
            words = [f"seed={seed}", f"data.batch_size={size}"]
            write_run(Path(f"{name}-{seed}"), words, [10], [2.0 + more])
            write_run(Path(f"{name}x-{seed}"), words, [10], [2.0 + more], hashes=name)
    text = out("b-*", "--against", "a-*")
    assert "data.batch_size=3 and data.batch_size=8 differ by rounding alone" in text
    assert "at most 2.0e-08 nats per byte apart" in text and "% interval" not in text
    assert "% interval" in out("bx-*", "--against", "ax-*")  # of other rows


def test_a_second_run_of_a_seed_is_no_further_evidence(out):
    arm("a", 0.1, {s: [3.0, 2.0 + s / 100] for s in range(2)})
    arm("b", 0.2, {s: [3.0, 2.5 + s / 70] for s in range(2)})
    shutil.copytree("a-0", "a-again")
    text = out("a-*", "--against", "b-*")
    assert "a-again is left out: a-0 has its config and seed" in text and "2 pairs" in text


def test_an_arm_that_varies_more_than_the_others_is_a_warning(out):
    rng = np.random.default_rng(4)
    for name, spread in (("a", 0.01), ("b", 0.01), ("c", 1.0), ("d", 0.01)):
        losses = {s: [3.0, 2.0 + x] for s, x in enumerate(spread * rng.normal(size=6))}
        arm(name, ord(name), losses)
    text = out(".")
    assert "rule: one variance of all arms (warning: one arm varies more or less" in text
    for seed in range(6):
        shutil.rmtree(f"c-{seed}")
    assert "rule: one variance of all arms, seeds as blocks" in out(".")
    for seed in range(1, 6):
        shutil.rmtree(f"b-{seed}")
    text = out(".")
    assert "without blocks, as not all arms are paired" in text
    assert "6 runs against 6, not paired" in text and "1 run against 6, not paired" in text


def test_why_two_runs_differ_names_config_code_data_and_versions(out):
    arm("a", 0.1, {0: [3.0, 2.0]})
    arm("b", 0.2, {0: [3.0, 2.5]})
    for name, torch, text in (("a", "2.13.0", "x = 1"), ("b", "2.12.0", "x = 2")):
        folder = Path(f"{name}-0/checkpoints/0000000020")
        folder.mkdir(parents=True)
        versions = {"torch": torch, "python": "3.11"}
        state = {"data": {"data.content.text": f"hash of {name}"}, "versions": versions}
        (folder / "train_state.json").write_text(json.dumps(state))
        files = {"__0_0.distcp": {"size": 1, "xxh3_64": name}}
        (folder / "manifest.json").write_text(json.dumps({"files": files}))
        Path(f"{name}-0/code").mkdir()
        Path(f"{name}-0/code/model.py").write_text(text)
        Path(f"{name}-0/code/same.py").write_text("same")
    text = out("a-0", "--against", "b-0")
    assert "config: optim.lr: 0.1 and 0.2" in text
    assert "code: files differ: model.py" in text and "same.py" not in text
    assert "data: data.content.text: hash of a and hash of b" in text
    assert "versions: torch: 2.13.0 and 2.12.0" in text and "3.11" not in text
    assert "weights step 20, the first that both have" in text
    for name in ("a", "b"):  # the runs of a sweep share one copy, which is beside them
        Path(name).mkdir()
        shutil.move(f"{name}-0", name)
        shutil.move(f"{name}/{name}-0/code", name)
    assert "code: files differ: model.py" in out("a", "--against", "b")
    assert "rows equal at 2 steps, the last 20" in text
    assert "loss step 20; equal at step 10 2 and 2.5" in text


def test_damaged_runs_are_named_and_left_out(out, tmp_path):
    arm("a", 0.1, {s: [3.0, 2.0 + s / 9] for s in range(3)})
    arm("b", 0.2, {s: [3.0, 2.5] for s in range(4)})
    (tmp_path / "b-3" / "config.yaml").write_text("{ not yaml")
    with (tmp_path / "a-2" / "metrics.validation.jsonl").open("a") as file:
        file.write('{"step": 30, "sour')
    (tmp_path / "a-1" / "metrics.validation.jsonl").write_text('{"step": "x"}\n[]\n\x00')
    text = out("a-*", "--against", "b-*")
    assert "2 pairs" in text and "b-3 is left out: its config cannot be read" in text
    assert "a-1 has no held-out loss in nats_per_byte yet" in text
    assert "metrics.validation.jsonl:3: a line is left out" in text


def test_without_scipy_the_message_names_the_package(out, monkeypatch):
    for name, value in (("a", 0.1), ("b", 0.2)):
        arm(name, value, {s: [3.0, 2.0 + s / 7] for s in range(2)})
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    refused(lambda: out("a-*", "--against", "b-*"), "lingua compare", "scipy")


WITHOUT_TORCH = """
import sys
from dataclasses import make_dataclass
import lingua, lingua.stool, lingua.tools.runs.records
from lingua.config.load import load
from lingua.tools.commands import compare, report, runs
lingua.load
load(make_dataclass("Config", [("name", str)]), ["name=x"])
runs.main(["."])
report.main([".", "out=page.html"])
compare.main(["a-0", "a-1", "--against", "b-0", "b-1"])
sys.exit(str({"torch", "omegaconf"} & set(sys.modules) or ""))
"""


def test_configs_are_read_and_runs_compared_without_torch(out, tmp_path):
    for name, value in (("a", 0.1), ("b", 0.2)):
        arm(name, value, {s: [3.0, 2.0 + s / 7] for s in range(2)})
    command, env = [sys.executable, "-c", WITHOUT_TORCH], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stderr.strip() == ""
