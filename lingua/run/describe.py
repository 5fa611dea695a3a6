"""What a run logs of itself at its start and at its end."""

import logging
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import MAIN, known_apps
from lingua.base.dump_dir import CONFIG, PLAN, RECEIPT, step_folder
from lingua.base.errors import UserError, tool_needed_by
from lingua.base.files import write_atomically
from lingua.base.format import counted, parameters_text, short_time
from lingua.base.version import code_hash, code_version
from lingua.checkpoint.state import versions
from lingua.config.load import to_yaml
from lingua.data.sources import TextData
from lingua.model.head import chunk_note
from lingua.model.transformer import Attention
from lingua.optim.schedule import schedule_warnings
from lingua.parallel.mesh import WORDS, dp_degree, gather_on_every_rank, on_rank_0, sizes_of
from lingua.run.args import RunArgs
from lingua.run.receipt import write_receipt
from lingua.run.run import Run
from lingua.run.start import Checked, resolve_attention

logger = logging.getLogger(__name__)


def announce(run: Run, checked: Checked) -> None:
    """Write config.yaml, log what starts, and write its event lines. Called by every rank."""
    args, step, topology = run.args, run.progress.step, sizes_of(run.mesh)
    run.saver.wait()  # raises an error where a later start has the run
    on_rank_0(lambda: write_atomically(args.folder / CONFIG, to_yaml(args)))
    on_rank_0(lambda: (args.folder / RECEIPT).unlink(missing_ok=True))  # of an earlier end
    if type(checked.data) is TextData:
        folders = tuple(checked.data.folders(args, run.tokenizer).values())
        with suppress(OSError):  # a full disk: the next start looks for the text again
            if run.saver.start.number:  # on rank 0
                run.saver.start.write(args.folder, folders)
    for line in describe(args, run.model, run.mesh):
        logger.info(line)
    where = machine(run)
    again = started_again(run, where["hosts"])
    run.report.event("start", step, topology=topology, config=to_yaml(args), **again, **where)
    if checked.saved is not None and checked.saved.topology != topology:
        run.report.event("topology", step, old=checked.saved.topology, new=topology)


def started_again(run: Run, hosts: list[str]) -> dict[str, Any]:
    """What the event of a later start has besides (docs/runs.md). Logs what nobody asked for."""
    earlier, mesh = run.report.earlier, run.mesh.shape  # cp divides dp_shard
    if not earlier.start:
        return {}
    known, before = earlier.start.get("hosts") or hosts, earlier.start.get("topology") or mesh
    again, n, old = max(0, earlier.step - run.progress.step), prod(mesh), prod(before[:3])
    changes = [f"{n} instead of {counted(old, 'rank')}"] * (n != old)
    changes += [f"{counted(again, 'step')} to do again"] * (again > 0)
    changes += [f"{host} has left" for host in known if host not in hosts]
    changes += [f"{host} has joined" for host in hosts if host not in known]
    cause = earlier.ended or "error: it was killed, or its machine was lost"
    if again or set(known) != set(hosts) or ":" in cause:
        last = "lost its connection to a rank" if "gloo/" in cause else cause
        logger.info(f"start {run.saver.number}: " + "; ".join([*changes, f"before: {last}"]))
    return {"cause": cause, "steps_again": again}


def describe(args: RunArgs, model: nn.Module, mesh: DeviceMesh) -> Iterator[str]:
    """Yields what a person wants to read before the first step."""
    n_parameters = sum(p.numel() for p in model.parameters())
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kind = mesh.device_type
    device = torch.cuda.get_device_name() if kind == "cuda" else kind.upper()
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(WORDS, sizes_of(mesh), strict=False))
    degree, n = dp_degree(mesh), dist.get_world_size()
    n_micro, rows = args.micro_steps(degree)
    yield f"{args.name}: {parameters_text(n_parameters, n_trained)} on {n} x {device} ({sizes})"
    yield (
        f"a step is {counted(args.data.step_rows, 'row')} of {args.data.seq_len} tokens: "
        f"{counted(n_micro, 'micro-step')} of at most {counted(rows, 'row')} a rank, on "
        f"{counted(degree, 'data-parallel rank')}"
    )
    if any(isinstance(module, Attention) for module in model.modules()):
        yield "attention: {}, {}".format(*resolve_attention(args, kind))
    if args.distributed.float8 is not None:
        yield "products of the blocks: float8, whose scales, and so rounding, depend on the mesh"
    if n > 1:
        from lingua.parallel.traffic import traffic_notes

        yield from traffic_notes(model, mesh, args.distributed, n_micro)
    positions = rows * args.data.seq_len // args.distributed.cp_size
    yield from chunk_note(model, positions, mesh["tp"].size())
    yield from schedule_warnings(args.optim, args.steps)


def machine(run: Run) -> dict[str, Any]:
    """Returns the machines, devices and code of a start, as values of JSON. Called by every
    rank."""
    main = [path for name, path in known_apps().items() if name == MAIN and path in sys.modules]
    return {
        "device": run.report.device_name,
        "flops_per_token": run.report.flops_per_token,
        "hosts": list(dict.fromkeys(gather_on_every_rank(socket.gethostname()))),
        "commit": on_rank_0(partial(code_version, Path(__file__))),
        "code": on_rank_0(partial(code_hash, "lingua", *main, run.app.path)),
        **versions(),
    }


def finish(run: Run) -> None:
    """Log how the run ended. A finished one also writes samples. Called by every rank."""
    args, step = run.args, run.progress.step
    reason = "done"
    if run.signals:
        reason = run.signals[0]
        where = f"after step {step}, which is saved" if step else "before the first step"
        logger.info(f"stopped by {reason} {where}. The same command resumes it")
    elif step < args.end:
        reason = "left"
        logger.info(f"left after step {step}, which is saved. The same call resumes it")
    elif step < args.steps:
        reason = "stop_at"
        logger.info(f"stopped after step {step}, as stop_at asks; without it the run continues")
    else:
        from lingua.run.samples import write_samples

        write_samples(run)
        newest = f"the newest checkpoint is {run.saver.root / step_folder(step)}"
        logger.info(f"done: {step} steps in {short_time(run.report.trained_s)}; {newest}")
    if (args.folder / PLAN).exists():
        step_s = run.report.trained_s / max(1, step)
        try:
            with tool_needed_by(f"comparing the run with {PLAN}"):
                from lingua.tools.plan.fact import against_plan
            logger.info(against_plan(args.folder, sizes_of(run.mesh), run.device, step_s))
        except UserError as error:  # the run is done
            logger.info(error)
    run.report.event("stop", step, reason=reason)
    if reason == "done":  # last: a run that has it is finished
        run.saver.wait()
        try:
            on_rank_0(partial(write_receipt, args.folder))
        except UserError as error:
            logger.info(error)
    if not run.signals:
        logger.info(f"report: python -m lingua report {shlex.quote(str(args.folder))}")
