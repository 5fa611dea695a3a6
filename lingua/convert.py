"""Between a checkpoint and a folder of Hugging Face's transformers, for Llama models:

    python -m lingua.convert source=runs/debug out=debug-hf        a checkpoint, or a run's newest
    python -m lingua.convert source=Llama-3.2-1B out=llama-1b      a folder with config.json

Either way the weights keep their bits. From a folder comes a checkpoint without an optimizer: a
model to use. `checkpoint.init_from` starts a training run from a folder without this program.
"""

import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import MISSING, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lingua.checkpoint.folder import damaged_files
from lingua.checkpoint.load import read_weights, saved_weights
from lingua.checkpoint.resume import Progress
from lingua.checkpoint.save import save
from lingua.config.load import load
from lingua.config.schema import Free
from lingua.errors import UserError
from lingua.hugging_face import (
    CONFIG,
    INDEX,
    SINGLE,
    LlamaArgs,
    LlamaFolder,
    is_rotated,
    llama_shapes,
    to_halves,
    to_hf_config,
    to_hf_name,
)
from lingua.inference.trained import Trained, open_trained
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs
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
    source: Free[str] = MISSING  # a checkpoint, a run's folder, or a Hugging Face Llama folder
    out: Free[str] = MISSING  # folder to make, of the other kind
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
            yield "out", "is there already; must be a new or empty folder"


def main(argv: list[str] | None = None) -> None:
    args, _ = load(ConvertArgs, argv)
    launch = detect_launch()
    if launch.world_size > 1:
        raise UserError("converting is the work of one process")
    start(torch.device("cpu"), launch, DistributedArgs())
    convert = import_llama if (Path(args.source) / CONFIG).is_file() else export_llama
    try:
        convert(args)
    except (OSError, SafetensorError) as error:
        raise UserError(f"out = {args.out}: cannot be written ({error})") from error


# ----------------------------------------------------------------------------------------- export


def export_llama(args: ConvertArgs) -> None:
    """A checkpoint to a folder that transformers loads. What was written half is removed."""
    trained = open_trained("source", args.source, None)
    if trained.app.hugging_face is None:
        raise UserError(f"source = {args.source}: {trained.app.path} has no form in transformers")
    config = to_hf_config(trained.args.model, trained.args.data.seq_len)
    dtypes = check_weights(trained)
    tokenizer = build_tokenizer(args.tokenizer or trained.args.data.tokenizer)
    check_vocabulary(tokenizer, trained.args.model)
    shapes = llama_shapes(trained.args.model)
    sizes = {
        name: shape_size(shape) * (getattr(torch, args.dtype) if args.dtype else dtype).itemsize
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }
    check_space(Path(args.out), sum(sizes.values()))
    damaged = damaged_files(trained.checkpoint)
    if damaged:
        raise UserError(f"{trained.checkpoint.path} is damaged: {'; '.join(damaged)}")
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config |= special | {"dtype": args.dtype or str(dtypes[0]).removeprefix("torch.")}
    folder = Path(f"{args.out}.tmp-{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        write_shards(args, trained, sizes, folder)
        write_json(folder / CONFIG, config)
        write_json(folder / "generation_config.json", special)
        said = write_tokenizer(folder, trained, args.tokenizer or trained.args.data.tokenizer)
        if Path(args.out).exists():  # empty
            Path(args.out).rmdir()
        folder.rename(args.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{trained.checkpoint.path} (step {trained.checkpoint.step}) is now {args.out}; {said}")


def check_weights(trained: Trained) -> list[torch.dtype]:
    """The dtypes of the tensors, in order. UserError names what Llama does not have."""
    saved, shapes = saved_weights(trained.checkpoint), llama_shapes(trained.args.model)
    wrong = [
        f"{name} is no tensor of Llama in transformers" for name in saved if name not in shapes
    ]
    for name, shape in shapes.items():
        if name not in saved:
            wrong.append(f"{name} is not in it")
        elif tuple(saved[name][0]) != shape:
            wrong.append(f"{name} is {tuple(saved[name][0])}, its config makes it {shape}")
    if wrong:
        shown = [*wrong[:10], *([f"and {len(wrong) - 10} more"] if len(wrong) > 10 else [])]
        raise UserError(f"{trained.checkpoint.path} cannot be exported:\n  " + "\n  ".join(shown))
    return [saved[name][1] for name in shapes]


def write_shards(args: ConvertArgs, trained: Trained, sizes: dict[str, int], folder: Path) -> None:
    """The weights in files of at most `shard_gb`, one file in memory at a time."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > args.shard_gb * 1e9:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            to_hf_name(name): to_hf_tensor(name, t, trained.args.model, args.dtype)
            for name, t in read_weights(trained.checkpoint, names).items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # as others are; the library makes them the user's alone
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def to_hf_tensor(name: str, t: Tensor, args: LlamaArgs, dtype: str | None) -> Tensor:
    """One of our tensors in the order and dtype of the folder."""
    t = to_halves(t, args.heads()[2]) if is_rotated(name) else t
    return t if dtype is None else t.to(getattr(torch, dtype))


def write_tokenizer(folder: Path, trained: Trained, tokenizer: TokenizerArgs) -> str:
    """The tokenizer's files where transformers has a form for it; returns what became of it."""
    if tokenizer.name not in ("hf", "sp") or not has_form(tokenizer):
        return f"transformers has no form of its {tokenizer.name} tokenizer: no file of it is there"
    path = tokenizer_file(tokenizer)
    if tokenizer.name == "hf":
        shutil.copyfile(path, folder / "tokenizer.json")
        if path.with_name(TOKENIZER_CONFIG).is_file():
            shutil.copyfile(path.with_name(TOKENIZER_CONFIG), folder / TOKENIZER_CONFIG)
            return "with its tokenizer"
    else:
        shutil.copyfile(path, folder / "tokenizer.model")
    config: dict[str, Any] = special_tokens(tokenizer)
    config |= {"model_max_length": trained.args.data.seq_len, "clean_up_tokenization_spaces": False}
    config["add_bos_token"] = trained.args.data.add_bos
    if tokenizer.name == "hf":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    else:
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False}
        config["add_eos_token"] = False
    write_json(folder / TOKENIZER_CONFIG, config)
    return "with its tokenizer"


def has_form(tokenizer: TokenizerArgs) -> bool:
    """False for a sentencepiece model that transformers' LlamaTokenizer would take for another: it
    is a BPE, and puts a space before a text, of which it changes nothing else."""
    if tokenizer.name == "hf":
        return True
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=tokenizer.path)
    if model.normalize(" \ufb01  x ") != "▁▁\ufb01▁▁x▁":  # a ligature
        return False
    # BPE scores a piece by its rank, a whole number; others by its probability.
    return all(model.get_score(i).is_integer() for i in range(model.vocab_size()))


def special_tokens(tokenizer: TokenizerArgs) -> dict[str, str]:
    """How the first and the last token are spelled."""
    if tokenizer.name == "hf":
        import tokenizers

        spell = tokenizers.Tokenizer.from_file(str(tokenizer_file(tokenizer))).id_to_token
    else:
        import sentencepiece

        spell = sentencepiece.SentencePieceProcessor(model_file=tokenizer.path).id_to_piece
    built = build_tokenizer(tokenizer)
    special = {"bos_token": built.bos_id, "eos_token": built.eos_id}
    return {name: spell(i) for name, i in special.items() if i is not None}


# ----------------------------------------------------------------------------------------- import


def import_llama(args: ConvertArgs) -> None:
    """A folder of transformers to a checkpoint of step 0, with its tokenizer beside it."""
    source, out = LlamaFolder(args.source, "source"), Path(args.out)
    tokenizer = args.tokenizer or find_tokenizer(source.path)
    built = build_tokenizer(tokenizer)
    check_vocabulary(built, source.args)
    check_space(out, sum(f.stat().st_size for f in source.path.glob("*.safetensors")))
    out.mkdir(parents=True, exist_ok=True)
    if args.tokenizer is None:
        file = Path(tokenizer.path)
        for path in (file, file.with_name(TOKENIZER_CONFIG)):
            if path.is_file():
                shutil.copyfile(path, out / path.name)
        tokenizer = TokenizerArgs(tokenizer.name, str((out / file.name).resolve()))
    tensors = {}
    for name, shape in llama_shapes(source.args).items():
        t = source.read(name, (0,) * len(shape), shape)
        tensors[f"model.{name}"] = t if args.dtype is None else t.to(getattr(torch, args.dtype))
    data = {
        "seq_len": source.seq_len,
        "add_bos": adds_bos(tokenizer, built),
        "add_eos": built.eos_id is not None,
        "tokenizer": asdict(tokenizer),
    }
    config = OmegaConf.to_yaml({"model": asdict(source.args), "data": data})
    # No run can go on from it: it has no optimizer, and says so to whoever tries.
    state = {"progress": asdict(Progress()), "topology": [1, 1, 1], "data": {}}
    path = save(out, 0, tensors, state, config)
    print(f"{source.path} is now {path}")


def find_tokenizer(folder: Path) -> TokenizerArgs:
    for name, file in (("hf", "tokenizer.json"), ("sp", "tokenizer.model")):
        if (folder / file).is_file():
            return TokenizerArgs(name, str(folder / file))
    raise UserError(
        f"source = {folder}: has no tokenizer.json or tokenizer.model; say which tokenizer is the "
        "model's: tokenizer.name=... tokenizer.path=..."
    )


def adds_bos(tokenizer: TokenizerArgs, built: Tokenizer) -> bool:
    """Whether texts of the model begin with bos: what a tokenizer.json puts before one, or what
    add_bos_token in the tokenizer_config.json beside it says; else, unless it is `hf`, they do."""
    if built.bos_id is None or tokenizer.path is None:
        return built.bos_id is not None
    if tokenizer.name == "hf":
        import tokenizers

        path = str(tokenizer_file(tokenizer))
        if tokenizers.Tokenizer.from_file(path).encode("").ids[:1] == [built.bos_id]:
            return True
    return bool(tokenizer_config(tokenizer).get("add_bos_token", tokenizer.name != "hf"))


# ------------------------------------------------------------------------------------------- both


def check_vocabulary(tokenizer: Tokenizer, model: LlamaArgs) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"{model.vocab_size} (model.vocab_size): it is not the tokenizer of this model"
        )


def check_space(out: Path, n_bytes: int) -> None:
    above = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    free = shutil.disk_usage(above).free
    if free < n_bytes:
        raise UserError(
            f"out = {out}: the weights take {n_bytes / 1e9:.1f} GB, but {above} has only "
            f"{free / 1e9:.1f} GB free"
        )


def shape_size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
