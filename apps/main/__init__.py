"""The Llama-style language model of this repository. `python -m apps.main.train` trains it."""

from typing import TYPE_CHECKING, Any

from apps.main.config import TrainArgs
from lingua.app import App, Built

if TYPE_CHECKING:  # mypy compares the loop with what the library calls
    from apps.main import train
    from lingua.run.loop import Loop

    loop: Loop = train


def build(args: TrainArgs) -> Built:
    """The model of a config. Keys are read before torch is imported."""
    from apps.main.transformer import build

    return build(args)


def hf_form() -> Any:
    """Returns the HuggingFace that describes how transformers stores the model."""
    from apps.main.hugging_face import llama

    return llama


app = App(path=__name__, config=TrainArgs, build=build, hugging_face=hf_form)
