"""lingua: a small library to train, evaluate and fork language models on any mesh of devices.

lm = lingua.load("runs/debug")
print(lm.generate("def main(", max_gen_tokens=50))
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # importing lingua imports no torch
    from lingua.inference.lm import LM

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
