"""What every measurement reports: the machine, the command, the numbers and their spread."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lingua.base.format import align


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    q1: float  # lower quartile
    q3: float  # upper quartile
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        """The median, and the range in parentheses."""
        return f"{shown(self.median)} ({shown(self.low)} to {shown(self.high)})"

    def quartiles(self) -> str:
        return f"{shown(self.q1)} to {shown(self.q3)}"


@dataclass(frozen=True)
class Report:
    """The result of a measurement. Spreads, numbers and text of the table and of `results` are
    written as JSON as they are."""

    rows: Sequence[Mapping[str, Any]]  # of the table to print, by the headings of its columns
    notes: Sequence[str] = ()  # lines below it
    results: Mapping[str, Any] = field(default_factory=dict)  # what is not printed


def spread(measured: Iterable[float]) -> Spread:
    values = [float(value) for value in measured]
    low, q1, median, q3, high = np.percentile(values, (0, 25, 50, 75, 100)).tolist()
    return Spread(median, q1, q3, low, high, len(values))


def quotients(over: Iterable[float], under: Iterable[float]) -> Spread:
    """The quotient of each round, not of the medians: both sides of a round met the same load."""
    return spread(a / b for a, b in zip(over, under, strict=True))


def largest_difference(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """The largest relative difference of two tensors at the same place."""
    pairs = zip(some, others, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def side_rows(
    seconds: Mapping[str, Sequence[float]], ratios: Mapping[str, tuple[str, str]], title: str = ""
) -> list[dict[str, Any]]:
    """A row for the seconds of each side, by round, then one for each ratio {name: (over, under)},
    of rounds and of the fastest turns."""
    rows = [{"": f"{title}{side}", "seconds": spread(times)} for side, times in seconds.items()]
    for name, (over, under) in ratios.items():
        fastest = min(seconds[over]) / min(seconds[under])
        ratio = quotients(seconds[over], seconds[under])
        rows.append({"": title + name, "ratio": ratio, "of the fastest": fastest})
    return rows


def shown(value: Any) -> str:
    """A number with three digits, or all before its point; "-" for None; otherwise text."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)
    places = 2 - floor(log10(abs(value))) if value and isfinite(value) else 0
    return f"{value:.1e}" if places > 5 else f"{value:,.{max(0, places)}f}"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table, with its columns in the order of the longest row. The first is aligned
    left where it is text."""
    longest_first = sorted(rows, key=len, reverse=True)
    columns = list(dict.fromkeys(column for row in longest_first for column in row))
    cells = [[shown(row.get(column, "")) for column in columns] for row in rows]
    return align([columns, *cells], int(isinstance(rows[0][columns[0]], str)))


def show(report: Report, command: str, json_path: Path | None) -> None:
    """Print the report, and write it as JSON where `json_path` is given."""
    machine = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
    }
    print("machine ", ", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"command  {command}\n")
    print("\n".join([*table(report.rows), "", *report.notes]).rstrip())
    if json_path is not None:
        content = {"command": command, "machine": machine, "rows": report.rows}
        content |= {"results": report.results, "created_at": datetime.now(UTC).isoformat()}
        text = json.dumps(content, indent=1, default=asdict)
        json_path.write_text(text + "\n", encoding="utf-8")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
