"""Runs compared after as many tokens, FLOPs or seconds, where they were not measured at the same
amounts: curves that are known between their measurements."""

import json
from pathlib import Path

import numpy as np
import pytest

from lingua.run.records import Record
from lingua.tools.runs.compare.arms import By, choose_arms, open_all
from lingua.tools.runs.compare.axis import measure_by, spent
from lingua.tools.runs.compare.comparison import Comparison, compare_all
from lingua.tools.runs.held_out import interpolate
from tests.tools.runs.compare.pool import write_run

pytestmark = pytest.mark.quick

CURVES = {
    "power": lambda t: 2 + 3 * t**-0.4,
    "exponential": lambda t: 2 + 3 * np.exp(-t / 30),
    "cosine": lambda t: 2 + 3 * (t + 5) ** -0.4 + 0.1 * np.cos(np.pi * t / 100),
    "late decay": lambda t: 2 + 3 * t**-0.4 - 0.2 * np.clip((t - 80) / 20, 0, 1) ** 2,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("every", [2, 4, 10])
def test_the_error_of_interpolation_is_within_its_bound(curve, every):
    x = np.arange(every, 101, every).astype(float)
    points = np.linspace(1, 101, 1001)
    values, errors = interpolate(points, x, CURVES[curve](x))
    inside = (points >= x[0]) & (points <= x[-1])
    assert np.array_equal(np.isfinite(values), inside)
    wrong = abs(values - CURVES[curve](points))[inside]
    assert (wrong <= abs(errors).sum(0)[inside] + 1e-4).all()
    chord = np.interp(points, x, CURVES[curve](x)) - CURVES[curve](points)
    assert wrong.mean() < 0.3 * abs(chord[inside]).mean()  # it corrects most of a chord's bias


def test_a_measurement_is_taken_as_it_is_and_a_diverged_one_makes_nothing_up():
    x = np.array([3.0, 7.0, 11.0, 15.0, 20.0])
    y = np.array([0.1, 1 / 3, np.nan, 0.7, 0.5])
    values, errors = interpolate(np.append(x, [9.0, 17.0, 25.0]), x, y)
    assert np.array_equal(values[:5], y, equal_nan=True) and not errors[:, :5].any()
    assert np.isnan(values[[5, 7]]).all() and np.isfinite(values[6])
    for rounding in (-1e-14, 1e-14):  # as in tokens times FLOPs per token
        rounded, errors = interpolate(x * (1 + rounding), x, y)
        assert np.array_equal(rounded, y, equal_nan=True) and not errors.any()
    for few in (1, 2, 3):  # little is known between them: the size of a fall is the error
        values, errors = interpolate(np.array([5.0]), x[:few], CURVES["power"](x[:few]))
        fall = few > 1 and CURVES["power"](3.0) - values[0]
        assert abs(errors).sum() >= fall and (few > 1 or np.isnan(values[0]))


def write_arms(folder: Path, seeds: int) -> tuple[list[Record], list[Record]]:
    """Two arms that were measured every 4 and every 6 steps. After a step the second one has
    trained 1.1 times as many FLOPs; seconds of a step differ by run. All losses are 0."""
    for name, every, last in (("a", 4, 100), ("b", 6, 102)):
        for seed in range(seeds):
            steps = list(range(every, last + 1, every))
            words = [f"optim.lr={every}", f"seed={seed}", "steps=200"]
            run = write_run(folder / f"{name}-{seed}", words, steps, [0.0] * len(steps))
            path = run / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            speed = 1 + 0.01 * (seed + (name == "b") / 2)
            for line in lines:
                line |= {"tokens": 1000 * line["step"], "step_time_s": speed}
            start = {"event": "start", "step": 0, "flops_per_token": 1.1 if name == "b" else 1.0}
            path.write_text("".join(json.dumps(line) + "\n" for line in [start, *lines]))
    return open_all([f"{folder}/a-*"]), open_all([f"{folder}/b-*"])


def compared(
    arms: tuple[list[Record], list[Record]],
    by: By,
    rng: np.random.Generator,
    noise: float,
    better: float = 0.0,
) -> Comparison:
    """Of one curve of the amount, with noise of the seed, of the run and of each measurement; that
    of the first arm is lower by `better`."""
    runs = [run for arm in arms for run in arm]
    of_seed = noise * rng.normal(size=len(arms[0]))
    for i, run in enumerate(runs):
        columns = run.validation["text"]
        amount = spent(run, by, columns.step) / {"step": 1, "time": 1}.get(by, 1000)
        losses = CURVES["power"](amount) + of_seed[i % len(of_seed)] + noise * rng.normal()
        losses += noise * rng.normal(size=len(losses)) - better * (run in arms[0])
        columns["nats_per_byte"][:] = losses
    [arm], base, _ = choose_arms(*arms)
    [comparison] = compare_all([arm], base, measure_by(runs, "nats_per_byte", by))
    return comparison


BY: tuple[By, ...] = ("tokens", "flops", "time")


@pytest.mark.parametrize("by", BY)
def test_one_curve_that_was_measured_at_other_steps_is_not_another(by, tmp_path):
    arms, rng = write_arms(tmp_path, 4), np.random.default_rng(1)
    apart = []
    for _ in range(5):
        c = compared(arms, by, rng, 3e-5)
        assert c.estimate is not None and not c.estimate.excludes_zero
        apart += [e is not None and e.excludes_zero for *_, e in c.along]
        assert c.pairs_for(c.slack) is None and c.smallest_effect > c.slack > 0
        assert c.spread is not None and c.spread.level == pytest.approx(c.level)
        assert c.sign_flip > 2 / 2**4 and any("interpolated" in note for note in c.notes)
    assert len(apart) > 50 and np.mean(apart) < 0.1
    found = compared(arms, by, rng, 3e-5, better=0.01).estimate
    assert found is not None and found.high < 0 and found.mean == pytest.approx(-0.01, abs=1e-3)


def test_seconds_that_depend_on_more_than_the_config_are_a_note(tmp_path):
    """The runs of write_arms differ by 2 % in speed. One whose machine had other work is slower."""
    for name, change, note in (
        ("as it is", {}, None),
        ("loaded", {"step_time_s": 1.5}, "and these differ: speed within an arm (by 49 %); tokens"),
        ("hosts", {"hosts": ["n2"]}, "and these differ: hosts; tokens and FLOPs do not"),
    ):
        runs = [run for arm in write_arms(tmp_path / name, 3) for run in arm]
        path = runs[0].folder / "metrics.jsonl"
        lines = [json.loads(line) | change for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        notes = measure_by(runs, "nats_per_byte", "time").left_out
        assert len(notes) == (note is not None) and (note or "") in "".join(notes)
        assert not measure_by(runs, "nats_per_byte", "tokens").left_out


@pytest.mark.soak
@pytest.mark.parametrize("by", BY)
def test_one_curve_is_claimed_to_differ_in_at_most_7_percent(by, tmp_path):
    for noise in (3e-5, 1e-3):  # the error of a chord is 1e-4
        claims = []
        for seeds in (3, 5):
            arms = write_arms(tmp_path / f"{noise}-{seeds}", seeds)
            rng = np.random.default_rng(seeds)
            found = [compared(arms, by, rng, noise).estimate for _ in range(500)]
            claims += [e is not None and e.excludes_zero for e in found]  # None: of no spread
        assert np.mean(claims) <= 0.07, noise
