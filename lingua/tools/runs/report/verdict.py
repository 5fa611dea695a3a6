"""The arms on a page: which are drawn, what they are called, and how they compare."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lingua.base.errors import UserError
from lingua.run.records import Record
from lingua.tools.runs.compare.arms import (
    SEED,
    Arm,
    check_text,
    choose_arms,
    find_arms,
    label,
    measure_runs,
)
from lingua.tools.runs.compare.comparison import Comparison, compare_all
from lingua.tools.runs.compare.text import UNITS, heading, rule, verdict

MAX_DRAWN = 50  # runs with curves: more colours and dashes cannot be distinguished
MEASURE = "nats_per_byte"
LEVEL = 0.95  # probability with which all intervals hold together


def arms_to_draw(records: Sequence[Record]) -> list[Arm]:
    """The arms of the runs that have results. Of more than MAX_DRAWN runs: whole arms at equal
    distances in their order, whatever their losses are."""
    arms = [one for arm in find_arms([r for r in records if has_results(r)]) for one in _split(arm)]
    for n in range(len(arms), 0, -1):
        chosen = [arms[i] for i in np.linspace(0, len(arms) - 1, n).astype(int)]
        if sum(len(arm.runs) for arm in chosen) <= MAX_DRAWN:
            return chosen
    return [replace(arm, runs=arm.runs[:MAX_DRAWN]) for arm in arms[:1]]


def has_results(record: Record) -> bool:
    """Whether it has begun, or was only evaluated."""
    return record.has_begun or bool(record.evaluation)


def _split(arm: Arm) -> list[Arm]:
    """The runs of an arm with a seed each; one that repeats a seed, or names none, is by itself."""
    of_seed: dict[str, Record] = {}
    single: list[Record] = []
    for run in arm.runs:
        if SEED not in run.config or of_seed.setdefault(str(run.config[SEED]), run) is not run:
            single.append(run)
    seeds = [replace(arm, runs=list(of_seed.values()))] if of_seed else []
    return [*seeds, *(replace(arm, runs=[run]) for run in single)]


def arm_name(arm: Arm) -> str:
    """What an arm of several runs differs in from all others, or its first and last run."""
    if len(arm.runs) == 1:
        return arm.runs[0].name
    other = replace(arm, values={key: object() for key in arm.values})  # it differs in every key
    text = label(arm, other)
    if text.endswith("..."):  # cut: another may begin like it
        text = label(arm, arm)
    return f"{text} ({len(arm.runs)} seeds)"


def compare_for_page(records: Sequence[Record]) -> dict[str, Any]:
    """{"heading": [...], "rows": [{"text", "notes", "interval": [mean, low, high]}, ...]}: all arms
    against the one that `lingua compare` chooses, in its words; empty for a single run."""
    if len(records) < 2:
        return {}
    try:
        arms, base, problems = choose_arms(list(records), [])
        everything = [run for arm in [*arms, base] for run in arm.runs]
        measured = measure_runs(everything, MEASURE, None)
        check_text(everything, measured)
        comparisons = compare_all(arms, base, measured, LEVEL, given=records)
    except UserError as error:
        return {"heading": [f"No comparison: {error}"], "rows": []}
    lines = "\n".join(heading(measured, UNITS[MEASURE], LEVEL, len(arms), problems))
    unwrapped = re.sub(r"\n +", " ", lines).split("\n")
    return {"heading": unwrapped, "rows": [_row(c) for c in comparisons]}


def _row(c: Comparison) -> dict[str, Any]:
    estimate = None if c.is_identical or c.rounding else c.estimate
    known = estimate is not None and math.isfinite(estimate.high)
    interval = [estimate.mean, estimate.low, estimate.high] if estimate and known else None
    notes = [*filter(None, [rule(c)]), *(f"note: {note}" for note in c.notes)]
    return {"text": verdict(c, UNITS[MEASURE]), "notes": notes, "interval": interval}
