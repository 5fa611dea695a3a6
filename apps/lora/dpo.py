"""apps.dpo with low-rank changes whose reference is the model without them (apps.lora)."""

from dataclasses import dataclass

from apps.dpo import TrainArgs as DPOTrainArgs
from apps.dpo import app as dpo_app
from apps.lora import WithLora, adapted


@dataclass
class TrainArgs(DPOTrainArgs, WithLora):
    pass


app = adapted(dpo_app, __name__, TrainArgs)
