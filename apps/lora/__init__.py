"""Low-rank adaptation (Hu et al., 2021, arXiv 2106.09685): linear layers of a trained model, the
base, have small changes, which alone are trained, and saved.

    python -m apps.main.train app=apps.lora checkpoint.init_from=runs/debug config=my.yaml
    python -m apps.main.train config=apps/lora/configs/debug.yaml [key=value ...]

`app = adapted(OTHER, __name__, TrainArgs)` gives any app such changes, as here those of apps.main,
and apps.lora.sft and apps.lora.dpo those that tune a model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from lingua.app import App, Built
from lingua.config.schema import Announced, Guarded, bounds
from lingua.run.args import RunArgs


@dataclass
class LoraArgs:
    rank: Guarded[int] = 16  # of each change
    alpha: Guarded[float] = 32.0  # a change is times alpha / rank
    # the linear layers that have one, by patterns of names
    targets: Guarded[list[str]] = field(
        default_factory=lambda: ["layers.*.attention.w*", "layers.*.feed_forward.w*"]
    )
    dropout: Announced[float] = 0.0  # share of a change's inputs zeroed in training

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "rank")
        if not 0 < self.alpha < float("inf"):
            yield "alpha", "must be a finite number above 0"
        if not 0 <= self.dropout < 1:
            yield "dropout", "must be at least 0 and below 1"
        if not self.targets:
            yield "targets", "must name a linear layer"


@dataclass
class WithLora(RunArgs):
    """What the configuration of an adapted app is derived from, after the app's own."""

    lora: LoraArgs = field(default_factory=LoraArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if self.checkpoint.init_from is None:
            yield "checkpoint.init_from", "must be given: the model whose layers are changed"
        if self.distributed.float8 is not None:
            yield "distributed.float8", "must be null: layers with a change are not converted"
        if self.lora.dropout and self.distributed.cp_size > 1:
            yield "distributed.cp_size", "must be 1 with lora.dropout, whose noise is of whole rows"

    @property
    def noisy(self) -> str | None:
        return super().noisy or ("lora.dropout" if self.lora.dropout else None)


def adapted(app: App, path: str, config: type[WithLora]) -> App:
    """An app whose models are those of `app` with changes of their layers. `path` is the module
    that has it as `app`, and `config` is derived from the app's own configuration and WithLora."""
    return replace(app, path=path, config=config, build=partial(build, app), merges_into=app)


def build(app: App, args: Any) -> Built:
    """The model of `app`, frozen, with changes. Keys are read before torch is imported."""
    from apps.lora.model import adapt

    return adapt(app.build(args), args.lora, args.distributed.dtype)


@dataclass
class TrainArgs(MainArgs, WithLora):
    pass


app = adapted(main_app, __name__, TrainArgs)
