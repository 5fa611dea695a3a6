"""apps.sft with low-rank changes in place of full tuning (apps.lora)."""

from dataclasses import dataclass

from apps.lora import WithLora, adapted
from apps.sft import TrainArgs as SFTArgs
from apps.sft import app as sft_app


@dataclass
class TrainArgs(SFTArgs, WithLora):
    pass


app = adapted(sft_app, __name__, TrainArgs)
