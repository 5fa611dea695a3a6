"""How often one who watches runs and stops them claims a difference that is none: by the interval
that decides in each state of a sweep, on losses that are drawn."""

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy import stats

from lingua.tools.runs.compare.arms import choose_arms, measure_runs
from lingua.tools.runs.compare.comparison import Comparison, compare_all
from lingua.tools.runs.records import open_runs
from tests.tools.runs.compare.pool import write_run

pytestmark = pytest.mark.quick

DRAWS, HALF, END = 10_000, 10, 20
MEASURE = "nats_per_byte"


class Sweep:
    """Two arms of runs that were launched at once, and wait for each other."""

    def __init__(self, folder: Path, seeds: int, common: bool = True) -> None:
        self.folder = folder
        self.configs = {
            (arm, seed): {
                "optim": {"lr": lr},
                "seed": seed + seeds * (lr > 1 and not common),
                "steps": END,
            }
            for arm, lr in (("a", 1), ("b", 2))
            for seed in range(seeds)
        }
        for (arm, seed), config in self.configs.items():
            (folder / f"{arm}-{seed}").mkdir(parents=True)
            OmegaConf.save(OmegaConf.create(config), folder / f"{arm}-{seed}" / "base_config.yaml")

    def run(self, arm: str, seed: int, until: int = END) -> None:
        """It trains up to a step, and is over there or was stopped."""
        loss = float(np.random.default_rng([seed, arm == "b"]).normal(2.0, 0.1))
        config = self.configs[arm, seed]
        words = [f"optim.lr={config['optim']['lr']}", f"seed={config['seed']}", f"steps={END}"]
        steps = [step for step in (HALF, END) if step <= until]
        folder = self.folder / f"{arm}-{seed}"
        (folder / "base_config.yaml").unlink()
        folder.rmdir()
        write_run(folder, words, steps, [loss] * len(steps))

    def compared(self) -> Comparison:
        """As by the command, after the last step."""
        runs = open_runs([self.folder])
        arms, base, _ = choose_arms(runs, [])
        measured = measure_runs([*arms[0].runs, *base.runs], MEASURE, END)
        return compare_all(arms, base, measured, given=runs)[0]


def claims(c: Comparison, differences: np.ndarray) -> np.ndarray:
    """Which of the draws, [draws, pairs], the interval that decides claims to differ: bool [draws].
    Its half width is a multiple of the deviation."""
    assert c.estimate is not None and len(c.pairs) == differences.shape[1]
    width = (c.estimate.high - c.estimate.mean) / c.estimate.deviation
    return abs(differences.mean(1)) > width * differences.std(1, ddof=1)


def rates(*claimed: np.ndarray) -> list[tuple[float, float]]:
    """The interval of the rate of each, of 99.9 %."""
    intervals = [stats.binomtest(int(c.sum()), len(c)).proportion_ci(0.999) for c in claimed]
    return [(ci.low, ci.high) for ci in intervals]


def watch(folder: Path, pairs: int, looks: int) -> dict[str, tuple[float, float]]:
    """The rates of one who looks at equal distances, and cancels the rest once a claim is made."""
    sweep, draws = Sweep(folder, pairs), np.random.default_rng(0).normal(size=(DRAWS, pairs))
    on_the_way, fixed, done = np.zeros(DRAWS, bool), np.zeros(DRAWS, bool), 0
    for n in sorted({max(2, round(pairs * i / looks)) for i in range(1, looks + 1)}):
        for seed in range(done, n):
            sweep.run("a", seed)
            sweep.run("b", seed)
        done, c, seen = n, sweep.compared(), draws[:, :n]
        decided = claims(c, seen)
        assert (c.estimate is c.anytime) == (n < pairs) and c.estimate in (c.anytime, c.paired)
        on_the_way |= decided & (n < pairs)
        fixed |= abs(stats.ttest_1samp(seen, 0, axis=1).statistic) > stats.t.ppf(0.975, n - 1)
    shares = rates(on_the_way, on_the_way | decided, fixed)
    return dict(zip(("on the way", "in all", "by Student's t"), shares, strict=True))


def test_one_who_watches_a_sweep_and_cancels_it_claims_as_rarely_as_the_level_says(tmp_path):
    rate = watch(tmp_path, 10, 5)
    assert rate["on the way"][1] < 0.03 and rate["in all"][0] < 0.055
    assert rate["by Student's t"][0] > 0.1  # which claims so much


@pytest.mark.soak
@pytest.mark.parametrize(("looks", "fixed"), [(5, 0.12), (10, 0.18), (20, 0.24), (50, 0.31)])
def test_no_number_of_looks_at_a_sweep_claims_more(tmp_path, looks, fixed):
    rate = watch(tmp_path, 50, looks)
    assert rate["on the way"][1] < 0.035 and rate["in all"][1] < 0.08
    assert rate["by Student's t"][0] > fixed


def test_arms_without_common_seeds_have_no_verdict_before_all_runs_are_over(tmp_path):
    sweep = Sweep(tmp_path, 4, common=False)
    for seed in range(4):
        sweep.run("a", seed)
        sweep.run("b", seed)
        if seed > 0:
            c = sweep.compared()
            assert c.unpaired is not None and c.estimate is (c.unpaired if seed == 3 else None)


def test_paired_arms_and_one_without_partners_claim_together_as_rarely_as_the_level_says(tmp_path):
    """Two arms of the base's four seeds, and one of four others."""
    drawn = np.random.default_rng(2).normal(size=(4, DRAWS, 4))  # the base, two arms, the other one
    for i, losses in enumerate(drawn[:, 0].tolist()):
        for seed, loss in enumerate(losses):
            words = [f"optim.lr={i}", f"seed={seed + 9 * (i == 3)}", f"steps={END}"]
            write_run(tmp_path / f"{i}-{seed}", words, [END], [2.0 + loss / 9])
    runs = open_runs([tmp_path])
    arms, base, _ = choose_arms(runs, [])
    *together, apart = compare_all(arms, base, measure_runs(runs, MEASURE, None), variance="equal")
    rest = drawn[:3] - drawn[:3].mean(0)
    rest = rest - rest.mean(2, keepdims=True)
    deviation = np.sqrt(2 * (rest**2).sum((0, 2)) / 6)
    t = stats.ttest_ind(drawn[3], drawn[0], axis=1, equal_var=False).statistic
    claimed = abs(t) > stats.t.ppf((1 + apart.level) / 2, 3)
    for c, losses in zip(together, drawn[1:], strict=False):
        assert c.blocks and c.estimate is c.pooled and apart.estimate is apart.unpaired
        width = (c.estimate.high - c.estimate.mean) / c.estimate.deviation
        claimed |= abs((losses - drawn[0]).mean(1)) > width * deviation
    assert rates(claimed)[0][1] < 0.06


def test_one_who_stops_the_runs_that_lag_at_half_way_claims_as_rarely_as_the_level_says(tmp_path):
    """Of ten pairs whose losses at half way vary with the last ones by 0.8, the three runs of an
    arm that are worst then."""
    sweep, stopped = Sweep(tmp_path, 10), 3
    for seed in range(10):
        sweep.run("a", seed, HALF if seed < stopped else END)
        sweep.run("b", seed)
    c = sweep.compared()
    assert [(o.stopped, o.lost) for o in c.outcomes] == [([], []), (["a-0", "a-1", "a-2"],) * 2]
    rng = np.random.default_rng(1)
    half, rest, base = rng.normal(size=(3, DRAWS, 10))
    differences = 0.8 * half + 0.6 * rest - base
    kept = np.take_along_axis(differences, half.argsort(1)[:, :-stopped], 1)
    t = abs(stats.ttest_1samp(kept, 0, axis=1).statistic)
    ours, fixed = rates(claims(c, kept), t > stats.t.ppf(0.975, 6))
    assert ours[1] < 0.02 and fixed[0] > 0.08
