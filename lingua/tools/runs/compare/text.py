"""A comparison in words, at most 80 columns wide, and as numbers for programs."""

import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from lingua.base.format import align, counted
from lingua.run.records import Record
from lingua.tools.runs.compare.arms import By, HeldOutLosses, listed
from lingua.tools.runs.compare.comparison import Comparison, Pair
from lingua.tools.runs.compare.differences import Aspect, causes, first_differences, only_rounding
from lingua.tools.runs.compare.statistics import MAX_PAIRS, PILOT, POWER, Estimate, proportion

WIDTH = 80
MAX_TABLE_STEPS = 8  # rows of the table along training
UNITS = {"nats_per_byte": "nats per byte", "nats_per_token": "nats per token",
         "bits_per_byte": "bits per byte"}  # fmt: skip
SPENT = {"tokens": "tokens", "flops": "FLOPs", "time": "s of training"}
UNIT = {"step": "step", "tokens": "tokens", "flops": "FLOPs", "time": "seconds"}
LAST = {"step": "last step", "tokens": "largest number of tokens",
        "flops": "largest number of FLOPs", "time": "longest training time"}  # fmt: skip
# What an anytime interval takes: (true difference in deviations, pairs that show it in half and in
# 80 % of cases, pairs of a fixed number that show it in 80 %), simulated by tests.
PRICE = ((1, 12, 18, 10), (2, 6, 8, 5), (3, 5, 6, 4))


def heading(
    measured: HeldOutLosses, unit: str, level: float, arms: int, problems: list[str]
) -> Iterator[str]:
    """Returns what is compared: the step, and what is left out."""
    place = _place(measured.by, measured.steps[-1])
    yield f"held-out loss after {place} in {unit}; lower is better"
    if arms > 1:
        yield from wrapped(
            f"{arms} arms are compared with one: all of their intervals hold together with "
            f"{100 * level:.4g} %"
        )
    if measured.shortest:
        names = listed([run.name for run in measured.shortest])
        other = "; step=N chooses another" if measured.by == "step" else ""
        yield from wrapped(
            f"note: this is the {LAST[measured.by]} that all runs have reached; {names} "
            f"{'have' if len(measured.shortest) > 1 else 'has'} no later loss, others have{other}"
        )
    for text in (*measured.left_out, *problems):
        yield from wrapped(f"note: {text}")


def about(by: By, value: float) -> str:
    """The last sentence of a verdict."""
    losses = "" if by == "step" else "losses after "  # "about 20 tokens" would be a number of them
    now, later = (losses + _place(by, amount) for amount in (value, 10 * value))
    return f"This is about {now}; it says nothing about {later}."


def _place(by: By, value: float) -> str:
    """`step 150`, `20,480 tokens`, `1.2e+15 FLOPs` or `63 s of training`."""
    amount = _amount(by, value)
    return f"step {amount}" if by == "step" else f"{amount} {SPENT[by]}"


def _amount(by: By, value: float) -> str:
    digits = ".4g" if by == "flops" else ".3g" if value < 100 else ",.0f"
    return f"{value:{digits}}"


def verdict(c: Comparison, unit: str, effect: float | None = None) -> str:
    """What a comparison means, in a few sentences, the last of which says of which step."""
    return " ".join([*(f"{text}." for text in first_lines(c)), _statement(c, unit, effect)])


def first_lines(c: Comparison) -> list[str]:
    """What a reader must know before any mean: what besides the named keys is not the same in all
    runs, and which runs failed or diverged."""
    return [*c.unlike, *_outcomes(c)]


def _outcomes(c: Comparison) -> list[str]:
    """A line where a run failed or diverged, and one where a run was stopped."""
    kinds = ("failed", "diverged")
    bad = " or ".join(kind for kind in kinds if any(getattr(o, kind) for o in c.outcomes))
    lines = []
    for verb, of in ((bad, lambda o: o.bad), ("was stopped", lambda o: o.stopped)):
        worst_first = sorted(c.outcomes, key=lambda outcome: -len(of(outcome)))
        parts = []
        for outcome, end in zip(worst_first, (f" {verb}", ""), strict=True):
            n = len(of(outcome))
            part = f"{outcome.label}{end} in {n} of {counted(outcome.runs, 'run')}"
            if n and verb == bad:  # whether a run is stopped is no chance
                low, high = proportion(n, outcome.runs, c.level)
                part += f" ({100 * c.level:.4g} %: {100 * low:.0f} to {100 * high:.0f} %)"
            parts.append(part)
        if names := [name for outcome in c.outcomes for name in of(outcome)]:
            lines.append(f"{', '.join(parts)}: {listed(names)}")
    return lines


def _statement(c: Comparison, unit: str, effect: float | None) -> str:
    """What the numbers of a comparison mean."""
    survived = c.survivors if c.arm_losses and c.base_losses else ""
    text = f"{survived}{_meaning(c, unit)}"
    return " ".join([text, *_typical(c), *_needed(c, effect), about(c.by, c.steps[-1])])


def _meaning(c: Comparison, unit: str) -> str:
    number, e = _format(c), c.estimate
    if c.is_identical:
        who = [(p.arm.name, p.base.name) for p in c.pairs[:1]]
        a, b = who[0] if len(c.pairs) == 1 else (c.arm_label, c.base_label)
        each = "" if len(c.pairs) == 1 else f" in each of {len(c.pairs)} pairs"
        return f"{a} and {b} are the same run{each}: all that both recorded is identical."
    if c.rounding:
        largest = max(abs(pair.differences).max() for pair in c.pairs)
        return (
            f"{c.arm_label} and {c.base_label} differ by rounding alone: the same rows, and "
            f"losses at most {largest:.1e} {unit} apart, {counted(len(c.pairs), 'pair')}."
        )
    if e is None:
        return _without_interval(c, unit)
    runs = f"{counted(len(c.arm_losses), 'run')} against {len(c.base_losses)}, not paired"
    within = c.is_paired if c.pooled is None else c.blocks
    how = counted(len(c.pairs), "pair") if within else runs
    how += ", assuming that all arms vary alike" if c.pooled is not None else ""
    level = f"{100 * e.level:.4g} % {'anytime ' if c.added else ''}interval"
    if e.excludes_zero:
        better = "better" if e.mean < 0 else "worse"
        low, high = sorted((abs(e.low), abs(e.high)))
        return (
            f"{c.arm_label} is {better} than {c.base_label} by {number(abs(e.mean))} {unit} in "
            f"typical runs, {level} {number(low)} to {number(high)}, {how}."
        )
    return (
        f"{c.arm_label} and {c.base_label} cannot be told apart: difference of typical runs "
        f"{number(e.mean, '+')} {unit}, {level} {_interval(e, number)}, {how}."
    )


def _typical(c: Comparison) -> Iterator[str]:
    """How often runs are not typical: the interval holds where losses are about normal, and a few
    seeds do not show how often a run fails."""
    if c.estimate is None or c.rounding or c.is_identical:
        return
    shares = []
    for count, outcome in zip(c.atypical, c.outcomes, strict=True):
        low, high = proportion(count, outcome.runs, c.level)
        percent = f"{100 * c.level:.4g} %: {100 * low:.0f} to {100 * high:.0f} %"
        shares.append(f"{count} of {outcome.runs} ({percent})")
    yield f"Runs that failed or are far from the rest: {' against '.join(shares)}."


def _needed(c: Comparison, effect: float | None) -> Iterator[str]:
    """How many pairs would show `effect`."""
    if effect is None or c.spread is None or c.rounding or c.is_identical:
        return
    needed = c.pairs_for(effect), c.pairs_for(effect, PILOT)
    pairs = [f"over {MAX_PAIRS:,} pairs" if n is None else f"about {n:,} pairs" for n in needed]
    yield (
        f"In a new comparison of these arms, {pairs[0]} would show a difference of {effect:.4g} in "
        f"{100 * POWER:.0f} % of cases."
    )
    if len(c.pairs) < PILOT:
        yield (
            f"{len(c.pairs)} pairs measure the deviation poorly; if {PILOT} pairs measured the "
            f"same, {pairs[1]} would be enough."
        )


def _without_interval(c: Comparison, unit: str) -> str:
    n, m = len(c.arm_losses), len(c.base_losses)
    if not (n and m):
        return "Nothing is left to compare."
    if c.constant:
        which = " and of ".join(c.constant)
        arm, base = (np.mean(list(losses.values())) for losses in (c.arm_losses, c.base_losses))
        return (
            f"The seed has no effect: all runs of {which} have the same loss up to rounding, so "
            f"chance cannot be estimated; {c.arm_label} differs by {arm - base:+.4f} {unit} from "
            f"{c.base_label}."
        )
    if len(c.pairs) == 1 == min(n, m):
        [pair] = c.pairs
        return (
            f"One pair says nothing about chance; {pair.arm.name} differs by "
            f"{pair.differences[-1]:+.4f} {unit} from {pair.base.name}. Run both with more seeds."
        )
    if c.is_paired:
        return (
            f"All {len(c.pairs)} differences are {c.differences.mean():+.4f} {unit} up to "
            "rounding: chance cannot be estimated."
        )
    runs = f"{c.arm_label} and {c.base_label}: {counted(n, 'run')} and {m}, "
    common = counted(len(c.pairs), "common seed") if c.pairs else "without a common seed"
    refused = ""
    if c.added:
        refused = (
            f" No verdict: the anytime rule decides, as {c.added}, and needs pairs. Wait until all "
            "runs are over; anytime=false states that their number was fixed before the first "
            "result."
        )
    return f"{runs}{common}.{refused} Run both with the same seeds."


def rule(c: Comparison) -> str:
    """Which interval decides, and by which rule, which looks at no loss."""
    of = f"{len(c.pairs)} of {counted(c.smaller, 'run')} of the smaller arm"
    if c.estimate is None or c.rounding or c.is_identical:
        return ""
    if c.added:
        sigmas, half, often, fixed = (", ".join(map(str, row)) for row in zip(*PRICE, strict=True))
        return (
            f"rule: anytime, as {c.added}; the interval holds however often one looks. Its price "
            f"at 95 %: differences of {sigmas} deviations are shown by {half} pairs in half of the "
            f"cases and by {often} in 80 %, by a fixed number of {fixed} in 80 %. If the number of "
            "pairs was fixed before the first result: anytime=false"
        )
    if c.pooled is not None:
        blocks = "seeds as blocks" if c.blocks else "without blocks, as no arm is paired"
        how = f"{c.assumed}, {blocks}, and Dunnett's critical value"
        return f"rule: one variance of all arms, which {how}"
    paired = f"{of} are in pairs" if c.pairs else "no seed is common"
    which = "paired" if c.is_paired else "unpaired"
    return f"rule: {which}, as {paired} (paired needs two pairs, and half of the smaller arm)"


def _interval(e: Estimate, number: Callable[..., str]) -> str:
    if math.isinf(e.high):
        return "without ends yet"
    return f"{number(e.low, '+')} to {number(e.high, '+')}"


def wrapped(text: str) -> list[str]:
    """Wrap text to lines of WIDTH; those after the first are indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _format(c: Comparison) -> Callable[..., str]:
    """A formatter of differences, with two digits of the half width of the narrowest interval."""
    estimates = (c.paired, c.unpaired, c.pooled, c.anytime)
    halves = [(e.high - e.low) / 2 for e in estimates if e is not None]
    halves = [half for half in halves if 0 < half < math.inf]
    places = min(10, max(4, 1 - math.floor(math.log10(min(halves))))) if halves else 4
    return lambda value, sign="": f"{value:{sign}.{places}f}"


def lines(
    c: Comparison, unit: str, effect: float | None = None, brief: bool = False
) -> Iterator[str]:
    """The comparison for people, the `brief` one of several without what is not a number of it."""
    number = _format(c)
    for text in first_lines(c):
        yield from wrapped(text)
    yield from textwrap.wrap(_statement(c, unit, effect), WIDTH, break_on_hyphens=False)
    yield from wrapped(rule(c)) if not brief else ()
    notes = [*c.notes, *(f"{p.arm.name} and {p.base.name} are the same run" for p in c.identical)]
    for note in c.notes if c.is_identical else notes:
        yield from wrapped(f"note: {note}")
    if not (c.is_identical or c.rounding):  # an interval of rounding would mean nothing
        for note in _shape(c, number) if c.estimate else ():
            yield from wrapped(f"note: {note}")
        yield from _numbers(c, unit, number)
        yield from _along(c, number) if not brief else ()
    if not brief and c.one_on_one is not None:
        yield ""
        yield from _first_lines(*c.one_on_one)


def _shape(c: Comparison, number: Callable[..., str]) -> Iterator[str]:
    """What the interval that decides does not fit."""
    if not c.is_paired:
        return
    if c.far is not None:
        pair, rest = c.far
        yield (
            f"{pair.arm.name} and {pair.base.name} differ by {number(pair.differences[-1], '+')}, "
            "far from the other pairs (Grubbs' test); without them the difference would be "
            f"{number(rest.mean, '+')}, interval {_interval(rest, number)}"
        )
    if not c.is_normal:
        yield (
            "the differences are not normally distributed (test of Shapiro and Wilk), which the "
            "interval assumes: see the sign-flip test"
        )


def _numbers(c: Comparison, unit: str, number: Callable[..., str]) -> Iterator[str]:
    if c.estimate is None:
        return
    runs = f"{len(c.arm_losses)} and {len(c.base_losses)} runs"
    pairs = counted(len(c.pairs), "pair")
    rows = [["", "difference", "interval", "level", "deviation", ""]]
    for name, e, n in (
        ("pooled", c.pooled, pairs if c.blocks else runs),
        ("anytime", c.anytime, pairs),
        ("paired", c.paired, pairs),
        ("unpaired", c.unpaired, runs),
    ):
        if e is not None:
            mark = ">" if e is c.estimate else " "  # it decides
            level = f"{100 * e.level:.4g} %"
            rows.append([f"{mark} {name}", number(e.mean, "+"), _interval(e, number), level,
                         number(e.deviation), n])  # fmt: skip
    yield ""
    yield from align(rows, left=1)
    if c.sign_flip is not None:
        few = "; with fewer than six pairs it is never below 0.05" if len(c.pairs) < 6 else ""
        yield from wrapped(f"sign-flip test of the pairs: p = {c.sign_flip:.2g}{few}")
    if c.smallest_effect is not None:
        yield from wrapped(
            f"smallest detectable effect: {number(c.smallest_effect)} {unit}, the true difference "
            f"that a new comparison of these arms with {pairs} would show in {100 * POWER:.0f} % "
            "of cases"
        )
    if c.gain is not None:
        ratio, low, high = c.gain
        yield from wrapped(
            f"common seeds: without them the variance of a difference would be {ratio:.2g} times "
            f"as large ({100 * c.level:.4g} %: {low:.2g} to {high:.2g})"
        )


def _along(c: Comparison, number: Callable[..., str]) -> Iterator[str]:
    """The paired differences at some steps, the first and the last among them."""
    n = len(c.along)
    if n < 2:
        return
    chosen = sorted({round(i * (n - 1) / (MAX_TABLE_STEPS - 1)) for i in range(MAX_TABLE_STEPS)})
    yield ""
    rows = [[UNIT[c.by], "difference", "interval of this row alone", "pairs"]]
    for step, pairs, mean, e in (c.along[i] for i in chosen):
        interval = f"{number(e.low, '+')} to {number(e.high, '+')}" if e and c.estimate else ""
        rows.append([_amount(c.by, step), number(mean, "+"), interval, f"{pairs}"])
    yield from align(rows, left=0)


def _first_lines(a: Record, b: Record) -> Iterator[str]:
    """Returns lines about where two runs first differ, and why."""
    aspects = first_differences(a, b)
    yield f"where {a.name} and {b.name} first differ"
    rows = [[f"  {aspect.name}", _where(aspect), _values(aspect)] for aspect in aspects]
    yield from align(rows, left=3)
    why = causes(a, b)
    yield "why" if why else "why: nothing that is recorded differs"
    for cause in why:
        yield from textwrap.wrap(
            f"{cause.kind}: {cause.text}", WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    if only_rounding(a, b):
        yield "  which only changes the order of additions: the rest is rounding"


def _where(aspect: Aspect) -> str:
    if aspect.missing:
        return aspect.missing
    if aspect.first is None:
        return f"equal at {counted(aspect.steps, 'step')}, the last {aspect.equal_until:,}"
    if aspect.equal_until is None:
        return f"step {aspect.first:,}, the first that both have"
    return f"step {aspect.first:,}; equal at step {aspect.equal_until:,}"


def _values(aspect: Aspect) -> str:
    if aspect.values is None or not all(isinstance(v, float) for v in aspect.values):
        return ""
    a, b = aspect.values
    digits = next((n for n in (6, 9) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17)
    return f"{a:.{digits}g} and {b:.{digits}g}"


def as_json(c: Comparison, unit: str, effect: float | None = None) -> dict[str, Any]:
    """The whole comparison for programs."""
    estimates = {name: getattr(c, name) for name in ("pooled", "anytime", "paired", "unpaired")}
    return {
        "arm": c.arm_label,
        "base": c.base_label,
        c.by: c.steps[-1],
        "level": c.level,
        "verdict": verdict(c, unit, effect),
        "rule": rule(c),
        "decides": next((n for n, e in estimates.items() if e and e is c.estimate), None),
        **{name: e and asdict(e) for name, e in estimates.items()},
        "sign_flip": c.sign_flip,
        "far_pair": c.far and _pair_names(c.far[0]),
        "is_normal": c.is_normal,
        "smallest_effect": c.smallest_effect,
        "unpaired_over_paired_variance": c.gain,
        "atypical": c.atypical,
        "effect": effect,
        "pairs_for_effect": effect and c.pairs_for(effect),
        "outcomes": [asdict(outcome) for outcome in c.outcomes],
        "unlike": c.unlike,
        "only_rounding": c.rounding,
        "notes": c.notes,
        "losses": {"arm": list(c.arm_losses.values()), "base": list(c.base_losses.values())},
        "along": [
            {c.by: step, "pairs": n, "mean": mean, "interval": e and [e.low, e.high]}
            for step, n, mean, e in c.along
        ],
        "pairs": [_pair(p, p in c.identical) for p in c.pairs],
    }


def _pair_names(pair: Pair) -> dict[str, str]:
    return {"arm": str(pair.arm.folder), "base": str(pair.base.folder)}


def _pair(pair: Pair, identical: bool) -> dict[str, Any]:
    return {
        **_pair_names(pair),
        "difference": float(pair.differences[-1]),
        "same_run": identical,
        "first_differences": [asdict(aspect) for aspect in first_differences(pair.arm, pair.base)],
        "causes": [asdict(cause) for cause in causes(pair.arm, pair.base)],
    }


def plain(value: Any) -> Any:
    """Without the numbers that JSON lacks."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
