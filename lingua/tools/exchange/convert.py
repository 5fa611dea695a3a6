"""Convert a model between a checkpoint, one file, and a folder of Hugging Face's transformers:

    python -m lingua convert source=runs/debug out=debug-hf
    python -m lingua convert source=runs/debug/checkpoints/0000000700 out=debug-hf dtype=bfloat16
    python -m lingua convert source=Llama-3.2-1B out=llama-1b
    python -m lingua convert source=runs/debug out=debug.pth
    python -m lingua convert source=debug.pth out=plain

source is anything that checkpoint.init_from takes; a run that starts from it needs no conversion.
The weights keep their bits, and a checkpoint that is made has no optimizer. A file is that of
torch.save: {"model": {name: tensor}, "config": text of YAML, "step": n}, whose model is what Meta
Lingua has in its consolidated.pth.

The form of a model in transformers belongs to its app (`App.hugging_face`): the checkpoint's own,
and apps.main where none is named, unless app=MODULE names another.
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

from lingua.app import App, named_app
from lingua.base.dump_dir import step_folder
from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.checkpoint.folder import temporary
from lingua.checkpoint.origin import HF_CONFIG, is_hf_folder, open_source
from lingua.checkpoint.save import save
from lingua.checkpoint.source import TensorSource, check_fit
from lingua.config.load import load, to_yaml
from lingua.config.schema import Free
from lingua.config.values import parse_mapping, plain
from lingua.parallel.launch import detect_launch, one_process
from lingua.tokenizer import Tokenizer, TokenizerArgs
from lingua.tools.exchange.hugging_face import INDEX, SINGLE, HFTensor, config_of_hf_folder, form_of
from lingua.tools.exchange.meta_lingua import write_file
from lingua.tools.inference.trained import read_trained

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass
class ConvertArgs:
    source: Free[str] = MISSING  # anything that checkpoint.init_from takes
    out: Free[str] = MISSING  # folder or file to make
    # the kind of out: hf, a folder of transformers; checkpoint, put into the folder out; or file.
    # null: file where out ends in .pth or .pt, else hf from a checkpoint, else checkpoint
    to: Free[Literal["hf", "checkpoint", "file"] | None] = None
    app: Free[str | None] = None  # import path of the app; null: the checkpoint's own, or apps.main
    # dtype of the weights; null: as they are
    dtype: Free[Literal["float32", "bfloat16", "float16"] | None] = None
    shard_gb: Free[float] = 5.0  # GB of one safetensors file; a larger model is split
    # the model's tokenizer, in place of the one that source names: {name: hf, path: FILE}
    tokenizer: TokenizerArgs | None = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.shard_gb <= 0:
            yield "shard_gb", "must be above 0"

    def cast(self, t: Tensor) -> Tensor:
        return t.to(getattr(torch, self.dtype)) if self.dtype and t.is_floating_point() else t


def main(argv: list[str]) -> None:
    args, _ = load(ConvertArgs, argv, program_doc=__doc__)
    if detect_launch().world_size > 1:
        raise UserError("converting is the work of one process")
    with one_process():
        convert(args, named_app(argv))


def convert(args: ConvertArgs, app: App | None = None) -> None:
    """Convert, and print what was made. Called in a process group of one. Raises UserError; what
    was written in part is removed. `app`: None is the one that the source names, or apps.main."""
    out, tokenizer = Path(args.out), args.tokenizer
    source = open_source(
        "source", args.source, app, "full", lambda line: print(printable(line), file=sys.stderr)
    )
    to = args.to or (
        "file" if out.suffix in (".pth", ".pt") else "hf" if source.checkpoint else "checkpoint"
    )
    from_hf, note = is_hf_folder(source.path), ""
    checkpoint = out / step_folder(source.step or 0)
    check_new(checkpoint if to == "checkpoint" and out.is_dir() and not from_hf else out)
    try:
        if from_hf:
            config = config_of_hf_folder(app, source.path, "tokenizer", tokenizer)
            source = replace(source, config=to_yaml(config))
            read_trained(source, app).build_tokenizer()  # checks that it is the model's
            if to == "checkpoint" and tokenizer is None:
                tokenizer = copy_tokenizer(TokenizerArgs(**config["data"]["tokenizer"]), out)
        if tokenizer is not None:
            source = with_tokenizer(source, tokenizer)
        names = list(source.shapes("model."))
        if to == "hf":
            note = export(args, source, app, out)
        else:
            tensors = {name: args.cast(t) for name, t in source.whole(names).items()}
            if to == "file":
                write_file(source, tensors, out)
            else:
                out = save(out, source.step or 0, tensors, {}, source.config)
    except (OSError, SafetensorError) as error:
        raise UserError(f"out = {args.out}: cannot be written ({error})") from error
    print(printable(f"{source} is now {out}: {len(names)} tensors{note}"))


def check_new(path: Path) -> None:
    """Raises UserError where something would be overwritten."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"out: {path} exists already; must be new, or an empty folder")


def with_tokenizer(source: TensorSource, tokenizer: TokenizerArgs) -> TensorSource:
    """The source with another tokenizer in its config."""
    config = plain(parse_mapping(source.config, source.config_path))
    data = config.get("data")
    config["data"] = (data if isinstance(data, dict) else {}) | {"tokenizer": asdict(tokenizer)}
    return replace(source, config=to_yaml(config))


def copy_tokenizer(tokenizer: TokenizerArgs, out: Path) -> TokenizerArgs:
    """Copy the tokenizer's files into a folder; returns the tokenizer there."""
    file = tokenizer.file
    out.mkdir(parents=True, exist_ok=True)
    for path in (file, file.with_name(TOKENIZER_CONFIG)):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    return replace(tokenizer, path=str((out / file.name).resolve()))


# ----------------------------------------------------------------------------------------- export


def export(args: ConvertArgs, source: TensorSource, app: App | None, out: Path) -> str:
    """Write a folder that transformers loads; what was written in part is removed. Returns a note
    for the user. Raises UserError, or what writing raises."""
    trained = read_trained(source, app)
    form, data = form_of(trained.app, source.path), trained.args.data
    config = form.to_config(trained.args.model, data.seq_len)
    tensors = {f"model.{name}": t for name, t in form.tensors(trained.args.model).items()}
    check_fit(
        f"{source.path} cannot be exported",
        {name: t.shape for name, t in tensors.items()},
        source.shapes("model."),
        "in transformers",
    )
    tokenizer = trained.build_tokenizer(as_trained=args.tokenizer is None)
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    dtype = args.dtype or str(next(iter(source.tensors.values())).dtype).removeprefix("torch.")
    folder = temporary(out)
    folder.mkdir(parents=True)
    try:
        write_weights(args, source, tensors, folder)
        write_json(folder / HF_CONFIG, config | special | {"dtype": dtype})
        write_json(folder / "generation_config.json", special)
        note = write_tokenizer(folder, data.tokenizer, tokenizer, data)
        if out.exists():  # empty
            out.rmdir()
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return f"; {note}"


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
        (folder / file).chmod(0o644)  # safetensors creates files that others cannot read
        weight_map |= dict.fromkeys(weights, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tokenizer(folder: Path, args: TokenizerArgs, tokenizer: Tokenizer, data: Any) -> str:
    """The tokenizer's files where it has transformers' form; returns a note for the user.

    data: the `data` group of the model's configuration.
    """
    path = args.file
    if args.name == "hf":
        shutil.copyfile(path, folder / "tokenizer.json")
    elif args.name == "sp" and is_llama_tokenizer(tokenizer):
        shutil.copyfile(path, folder / "tokenizer.model")
    else:
        return f"transformers has no form of its {args.name} tokenizer: no file of it is there"
    if args.name == "hf" and path.with_name(TOKENIZER_CONFIG).is_file():
        shutil.copyfile(path.with_name(TOKENIZER_CONFIG), folder / TOKENIZER_CONFIG)
        if args.bos or args.eos:
            config = args.load_config() | special_tokens(tokenizer)
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
