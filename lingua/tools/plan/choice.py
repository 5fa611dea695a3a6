"""Other layouts of a step for as many devices: meshes, micro-batches and checkpointing, ranked by a
formula, the best of them traced.

The formula begins with traces of three and four layers, two micro-batches and a mesh of 2 x 8 x tp,
for each tp, cp and checkpointing mode. Numbers are linear in the layers. Activations, arithmetic
and what tp and cp send of them are proportional to the rows of a micro-batch; parameters,
optimizer, update and what replicas exchange are divided by the shards; what FSDP gathers and copies
stays. Layouts with cp are looked at for rows of LONG tokens, and where no other fits.
"""

import math
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from tqdm import tqdm

from lingua.app import App
from lingua.base.errors import UserError
from lingua.base.format import align
from lingua.model.head import CHUNK_BYTES
from lingua.parallel.mesh import WORDS
from lingua.parallel.plan import check_layout
from lingua.run.args import RunArgs
from lingua.tools.plan.report import Plan, seconds_text
from lingua.tools.plan.step import build, degree_of
from lingua.tools.plan.trace import StepPart, Trace, trace
from lingua.tools.plan.work import Kernel

Sizes = tuple[int, ...]  # as Trace.sizes
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
TRACED_LAYERS = 3, 4  # the formula extrapolates from traces of models this deep
REPLICAS, SHARDS, ROWS = 2, 8, 2
LONG = 16_384  # tokens of a row from which dividing its positions may pay where others fit
SCALED_BY_ROWS = ("activations", "backward")  # kinds of memory in proportion to the rows
DIVIDED_BY_SHARDS = ("parameters", "optimizer")


@dataclass(frozen=True)
class Choice:
    plan: Plan
    traced: bool  # false: estimated by the formula

    @property
    def order(self) -> tuple[bool, float, int]:
        """The key to sort by: layouts that fit first, then the fastest, then those with the least
        memory."""
        times = self.plan.times
        assert times is not None
        return not self.plan.fits, times.step, self.plan.trace.allocated

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the run's config."""
        args, (replicas, shards, tp, cp) = self.plan.args, (*self.plan.trace.sizes, 1)[:4]
        return {
            "distributed.dp_replicate": replicas,
            "distributed.dp_shard": shards,
            "distributed.tp_size": tp,
            "distributed.cp_size": cp,
            "distributed.activation_checkpointing": args.distributed.activation_checkpointing,
            "data.batch_size": args.data.batch_size,
            "data.global_batch_size": args.data.step_rows,
            "grad_acc_steps": None,
        }


def choices(app: App, plan: Plan, n_traced: int) -> list[Choice]:
    """Every layout of the ranks of `plan`, which has a device, with its global batch, the best
    first. The `n_traced` fastest of those that fit by the formula are traced."""
    if not n_traced:
        return []
    device = "cpu" if plan.args.device == "cpu" else "cuda"
    ranked = sorted(by_formula(app, plan, device), key=lambda choice: choice.order)
    best = []
    for choice in tqdm([c for c in ranked if c.plan.fits][:n_traced], "tracing the best layouts"):
        args, sizes = choice.plan.args, choice.plan.trace.sizes
        traced = trace(app, deepcopy(args), sizes, device)
        best.append(Choice(replace(choice.plan, trace=traced), True))
    return sorted([*best, *ranked[len(best) :]], key=lambda c: (not c.traced, *c.order))


def by_formula(app: App, plan: Plan, device: str) -> list[Choice]:
    layouts = list(meshes(app, plan.args, plan.trace.ranks, plan.options.ngpu))
    found = list(estimates(app, plan, [m for m in layouts if len(m[0]) == 3], device))
    if plan.args.data.seq_len >= LONG or not any(choice.plan.fits for choice in found):
        found += estimates(app, plan, [m for m in layouts if len(m[0]) > 3], device)
    return found


def estimates(app: App, plan: Plan, layouts: list[list[Sizes]], device: str) -> Iterator[Choice]:
    for alike, mode in tqdm(list(product(layouts, MODES)), "tracing a few layers"):
        args = deepcopy(plan.args)
        args.distributed.activation_checkpointing, args.grad_acc_steps = mode, None
        args.distributed.cp_size = (*alike[0], 1)[3]
        first = small_trace(app, args, alike[0], device)
        for sizes in alike:
            max_rows = -(-args.data.step_rows // degree_of(sizes))
            for power in range(max_rows.bit_length()):
                scaled_args = deepcopy(args)
                scaled_args.data.batch_size = 1 << power
                scaled = scaled_trace(first, scaled_args, sizes)
                yield Choice(replace(plan, args=scaled_args, trace=scaled), False)


def meshes(app: App, args: RunArgs, ranks: int, node: int) -> Iterator[list[Sizes]]:
    """Returns, for each tp and cp within a node that the model and its rows allow, the meshes of
    this many ranks that have them; none on which a rank would have no rows."""
    parts = [1] if args.exact else _divisors(node)
    for tp, cp in product(parts, parts):
        if node % (tp * cp) or (cp > 1 and args.data.seq_len % (tp * cp)):
            continue
        built = build(app, deepcopy(args), 1)
        try:
            check_layout(built.module, built.plan, tp, cp)
        except UserError:
            continue
        degree = ranks // (tp * cp)
        if degree <= args.data.step_rows:
            of_row = (tp, cp) if cp > 1 else (tp,)
            yield [(r, degree // r * cp, *of_row) for r in _divisors(degree)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def estimate(app: App, args: RunArgs, sizes: Sizes, device: str) -> Trace:
    """Estimate by the formula what `trace` returns. Raises UserError."""
    args.distributed.resolve(args.exact)
    return scaled_trace(small_trace(app, args, sizes, device), args, sizes)


def small_trace(app: App, args: RunArgs, sizes: Sizes, device: str) -> Trace:
    """Trace two micro-batches on few ranks, with tp and cp of a mesh of these sizes."""
    small = (REPLICAS, math.lcm(SHARDS, *sizes[3:]), *sizes[2:])
    args_of_trace = deepcopy(args)
    args_of_trace.grad_acc_steps, args_of_trace.data.batch_size = None, ROWS
    args_of_trace.data.global_batch_size = 2 * degree_of(small) * ROWS
    return few_layers(app, args_of_trace, small, device)


def few_layers(app: App, args: RunArgs, sizes: Sizes, device: str) -> Trace:
    """Compute what `trace` returns from traces of fewer layers. Raises UserError."""
    layers: int = args.model.n_layers
    traces = []
    # Muon has a matrix of as many layers as there are shards at once.
    traced = (sizes[1], 2 * sizes[1]) if args.optim.name == "muon" else TRACED_LAYERS
    few = [n for n in traced if layers > traced[1]] or [layers]
    for n in few:
        args_of_trace = deepcopy(args)
        args_of_trace.model.n_layers = n
        traces.append(trace(app, args_of_trace, sizes, device))
    if len(few) == 1:
        return traces[0]
    return extrapolated(traces[0], traces[1], (layers - few[0]) / (few[1] - few[0]))


def extrapolated(first: Trace, second: Trace, n: float) -> Trace:
    """Returns the trace of a model that is `n` times as much deeper than `first` as `second` is."""

    def line(name: str) -> Any:
        a, b = getattr(first, name), getattr(second, name)
        if isinstance(a, StepPart):
            return a.plus(b.plus(a, -1), n)
        if isinstance(a, dict):
            return {k: max(0, round(a[k] + n * (b.get(k, 0) - a[k]))) for k in a}
        return a + n * (b - a) if isinstance(a, float) else round(a + n * (b - a))

    names = ("parameters", "trained", "flops_per_token", "start", "peak", "kept", "base")
    parts = ("micro", "last", "update")
    return replace(first, **{name: line(name) for name in (*names, *parts)})


def scaled_trace(first: Trace, args: RunArgs, sizes: Sizes) -> Trace:
    """Returns the trace on a mesh of these sizes with the micro-batch of `args`, from
    `small_trace`."""
    n_micro, rows = args.micro_steps(degree_of(sizes))
    grow, shrink = rows / ROWS, first.sizes[1] / sizes[1]
    n_parts = math.prod(sizes[2:])  # of a row's logits

    def logits(n_rows: int) -> int:  # bytes of a chunk
        n_bytes = 4 * n_rows * args.data.seq_len * args.model.vocab_size // n_parts
        return min(n_bytes, CHUNK_BYTES)

    def memory(peak: dict[str, int]) -> dict[str, int]:
        factors = dict.fromkeys(SCALED_BY_ROWS, grow) | dict.fromkeys(DIVIDED_BY_SHARDS, shrink)
        factors["head"] = logits(rows) / logits(ROWS)
        return {kind: round(size * factors.get(kind, 1)) for kind, size in peak.items()}

    def part(p: StepPart) -> StepPart:
        updates = p is first.update
        kernels: Counter[Kernel] = Counter()
        for (flops, size, n_bytes, place), n in p.kernels.items():
            by = shrink if updates else grow
            # Muon multiplies whole matrices, of which each shard has its part in number; with
            # tensor parallelism it has all.
            if place == "fsdp" or (updates and flops and sizes[2] > 1):
                by = 1
            kernels[Kernel(flops * by, size, n_bytes * by, place)] += n
        alone = [axis for axis, n in zip(WORDS, sizes, strict=False) if n == 1]
        sent = []
        for t in p.collectives:
            by = shrink if t["axis"] == "dp_replicate" else 1
            summed = {"tp": "all_reduce", "cp": "all_gather"}  # gradients of weights, losses
            if t["kind"] != summed.get(t["axis"], t["kind"]) and not updates:
                by = grow  # activations
            if t["kind"] == "all_to_all" and updates:
                by = shrink  # so many matrices fewer
            if t["axis"] not in alone:
                sent.append(t | {"bytes": round(t["bytes"] * by)})
        return StepPart(kernels, sent)

    peak, kept = memory(first.peak), first.kept
    if args.distributed.grad_sync in ("replica_last", "every"):
        kept = round(kept * shrink)
    # Between micro-steps they are kept, and with one micro-step there is nothing between.
    peak["gradients"] = max(0, peak["gradients"] - first.kept) + (kept if n_micro > 1 else 0)
    if sizes[1] == 1 < sizes[0]:  # replicas that are not sharded keep their copies of parameters
        peak["gathered parameters"] = peak["parameters"] // 4 * args.distributed.dtype.itemsize
    return replace(
        first, sizes=sizes, n_micro=n_micro, rows=rows, start=memory(first.start), peak=peak,
        kept=kept if n_micro > 1 else 0, micro=part(first.micro), last=part(first.last),
        update=part(first.update), base=round(first.base * shrink),
    )  # fmt: skip


def choice_as_json(choice: Choice) -> dict[str, Any]:
    return {"keys": choice.keys, "traced": choice.traced, "why_not": why_not(choice)} | {
        key: value for key, value in choice.plan.as_json().items() if key != "collectives"
    }


def why_not(choice: Choice) -> str | None:
    """Name what takes the most memory where a layout does not fit."""
    peak = choice.plan.trace.peak
    return None if choice.plan.fits else max(peak, key=lambda kind: peak[kind])


def choice_lines(ranked: list[Choice]) -> Iterator[str]:
    """A table of 80 columns for a person: those traced, the next best by the formula, and of those
    that would be faster and do not fit the nearest to it."""
    n = max(1, sum(c.traced for c in ranked))
    fit = [c for c in ranked if c.plan.fits]
    without = [c for c in ranked if not (c.plan.fits or (fit and c.order[1:] > fit[0].order[1:]))]
    without.sort(key=lambda c: c.plan.trace.allocated)
    shown = [c for c in ranked if c.traced]
    shown += [c for c in fit if not c.traced][:n] + [c for c in without if not c.traced][:n]
    n_axes = max((len(c.plan.trace.sizes) for c in shown), default=3)
    axes = ("replicate", "shard", "tp", "cp")[:n_axes]
    head = (*axes, "rows", "checkpointing", "GiB", "step", "")
    table: list[tuple[str, ...]] = [head]
    for c in shown:
        _, step_s, _ = c.order
        mode = c.plan.args.distributed.activation_checkpointing
        mesh = map(str, (*(*c.plan.trace.sizes, 1)[:n_axes], c.plan.trace.rows))
        how = "traced" if c.traced else "formula"
        too_much = f"NO: {why_not(c)}" if not c.plan.fits else how
        table.append((*mesh, mode, f"{c.plan.needs_gib:.1f}", seconds_text(step_s), too_much))
    yield f"the same global batch on other layouts: {len(fit)} of {len(ranked)} fit"
    yield from align([(row[-1], *row[:-1]) for row in table], left=1)
    if fit:
        words = (f"{k}={'null' if v is None else v}" for k, v in fit[0].keys.items())
        yield "keys of the best:"
        yield from (f"  {word}" for word in words)
