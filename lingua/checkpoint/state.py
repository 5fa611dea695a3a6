"""The state that a run saves besides tensors and its config: the content of `train_state.json`."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lingua.base.version import __version__


def versions() -> dict[str, str]:
    """Of the code, and the vector width for which torch has chosen its kernels of the CPU."""
    python, width = platform.python_version(), torch.backends.cpu.get_cpu_capability()
    known = {"lingua": __version__, "torch": torch.__version__, "python": python}
    return known | {"cpu_capability": width}


@dataclass
class Progress:
    """The progress of a run: all of its state besides tensors and config."""

    step: int = 0  # completed updates, those that were skipped included
    position: int = 0  # rows consumed: where the row stream goes on
    skipped_steps: int = 0  # updates suppressed: not finite, or without a target
    trained_s: float = 0.0  # seconds of training, over all starts

    def validate(self) -> Iterator[tuple[str, str]]:
        for key in ("step", "position", "skipped_steps"):
            if not 0 <= getattr(self, key) < 2**53:
                yield key, "must be at least 0 and below 2^53"


@dataclass
class TrainState:
    """The content of `train_state.json`. Only `progress`, `data` and `held_out` matter to a resume:
    the settings in `param_groups` come from the config, the mesh may be another."""

    progress: Progress | None = None  # None: of a model that a program converted
    tokens: int = 0
    schedule: dict[str, float] = field(default_factory=dict)  # the last step, and its rate
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    topology: list[int] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # fingerprints
    held_out: float | None = None  # nats per byte, where this step was measured
    tensors: str = ""  # lingua.checkpoint.digest of all tensors; earlier versions have none
    versions: dict[str, str] = field(default_factory=versions)

    def validate(self) -> Iterator[tuple[str, str]]:
        if not all(isinstance(group.get("param_names"), list) for group in self.param_groups):
            yield "param_groups", "must each have a list param_names"
