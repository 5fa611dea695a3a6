"""The table of runs: a row of each, which rows in which order, and their text."""

import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.errors import UserError, nearest
from lingua.base.format import align, printable, short_count, short_time
from lingua.config.values import parse_argument, plain, show
from lingua.run.args import kind_of
from lingua.run.records import Record
from lingua.tools.runs.compare.arms import find_arms
from lingua.tools.runs.held_out import heldout, smooth
from lingua.tools.runs.records import audited
from lingua.tools.runs.settings import NOT_GIVEN, setting

TAIL_BYTES = 96 << 10  # metrics.jsonl is read from here before its end: enough to smooth
MAX_KEYS = 8  # config keys that the table shows unless asked for more
# Those that people change most, which it shows first.
USUAL = {"seed", "steps", "data.seq_len", "data.global_batch_size", "model.dim", "model.n_layers"}
USUAL |= {"optim.name", "optim.lr"}
STATES = ("running", "finished", "stopped", "failed", "not started", "mixed")  # mixed: of seeds


@dataclass(frozen=True)
class Row:
    """A row of the table: a run, or several that differ only in their seed. Losses are None where
    they were not measured and NaN where they are not finite."""

    name: str
    folder: Path
    state: str  # one of STATES
    age_s: float | None  # seconds since the newest line of metrics.jsonl
    step: int
    steps: int | None  # the step that the run trains up to
    heldout: float | None  # nats per byte of all sources
    heldout_step: int | None  # step of that measurement
    loss: float | None  # training loss, smoothed
    tokens_per_s: float | None
    left_s: float | None  # seconds of training left, at the last measured speed
    sources: dict[str, float]  # the held-out loss of each source
    config: Mapping[str, Any]
    audited: str = ""  # date, kind and verdict of an audit; empty: none is recorded
    n: int = 1  # number of runs
    # standard deviation over several runs, by column
    spread: dict[str, float] = field(default_factory=dict)


# ---- what a row says


def row_of(record: Record) -> Row:
    metrics, newest, steps, state = record.metrics, record.newest, record.end, record.state
    step = newest.get("step", 0)
    measured_at, losses = heldout(record)
    step_s, speed = (_last(metrics.numbers(name)) for name in ("step_time_s", "tokens_per_s"))
    left = None if step_s is None or steps is None else max(0, steps - step) * step_s
    measured = [(name, _last(c.numbers("nats_per_byte"))) for name, c in record.validation.items()]
    return Row(
        name=record.name,
        folder=record.folder,
        state=state,
        age_s=_age_s(newest),
        step=step,
        steps=steps,
        heldout=_last(losses),
        heldout_step=int(measured_at[-1]) if len(measured_at) else None,
        loss=_last(smooth(metrics.numbers("loss"), metrics.step)),
        tokens_per_s=speed,
        left_s=left if state == "running" else None,
        sources={name: value for name, value in measured if value is not None},
        config=record.settings,
        audited=audited(record),
    )


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def _age_s(line: Mapping[str, Any]) -> float | None:
    try:
        written = datetime.fromisoformat(str(line.get("created_at")))
        return max(0.0, (datetime.now(UTC) - written.astimezone(UTC)).total_seconds())
    except (ValueError, OverflowError):
        return None


def over_seeds(records: Sequence[Record], rows: Sequence[Row]) -> list[Row]:
    """One row for the runs whose configs differ only in their seed: means, with the standard
    deviation of a run as spread, at the last step that all of them have in common."""
    row_of_run = {id(record): row for record, row in zip(records, rows, strict=True)}
    arms = (arm.runs for arm in find_arms(records))
    return [_mean(runs, [row_of_run[id(run)] for run in runs]) for runs in arms]


def _mean(records: Sequence[Record], rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    step = min(row.step for row in rows)
    states = {row.state for row in rows}
    losses = [
        _at(r.metrics.step, smooth(r.metrics.numbers("loss"), r.metrics.step)) for r in records
    ]
    measured = [_at(*heldout(r)) for r in records]
    ages = [row.age_s for row in rows if row.age_s is not None]
    speeds = [row.tokens_per_s for row in rows if row.tokens_per_s is not None]
    spread: dict[str, float] = {}
    at: dict[str, int] = {}

    def mean(column: str, losses_of_runs: Sequence[Mapping[int, float]]) -> float | None:
        common = set.intersection(*(set(f) for f in losses_of_runs))
        if not common:
            return None
        at[column] = max(common)
        values = np.array([f[at[column]] for f in losses_of_runs])
        spread[column] = float(values.std(ddof=1))
        return float(values.mean())

    names = set.intersection(*(set(row.sources) for row in rows))
    return Row(
        name=_pattern([row.name for row in rows]),
        folder=Path(os.path.commonpath([row.folder for row in rows])),
        state=states.pop() if len(states) == 1 else "mixed",
        age_s=min(ages, default=None),
        step=step,
        steps=rows[0].steps,
        heldout=mean("heldout", measured),
        heldout_step=at.get("heldout"),
        loss=mean("loss", [{s: v for s, v in f.items() if s <= step} for f in losses]),
        tokens_per_s=sum(speeds) / len(speeds) if speeds else None,
        left_s=max((row.left_s for row in rows if row.left_s is not None), default=None),
        sources={
            name: value
            for name in sorted(names)
            if (value := mean(name, [_source(r, name) for r in records])) is not None
        },
        config={k: v for k, v in rows[0].config.items() if k != "seed"},
        n=len(rows),
        spread=spread,
    )


def _pattern(names: Sequence[str]) -> str:
    """The common name of several runs, with a star for each part in which they differ:
    `*_lr=4e-3_seed=*`. The first and the last name where they have no part in common."""
    parts = [re.split(r"([_/=-])", name) for name in names]
    if len(set(map(len, parts))) == 1:
        common = [p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=True)]
        if set("".join(common)) - set("*_/=-"):
            return "".join(common)
    return f"{names[0]} ... {names[-1]}"


def _at(step: np.ndarray, values: np.ndarray) -> dict[int, float]:
    return dict(zip(step.tolist(), values.tolist(), strict=True))


def _source(record: Record, name: str) -> dict[int, float]:
    columns = record.validation[name]
    return _at(columns.step, columns.numbers("nats_per_byte"))


# ---- which rows, in which order

COLUMNS = ("name", "state", "age_s", "step", "steps", "heldout", "loss", "tokens_per_s", "left_s")
_COMPARE = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne,
    "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


def chosen(rows: Sequence[Row], conditions: str) -> list[Row]:
    """The rows that fulfil every one of the conditions, `state=running,optim.lr>=1e-3`. A row
    without a value fulfils `!=` alone. Raises UserError, also where a value is compared with what
    it cannot be, as in `optim.lr==1`."""
    kept = list(rows)
    for condition in conditions.split(","):
        match = re.fullmatch(r"\s*([\w.-]+?)\s*(<=|>=|!=|=|<|>)\s*(\S.*?)\s*", condition)
        if match is None:
            need = "must be KEY=VALUE, or with !=, <, <=, > or >= in place of ="
            raise UserError(f"filter: {condition!r} {need}")
        key, sign, text = key_of(rows, match[1], "filter"), match[2], match[3]
        wanted = plain(parse_argument(text))
        values = [value for row in rows if (value := _value(row, key)) is not None]
        numbers = bool(values) and {type(value) for value in values} <= {int, float}
        if key == "state" and wanted not in STATES:
            known = f"{', '.join(STATES)}{nearest(text, STATES)}"
            raise UserError(f"filter: {condition.strip()}: {text} must be one of {known}")
        is_order = sign not in ("=", "!=")
        if type(wanted) not in (int, float) and (is_order or (numbers and wanted is not None)):
            raise UserError(f"filter: {condition.strip()}: {text} must be a number")
        kept = [row for row in kept if _fulfils(_value(row, key), sign, wanted)]
    return kept


def _fulfils(value: Any, sign: str, wanted: Any) -> bool:
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return bool(_COMPARE[sign](value, wanted))
    return sign in ("=", "!=") and bool(_COMPARE[sign](_text(value), _text(wanted)))


def ordered(rows: Sequence[Row], by: str) -> list[Row]:
    """Rows by a column or a config key, `-heldout` for the largest first; those without a value, or
    with NaN, last. Raises UserError."""
    key = key_of(rows, by.removeprefix("-"), "sort")

    def place(row: Row) -> tuple[float, str]:
        value = _value(row, key)
        number = isinstance(value, int | float)
        return (float(value), "") if number else (math.inf, _text(value))

    known = [row for row in rows if _value(row, key) is not None and place(row)[0] == place(row)[0]]
    known_ids = set(map(id, known))
    rest = [row for row in rows if id(row) not in known_ids]
    return sorted(known, key=place, reverse=by.startswith("-")) + rest


def key_of(rows: Sequence[Row], name: str, option: str) -> str:
    """The column or config key that is meant: `lr` is optim.lr where no other key ends so."""
    keys = dict.fromkeys(key for row in rows for key in row.config)
    ends = [key for key in keys if key.endswith(f".{name}")]
    if name in COLUMNS or name in keys or len(ends) == 1:
        return name if name in COLUMNS or name in keys else ends[0]
    allowed = [*COLUMNS, *keys]
    hint = f", such as {' or '.join(ends)}" if ends else nearest(name, allowed)
    raise UserError(f"{option}: {name} must be a config key or one of {', '.join(COLUMNS)}{hint}")


def _value(row: Row, key: str) -> Any:
    if key in COLUMNS:
        return getattr(row, key)
    value = setting(row.config, key)
    return None if value == NOT_GIVEN else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


# ---- as text


def shown_keys(keys: Sequence[str]) -> list[str]:
    """Those of the keys in which runs differ that the table has room for, in their order: the
    usual ones, then others, last those that decide nothing but rounding or no number at all."""
    kept = sorted(keys, key=lambda key: (key not in USUAL, kind_of(key) is not None))[:MAX_KEYS]
    return [key for key in keys if key in kept]


def table(
    rows: Sequence[Row],
    keys: Sequence[str] = (),
    sources: bool = False,
    more: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Lines for people. `more` are further columns at the right, a cell for each row."""
    more = dict(more or {})
    if any(row.audited for row in rows):
        more["audited"] = [row.audited or "-" for row in rows]
    names = sorted({name for row in rows for name in row.sources}) if sources else []
    runs = ["runs"] if any(row.n > 1 for row in rows) else []
    head = ["run", *map(_short(keys), keys), *runs, "state", "age", "step", "held-out", *names]
    lines = [[*head, "loss", "tok/s", "left", *more]]
    for i, row in enumerate(rows):
        late = row.heldout_step not in (None, row.step)
        at = f" at {row.heldout_step}" if late else ""
        values = [setting(row.config, key) for key in keys]
        lines.append(
            [
                row.name,
                *("-" if value == NOT_GIVEN else _text(value) for value in values),
                *([str(row.n)] if runs else []),
                row.state,
                _shown(row.age_s, short_time),
                f"{row.step}/{row.steps}" if row.steps is not None else str(row.step),
                _loss(row, "heldout", row.heldout) + at,
                *(_loss(row, name, row.sources.get(name)) for name in names),
                _loss(row, "loss", row.loss),
                _shown(row.tokens_per_s, short_count),
                _shown(row.left_s, short_time),
                *(cells[i] for cells in more.values()),
            ]
        )
    return printable("\n".join(align(lines, left=2 + len(keys) + len(runs))))


def _short(keys: Sequence[str]) -> Callable[[str], str]:
    """Names of config keys without their group, where that is enough."""
    ends = [key.rpartition(".")[2] for key in keys]
    return lambda key: end if ends.count(end := key.rpartition(".")[2]) == 1 else key


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else "nan" if math.isnan(value) else form(value)


def _loss(row: Row, column: str, value: float | None) -> str:
    spread = f" ±{row.spread[column]:.4f}" if column in row.spread else ""
    return _shown(value, "{:.4f}".format) + spread


def entries(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every row as plain values for programs; what is not finite is None."""
    for row in rows:
        entry = {name: getattr(row, name) for name in (*COLUMNS, "audited")}
        entry |= {"folder": str(row.folder), "heldout_step": row.heldout_step, "runs": row.n}
        entry |= {f"heldout.{name}": value for name, value in row.sources.items()}
        entry |= {f"spread.{name}": value for name, value in row.spread.items()}
        entry |= {f"config.{key}": _value(row, key) for key in keys}
        yield {k: None if isinstance(v, float) and not math.isfinite(v) else v
               for k, v in entry.items()}  # fmt: skip
