"""Generate text from a checkpoint:

    python -m apps.main.generate ckpt=runs/debug prompt="def main("
    python -m apps.main.generate ckpt=runs/debug prompts=prompts.txt out=results.jsonl temperature=0
    torchrun --nproc-per-node 2 -m apps.main.generate ckpt=runs/debug distributed.tp_size=2
    python -m apps.main.generate ckpt=runs/debug-sft chat=true system="Answer briefly."

Without prompts it asks for them. prompts.txt has a prompt a line; a .jsonl file has objects
{"prompt": text}, which may set `id`, `seed` and the sampling keys for themselves. Data-parallel
ranks divide the prompts among themselves. The text depends neither on the topology nor on the other
prompts. With `chat` a prompt is the message of a user, in the chat template of the model's
tokenizer; without prompts it keeps the conversation.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson
import torch.distributed as dist
from torch import nn

from lingua.base.errors import UserError
from lingua.base.files import append_whole, read_bytes
from lingua.base.format import printable
from lingua.config.load import from_values, load
from lingua.config.schema import MAX_ROWS, Free, bounds
from lingua.model.generate import Completion, Request, fit_prompts, generate
from lingua.model.sampling import SamplingArgs
from lingua.parallel.mesh import dp_degree, on_rank_0
from lingua.parallel.program import run_program
from lingua.tools.chat_template import Chat, Message, open_chat
from lingua.tools.exchange.trained import OpenArgs, Opened, open_model

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
    chat: Free[bool] = False  # prompts are messages, which the model's chat template renders
    system: Free[str | None] = None  # system message of the chat

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from SamplingArgs.validate(self)
        yield from OpenArgs.validate(self)
        if self.system is not None and not self.chat:
            yield "system", "must be given together with chat=true"
        if self.prompt is not None and self.prompts is not None:
            yield "prompt", "must not be given together with prompts"
        yield from bounds(self, 1, "batch_size", maximum=MAX_ROWS)
        # An empty file is what a start leaves that ends before its first result.
        out = self.out
        if out and os.path.exists(out) and (not os.path.isfile(out) or os.path.getsize(out) > 0):
            yield "out", "exists already; must be a new file"


@dataclass
class PromptArgs(SamplingArgs):
    """The keys that a line of a .jsonl file may set."""

    seed: Free[int] = 0
    id: Free[Any] = None  # text or a whole number, copied to the result

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if self.id is not None and type(self.id) not in (str, int):
            yield "id", "must be text, a whole number or null"


@dataclass(frozen=True)
class Prompt:
    text: str
    args: PromptArgs
    where: str  # for messages
    before: tuple[Message, ...] = ()  # earlier messages of a chat

    @property
    def messages(self) -> list[Message]:
        return [*self.before, {"role": "user", "content": self.text}]


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, _ = load(GenerateArgs, argv, program_doc=__doc__)
    opened = open_model(args, argv)
    data = opened.trained.args.data
    template = data.chat.template if data.chat else None  # None: that of the tokenizer
    chat = open_chat(data.tokenizer, opened.tokenizer, template) if args.chat else None
    system = () if args.system is None else ({"role": "system", "content": args.system},)
    prompts = [replace(prompt, before=system) for prompt in read_prompts(args)]
    requests = to_requests(prompts, opened, args.on_long_prompt, chat)
    on_rank_0(lambda: write_generations(args.out, [], []))  # whether it can be written
    model = opened.trained.load(args.distributed, opened.mesh)
    if not prompts:
        complete_interactively(args, model, opened, chat, system)
        return
    streamed = len(prompts) == 1 and args.out is None
    if streamed:
        print_on_rank_0("" if chat else prompts[0].text)
        requests = [replace(requests[0], on_text=print_on_rank_0)]
    chunk = 8 * args.batch_size * dp_degree(opened.mesh)  # prompts between two writes of results
    for first in range(0, len(prompts), chunk):
        part, asked = prompts[first : first + chunk], requests[first : first + chunk]
        done = generate(model, asked, opened.tokenizer, opened.mesh, args.batch_size)
        on_rank_0(partial(write_generations, args.out, part, done))
        if args.out is None:
            for prompt, result in zip(part, done, strict=True):
                between = "\n" if chat else ""
                whole = f"--- {prompt.text}{between}{result.text}\n"
                print_on_rank_0("\n" if streamed else whole)
        elif len(prompts) > chunk:
            logger.info(f"{first + len(part)} of {len(prompts)} prompts are done")


def complete_interactively(
    args: GenerateArgs,
    model: nn.Module,
    opened: Opened,
    chat: Chat | None,
    before: tuple[Message, ...],
) -> None:
    """Complete prompts from the terminal, one at a time, until the input ends. In a chat, `before`
    and then all that was said precede a prompt."""
    print_on_rank_0(
        f"{opened.trained.source}: enter a prompt (\\n is a new line)\n"
        "Ctrl-C ends a generation; Ctrl-C or Ctrl-D at the prompt ends the program\n"
    )
    number = 0
    while (line := on_rank_0(ask)) is not None:
        prompt = Prompt(line, prompt_args(args, number), f"prompt {number + 1}", before)
        try:
            if chat is not None:
                prompt = forget(prompt, opened, chat)
            [request] = to_requests([prompt], opened, args.on_long_prompt, chat)
        except UserError as error:
            logger.info(str(error))
            continue
        request = replace(request, on_text=print_on_rank_0)
        number += 1
        try:
            done = generate(model, [request], opened.tokenizer, opened.mesh, batch_size=1)
            on_rank_0(partial(write_generations, args.out, [prompt], done))
            if chat is not None:
                answer = {"role": "assistant", "content": done[0].text.strip()}
                before = (*prompt.messages, answer)
        except KeyboardInterrupt:
            if dist.get_world_size() > 1:  # ranks are interrupted at different places
                raise
        print_on_rank_0("\n")


def forget(prompt: Prompt, opened: Opened, chat: Chat) -> Prompt:
    """The prompt without as many of the oldest exchanges of its chat as the context has no room
    for; the system message stays."""
    room = opened.context - prompt.args.max_gen_tokens
    n_system, n = len(prompt.before) % 2, len(prompt.before)
    while len(prompt.before) > n_system and len(chat.prompt(prompt.messages, prompt.where)) > room:
        rest = prompt.before[n_system + 2 :]
        prompt = replace(prompt, before=prompt.before[:n_system] + rest)
    if len(prompt.before) < n:
        logger.info("the context is full: the oldest messages are left out")
    return prompt


def ask() -> str | None:
    try:
        return input("> ").replace("\\n", "\n")
    except UnicodeDecodeError:
        raise UserError("the input is not UTF-8 text; must be a prompt a line") from None
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def print_on_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


# ----------------------------------------------------------------------------- prompts and results


def prompt_args(args: GenerateArgs, number: int) -> PromptArgs:
    """The settings of prompt `number`, from 0 on, if it sets none for itself."""
    settings = {f.name: getattr(args, f.name) for f in fields(SamplingArgs)}
    return PromptArgs(**settings, seed=args.seed + number)


def read_prompts(args: GenerateArgs) -> list[Prompt]:
    """The prompts of the configuration. UserError names the line of a prompt that is not valid."""
    if args.prompt is not None:
        return [Prompt(args.prompt, prompt_args(args, 0), "prompt")]
    if args.prompts is None:
        return []
    path = Path(args.prompts)
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}); must be a text file or a .jsonl file"
        raise UserError(f"prompts = {path}: {why}") from None
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n")
        raise UserError(f"{path}:{number + 1}: is not UTF-8 text") from None
    if not text:
        raise UserError(f"prompts = {path}: has no prompt")
    read_line = read_json_prompt if path.suffix == ".jsonl" else Prompt
    prompts = []
    for number, line in enumerate(text.replace("\r\n", "\n").removesuffix("\n").split("\n")):
        where = f"{path}:{number + 1}"
        if not line.strip():
            raise UserError(f"{where}: is blank; must be a prompt")
        prompts.append(read_line(line, prompt_args(args, number), where))
    return prompts


def read_json_prompt(line: str, args: PromptArgs, where: str) -> Prompt:
    """A line of a .jsonl file; its keys replace those of `args`."""
    try:
        values = orjson.loads(line)  # refuses NaN, half a surrogate pair and endless numbers
        if not isinstance(values, dict) or not isinstance(text := values.pop("prompt", None), str):
            raise UserError(f'{where}: must be an object with a text "prompt"')
        return Prompt(text, from_values(args, values, where), where)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply") from None


def to_requests(
    prompts: Sequence[Prompt], opened: Opened, on_long_prompt: str, chat: Chat | None
) -> list[Request]:
    """The prompts as tokens; each leaves room in the context for what is generated."""
    requests = []
    for prompt in prompts:
        try:
            if chat is not None:
                tokens = chat.prompt(prompt.messages, prompt.where)
            else:
                tokens = opened.tokenizer.encode(prompt.text, bos=opened.add_bos).tolist()
        except UnicodeEncodeError:
            raise UserError(f"{prompt.where}: has half a surrogate pair, no character") from None
        if not tokens:
            raise UserError(f"{prompt.where}: is empty, and documents of this model have no bos")
        if (highest := max(prompt.args.stop_tokens or [0])) >= opened.tokenizer.vocab_size:
            n = opened.tokenizer.vocab_size
            raise UserError(
                f"{prompt.where}: stop_tokens: {highest} is no token; must be below {n}, the "
                f"number of tokens of the {opened.tokenizer.name} tokenizer"
            )
        room = opened.context - prompt.args.max_gen_tokens
        # A chat that is cut on the left has lost what its template begins with.
        if (on_long_prompt == "refuse" or chat is not None) and len(tokens) > room:
            advice = "" if chat else "; on_long_prompt=cut cuts it on the left"
            raise UserError(
                f"{prompt.where}: has {len(tokens)} tokens; must have at most {room}, the context "
                f"of {opened.context} less max_gen_tokens{advice}"
            )
        settings = prompt.args
        if chat is not None:
            settings = chat.until_turn_end(settings, opened.tokenizer.ends)
        requests.append(Request(tokens, settings, prompt.args.seed))
    return fit_prompts(requests, opened.context)


def write_generations(
    path: str | None, prompts: Sequence[Prompt], results: Sequence[Completion]
) -> None:
    """Append a line of JSON for each result to the file, if there is one for them."""
    if path is None:
        return
    lines = []
    for prompt, result in zip(prompts, results, strict=True):
        line = {} if prompt.args.id is None else {"id": prompt.args.id}
        line |= {"prompt": prompt.text, "seed": prompt.args.seed} | asdict(result)
        lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    try:
        append_whole(Path(path), b"".join(lines))
    except OSError as error:
        raise UserError(f"out = {path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    run_program(main)
