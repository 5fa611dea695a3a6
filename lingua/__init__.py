"""lingua: a small library to train, evaluate and fork language models on any mesh of devices.

record = lingua.train("apps.main", {"config": "apps/main/configs/debug.yaml", "steps": 100})
lm = lingua.load("runs/debug")
print(lm.generate("def main(", max_gen_tokens=50))
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # importing lingua imports no torch
    from lingua.app import App
    from lingua.inference.lm import LM
    from lingua.records import Record

__version__ = "0.1.0"


def load(
    path: str | Path,
    app: str | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["bf16", "fp32"] | None = None,
    tokenizer_path: str | None = None,
) -> "LM":
    """A trained model to use in this process, which needs no process group of its own.

    Args:
        path: a run's dump dir (its newest checkpoint), a checkpoint, or a folder of transformers.
        app: import path of the model's app; None: the one that the checkpoint names, of a folder of
            transformers apps.main.
        dtype: that the model computes in; None: bf16 on CUDA, fp32 on the CPU.
        tokenizer_path: the tokenizer's file now; None: where it was in training.

    Raises:
        lingua.errors.UserError: it is none of these, or another app's, or damaged.
    """
    from lingua.inference.lm import open_lm

    return open_lm(str(path), app, device, dtype, tokenizer_path)


def train(
    app: "str | ModuleType | App", config: "Mapping[str, Any] | str | Path | None" = None
) -> "Record":
    """Train in this process, for notebooks and scripts; the same run as by `python -m
    apps.main.train`, without a launcher. Call it from the main thread; in a script, below
    `if __name__ == "__main__":`, since the processes that tokenize import the script too.

    A signal, such as an interrupt of the notebook, saves and stops the run, and then has its usual
    effect: Ctrl-C raises KeyboardInterrupt. The same call continues the run.

    Args:
        app: what is trained: an import path such as "apps.main", its module, or the App.
        config: a YAML file, or what the command line has: nested mappings (OmegaConf's too) or
            dotted keys, `config` for a file that they are laid over.

    Returns:
        What the run has written, whose `metrics` are columns of numbers.

    Raises:
        lingua.errors.UserError: a mistake in the config, or of the files that it names.
    """
    from lingua.in_process import train_here

    return train_here(app, config)
