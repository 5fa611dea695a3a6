"""Speed and memory: of training steps beside their plans and beside other projects, of the loss and
attention alone, of saves, loads and generation."""

import gzip
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

from apps.bench import generate
from apps.bench.checkpoint import load_newest
from apps.bench.gpu.numbers import alone
from apps.bench.gpu.prepare import Setting, found, wrong
from apps.bench.launch import training
from apps.bench.report import quotients, shown, spread
from apps.bench.turns import clock, take_turns
from apps.main import app
from lingua.base.dump_dir import CHECKPOINTS
from lingua.base.errors import UserError
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import load
from lingua.monitor.metrics import mfu
from lingua.monitor.peaks import peak_flops
from lingua.tools.check.rates import copy_rate, disk_rate, product_flops
from lingua.tools.in_process import temporary_process_group

WARM_UP, STEPS, TIMES, TRACED = 5, 5, 3, 2  # steps: before; timed at once, so often; traced
PROJECTS = {"nanogpt": ["124M"], "meta_lingua": ["1B", "model.n_layers=8"]}  # their sizes
Step = Callable[[], object]
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
    args: Any = load(app.config, s.shape(name))[0]
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
        words = s.shape("1B-eager", *keys, f"checkpoint.async_save={background}")
        args: Any = load(app.config, words)[0]
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
    keys = s.shape("1B-eager", "model.n_layers=16")
    keys.append("data.seq_len=72" if s.small else "data.seq_len=192")
    rows = [dict(row) for row in generate.measure(keys, 1 if s.small else 3).rows]
    texts = [f"batch {r['batch']}: {r['here']}, {r['ratio']} of transformers" for r in rows]
    return f"tokens/s, {'; '.join(texts)}" if found("batches", rows) else ""


def beside(s: Setting, project: str) -> str:
    """The training program's own loop, with its data, in turns with another project's model, which
    has neither data nor logs."""
    args: Any = load(app.config, s.shape(*PROJECTS[project], f"dump_dir={s.work}/{project}"))[0]
    rounds, n = (1, 1) if s.small else (4, 10)
    with training(app, args, (rounds + 1) * n + 12) as (run, steps):
        both: dict[str, Step] = {"lingua": partial(next, steps)}
        both[project] = project_step(s, project, run.mesh, args)

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


def project_step(s: Setting, project: str, mesh: DeviceMesh, args: Any) -> Step:
    """A step of a model of the size of `args`, on tokens that stay the same."""
    x, y = torch.randint(args.model.vocab_size, (2, *_rows(args)), device=s.device)
    if project == "nanogpt":
        model, optimizer = nanogpt(s, args)
    else:
        model, optimizer = meta_lingua(s, mesh, args)
    if s.compile:
        model.compile()

    def step() -> None:
        with torch.autocast(s.device.type, torch.bfloat16, enabled=project == "nanogpt"):
            loss = model(x, y)[1] if project == "nanogpt" else model(x, y, attn_impl="sdpa")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def nanogpt(s: Setting, args: Any) -> tuple[nn.Module, Any]:
    """github.com/karpathy/nanoGPT."""
    m, module = args.model, load_file(s, "nanogpt", "model.py", "nanogpt_model")
    sizes = {"n_layer": m.n_layers, "n_head": m.n_heads, "n_embd": m.dim, "bias": False}
    config = module.GPTConfig(_rows(args)[1], m.vocab_size, dropout=0.0, **sizes)
    model = module.GPT(config).to(s.device)
    return model, model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), s.device.type)


def meta_lingua(s: Setting, mesh: DeviceMesh, args: Any) -> tuple[nn.Module, Any]:
    """github.com/facebookresearch/lingua: FSDP2 in bf16."""
    for name in ("xformers", "xformers.ops", "meta_lingua"):  # xformers is unused with sdpa
        sys.modules.setdefault(name, ModuleType(name))
    stand_in: Any = sys.modules["xformers.ops"]
    stand_in.fmha, stand_in.AttentionBias = ModuleType("fmha"), object
    for name in ("probe", "transformer"):
        module = load_file(s, "meta_lingua", f"lingua/{name}.py", f"meta_lingua.{name}")
        setattr(sys.modules["meta_lingua"], name, module)
    module = load_file(s, "meta_lingua", "apps/main/transformer.py", "meta_lingua_app")
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
    sizes = {key: getattr(args.model, key) for key in keys}
    with torch.device(s.device):
        model = module.LMTransformer(module.LMTransformerArgs(**sizes, max_seqlen=_rows(args)[1]))
        model.init_weights()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.tok_embeddings, *model.layers, model.output, model):
        whole = part in (model.output, model)
        fully_shard(part, mesh=mesh["dp_shard"], mp_policy=policy, reshard_after_forward=whole)
    return model, torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.033, fused=True)


def load_file(s: Setting, project: str, file: str, name: str) -> Any:
    """A file of another project as a module. Meta Lingua's package has the name of this one, and is
    called meta_lingua in it. Raises UserError where it was not prepared."""
    path = s.prepared / "projects" / project / file
    if not path.exists():
        raise UserError(f"{project}: not given; {project}=FOLDER names a clone of it")
    source = re.sub(r"^from lingua\b", "from meta_lingua", path.read_text(), flags=re.MULTILINE)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def _rows(args: Any) -> tuple[int, int]:
    return args.data.step_rows, args.data.seq_len
