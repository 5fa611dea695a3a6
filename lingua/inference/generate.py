"""Text from a model, in batches: each row with its own settings, seed and end.

A model whose forward takes a `cache` (lingua.model.Cache) is run on the new tokens only; any other
is run on the whole text for each token. On a mesh every rank calls `generate`, a
data-parallel rank with requests of its own, the tp ranks of a group with the same ones.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lingua.dtensor import whole
from lingua.errors import UserError
from lingua.inference.sampling import Sampler, SamplingArgs
from lingua.model import Cache
from lingua.parallel.mesh import dp_degree
from lingua.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """A prompt, and how to go on with it."""

    prompt: list[int]  # not empty
    settings: SamplingArgs
    seed: int = 0
    # The text is as it reads behind the prompt. Some tokenizers drop the space that a text begins
    # with: alone it would lose the space between the two.
    behind_prompt: bool = True


@dataclass
class Completion:
    """What a model made of a request."""

    text: str = ""  # without the stop string or token
    tokens: list[int] = field(default_factory=list)  # all that were generated
    logprobs: list[float] = field(default_factory=list)  # nats, of each token, at temperature 1
    finish: str = ""  # stop_string, stop_token or length


def fit_prompt(request: Request, context: int, on_long_prompt: str, where: str) -> Request:
    """The request itself, or with a shorter prompt that leaves room for its `max_gen_tokens`.

    Args:
        context: tokens of prompt and result.
        on_long_prompt: `cut` a longer prompt on the left, or `refuse` it.
        where: names the prompt in messages.
    """
    room = context - request.settings.max_gen_tokens
    if room < 1:
        raise UserError(
            f"max_gen_tokens = {request.settings.max_gen_tokens}: leaves no room for a prompt; "
            f"must be below the context of {context} tokens"
        )
    if len(request.prompt) <= room:
        return request
    if on_long_prompt == "refuse":
        raise UserError(
            f"{where}: has {len(request.prompt)} tokens; must have at most {room}, the context of "
            f"{context} less max_gen_tokens; on_long_prompt=cut cuts it on the left"
        )
    return replace(request, prompt=request.prompt[-room:])


@torch.no_grad()
def generate(
    model: nn.Module,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    mesh: DeviceMesh,
    batch_size: int,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Completions in the order of the requests.

    Args:
        batch_size: rows of one forward, of prompts of like length.
        on_text: called with (index of a request, text added to it) as soon as that is certain.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    n_batches = _most(-(-len(requests) // batch_size), mesh)
    found: dict[int, Completion] = {}
    training = model.training
    model.eval()
    # Tensors that autograd can never see are faster to make, but FSDP does not take them.
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    try:
        with uncompiled(), torch.inference_mode(mesh.size() == 1 and not sharded):
            for i in range(n_batches):
                part = order[i * batch_size : (i + 1) * batch_size]
                rows = [_Row(k, requests[k], tokenizer, on_text) for k in part]
                _complete(model, rows, tokenizer.vocab_size, mesh)
                found |= {row.index: row.result for row in rows}
    finally:
        model.train(training)
    return [found[i] for i in range(len(requests))]


def _complete(model: nn.Module, rows: list["_Row"], vocab_size: int, mesh: DeviceMesh) -> None:
    """Go on with one batch until all of its rows are finished, here and on the other ranks."""
    tp, device = mesh["tp"].size(), torch.device(mesh.device_type)
    takes_cache = "cache" in inspect.signature(model.forward).parameters
    if rows:
        texts = _Texts(model, rows, tp, device, takes_cache)
        settings, seeds = zip(*((r.request.settings, r.request.seed) for r in rows), strict=True)
        sampler = Sampler(settings, seeds, device)
    step = 0
    while _most(len(rows), mesh):
        if not rows:  # another rank goes on, and needs this one in its collectives
            idle = torch.zeros(1, tp, dtype=torch.int64, device=device)
            cache = Cache(torch.zeros(1, dtype=torch.int64, device=device), tp)
            model(idle, **({"cache": cache} if takes_cache else {}))
            continue
        logits = texts.next_logits()
        # The model may have more tokens than its tokenizer.
        tokens = sampler(logits[:, :vocab_size], step)
        if tp > 1:
            dist.broadcast(tokens, group=mesh.get_group("tp"), group_src=0)
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        both = torch.stack((tokens.double(), logprobs.double())).tolist()
        for row, token, logprob in zip(rows, *both, strict=True):
            row.add(int(token), logprob)
        texts.append(tokens)
        step += 1
        going = [i for i, row in enumerate(rows) if not row.result.finish]
        if 2 * len(going) <= len(rows):  # the others would only cost time
            rows = [rows[i] for i in going]
            kept = torch.tensor(going, dtype=torch.int64, device=device)
            texts.keep(kept)
            sampler.keep(kept)


def uncompiled() -> AbstractContextManager:
    """Compiled blocks run as written: every length is a new shape, which would be compiled anew."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _most(n: int, mesh: DeviceMesh) -> int:
    """The largest of the data-parallel ranks' numbers."""
    if dp_degree(mesh) == 1:
        return n
    most = torch.tensor([n])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


# ---------------------------------------------------------------------------- the rows' tokens


class _Texts:
    """The tokens of a batch, whose rows all end in the same column, and the model's run over them.

    tp ranks share the columns of a forward, so there are always a multiple of `tp`. With a cache
    these are the new column and the last ones before it, which are run again.
    """

    def __init__(
        self, model: nn.Module, rows: list["_Row"], tp: int, device: torch.device, takes_cache: bool
    ) -> None:
        lengths = [len(row.request.prompt) for row in rows]
        self.model, self.tp = model, tp
        self.end = -(-max(lengths) // tp) * tp
        size = self.end + max(row.request.settings.max_gen_tokens for row in rows) + tp
        tokens = torch.zeros(len(rows), size, dtype=torch.int64)
        for row, length, into in zip(rows, lengths, tokens, strict=True):
            into[self.end - length : self.end] = torch.tensor(row.request.prompt)
        self.tokens = tokens.to(device)
        self.padding = self.end - torch.tensor(lengths, device=device)
        self.cache = Cache(self.padding, size) if takes_cache else None

    def next_logits(self) -> Tensor:
        """Of the next token: float32 B vocabulary."""
        if self.cache is not None:
            new = self.tokens[:, self.cache.begin : self.end]
            return whole(self.model(new, cache=self.cache))[:, -1].float()
        # Without a cache padding cannot be hidden at the begin of a row: it goes to the end.
        column = torch.arange(-(-self.end // self.tp) * self.tp, device=self.tokens.device)
        moved = self.tokens.gather(1, (column + self.padding[:, None]) % len(column))
        logits = whole(self.model(moved))  # B S vocabulary
        rows = torch.arange(len(logits), device=logits.device)
        return logits[rows, self.end - self.padding - 1].float()

    def append(self, tokens: Tensor) -> None:
        self.tokens[:, self.end] = tokens
        self.end += 1
        if self.cache is not None:
            self.cache.begin = self.end - self.tp

    def keep(self, rows: Tensor) -> None:
        self.tokens, self.padding = self.tokens[rows], self.padding[rows]
        if self.cache is not None:
            self.cache.keep(rows)


# --------------------------------------------------------------------------------------- one row


class _Row:
    """A request on its way: what was generated, and where it ends."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.index, self.request, self.tokenizer = index, request, tokenizer
        self.on_text, self.n_passed = on_text, 0
        self.result = Completion()
        settings = request.settings
        eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.stop_tokens = frozenset(eos if settings.stop_tokens is None else settings.stop_tokens)
        # Tokens that can hold the longest stop string: a token has a byte of text at least, but
        # for special ones and those that some libraries change at the begin of a text.
        self.tail = 8 + max((len(stop.encode()) for stop in settings.stop), default=0)

    def add(self, token: int, logprob: float) -> None:
        """Take the next token. A finished row, which is only there for others, takes no more."""
        result, settings = self.result, self.request.settings
        if result.finish:
            return
        result.tokens.append(token)
        result.logprobs.append(logprob)
        if token in self.stop_tokens:
            result.finish, result.text = "stop_token", self._decode(result.tokens[:-1])
        elif settings.stop and (text := self._before_stop()) is not None:
            result.finish, result.text = "stop_string", text
        elif len(result.tokens) == settings.max_gen_tokens:
            result.finish, result.text = "length", self._decode(result.tokens)
        if self.on_text is not None:
            self._pass_text()

    def _decode(self, tokens: list[int]) -> str:
        if self.request.behind_prompt:
            last = self.request.prompt[-1:]
            before, both = self.tokenizer.decode(last), self.tokenizer.decode([*last, *tokens])
            if before and both.startswith(before):  # not so inside of a character
                return both[len(before) :]
        return self.tokenizer.decode(tokens)

    def _before_stop(self) -> str | None:
        """The text before the first stop string, None where there is none."""
        stops, tokens = self.request.settings.stop, self.result.tokens
        tail = self.tokenizer.decode(tokens[-self.tail :])
        if not any(stop in tail for stop in stops):
            return None
        text = self._decode(tokens)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else None

    def _pass_text(self) -> None:
        """Pass on the text that no further token can change or take back."""
        text = self.result.text
        if not self.result.finish:
            text = self._decode(self.result.tokens).rstrip("\ufffd")
            begun = (
                n
                for stop in self.request.settings.stop
                for n in range(len(stop) - 1, 0, -1)
                if text.endswith(stop[:n])
            )
            text = text[: len(text) - max(begun, default=0)]
        if len(text) > self.n_passed:
            self.on_text(self.index, text[self.n_passed :])
            self.n_passed = len(text)
