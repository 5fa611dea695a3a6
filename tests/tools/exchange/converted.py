"""Models saved as checkpoints and converted, for tests."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from apps.main.config import ModelArgs
from lingua.base.errors import UserError
from lingua.checkpoint.folder import read_checkpoint
from lingua.checkpoint.save import save
from lingua.checkpoint.source import open_checkpoint
from lingua.checkpoint.tensors import tensors_of
from lingua.data.rows import TOKENIZER
from lingua.model.args import RopeScaling
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start
from lingua.tools.exchange import convert
from tests.apps.test_model import initialised, model_args
from tests.ranks import Ranks

CPU = torch.device("cpu")
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=32)


def a_model(**changed: Any) -> ModelArgs:
    """Of the 258 tokens of the bytes tokenizer, and one more."""
    return model_args(**(changed | {"vocab_size": 259}))


def save_here(root: Path, model: ModelArgs, config: dict, tokens: str | None = None) -> None:
    """A checkpoint of step 3; `config` is laid over its model group, its tokenizer, `data` and
    `init_from`; `tokens` is the fingerprint of the tokenizer it says that it was trained with."""
    start(CPU, detect_launch(), DistributedArgs())
    tokenizer = config.pop("tokenizer", {"name": "bytes", "path": None})
    data = {"seq_len": 64, "add_bos": True, "add_eos": True, "tokenizer": tokenizer}
    data |= config.pop("data", {})
    checkpoint = {"init_from": config.pop("init_from", None)}
    whole = {"model": asdict(model) | config, "data": data, "checkpoint": checkpoint}
    state = {"data": {TOKENIZER: tokens}}
    save(root, 3, tensors_of(initialised(model)), state, OmegaConf.to_yaml(whole))


def convert_here(*arguments: str) -> str:
    """What the program refuses, or an empty string."""
    try:
        convert.main(list(arguments))
    except UserError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def convert_to(ranks: Ranks, source: Path, out: Path, *arguments: str) -> Path:
    """`out`, written by the program in a process of its own."""
    [refused] = ranks.run(1, convert_here, f"source={source}", f"out={out}", *arguments)
    assert not refused
    return out


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Of a folder of transformers, or of a checkpoint."""
    if list(folder.glob("*.safetensors")):
        files = sorted(folder.glob("*.safetensors"))
        return {name: t for file in files for name, t in load_file(file).items()}
    checkpoint, why = read_checkpoint(folder)
    assert checkpoint is not None, why
    source = open_checkpoint(checkpoint)
    tensors = source.whole(source.tensors)
    return {name.removeprefix("model."): t for name, t in tensors.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    equal = (torch.equal(t, expected[n]) and t.dtype == expected[n].dtype for n, t in found.items())
    return found.keys() == expected.keys() and all(equal)
