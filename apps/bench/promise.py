"""The promise as a picture: one run stopped and resumed across topologies, over one never stopped.

Real launches of any app (`app=`, `config=`): one process, and a run that changes its mesh and
micro-batches at every start. Compared are the loss of every step and the hash of every global
batch. With `distributed.cp_size=N` the starts whose shards it divides have it. With
`deterministic=mesh` compared are all numbers of every step and all tensors of the last checkpoint,
to the last bit: of a run on each mesh, and of one that changes its mesh at every start.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.launch import read_config, read_lines, train_forked, with_defaults
from apps.bench.report import Report
from lingua.app import App, choose_app
from lingua.base.dump_dir import CHECKPOINTS, METRICS
from lingua.base.errors import UserError, import_optional
from lingua.checkpoint.folder import find
from lingua.checkpoint.source import open_checkpoint
from lingua.monitor.metrics import Chain
from lingua.parallel.mesh import AXES, WORDS
from lingua.tools.audit.records import digest_of_files

# The starts of the run that is stopped: (dp_replicate, dp_shard, tp), and rows of a micro-batch.
STARTS = (
    ((1, 1, 1), 16), ((2, 1, 1), 3), ((1, 2, 1), 8), ((1, 1, 2), 5), ((1, 2, 2), 4),
)  # fmt: skip
MESH, CP = ", ".join(AXES), "distributed.cp_size="
EXACT_MESHES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 5, 1))
COLORS = ("#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7", "#c98500")  # one for each start
MUTED = "#666666"
STEPS = 10
# Each of the steps is to move the weights.
DEFAULTS = [f"stop_at={STEPS}", "optim.warmup=2", "validation.tokens=4096", "device=cpu"]

Metrics = list[dict[str, Any]]  # the metrics of every step of a run


@dataclass(frozen=True)
class Start:
    """One start of the run that is stopped."""

    sizes: tuple[int, ...]  # dp_replicate, dp_shard, tp, and cp where it divides positions
    rows: int  # largest micro-batch
    steps: slice  # from the one that it resumes from to its last

    def label(self) -> str:
        axes = [f"{name} {n}" for name, n in zip(WORDS, self.sizes, strict=False) if n > 1]
        kind = "\n".join(axes) or "one process"
        return f"{kind}\n{self.rows} rows at once"


def measure(keys: list[str], png: Path | None = None) -> Report:
    app, exact = choose_app(keys), "deterministic=mesh" in keys
    if png is not None:
        if exact:
            raise UserError("--png: draws losses that are apart; leave it out with this mode")
        import_optional("matplotlib", "--png")  # a mistake is found before training
    with TemporaryDirectory() as folder:
        keys = [*keys, "logging.freq=1", f"data.cache_dir={folder}/cache"]
        defaults = [*DEFAULTS, "data.batch_size=3"] if exact else DEFAULTS
        keys = with_defaults(defaults, keys)
        if exact:
            report = measure_exact(app, keys, folder)
        else:
            report = measure_close(app, keys, folder, png)
    args = read_config([key for key in keys if not key.startswith(CP)], app)
    steps = f"the first {args.end} of {args.steps} steps, of rows of {args.data.seq_len} tokens"
    return replace(report, notes=[*report.notes, f"{steps}; stop_at=N takes more"])


def measure_close(app: App, keys: list[str], folder: str, png: Path | None) -> Report:
    starts = starts_of(app, keys)
    never = train(keys, f"{folder}/never", (1, 1, 1))
    for start in starts:
        words = [f"stop_at={start.steps.stop}", f"data.batch_size={start.rows}"]
        stopped = train([*keys, *words], f"{folder}/stopped", start.sizes)
    apart, equal = compare(never, stopped)
    mesh = ", ".join(WORDS[: max(len(start.sizes) for start in starts)])
    rows = [
        {
            mesh: f"{start.sizes}",
            "micro-batch": f"{start.rows} rows",
            "steps": f"{start.steps.start + 1} to {start.steps.stop}",
            "equal batches": sum(equal[start.steps]),
            "loss apart": f"{max(apart[start.steps]):.1e}",
        }
        for start in starts
    ]
    notes = [
        f"batch hashes equal in {sum(equal)} of {len(equal)} steps; losses at most "
        f"{max(apart):.1e} apart, relative to the run that never stopped (one process)"
    ]
    if len(starts) < len(STARTS):
        notes.append("without tensor parallelism: the app gives no such layout")
    results: dict[str, Any] = {"never": never, "stopped": stopped}
    results |= {"apart": apart, "batches_equal": equal}
    if png is not None:
        draw(png, results, starts)
    return Report(rows, notes, results)


def measure_exact(app: App, keys: list[str], folder: str) -> Report:
    end, n = read_config(keys, app).end, len(EXACT_MESHES)
    runs = {f"{sizes}": [(sizes, end)] for sizes in EXACT_MESHES}
    stops = [-(-end * i // n) for i in range(1, n + 1)]
    runs["one after the other"] = list(zip(EXACT_MESHES, stops, strict=True))
    outcomes: list[tuple[list[str], str]] = []
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(runs):
        for sizes, stop_at in runs[name]:
            train([*keys, f"stop_at={stop_at}"], f"{folder}/{i}", sizes)
        outcomes.append(outcome(Path(folder, f"{i}")))
        (first, _), (links, tensors) = outcomes[0], outcomes[-1]
        equal = f"{sum(a == b for a, b in zip(links, first, strict=True))} of {end}"
        rows.append({MESH: name, "equal lines": equal, "hash of all tensors": tensors})
    same = all(outcome == outcomes[0] for outcome in outcomes)
    verdict = "all runs are equal to the last bit" if same else "THE RUNS DIFFER"
    return Report(rows, [verdict], {"equal": same})


def outcome(dump_dir: Path) -> tuple[list[str], str]:
    """All that a run must reproduce: a hash of each line without its times, and that of all tensors
    of its newest checkpoint."""
    source = open_checkpoint(find(dump_dir / CHECKPOINTS)[0], alone=True)
    links = [str(Chain().link(line)) for line in read_lines(dump_dir / METRICS)]
    return links, digest_of_files(source)


def starts_of(app: App, keys: list[str]) -> list[Start]:
    """Equal parts of the run; without tensor parallelism where the model gives no such layout."""
    args = read_config([key for key in keys if not key.startswith(CP)], app)
    plan = app.build(args).plan
    has_tp = plan is not None and plan.tp is not None
    chosen: list[tuple[tuple[int, ...], int]]
    chosen = [(sizes, rows) for sizes, rows in STARTS if has_tp or sizes[2] == 1]
    cp = next((int(key.removeprefix(CP)) for key in keys if key.startswith(CP)), 1)
    if cp > 1:
        chosen = [((*m, cp) if m[1] % cp == 0 else m, rows) for m, rows in chosen]
    n = len(chosen)
    if args.end < n:
        key = "steps" if args.end == args.steps else "stop_at"
        raise UserError(f"{key} = {args.end}: must be at least {n}, one for each start")
    parts = pairwise(args.end * i // n for i in range(n + 1))
    return [Start(*pair, slice(*part)) for pair, part in zip(chosen, parts, strict=True)]


def train(keys: list[str], dump_dir: str, sizes: tuple[int, ...]) -> Metrics:
    """Start the program on a mesh of these sizes; the metrics of all steps so far."""
    keys = [key for key in keys if not key.startswith(CP)]
    axes = zip(("dp_replicate", "dp_shard", "tp_size", "cp_size"), sizes, strict=False)
    mesh = [f"distributed.{name}={n}" for name, n in axes]
    train_forked([*keys, *mesh, f"dump_dir={dump_dir}"], prod(sizes[:3]))
    return read_lines(Path(dump_dir, METRICS))


def compare(never: Metrics, stopped: Metrics) -> tuple[list[float], list[bool]]:
    """Of each step, the relative difference of the losses of two runs and whether their global
    batches are equal. Raises UserError where they did not log the same steps, each once."""
    steps = [line["step"] for line in never]
    if [line["step"] for line in stopped] != steps or steps != list(range(1, len(steps) + 1)):
        raise UserError("the two runs did not log the same steps, each once")
    pairs = list(zip(never, stopped, strict=True))
    apart = [abs(b["loss"] / a["loss"] - 1) for a, b in pairs]
    return apart, [a["batch_hash"] == b["batch_hash"] for a, b in pairs]


def draw(png: Path, results: dict[str, list[Any]], starts: list[Start]) -> None:
    """Above, both loss curves; below, how far apart they are."""
    plt = import_optional("matplotlib.pyplot", "--png")
    plt.style.use(["seaborn-v0_8-whitegrid", {"font.size": 9, "axes.grid.axis": "y"}])
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    never, stopped = ([line["loss"] for line in results[key]] for key in ("never", "stopped"))
    apart, equal, n = results["apart"], results["batches_equal"], len(never)
    steps, label = range(1, n + 1), "never stopped: one process"
    top.plot(steps, never, color="#bdbdb8", linewidth=6, solid_capstyle="round", label=label)
    top.legend(loc="center right", frameon=False, labelcolor=MUTED)
    low, high = top.get_ylim()
    top.set_ylim(low, high + 0.25 * (high - low))  # with a place for the labels
    for start, color in zip(starts, COLORS, strict=False):
        before, end = start.steps.start, start.steps.stop
        joined = slice(max(before - 1, 0), end)  # from the last step of the one before
        top.plot(steps[joined], stopped[joined], color=color, linewidth=1.6)
        bottom.plot(steps[start.steps], apart[start.steps], ".", color=color, markersize=4)
        box = {"transform": top.get_xaxis_transform(), "ha": "center", "va": "top"}
        top.text((before + end + 1) / 2, 0.98, start.label(), color=color, **box)
        for axes in (top, bottom) if end < n else ():
            axes.axvline(end + 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)))
    top.set(ylabel="loss, nats per token", xlim=(0, n + 1))
    bottom.set(ylabel="relative difference", xlabel="step")
    bottom.set_yscale("symlog", linthresh=1e-8)  # zero has a place too
    bottom.set(ylim=(-2e-9, 1e-5), yticks=[0, 1e-8, 1e-7, 1e-6, 1e-5])
    same = "all" if all(equal) else f"{sum(equal)} of"
    title = f"One run, stopped and resumed on {len(starts)} topologies: "
    figure.suptitle(
        f"{title}{same} {n} global batches are the same", x=0.02, ha="left", fontsize=11
    )
    figure.savefig(png, dpi=130)
