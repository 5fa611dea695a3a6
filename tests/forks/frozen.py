"""A fork that trains a part of the model: parameters that `build` freezes stay as they are."""

from dataclasses import replace
from typing import Any

from apps.main import app as main_app
from lingua.app import Built
from lingua.parallel.plan import within

# Of every style of the plan, and the parameters of the first block, which has no input to train.
FROZEN = ("tok_embeddings", "norm", "layers.0", "layers.1.ffn_norm", "layers.1.attention.w[qo]")


def build(args: Any) -> Built:
    built = main_app.build(args)
    for name, p in built.module.named_parameters():
        p.requires_grad_(not within(name, FROZEN))
    return built


app = replace(main_app, path=__name__, build=build)
