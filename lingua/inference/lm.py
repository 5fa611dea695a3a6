"""A trained model as an object of Python, for notebooks and scripts; `lingua.load` returns it.

It has one process, which needs no process group or mesh: those of one rank, which the functions
below take, last as long as a call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lingua.app import App, find_app, import_app
from lingua.config.load import from_values
from lingua.errors import UserError
from lingua.hugging_face import CONFIG, adds_bos, find_tokenizer, form_of, open_folder
from lingua.inference.generate import Request, evaluating, fit_prompts, generate
from lingua.inference.sampling import SamplingArgs
from lingua.inference.trained import check_vocabulary, load_weights, open_trained
from lingua.parallel.launch import Launch, one_process, pick_device, restored
from lingua.parallel.mesh import AXES, DistributedArgs
from lingua.parallel.parallelize import ParallelPlan, blocks_of
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer


@dataclass(frozen=True)
class LM:
    """A language model and its tokenizer."""

    model: nn.Module  # a lingua.model.LanguageModel
    tokenizer: Tokenizer
    context: int  # tokens that the model sees at once: data.seq_len of its training
    add_bos: bool  # texts begin with bos, as the documents that it was trained on
    device: torch.device
    blocks: list[nn.Module]  # its layers, in order

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
        found: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        handle = self.blocks[layer].register_forward_hook(keep)
        try:
            self.logits(text)
        finally:
            handle.remove()
        if not found:
            raise UserError(f"layer = {layer}: is not part of predicting the next token")
        return found[0][0]

    def generate(self, text: str, seed: int = 0, **settings: Any) -> str:
        """The text with which the model continues `text`. A prompt that is too long for the context
        is cut on the left.

        Args:
            settings: fields of lingua.inference.sampling.SamplingArgs: temperature, top_k, top_p,
                max_gen_tokens, stop, stop_tokens. UserError names those that are not.
        """
        sampling = from_values(SamplingArgs(), settings, "")
        [request] = fit_prompts([Request(self.encode(text), sampling, seed)], self.context)
        with mesh_of_one(self.device) as mesh:
            [result] = generate(self.model, [request], self.tokenizer, mesh, batch_size=1)
        return result.text


def open_lm(
    path: str,
    app: str | None,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["bf16", "fp32"] | None,
    tokenizer_path: str | None,
) -> LM:
    """See lingua.load."""
    chosen = None if app is None else import_app(app, "lingua.load")
    on = pick_device(device, Launch())
    settings = DistributedArgs(model_dtype=dtype or ("bf16" if on.type == "cuda" else "fp32"))
    with mesh_of_one(on) as mesh:
        if (Path(path) / CONFIG).is_file():
            return _open_folder(path, chosen, settings, mesh, tokenizer_path)
        trained = open_trained("path", path, chosen)
        tokenizer = trained.build_tokenizer(tokenizer_path)
        _, plan = trained.build()
        model, data = trained.load(settings, mesh), trained.args.data
        return LM(model, tokenizer, data.seq_len, data.add_bos, on, blocks_of(model, plan))


def _open_folder(
    path: str,
    app: App | None,
    settings: DistributedArgs,
    mesh: DeviceMesh,
    tokenizer_path: str | None,
) -> LM:
    """A folder of transformers."""
    app = app or find_app(None, path)
    source, model_args, context = open_folder(form_of(app, f"path = {path}"), path, "path")
    of_file = TokenizerArgs("sp" if (tokenizer_path or "").endswith(".model") else "hf")
    chosen = (
        replace(of_file, path=tokenizer_path)
        if tokenizer_path
        else find_tokenizer(source.path, "path", "tokenizer_path")
    )
    tokenizer = build_tokenizer(chosen)
    check_vocabulary(tokenizer, chosen, source.path, model_args.vocab_size)
    args = app.config()
    args.model, args.data.seq_len = model_args, context
    built = app.build(args)
    plan = built.plan or ParallelPlan()
    model = load_weights(built.module, plan, source, settings, mesh)
    device = torch.device(mesh.device_type)
    return LM(
        model, tokenizer, context, adds_bos(chosen, tokenizer), device, blocks_of(model, plan)
    )


@contextmanager
def mesh_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    """The mesh of this process alone. Raises UserError where it is in a process group already."""
    with restored(), one_process():
        yield init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=AXES)
