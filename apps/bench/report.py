"""What every measurement reports: the machine, the command, the numbers and their spread."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Report:
    """The result of a measurement."""

    lines: list[str]  # the table to print, and notes on it
    results: dict[str, Any]  # the same as numbers, Spreads, and lists and mappings of them
    device: str = "cpu"  # torch device type


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


def spread(measured: Iterable[float]) -> Spread:
    values = [float(value) for value in measured]
    low, q1, median, q3, high = np.percentile(values, (0, 25, 50, 75, 100)).tolist()
    return Spread(median, q1, q3, low, high, len(values))


def quotients(over: Iterable[float], under: Iterable[float]) -> Spread:
    """The quotient of each round, not of the medians: both sides of a round met the same load."""
    return spread(a / b for a, b in zip(over, under, strict=True))


def side_rows(
    rounds: list[dict[str, float]], ratios: dict[str, tuple[str, str]], title: str = ""
) -> tuple[list[tuple[str, ...]], dict[str, Spread]]:
    """A row (name, median, range, "") for the seconds of each side of the rounds, then one (name,
    median, range, that of the fastest turns) for each ratio {name: (over, under)}; all Spreads."""
    sides = {side: [seconds[side] for seconds in rounds] for side in rounds[0]}
    spreads = {side: spread(seconds) for side, seconds in sides.items()}
    rows: list[tuple[str, ...]] = [
        (f"{title}{side}, s", *s.cells(), "") for side, s in spreads.items()
    ]
    for name, (over, under) in ratios.items():
        spreads[name] = s = quotients(sides[over], sides[under])
        fastest = spreads[over].low / spreads[under].low
        rows.append((f"{title}{name}", *s.cells(), f"{fastest:.2f}"))
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
    print("\n".join(report.lines))
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
