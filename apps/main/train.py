"""Train a language model: the whole run, read top to bottom.

    python -m apps.main.train config=apps/main/configs/debug.yaml [key=value ...]
    torchrun --nproc-per-node 4 -m apps.main.train config=... distributed.tp_size=2

`train(args, build)` is the seam for a fork that changes the model: `build` gives the plain module,
its parallel plan and its FLOPs per token. A fork that changes the loop copies this file. What comes
before the first step is in setup.py.
"""

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from apps.main.config import Built, TrainArgs, build
from apps.main.evaluation import evaluate_step, run_missed_evaluation
from apps.main.setup import Run, set_up
from apps.main.setup import check as check  # what lingua.stool asks before it launches
from lingua.checkpoint.resume import state_to_save
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import load, to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.errors import UserError
from lingua.format import short_time
from lingua.hashing import batch_hash, hash_bits, key_of
from lingua.inference.generate import Request, generate
from lingua.inference.sampling import SamplingArgs
from lingua.model import Losses
from lingua.monitor.profiling import Profiler
from lingua.optim.optimizer import NonFiniteGuard, update
from lingua.optim.schedule import lr_at
from lingua.parallel.gradients import clip_grad_norm_, set_gradient_sync
from lingua.parallel.launch import detect_launch
from lingua.parallel.mesh import world_sum_
from lingua.parallel.parallelize import loss_context
from lingua.parallel.program import run_program
from lingua.signals import StopRequest
from lingua.slurm.jobs import requeue
from lingua.validation import validate

logger = logging.getLogger(__name__)

# Of the text a finished run shows: pieces a source, their tokens, the tokens they begin with.
SAMPLES, SAMPLE_TOKENS, PROMPT_TOKENS = 2, 200, 64


def train(args: TrainArgs, build: Callable[[TrainArgs], Built] = build) -> None:
    """Train until `steps`, `stop_at` or a signal, going on from the newest checkpoint if any."""
    stop = StopRequest()
    with ExitStack() as open_parts:
        run = set_up(args, build, stop, open_parts)
        stopping = run is None  # a former start finished it, or a signal came early
        if run is not None:
            stopping = take_steps(args, run, stop)
            finish(args, run, stop, stopping)
    if stopping:
        requeue(stop.signal)
    stop.close()


def take_steps(args: TrainArgs, run: Run, stop: StopRequest) -> bool:
    """The loop. Returns True when a signal ended it before its last step."""
    report, progress, global_batch_size = run.report, run.progress, args.data.global_batch_size
    parameters = list(run.model.parameters())
    guard = NonFiniteGuard(args.optim.on_nonfinite, run.device, progress.skipped_steps)
    profiler = Profiler(args.profiling, run.dump_dir, run.mesh)
    stopping = False
    run_missed_evaluation(args, run, stop)
    while progress.step < run.end:
        with report.waiting_for_data():
            batch = next(run.loader)  # this rank's micro-batches of the step
        # Every step's one message between hosts: targets of the whole global batch, and who stops.
        wants_stop = stop.signal is not None or run.saver.gave_up
        valid, stopping = count_targets(batch, wants_stop, run.mesh)
        if stopping:
            break
        step = progress.step + 1
        if not valid.all():
            rows = f"{progress.position} to {progress.position + global_batch_size - 1}"
            raise UserError(
                f"step {step}: all targets are ignored in its global batch (rows {rows})"
            )
        with profiler.step(step):
            noise = key_of(args.seed, "noise", step) if args.model.dropout else None
            loss, _terms, hashed = accumulate(
                run, batch, valid, global_batch_size, args.distributed.grad_sync, noise
            )
            norm = clip_grad_norm_(parameters, args.optim.clip)
            lr = lr_at(progress.step, args.optim, args.steps)
            update(run.optimizer, lr, guard.admit(step, norm))  # a bad gradient changes nothing
            run.optimizer.zero_grad()
        progress.step, progress.position = step, progress.position + global_batch_size

        log_due, save_due = report.due(step), args.checkpoint.due(step) or step == run.end
        evaluate_due = args.eval is not None and args.eval.due(step, args.steps)
        save_due |= evaluate_due  # a job needs the checkpoint, and one here takes its time
        if log_due or save_due:
            count_skipped(args, run, guard)
        if log_due:
            report.log(progress, loss, norm, lr, hashed)
        if measurement_due(args, step, save_due):
            measure(args, run)
        if save_due:
            save_checkpoint(args, run, final=step == run.end)
        if evaluate_due:
            evaluate_step(args, run, stop)
    profiler.close()
    if stopping and progress.step:
        count_skipped(args, run, guard)
        save_checkpoint(args, run, final=True)
    return stopping


def count_skipped(args: TrainArgs, run: Run, guard: NonFiniteGuard) -> None:
    """Ask for the updates that were suppressed. Where one is to stop the run, no later one was
    made: what the bad step found is saved, so that nothing trained before it is lost."""
    progress, global_batch_size = run.progress, args.data.global_batch_size
    try:
        progress.skipped_steps = guard.skipped(progress.step, progress.position, global_batch_size)
    except UserError:
        undone = progress.step + 1 - int(guard.first)
        progress.step -= undone
        progress.position -= undone * global_batch_size
        if progress.step:
            save_checkpoint(args, run, final=True)
        raise


def count_targets(
    batch: list[MicroBatch], stopping: bool, mesh: DeviceMesh
) -> tuple[torch.Tensor, bool]:
    """Valid targets of the whole global batch, int64 of each view, and whether any rank stops."""
    counts = sum((micro.targets != IGNORE).sum((1, 2)) for micro in batch)
    if mesh.get_local_rank("tp"):  # tp ranks of a group hold the same rows: one of them counts
        counts = torch.zeros_like(counts)
    total = world_sum_(torch.cat((counts, torch.tensor([int(stopping)]))))
    return total[:-1], bool(total[-1])


def accumulate(
    run: Run,
    batch: list[MicroBatch],
    valid: torch.Tensor,
    global_batch_size: int,
    grad_sync: str,
    noise: int | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of (sum of token losses / valid targets) over the global batch, in `.grad`, plus
    those of the mean over its rows of each term that the model has per row.

    `noise` is the key of the step's dropout. Returns this rank's share of that loss and, by name,
    of those means, float32, and the hash of the rows it used, int64.
    """
    valid = valid.to(run.device)
    loss = torch.zeros((), device=run.device)
    terms: dict[str, torch.Tensor] = {}
    hashed = torch.zeros((), dtype=torch.int64, device=run.device)
    for i, micro in enumerate(batch):
        ids, tokens, targets, *documents = (
            t.to(run.device, non_blocking=True) for t in micro.tensors()
        )
        set_gradient_sync(run.model, grad_sync, last=i == len(batch) - 1)
        with loss_context(run.mesh):
            random = {} if noise is None else {"noise": hash_bits(noise, ids)}
            sums, _, per_row = Losses(*run.model(tokens, targets, *documents, **random))
            if sums.shape != valid.shape:  # else the division would broadcast
                raise UserError(
                    f"data.n_views = {len(valid) + 1}: the model predicts {len(sums)} of the "
                    f"{len(valid)} views after the first; must be {len(sums) + 1}"
                )
            part = (sums / valid).sum()  # over the views
            means = {
                name: torch.where(ids >= 0, term, 0).sum() / global_batch_size  # not of padding
                for name, term in per_row.items()
            }
            sum(means.values(), part).backward()
        loss += part.detach()
        for name, mean in means.items():
            terms[name] = terms.get(name, 0) + mean.detach()
        hashed += batch_hash(ids, tokens, targets)
    return loss, terms, hashed


def save_checkpoint(args: TrainArgs, run: Run, final: bool = False) -> None:
    """Save the completed step. When this returns a `final` one is there."""
    progress, report = run.progress, run.report
    with report.paused():
        progress.trained_s = report.trained_s
        rate = lr_at(progress.step, args.optim, args.steps)
        measured_step, held_out = run.held_out_loss
        if measured_step != progress.step:
            held_out = None
        state = state_to_save(
            progress,
            run.optimizer,
            tokens=progress.position * args.data.seq_len,
            schedule={"step": progress.step, "lr": rate},
            topology=tuple(run.mesh.shape),
            data=run.data,
            held_out=held_out,
        )
        tensors = tensors_of(run.model, run.optimizer)
        run.saver.save(progress.step, tensors, state, to_yaml(args), final)


def measurement_due(args: TrainArgs, step: int, save_due: bool) -> bool:
    every = args.validation.every
    regular = step == args.steps or (every > 0 and step % every == 0)
    return regular or (save_due and args.checkpoint.keep_best)


def measure(args: TrainArgs, run: Run) -> None:
    """Measure and write the held-out loss of every source."""
    nats = n_bytes = 0.0
    with run.report.paused():
        for name, windows in run.held_out.items():
            result = validate(
                run.model, windows, run.rows, args.data.n_views - 1, run.mesh, run.marks
            )
            run.report.validation(run.progress.step, name, result)
            nats += result["nats_per_byte"] * result["bytes"]
            n_bytes += result["bytes"]
    if n_bytes:
        run.held_out_loss = run.progress.step, nats / n_bytes


def write_samples(args: TrainArgs, run: Run) -> None:
    """Let the model continue held-out text of every source, from a few places of it."""
    path, seq_len = run.dump_dir / "samples.jsonl", args.data.seq_len
    n_prompt = max(1, min(PROMPT_TOKENS, 2 * seq_len // 3))
    n_tokens = max(1, min(SAMPLE_TOKENS, seq_len - n_prompt))
    settings = SamplingArgs(temperature=0.8, max_gen_tokens=n_tokens, stop_tokens=[])
    for name, windows in run.held_out.items():
        n = len(windows.tokens)
        places = range(n // (2 * SAMPLES), n, -(-n // SAMPLES))
        prompts = [windows.tokens[i, :n_prompt].tolist() for i in places]
        requests = [Request(prompt, settings, args.seed) for prompt in prompts]
        results = generate(run.model, requests, run.tokenizer, run.mesh, len(requests))
        for prompt, result in zip(prompts, results, strict=True):
            before, after = run.tokenizer.decode(prompt), result.text
            if dist.get_rank() == 0:
                line = {"step": run.progress.step, "source": name, "prompt": before, "text": after}
                try:
                    with path.open("a", encoding="utf-8") as f:
                        f.write(json.dumps(line, ensure_ascii=False) + "\n")
                except OSError as error:  # a full disk: the run is done all the same
                    logger.error(f"what the model wrote is lost: {error}")
            shown = "\n".join(f"  | {row}" for row in f"{before} >>> {after}".splitlines())
            logger.info(f"held-out text of {name} >>> as the model goes on:\n{shown}")


def finish(args: TrainArgs, run: Run, stop: StopRequest, stopping: bool) -> None:
    """The last words: of a finished run its held-out loss, some text and where everything lies."""
    step = run.progress.step
    if stopping:
        by = stop.signal or "a signal to another rank"
        where = f"after step {step}, which is saved" if step else "before the first step"
        logger.info(f"stopped by {by} {where}. The same command goes on from there")
    elif step < args.steps:
        logger.info(f"stopped after step {step}, as stop_at says. Without it the run goes on")
    else:
        write_samples(args, run)
        newest = run.saver.root / f"{step:010d}"
        lines = [
            f"done: {step} steps in {short_time(run.report.trained_s)}. {run.dump_dir} has",
            "  config.yaml               the whole configuration",
            "  metrics.jsonl             loss, speed and more, a line every logging.freq steps",
            "  metrics.validation.jsonl  held-out loss",
            "  samples.jsonl             text the model wrote",
            f"and the newest checkpoint is {newest}",
        ]
        logger.info("\n".join(lines))
    run.report.close()


def main(config: type[TrainArgs] = TrainArgs, build: Callable[[TrainArgs], Built] = build) -> None:
    """The program of this app, or of a fork with its own config and model."""
    args, notices = load(config, foreign=META_LINGUA)
    if detect_launch().rank == 0:
        for line in notices:
            print(line)
    train(args, build)


if __name__ == "__main__":
    run_program(main)
