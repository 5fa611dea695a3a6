"""Numbers of a device and what they cost: attention, the loss and recurrences against float64, runs
against themselves and the CPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from apps.bench.gpu.prepare import (
    BF16,
    REFERENCES,
    RUN_STEPS,
    Setting,
    found,
    run_keys,
    text_keys,
    wrong,
)
from apps.bench.launch import read_config, read_lines, run
from apps.bench.promise import outcome
from apps.bench.recurrence import sides
from apps.bench.report import shown
from apps.main.transformer import build
from lingua.base.dump_dir import METRICS
from lingua.base.errors import UserError
from lingua.model.args import AttnImpl
from lingua.model.head import CHUNK_BYTES
from lingua.parallel.init import init_parameters
from lingua.tools.check import numbers as check
from lingua.tools.check.rates import median_s

# Heads, their features, tokens: those of llama_1B, and of a row that no block divides.
LLAMA, ODD, SMALL_ROW = (16, 128, 4096), (8, 64, 1000), (4, 32, 192)
# Heads that share keys, documents, window.
MASKS = ((1, False, None), (4, False, None), (1, True, None), (4, True, None), (4, False, 100))
# name: (its reference, keys, how far its losses may be from that, copies that must be equal)
RUNS = {
    "float32": ("plain", ["deterministic=true"], 1e-3, ["again", "stopped"]),
    "mesh": ("plain", ["deterministic=mesh"], 1e-3, ["again", "stopped"]),
    "bf16": ("plain", ["deterministic=true", BF16], 0.05, ["again"]),
    **{name: (name, [], 1e-3, []) for name in REFERENCES if name != "plain"},
}
SMALL_STEPS, SMALL_COPIES = 4, 3


def attention(s: Setting) -> str:
    """Every implementation, at llama_1B's heads and others."""
    cases = [(SMALL_ROW if s.small else LLAMA, *mask) for mask in MASKS] + [(ODD, 4, True, 100)]
    worst = dict[str, float]()
    for impl, (row, shared, documents, window) in product(get_args(AttnImpl)[1:], cases):
        torch.compiler.reset()
        case = check.AttentionCase(row[0], row[0] // shared, row[1], row[2], documents, window)
        mask = "documents" if documents else "a window" if window else "plain"
        name = f"{impl}, {mask}, {row[0]}/{case.kv_heads} heads of {row[1]}, {row[2]} tokens"
        try:
            multiple = judge(name, check.attention_errors(case, impl, s.device))
        except UserError as error:
            found(f"{impl} is refused", str(error))
            continue
        except RuntimeError as error:
            wrong("FAILED", f"{name}: {str(error)[-300:]}")
            continue
        work = check.attention_pass(case, impl, s.device, torch.bfloat16)[1]
        found(f"{name}: cost", alone(work, s))
        worst[impl] = max(worst.get(impl, 0.0), multiple)
    texts = ", ".join(f"{impl} {multiple:.2f}" for impl, multiple in worst.items())
    return f"at most so many times the errors of a plain path in bf16: {texts}"


def loss(s: Setting) -> str:
    """The head and its loss at llama_1B's sizes, beside torch's of all logits."""
    chunk, texts = CHUNK_BYTES // (4 * 131072), list[str]()  # positions of a small size
    sizes = (chunk + chunk // 4, 16, 131072) if s.small else (16384, 2048, 128256)
    for dtype, compiled in product((torch.bfloat16, torch.float32), (False, True)[: 1 + s.compile]):
        torch.compiler.reset()
        name, case = f"{dtype}{', compiled' * compiled}", check.LossCase(*sizes, compiled)
        multiple = judge(name, check.loss_errors(case, s.device, dtype))
        (x, weight, targets, _), work = check.loss_pass(case, s.device, dtype)

        def plain(x: Tensor = x, weight: Tensor = weight, targets: Tensor = targets) -> Tensor:
            return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

        logits: Any = torch.compile(plain) if compiled else plain
        grads = lambda logits=logits, at=(x, weight): torch.autograd.grad(logits(), at)  # noqa: E731
        cost, beside = found(f"{name}: cost", alone(work, s)), alone(grads, s)
        found(f"{name}: cost of F.cross_entropy", beside)
        texts.append(f"{name} {multiple:.2f}, {shown(cost['ms'])} ms for {shown(beside['ms'])}")
    return f"errors over those of a plain path, time for F.cross_entropy's: {'; '.join(texts)}"


def alone(work: Callable[[], object], s: Setting) -> dict[str, float | None]:
    """Milliseconds of a call, and GiB at its peak beyond what is allocated before."""
    ms = 1000 * median_s(work, s.device, 3 if s.small else 8)
    if s.device.type == "cpu":
        return {"ms": ms, "GiB": None}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return {"ms": ms, "GiB": (torch.cuda.max_memory_allocated() - before) / 2**30}


def judge(name: str, errors: check.Errors) -> float:
    """Report errors; the largest of them, as a multiple of the plain one."""
    found(name, {"errors": errors.multiples, "same bits twice": errors.same_bits})
    if not errors.right:
        wrong("TOO FAR", name)
    return max(errors.multiples)


def recurrences(s: Setting) -> str:
    """Scans against loops, and how many initial weights differ from the CPU's."""
    worst, cpu = 0.0, torch.device("cpu")
    for name, n, loop in (("scan", 1000, "loop"), ("ssd", 300, "ssd loop")):
        got = [t.cpu() for t in sides(n, 4, 16, s.device)[name]()]
        exact, plain = (sides(n, 4, 16, cpu, t)[loop]() for t in (torch.float64, torch.float32))
        # Parts are added in another order than a loop's, so the bound is twice as wide.
        errors = [multiple / 2 for multiple in check.multiples(got, exact, plain)]
        worst = max(worst, judge(f"{name}, half of its multiples", check.Errors(errors, True)))
    models = [
        build(read_config([*REFERENCES["plain"], *text_keys(s.prepared)])).module for _ in "ab"
    ]
    for model, device in zip(models, (cpu, s.device), strict=True):
        init_parameters(model, 0, device)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    n = found("initial weights that differ", sum(int((a != b.cpu()).sum()) for a, b in pairs))
    return f"at most {2 * worst:.2f} times the errors of a loop; {n} initial weights differ"


def bits(s: Setting) -> str:
    n, worst = SMALL_STEPS if s.small else RUN_STEPS, 0.0
    others = set[str]()  # versions of torch by which the CPU's losses are, where not by this one

    def train(copy: tuple[str, str]) -> tuple[list[str], str]:
        folder = s.work / ", ".join(copy)
        reference, keys, _, _ = RUNS[copy[0]]
        words = [*run_keys(reference, n), *text_keys(s.prepared), *keys, f"device={s.device.type}"]
        words += [f"distributed.compile={str(s.compile and BF16 in keys).lower()}"]
        try:
            for stop in [f"stop_at={n // 2}", f"stop_at={n}"][copy[1] != "stopped" :]:
                run("apps.main.train", [*words, stop, f"dump_dir={folder}"])
            return outcome(folder)
        except UserError as error:
            wrong("FAILED", f"{folder.name}: {str(error)[-300:]}")
            return [""] * n, ""

    copies = [(name, copy) for name in RUNS for copy in ("first", *RUNS[name][3])]
    copies = copies[: SMALL_COPIES if s.small else None]
    with ThreadPoolExecutor(len(copies) if s.device.type == "cuda" else 1) as pool:
        outcomes = dict(zip(copies, pool.map(train, copies), strict=True))
    for (name, copy), (lines, tensors) in outcomes.items():
        expected_lines, expected_tensors = outcomes[name, "first"]
        equal = sum(a == b for a, b in zip(lines, expected_lines, strict=True))
        found(f"{name}, {copy}: equal lines, equal tensors", [equal, tensors == expected_tensors])
        if equal < n or tensors != expected_tensors:
            wrong("DIFFERS", f"{name}, {copy}, from the first")
    for name, (reference, keys, bound, _) in RUNS.items() if not s.small else ():
        if outcomes[name, "first"][1] == "":
            continue  # it failed
        ours = read_lines(s.work / f"{name}, first" / METRICS)
        path = s.prepared / "reference" / f"{reference}.jsonl"
        expected, version = read_lines(path), path.with_suffix(".torch")
        by = version.read_text("utf-8") if version.exists() else torch.__version__
        others |= {by.partition("+")[0]} - {torch.__version__.partition("+")[0]}
        pairs = list(zip(ours, expected, strict=True))
        apart = [abs(a["loss"] / b["loss"] - 1) for a, b in pairs]
        found(f"{name}: losses apart from the CPU's, the first and at most", [apart[0], max(apart)])
        worst = max(worst, max(apart) if BF16 not in keys else 0.0)
        if not all(a < bound for a in apart):
            wrong("TOO FAR", f"{name} from the CPU's losses")
        if any(a["batch_hash"] != b["batch_hash"] for a, b in pairs):
            wrong("DIFFERS", f"{name}: batches from the CPU's")
    beside = "" if s.small else f"; losses in float32 at most {worst:.1e} from the CPU's"
    if others:
        found("the CPU's losses are by torch", sorted(others))
        beside += f", by torch {', '.join(sorted(others))}"
    return f"{len(copies)} runs, copies compared to the bit{beside}"
