"""A trained model to use: its weights and what its config says, without the run that made it."""

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn

from lingua.checkpoint.folder import (
    CONFIG,
    Checkpoint,
    damaged_files,
    find,
    read_checkpoint,
    read_state,
)
from lingua.checkpoint.load import load_weights
from lingua.checkpoint.resume import TOKENIZER, flat_config
from lingua.config.load import load
from lingua.errors import UserError
from lingua.init import init_parameters, ties_kept
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer

M = TypeVar("M")


@dataclass(frozen=True)
class Trained(Generic[M]):
    """A checkpoint and, of its config, what whoever uses the model has to know."""

    checkpoint: Checkpoint
    model: M  # the `model` group
    seq_len: int
    add_bos: bool
    add_eos: bool
    tokenizer: TokenizerArgs

    def build_tokenizer(self, path: str | None = None) -> Tokenizer:
        """The model's tokenizer; `path` is where its file lies now, if elsewhere than it did."""
        args = self.tokenizer if path is None else TokenizerArgs(self.tokenizer.name, path)
        tokenizer = build_tokenizer(args)
        size = self.model.vocab_size
        if tokenizer.vocab_size > size:
            raise UserError(
                f"the {tokenizer.name} tokenizer ({args.path or 'which has no file'}) has "
                f"{tokenizer.vocab_size} tokens, the model of {self.checkpoint.path} only {size} "
                "(model.vocab_size): it is not the tokenizer of this model"
            )
        trained_with = read_state(self.checkpoint).get("data", {}).get(TOKENIZER)
        if trained_with not in (None, tokenizer.fingerprint()):
            raise UserError(
                f"the {tokenizer.name} tokenizer ({args.path or 'which has no file'}) is not the "
                f"one that {self.checkpoint.path} was trained with: its tokens are others"
            )
        return tokenizer

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Give a model on the meta device its memory and its weights, on any topology. Called by
        every rank."""
        if any(module._non_persistent_buffers_set for module in model.modules()):
            init_parameters(model, 0, device)  # which no checkpoint holds
        else:
            with ties_kept(model):
                model.to_empty(device=device)
        if damaged := damaged_files(self.checkpoint):
            raise UserError(f"{self.checkpoint.path} is damaged: {'; '.join(damaged)}")
        load_weights(self.checkpoint, model)


def open_trained(key: str, path: str, model: type[M]) -> Trained[M]:
    """The checkpoint in a folder, or the newest one of a run's.

    Args:
        key: the config key that names the folder, for messages.
        model: dataclass of the config's `model` group.

    Raises:
        UserError: it is no checkpoint, or its config has model keys that `model` does not have.
    """
    folder = Path(path)
    checkpoint, why = read_checkpoint(folder)
    if checkpoint is None:
        of_run = find(folder / "checkpoints") or find(folder)
        if not of_run:
            raise UserError(
                f"{key} = {path}: must be the folder of a checkpoint, such as "
                f"runs/debug/checkpoints/0000000700, or of a run that has one; {why}"
            )
        checkpoint = of_run[0]
    config = checkpoint.path / CONFIG
    group = make_dataclass("Config", [("model", model, field(default_factory=model))])
    try:
        args, _ = load(group, [f"config={config}"], partial=True)
    except UserError as error:
        raise UserError(
            f"{error}\n{key} = {path}: its model is not this app's; a fork's checkpoints are for "
            "the fork's own programs"
        ) from None
    keys = ("data.seq_len", "data.add_bos", "data.add_eos")
    names = ("data.tokenizer.name", "data.tokenizer.path")
    flat = flat_config(config, dict.fromkeys((*keys, *names)))
    absent = [name for name, value in flat.items() if value == "(absent)"]
    if absent:
        raise UserError(f"{config}: must have the key {absent[0]}")
    tokenizer = TokenizerArgs(*(flat[name] for name in names))
    return Trained(checkpoint, args.model, *(flat[name] for name in keys), tokenizer)
