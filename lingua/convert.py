"""Between a checkpoint and a folder of Hugging Face's transformers:

    python -m lingua.convert source=runs/debug out=debug-hf
    python -m lingua.convert source=runs/debug/checkpoints/0000000700 out=debug-hf dtype=bfloat16
    python -m lingua.convert source=Llama-3.2-1B out=llama-1b

source is a checkpoint, a run's folder (its newest), or a folder with config.json. Either way the
weights keep their bits. From a folder comes a checkpoint without an optimizer: a model to use.
`checkpoint.init_from` starts a training run from a folder without this program.

The form of a model in transformers belongs to its app (`App.hugging_face`): the checkpoint's own,
and apps.main for a folder, unless app=MODULE names another.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import MISSING
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lingua.app import App, choose_app, named_app
from lingua.checkpoint.folder import temporary, verify
from lingua.checkpoint.save import save
from lingua.checkpoint.source import TensorSource, check_fit, open_checkpoint
from lingua.config.load import load, to_yaml
from lingua.config.schema import Free
from lingua.errors import UserError
from lingua.hugging_face import (
    CONFIG,
    INDEX,
    SINGLE,
    HFTensor,
    adds_bos,
    find_tokenizer,
    form_of,
    open_folder,
)
from lingua.inference.trained import check_vocabulary, open_trained
from lingua.parallel.launch import detect_launch, one_process
from lingua.parallel.program import run_program
from lingua.tokenizer import (
    Tokenizer,
    TokenizerArgs,
    build_tokenizer,
    tokenizer_config,
    tokenizer_file,
)

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass
class ConvertArgs:
    source: Free[str] = MISSING  # a checkpoint, a run's folder, or a folder of transformers
    out: Free[str] = MISSING  # folder to make, of the other kind
    app: Free[str | None] = None  # import path of the app; null: the checkpoint's own, or apps.main
    # of the weights; null: as they are
    dtype: Free[Literal["float32", "bfloat16", "float16"] | None] = None
    shard_gb: Free[float] = 5.0  # GB of one safetensors file; a larger model is split
    # the model's tokenizer, in place of the one that source names: {name: hf, path: FILE}
    tokenizer: TokenizerArgs | None = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.shard_gb <= 0:
            yield "shard_gb", "must be above 0"
        out = Path(self.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            yield "out", "exists already; must be a new or empty folder"

    def cast(self, t: Tensor) -> Tensor:
        return t.to(getattr(torch, self.dtype)) if self.dtype else t


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, _ = load(ConvertArgs, argv)
    if detect_launch().world_size > 1:
        raise UserError("converting is the work of one process")
    with one_process():
        try:
            if (Path(args.source) / CONFIG).is_file():
                import_folder(args, choose_app(argv))
            else:
                export_checkpoint(args, named_app(argv))
        except (OSError, SafetensorError) as error:
            raise UserError(f"out = {args.out}: cannot be written ({error})") from error


# ----------------------------------------------------------------------------------------- export


def export_checkpoint(args: ConvertArgs, app: App | None = None) -> None:
    """A checkpoint to a folder that transformers loads. What was written in part is removed.

    app: the app of the model; None: the one that the checkpoint names.
    """
    trained = open_trained("source", args.source, app)
    form = form_of(trained.app, f"source = {args.source}")
    config = form.to_config(trained.args.model, trained.args.data.seq_len)
    source = open_checkpoint(trained.checkpoint)
    tensors = {f"model.{name}": t for name, t in form.tensors(trained.args.model).items()}
    check_fit(
        f"{source.path} cannot be exported",
        {name: t.shape for name, t in tensors.items()},
        source.shapes("model."),
        "in transformers",
    )
    tokenizer_args = args.tokenizer or trained.args.data.tokenizer
    tokenizer = build_tokenizer(tokenizer_args)
    check_vocabulary(tokenizer, tokenizer_args, source.path, trained.args.model.vocab_size)
    verify(trained.checkpoint)
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    dtype = args.dtype or str(next(iter(source.tensors.values())).dtype).removeprefix("torch.")
    folder = temporary(Path(args.out))
    folder.mkdir(parents=True)
    try:
        write_weights(args, source, tensors, folder)
        write_json(folder / CONFIG, config | special | {"dtype": dtype})
        write_json(folder / "generation_config.json", special)
        note = write_tokenizer(folder, tokenizer_args, tokenizer, trained.args.data)
        if Path(args.out).exists():  # empty
            Path(args.out).rmdir()
        folder.rename(args.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{source.path} (step {source.step}) is now {args.out}; {note}")


def write_weights(
    args: ConvertArgs, source: TensorSource, tensors: dict[str, HFTensor], folder: Path
) -> None:
    """Files of at most `shard_gb`, one in memory at a time, and their index where they are many."""
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name in tensors:
        size = args.cast(source.tensors[name]).nbytes
        if shards[-1] and filled + size > args.shard_gb * 1e9:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        weights = {
            tensors[name].name: args.cast(tensors[name].reorder(t, to_hf=True))
            for name, t in source.whole(names).items()
        }
        save_file(weights, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # as others are; the library makes them the user's alone
        weight_map |= dict.fromkeys(weights, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tokenizer(folder: Path, args: TokenizerArgs, tokenizer: Tokenizer, data: Any) -> str:
    """The tokenizer's files where it has transformers' form; returns a note for the user.

    data: the `data` group of the model's configuration.
    """
    path = tokenizer_file(args)
    if args.name == "hf":
        shutil.copyfile(path, folder / "tokenizer.json")
    elif args.name == "sp" and is_llama_tokenizer(tokenizer):
        shutil.copyfile(path, folder / "tokenizer.model")
    else:
        return f"transformers has no form of its {args.name} tokenizer: no file of it is there"
    if args.name == "hf" and path.with_name(TOKENIZER_CONFIG).is_file():
        shutil.copyfile(path.with_name(TOKENIZER_CONFIG), folder / TOKENIZER_CONFIG)
        if args.bos or args.eos:
            config = tokenizer_config(args) | special_tokens(tokenizer)
            write_json(folder / TOKENIZER_CONFIG, config)
        return "with its tokenizer"
    config = special_tokens(tokenizer) | {
        "model_max_length": data.seq_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": data.add_bos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if args.name == "sp":
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_eos_token": False}
    write_json(folder / TOKENIZER_CONFIG, config)
    return "with its tokenizer"


def is_llama_tokenizer(tokenizer: Tokenizer) -> bool:
    """Whether a sentencepiece model does what transformers' LlamaTokenizer makes of it: it is a
    BPE, and puts a space before a text, of which it changes nothing else."""
    model = tokenizer.library
    if model.normalize(" \ufb01  x ") != "▁▁\ufb01▁▁x▁":  # a ligature
        return False
    # BPE scores a piece by its rank, a whole number; others by its probability.
    return all(model.get_score(i).is_integer() for i in range(model.vocab_size()))


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """How the first and the last token are spelled, of an `hf` or `sp` tokenizer."""
    library = tokenizer.library
    spell = library.id_to_token if tokenizer.name == "hf" else library.id_to_piece
    special = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: spell(i) for name, i in special.items() if i is not None}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------- import


def import_folder(args: ConvertArgs, app: App) -> None:
    """A folder of transformers to a checkpoint of step 0, with its tokenizer beside it."""
    form, out = form_of(app, f"source = {args.source}"), Path(args.out)
    source, model, seq_len = open_folder(form, args.source, "source")
    tokenizer_args = args.tokenizer or find_tokenizer(source.path, "source", "tokenizer")
    tokenizer = build_tokenizer(tokenizer_args)
    check_vocabulary(tokenizer, tokenizer_args, source.path, model.vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    if args.tokenizer is None:
        file = tokenizer_file(tokenizer_args)
        for path in (file, file.with_name(TOKENIZER_CONFIG)):
            if path.is_file():
                shutil.copyfile(path, out / path.name)
        tokenizer_args = replace(tokenizer_args, path=str((out / file.name).resolve()))
    tensors = {name: args.cast(t) for name, t in source.whole(source.tensors).items()}
    data = {
        "seq_len": seq_len,
        "add_bos": adds_bos(tokenizer_args, tokenizer),
        "add_eos": tokenizer.eos_id is not None,
        "tokenizer": asdict(tokenizer_args),
    }
    config = {"app": app.path, "model": asdict(model), "data": data}
    path = save(out, 0, tensors, {}, to_yaml(config))
    print(f"{source.path} is now {path}")


if __name__ == "__main__":
    run_program(main)
