"""The type of the loop of a run, apps/main/train.py, for the library and the type checker."""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor

from lingua.app import App
from lingua.data.loader import MicroBatch
from lingua.model import Losses
from lingua.monitor.reporter import StepResult
from lingua.optim.optimizer import NonFiniteGuard
from lingua.parallel.signals import StopRequest
from lingua.run.run import Run
from lingua.run.start import Started


class ObjectiveLike(Protocol):
    """What a run minimises: see apps.main.train.Objective, from which a fork derives."""

    def count(self, micro: MicroBatch) -> Tensor: ...
    def loss(self, micro: MicroBatch) -> Losses: ...
    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]: ...
    def measure(self) -> float | None: ...
    def try_measuring(self) -> None: ...


class Loop(Protocol):
    """The functions of the module apps.main.train, which says what they do."""

    @property
    def Objective(self) -> Callable[[Run], ObjectiveLike]: ...
    def train(self, app: App, args: Any) -> str | None: ...
    def build_run(
        self, app: App, args: Any, started: Started, stop: StopRequest, open_parts: ExitStack
    ) -> Run: ...
    def take_steps(self, run: Run, stop: StopRequest) -> Generator[int, None, None]: ...
    def train_step(
        self,
        run: Run,
        objective: ObjectiveLike,
        guard: NonFiniteGuard,
        batch: list[MicroBatch],
        counts: Tensor,
    ) -> StepResult: ...
