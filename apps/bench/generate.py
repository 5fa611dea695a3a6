"""Tokens per second of generation, against transformers' `generate` on the same exported weights.

The model of the configuration with its initial weights, in float32, in one process: speed does not
depend on what the weights are. Both continue the same prompts greedily with a cache, in turns, so
that what else the machine does affects both equally. That they generate the same tokens shows that
they do the same work.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from apps.bench.report import Report, spread
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.checkpoint.save import save
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import load, to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.convert import ConvertArgs, export_checkpoint
from lingua.errors import UserError, import_optional
from lingua.format import align
from lingua.inference.generate import Request, generate
from lingua.inference.sampling import SamplingArgs
from lingua.init import init_parameters
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import DistributedArgs
from lingua.tokenizer import build_tokenizer

BATCHES, PROMPT_TOKENS = (1, 32), 64

Tokens = list[list[int]]


def measure(keys: list[str], repeats: int = 5) -> Report:
    """`keys` is the command line of the training program; `repeats` turns each are measured."""
    args, _ = load(TrainArgs, keys, foreign=META_LINGUA)
    launch = detect_launch()
    if launch.world_size != 1:
        raise UserError("generation is measured on one process")
    device = pick_device(args.device, launch)
    mesh = start(device, launch, DistributedArgs(model_dtype="fp32"))
    tokenizer = build_tokenizer(args.data.tokenizer)
    if args.model.vocab_size == -1:
        args.model.vocab_size = tokenizer.vocab_size
    n_new = args.data.seq_len - PROMPT_TOKENS
    if n_new < 1:
        raise UserError(f"data.seq_len = {args.data.seq_len}: must be above {PROMPT_TOKENS}")
    model = build(args).module
    init_parameters(model, args.seed, device)
    with TemporaryDirectory() as folder:
        exported = transformers_model(args, model, Path(folder)).to(device)
    draw = torch.Generator().manual_seed(args.seed)
    prompts = torch.randint(0, tokenizer.vocab_size, (max(BATCHES), PROMPT_TOKENS), generator=draw)
    settings = SamplingArgs(temperature=0.0, max_gen_tokens=n_new, stop_tokens=[])

    def ours(n: int) -> Tokens:
        requests = [Request(prompt, settings) for prompt in prompts[:n].tolist()]
        return [c.tokens for c in generate(model, requests, tokenizer, mesh, n)]

    def theirs(n: int) -> Tokens:
        ids = prompts[:n].to(device)
        found = exported.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return found[:, PROMPT_TOKENS:].tolist()

    heading = "tokens per second (median)", "here", "transformers", "ratio", "range", "equal tokens"
    rows: list[tuple[str, ...]] = [heading]
    results: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": n_new}
    for n in BATCHES:
        seconds, equal = take_turns(ours, theirs, n, repeats)
        speed = [spread([n * n_new / s for s in of]) for of in seconds]
        ratio = spread([theirs_s / ours_s for ours_s, theirs_s in zip(*seconds, strict=True)])
        results[f"batch_{n}"] = {"here": speed[0], "transformers": speed[1], "ratio": ratio}
        results[f"batch_{n}"]["equal_tokens"] = equal
        medians = (f"{s.median:,.0f}" for s in speed)
        bounds = f"{ratio.low:.2f} to {ratio.high:.2f}"
        rows.append((f"batch {n}", *medians, f"{ratio.median:.2f}", bounds, f"{equal:.2%}"))
    about = f"prompts of {PROMPT_TOKENS} tokens, {n_new} new ones, greedy, float32; {repeats} turns"
    return Report([*align(rows, left=1), "", about], results, device.type)


def take_turns(
    ours: Callable[[int], Tokens], theirs: Callable[[int], Tokens], n: int, repeats: int
) -> tuple[list[list[float]], float]:
    """Seconds of each turn of both, after one that is not measured; share of equal tokens."""
    seconds: list[list[float]] = [[], []]
    found: list[Tokens] = [[], []]
    for turn in range(repeats + 1):
        for i in (0, 1) if turn % 2 else (1, 0):
            begin = time.perf_counter()
            found[i] = (ours, theirs)[i](n)  # lists: the device is done
            if turn:
                seconds[i].append(time.perf_counter() - begin)
        print(f"batch {n}: turn {turn} of {repeats}", file=sys.stderr)
    equal = torch.tensor(found[0]) == torch.tensor(found[1])
    return seconds, equal.float().mean().item()


def transformers_model(args: TrainArgs, model: torch.nn.Module, folder: Path) -> Any:
    """The same weights, by way of a checkpoint and its export."""
    library = import_optional("transformers", "the measurement")
    save(folder / "ours", 1, tensors_of(model), {}, to_yaml(args))
    export_checkpoint(ConvertArgs(source=str(folder / "ours"), out=str(folder / "theirs")))
    theirs = library.AutoModelForCausalLM
    return theirs.from_pretrained(folder / "theirs", attn_implementation="sdpa")
