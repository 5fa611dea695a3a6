"""What a run consists of once it has started."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import App
from lingua.checkpoint.resume import Progress
from lingua.checkpoint.saver import Saver
from lingua.data.rows import OpenData
from lingua.monitor.reporter import Reporter
from lingua.tokenizer import Tokenizer


@dataclass
class Run:
    """A started run, as the loop, an app's objective and its probe see it."""

    app: App
    args: Any  # of the app's configuration class, every value resolved
    mesh: DeviceMesh
    model: nn.Module  # sharded; parameters may be DTensors
    optimizer: torch.optim.Optimizer
    tokenizer: Tokenizer
    data: OpenData  # lingua.plan has none: there it is None
    fingerprints: dict[str, str]  # of the data and the tokenizer, saved with each checkpoint
    progress: Progress  # completed steps and rows consumed
    report: Reporter
    saver: Saver

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)
