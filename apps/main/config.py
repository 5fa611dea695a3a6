"""What a run is given: its configuration, and the model that a fork may change."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from apps.main.evaluation import EvaluationArgs
from apps.main.transformer import ModelArgs, build_transformer, parallel_plan
from lingua.checkpoint.retention import CheckpointArgs
from lingua.config.schema import Announced, Free, Guarded
from lingua.data.args import DataArgs
from lingua.monitor.metrics import LoggingArgs
from lingua.monitor.profiling import ProfilingArgs
from lingua.optim.args import OptimArgs
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.parallelize import ParallelPlan
from lingua.transformer import flops_per_token
from lingua.validation import ValidationArgs


@dataclass
class TrainArgs:
    name: Free[str] = "lingua"  # name of the run
    dump_dir: Free[str | None] = None  # folder of everything the run writes; null: runs/<name>
    seed: Guarded[int] = 42  # what data order, initial weights and dropout depend on
    steps: Announced[int] = 1000  # optimizer steps of the whole run
    stop_at: Free[int | None] = None  # leave after this step, as if interrupted; null: never
    grad_acc_steps: Free[int | None] = None  # micro-steps of a step; null: as few as fit
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    deterministic: Free[bool] = False  # bitwise equal runs on the same topology, at some speed
    data: DataArgs = field(default_factory=DataArgs)
    model: ModelArgs = field(default_factory=ModelArgs)
    optim: OptimArgs = field(default_factory=OptimArgs)
    distributed: DistributedArgs = field(default_factory=DistributedArgs)
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)
    eval: Free[EvaluationArgs | None] = None  # benchmarks while it trains, when given
    logging: LoggingArgs = field(default_factory=LoggingArgs)
    profiling: ProfilingArgs = field(default_factory=ProfilingArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        for key in ("steps", "stop_at", "grad_acc_steps"):
            if (value := getattr(self, key)) is not None and value < 1:
                yield key, "must be at least 1"


@dataclass(frozen=True)
class Built:
    """What a builder gives."""

    module: nn.Module  # a lingua.model.LanguageModel, on the meta device unless it is small
    plan: ParallelPlan | None  # None: data parallel as one unit
    flops_per_token: float  # of forward and backward, for the MFU


def build(args: TrainArgs) -> Built:
    """The model of this app."""
    return Built(
        build_transformer(args.model),
        parallel_plan(args.model, args.data.seq_len),
        flops_per_token(args.model, args.model.vocab_size, args.data.seq_len),
    )
