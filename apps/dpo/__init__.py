"""Direct preference optimisation (Rafailov et al., 2023, arXiv 2305.18290): pairs of answers, of
which one is preferred, and a frozen reference model, the one that the run starts from.

    python -m apps.main.train config=apps/dpo/configs/debug.yaml [key=value ...]

Pairs are rows of conversations (`data.chat.pairs`); the model is that of apps.main.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from apps.dpo.objective import Preferences
from apps.dpo.reference import fingerprint, open_reference
from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from lingua.config.schema import Guarded
from lingua.data.args import ChatArgs, DataArgs
from lingua.data.rows import OpenData
from lingua.data.sources import TextData
from lingua.run.args import RunArgs
from lingua.tokenizer.interface import Tokenizer


@dataclass
class DPOArgs:
    beta: Guarded[float] = 0.1  # weight of the distance to the reference

    def validate(self) -> Iterator[tuple[str, str]]:
        if not 0 < self.beta < float("inf"):
            yield "beta", "must be a finite number above 0"


@dataclass
class TrainArgs(MainArgs):
    data: DataArgs = field(
        default_factory=lambda: DataArgs(chat=ChatArgs(pairs=True), document_mask="ignore")
    )
    dpo: DPOArgs = field(default_factory=DPOArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        data, start = self.data, self.checkpoint
        if data.chat is None or not data.chat.pairs:
            yield "data.chat.pairs", "must be true: this app trains on pairs"
        if data.document_mask == "none":
            yield "data.document_mask", "must be ignore or keep: answers must not see each other"
        if data.n_views != 2:
            yield "data.n_views", "must be 2"
        if start.init_from is None:
            need = "must be given: the model that the run starts from is the reference"
            yield "checkpoint.init_from", need
        if start.continue_training_from_init:
            need = "must be false: the model that the run starts from is the reference"
            yield "checkpoint.continue_training_from_init", need


class PairData(TextData):
    def open(self, args: RunArgs, tokenizer: Tokenizer) -> OpenData:
        opened = super().open(args, tokenizer)
        reference = {"data.reference": fingerprint(open_reference(args, "size"))}
        return replace(opened, fingerprints={**opened.fingerprints, **reference})


app = replace(main_app, path=__name__, config=TrainArgs, data=PairData(), objective=Preferences)
