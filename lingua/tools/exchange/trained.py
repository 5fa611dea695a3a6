"""A trained model to use: its weights and its configuration, without the run that made it."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from omegaconf import MISSING
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import App, find_app, named_app
from lingua.base.errors import UserError
from lingua.checkpoint.folder import read_state
from lingua.checkpoint.origin import is_hf_folder, open_source
from lingua.checkpoint.saved import flat_config, verify
from lingua.checkpoint.source import TensorSource, check_fit
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import to_yaml
from lingua.config.saved import load_saved
from lingua.config.schema import MAX_TOKENS, Free, bounds
from lingua.data.rows import TOKENIZER
from lingua.monitor.logger import init_logger
from lingua.parallel.args import DistributedArgs
from lingua.parallel.init import init_parameters, ties_kept
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.plan import ParallelPlan
from lingua.parallel.torch_private import non_persistent_buffers
from lingua.run.args import RunArgs
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import kind_of_file
from lingua.tools.exchange.hugging_face import config_of_hf_folder, end_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The tensors of a model, its app, and its configuration."""

    source: TensorSource
    app: App
    args: RunArgs

    def build_tokenizer(self, as_trained: bool = True) -> Tokenizer:
        """The model's tokenizer. Raises UserError where it has more tokens than the model, or,
        unless `as_trained` is false, is not the one of the training."""
        args, path, size = self.args.data.tokenizer, self.source.path, self.args.model.vocab_size
        tokenizer = build_tokenizer(args)
        shown = f"the {tokenizer.name} tokenizer ({args.path or 'which has no file'})"
        if tokenizer.vocab_size > size:
            raise UserError(
                f"{shown} has {tokenizer.vocab_size} tokens, the model of {path} only {size} "
                "(model.vocab_size): it is not the tokenizer of this model"
            )
        checkpoint = self.source.checkpoint
        trained_with = checkpoint and read_state(checkpoint).data.get(TOKENIZER)
        if as_trained and trained_with not in (None, tokenizer.fingerprint()):
            raise UserError(
                f"{shown} is not the one that {path} was trained with: its tokens are others"
            )
        ends = end_tokens(path, size) if is_hf_folder(path) else ()
        return replace(tokenizer, more_ends=ends)

    def build(self, on: DistributedArgs | None = None) -> tuple[nn.Module, ParallelPlan]:
        """The model on the meta device, to be computed as `on` says, and its layout, without the
        sizes of training rows: inputs are padded to a multiple of tp."""
        built = self.app.build(replace(self.args, distributed=on or self.args.distributed))
        plan = built.plan or ParallelPlan()
        divides = {k: n for k, n in plan.tp_divides.items() if not k.startswith("data.")}
        return built.module, replace(plan, tp_divides=divides)

    def load(self, args: DistributedArgs, mesh: DeviceMesh) -> nn.Module:
        """The model with its weights on a mesh. Called by every rank."""
        if self.source.checkpoint is not None:
            verify(self.source.checkpoint)
        return load_weights(*self.build(args), self.source, args, mesh)


def load_weights(
    module: nn.Module,
    plan: ParallelPlan,
    source: TensorSource,
    args: DistributedArgs,
    mesh: DeviceMesh,
    seed: int | None = None,
) -> nn.Module:
    """A model on the meta device with its weights on a mesh. Called by every rank. With a `seed`,
    what the source lacks has initial values."""
    sizes = {name: tuple(t.shape) for name, t in tensors_of(module).items()}  # not allocated yet
    stored = source.shapes("model.")
    new = set() if seed is None else sizes.keys() - stored.keys()
    sizes = {name: size for name, size in sizes.items() if name not in new}
    check_fit(f"{source.path} does not fit this model", sizes, stored)
    device = torch.device(mesh.device_type)
    # Of one process, which has nothing to shard, weights are cast once and not in each forward.
    one_process = mesh.size() == 1
    as_stored = replace(args, model_dtype="fp32")
    model = parallelize_model(module, mesh, plan, as_stored if one_process else args)
    for p in model.parameters() if one_process else ():  # before they have memory: half of float32
        if p.is_floating_point():
            p.data = p.data.to(args.dtype)
    if new or any(non_persistent_buffers(module) for module in model.modules()):
        init_parameters(model, seed or 0, device)  # no checkpoint has those buffers
    else:
        with ties_kept(model):
            model.to_empty(device=device)
    source.load({name: t for name, t in tensors_of(model).items() if name not in new}, "model.")
    return model.to(args.dtype) if one_process else model


def open_trained(
    key: str,
    path: str,
    app: App | None,
    tokenizer_path: str | None = None,
    alone: bool = False,
    base: str | None = None,
) -> Trained:
    """The model that `path` names: anything that `open_source` takes. Called by every rank, or by a
    process without a group.

    Args:
        key: the config key that gives the path, for messages.
        app: the app that the caller names; None: the one that the checkpoint names, which must be
            one of this repository or of an installed package.
        tokenizer_path: the tokenizer's file, where it is not that of the config or the folder.
        alone, base: as open_source.

    Raises:
        UserError: it is no model, or its model is not the app's.
    """
    skipped: list[str] = []
    source = open_source(key, path, app, "size", skipped.append, alone, base)
    for line in skipped:
        logger.warning(f"{key} = {path}: {line}; this program uses {source.path}")
    if is_hf_folder(source.path):
        named = tokenizer_path and kind_of_file(tokenizer_path, "tokenizer_path")
        tokenizer = TokenizerArgs(named, tokenizer_path) if named else None
        config = config_of_hf_folder(app, source.path, "tokenizer_path", tokenizer)
        source = replace(source, config=to_yaml(config))
    trained = read_trained(source, app)
    if tokenizer_path is not None:
        trained.args.data.tokenizer.path = tokenizer_path
    return trained


def read_trained(source: TensorSource, app: App | None) -> Trained:
    """A model by the config of its source. Raises UserError as `open_trained`."""
    required = ("data.seq_len", "data.tokenizer.name", "data.tokenizer.path")
    flat = flat_config(source, ("app", *required))
    if absent := [name for name in required if name not in flat]:
        raise UserError(f"{source.config_path}: must have the key {absent[0]}")
    app = app or find_app(flat.get("app"), source.config_path)
    try:
        args: RunArgs = load_saved(app.config, source.config_path, source.config)
    except UserError as error:
        raise UserError(
            f"{error}\n{source.path}: its model is not that of {app.path}; app=MODULE names "
            "another app"
        ) from None
    args.model.attn_impl = "auto"  # the run's choice may need its device or dtype
    return Trained(source, app, args)


# ---- for programs


@dataclass
class OpenArgs:
    # a checkpoint's folder, or a run's: its newest; or what else checkpoint.init_from takes
    ckpt: Free[str] = MISSING
    app: Free[str | None] = None  # import path of its app; null: the one that it names
    # tokens that the model sees at once, prompt and result; null: data.seq_len of the run
    context: Free[int | None] = None
    tokenizer_path: Free[str | None] = None  # the tokenizer's file now; null: its path in training
    # where the base of adapters is; null: where it was in training
    base_model: Free[str | None] = None
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    distributed: DistributedArgs = field(default_factory=lambda: DistributedArgs(model_dtype=None))

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "context", maximum=MAX_TOKENS)


@dataclass(frozen=True)
class Opened:
    """A model, its tokenizer and the processes of the program; no weights are loaded yet."""

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
    app, tokenizer_path = named_app(argv), args.tokenizer_path
    trained = open_trained("ckpt", args.ckpt, app, tokenizer_path, base=args.base_model)
    data, tokenizer = trained.args.data, trained.build_tokenizer()
    return Opened(trained, tokenizer, mesh, data.add_bos, args.context or data.seq_len)
