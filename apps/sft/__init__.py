"""Instruction tuning: conversations as data, loss on the answers alone.

    python -m apps.main.train config=apps/sft/configs/debug.yaml [key=value ...]
    python -m apps.main.generate ckpt=runs/debug-sft chat=true

The rows of any app are conversations where `data.chat` is given; this app gives it, with documents
that do not see each other, to the model of apps.main.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from lingua.data.args import ChatArgs, DataArgs


@dataclass
class TrainArgs(MainArgs):
    data: DataArgs = field(
        default_factory=lambda: DataArgs(chat=ChatArgs(), document_mask="ignore")
    )

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if self.data.chat is None:
            yield "data.chat", "must not be null: this app trains on conversations"
        elif self.data.chat.pairs:
            yield "data.chat.pairs", "must be false: apps.dpo trains on pairs"


app = replace(main_app, path=__name__, config=TrainArgs)
