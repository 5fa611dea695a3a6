"""Speed and memory of training steps, beside their plans and other projects, of saves, loads and
generation."""

import gzip
import json
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import profile

from apps.bench import generate
from apps.bench.checkpoint import load_newest
from apps.bench.gpu.numbers import alone
from apps.bench.gpu.prepare import Setting, found, wrong
from apps.bench.launch import training
from apps.bench.projects import PROJECTS, Step, project_step
from apps.bench.report import quotients, shown, spread
from apps.bench.turns import clock, take_turns
from apps.main import app
from lingua.base.dump_dir import CHECKPOINTS
from lingua.checkpoint.tensors import tensors_of
from lingua.monitor.metrics import mfu
from lingua.monitor.peaks import peak_flops
from lingua.parallel.alone import temporary_process_group
from lingua.tools.check.rates import copy_rate, disk_rate, product_flops

WARM_UP, STEPS, TIMES, TRACED = 5, 5, 3, 2  # steps: before; timed at once, so often; traced
MEMORY_MARGIN = 1.05  # times the planned memory; more is outside the plan


def machine(s: Setting) -> str:
    size, n_bytes = (512, 1 << 24) if s.small else (8192, 1 << 31)
    values = {
        "bf16 products, TFLOP/s": product_flops(s.device, torch.bfloat16, size) / 1e12,
        "copies, read and written, GB/s": copy_rate(s.device, n_bytes) / 1e9,
        "disk, written and synced, GB/s": disk_rate(s.work, n_bytes) / 1e9,
    }
    if s.device.type == "cuda":
        values["GiB free"], values["GiB"] = (n / 2**30 for n in torch.cuda.mem_get_info())
        found("properties", str(torch.cuda.get_device_properties(s.device)))
    return ", ".join(f"{name} {shown(found(name, value))}" for name, value in values.items())


def train(s: Setting, name: str) -> str:
    """Tokens per second, MFU, memory, launches and waits of a config, beside its plan."""
    args = s.config(name)
    marks, on_gpu = list[float](), s.device.type == "cuda"
    n, tokens = WARM_UP + TIMES * STEPS, args.data.step_rows * args.data.seq_len
    with training(app, args, n + 1 + TRACED) as (run, steps):
        for step in steps:
            if step >= WARM_UP and step % STEPS == 0:
                marks.append(clock(s.device)[0])
            if step == WARM_UP and on_gpu:
                torch.cuda.reset_peak_memory_stats()
            if step == n:
                break
        step_s = [(b - a) / STEPS for a, b in pairwise(marks)]
        speed = found("tokens/s", spread(tokens / t for t in step_s))
        peak = peak_flops(s.device_name(), args.distributed.dtype)
        used = found("MFU, %", mfu(run.report.flops_per_token, speed.median, peak))
        gib = found("GiB", torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None)
        if on_gpu:
            found("a steady step", traced := trace(s, partial(next, steps), name))
            if traced["waits"]:
                wrong("WAITS", f"the host for the device, {traced['waits']} times a step")
    text = f"{speed} tokens/s, MFU {shown(used)} %, {shown(gib)} GiB"
    path = s.prepared / "plans" / f"{name}.json"
    plans = json.loads(path.read_text()) if path.exists() and not s.small else {}
    if (plan := plans.get(s.device_name())) is None:
        return text
    slow, fast = (round(tokens / t) for t in reversed(plan["seconds"]))
    if not slow <= speed.median <= fast or gib > MEMORY_MARGIN * plan["GiB"]:
        wrong("OUTSIDE the plan", f"{slow:,} to {fast:,} tokens/s, {plan['GiB']:.1f} GiB")
    return f"{text}; planned {slow:,} to {fast:,}, {plan['GiB']:.1f} GiB"


def trace(s: Setting, step: Step, name: str) -> dict[str, Any]:
    """What the profiler sees in a step; the trace of 1B stays beside the results."""
    step()
    torch.cuda.synchronize()
    with profile() as profiled:
        for _ in range(TRACED):
            step()
    path = s.work.parent / f"trace-{name}.json.gz"
    profiled.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as f:
        events = [e for e in json.load(f)["traceEvents"] if e.get("ph") == "X"]
    if name != "1B":
        path.unlink()
    return steady_step(events, TRACED)


def steady_step(events: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """Of one step, what a trace of n has: events of Chrome's format, in microseconds."""
    calls = Counter(e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy, end = 0.0, 0.0
    for begin, until in sorted((e["ts"], e["ts"] + e["dur"]) for e in on_gpu):
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    # The profiler itself waits at its end, by cudaDeviceSynchronize.
    waits = calls["cudaStreamSynchronize"] + calls["cudaEventSynchronize"]
    return {
        "kernels": len(on_gpu) / n,
        "launches": sum(count for name, count in calls.items() if "aunch" in name) / n,
        "waits": waits / n,
        "idle, %": 100 * (1 - busy / (end - min(e["ts"] for e in on_gpu))) if on_gpu else None,
    }


def saving(s: Setting) -> str:
    """For how long a save holds up the run, in the foreground or not, and a load."""
    texts = []
    for name, background in (("save", "false"), ("save in the background", "true")):
        keys = ["model.n_layers=4", "model.vocab_size=32768", f"dump_dir={s.work}/{name}"]
        args = s.config("1B-eager", *keys, f"checkpoint.async_save={background}")
        with temporary_process_group(), training(app, args, 12) as (run, steps):
            step: Step = partial(next, steps)
            quiet_s = spread([seconds(step, s) for _ in range(6)][3:]).median
            tensors = tensors_of(run.model, run.optimizer)
            gigabytes = sum(t.numel() * t.element_size() for t in tensors.values()) / 1e9
            for i in (1, 2):
                begin = time.perf_counter()
                save_s = seconds(lambda: run.save(None, final=False), s)
                held_s = found(f"{name} {i}: s held", save_s + seconds(step, s) - quiet_s)
                run.saver.wait()
                found(f"{name} {i}: GB/s", gigabytes / (time.perf_counter() - begin))
            texts.append(f"a {name} of {gigabytes:.2g} GB holds up {held_s:.2f} s")
            loading = partial(load_newest, args.folder / CHECKPOINTS, tensors)
            found(f"load of a {name}: GB/s", gigabytes / seconds(loading, s))
    return "; ".join(texts)


def seconds(work: Step, s: Setting) -> float:
    """Seconds of a call, with the device idle before and after."""
    begin = clock(s.device)[0]
    work()
    return float(clock(s.device)[0] - begin)


def generation(s: Setting) -> str:
    """Of few layers: most of the time is the start, and the other form of the weights."""
    sizes = ["model.n_layers=4", "model.vocab_size=32768", "data.seq_len=128"]
    keys, texts = s.shape("1B-eager", *sizes), list[str]()

    def seen(row: dict[str, Any]) -> None:
        found(f"batch {row['batch']}", row)
        texts.append(f"batch {row['batch']}: {row['here']}, {row['ratio']} of transformers")

    generate.measure(keys, 1 if s.small else 2, seen)
    return f"tokens/s, {'; '.join(texts)}"


def beside(s: Setting, project: str) -> str:
    """The training program's own loop, with its data, in turns with another project's model, which
    has neither data nor logs."""
    args = s.config(*PROJECTS[project].sizes, f"dump_dir={s.work}/{project}")
    rounds, n = (1, 1) if s.small else (4, 10)
    with training(app, args, (rounds + 1) * n + 12) as (run, steps):
        both: dict[str, Step] = {"lingua": partial(next, steps)}
        folder = s.prepared / "projects" / project
        both[project] = project_step(project, folder, args, run.mesh, s.compile)

        def turn(step: Step) -> None:
            for _ in range(n):
                step()
            clock(s.device)

        sides = {name: partial(turn, step) for name, step in both.items()}
        turns = take_turns(sides, rounds, project)
        for name, taken in turns.items():
            tokens = n * args.data.step_rows * args.data.seq_len
            found(f"{name}: tokens/s", spread(tokens / t for t in taken.seconds))
            found(f"{name}: alone", alone(both[name], s))
    ratio = found("ratio", quotients(turns[project].seconds, turns["lingua"].seconds))
    return f"lingua is {ratio} times as fast"
