"""The Llama-style language model of this repository. `python -m apps.main.train` trains it."""

from apps.main.config import TrainArgs
from apps.main.hugging_face import llama
from apps.main.transformer import build
from lingua.app import App

app = App(path=__name__, config=TrainArgs, build=build, hugging_face=llama)
