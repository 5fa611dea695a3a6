"""Tokens per second of generation, against transformers' `generate` on the same exported weights.

The model has its initial weights, since speed does not depend on what they are. Both continue the
same prompts greedily with a cache. Equal tokens show that they do the same work.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from apps.bench.launch import read_config
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import take_turns
from apps.main.transformer import build
from lingua.base.errors import UserError, import_optional
from lingua.checkpoint.save import save
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import to_yaml
from lingua.model.generate import Request, generate
from lingua.model.sampling import SamplingArgs
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.tokenizer.build import build_tokenizer
from lingua.tools.exchange.convert import ConvertArgs, convert

BATCHES, PROMPT_TOKENS = (1, 32), 64


def measure(
    keys: list[str], repeats: int, seen: Callable[[dict[str, Any]], object] = lambda row: None
) -> Report:
    """`seen` is called with each row as it is measured."""
    args = read_config(keys)
    device = pick_device(args.device, detect_launch())
    args.distributed.compile = False
    mesh = start(device, detect_launch(), args.distributed)
    # Of all of the model's tokens, as transformers takes.
    tokenizer = replace(build_tokenizer(args.data.tokenizer), vocab_size=args.model.vocab_size)
    if (n_new := args.data.seq_len - PROMPT_TOKENS) < 1:
        raise UserError(f"data.seq_len = {args.data.seq_len}: must be above {PROMPT_TOKENS}")
    model = build(args).module
    init_parameters(model, args.seed, device)
    model.to(args.distributed.dtype)
    causal = import_optional("transformers", "the measurement").AutoModelForCausalLM
    with TemporaryDirectory() as folder:
        save(Path(folder) / "ours", 1, tensors_of(model), {}, to_yaml(args))
        convert(ConvertArgs(source=f"{folder}/ours", out=f"{folder}/theirs"))
        words = {"attn_implementation": "sdpa", "dtype": "auto"}
        exported = causal.from_pretrained(f"{folder}/theirs", **words).to(device)
    draw = torch.Generator().manual_seed(args.seed)
    prompts = torch.randint(0, tokenizer.vocab_size, (max(BATCHES), PROMPT_TOKENS), generator=draw)
    settings = SamplingArgs(temperature=0.0, max_gen_tokens=n_new, stop_tokens=[])

    def here(n: int) -> list[list[int]]:
        requests = [Request(prompt, settings) for prompt in prompts[:n].tolist()]
        return [c.tokens for c in generate(model, requests, tokenizer, mesh, n)]

    def transformers(n: int) -> list[list[int]]:
        ids = prompts[:n].to(device)
        out = exported.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return out[:, PROMPT_TOKENS:].tolist()

    rows: list[dict[str, Any]] = []
    for n in BATCHES:
        # What both return are lists, so the device is done.
        sides = {"here": partial(here, n), "transformers": partial(transformers, n)}
        turns = take_turns(sides, repeats, f"batch {n}")
        speed = {side: spread(n * n_new / s for s in turns[side].seconds) for side in sides}
        ratio = quotients(turns["transformers"].seconds, turns["here"].seconds)
        ours, theirs = (torch.tensor(turns[side].results[-1]) for side in sides)
        equal = (ours == theirs).float().mean().item()
        rows.append({"batch": n, **speed, "ratio": ratio, "equal tokens": equal})
        seen(rows[-1])
    dtype = str(args.distributed.dtype)[6:]
    about = f"prompts of {PROMPT_TOKENS} tokens, {n_new} new ones, greedy, {dtype}; {repeats} turns"
    return Report(rows, ["here, transformers: new tokens per second", about])
