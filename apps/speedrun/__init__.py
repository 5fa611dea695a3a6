"""A speedrun: what lowers the held-out loss that a few processor minutes reach. The model of
apps/main with further parts, each of them an option of the config.

    python -m lingua tokenizer train config=apps/main/configs/debug.yaml vocab_size=1024 \
        out=data/speedrun-tokenizer
    python -m apps.main.train config=apps/speedrun/configs/speedrun.yaml [key=value ...]
"""

from dataclasses import dataclass, field, replace

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from apps.speedrun.model import ModelArgs, build


@dataclass
class TrainArgs(MainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
