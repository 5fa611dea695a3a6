"""Mamba-2, and hybrids of it and attention by a pattern of layers.

    python -m apps.main.train config=apps/mamba/configs/debug.yaml [key=value ...]

`model.layers=[attention,mamba,mamba]` is repeated over the blocks. Each has a feed-forward, too.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from apps.main import app as main_app
from apps.main.config import ModelArgs as MainModelArgs
from apps.main.config import TrainArgs as MainArgs
from apps.main.transformer import build as main_build
from apps.mamba.model import CHUNK, Mamba
from lingua.app import Built
from lingua.config.schema import Guarded, bounds
from lingua.model.args import MAX_FEATURES
from lingua.model.scan import split_weights
from lingua.model.transformer import Attention, TransformerBlock, flops_per_token
from lingua.parallel.styles import FeatureParallel

logger = logging.getLogger(__name__)


@dataclass
class MambaArgs:
    expand: Guarded[int] = 2  # features of the heads together, over model.dim
    head_dim: Guarded[int] = 64  # features of a head
    state_dim: Guarded[int] = 128  # numbers of the state for each feature
    n_groups: Guarded[int] = 1  # groups of heads, each with a b and a c of its own

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, *vars(self), maximum=MAX_FEATURES)


@dataclass
class ModelArgs(MainModelArgs):
    # kinds of blocks, repeated over n_layers: `mamba`, `attention`
    layers: Guarded[list[Literal["mamba", "attention"]]] = field(default_factory=lambda: ["mamba"])
    mamba: MambaArgs = field(default_factory=MambaArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if "mamba" not in self.kinds():
            yield "layers", f"must have mamba among the first {self.n_layers} (n_layers)"
        width, sizes = self.mamba.expand * self.dim, self.mamba
        if width % (sizes.head_dim * sizes.n_groups):
            yield "mamba.head_dim", f"times n_groups must divide {width} (dim x mamba.expand)"

    def kinds(self) -> list[str]:  # of the blocks
        return [self.layers[i % len(self.layers)] for i in range(self.n_layers) if self.layers]


@dataclass
class TrainArgs(MainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


def build(args: TrainArgs) -> Built:
    model, mamba = args.model, partial(Mamba, kernel=find_kernel(args.device))

    def block(args: ModelArgs, depth: int) -> TransformerBlock:
        return TransformerBlock(args, depth, mamba if args.kinds()[depth] == "mamba" else Attention)

    built, m = main_build(args, block=block), model.mamba
    assert built.plan is not None
    names = [f"layers.{i}" for i, kind in enumerate(model.kinds()) if kind == "mamba"]
    norms = {f"{name}.attention.norm": FeatureParallel() for name in names}
    styles = (built.plan.tp or {}) | norms | split_weights(built.module)
    divides = built.plan.tp_divides | {"model.mamba.n_groups": m.n_groups}
    others = replace(model, n_layers=model.n_layers - len(names))
    flops = flops_per_token(others, model.vocab_size, args.data.seq_len)
    # Of each other block, 6 for each weight and three times the products of ssd: 4 N for a feature
    # to write to the state and to read it; 2 for a feature and 2 N for a group with each position
    # of the chunk that a token sees, (CHUNK + 1) / 2 on average.
    width = m.expand * model.dim
    products = 4 * m.state_dim * width + (CHUNK + 1) * (width + m.state_dim * m.n_groups)
    weights = sum(p.numel() for n in names for p in built.module.get_submodule(n).parameters())
    flops += 6 * weights + 3 * products * len(names)
    return Built(built.module, replace(built.plan, tp=styles, tp_divides=divides), flops)


def find_kernel(device: str) -> Callable[..., torch.Tensor] | None:
    """mamba-ssm's kernel of ssd, where the run may use CUDA and has the package."""
    found = importlib.util.find_spec("mamba_ssm") is not None
    if not found or device == "cpu" or not torch.cuda.is_available():
        return None
    logger.info("mamba: ssd in the kernels of mamba-ssm, but for generation")
    return importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
