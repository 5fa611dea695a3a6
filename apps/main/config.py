"""The configuration of a run of this model: the keys of `config.yaml` and of the command line."""

from dataclasses import dataclass, field

from lingua.config.schema import Guarded
from lingua.model.args import TransformerArgs
from lingua.run.args import RunArgs


@dataclass
class ModelArgs(TransformerArgs):
    weight_tying: Guarded[bool] = False  # the head shares the embedding's matrix


@dataclass
class TrainArgs(RunArgs):
    model: ModelArgs = field(default_factory=ModelArgs)
