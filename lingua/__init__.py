"""lingua: a small library to train, evaluate and fork language models on any mesh of devices."""

__version__ = "0.1.0"
