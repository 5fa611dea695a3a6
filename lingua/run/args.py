"""The keys that every run has, of `config.yaml` and of the command line. An app derives its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lingua.base.dump_dir import CHECKPOINTS
from lingua.base.errors import nearest
from lingua.checkpoint.args import CheckpointArgs
from lingua.config.load import resume_classes
from lingua.config.schema import (
    MAX_STEPS,
    Additions,
    Announced,
    Free,
    Guarded,
    Operational,
    bounds,
    schema,
)
from lingua.data.args import DataArgs, ValidationArgs, micro_steps
from lingua.model.args import TransformerArgs
from lingua.monitor.args import HarnessArgs, LoggingArgs, ProfilingArgs
from lingua.optim.args import OptimArgs
from lingua.parallel.args import DistributedArgs


@dataclass
class EvaluationArgs(HarnessArgs):
    every: Free[int] = 1000  # steps between two evaluations; the last step is evaluated too
    # in the processes of the run, which waits (process), or each as a job of its own (slurm)
    launcher: Free[Literal["process", "slurm"]] = "process"
    # keys of such a job: those of lingua stool and of apps.main.eval, {nodes: 1, ngpu: 8, time: 60}
    job: Free[dict[str, Any]] = field(default_factory=dict)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from bounds(self, 1, "every")


@dataclass
class SamplesArgs:
    every: Free[int] = 0  # steps between two samples of what the model writes; 0: at the end alone

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "every")


@dataclass
class ProbeArgs:
    every: Free[int | None] = 1  # steps between two calls of the app's probe; null: never

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "every")


@dataclass
class RunArgs:
    name: Operational[str] = "lingua"  # name of the run
    # import path of the app that is trained; null: apps.main. A file can only name an app of this
    # repository or of an installed package that registers it
    app: Free[str | None] = None
    # folder of everything the run writes; null: runs/<name>
    dump_dir: Operational[str | None] = None
    seed: Guarded[int] = 42  # what data order, initial weights and dropout depend on
    steps: Announced[int] = 1000  # optimizer steps of the whole run
    stop_at: Operational[int | None] = None  # leave after this step, as if interrupted; null: never
    grad_acc_steps: Additions[int | None] = None  # micro-steps of a step; null: as few as fit
    device: Operational[Literal["auto", "cpu", "cuda", "mps"]] = "auto"  # auto: cuda, else cpu
    # bitwise equal runs, at some speed: true, on the same topology; mesh, on any without tp
    deterministic: Free[Literal[False, True, "mesh"]] = False
    data: DataArgs = field(default_factory=DataArgs)
    model: TransformerArgs = field(default_factory=TransformerArgs)  # an app has its own
    optim: OptimArgs = field(default_factory=OptimArgs)
    distributed: DistributedArgs = field(default_factory=DistributedArgs)
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs)
    validation: Operational[ValidationArgs] = field(default_factory=ValidationArgs)
    samples: Operational[SamplesArgs] = field(default_factory=SamplesArgs)
    probe: Operational[ProbeArgs] = field(default_factory=ProbeArgs)
    eval: Operational[EvaluationArgs | None] = None  # benchmarks while it trains, when given
    logging: Operational[LoggingArgs] = field(default_factory=LoggingArgs)
    profiling: Operational[ProfilingArgs] = field(default_factory=ProfilingArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "steps", "stop_at", "grad_acc_steps", maximum=MAX_STEPS)
        names = ("name", self.name), ("dump_dir", self.dump_dir)
        for key, text in (*names, ("checkpoint.path", self.checkpoint.path)):
            if text is not None and not (text.strip() and text.isprintable()):
                yield key, "must be a name without control characters"
        if self.dump_dir is None and (self.name == "." or ".." in Path(self.name).parts):
            yield "name", "must be of a folder in runs/; dump_dir=FOLDER writes elsewhere"
        keys = resume_classes(type(self))
        for i, key in enumerate(self.checkpoint.allow_change):
            if key not in keys and not key.startswith("data."):  # data.content.NAME, of each source
                yield f"checkpoint.allow_change[{i}]", f"must be a config key{nearest(key, keys)}"
        if self.exact and self.distributed.tp_size > 1:
            need = "must be 1 with deterministic = mesh: tensor parallelism splits sums of products"
            yield "distributed.tp_size", f"{need}, whose order then depends on it"
        if self.exact and self.distributed.cp_size > 1:
            need = "must be 1 with deterministic = mesh: gradients of a row would be sums of parts"
            yield "distributed.cp_size", need
        if self.exact and self.distributed.grad_sync not in (None, "every"):
            need = "must be every or null with deterministic = mesh: between micro-steps a rank"
            yield "distributed.grad_sync", f"{need} would add up gradients in its own order"
        if self.exact and self.distributed.float8 is not None:
            need = "must be null with deterministic = mesh: its scales depend on the mesh"
            yield "distributed.float8", need
        if not self.exact and self.distributed.check_every is not None:
            yield "distributed.check_every", "must be null without deterministic = mesh"
        compiled, muon = self.distributed.compile, self.optim.name == "muon"
        unfit = {"distributed.compile": compiled, "optim.name": muon, "deterministic": self.exact}
        for key in [key for key, is_set in unfit.items() if is_set and self.device == "mps"]:
            yield key, "is not for device = mps (docs/machines.md#devices)"
        for i, name in enumerate(self.validation.sources):
            if name in self.data.used_sources():
                yield f"validation.sources[{i}]", f"is trained on, as data.sources.{name}"

    @property
    def exact(self) -> bool:
        """Whether the run is to be the same to the last bit on every data-parallel mesh."""
        return self.deterministic == "mesh"

    @property
    def noisy(self) -> str | None:
        """The key for which the model is given noise in training (`LanguageModel`), if any."""
        return "model.dropout" if self.model.dropout else None

    @property
    def folder(self) -> Path:
        """The dump dir."""
        return Path(self.dump_dir or f"runs/{self.name}")

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.checkpoint.path or self.folder / CHECKPOINTS)

    @property
    def end(self) -> int:
        """The last step of this process."""
        return min(self.steps, self.stop_at or self.steps)

    def micro_steps(self, dp_degree: int) -> tuple[int, int]:
        """(micro-steps of a step, rows of a micro-batch), the same on every rank. Raises UserError
        where they cannot be as `grad_acc_steps` asks."""
        size, largest = self.data.step_rows, self.data.batch_size
        return micro_steps(size, dp_degree, largest, self.grad_acc_steps, self.exact)

    def evaluation_due(self, step: int) -> bool:
        """Whether benchmarks are due once `step` is complete."""
        return self.eval is not None and (step % self.eval.every == 0 or step == self.steps)

    def samples_due(self, step: int) -> bool:
        """Whether samples are due once `step` is complete; those of the last step end the run."""
        every = self.samples.every
        return every > 0 and step % every == 0 and step < self.steps

    def due_later(self, every: int, step: int) -> bool:
        """Whether what is done every so many steps, and at the end, is due in this process once
        `step` is complete."""
        return self.end == self.steps or (every > 0 and self.end // every > step // every)

    def probe_due(self, step: int) -> bool:
        """Whether the app's probe is called in `step`."""
        return self.probe.every is not None and step % self.probe.every == 0

    def measurement_due(self, step: int) -> bool:
        """Whether the held-out loss is due once `step` is complete."""
        every = self.validation.every
        return step == self.steps or (every > 0 and step % every == 0)


@cache
def _kinds() -> dict[str, str]:
    return {path: key.kind for path, key in schema(RunArgs).items() if key.kind is not None}


def kind_of(key: str) -> str | None:
    """Whether a key of a run, or else its group, is "operational" or of "additions", as
    lingua.config.schema has them; None: numbers may depend on it by more than rounding."""
    kinds, parts = _kinds(), key.split(".")
    groups = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((kinds[group] for group in groups if group in kinds), None)
