"""Held-out losses of runs, all sources together; curves without noise, and between measurements."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from lingua.base.errors import import_optional
from lingua.run.records import Columns, Record

SAME = 1e-9  # relative difference of amounts, as of FLOPs, that are equal but for rounding
THEN = " until step "  # in the name of a held-out text that changed


def heldout(record: Record, measure: str = "nats_per_byte") -> tuple[np.ndarray, np.ndarray]:
    """(steps, int64 [n]; values, float64 [n]): the held-out loss of all sources together, as the
    console shows it and as the best checkpoint is chosen: the mean weighted with the bytes of each
    source (with its tokens for a measure per token; equally where a file has neither).

    The steps are those at which every source was measured that the last two measurements had, so
    that one cut off by a kill does not count. A loss that is not finite is NaN.
    """
    parts, common = _measured(record, measure)
    size = "tokens" if measure.endswith("_per_token") else "bytes"
    if not common:
        return np.zeros(0, np.int64), np.zeros(0)
    values = np.array([c.numbers(measure)[np.searchsorted(c.step, common)] for c in parts])
    weights = np.array([c.numbers(size)[np.searchsorted(c.step, common)] for c in parts])
    if not (weights > 0).all():  # NaN included
        weights = np.ones_like(values)
    return np.array(common, np.int64), (values * weights).sum(0) / weights.sum(0)


def _measured(record: Record, measure: str) -> tuple[list[Columns], list[int]]:
    """(the sources that count, the steps at which all of them were measured), see heldout."""
    parts = [c for c in record.validation.values() if c.has(measure)]
    at = {id(c): set(c.step.tolist()) for c in parts}
    steps = sorted(set().union(*at.values()))
    parts = [c for c in parts if not at[id(c)].isdisjoint(steps[-2:])]
    return parts, sorted(set(steps).intersection(*(at[id(c)] for c in parts)))


def heldout_texts(
    records: Sequence[Record], measure: str, steps: Sequence[float] | None = None
) -> list[str]:
    """The text of each run's held-out losses at `steps` (None: at all): equal for the same text,
    and `A until step 10, then B` where it changed. A text is known by its hashes where all runs
    have recorded them, else by its bytes; for a measure per token also by the number of its tokens,
    which differs between tokenizers. Empty where nothing is known."""
    at = None if steps is None else set(steps)
    known = [_texts(record, measure, at) for record in records]
    hashed = all(text for run in known for _, parts in run for *_, text in parts)
    per_token = measure.endswith("_per_token")

    def name(parts: Sequence[tuple[float, float, str]]) -> str:
        return " and ".join(
            f"{size:,.0f} bytes" + f" in {tokens:,.0f} tokens" * per_token + f" {text}" * hashed
            for size, tokens, text in parts
            if size == size
        )

    texts = []
    for run in known:
        turns = groupby(run, key=lambda measured: name(measured[1]))
        until = [f"{text}{THEN}{[*same][-1][0]:,}" for text, same in turns]
        texts.append(", then ".join(until).rpartition(THEN)[0])
    return texts


def _texts(
    record: Record, measure: str, steps: set[float] | None
) -> list[tuple[int, list[tuple[float, float, str]]]]:
    """Each of `steps` that was measured, with the bytes, tokens and hash of each source's text."""
    parts, common = _measured(record, measure)
    at = [step for step in common if steps is None or step in steps]
    columns = [
        [(size[i], tokens[i], texts[i] or "") for i in np.searchsorted(c.step, at).tolist()]
        for c in parts
        for size, tokens, texts in [(c.numbers("bytes"), c.numbers("tokens"), c.text("text"))]
    ]
    return list(zip(at, map(sorted, zip(*columns, strict=True)), strict=True)) if at else []


def smooth(values: np.ndarray, step: np.ndarray, half_life: float | None = None) -> np.ndarray:
    """Exponential moving average over the steps: a value counts half as much as one that is
    `half_life` steps later. NaN does not count, and stays NaN.

    Args:
        values: float64 [lines].
        step: int64 [lines], increasing.
        half_life: in steps; None: a twentieth of the lines, at least one and at most ten, times
            the median number of steps between two of them.

    Returns:
        float64 [lines]: at line i the sum of w_j * values[j] over j <= i, divided by that of w_j,
        with w_j = 0.5 ** ((step[i] - step[j]) / half_life).
    """
    gaps = np.diff(step, prepend=step[:1])
    if half_life is None:
        between = float(np.median(gaps[1:])) if len(gaps) > 1 else 1.0
        half_life = min(10.0, max(1.0, len(values) / 20)) * between
    total = weight = 0.0
    smoothed = []
    for value, decay in zip(values.tolist(), (0.5 ** (gaps / half_life)).tolist(), strict=True):
        total, weight = total * decay, weight * decay
        if value == value:
            total, weight = total + value, weight + 1.0
        smoothed.append(total / weight if value == value else np.nan)
    return np.array(smoothed)


def interpolate(
    points: np.ndarray, x: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A curve between its measurements.

    Args:
        points: float64 [points], above 0.
        x: float64 [measurements], above 0 and increasing.
        values: float64 [measurements].

    Returns:
        (float64 [points]: of a cubic spline in log(x), in which losses bend least; exact at a
        measurement, NaN outside of them and beside one that is not finite;
        float64 [2, points]: how far that is from straight lines, and from a monotone cubic or, of
        fewer than four measurements, the one before. Both sizes together bound its error for smooth
        curves; one alone is 0 where they cross.)
    """
    before = x[np.maximum(np.searchsorted(x, points * (1 + SAME)) - 1, 0)]
    measured = np.isclose(before, points, rtol=SAME, atol=0)
    points = np.where(measured, before, points)
    line = np.interp(np.log(points), np.log(x), values, left=np.nan, right=np.nan)
    between = np.isfinite(line) & ~measured
    errors = np.zeros((2, len(points)))
    if between.any():
        scipy = import_optional("scipy.interpolate", "lingua compare")
        u, y = np.log(x[np.isfinite(values)]), values[np.isfinite(values)]
        at = np.log(points[between])
        cubic = scipy.CubicSpline(u, y)(at)
        monotone = scipy.PchipInterpolator(u, y)(at)
        other = monotone if len(u) > 3 else y[np.searchsorted(u, at) - 1]
        errors[:, between] = cubic - line[between], cubic - other
        line[between] = cubic
    return line, errors
