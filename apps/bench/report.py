"""What every measurement reports: the machine, the command, the numbers and their spread."""

import json
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Report:
    """The result of a measurement."""

    lines: list[str]  # for people
    results: dict[str, Any]  # for programs: numbers, Spreads, and lists and mappings of them
    device: str = "cpu"


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing."""

    median: float
    q1: float  # quartiles
    q3: float
    low: float
    high: float
    n: int


def spread(measured: Iterable[float]) -> Spread:
    values = [float(value) for value in measured]
    q1, median, q3 = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else 3 * [values[0]]
    )
    return Spread(median, q1, q3, min(values), max(values), len(values))


def machine(device: str) -> dict[str, Any]:
    """Where it was measured. `device` is a torch device type."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def show(report: Report, command: str, json_path: Path | None) -> None:
    """Print the report, and write it as JSON where that is asked for."""
    where = machine(report.device)
    print(
        f"machine  {where['cpu']}, {where['cores']} cores, {where['threads']} threads; "
        f"device {where['device']}; torch {where['torch']}, Python {where['python']}"
    )
    print(f"command  {command}\n")
    print("\n".join(report.lines))
    if json_path is not None:
        content = {
            "command": command,
            "machine": where,
            "results": report.results,
            "created_at": datetime.now(UTC).isoformat(),
        }
        json_path.write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")
