"""What every measurement reports: the machine, the command, the numbers and their spread."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lingua.base.format import align


@dataclass(frozen=True)
class Report:
    """The result of a measurement."""

    rows: Sequence[Sequence[str]]  # the table to print
    notes: list[str]  # lines below it
    results: dict[str, Any]  # the same as numbers, Spreads, and lists and mappings of them
    device: str = "cpu"  # torch device type
    left: int = 1  # columns that are aligned left


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    q1: float  # lower quartile
    q3: float  # upper quartile
    low: float
    high: float
    n: int

    def cells(self, form: str = ".2f") -> tuple[str, str]:
        """The median and the range as text, each number formatted with `form`."""
        return f"{self.median:{form}}", f"{self.low:{form}} to {self.high:{form}}"

    def text(self, form: str = ".2f") -> str:
        """The median, and the range in parentheses."""
        return "{} ({})".format(*self.cells(form))

    def quartiles(self, form: str = ".2f") -> str:
        return f"{self.q1:{form}} to {self.q3:{form}}"


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
    seconds: dict[str, list[float]], ratios: dict[str, tuple[str, str]], title: str = ""
) -> tuple[list[tuple[str, ...]], dict[str, Spread]]:
    """A row (name, median, range, "") for each side's seconds by round, then one (name, median,
    range, that of the fastest turns) for each ratio {name: (over, under)}; all Spreads."""
    spreads = {side: spread(values) for side, values in seconds.items()}
    rows: list[tuple[str, ...]] = [
        (f"{title}{side}, s", *s.cells(), "") for side, s in spreads.items()
    ]
    for name, (over, under) in ratios.items():
        spreads[name] = quotients(seconds[over], seconds[under])
        fastest = spreads[over].low / spreads[under].low
        rows.append((f"{title}{name}", *spreads[name].cells(), f"{fastest:.2f}"))
    return rows, spreads


def show(report: Report, command: str, json_path: Path | None) -> None:
    """Print the report, and write it as JSON where `json_path` is given."""
    machine = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if report.device == "cuda" else "cpu",
    }
    print(
        f"machine  {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; "
        f"device {machine['device']}; torch {machine['torch']}, Python {machine['python']}"
    )
    print(f"command  {command}\n")
    print("\n".join(align(report.rows, report.left)))
    if report.notes:
        print("\n".join(["", *report.notes]))
    if json_path is not None:
        now = datetime.now(UTC).isoformat()
        content = {"command": command, "machine": machine, "results": report.results}
        text = json.dumps(content | {"created_at": now}, indent=1, default=asdict)
        json_path.write_text(text + "\n", encoding="utf-8")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
