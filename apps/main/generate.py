"""Generate text from a checkpoint:

    python -m apps.main.generate ckpt=runs/debug prompt="def main("       streamed to the terminal
    python -m apps.main.generate ckpt=runs/debug prompts=FILE out=results.jsonl temperature=0
    python -m apps.main.generate ckpt=runs/debug                          one prompt after the other
    torchrun --nproc-per-node 2 -m apps.main.generate ... distributed.tp_size=2

FILE has a prompt a line; a .jsonl file has objects {"prompt": text} that may also say `id`, `seed`
and the sampling keys for themselves. Data-parallel ranks divide the prompts among themselves. The
text does not depend on the topology, nor on what else is generated.
"""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from omegaconf import MISSING
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import named_app
from lingua.config.load import load
from lingua.config.schema import Free
from lingua.errors import UserError, nearest
from lingua.inference.generate import Completion, Request, fit_prompt, generate
from lingua.inference.sampling import SamplingArgs
from lingua.inference.trained import open_trained
from lingua.monitor.logger import init_logger
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import DistributedArgs, divide, dp_degree, dp_rank, on_rank_0
from lingua.parallel.program import run_program
from lingua.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class GenerateArgs(SamplingArgs):
    ckpt: Free[str] = MISSING  # a checkpoint's folder, or a run's: its newest checkpoint
    app: Free[str | None] = None  # import path of its app; null: the one that it names
    prompt: Free[str | None] = None  # one prompt
    prompts: Free[str | None] = None  # file of prompts, a line each, or .jsonl; null: see prompt
    out: Free[str | None] = None  # .jsonl file to write the results to; null: the terminal
    batch_size: Free[int] = 32  # prompts of one forward on each data-parallel rank
    context: Free[int | None] = None  # tokens of prompt and result; null: data.seq_len of the run
    # a prompt that leaves no room in the context for max_gen_tokens: cut it on the left, or stop
    on_long_prompt: Free[Literal["cut", "refuse"]] = "cut"
    seed: Free[int] = 0  # prompt i, from 0 on, draws with seed + i
    tokenizer_path: Free[str | None] = None  # where the tokenizer lies now; null: where it lay
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    distributed: DistributedArgs = field(
        default_factory=lambda: DistributedArgs(model_dtype="fp32")
    )

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if self.prompt is not None and self.prompts is not None:
            yield "prompt", "must not be given together with prompts"
        if self.batch_size < 1:
            yield "batch_size", "must be at least 1"
        if self.out is not None and Path(self.out).exists():
            yield "out", "is there already; must be a new file"


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user gave it."""

    text: str
    settings: SamplingArgs
    seed: int
    where: str  # for messages
    extra: dict[str, Any] = field(default_factory=dict)  # what is only handed on to the result


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, _ = load(GenerateArgs, argv)
    launch = detect_launch()
    device = pick_device(args.device, launch)
    mesh = start(device, launch, args.distributed, deterministic=False)
    init_logger(None, dist.get_rank())

    # ---- what can be wrong, before the model is loaded
    trained = open_trained("ckpt", args.ckpt, named_app(argv))
    tokenizer = trained.build_tokenizer(args.tokenizer_path)
    data = trained.args.data
    context = args.context or data.seq_len
    prompts = list(read_prompts(args))
    requests = to_requests(args, prompts, tokenizer, data.add_bos, context)
    on_rank_0(lambda: write_results(args.out, [], [], mode="x"))

    model = trained.load(args.distributed, mesh, device)
    if prompts:
        answer_all(args, prompts, requests, model, tokenizer, mesh)
    else:
        converse(args, model, tokenizer, mesh, data.add_bos, context)


def answer_all(
    args: GenerateArgs,
    prompts: list[Prompt],
    requests: list[Request],
    model: nn.Module,
    tokenizer: Tokenizer,
    mesh: DeviceMesh,
) -> None:
    """Generate for every prompt; results are written as they come, in the order of the prompts."""
    chunk = 8 * args.batch_size * dp_degree(mesh)
    show = None
    if args.out is None and len(prompts) == 1 and dist.get_rank() == 0:
        print(prompts[0].text, end="", flush=True)
        show = show_text

    def answer(mine: list[Request]) -> list[Completion]:
        return generate(model, mine, tokenizer, mesh, args.batch_size, show)

    for first in range(0, len(requests), chunk):
        part = requests[first : first + chunk]
        done = divide(answer, part, mesh)
        of_part = prompts[first : first + chunk]
        on_rank_0(lambda of_part=of_part, done=done: write_results(args.out, of_part, done))
        if dist.get_rank() == 0 and args.out is None:
            for prompt, result in zip(of_part, done, strict=True):
                print("" if show else f"--- {prompt.text}{result.text}", flush=True)
        elif len(requests) > chunk:
            logger.info(f"{first + len(part)} of {len(requests)} prompts are done")


def converse(
    args: GenerateArgs,
    model: nn.Module,
    tokenizer: Tokenizer,
    mesh: DeviceMesh,
    add_bos: bool,
    context: int,
) -> None:
    """Prompts from the terminal, each generated by itself, until the input ends."""
    number = 0
    while (line := on_rank_0(ask)) is not None:
        try:
            prompt = Prompt(line, args, args.seed + number, f"prompt {number + 1}")
            requests = to_requests(args, [prompt], tokenizer, add_bos, context)
        except UserError as error:
            logger.info(str(error))
            continue
        mine = requests if dp_rank(mesh) == 0 else []
        [result] = generate(model, mine, tokenizer, mesh, 1, show_text) or [None]
        on_rank_0(lambda p=prompt, r=result: write_results(args.out, [p], [r]))
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
    """The prompts that were given. UserError names the line of one that is none."""
    if args.prompt is not None:
        yield Prompt(args.prompt, args, args.seed, "prompt")
    if args.prompts is None:
        return
    path = Path(args.prompts)
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(
            f"prompts = {path}: cannot be read ({error.strerror}); must be a file with a prompt a "
            "line, or .jsonl"
        ) from None
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise UserError(f"prompts = {path}: has no prompt")
    for number, raw in enumerate(lines):
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


NUMBER = (int, float)
# Keys of a .jsonl line and the types of their values.
KEYS: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "id": (str, int),
    "seed": (int,),
    "temperature": NUMBER,
    "top_k": (int, type(None)),
    "top_p": (*NUMBER, type(None)),
    "max_gen_tokens": (int,),
    "stop": (list,),
    "stop_tokens": (list, type(None)),
}
ELEMENTS = {"stop": str, "stop_tokens": int}


def read_object(line: str, args: GenerateArgs, seed: int, where: str) -> Prompt:
    """A line of a .jsonl file; what it says of sampling holds for it alone."""
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
        if fits and key in ELEMENTS and value is not None:
            fits = all(isinstance(v, ELEMENTS[key]) for v in value)
        if not fits:
            raise UserError(f"{where}: {key} = {json.dumps(value)}: has the wrong type")
    own = {f.name: given[f.name] for f in fields(SamplingArgs) if f.name in given}
    plain = {f.name: getattr(args, f.name) for f in fields(SamplingArgs)}
    settings = SamplingArgs(**(plain | own))
    for key, need in settings.validate():
        raise UserError(f"{where}: {key} = {json.dumps(getattr(settings, key))}: {need}")
    extra = {"id": given["id"]} if "id" in given else {}
    return Prompt(given["prompt"], settings, given.get("seed", seed), where, extra)


def to_requests(
    args: GenerateArgs,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    add_bos: bool,
    context: int,
) -> list[Request]:
    """The prompts as tokens, each with room for what is to come."""
    requests, n_cut = [], 0
    for prompt in prompts:
        try:
            tokens = tokenizer.encode(prompt.text, bos=add_bos).tolist()
        except UnicodeEncodeError:
            raise UserError(f"{prompt.where}: holds half a surrogate pair, no character") from None
        if not tokens:
            raise UserError(f"{prompt.where}: is empty, and documents of this model have no bos")
        whole = Request(tokens, prompt.settings, prompt.seed)
        requests.append(fit_prompt(whole, context, args.on_long_prompt, prompt.where))
        n_cut += requests[-1] is not whole
    if n_cut:
        logger.warning(
            f"{n_cut} of {len(prompts)} prompts are cut on the left: with max_gen_tokens they are "
            f"longer than the context of {context} tokens"
        )
    return requests


def write_results(
    path: str | None, prompts: Sequence[Prompt], results: Sequence[Completion], mode: str = "a"
) -> None:
    """A line of JSON for each."""
    if path is None:
        return
    try:
        with Path(path).open(mode, encoding="utf-8") as file:
            for prompt, result in zip(prompts, results, strict=True):
                line = prompt.extra | {"prompt": prompt.text, "text": result.text}
                line |= {"finish": result.finish, "seed": prompt.seed}
                line |= {"tokens": result.tokens, "logprobs": result.logprobs}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"out = {path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    run_program(main)
