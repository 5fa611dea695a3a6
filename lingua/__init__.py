"""lingua: a small library to train, evaluate and fork language models on any mesh of devices.

record = lingua.train("apps.main", {"config": "apps/main/configs/debug.yaml", "steps": 100})
with lingua.open_run("apps.main", {"config": "apps/main/configs/debug.yaml"}) as run:
    for step in run:
        print(step, run.loss)
lm = lingua.load("runs/debug")
print(lm.generate("def main(", max_gen_tokens=50))
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from lingua.base.version import __version__

if TYPE_CHECKING:  # importing lingua imports no torch
    from lingua.app import App
    from lingua.run.in_process import OpenRun
    from lingua.run.records import Record
    from lingua.tools.inference.lm import LM
    from lingua.tools.slurm.submitit import Job as Job

# Looks that a thread of OpenMP takes at the others before it gives up its core (libgomp: 300,000,
# some 3 ms, in which nothing else has the core). Read when torch is imported.
SPIN_COUNT = "10000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

__all__ = ["Job", "__version__", "load", "open_run", "train"]


def __getattr__(name: str) -> Any:
    if name != "Job":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lingua.tools.slurm.submitit import Job

    return Job


def load(
    path: str | Path,
    app: "str | ModuleType | App | None" = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["bf16", "fp32"] | None = None,
    tokenizer_path: str | None = None,
    base_model: str | Path | None = None,
) -> "LM":
    """A trained model to use in this process, which needs no process group of its own.

    Args:
        path: a run's dump dir (its newest checkpoint), a checkpoint, a folder of transformers, a
            checkpoint of Meta Lingua's, or a file of torch.save that has the config.
        app: the model's app: an import path, its module, or the App; None: the one that the
            checkpoint names, else apps.main.
        dtype: that the model computes in; None: bf16 on CUDA, fp32 on the CPU.
        tokenizer_path: the tokenizer's file now; None: where it was in training, or in the folder.
        base_model: the model that adapters change, now; None: where it was in training.

    Raises lingua.base.errors.UserError where it is none of these, or another app's, or damaged.
    """
    from lingua.tools.inference.lm import open_lm

    where = None if base_model is None else str(base_model)
    return open_lm(str(path), app, device, dtype, tokenizer_path, where)


def train(
    app: "str | ModuleType | App",
    config: "Mapping[str, Any] | Sequence[str] | str | Path | None" = None,
) -> "Record":
    """Train in this process, the same run as by `python -m apps.main.train`. Call it from the main
    thread; in a script, below `if __name__ == "__main__":`, which processes that tokenize import.
    A signal, such as an interrupt of the notebook, saves and stops the run, and then has its usual
    effect. The same call continues the run.

    Args:
        app: what is trained: an import path such as "apps.main", its module, or the App.
        config: a YAML file, or what the command line has: a list of key=value, or nested mappings
            (OmegaConf's too) or dotted keys, `config` for a file that they are laid over.

    Returns what the run has written. Raises lingua.base.errors.UserError for a mistake in the
    config, or in the files that it names.
    """
    from lingua.run.in_process import train_here

    return train_here(app, config)


def open_run(
    app: "str | ModuleType | App",
    config: "Mapping[str, Any] | Sequence[str] | str | Path | None" = None,
) -> "AbstractContextManager[OpenRun]":
    """The run of `train` as a loop, whose body may look at the model between two steps:

        with lingua.open_run("apps.main", "my.yaml") as run:
            for step in run:  # completed, and logged, measured and saved where that was due
                print(step, run.loss)

    Leaving the loop or the context early, also by an error or an interrupt, saves the newest step,
    and the same call continues the run. A finished run yields no step, and has its model.
    Arguments, signals and errors are those of `train`.
    """
    from lingua.run.in_process import open_here

    return open_here(app, config)
