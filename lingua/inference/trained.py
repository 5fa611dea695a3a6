"""A trained model to use: its weights and its configuration, without the run that made it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import App, find_app
from lingua.checkpoint.folder import CONFIG, Checkpoint, read_state, verify
from lingua.checkpoint.resume import TOKENIZER, flat_config
from lingua.checkpoint.source import locate_newest, open_checkpoint
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import read_saved
from lingua.errors import UserError
from lingua.init import init_parameters, ties_kept
from lingua.parallel.mesh import DistributedArgs, on_rank_0
from lingua.parallel.parallelize import ParallelPlan, parallelize_model
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer


@dataclass(frozen=True)
class Trained:
    """A checkpoint, the app that made it, and its configuration."""

    checkpoint: Checkpoint
    app: App
    args: Any  # of the app's class, as the checkpoint has it

    def build_tokenizer(self, path: str | None = None) -> Tokenizer:
        """The model's tokenizer; `path` is where its file lies now, if elsewhere than it did."""
        args = self.args.data.tokenizer
        args = args if path is None else TokenizerArgs(args.name, path)
        tokenizer = build_tokenizer(args)
        check_vocabulary(tokenizer, args, self.checkpoint.path, self.args.model.vocab_size)
        trained_with = read_state(self.checkpoint).get("data", {}).get(TOKENIZER)
        if trained_with not in (None, tokenizer.fingerprint()):
            raise UserError(
                f"the {tokenizer.name} tokenizer ({args.path or 'which has no file'}) is not the "
                f"one that {self.checkpoint.path} was trained with: its tokens are others"
            )
        return tokenizer

    def build(self) -> tuple[nn.Module, ParallelPlan]:
        """The model on the meta device, and its layout. Sizes of training rows do not bind it: what
        the model is given here is padded to a multiple of tp."""
        built = self.app.build(self.args)
        plan = built.plan or ParallelPlan()
        divides = {k: n for k, n in plan.tp_divides.items() if not k.startswith("data.")}
        return built.module, replace(plan, tp_divides=divides)

    def load(self, args: DistributedArgs, mesh: DeviceMesh, device: torch.device) -> nn.Module:
        """The model with its weights on a mesh. Called by every rank."""
        module, plan = self.build()
        # One process has nothing to shard: in bfloat16 its weights are cast once, not each forward.
        alone = replace(args, model_dtype="fp32") if mesh.size() == 1 else args
        model = parallelize_model(module, mesh, plan, alone)
        if any(module._non_persistent_buffers_set for module in model.modules()):
            init_parameters(model, 0, device)  # which no checkpoint holds
        else:
            with ties_kept(model):
                model.to_empty(device=device)
        verify(self.checkpoint)
        open_checkpoint(self.checkpoint).load(tensors_of(model), "model.")
        return model.to(args.dtype) if mesh.size() == 1 else model


def check_vocabulary(tokenizer: Tokenizer, args: TokenizerArgs, path: Path, size: int) -> None:
    """Raises UserError where a tokenizer has more than the `size` tokens of the model at `path`."""
    if tokenizer.vocab_size > size:
        raise UserError(
            f"the {tokenizer.name} tokenizer ({args.path or 'which has no file'}) has "
            f"{tokenizer.vocab_size} tokens, the model of {path} only {size} (model.vocab_size): "
            "it is not the tokenizer of this model"
        )


def open_trained(key: str, path: str, app: App | None) -> Trained:
    """The checkpoint in a folder, or the newest one of a run's. Called by every rank.

    Args:
        key: the config key that names the folder, for messages.
        app: the app that the caller names; None: the one that the checkpoint names, which must be
            one of this repository or of an installed package.

    Raises:
        UserError: it is no checkpoint, or its model is not the app's.
    """
    # A run may be saving and pruning meanwhile: one rank decides which is the newest.
    return read_trained(key, on_rank_0(lambda: locate(key, path)), app)


def locate(key: str, path: str) -> Checkpoint:
    """The checkpoint in a folder, or the newest of a run's. By one process. Raises UserError."""
    try:
        return locate_newest(Path(path))
    except UserError as error:
        raise UserError(
            f"{key} = {path}: must be the folder of a checkpoint, such as "
            f"runs/debug/checkpoints/0000000700, or of a run that has one; {error}"
        ) from None


def read_trained(key: str, checkpoint: Checkpoint, app: App | None) -> Trained:
    """A checkpoint with its configuration. By one process."""
    config = checkpoint.path / CONFIG
    required = ("data.seq_len", "data.tokenizer.name", "data.tokenizer.path")
    flat = flat_config(config, dict.fromkeys(("app", *required)))
    if absent := [name for name in required if flat[name] == "(absent)"]:
        raise UserError(f"{config}: must have the key {absent[0]}")
    recorded = None if flat["app"] == "(absent)" else flat["app"]
    app = app or find_app(recorded, str(config))
    try:
        args = read_saved(app.config, config, validated=("model",))
    except UserError as error:
        raise UserError(
            f"{error}\n{key} = {checkpoint.path}: its model is not that of {app.path}; "
            "app=MODULE names another app"
        ) from None
    return Trained(checkpoint, app, args)
