"""Three recurrent language models: minGRU, minLSTM and Hawk.

    python -m apps.main.train config=apps/fastrnn/configs/debug.yaml [key=value ...]

`model.cell` chooses one. `model.n_heads` and `head_dim` give the features of the state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal

from apps.fastrnn.model import MIXERS
from apps.main import app as main_app
from apps.main.config import ModelArgs as MainModelArgs
from apps.main.config import TrainArgs as MainArgs
from apps.main.transformer import build as main_build
from lingua.app import Built
from lingua.config.schema import Guarded
from lingua.model.args import TransformerArgs
from lingua.model.scan import split_weights
from lingua.model.transformer import TransformerBlock

# Keys of attention, which no layer has.
ATTENTION = {"n_kv_heads", "rope_theta", "rope_scaling", "sliding_window", "qkv_bias", "qk_norm"}
ATTENTION |= {"attn_impl"}


@dataclass
class ModelArgs(MainModelArgs):
    cell: Guarded[Literal["mingru", "minlstm", "hawk"]] = "hawk"  # recurrence of the layers

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        for default in fields(TransformerArgs):
            if default.name in ATTENTION and getattr(self, default.name) != default.default:
                yield default.name, "must be left out: no layer of this app is attention"


@dataclass
class TrainArgs(MainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


def build(args: TrainArgs) -> Built:
    model, (n_heads, _, head_dim) = args.model, args.model.heads()
    built = main_build(args, block=partial(TransformerBlock, attention=MIXERS[model.cell]))
    assert built.plan is not None
    plan = replace(
        built.plan,
        tp={**(built.plan.tp or {}), **split_weights(built.module)},
        tp_divides={"model.n_heads": n_heads, "data.seq_len": args.data.seq_len},
    )
    # Forward and backward are 6 for each weight that a token meets, and for each feature's state.
    weights = sum(p.numel() for p in built.module.get_submodule("layers").parameters())
    states = model.n_layers * n_heads * head_dim
    flops = 6.0 * (weights + states + model.dim * model.vocab_size)
    return replace(built, plan=plan, flops_per_token=flops)


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
