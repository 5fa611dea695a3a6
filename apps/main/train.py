"""Train a language model: the whole run, read top to bottom.

    python -m apps.main.train config=apps/main/configs/debug.yaml [key=value ...]
    torchrun --nproc-per-node 4 -m apps.main.train config=... distributed.tp_size=2

`train(args, build)` is the seam for a fork that changes the model: `build` gives the plain module,
its parallel plan and its FLOPs per token. A fork that changes the loop copies this file.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apps.main.transformer import ModelArgs, build_transformer, parallel_plan
from lingua.args import Announced, Free, Guarded, flatten, load, resume_classes, to_yaml
from lingua.checkpoint import CheckpointArgs, tensors_of
from lingua.checkpoint_load import load as load_tensors
from lingua.checkpoint_saver import Saver
from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.data.documents import DocumentMarks, document_marks
from lingua.data.heldout import HeldOut, held_out_windows
from lingua.data.loader import Loader, MicroBatch, micro_steps
from lingua.data.prepare import check_sources, open_sources, prepare_sources
from lingua.data.shards import Source
from lingua.distributed import (
    AXES,
    DistributedArgs,
    ParallelPlan,
    check_tensor_parallel,
    clip_grad_norm_,
    detect_launch,
    dp_degree,
    dp_rank,
    grad_sync_note,
    loss_context,
    mesh_sizes,
    on_rank_0,
    one_process,
    parallelize_model,
    pick_device,
    set_gradient_sync,
    start,
    world_sum_,
)
from lingua.errors import UserError
from lingua.generation import Request, generate
from lingua.hashing import batch_hash, hash_bits, key_of
from lingua.hugging_face import LlamaFolder, check_model, load_llama
from lingua.init import init_parameters
from lingua.launch import run_program
from lingua.logger import init_logger, short_time
from lingua.meta_lingua import META_LINGUA
from lingua.metrics import LoggingArgs
from lingua.optim import (
    NonFiniteGuard,
    OptimArgs,
    build_optimizer,
    lr_at,
    schedule_warnings,
    update,
)
from lingua.origin import check_origin, find_start, start_from
from lingua.profiling import Profiler, ProfilingArgs
from lingua.reporter import Reporter
from lingua.resume import (
    Progress,
    Saved,
    check_config,
    check_data,
    data_content,
    flat_config,
    state_to_save,
    tell,
)
from lingua.sampling import SamplingArgs
from lingua.signals import Stopped, StopRequest
from lingua.slurm import requeue
from lingua.tokenizer import Tokenizer, build_tokenizer
from lingua.transformer import flops_per_token
from lingua.validation import ValidationArgs, validate

logger = logging.getLogger(__name__)

# Of the text a finished run shows: pieces a source, their tokens, the tokens they begin with.
SAMPLES, SAMPLE_TOKENS, PROMPT_TOKENS = 2, 200, 64


@dataclass
class TrainArgs:
    name: Free[str] = "lingua"  # name of the run
    dump_dir: Free[str | None] = None  # folder of everything the run writes; null: runs/<name>
    seed: Guarded[int] = 42  # what data order, initial weights and dropout depend on
    steps: Announced[int] = 1000  # optimizer steps of the whole run
    stop_at: Free[int | None] = None  # leave after this step, as if interrupted; null: never
    grad_acc_steps: Free[int | None] = None  # micro-steps of a step; null: as few as fit
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    deterministic: Free[bool] = False  # bitwise equal runs on the same topology, at some speed
    data: DataArgs = field(default_factory=DataArgs)
    model: ModelArgs = field(default_factory=ModelArgs)
    optim: OptimArgs = field(default_factory=OptimArgs)
    distributed: DistributedArgs = field(default_factory=DistributedArgs)
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)
    logging: LoggingArgs = field(default_factory=LoggingArgs)
    profiling: ProfilingArgs = field(default_factory=ProfilingArgs)

    def problems(self) -> Iterator[tuple[str, str]]:
        for key in ("steps", "stop_at", "grad_acc_steps"):
            if (value := getattr(self, key)) is not None and value < 1:
                yield key, "must be at least 1"


@dataclass(frozen=True)
class Built:
    """What a builder gives. forward(tokens int64 B S, targets int64 V-1 B S) returns the sums of
    the token losses of each view, float32 V-1, and the targets they cover, int64 V-1; without
    targets it returns the next token's logits, B S vocabulary. With data.document_mask it is called
    with a third argument, documents int64 B S: the index of each token's document in its row. With
    model.dropout, and in training only, also with the argument noise=, int64 B: a random key of
    each row in this step, all that its dropout may depend on besides site, position and feature.
    Text is generated faster if it takes `cache`, a lingua.transformer.Cache, and then returns the
    logits of the last position alone."""

    module: nn.Module  # on the meta device, unless it is small
    plan: ParallelPlan | None  # None: data parallel as one unit
    flops_per_token: float  # of forward and backward, for the MFU


def build(args: TrainArgs) -> Built:
    """The model of this app."""
    return Built(
        build_transformer(args.model),
        parallel_plan(args.model, args.data.seq_len),
        flops_per_token(args.model, args.model.vocab_size, args.data.seq_len),
    )


@dataclass
class Run:
    """What set_up made: the parts of one start of a run."""

    dump_dir: Path
    mesh: DeviceMesh
    device: torch.device
    tokenizer: Tokenizer
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader
    saver: Saver
    held_out: dict[str, HeldOut]
    marks: DocumentMarks | None
    rows: int  # of a micro-batch
    data: dict[str, str]  # fingerprints
    progress: Progress
    report: Reporter
    end: int  # the step this start goes up to
    measured_step: int = 0


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
            loss, hashed = accumulate(run, batch, valid, args.distributed.grad_sync, noise)
            norm = clip_grad_norm_(parameters, args.optim.clip)
            lr = lr_at(progress.step, args.optim, args.steps)
            update(run.optimizer, lr, guard.admit(step, norm))  # a bad gradient changes nothing
            run.optimizer.zero_grad()
        progress.step, progress.position = step, progress.position + global_batch_size

        log_due, save_due = report.due(step), args.checkpoint.due(step) or step == run.end
        if log_due or save_due:
            count_skipped(args, run, guard)
        if log_due:
            report.log(progress, loss, norm, lr, hashed)
        if save_due:
            save_checkpoint(args, run, final=step == run.end)
        if args.validation.every and step % args.validation.every == 0:
            measure(args, run)
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
    run: Run, batch: list[MicroBatch], valid: torch.Tensor, grad_sync: str, noise: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of (sum of token losses / valid targets) over the global batch, in `.grad`.

    `noise` is the key of the step's dropout. Returns this rank's share of that loss, float32, and
    the hash of the rows it used, int64.
    """
    valid = valid.to(run.device)
    loss = torch.zeros((), device=run.device)
    hashed = torch.zeros((), dtype=torch.int64, device=run.device)
    for i, micro in enumerate(batch):
        ids, tokens, targets, *documents = (
            t.to(run.device, non_blocking=True) for t in micro.tensors()
        )
        set_gradient_sync(run.model, grad_sync, last=i == len(batch) - 1)
        with loss_context(run.mesh):
            random = {} if noise is None else {"noise": hash_bits(noise, ids)}
            sums, _ = run.model(tokens, targets, *documents, **random)
            if sums.shape != valid.shape:  # else the division would broadcast
                raise UserError(
                    f"data.n_views = {len(valid) + 1}: the model predicts {len(sums)} of the "
                    f"{len(valid)} views after the first; must be {len(sums) + 1}"
                )
            part = (sums / valid).sum()  # over the views
            part.backward()
        loss += part.detach()
        hashed += batch_hash(ids, tokens, targets)
    return loss, hashed


def set_up(
    args: TrainArgs, build: Callable[[TrainArgs], Built], stop: StopRequest, open_parts: ExitStack
) -> Run | None:
    """Everything before the first step; None when there is no step left to do. What is to be closed
    after the last, also when set-up fails, goes into `open_parts`."""
    # ---- processes, and what a former start left
    launch = detect_launch()
    device = pick_device(args.device, launch)
    mesh = start(device, launch, args.distributed, args.deterministic)
    args.dump_dir = args.dump_dir or f"runs/{args.name}"
    dump_dir = Path(args.dump_dir)
    init_logger(dump_dir, dist.get_rank())
    classes = resume_classes(type(args))
    checkpoints = Path(args.checkpoint.path or dump_dir / "checkpoints")
    saver = open_parts.enter_context(Saver(checkpoints, args.checkpoint))
    saved, origin = find_start(checkpoints, args.checkpoint, classes)
    end = min(args.steps, args.stop_at or args.steps)
    if saved is not None and saved.progress.step >= end:
        where = f"{saved.checkpoint.path} is step {saved.progress.step} of {end}"
        logger.info(f"the run is finished: {where}. To go on, raise steps or stop_at")
        return None

    # ---- config and data, each checked against the checkpoint as soon as it is known
    tokenizer = build_tokenizer(args.data.tokenizer)
    resolve(args, dp_degree(mesh), tokenizer, saved, dump_dir)
    llama = None  # a run's own checkpoint wins over the weights it began with
    if saved is None and args.checkpoint.init_from is not None:
        llama = LlamaFolder(args.checkpoint.init_from, "checkpoint.init_from")
        check_model(llama, args.model, args.checkpoint.allow_change)
    config, allowed = flatten(args), args.checkpoint.allow_change
    found = check_config(saved, config, classes, allowed)
    found += check_origin(origin, config, tokenizer, classes, allowed)
    global_batch_size, degree = args.data.global_batch_size, dp_degree(mesh)
    n_micro, rows = micro_steps(
        global_batch_size, degree, args.data.batch_size, args.grad_acc_steps
    )
    marks = document_marks(args.data, tokenizer)
    if not prepare_data(args, tokenizer, stop):
        return None
    sources, held_out = open_data(args, tokenizer)
    data = data_content(sources, tokenizer)
    found += check_data(saved, data, allowed)

    # ---- model and optimizer, then what the checkpoint has for them
    built = build(args)
    model = parallelize_model(built.module, mesh, built.plan, args.distributed)
    init_parameters(model, args.seed, device)
    optimizer = build_optimizer(model, args.optim, built.plan.blocks if built.plan else ())
    progress = Progress()
    if saved is not None:
        load_tensors(saved.checkpoint, tensors_of(model, optimizer))
        progress = saved.progress
        saver.saved_step = progress.step
        tell(saved, found, optimizer, tuple(mesh.shape))
    elif origin is not None:
        progress = start_from(origin, found, model, optimizer, global_batch_size)
    elif llama is not None:
        load_llama(llama, model)
        logger.info(f"it begins with the weights of {llama.path}")
    on_rank_0(lambda: (dump_dir / "config.yaml").write_text(to_yaml(args), encoding="utf-8"))
    for line in description(args, mesh, model, n_micro, rows):
        logger.info(line)

    # ---- rows from where the run is, and a place to report to
    stream = args.data.row_stream(sources, args.seed)
    loader = open_parts.enter_context(
        Loader(
            stream,
            global_batch_size,
            dp_rank(mesh),
            degree,
            n_micro,
            rows,
            position=progress.position,
            workers=args.data.workers,
            device=device,
            marks=marks,
        )
    )
    report = Reporter(
        args.logging,
        dump_dir,
        mesh,
        name=args.name,
        config=flatten(args),
        step=progress.step,
        steps=end,
        global_batch_size=global_batch_size,
        seq_len=args.data.seq_len,
        flops_per_token=built.flops_per_token,
        dtype=args.distributed.dtype,
        trained_s=progress.trained_s,
    )
    if saved is not None and saved.topology != tuple(mesh.shape):
        report.event("topology", progress.step, old=saved.topology, new=tuple(mesh.shape))
    return Run(
        dump_dir, mesh, device, tokenizer, model, optimizer, loader, saver, held_out, marks,
        rows, data, progress, report, end,
    )  # fmt: skip


def prepare_data(args: TrainArgs, tokenizer: Tokenizer, stop: StopRequest) -> bool:
    """Tokenize what is not yet, on rank 0. False where a signal ended that: it may take hours, and
    what is finished stays. (One to another rank alone ends the run at its first step boundary.)"""

    def prepare() -> bool:
        try:
            with stop.at_once():
                prepare_sources(args.data, tokenizer, logger.info, progress=True)
        except Stopped:
            logger.info(
                f"stopped by {stop.signal} while the text was prepared. "
                "The same command goes on from there"
            )
            return False
        return True

    return on_rank_0(prepare)


def open_data(
    args: TrainArgs, tokenizer: Tokenizer
) -> tuple[dict[str, Source], dict[str, HeldOut]]:
    """The sources by name, and their held-out windows."""
    sources = open_sources(args.data, tokenizer)
    held_out = {}
    for name, source in sources.items():
        windows = held_out_windows(source, args.data.seq_len, args.validation.tokens)
        if windows.n_documents:
            held_out[name] = windows
        else:
            logger.info(f"{name} has too few documents to hold one out: its loss is not measured")
    return sources, held_out


def resolve(
    args: TrainArgs, degree: int, tokenizer: Tokenizer, saved: Saved | None, dump_dir: Path
) -> None:
    """Fill in what the config leaves open. It is decided once: a later start on another topology
    takes the global batch size from the checkpoint or the dump dir's config.yaml."""
    if args.data.global_batch_size is None:
        key, written = "data.global_batch_size", dump_dir / "config.yaml"
        former = saved.config if saved is not None else None
        if former is None:
            former = on_rank_0(lambda: flat_config(written, [key]) if written.exists() else {})
        rows = args.data.batch_size * degree * (args.grad_acc_steps or 1)
        args.data.global_batch_size = former.get(key, rows)
        if args.data.global_batch_size != rows:
            logger.info(
                f"{key} = {former[key]}, as this run was started with; null would give {rows} now"
            )
            args.grad_acc_steps = None
    if args.model.vocab_size == -1:
        args.model.vocab_size = tokenizer.vocab_size
    if args.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size = {args.model.vocab_size}: must be at least the tokenizer's, "
            f"{tokenizer.vocab_size}, or -1"
        )


def description(
    args: TrainArgs, mesh: DeviceMesh, model: nn.Module, n_micro: int, rows: int
) -> Iterator[str]:
    """What a person wants to read before the first step."""
    n_parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True))
    n = dist.get_world_size()
    yield f"{args.name}: {n_parameters:,} parameters on {n} x {device} ({sizes})"
    yield (
        f"a step is {args.data.global_batch_size} rows of {args.data.seq_len} tokens: "
        f"{n_micro} micro-step{'s' if n_micro > 1 else ''} of at most {rows} rows "
        f"on each of {dp_degree(mesh)} data-parallel ranks"
    )
    yield from grad_sync_note(model, mesh, args.distributed.grad_sync, n_micro)
    yield from schedule_warnings(args.optim, args.steps)


def save_checkpoint(args: TrainArgs, run: Run, final: bool = False) -> None:
    """Save the completed step. When this returns a `final` one is there."""
    progress, report = run.progress, run.report
    with report.paused():
        progress.trained_s = report.trained_s
        rate = lr_at(progress.step, args.optim, args.steps)
        state = state_to_save(
            progress,
            run.optimizer,
            tokens=progress.position * args.data.seq_len,
            schedule={"step": progress.step, "lr": rate},
            topology=tuple(run.mesh.shape),
            data=run.data,
        )
        tensors = tensors_of(run.model, run.optimizer)
        run.saver.save(progress.step, tensors, state, to_yaml(args), final)


def measure(args: TrainArgs, run: Run) -> None:
    """Measure and write the held-out loss of every source."""
    with run.report.paused():
        for name, windows in run.held_out.items():
            result = validate(
                run.model, windows, run.rows, args.data.n_views - 1, run.mesh, run.marks
            )
            run.report.validation(run.progress.step, name, result)
    run.measured_step = run.progress.step


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
                with path.open("a", encoding="utf-8") as f:
                    f.write(json.dumps(line, ensure_ascii=False) + "\n")
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
        if run.measured_step != step:
            measure(args, run)
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


def check(
    argv: list[str],
    world_size: int,
    config: type[TrainArgs] = TrainArgs,
    build: Callable[[TrainArgs], Built] = build,
) -> tuple[TrainArgs, list[str]]:
    """The configuration of a run to be launched with `world_size` processes, and its notices.

    Raises:
        UserError: set_up would refuse it.
    """
    args, notices = load(config, argv, foreign=META_LINGUA)
    replicate, shard, tp = mesh_sizes(args.distributed, world_size)
    trial, degree = deepcopy(args), replicate * shard
    tokenizer = build_tokenizer(trial.data.tokenizer)
    check_sources(trial.data, tokenizer)
    dump_dir = Path(args.dump_dir or f"runs/{args.name}")
    classes = resume_classes(config)
    checkpoints = Path(args.checkpoint.path or dump_dir / "checkpoints")
    with one_process():
        quick = replace(args.checkpoint, verify="size")
        saved, origin = find_start(checkpoints, quick, classes)
        resolve(trial, degree, tokenizer, saved, dump_dir)
        wanted, allowed = flatten(trial), args.checkpoint.allow_change
        check_config(saved, wanted, classes, allowed)
        check_origin(origin, wanted, tokenizer, classes, allowed)
    global_batch_size, batch_size = trial.data.global_batch_size, trial.data.batch_size
    micro_steps(global_batch_size, degree, batch_size, trial.grad_acc_steps)
    document_marks(trial.data, tokenizer)
    check_tensor_parallel(build(trial).plan or ParallelPlan(), tp)
    return args, notices


def main(config: type[TrainArgs] = TrainArgs, build: Callable[[TrainArgs], Built] = build) -> None:
    """The program of this app, or of a fork with its own config and model."""
    args, notices = load(config, foreign=META_LINGUA)
    if detect_launch().rank == 0:
        for line in notices:
            print(line)
    train(args, build)


if __name__ == "__main__":
    run_program(main)
