"""The learning rate of every step, a pure function of the config.

`step` counts completed updates, so update `step + 1` (the metrics line of that number) uses
lr_at(step), and a run of `steps` updates uses lr_at(0) ... lr_at(steps - 1).
"""

import math
from collections.abc import Iterator

from lingua.optim.args import OptimArgs


def schedule_warnings(args: OptimArgs, steps: int) -> Iterator[str]:
    """Returns a line for each setting that is legal but probably not meant."""
    if args.warmup > steps:
        share = 100 * steps / args.warmup
        yield (
            f"optim.warmup = {args.warmup} is longer than the run (steps = {steps}): "
            f"the learning rate ends at {share:.3g} % of optim.lr = {args.lr:g} and never decays"
        )


def lr_at(step: int, args: OptimArgs, steps: int) -> float:
    """The rate of the update that follows `step` completed ones in a run of `steps`.

    Linear rise over `warmup` updates from lr / warmup to lr, then the scheduler's decay, which is
    at its end at `steps` and stays there. The formulas are Meta Lingua's, except that its first
    update has rate 0, its cosine and wsd return to the peak at `steps`, and its wsd decays
    harmonically, which has no limit for lr_min_ratio 0; here as 1 - progress^exp_factor, by
    default the 1-sqrt of Hägele et al. 2024 (arXiv 2405.18392).
    """
    step = min(step, steps)
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    # 0 ... 1 over the updates after the warmup; 0 where there are none
    progress = (step - args.warmup) / max(steps - args.warmup, 1)
    cycle = max(args.cycle_length, 1 / steps)  # as a share of the run; at least one update
    match args.scheduler:
        case "constant":
            height = 1.0
        case "linear":
            height = 1 - progress
        case "inv_sqrt":
            power = (max(args.warmup, 1) / max(step, 1)) ** args.exp_factor
            return args.lr * max(power, args.lr_min_ratio)
        case "cosine":
            height = _cosine(step, progress, cycle, args, steps)
        case "wsd":
            height = _wsd(step, cycle, args, steps)
    return args.lr * (height + (1 - height) * args.lr_min_ratio)  # exact for heights 0 and 1


def _cosine(step: int, progress: float, cycle: float, args: OptimArgs, steps: int) -> float:
    """Half a cosine wave per cycle, 1 to 0 (Loshchilov & Hutter 2017, arXiv 1608.03983)."""
    cycles = progress**args.cosine_theta / cycle
    fraction = cycles - _whole_cycles(cycles, last=step == steps)
    return 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))


def _wsd(step: int, cycle: float, args: OptimArgs, steps: int) -> float:
    """1 until the decay that ends each cycle (the last cycle ends with the run), then to 0
    (warmup-stable-decay with repeated cycles: Wen et al. 2024, arXiv 2410.05192)."""
    length = cycle * steps
    completed = _whole_cycles(step / length, last=step == steps)
    end = min((completed + 1) * length, steps)
    # a decay longer than what it has begins where the warmup or the cycle does
    begin = max(end - args.decay_fraction * end, completed * length, args.warmup)
    if step <= begin:
        return 1.0
    return 1 - min((step - begin) / (end - begin), 1.0) ** args.exp_factor


def _whole_cycles(cycles: float, last: bool) -> int:
    """Completed cycles. A cycle that ends with the run is still the current one there, so that the
    run ends at its low and not at the peak of a next one."""
    whole = round(cycles)
    if not math.isclose(cycles, whole, rel_tol=1e-12):  # 0.3 / 0.1 is 2.9999999999999996
        return math.floor(cycles)
    return whole - 1 if last and whole > 0 else whole
