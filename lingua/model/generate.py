"""Text from a model, in batches: each row with its own settings, seed and end.

A model whose forward takes a `cache` (lingua.model.cache) is run on the new tokens only; any other
is run on the whole text for each token.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lingua.base.errors import UserError
from lingua.model.cache import Cache
from lingua.model.sampling import Sampler, SamplingArgs
from lingua.parallel.mesh import cp_group, divide, dp_degree, world_sum_
from lingua.parallel.tensors import whole
from lingua.parallel.torch_private import dynamo_is_imported
from lingua.tokenizer.interface import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it."""

    prompt: list[int]  # not empty
    settings: SamplingArgs
    seed: int = 0
    # Decode the text together with the end of the prompt: some tokenizers drop the space that a
    # text begins with.
    behind_prompt: bool = True
    on_text: Callable[[str], None] | None = None  # called with text that no later token changes


@dataclass
class Completion:
    """The text that a model generated for a request."""

    text: str = ""  # without the stop string or token
    tokens: list[int] = field(default_factory=list)  # all that were generated
    logprobs: list[float] = field(default_factory=list)  # nats, of each token, at temperature 1
    finish: str = ""  # stop_string, stop_token or length


def fit_prompts(requests: Sequence[Request], context: int) -> list[Request]:
    """The requests; prompts that do not fit in the context together with `max_gen_tokens` are cut
    on the left, and counted in a warning. UserError where there is no room for any prompt."""
    fitted, n_cut = [], 0
    for request in requests:
        n_new = request.settings.max_gen_tokens
        if n_new >= context:
            raise UserError(
                f"max_gen_tokens = {n_new}: leaves no room for a prompt; must be below the context "
                f"of {context} tokens"
            )
        n_cut += len(request.prompt) > context - n_new
        fitted.append(replace(request, prompt=request.prompt[n_new - context :]))
    if n_cut:
        logger.warning(
            f"{n_cut} of {len(requests)} prompts cut on the left: with max_gen_tokens they are "
            f"longer than the context of {context} tokens"
        )
    return fitted


@torch.no_grad()
def generate(
    model: nn.Module,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    mesh: DeviceMesh,
    batch_size: int,
) -> list[Completion]:
    """Completions in the order of the requests. Every rank calls it with the same requests, which
    the data-parallel ranks divide among themselves, and has all results.

    Args:
        batch_size: rows of one forward on each data-parallel rank, of prompts of like length.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    n_batches = -(-len(requests) // (batch_size * dp_degree(mesh)))
    # A rank without requests runs the model all the same: others need it in FSDP's collectives.
    idle = Request([0], SamplingArgs(max_gen_tokens=1))

    def complete(share: list[Request]) -> list[Completion]:
        done = []
        for i in range(n_batches):
            batch = share[i * batch_size : (i + 1) * batch_size]
            done += _complete_batch(model, batch or [idle], tokenizer, mesh)[: len(batch)]
        return done

    with evaluating(model):
        done = divide(complete, [requests[i] for i in order], mesh)
    by_index = dict(zip(order, done, strict=True))
    return [by_index[i] for i in range(len(requests))]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the model in evaluation mode and without its compiled blocks: every length is a new
    shape, for which they would be compiled again."""
    training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if dynamo_is_imported() else nullcontext():
            yield
    finally:
        model.train(training)


def _complete_batch(
    model: nn.Module, requests: list[Request], tokenizer: Tokenizer, mesh: DeviceMesh
) -> list[Completion]:
    """Completions of a batch. Returns once the batches of the other ranks are completed too.

    All rows end in the same column, the shorter ones begin with padding. tp ranks share the columns
    of a forward, so there are always a multiple of `tp`: with a cache the new column and the last
    ones before it, which are run again.
    """
    tp, device = mesh["tp"].size(), torch.device(mesh.device_type)
    rows = [_Row(request, tokenizer) for request in requests]
    sampler = Sampler([r.settings for r in requests], [r.seed for r in requests], device)
    end = -(-max(len(r.prompt) for r in requests) // tp) * tp
    padded = [[0] * (end - len(r.prompt)) + r.prompt for r in requests]
    tokens = torch.tensor(padded, device=device)  # B columns
    padding = torch.tensor([end - len(r.prompt) for r in requests], device=device)
    cache = None
    if "cache" in inspect.signature(model.forward).parameters:
        size = end + max(r.settings.max_gen_tokens for r in requests)
        cache = Cache(padding, size, overlap=tp - 1)
    step, unfinished = 0, len(rows)
    # Tensors that autograd can never see are faster to make, but FSDP does not take them.
    alone = mesh.size() == 1 and not isinstance(model, FSDPModule)
    with torch.inference_mode() if alone else nullcontext():  # its argument False records gradients
        while world_sum_(torch.tensor(unfinished)):  # some rank has an unfinished row
            if cache is None:
                logits = _recomputed_logits(model, tokens, padding, tp)
            else:
                cache.start_forward(tokens.shape[1] - tp if step else 0)
                logits = whole(model(tokens[:, cache.begin :], cache=cache))[:, -1].float()
            if not unfinished:  # another rank continues, and needs this one in its collectives
                continue
            # The model may have more tokens than its tokenizer.
            drawn = sampler(logits[:, : tokenizer.vocab_size], step).to(device)
            for group in (mesh.get_group("tp"), cp_group(mesh)):
                if group is not None and group.size() > 1:
                    dist.broadcast(drawn, group=group, group_src=0)
            logprobs = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
            both = torch.stack((drawn.float(), logprobs)).tolist()  # tokens are below 2^24
            for row, token, logprob in zip(rows, *both, strict=True):
                row.add(int(token), logprob)
            tokens = torch.cat((tokens, drawn[:, None]), dim=1)
            step, unfinished = step + 1, sum(not row.result.finish for row in rows)
    return [row.result for row in rows]


def _recomputed_logits(model: nn.Module, tokens: Tensor, padding: Tensor, tp: int) -> Tensor:
    """Logits of the next token, float32 B vocabulary, without a cache. Padding cannot be hidden at
    the begin of a row then: it is moved to the end."""
    end = tokens.shape[1]
    tokens = F.pad(tokens, (0, -end % tp))
    column = torch.arange(tokens.shape[1], device=tokens.device)
    moved = tokens.gather(1, (column + padding[:, None]) % len(column))
    logits = whole(model(moved))  # B S vocabulary
    rows = torch.arange(len(logits), device=logits.device)
    return logits[rows, end - padding - 1].float()


class _Row:
    """A request, what was generated for it, and where that ends."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request, self.tokenizer, self.n_passed = request, tokenizer, 0
        self.result = Completion()
        settings = request.settings
        ends = tokenizer.ends if settings.stop_tokens is None else settings.stop_tokens
        self.stop_tokens = frozenset(ends)
        # Tokens that can hold the longest stop string: a token has a byte of text at least, but
        # for special ones and those that some libraries change at the begin of a text.
        self.tail = 8 + max((len(stop.encode()) for stop in settings.stop), default=0)

    def add(self, token: int, logprob: float) -> None:
        """Take the next token. A finished row, which is run along with others, takes no more."""
        result, settings = self.result, self.request.settings
        if result.finish:
            return
        result.tokens.append(token)
        result.logprobs.append(logprob)
        if token in self.stop_tokens:
            result.finish, result.text = "stop_token", self._decode(result.tokens[:-1])
        elif (text := self._before_stop()) is not None:
            result.finish, result.text = "stop_string", text
        elif len(result.tokens) == settings.max_gen_tokens:
            result.finish, result.text = "length", self._decode(result.tokens)
        if self.request.on_text is not None:
            text = result.text if result.finish else self._lasting_text()
            if len(text) > self.n_passed:
                self.request.on_text(text[self.n_passed :])
                self.n_passed = len(text)

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
        tail = self.tokenizer.decode(tokens[-self.tail :]) if stops else ""
        if not any(stop in tail for stop in stops):
            return None
        text = self._decode(tokens)
        before = min((text.partition(stop)[0] for stop in stops), key=len)
        return before if len(before) < len(text) else None

    def _lasting_text(self) -> str:
        """The text that no later token changes."""
        text = self._decode(self.result.tokens).rstrip("\ufffd")  # half a character
        stops = self.request.settings.stop  # the text may end with the begin of one
        begun = (n for s in stops for n in range(1, len(s)) if text.endswith(s[:n]))
        return text[: len(text) - max(begun, default=0)]
