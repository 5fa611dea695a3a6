"""The Llama-style language model of this repository. `python -m apps.main.train` trains it."""

from typing import Any

from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import App


def hf_form() -> Any:
    """Returns the HuggingFace that describes how transformers stores the model."""
    from apps.main.hugging_face import llama

    return llama


app = App(path=__name__, config=TrainArgs, build=build, hugging_face=hf_form)
