"""A comparison in words, at most 80 columns wide, and as numbers for programs."""

import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from lingua.base.format import align, counted
from lingua.tools.runs.compare.arms import HeldOutLosses
from lingua.tools.runs.compare.comparison import Comparison, Pair
from lingua.tools.runs.compare.differences import Aspect, causes, first_differences, only_rounding
from lingua.tools.runs.compare.statistics import MAX_PAIRS, POWER, proportion
from lingua.tools.runs.records import Record

WIDTH = 80
MAX_TABLE_STEPS = 8  # rows of the table along training
MAX_NAMED = 5  # names of runs in a line
UNITS = {"nats_per_byte": "nats per byte", "nats_per_token": "nats per token",
         "bits_per_byte": "bits per byte"}  # fmt: skip


def heading(
    measured: HeldOutLosses, unit: str, level: float, arms: int, problems: list[str]
) -> Iterator[str]:
    """What is compared: the step, and what is left out."""
    step = measured.steps[-1]
    yield f"held-out loss after step {step:,} in {unit}; lower is better"
    if arms > 1:
        yield from wrapped(
            f"{arms} arms are compared with one: their intervals hold all together with "
            f"{100 * level:.4g} % (Bonferroni), so each is wider"
        )
    if measured.shortest:
        names = ", ".join(run.name for run in measured.shortest[:MAX_NAMED])
        more = ", ..." if len(measured.shortest) > MAX_NAMED else ""
        yield from wrapped(
            f"note: this is the last step that all runs have; {names}{more} "
            f"{'have' if len(measured.shortest) > 1 else 'has'} no later one, others have; step=N "
            "chooses another"
        )
    for text in (*measured.left_out, *problems):
        yield from wrapped(f"note: {text}")


def verdict(c: Comparison, unit: str, effect: float | None = None) -> str:
    """What a comparison means, in a few sentences."""
    return " ".join([*(f"{text}." for text in first_lines(c)), _statement(c, unit, effect)])


def first_lines(c: Comparison) -> list[str]:
    """What a reader must know before any mean: what besides the named keys is not the same in all
    runs, and which runs failed or diverged."""
    return [*c.unlike, *_outcomes(c)]


def _outcomes(c: Comparison) -> list[str]:
    """A line, where a run failed or diverged."""
    names = [name for outcome in c.outcomes for name in outcome.bad]
    if not names:
        return []
    kinds = {"failed": any(outcome.failed for outcome in c.outcomes),
             "diverged": any(outcome.diverged for outcome in c.outcomes)}  # fmt: skip
    verb = f" {' or '.join(kind for kind, happened in kinds.items() if happened)}"
    parts = []
    worst_first = sorted(c.outcomes, key=lambda outcome: -len(outcome.bad))
    for outcome, end in zip(worst_first, (verb, ""), strict=True):
        part = f"{outcome.label}{end} in {len(outcome.bad)} of {counted(outcome.runs, 'run')}"
        if outcome.bad:
            low, high = proportion(len(outcome.bad), outcome.runs, c.level)
            part += f" ({100 * c.level:.4g} %: {100 * low:.0f} to {100 * high:.0f} %)"
        parts.append(part)
    more = ", ..." if len(names) > MAX_NAMED else ""
    return [f"{', '.join(parts)}: {', '.join(names[:MAX_NAMED])}{more}"]


def _statement(c: Comparison, unit: str, effect: float | None) -> str:
    """What the numbers of a comparison mean."""
    number, e = _format(c), c.estimate
    text = "Of the runs that survived: " if c.survivors and c.arm_losses and c.base_losses else ""
    if c.is_identical:
        who = [(p.arm.name, p.base.name) for p in c.pairs[:1]]
        a, b = who[0] if len(c.pairs) == 1 else (c.arm_label, c.base_label)
        each = "" if len(c.pairs) == 1 else f" in each of {len(c.pairs)} pairs"
        return f"{text}{a} and {b} are the same run{each}: all that both recorded is identical."
    if c.rounding:
        largest = max(abs(pair.differences).max() for pair in c.pairs)
        return (
            f"{text}{c.arm_label} and {c.base_label} differ by rounding alone: the same rows, and "
            f"losses at most {largest:.1e} {unit} apart, {counted(len(c.pairs), 'pair')}."
        )
    if e is None:
        return text + _without_interval(c, unit)
    runs = f"{counted(len(c.arm_losses), 'run')} against {len(c.base_losses)}, not paired"
    how = counted(len(c.pairs), "pair") if c.paired else runs
    level = f"{100 * c.level:.4g} % interval"
    if e.excludes_zero:
        better = "better" if e.mean < 0 else "worse"
        low, high = sorted((abs(e.low), abs(e.high)))
        return text + (
            f"{c.arm_label} is {better} than {c.base_label} by {number(abs(e.mean))} {unit}, "
            f"{level} {number(low)} to {number(high)}, {how}."
        )
    text += (
        f"{c.arm_label} and {c.base_label} cannot be told apart: difference "
        f"{number(e.mean, '+')} {unit}, {level} {number(e.low, '+')} to {number(e.high, '+')}, "
        f"{how}."
    )
    needed = c.pairs_for(effect)
    if needed is None:
        return text
    size, pairs = needed
    if pairs is None:
        return f"{text} More than {MAX_PAIRS:,} pairs would be needed to show {number(size)}."
    return f"{text} About {counted(pairs, 'pair')} would show {number(size)}."


def _without_interval(c: Comparison, unit: str) -> str:
    if len(c.pairs) == 1:
        [pair] = c.pairs
        difference = float(pair.differences[-1])
        better = "better" if difference < 0 else "worse" if difference > 0 else "different"
        return (
            f"{pair.arm.name} is {better} than {pair.base.name} by {abs(difference):.4f} {unit}. "
            "That is one pair, which has no interval: whether it is chance cannot be known. Run "
            "both with more seeds."
        )
    if not (c.arm_losses and c.base_losses):
        return "Nothing is left to compare."
    runs = f"{counted(len(c.arm_losses), 'run')} and {len(c.base_losses)}, without a common seed"
    return f"{c.arm_label} and {c.base_label}: {runs}. Run both with the same seeds."


def wrapped(text: str) -> list[str]:
    """In lines of WIDTH; those after the first are indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _format(c: Comparison) -> Callable[..., str]:
    """A formatter of differences, with two digits of the half width of the narrowest interval."""
    halves = [(e.high - e.low) / 2 for e in (c.paired, c.unpaired) if e is not None]
    halves = [half for half in halves if half > 0]
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
    notes = [*c.notes, *(f"{p.arm.name} and {p.base.name} are the same run" for p in c.identical)]
    for note in c.notes if c.is_identical else notes:
        yield from wrapped(f"note: {note}")
    if not (c.is_identical or c.rounding):  # an interval of rounding would mean nothing
        yield from _numbers(c, unit, number)
        yield from _along(c, number) if not brief else ()
    if not brief and c.one_on_one is not None:
        yield ""
        yield from _first_lines(*c.one_on_one)


def _numbers(c: Comparison, unit: str, number: Callable[..., str]) -> Iterator[str]:
    rows = [["", "difference", f"{100 * c.level:.4g} % interval", "deviation", ""]]
    for name, e, n in (
        ("paired", c.paired, counted(len(c.pairs), "pair")),
        ("unpaired", c.unpaired, f"{len(c.arm_losses)} and {len(c.base_losses)} runs"),
    ):
        if e is not None:
            interval = f"{number(e.low, '+')} to {number(e.high, '+')}"
            rows.append([name, number(e.mean, "+"), interval, number(e.deviation), n])
    if len(rows) > 1:
        yield ""
        yield from align(rows, left=1)
    if c.noise_floor is not None:
        yield from wrapped(
            f"noise floor: {number(c.noise_floor)} {unit}, the smallest true difference that "
            f"{counted(len(c.pairs), 'pair')} would show in {100 * POWER:.0f} % of cases"
        )
    if c.gain is not None:
        yield from wrapped(
            "common seeds: without them the variance of a difference would be "
            f"{c.gain:.2g} times as large"
        )


def _along(c: Comparison, number: Callable[..., str]) -> Iterator[str]:
    """The paired differences at some steps, the first and the last among them."""
    n = len(c.along)
    if n < 2:
        return
    chosen = sorted({round(i * (n - 1) / (MAX_TABLE_STEPS - 1)) for i in range(MAX_TABLE_STEPS)})
    yield ""
    rows = [["step", "difference", "interval, of this step alone", "pairs"]]
    for step, pairs, mean, e in (c.along[i] for i in chosen):
        interval = "" if e is None else f"{number(e.low, '+')} to {number(e.high, '+')}"
        rows.append([f"{step:,}", number(mean, "+"), interval, f"{pairs}"])
    yield from align(rows, left=0)


def _first_lines(a: Record, b: Record) -> Iterator[str]:
    """Where two runs first differ, and why."""
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
    needed = c.pairs_for(effect)
    return {
        "arm": c.arm_label,
        "base": c.base_label,
        "step": c.steps[-1],
        "level": c.level,
        "verdict": verdict(c, unit, effect),
        "paired": c.paired and asdict(c.paired),
        "unpaired": c.unpaired and asdict(c.unpaired),
        "noise_floor": c.noise_floor,
        "unpaired_over_paired_variance": c.gain,
        "effect": needed and needed[0],
        "pairs_for_effect": needed and needed[1],
        "outcomes": [asdict(outcome) for outcome in c.outcomes],
        "unlike": c.unlike,
        "only_rounding": c.rounding,
        "notes": c.notes,
        "losses": {"arm": c.arm_losses, "base": c.base_losses},
        "along": [
            {"step": step, "pairs": n, "mean": mean, "interval": e and [e.low, e.high]}
            for step, n, mean, e in c.along
        ],
        "pairs": [_pair(p, p in c.identical) for p in c.pairs],
    }


def _pair(pair: Pair, identical: bool) -> dict[str, Any]:
    return {
        "arm": str(pair.arm.folder),
        "base": str(pair.base.folder),
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
