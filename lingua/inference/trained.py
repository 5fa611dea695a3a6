"""A trained model to use: its weights and its configuration, without the run that made it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from omegaconf import MISSING
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import App, find_app, named_app
from lingua.checkpoint.folder import CONFIG, Checkpoint, read_state, verify
from lingua.checkpoint.resume import TOKENIZER, flat_config
from lingua.checkpoint.source import TensorSource, locate_newest, open_checkpoint
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import read_saved
from lingua.config.schema import MOST_TOKENS, Free, bounds
from lingua.errors import UserError
from lingua.init import init_parameters, ties_kept
from lingua.monitor.logger import init_logger
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import DistributedArgs, on_rank_0
from lingua.parallel.parallelize import ParallelPlan, parallelize_model
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer
from lingua.torch_private import non_persistent_buffers


@dataclass(frozen=True)
class Trained:
    """A checkpoint, the app that made it, and its configuration."""

    checkpoint: Checkpoint
    app: App
    args: Any  # of the app's class, as the checkpoint has it

    def build_tokenizer(self, path: str | None = None) -> Tokenizer:
        """The model's tokenizer; `path` is where its file is now, if not where it was."""
        args = self.args.data.tokenizer
        args = args if path is None else replace(args, path=path)
        tokenizer = build_tokenizer(args)
        check_vocabulary(tokenizer, args, self.checkpoint.path, self.args.model.vocab_size)
        trained_with = read_state(self.checkpoint).data.get(TOKENIZER)
        if trained_with not in (None, tokenizer.fingerprint()):
            raise UserError(
                f"the {tokenizer.name} tokenizer ({args.path or 'which has no file'}) is not the "
                f"one that {self.checkpoint.path} was trained with: its tokens are others"
            )
        return tokenizer

    def build(self) -> tuple[nn.Module, ParallelPlan]:
        """The model on the meta device, and its layout, without the sizes of training rows: inputs
        are padded to a multiple of tp."""
        built = self.app.build(self.args)
        plan = built.plan or ParallelPlan()
        divides = {k: n for k, n in plan.tp_divides.items() if not k.startswith("data.")}
        return built.module, replace(plan, tp_divides=divides)

    def load(self, args: DistributedArgs, mesh: DeviceMesh) -> nn.Module:
        """The model with its weights on a mesh. Called by every rank."""
        verify(self.checkpoint)
        return load_weights(*self.build(), open_checkpoint(self.checkpoint), args, mesh)


def load_weights(
    module: nn.Module,
    plan: ParallelPlan,
    source: TensorSource,
    args: DistributedArgs,
    mesh: DeviceMesh,
) -> nn.Module:
    """A model on the meta device with its weights on a mesh. Called by every rank."""
    device = torch.device(mesh.device_type)
    # Of one process, which has nothing to shard, weights are cast once and not in each forward.
    one_process = mesh.size() == 1
    as_stored = replace(args, model_dtype="fp32")
    model = parallelize_model(module, mesh, plan, as_stored if one_process else args)
    if any(non_persistent_buffers(module) for module in model.modules()):
        init_parameters(model, 0, device)  # no checkpoint has those buffers
    else:
        with ties_kept(model):
            model.to_empty(device=device)
    source.load(tensors_of(model), "model.")
    return model.to(args.dtype) if one_process else model


def check_vocabulary(tokenizer: Tokenizer, args: TokenizerArgs, path: Path, size: int) -> None:
    """Raises UserError where a tokenizer has more than the `size` tokens of the model at `path`."""
    if tokenizer.vocab_size > size:
        raise UserError(
            f"the {tokenizer.name} tokenizer ({args.path or 'which has no file'}) has "
            f"{tokenizer.vocab_size} tokens, the model of {path} only {size} (model.vocab_size): "
            "it is not the tokenizer of this model"
        )


def open_trained(key: str, path: str, app: App | None) -> Trained:
    """The checkpoint in a folder, or the newest one of a run's.

    Args:
        key: the config key that names the folder, for messages.
        app: the app that the caller names; None: the one that the checkpoint names, which must be
            one of this repository or of an installed package.

    Raises:
        UserError: it is no checkpoint, or its model is not the app's.
    """
    try:
        checkpoint = locate_newest(Path(path))
    except UserError as error:
        raise UserError(
            f"{key} = {path}: must be the folder of a checkpoint, such as "
            f"runs/debug/checkpoints/0000000700, or of a run that has one; {error}"
        ) from None
    config = checkpoint.path / CONFIG
    required = ("data.seq_len", "data.tokenizer.name", "data.tokenizer.path")
    flat = flat_config(config, ("app", *required))
    if absent := [name for name in required if name not in flat]:
        raise UserError(f"{config}: must have the key {absent[0]}")
    app = app or find_app(flat.get("app"), str(config))
    try:
        args: Any = read_saved(app.config, config)
    except UserError as error:
        raise UserError(
            f"{error}\n{key} = {checkpoint.path}: its model is not that of {app.path}; "
            "app=MODULE names another app"
        ) from None
    args.model.attn_impl = "auto"  # that of the run may need the device or the dtype of the run
    return Trained(checkpoint, app, args)


# ---- for programs


@dataclass
class OpenArgs:
    ckpt: Free[str] = MISSING  # a checkpoint's folder, or a run's: its newest checkpoint
    app: Free[str | None] = None  # import path of its app; null: the one that it names
    # tokens that the model sees at once, prompt and result; null: data.seq_len of the run
    context: Free[int | None] = None
    tokenizer_path: Free[str | None] = None  # the tokenizer's file now; null: its path in training
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    distributed: DistributedArgs = field(default_factory=lambda: DistributedArgs(model_dtype=None))

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "context", most=MOST_TOKENS)


@dataclass(frozen=True)
class Opened:
    """A checkpoint, its tokenizer and the processes of the program; no weights are loaded yet."""

    trained: Trained
    tokenizer: Tokenizer
    mesh: DeviceMesh
    add_bos: bool  # texts begin with bos, as the model's training documents do
    context: int  # tokens that the model sees at once


def open_model(args: OpenArgs, argv: list[str]) -> Opened:
    """Start the processes of a program, and open the checkpoint that it names. Called by every
    rank; `argv` is the command line, which may name the app."""
    launch = detect_launch()
    mesh = start(pick_device(args.device, launch), launch, args.distributed)
    init_logger(None, dist.get_rank())
    app = named_app(argv)
    # A run may be saving and pruning meanwhile: one rank decides which checkpoint is the newest.
    newest = on_rank_0(lambda: str(open_trained("ckpt", args.ckpt, app).checkpoint.path))
    trained = open_trained("ckpt", newest, app)
    tokenizer = trained.build_tokenizer(args.tokenizer_path)
    data = trained.args.data
    return Opened(trained, tokenizer, mesh, data.add_bos, args.context or data.seq_len)
