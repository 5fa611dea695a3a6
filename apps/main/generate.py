"""Generate text from a checkpoint:

    python -m apps.main.generate ckpt=runs/debug prompt="def main("       streamed to the terminal
    python -m apps.main.generate ckpt=runs/debug prompts=FILE out=results.jsonl temperature=0
    python -m apps.main.generate ckpt=runs/debug                          asks for prompts
    torchrun --nproc-per-node 2 -m apps.main.generate ... distributed.tp_size=2

FILE has a prompt a line; a .jsonl file has objects {"prompt": text}, which may set `id`, `seed` and
the sampling keys for themselves. Data-parallel ranks divide the prompts among themselves. The text
depends neither on the topology nor on the other prompts.
"""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from apps.main.opened import OpenArgs, Opened, open_checkpoint
from lingua.config.load import load
from lingua.config.schema import Free
from lingua.errors import UserError, nearest
from lingua.inference.generate import Completion, Request, fit_prompt, generate
from lingua.inference.sampling import SamplingArgs
from lingua.parallel.mesh import divide, dp_degree, dp_rank, on_rank_0
from lingua.parallel.program import run_program

logger = logging.getLogger(__name__)


@dataclass
class GenerateArgs(SamplingArgs, OpenArgs):
    prompt: Free[str | None] = None  # one prompt
    prompts: Free[str | None] = None  # file of prompts, a line each, or .jsonl; null: see prompt
    out: Free[str | None] = None  # new .jsonl file for the results; null: the terminal
    batch_size: Free[int] = 32  # prompts of one forward on each data-parallel rank
    # a prompt that leaves no room in the context for max_gen_tokens: cut it on the left, or stop
    on_long_prompt: Free[Literal["cut", "refuse"]] = "cut"
    seed: Free[int] = 0  # prompt i, from 0 on, is sampled with seed + i

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from SamplingArgs.validate(self)
        yield from OpenArgs.validate(self)
        if self.prompt is not None and self.prompts is not None:
            yield "prompt", "must not be given together with prompts"
        if self.batch_size < 1:
            yield "batch_size", "must be at least 1"
        if self.out is not None and Path(self.out).exists():
            yield "out", "exists already; must be a new file"


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user gave it."""

    text: str
    settings: SamplingArgs
    seed: int
    where: str  # for messages
    id: str | int | None = None  # copied to the result


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, _ = load(GenerateArgs, argv)
    opened = open_checkpoint(args, argv)
    prompts = list(read_prompts(args))
    requests = to_requests(args, prompts, opened)
    on_rank_0(lambda: write_results(args.out, [], [], mode="x"))
    model = opened.trained.load(args.distributed, opened.mesh, opened.device)
    if prompts:
        complete_all(args, prompts, requests, model, opened)
    else:
        complete_interactively(args, model, opened)


def complete_all(
    args: GenerateArgs,
    prompts: list[Prompt],
    requests: list[Request],
    model: nn.Module,
    opened: Opened,
) -> None:
    """Write the result of every prompt, in the order of the prompts, a chunk of them at a time."""
    chunk = 8 * args.batch_size * dp_degree(opened.mesh)
    show = None
    if args.out is None and len(prompts) == 1 and dist.get_rank() == 0:
        print(prompts[0].text, end="", flush=True)
        show = show_text

    def complete(mine: list[Request]) -> list[Completion]:
        return generate(model, mine, opened.tokenizer, opened.mesh, args.batch_size, show)

    for first in range(0, len(requests), chunk):
        part = prompts[first : first + chunk]
        done = divide(complete, requests[first : first + chunk], opened.mesh)
        on_rank_0(lambda part=part, done=done: write_results(args.out, part, done))
        if dist.get_rank() == 0 and args.out is None:
            for prompt, result in zip(part, done, strict=True):
                print("" if show else f"--- {prompt.text}{result.text}", flush=True)
        elif len(requests) > chunk:
            logger.info(f"{first + len(part)} of {len(requests)} prompts are done")


def complete_interactively(args: GenerateArgs, model: nn.Module, opened: Opened) -> None:
    """Complete prompts from the terminal, one at a time, until the input ends."""
    if dist.get_rank() == 0:
        checkpoint = opened.trained.checkpoint
        print(f"{checkpoint.path}: enter a prompt (\\n is a new line); Ctrl-D ends the program")
    number = 0
    while (line := on_rank_0(ask)) is not None:
        try:
            prompt = Prompt(line, args, args.seed + number, f"prompt {number + 1}")
            requests = to_requests(args, [prompt], opened)
        except UserError as error:
            logger.info(str(error))
            continue
        mine = requests if dp_rank(opened.mesh) == 0 else []
        done = generate(model, mine, opened.tokenizer, opened.mesh, 1, show_text)
        on_rank_0(lambda prompt=prompt, done=done: write_results(args.out, [prompt], done))
        if dist.get_rank() == 0:
            print(flush=True)
        number += 1


def ask() -> str | None:
    try:
        return input("> ").replace("\\n", "\n")
    except EOFError:
        return None


def show_text(index: int, text: str) -> None:
    if dist.get_rank() == 0:
        print(text, end="", flush=True)


# ----------------------------------------------------------------------------- prompts and results


def read_prompts(args: GenerateArgs) -> Iterator[Prompt]:
    """The prompts of the configuration. UserError names the line of a prompt that is not valid."""
    if args.prompt is not None:
        yield Prompt(args.prompt, args, args.seed, "prompt")
    if args.prompts is None:
        return
    path = Path(args.prompts)
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(
            f"prompts = {path}: cannot be read ({error.strerror}); must be a file with a prompt a "
            "line, or .jsonl"
        ) from None
    if not content:
        raise UserError(f"prompts = {path}: has no prompt")
    for number, raw in enumerate(content.removesuffix(b"\n").split(b"\n")):
        where = f"{path}:{number + 1}"
        try:
            line = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: is not UTF-8 text (byte {error.start})") from None
        if not line.strip():
            raise UserError(f"{where}: is blank; must be a prompt")
        if path.suffix == ".jsonl":
            yield read_object(line, args, args.seed + number, where)
        else:
            yield Prompt(line, args, args.seed + number, where)


# Keys of a .jsonl line, the types of their values, and of the elements of lists.
KEYS: dict[str, Any] = {
    "prompt": str,
    "id": str | int,
    "seed": int,
    "temperature": int | float,
    "top_k": int | None,
    "top_p": int | float | None,
    "max_gen_tokens": int,
    "stop": list,
    "stop_tokens": list | None,
}
ELEMENTS = {"stop": str, "stop_tokens": int}


def read_object(line: str, args: GenerateArgs, seed: int, where: str) -> Prompt:
    """A line of a .jsonl file; its sampling keys replace those of `args`."""
    try:
        given = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON ({error})") from None
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        raise UserError(f'{where}: must be an object with a text "prompt"')
    for key, value in given.items():
        if key not in KEYS:
            raise UserError(f"{where}: unknown key {key}{nearest(key, KEYS)}")
        fits = isinstance(value, KEYS[key]) and not isinstance(value, bool)
        if isinstance(value, list):
            fits = fits and all(isinstance(v, ELEMENTS[key]) for v in value)
        if not fits:
            raise UserError(f"{where}: {key} = {json.dumps(value)}: has the wrong type")
    names = [f.name for f in fields(SamplingArgs)]
    settings = SamplingArgs(**{name: given.get(name, getattr(args, name)) for name in names})
    for key, need in settings.validate():
        raise UserError(f"{where}: {key} = {json.dumps(getattr(settings, key))}: {need}")
    return Prompt(given["prompt"], settings, given.get("seed", seed), where, given.get("id"))


def to_requests(args: GenerateArgs, prompts: Sequence[Prompt], opened: Opened) -> list[Request]:
    """The prompts as tokens; each leaves room in the context for what is generated."""
    requests, n_cut = [], 0
    for prompt in prompts:
        try:
            tokens = opened.tokenizer.encode(prompt.text, bos=opened.add_bos).tolist()
        except UnicodeEncodeError:
            raise UserError(f"{prompt.where}: has half a surrogate pair, no character") from None
        if not tokens:
            raise UserError(f"{prompt.where}: is empty, and documents of this model have no bos")
        whole = Request(tokens, prompt.settings, prompt.seed)
        requests.append(fit_prompt(whole, opened.context, args.on_long_prompt, prompt.where))
        n_cut += requests[-1] is not whole
    if n_cut:
        logger.warning(
            f"{n_cut} of {len(prompts)} prompts cut on the left: with max_gen_tokens they are "
            f"longer than the context of {opened.context} tokens"
        )
    return requests


def write_results(
    path: str | None, prompts: Sequence[Prompt], results: Sequence[Completion], mode: str = "a"
) -> None:
    """Write a line of JSON for each result, if there is a file for them."""
    if path is None:
        return
    try:
        with Path(path).open(mode, encoding="utf-8") as file:
            for prompt, result in zip(prompts, results, strict=True):
                line = {} if prompt.id is None else {"id": prompt.id}
                line |= {"prompt": prompt.text, "text": result.text, "finish": result.finish}
                line |= {"seed": prompt.seed, "tokens": result.tokens, "logprobs": result.logprobs}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"out = {path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    run_program(main)
