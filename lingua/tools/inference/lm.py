"""A trained model as an object of Python, for notebooks and scripts; `lingua.load` returns it.

It has one process, which needs no process group or mesh: those of one rank, which the functions
below take, last as long as a call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lingua.app import App
from lingua.base.errors import UserError
from lingua.config.load import from_values
from lingua.model.generate import Request, evaluating, fit_prompts, generate
from lingua.model.sampling import SamplingArgs
from lingua.parallel.alone import one_process, temporary_process_group
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import Launch, pick_device
from lingua.parallel.mesh import AXES
from lingua.parallel.plan import blocks_of
from lingua.run.in_process import app_of
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.chat_template import Chat, Message, open_chat
from lingua.tools.exchange.trained import open_trained


@dataclass(frozen=True, repr=False)
class LM:
    """A language model and its tokenizer."""

    model: nn.Module  # a lingua.model.LanguageModel
    tokenizer: Tokenizer
    context: int  # tokens that the model sees at once: data.seq_len of its training
    add_bos: bool  # texts begin with bos, as the documents that it was trained on
    device: torch.device
    blocks: list[nn.Module]  # its layers, in order
    source: str  # where its weights are from
    open_chat: Callable[[], Chat]  # reads the chat template; raises UserError where it has none

    def __repr__(self) -> str:
        parameters = list(self.model.parameters())
        size = f"{sum(map(Tensor.numel, parameters)):,} parameters in {len(self.blocks)} layers"
        shown = f"{size}, {parameters[0].dtype} on {self.device}, context {self.context}"
        return f"<LM of {self.source}: {shown}, tokenizer {self.tokenizer.name}>"

    def encode(self, text: str) -> list[int]:
        """The tokens that the model sees of a text, bos included. Raises UserError for a text
        without tokens."""
        try:
            tokens: list[int] = self.tokenizer.encode(text, bos=self.add_bos).tolist()
        except UnicodeEncodeError:
            raise UserError("the text has half a surrogate pair, no character") from None
        if not tokens:
            raise UserError("the text is empty, and documents of this model have no bos")
        return tokens

    def logits(self, text: str) -> Tensor:
        """float32 [tokens, vocabulary] on the device: row i is about the token after tokens 0 to i
        of `encode(text)`. Raises UserError for a text that is longer than the context."""
        tokens = self.encode(text)
        if len(tokens) > self.context:
            raise UserError(f"the text has {len(tokens)} tokens; must have at most {self.context}")
        inputs = torch.tensor([tokens], device=self.device)
        with torch.no_grad(), evaluating(self.model):
            logits: Tensor = self.model(inputs)
        return logits[0].float()

    def loss(self, text: str) -> float:
        """Nats per token of the text, of all its tokens that another precedes (with bos, all).
        Raises UserError as `logits`, and for a text of a single token."""
        logits, tokens = self.logits(text), self.encode(text)
        if len(tokens) < 2:
            raise UserError("the text has no token that another precedes")
        return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:], device=self.device)).item()

    def hidden(self, text: str, layer: int) -> Tensor:
        """[tokens, dim] on the device, in the model's dtype: the residual stream after a layer, of
        which the first is 0 and the last also -1. Raises UserError as `logits`."""
        n = len(self.blocks)
        if not -n <= layer < n:
            raise UserError(
                f"layer = {layer}: must be {-n} to {n - 1}, as the model has {n} layers"
            )
        outputs: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)

        handle = self.blocks[layer].register_forward_hook(keep)
        try:
            self.logits(text)
        finally:
            handle.remove()
        if not outputs:
            raise UserError(f"layer = {layer}: is not part of predicting the next token")
        return outputs[0][0]

    def generate(self, text: str, seed: int = 0, **settings: Any) -> str:
        """The text with which the model continues `text`. A prompt that is too long for the context
        is cut on the left.

        Args:
            settings: fields of SamplingArgs (lingua.model.sampling): temperature, top_k,
                top_p, max_gen_tokens, stop, stop_tokens. UserError names those that are not.
        """
        sampling = from_values(SamplingArgs(), settings, "")
        return self._complete(Request(self.encode(text), sampling, seed))

    def chat(self, messages: Sequence[Message], seed: int = 0, **settings: Any) -> str:
        """The model's answer to a conversation, in its own chat template:

            lm.chat([{"role": "user", "content": "What is a list?"}], temperature=0)

        Settings as in `generate`. Raises UserError where it has no template, the template refuses
        the messages, or they leave no room for max_gen_tokens."""
        if isinstance(messages, str) or not all(isinstance(m, Mapping) for m in messages):
            raise UserError('messages: must be a list of {"role": ..., "content": ...}')
        sampling = from_values(SamplingArgs(), settings, "")
        try:
            chat = self.open_chat()
        except UserError as error:
            raise UserError(f"{error}; lm.generate continues a text without one") from None
        tokens, new = chat.prompt(messages, "messages"), sampling.max_gen_tokens
        if len(tokens) + new > self.context:  # a template is not cut on the left
            have = f"messages: {len(tokens)} tokens and max_gen_tokens = {new}"
            raise UserError(f"{have} must fit in the context of {self.context} tokens")
        sampling = chat.until_turn_end(sampling, self.tokenizer.ends)
        return self._complete(Request(tokens, sampling, seed))

    def _complete(self, request: Request) -> str:
        [request] = fit_prompts([request], self.context)
        with mesh_of_one(self.device) as mesh:
            [result] = generate(self.model, [request], self.tokenizer, mesh, batch_size=1)
        return result.text


def open_lm(
    path: str,
    app: str | ModuleType | App | None,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["bf16", "fp32"] | None,
    tokenizer_path: str | None,
    base: str | None,
) -> LM:
    """See lingua.load."""
    chosen = None if app is None else app_of(app, "lingua.load")
    on = pick_device(device, Launch())
    settings = DistributedArgs(model_dtype=dtype or ("bf16" if on.type == "cuda" else "fp32"))
    with mesh_of_one(on) as mesh:
        trained = open_trained("path", path, chosen, tokenizer_path, base=base)
        tokenizer, data = trained.build_tokenizer(), trained.args.data
        _, plan = trained.build()
        model = trained.load(settings, mesh)
        blocks, source = blocks_of(model, plan), str(trained.source)
        template = data.chat.template if data.chat else None  # None: that of the tokenizer
        chat = partial(open_chat, data.tokenizer, tokenizer, template)
        return LM(model, tokenizer, data.seq_len, data.add_bos, on, blocks, source, chat)


@contextmanager
def mesh_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    """The mesh of this process alone. Raises UserError where it is in a process group already."""
    with temporary_process_group(), one_process():
        yield init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=AXES)
