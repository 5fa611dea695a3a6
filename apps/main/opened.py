"""A trained model, opened by a program that uses it: `apps.main.eval`, `apps.main.generate`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from omegaconf import MISSING
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import named_app
from lingua.config.schema import Free
from lingua.inference.trained import Trained, open_trained
from lingua.monitor.logger import init_logger
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import DistributedArgs
from lingua.tokenizer import Tokenizer


@dataclass
class OpenArgs:
    ckpt: Free[str] = MISSING  # a checkpoint's folder, or a run's: its newest checkpoint
    app: Free[str | None] = None  # import path of its app; null: the one that it names
    # tokens that the model sees at once, prompt and result; null: data.seq_len of the run
    context: Free[int | None] = None
    tokenizer_path: Free[str | None] = None  # the tokenizer's file now; null: its path in training
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    distributed: DistributedArgs = field(
        default_factory=lambda: DistributedArgs(model_dtype="fp32")
    )

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.context is not None and self.context < 1:
            yield "context", "must be at least 1, or null"


@dataclass(frozen=True)
class Opened:
    """A checkpoint, its tokenizer and the processes of the program; no weights are loaded yet."""

    trained: Trained
    tokenizer: Tokenizer
    mesh: DeviceMesh
    device: torch.device
    add_bos: bool  # texts begin with bos, as the model's training documents do
    context: int  # tokens that the model sees at once


def open_checkpoint(args: OpenArgs, argv: list[str]) -> Opened:
    """Start the processes, and open the checkpoint that `args` names. Called by every rank.

    Args:
        argv: the command line; it may name the app.
    """
    launch = detect_launch()
    device = pick_device(args.device, launch)
    mesh = start(device, launch, args.distributed)
    init_logger(None, dist.get_rank())
    trained = open_trained("ckpt", args.ckpt, named_app(argv))
    tokenizer = trained.build_tokenizer(args.tokenizer_path)
    data = trained.args.data
    return Opened(trained, tokenizer, mesh, device, data.add_bos, args.context or data.seq_len)
