"""The promise as a picture: one run stopped and resumed across topologies, over one never stopped.

Both are real launches of the training program on the CPU. The one that never stops is a single
process; the other changes its number of processes, its mesh and its micro-batches at every start.
Compared are the loss of every step and the hash of every global batch. `--png FILE` draws it, which
needs matplotlib.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.report import Report
from lingua.app import choose_app
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.errors import UserError, import_optional
from lingua.format import align

# The starts of the run that is stopped: (dp_replicate, dp_shard, tp), and rows of a micro-batch.
STARTS = (
    ((1, 1, 1), 16),
    ((2, 1, 1), 3),
    ((1, 2, 1), 8),
    ((1, 1, 2), 5),
    ((1, 2, 2), 4),
)
COLORS = ("#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7", "#c98500")  # of the starts
MUTED, GRID = "#666666", "#e4e4e0"
SHORT = ["steps=200", "data.seq_len=128", "optim.warmup=20", "validation.tokens=4096", "device=cpu"]


def measure(keys: list[str], png: Path | None = None) -> Report:
    """`keys` is the command line of the training program."""
    if png is not None:
        _pyplot()  # a mistake is found before training
    config = [key for key in keys if key.startswith(("config=", "app="))]
    keys = [*config, *SHORT, *(key for key in keys if key not in config)]
    args: Any = load(choose_app(keys).config, keys, foreign=META_LINGUA)[0]
    if args.steps < len(STARTS):
        raise UserError(f"steps = {args.steps}: must be at least {len(STARTS)}, one for each start")
    ends = [args.steps * (i + 1) // len(STARTS) for i in range(len(STARTS))]
    with TemporaryDirectory() as folder:
        keys = [*keys, "logging.freq=1", f"data.cache_dir={folder}/cache"]
        never = run([*keys, f"dump_dir={folder}/never"], (1, 1, 1))
        for (sizes, rows), end in zip(STARTS, ends, strict=True):
            ours = [f"dump_dir={folder}/stopped", f"stop_at={end}", f"data.batch_size={rows}"]
            stopped = run([*keys, *ours], sizes)
    return report(never, stopped, ends, png)


def run(keys: list[str], sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Start the program on a mesh of these sizes; the metrics of all steps so far."""
    replicas, shards, tp = sizes
    mesh = [
        f"distributed.dp_replicate={replicas}",
        f"distributed.dp_shard={shards}",
        f"distributed.tp_size={tp}",
    ]
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={replicas * shards * tp}",
    ]
    program = ["-m", "apps.main.train", *keys, *mesh]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *torchrun, *program]
    code = subprocess.run(command, stdout=sys.stderr, env=environment).returncode
    if code != 0:
        raise UserError(f"{' '.join(command)}\nleft with exit code {code}")
    dump_dir = next(key.partition("=")[2] for key in keys if key.startswith("dump_dir="))
    return steps_of(Path(dump_dir))


def compare(
    never: list[dict[str, Any]], stopped: list[dict[str, Any]]
) -> tuple[list[float], list[bool]]:
    """Of each step, the relative difference of the losses and whether the global batches are equal.

    Args:
        never, stopped: the metrics of every step of a run that never stopped, and of one that did.

    Raises:
        UserError: they are not of the same steps, each once.
    """
    steps = [line["step"] for line in never]
    if [line["step"] for line in stopped] != steps or steps != list(range(1, len(steps) + 1)):
        raise UserError("the two runs did not log the same steps, each once")
    apart = [abs(b["loss"] / a["loss"] - 1) for a, b in zip(never, stopped, strict=True)]
    equal = [a["batch_hash"] == b["batch_hash"] for a, b in zip(never, stopped, strict=True)]
    return apart, equal


def steps_of(dump_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every logged step of a run."""
    text = (dump_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def report(
    never: list[dict[str, Any]], stopped: list[dict[str, Any]], ends: list[int], png: Path | None
) -> Report:
    """`never` and `stopped` are the metrics of every step of the two runs; `ends` are the last
    steps of the starts of the second."""
    apart, equal = compare(never, stopped)
    rows = [("dp_replicate, dp_shard, tp", "micro-batch", "steps", "equal batches", "loss apart")]
    begin = 0
    for (sizes, size), end in zip(STARTS, ends, strict=True):
        part = slice(begin, end)
        batches, most = sum(equal[part]), max(apart[part])
        rows.append(
            (f"{sizes}", f"{size} rows", f"{begin + 1} to {end}", f"{batches}", f"{most:.1e}")
        )
        begin = end
    lines = [
        *align(rows, left=1),
        "",
        f"batch hashes equal in {sum(equal)} of {len(equal)} steps; losses at most "
        f"{max(apart):.1e} apart, relative to the run that never stopped (one process)",
    ]
    if png is not None:
        draw(png, [line["loss"] for line in never], [line["loss"] for line in stopped], ends, equal)
        lines.append(f"drawn: {png}")
    results = {"never": never, "stopped": stopped, "apart": apart, "batches_equal": equal}
    return Report(lines, results)


def draw(
    png: Path, never: list[float], stopped: list[float], ends: list[int], equal: list[bool]
) -> None:
    """Above, both loss curves; below, how far apart they are."""
    plt = _pyplot()
    plt.rcParams.update({"font.size": 9, "text.color": "#222222", "axes.labelcolor": MUTED})
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    steps = range(1, len(never) + 1)
    top.plot(steps, never, color="#bdbdb8", linewidth=6, solid_capstyle="round")
    at = len(never) // 7  # where the curve still falls: it has no other label below it
    top.annotate(
        "never stopped:\none process",
        (steps[at], never[at]),
        (1.5 * len(never) / len(STARTS), 0.45 * max(never) + 0.55 * min(never)),
        ha="center",
        color=MUTED,
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.7},
    )
    begin = 0
    for (sizes, rows), end, color in zip(STARTS, ends, COLORS, strict=True):
        part = slice(max(begin - 1, 0), end)  # from the last step of the start before
        top.plot(steps[part], stopped[part], color=color, linewidth=1.6)
        apart = [abs(b / a - 1) for a, b in zip(never[begin:end], stopped[begin:end], strict=True)]
        bottom.plot(steps[begin:end], apart, ".", color=color, markersize=4)
        place = {"transform": top.get_xaxis_transform(), "ha": "center", "va": "top"}
        top.text((begin + end + 1) / 2, 0.98, _start(sizes, rows), color=color, **place)
        if end != ends[-1]:
            for axes in (top, bottom):
                axes.axvline(end + 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)))
        begin = end
    _format_axes(top, bottom, len(never))
    low, high = min(never), max(never)
    top.set_ylim(low - 0.05 * (high - low), high + 0.12 * (high - low))
    same = "all" if all(equal) else f"{sum(equal)} of"
    figure.suptitle(
        f"One run, stopped and resumed on {len(STARTS)} topologies: "
        f"{same} {len(equal)} global batches are the same",
        x=0.02,
        ha="left",
        fontsize=11,
    )
    figure.savefig(png, dpi=130)


def _start(sizes: tuple[int, int, int], rows: int) -> str:
    """The label of a start: its processes, its mesh, its micro-batch."""
    replicas, shards, tp = sizes
    processes = replicas * shards * tp
    named = ((replicas, "replicas"), (shards, "shards"))
    kind = [f"{n} {what}" for n, what in named if n > 1] + ([f"tp {tp}"] if tp > 1 else [])
    count = f"{processes} process{'es' if processes > 1 else ''}"
    return f"{count}\n{' x '.join(kind) or 'plain'}\n{rows} rows at once"


def _format_axes(top: Any, bottom: Any, n_steps: int) -> None:
    """Scales, labels and colors of both parts."""
    top.set_ylabel("loss, nats per token")
    bottom.set_ylabel("relative difference")
    bottom.set_yscale("symlog", linthresh=1e-8)  # zero has a place too
    bottom.set_ylim(-2e-9, 1e-5)
    bottom.set_yticks([0, 1e-8, 1e-7, 1e-6, 1e-5])
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRID)
        axes.tick_params(colors=MUTED, length=0)
        axes.set_xlim(0, n_steps + 1)


def _pyplot() -> Any:
    import_optional("matplotlib", "--png").use("agg")
    return import_optional("matplotlib.pyplot", "--png")
