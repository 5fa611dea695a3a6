"""A small configuration, and what loading it gives or refuses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from lingua.base.errors import UserError
from lingua.config.foreign import Foreign
from lingua.config.load import load
from lingua.config.schema import Announced, Free, Guarded


@dataclass
class Optim:
    lr: Announced[float] = 1e-3  # peak learning rate
    name: Guarded[Literal["adamw", "muon"]] = "adamw"
    clip: Announced[float | None] = 1.0
    warmup: Announced[int] = 10
    # shares of the peak
    # that the layers have
    ratios: Announced[list[float]] = field(default_factory=lambda: [1.0])

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.lr < 0:
            yield "lr", "must be at least 0"


@dataclass
class Stage:
    from_step: Guarded[int]
    sources: Guarded[dict[str, float]] = field(default_factory=dict)

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.from_step < 0:
            yield "from_step", "must be at least 0"


@dataclass
class SourceFiles:
    files: Free[list[str]] = field(default_factory=list)

    def validate(self) -> Iterator[tuple[str, str]]:
        if "" in self.files:
            yield "files", "must not hold an empty text"


@dataclass
class Data:
    root_dir: Free[str] = "data"
    sources: Guarded[dict[str, float]] = field(default_factory=lambda: {"stdlib": 1.0})
    source_files: Free[dict[str, SourceFiles]] = field(default_factory=dict)
    stages: Guarded[list[Stage]] = field(default_factory=list)
    seq_len: Guarded[int] = 128

    def validate(self) -> Iterator[tuple[str, str]]:
        for name, weight in self.sources.items():
            if weight <= 0:
                yield f"sources.{name}", "must be above 0"


@dataclass
class Distributed:
    dp_replicate: Free[int | None] = 1
    dp_shard: Free[int | None] = None
    compile: Announced[bool] = False
    activation_checkpointing: Announced[Literal["none", "full", "selective"]] = "none"


@dataclass
class Model:
    dim: Guarded[int] = 64
    n_heads: Guarded[int | None] = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.dim < 1:
            yield "dim", "must be at least 1"


@dataclass
class Every:
    every: Free[int] = 100
    keep: Free[int] = 1


@dataclass
class Checkpoint:
    dump: Every = field(default_factory=Every)
    eval: Every = field(default_factory=lambda: Every(every=500))


@dataclass
class Benchmarks:
    tasks: Free[list[str]] = field(default_factory=list)


@dataclass
class Wandb:
    project: Free[str]
    tags: Free[list[str]] = field(default_factory=list)


@dataclass
class Logging:
    freq: Free[int] = 10
    wandb: Free[Wandb | None] = None


@dataclass
class Config:
    name: Free[str] = "run"
    dump_dir: Free[str | None] = None
    steps: Announced[int] = 1000
    seed: Guarded[int] = 42
    optim: Optim = field(default_factory=Optim)  # the optimizer
    data: Data = field(default_factory=Data)
    distributed: Distributed = field(default_factory=Distributed)
    model: Model = field(default_factory=Model)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    eval: Free[Benchmarks | None] = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.optim.warmup > self.steps:
            yield "optim.warmup", f"must be at most steps = {self.steps}"


def config(*argv: str) -> Config:
    return load(Config, list(argv))[0]


def mistakes(*argv: str, foreign: Callable[[], Foreign] | None = None) -> list[str]:
    """The lines of the error, without the heading that counts them."""
    with pytest.raises(UserError) as caught:
        load(Config, list(argv), foreign)
    lines = str(caught.value).split("\n  ")
    return lines if len(lines) == 1 else lines[1:]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"config={path}"
