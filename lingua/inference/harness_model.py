"""The model of lm-evaluation-harness: its requests as tokens. Needs the package lm_eval."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from lingua.errors import UserError
from lingua.inference.generate import Request, fit_prompt
from lingua.inference.sampling import SamplingArgs
from lingua.tokenizer import Tokenizer

SAMPLING = ("temperature", "top_k", "top_p")
KNOWN = {*SAMPLING, "until", "max_gen_toks", "do_sample"}  # keys of generation_kwargs

logger = logging.getLogger(__name__)


class HarnessModel(LM):
    """Encodes requests as the harness's own class for Hugging Face models does.

    Args:
        ask: answers ("score", [(context, continuation), ...]) as lingua.inference.score does, and
            ("generate", [request, ...]) as lingua.inference.generate does.
        add_bos: texts begin with bos, as the model's training documents do.
        context: positions of the model.
        max_gen_tokens: tokens generated at most where a request sets no limit.
        seed: request i, from 0 on, is sampled with seed + i.
    """

    def __init__(
        self,
        ask: Callable[[str, list], list],
        tokenizer: Tokenizer,
        add_bos: bool,
        context: int,
        max_gen_tokens: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.ask, self.tokenizer, self.add_bos = ask, tokenizer, add_bos
        self.context, self.max_gen_tokens, self.seed = context, max_gen_tokens, seed

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self.ask("score", [self.encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        texts = self.tokenizer.encode_batch([request.args[0] for request in requests])
        before = self.before_text()
        # As the harness does, so that numbers can be compared: the bos of a text is scored too, as
        # a token that follows another bos.
        bos = before if self.add_bos else []
        scores = self.ask("score", [(before, [*bos, *text.tolist()]) for text in texts])
        return [logprob for logprob, _ in scores]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        whole = [self.to_request(i, *request.args) for i, request in enumerate(requests)]
        fitted = [fit_prompt(request, self.context, "cut", "") for request in whole]
        n_cut = sum(a is not b for a, b in zip(fitted, whole, strict=True))
        if n_cut:
            logger.warning(
                f"{n_cut} of {len(whole)} prompts cut on the left: with the tokens to generate "
                f"they are longer than the context of {self.context} tokens"
            )
        return [completion.text for completion in self.ask("generate", fitted)]

    def before_text(self) -> list[int]:
        """The token before a text without a context: the first token must follow one to be scored.
        UserError where the tokenizer has neither bos nor eos."""
        first = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if first is None:
            raise UserError(
                f"the {self.tokenizer.name} tokenizer has neither bos nor eos: a text without a "
                "context cannot be scored"
            )
        return [first]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both as one text and split its tokens, so that those at the boundary are the
        tokens of running text. Spaces at the end of the context belong to the continuation."""
        if not continuation:
            raise UserError(f"a task scores an empty text, after {context[-80:]!r}")
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        bos = self.add_bos and bool(context)
        whole = self.tokenizer.encode(context + continuation, bos=bos).tolist()
        n = len(self.tokenizer.encode(context, bos=bos)) if context else 0
        n = min(n, len(whole) - 1)  # a last token with the boundary inside is scored
        return whole[:n] or self.before_text(), whole[n:]

    def to_request(self, i: int, context: str, gen_kwargs: Mapping[str, Any]) -> Request:
        tokens = self.tokenizer.encode(context, bos=self.add_bos).tolist() or self.before_text()
        settings = to_settings(gen_kwargs, self.max_gen_tokens)
        # decoded without the prompt before it, as in the harness's own class
        return Request(tokens, settings, self.seed + i, behind_prompt=False)


def to_settings(gen_kwargs: Mapping[str, Any], max_gen_tokens: int) -> SamplingArgs:
    """A request's generation_kwargs as our settings. UserError names a key that has none."""
    known = normalize_gen_kwargs(dict(gen_kwargs), max_gen_tokens)
    if known.get("num_beams") == 1:  # no beam search
        del known["num_beams"]
    for key in known:
        if key not in KNOWN:
            raise UserError(
                f"generation_kwargs.{key} = {known[key]!r}: is not supported; must be one of "
                f"{', '.join(sorted(KNOWN))}"
            )
    sampled = {key: known[key] for key in SAMPLING if known.get(key) is not None}
    if not known["do_sample"]:
        sampled = {"temperature": 0.0}
    stop = [text for text in known["until"] if text]
    settings = SamplingArgs(**sampled, max_gen_tokens=known["max_gen_toks"], stop=stop)
    for key, need in settings.validate():
        raise UserError(f"generation_kwargs.{key} = {getattr(settings, key)!r}: {need}")
    return settings
