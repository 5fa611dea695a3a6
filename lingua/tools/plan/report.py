"""A plan as text of 80 columns and as JSON."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lingua.base.format import align, counted, human_bytes, parameters_text, short_count, short_time
from lingua.monitor.collectives import collectives_table
from lingua.parallel.mesh import WORDS
from lingua.run.args import RunArgs
from lingua.tools.plan.device import Device, Times, step_times
from lingua.tools.plan.trace import Trace

if TYPE_CHECKING:
    from lingua.tools.plan.make import PlanArgs

DAY_S = 86400


@dataclass(frozen=True)
class Plan:
    """A trace, and what follows of it for a device."""

    args: RunArgs
    trace: Trace
    device: Device | None
    options: "PlanArgs"
    compiled: bool  # whether the run compiles its blocks

    @property
    def needs_gib(self) -> float | None:
        """Memory of a device that one rank needs, in GiB."""
        return None if self.device is None else self.device.needs(self.trace.allocated)

    @property
    def fits(self) -> bool | None:
        if self.device is None or self.needs_gib is None:
            return None
        return self.needs_gib <= self.device.memory_gib

    @property
    def times(self) -> Times | None:
        if self.device is None:
            return None
        tf32 = self.args.distributed.matmul_allow_tf32
        return step_times(self.trace, self.device, tf32, self.compiled)

    @property
    def step_tokens(self) -> int:
        return self.args.data.step_rows * self.args.data.seq_len

    @property
    def tokens(self) -> float:
        return self.options.tokens or self.args.steps * self.step_tokens

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of parameters and optimizer state of all ranks together; each replica has the
        same."""
        _, shards, tp = self.trace.sizes[:3]
        return self.trace.own_bytes * shards * tp

    def save(self) -> dict[str, float]:
        """Returns the seconds that a save holds up the run, and the seconds between two saves that
        lose least: sqrt(2 * save * time between failures) (Young, 1974)."""
        options, device = self.options, self.device
        held_s = self.checkpoint_bytes / (options.storage_gb_per_s * 1e9)
        if self.args.checkpoint.async_save and device is not None:
            held_s = self.trace.own_bytes / (device.host_gb_per_s * 1e9)
        failure_s = options.failure_hours * 3600 / self.trace.ranks
        every_s = math.sqrt(2 * held_s * failure_s)
        lost = held_s / every_s + every_s / (2 * failure_s)
        return {"held_s": held_s, "every_s": every_s, "lost": lost, "failure_s": failure_s}

    def as_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        traced, times = self.trace, self.times
        return {
            "mesh": dict(zip(WORDS, traced.sizes, strict=False)),
            "parameters": traced.parameters,
            "trained": traced.trained,
            "micro_steps": traced.n_micro,
            "rows": traced.rows,
            "flops_per_token": traced.flops_per_token,
            "memory": traced.peak,
            "allocated": traced.allocated,
            "kept": traced.kept,
            "needs_gib": self.needs_gib,
            "fits": self.fits,
            "collectives": traced.collectives,
            "times": None if times is None else asdict(times),
            "tokens_per_day": None if times is None else self.step_tokens / times.step * DAY_S,
            "checkpoint": {"bytes": self.checkpoint_bytes, **self.save()},
        }


def lines(plan: Plan) -> Iterator[str]:
    """The plan for a person."""
    traced, args, device = plan.trace, plan.args, plan.device
    sizes = ", ".join(f"{axis} {n}" for axis, n in zip(WORDS, traced.sizes, strict=False))
    model = parameters_text(traced.parameters, traced.trained)
    of = "" if device is None else f" x {device.name}"
    yield f"{args.name}: {model} on {traced.ranks:,}{of}"
    yield f"mesh: {sizes}; {short_count(traced.flops_per_token)} FLOPs a token"
    yield (
        f"a step is {counted(args.data.step_rows, 'row')} of {args.data.seq_len} tokens: "
        f"{counted(traced.n_micro, 'micro-step')} of {counted(traced.rows, 'row')} a rank"
    )
    yield ""
    yield from _memory(plan)
    yield ""
    yield "sent by rank 0 in a step:"
    yield from collectives_table(traced.collectives).splitlines()
    if device is not None and (times := plan.times) is not None:
        yield ""
        yield from _time(plan, device, times)
    yield ""
    yield from _checkpoint(plan)


def summary(plan: Plan) -> str:
    """The plan in a line, for one with a device."""
    device, times = plan.device, plan.times
    assert device is not None and times is not None
    verdict = "fits" if plan.fits else "does not fit"
    run_s = plan.tokens / plan.step_tokens * times.step
    return (
        f"plan: {verdict}, about {plan.needs_gib:.1f} of {device.memory_gib:g} GiB; a step takes "
        f"about {seconds_text(times.step)}, the run {short_time(run_s)}"
    )


def _memory(plan: Plan) -> Iterator[str]:
    traced = plan.trace
    kind = plan.args.distributed.activation_checkpointing
    rows = [("memory of rank 0 at its peak", "")]
    for name, size in sorted(traced.peak.items(), key=lambda item: -item[1]):
        shown = f"{name} (checkpointing: {kind})" if name == "activations" else name
        rows += [(f"  {shown}", human_bytes(size))] if size else []
    rows.append(("  allocated", human_bytes(traced.allocated)))
    if traced.kept:
        mode = plan.args.distributed.grad_sync
        kept = human_bytes(traced.kept)
        rows.append((f"gradients kept between micro-steps (grad_sync: {mode})", kept))
    if plan.args.checkpoint.async_save:
        rows.append(("host memory of a save in the background", human_bytes(traced.own_bytes)))
    yield from align(rows, left=1)
    if (device := plan.device) is not None:
        verdict = "fits" if plan.fits else "DOES NOT FIT"
        yield (
            f"{verdict}: {plan.needs_gib:.1f} of {device.memory_gib:g} GiB, with "
            f"{100 * device.fragmentation:.0f} % for fragments and {device.reserve_gib:g} GiB for "
            "CUDA and NCCL"
        )


def _time(plan: Plan, device: Device, times: Times) -> Iterator[str]:
    traced, rate = plan.trace, plan.step_tokens / times.step
    ranks, (low, high) = traced.ranks, times.range
    mfu = 100 * traced.flops_per_token * rate / ranks / device.bf16_flops
    slow, fast = mfu * times.step / high, mfu * times.step / low
    step = f"{seconds_text(times.step)}, from {seconds_text(low)} to {seconds_text(high)}"
    yield f"a step takes {step} ({mfu:.0f} % MFU, from {slow:.0f} to {fast:.0f}):"
    others = f"{traced.n_micro - 1} x {seconds_text(times.micro)} + " if traced.n_micro > 1 else ""
    yield (
        f"  micro-steps {others}{seconds_text(times.last)} for the last, and "
        f"{seconds_text(times.update)} for the update"
    )
    yield (
        f"  computing {seconds_text(times.compute)}, launched by the host in "
        f"{seconds_text(times.host)}; sending {seconds_text(times.hidden)}"
    )
    yield f"  meanwhile, and {seconds_text(times.exposed)} while it waits"
    yield (
        f"  {short_count(rate)} tokens/s, {short_count(rate * DAY_S)} a day; "
        f"{short_count(plan.tokens)} tokens take {short_time(plan.tokens / rate)}"
    )
    facts = [
        f"matrix products reach {100 * device.matmul_share:.0f} % of {device.bf16_flops / 1e12:g} "
        f"TFLOP/s (bf16), attention {100 * device.attention_share:.0f} %",
        *(
            [f"in float8 {100 * device.float8_share:.0f} % of {device.float8_tflops:g}"]
            if plan.args.distributed.float8
            else []
        ),
        f"other kernels {100 * device.memory_share:.0f} % of {device.memory_gb_per_s:g} GB/s",
        f"links {100 * device.link_share:.0f} % of {device.node_gb_per_s:g} GB/s in a node of "
        f"{device.node_size} and of {device.network_gb_per_s:g} outside",
        f"the host takes {device.launch_us:g} us for an operator",
        "data never waits",
    ]
    if plan.compiled:
        facts.append("compiled blocks move a third of the bytes in a third of the launches")
    if plan.args.data.document_mask != "none":
        facts.append("documents are as long as the rows")
    yield from wrap("assumed: " + "; ".join(facts), 80, subsequent_indent="  ")


def _checkpoint(plan: Plan) -> Iterator[str]:
    save = plan.save()
    yield (
        f"a checkpoint has {human_bytes(plan.checkpoint_bytes)} and holds up the run for "
        f"{seconds_text(save['held_s'])}"
    )
    often = short_time(save["every_s"])
    if (times := plan.times) is not None:
        often += f" ({counted(max(1, round(save['every_s'] / times.step)), 'step')})"
    yield (
        f"  with a failure every {short_time(save['failure_s'])}, one each {often} loses least: "
        f"{100 * save['lost']:.2g} % of the time"
    )


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
