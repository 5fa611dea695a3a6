"""What the page says about runs, as plain values: charts, marks, tables, samples, code."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from lingua.base.format import counted
from lingua.base.version import __version__
from lingua.run.files import grouped
from lingua.run.records import Columns, Record
from lingua.tools.runs.compare.axis import Axes
from lingua.tools.runs.held_out import heldout, smooth
from lingua.tools.runs.records import audited
from lingua.tools.runs.report.code import code_differences
from lingua.tools.runs.report.verdict import arm_name, arms_to_draw, compare_for_page, has_results
from lingua.tools.runs.settings import NOT_GIVEN, differing, setting

MAX_CHARTS = 60  # charts of one group, such as sources, tasks or the numbers of a probe
MAX_SAMPLES = 200  # samples of a run
MAX_TEXT = 200  # characters of a config's value
DIGITS = 6  # significant ones of a number
NOT_FINITE = {"nan", "inf", "-inf"}
# Columns of metrics.jsonl: title, unit, and whether it is noisy. Other columns follow.
METRIC_TITLES = {
    "loss": ("Training loss", "nats per token", True),
    "grad_norm": ("Gradient norm", "before clipping", True),
    "lr": ("Learning rate", "", False),
    "tokens_per_s": ("Tokens per second", "all devices", True),
    "mfu": ("MFU", "% of the device's peak", True),
    "peak_mem_gib": ("Peak memory", "GiB on rank 0", False),
    "data_time_s": ("Wait for data", "seconds per step", True),
    "slowest_ratio": ("Slowest rank", "its work over that of the median rank", True),
}
# They are on an axis, follow from others, or are marks.
NOT_DRAWN = (
    "tokens", "tokens_per_s_per_device", "step_time_s", "skipped_steps", "host_time_s",
    "slowest_rank",
)  # fmt: skip
EVENTS = ("start", "stop", "topology")


@dataclass
class Chart:
    """One picture. A line has its `run`, and by their index its three `x` (see Axes) and its `raw`
    numbers, which are JSON: as a text they take a quarter of the memory."""

    title: str
    unit: str = ""
    group: str = ""  # group of charts: the page shows one at a time
    noisy: bool = False  # the page draws smoothed lines too
    lines: list[dict[str, Any]] = field(default_factory=list)


def page_content(records: Sequence[Record], refresh_s: int | None = None) -> dict[str, Any]:
    """Returns the values that the page shows of `records`. With `refresh_s` the page loads its file
    again after so many seconds."""
    arms = arms_to_draw(records)
    ids = {id(run) for arm in arms for run in arm.runs}
    drawn = [record for record in records if id(record) in ids]
    index = {id(record): i for i, record in enumerate(drawn)}
    charts = _Charts()
    for i, record in enumerate(drawn):
        charts.add_run(i, record)
    content = {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "longest": max((int(r.metrics.step[-1]) for r in drawn if len(r.metrics.step)), default=1),
        "refresh_s": refresh_s,
        "title": records[0].name if len(records) == 1 else f"{len(records):,} runs",
        "names": [record.name for record in drawn],
        "arms": [{"name": arm_name(a), "runs": [index[id(r)] for r in a.runs]} for a in arms],
        "verdict": compare_for_page(records),
        "charts": [vars(chart) for chart in charts.sorted()],
        "arrays": list(charts.arrays),
        "missing": [t for key, (t, *_) in METRIC_TITLES.items() if key not in charts.columns],
        "marks": [mark for i, record in enumerate(drawn) for mark in _marks(i, record)],
        "overview": _overview(records, drawn),
        "machines": _machines(drawn),
        "scores": _scores(drawn),
        "configs": _configs(drawn),
        "code": code_differences(drawn),
        "samples": [_samples(record) for record in drawn],
    }
    notes = charts.notes
    n_results = sum(map(has_results, records))
    if len(drawn) < n_results:
        how = "arms at equal distances in the order of their names, whatever their losses are"
        hint = "name fewer runs on the command line to see others"
        notes = [f"Curves are of {len(drawn)} of the {n_results:,} runs: {how}; {hint}.", *notes]
    content["notes"] = notes
    # The runs of a sweep share their code.
    content["problems"] = list(dict.fromkeys(p for record in records for p in record.problems))
    return content


# ------------------------------------------------------------------------------------------ charts


class _Charts:
    def __init__(self) -> None:
        self.arrays: dict[str, int] = {}  # JSON of each, and its index: equal ones are one
        self.charts: dict[tuple[str, ...], Chart] = {}
        self.columns: set[str] = set()  # columns of metrics.jsonl
        self.notes: list[str] = []

    def add_run(self, run: int, record: Record) -> None:
        axes = Axes.of(record.metrics)
        self._add_metrics(run, record.metrics, axes)
        self._add_held_out(run, record, axes)
        for task, lines in grouped(record.evaluation, "task").items():
            self._add_numbers(run, "Benchmarks", f"{task} ", lines, axes, ("num_fewshot",))
        for event, lines in grouped(record.events, "event").items():
            if event not in EVENTS:
                self._add_numbers(run, f"Probe {event}", "", lines, axes)

    def _add_metrics(self, run: int, metrics: Columns, axes: Axes) -> None:
        others = [n for n in metrics if n not in METRIC_TITLES and n not in ("step", *NOT_DRAWN)]
        for name in [*METRIC_TITLES, *others]:
            if name in metrics:
                title, unit, noisy = METRIC_TITLES.get(name, (name, "", True))
                self.columns.add(name)
                chart = Chart(title, unit, noisy=noisy)
                self._add(("metrics", name), chart, run, axes.at(metrics.step), metrics[name])

    def _add_held_out(self, run: int, record: Record, axes: Axes) -> None:
        unit = "nats per byte"
        if len(record.validation) > 1:
            step, values = heldout(record)
            chart = Chart("Held-out loss, all sources", f"{unit}, mean weighted by bytes")
            self._add(("held-out",), chart, run, axes.at(step), values)
        for source, columns in record.validation.items():
            chart = Chart(f"Held-out loss of {source}", unit)
            place = ("held-out", source)
            self._add(place, chart, run, axes.at(columns.step), columns.numbers("nats_per_byte"))

    def _add_numbers(
        self,
        run: int,
        group: str,
        prefix: str,
        lines: list[dict[str, Any]],
        axes: Axes,
        without: tuple[str, ...] = (),
    ) -> None:
        """A chart of each number in lines, nested ones included; the page shows one at a time."""
        columns = Columns([{"step": line["step"], **dict(_numbers(line))} for line in lines])
        for name in columns:
            if name not in ("step", *without) and "stderr" not in name:
                place, chart = ("numbers", group, prefix + name), Chart(prefix + name, "", group)
                self._add(place, chart, run, axes.at(columns.step), columns[name])

    def _add(
        self,
        place: tuple[str, ...],
        chart: Chart,
        run: int,
        x: list[np.ndarray],
        values: np.ndarray,
    ) -> None:
        if not len(values) or np.isnan(values).all():
            return
        alike = [p for p in self.charts if p[:-1] == place[:-1]]
        if place not in self.charts and len(alike) >= MAX_CHARTS and place[0] != "metrics":
            note = f"Of {' '.join(place[1:-1]) or 'the sources'}, {MAX_CHARTS} numbers are shown."
            if note not in self.notes:
                self.notes.append(note)
            return
        axes = zip(x, (0, 0, 3), strict=True)  # whole steps and tokens, and milliseconds
        places = [self._index(map(repr, axis.round(digits).tolist())) for axis, digits in axes]
        raw = self._index(f"{value:.{DIGITS}g}" for value in values.tolist())
        self.charts.setdefault(place, chart).lines.append({"run": run, "x": places, "raw": raw})

    def _index(self, numbers: Iterable[str]) -> int:
        """The place of these numbers in `arrays`, where null stands for one that is not finite."""
        text = ",".join("null" if number in NOT_FINITE else number for number in numbers)
        return self.arrays.setdefault(f"[{text}]", len(self.arrays))

    def sorted(self) -> list[Chart]:
        """Training loss, held-out losses, the other metrics, then groups."""
        order = [("metrics", "loss"), ("held-out",), *(("metrics", name) for name in METRIC_TITLES)]

        def rank(item: tuple[int, tuple[str, ...]]) -> tuple[int, int]:
            i, place = item
            at = [n for n, start in enumerate(order) if place[: len(start)] == start]
            return (at[0] if at else len(order) + (place[0] == "numbers")), i

        return [self.charts[place] for _, place in sorted(enumerate(self.charts), key=rank)]


def _numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """`norms.layers.0`: the numbers in a line, by their path."""
    for key, value in values.items():
        if isinstance(value, dict) and prefix.count(".") < 5:
            yield from _numbers(value, f"{prefix}{key}.")
        elif type(value) in (int, float) and prefix + key != "step":
            yield prefix + key, value


# ------------------------------------------------------------------------------- marks and tables


def _marks(run: int, record: Record) -> Iterator[dict[str, Any]]:
    """Starts after a stop, stops, changes of topology, and skipped steps."""
    axes = Axes.of(record.metrics)
    marks = []
    for line in record.events:
        kind, step = line["event"], line["step"]
        if kind == "topology":
            what = f"{_sizes(line.get('old'))} to {_sizes(line.get('new'))}"
            marks.append((step, "topology", f"topology {what} (dp_replicate, dp_shard, tp, cp)"))
        elif kind == "stop" and line.get("reason") != "done":
            why = ": ".join(_text(line[key]) for key in ("reason", "error") if line.get(key))
            marks.append((step, "stop", f"stopped ({why})"))
        elif kind == "start" and (step > 0 or "cause" in line):
            marks.append((step, "resume", _resumed(line)))
    skipped = np.nan_to_num(record.metrics.numbers("skipped_steps"))
    new = np.diff(skipped, prepend=0.0)
    for i in np.flatnonzero(new > 0).tolist():
        step = int(record.metrics.step[i])
        marks.append((step, "skipped", f"{counted(int(new[i]), 'step')} skipped by step {step}"))
    marks.sort()
    places = np.array(axes.at(np.array([step for step, *_ in marks], np.int64))).T.tolist()
    for (_, kind, text), places_of_mark in zip(marks, places, strict=True):
        x = [place if math.isfinite(place) else None for place in places_of_mark]
        yield {"run": run, "kind": kind, "text": text, "x": x}


def _resumed(start: dict[str, Any]) -> str:
    again, cause = start.get("steps_again"), start.get("cause")
    lost = f", {counted(again, 'step')} done again" if type(again) is int else ""
    return f"resumed{lost}" + (f"; the start before: {_text(cause)}" if cause else "")


def _sizes(mesh: Any) -> str:
    return " x ".join(map(_text, mesh)) if isinstance(mesh, list) else "?"


def _overview(records: Sequence[Record], drawn: Sequence[Record]) -> list[list[str]]:
    """A row for every run, also for those without curves."""
    header = ["run", "step", "of", "tokens", "held-out loss", "training loss, smoothed",
              "tokens/s, median"]  # fmt: skip
    audits = [audited(record) for record in records]
    header += ["audited"] * any(audits)
    rows = []
    for record, audit in zip(records, audits, strict=True):
        metrics, held_out = record.metrics, heldout(record)[1]
        loss = smooth(metrics.numbers("loss"), metrics.step)
        speeds = metrics.numbers("tokens_per_s")
        speeds = speeds[np.isfinite(speeds)]
        speed = float(np.median(speeds)) if len(speeds) else math.nan
        last = [metrics.step[-1:], metrics.numbers("tokens")[-1:], held_out[-1:], loss[-1:]]
        step, tokens, held, trained = (float(v[0]) if len(v) else math.nan for v in last)
        steps = _shown(record, "steps")
        name = record.name if record in drawn else f"{record.name} (no curves)"
        rows.append([name, _whole(step), steps, _whole(tokens), _digits(held), _digits(trained),
                     _whole(speed), *[audit] * any(audits)])  # fmt: skip
    return [header, *rows]


def _configs(records: Sequence[Record]) -> list[list[str]]:
    """The keys whose values differ, with the value of each run."""
    keys = differing(records)
    rows = [[record.name, *(_shown(record, key) for key in keys)] for record in records]
    return [["run", *keys], *rows] if keys else []


def _machines(records: Sequence[Record]) -> list[list[str]]:
    """Returns what the starts of the runs have recorded about their machines."""
    starts = [(r.name, e) for r in records for e in r.events if e["event"] == "start"]
    skip = ("event", "created_at", "chain", "config")
    keys = list(dict.fromkeys(k for _, e in starts for k in e if k not in skip))
    rows = []
    for name, event in starts:
        joined = event | {k: ", ".join(map(_text, v)) for k, v in event.items() if type(v) is list}
        joined["topology"] = _sizes(event.get("topology"))
        joined["commit"] = re.sub(r"^(\w{12})\w+", r"\1", _text(event.get("commit")))
        cells = [_whole(v) if type(v) is float else _text(v) for v in map(joined.get, keys)]
        rows.append([name, *cells, _text(event.get("created_at"))[:19].replace("T", " ")])
    titles = {
        "topology": "dp_replicate x dp_shard x tp (x cp)",
        "flops_per_token": "FLOPs per token",
    }
    return [["run", *(titles.get(key, key) for key in keys), "when, UTC"], *rows] if rows else []


def _scores(records: Sequence[Record]) -> list[list[str]]:
    """Returns each run's last score of each task and metric, with its standard error."""
    scores: dict[str, dict[str, str]] = {}
    names: dict[str, None] = {}
    for record in records:
        for task, lines in grouped(record.evaluation, "task").items():
            line = lines[-1]
            for name, value in _numbers(line):
                if "stderr" in name or name == "num_fewshot":
                    continue
                metric, comma, filter_name = name.partition(",")
                error = line.get(f"{metric}_stderr{comma}{filter_name}")
                spread = f" ± {_digits(error)}" if isinstance(error, int | float) else ""
                names[column := f"{task} {name}"] = None
                text = f"{_digits(value)}{spread} (step {line['step']:,})"
                scores.setdefault(record.name, {})[column] = text
    rows = [[run, *(cells.get(name, "") for name in names)] for run, cells in scores.items()]
    return [["run", *names], *rows] if rows else []


def _samples(record: Record) -> list[dict[str, Any]]:
    """[{source, prompt, texts: [[step, text], ...]}, ...]: at most MAX_SAMPLES of a run, the
    newest and earlier ones at equal distances."""
    lines = record.samples
    if len(lines) > MAX_SAMPLES:
        lines = [lines[i] for i in np.linspace(0, len(lines) - 1, MAX_SAMPLES).astype(int)]
    texts: dict[tuple[str, str], list[list[Any]]] = {}
    for line in lines:
        key = _text(line.get("source"), 10_000), _text(line.get("prompt"), 10_000)
        texts.setdefault(key, []).append([line["step"], _text(line.get("text"), 10_000)])
    return [{"source": s, "prompt": p, "texts": t} for (s, p), t in texts.items()]


# ------------------------------------------------------------------------------------------- texts


def _shown(record: Record, key: str) -> str:
    value = setting(record.settings, key)
    return "?" if value == NOT_GIVEN else "null" if value is None else _text(value)


def _text(value: Any, max_length: int = MAX_TEXT) -> str:
    text = "" if value is None else value if isinstance(value, str) else repr(value)
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def _digits(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "?"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "?"
