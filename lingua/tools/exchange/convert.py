"""Convert a model between a checkpoint, one file, and a folder of Hugging Face's transformers:

    python -m lingua convert source=runs/debug out=debug-hf
    python -m lingua convert source=runs/debug/checkpoints/0000000700 out=debug-hf dtype=bfloat16
    python -m lingua convert source=Llama-3.2-1B out=llama-1b
    python -m lingua convert source=runs/debug out=debug.pth
    python -m lingua convert source=debug.pth out=plain

source is anything that checkpoint.init_from takes; a run that starts from it needs no conversion.
Adapters (apps.lora) are added to their base, but for to=peft and to=checkpoint. The weights keep
their bits, and a checkpoint that is made has no optimizer. A file is that of torch.save: {"model":
{name: tensor}, "config": text of YAML, "step": n}, whose model is what Meta Lingua has in its
consolidated.pth.

The form of a model in transformers belongs to its app (`App.hugging_face`): the checkpoint's own,
and apps.main where none is named, unless app=MODULE names another.
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from omegaconf import MISSING
from safetensors import SafetensorError
from torch import Tensor

from lingua.app import App, named_app
from lingua.base.dump_dir import step_folder
from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.checkpoint.origin import BASE, content, is_hf_folder, open_source
from lingua.checkpoint.save import save
from lingua.checkpoint.source import TensorSource
from lingua.config.load import load, to_yaml
from lingua.config.schema import Free
from lingua.config.values import parse_mapping, plain
from lingua.parallel.alone import one_process
from lingua.parallel.launch import detect_launch
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tokenizer.library import kind_of_file
from lingua.tools.exchange.adapters import merged, write_peft
from lingua.tools.exchange.export import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG, export
from lingua.tools.exchange.hugging_face import config_of_hf_folder
from lingua.tools.exchange.meta_lingua import write_file
from lingua.tools.exchange.trained import read_trained


@dataclass
class ConvertArgs:
    source: Free[str] = MISSING  # anything that checkpoint.init_from takes
    out: Free[str] = MISSING  # folder or file to make
    # the kind of out: hf, a folder of transformers; checkpoint, put into the folder out; file; or
    # peft, adapters alone, as Hugging Face's PEFT has them. null: file where out ends in .pth or
    # .pt, else hf from a checkpoint, else checkpoint
    to: Free[Literal["hf", "checkpoint", "file", "peft"] | None] = None
    base_model: Free[str | None] = None  # where the base of adapters is; null: as in training
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
    if tokenizer is not None and tokenizer.name == "bytes" and tokenizer.path:
        tokenizer.name = kind_of_file(tokenizer.path, "tokenizer.name")

    def report(line: str) -> None:
        print(printable(line), file=sys.stderr)

    source = open_source("source", args.source, app, "full", report, base=args.base_model)
    to = args.to or (
        "file" if out.suffix in (".pth", ".pt") else "hf" if source.checkpoint else "checkpoint"
    )
    from_hf, note = is_hf_folder(source.path), ""
    checkpoint = out / step_folder(source.step or 0)
    place = checkpoint if to == "checkpoint" and out.is_dir() and not from_hf else out
    check_new(place, is_file=to == "file")
    try:
        if from_hf:
            config = config_of_hf_folder(app, source.path, "tokenizer", tokenizer)
            config["checkpoint"] = {"init_from": str(source.path.resolve())}
            source = replace(source, config=to_yaml(config))
            read_trained(source, app).build_tokenizer()  # checks that it is the model's
            if to == "checkpoint" and tokenizer is None:
                tokenizer = copy_tokenizer(TokenizerArgs(**config["data"]["tokenizer"]), out)
        if tokenizer is not None:
            source = with_tokenizer(source, tokenizer)
        if source.parts is not None and to in ("hf", "file"):
            source, app = merged(source, app)
        names, state = list(source.shapes("model.")), {}
        if source.parts is not None:
            names = list(source.parts[0].shapes("model."))
            state = {"data": {BASE: content(source, source.base_names)}}
        if to == "peft":
            note = write_peft(source, app, out, args.cast)
        elif to == "hf":
            as_trained = args.tokenizer is None
            note = export(source, app, out, args.cast, args.shard_gb, as_trained, report)
        else:
            tensors = {name: args.cast(t) for name, t in source.whole(names).items()}
            if to == "file":
                write_file(source, tensors, out)
            else:
                out = save(out, source.step or 0, tensors, state, source.config)
    except (OSError, SafetensorError) as error:
        raise UserError(f"out = {args.out}: cannot be written ({error})") from error
    print(printable(f"{source} is now {out}: {len(names)} tensors{note}"))


def check_new(path: Path, is_file: bool) -> None:
    """Raises UserError where something would be overwritten."""
    if path.exists() and (is_file or not path.is_dir() or any(path.iterdir())):
        need = "must be new" if is_file else "must be new, or an empty folder"
        raise UserError(f"out: {path} exists already; {need}")


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
    beside = (TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_TOKENS)
    for path in (file, *map(file.with_name, beside)):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    return replace(tokenizer, path=str((out / file.name).resolve()))
