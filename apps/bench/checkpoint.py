"""Saving and loading a checkpoint, over plain files of the same size.

Two processes have a model of the training program with AdamW's moments, 1.2 GB in all unless keys
set another size, and take turns (`checkpoint_rank.py`): the real `save` against one plain file
each, written and synced; the real `load`, every checksum verified first, against one plain file
each, read; loading on the topology that saved against loading on others. What is read is not in the
page cache: it was synced and then dropped (POSIX_FADV_DONTNEED).

In a virtual machine, memory that the host must allocate first makes single turns of both kinds two
to three times as long. So the fastest turns are reported beside the medians.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.launch import run
from apps.bench.report import Report, spread
from lingua.format import align

PROCESSES = 2
# Where to save and load (dp_replicate, dp_shard, tp); the first is the one that saves.
TOPOLOGIES = {"sharded": (1, 2, 1), "tensor-parallel": (1, 1, 2), "replicated": (2, 1, 1)}
MODEL = ["model.dim=1024", "model.n_layers=8", "model.n_heads=16", "device=cpu"]


def measure(keys: list[str], repeats: int = 12) -> Report:
    """`keys` is the command line of the training program. Everything is written into a folder of
    the current one, and removed."""
    config = [key for key in keys if key.startswith("config=")]
    keys = [*config, *MODEL, *(key for key in keys if key not in config)]
    with TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as folder:
        out = Path(folder) / "seconds.json"
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        program = ["-m", "apps.bench.checkpoint_rank", str(out), folder, str(repeats), *keys]
        run([sys.executable, "-m", *torchrun, *program])
        found = json.loads(out.read_text(encoding="utf-8"))
    return report(found["bytes"], found["rounds"])


def report(size: int, rounds: list[dict[str, float]]) -> Report:
    """`size` is that of the checkpoint in bytes; a round has the seconds of every turn."""
    first, *others = TOPOLOGIES
    ratios = {  # of seconds, as they are named: how often the second fits into the first
        "rate of saving / of plain files written and synced": ("write", "save"),
        "rate of loading with checksums / of plain files read": ("read", f"load {first}"),
        **{f"seconds on {name} / on {first}": (f"load {name}", f"load {first}") for name in others},
    }
    results: dict[str, Any] = {"bytes": size, "rounds": rounds}
    rows: list[tuple[str, ...]] = [("", "median", "range", "GB/s", "of the fastest")]
    for turn in rounds[0]:
        results[turn] = s = spread([seconds[turn] for seconds in rounds])
        rates = (f"{size / 1e9 / seconds:.2f}" for seconds in (s.median, s.low))
        rows.append((f"{turn}, s", f"{s.median:.2f}", f"{s.low:.2f} to {s.high:.2f}", *rates))
    for name, (over, under) in ratios.items():
        results[name] = s = spread([seconds[over] / seconds[under] for seconds in rounds])
        best = f"{results[over].low / results[under].low:.2f}"
        rows.append((name, f"{s.median:.2f}", f"{s.low:.2f} to {s.high:.2f}", "", best))
    lines = [
        *align(rows, left=1),
        "",
        f"{size / 1e9:.2f} GB by {PROCESSES} processes, saved by 2 shards; {len(rounds)} rounds; "
        "what is read is not in the page cache",
    ]
    return Report(lines, results)
