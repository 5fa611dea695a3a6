"""A folder of Hugging Face's transformers from a model: weights, configuration, tokenizer with its
chat template, and a card.

Of the folder that the model was trained from, its base, everything is carried over that training
did not change; what is not is named in the card and to the user.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lingua.app import App
from lingua.base.dump_dir import CONFIG, METRICS, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import read_json, temporary
from lingua.base.version import __version__
from lingua.checkpoint.folder import read_state
from lingua.checkpoint.origin import HF_CONFIG, INIT_FROM, is_hf_folder, locate
from lingua.checkpoint.saved import pick
from lingua.checkpoint.source import TensorSource, check_fit
from lingua.config.load import to_yaml
from lingua.config.values import parse_mapping, plain, read_file
from lingua.data.args import DataArgs
from lingua.run.args import RunArgs
from lingua.run.files import grouped
from lingua.run.records import Record
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import load_config
from lingua.tools.exchange.hugging_face import (
    GENERATION,
    INDEX,
    SINGLE,
    HFTensor,
    HuggingFace,
    form_of,
)
from lingua.tools.exchange.trained import read_trained

TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
CARD, BOS, EOS = "README.md", "bos_token_id", "eos_token_id"
TERMS = re.compile(r"(licen[cs]e|notice|copying|use_policy)\b.*", re.IGNORECASE)  # names of files
WEIGHTS = re.compile(r".*\.(safetensors|bin|pth?|gguf|h5|msgpack)(\.index\.json)?")
# Keys about the file that they are in; auto_map, which names code to execute, is left out too.
FILE_KEYS = {"_name_or_path", "_from_model_config", "torch_dtype", "transformers_version"}
CARD_KEYS = ("app", "seed", "steps", "model", "data", "optim")  # groups of a run's config


@dataclass(frozen=True)
class Base:
    """The folder of transformers that a model was trained from."""

    folder: Path
    config: dict[str, Any]  # its config.json; empty where its model is another
    max_positions: int  # 0 where its model is another
    same_tokenizer: bool
    generation: dict[str, Any]  # its generation_config.json; empty where its tokenizer is another


Cast = Callable[[Tensor], Tensor]


def export(
    source: TensorSource,
    app: App | None,
    out: Path,
    cast: Cast,
    shard_gb: float,
    as_trained: bool,
    report: Callable[[str], None],
) -> str:
    """Write a folder that transformers loads; what was written in part is removed. Returns a note
    for the user. Raises UserError, or what writing raises.

    Args:
        cast: gives a tensor the dtype that is written.
        shard_gb: GB of one safetensors file.
        as_trained: the tokenizer must be the one of the training.
        report: called with a line where the base cannot be opened.
    """
    trained = read_trained(source, app)
    model, data = trained.args.model, trained.args.data
    form = form_of(trained.app, source.path)
    base = open_base(form, source, trained.args, report)
    config = form.to_config(model, max(data.seq_len, base.max_positions if base else 0))
    tensors = {f"model.{name}": t for name, t in form.tensors(model).items()}
    check_fit(
        f"{source.path} cannot be exported",
        {name: t.shape for name, t in tensors.items()},
        source.shapes("model."),
        "in transformers",
    )
    tokenizer = trained.build_tokenizer(as_trained)
    dtype = cast(torch.empty(0, dtype=next(iter(source.tensors.values())).dtype)).dtype
    generation = base.generation if base else {}
    if base and base.config.get("model_type") == config["model_type"]:
        kept = {k: v for k, v in base.config.items() if k not in FILE_KEYS | {"auto_map"}}
        if not base.same_tokenizer:
            kept = {k: v for k, v in kept.items() if "token_id" not in k}
        config = kept | config
    ends = end_tokens(data, tokenizer, (config | generation).get(EOS))
    bos = None if data.tokenizer.bos else (generation | config).get(BOS)  # the base's
    special = {BOS: tokenizer.bos_id if bos is None else bos, EOS: ends}
    folder = temporary(out)
    folder.mkdir(parents=True)
    try:
        write_weights(source, tensors, folder, cast, shard_gb)
        written_as = {"dtype": str(dtype).removeprefix("torch.")}
        write_json(folder / HF_CONFIG, config | special | written_as)
        write_json(folder / GENERATION, generation | special)
        note = write_tokenizer(folder, data, tokenizer, config["max_position_embeddings"])
        missing = not_carried(base, folder) if base else []
        (folder / CARD).write_text(card(out.name, source, base, missing), encoding="utf-8")
        if out.exists():  # empty
            out.rmdir()
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if base and missing:
        note += f"; not carried over from {base.folder}: {', '.join(missing)}"
    return f"; {note}"


# ---- what the model was trained from


def open_base(
    form: HuggingFace, source: TensorSource, args: RunArgs, report: Callable[[str], None]
) -> Base | None:
    """The base of a model, also through checkpoints that were trained from it in turn; None where
    it has none, or what it was trained from exists no more."""
    folder, before = source.path, set()
    init_from = args.checkpoint.init_from
    while not is_hf_folder(folder):
        if not init_from or init_from in before:
            return None
        before.add(init_from)
        folder = Path(init_from)
        try:
            for checkpoint in locate(folder, lambda line: None)[:1]:
                file = checkpoint.path / CONFIG
                init_from = pick(plain(read_file(file, str(file))), [INIT_FROM]).get(INIT_FROM)
        except UserError as error:
            report(f"{error}: the model was trained from it, and nothing of it is carried over")
            return None
    config, tokenizer = read_json(folder / HF_CONFIG), args.data.tokenizer
    try:
        model, max_positions = form.from_config(config, str(folder / HF_CONFIG))
    except UserError:
        model, max_positions = None, 0
    if model is None or form.computes(model) != form.computes(args.model):
        config, max_positions = {}, 0
    theirs, same_tokenizer, generation = folder / tokenizer.file.name, False, {}
    if tokenizer.name != "bytes" and theirs.is_file():
        same_tokenizer = theirs.read_bytes() == tokenizer.file.read_bytes()
    if same_tokenizer and (folder / GENERATION).is_file():
        generation = read_json(folder / GENERATION)
    return Base(folder, config, max_positions, same_tokenizer, generation)


def not_carried(base: Base, folder: Path) -> list[str]:
    """Copy the base's terms of use, and list what else it has and `folder` has not: files other
    than weights, and keys."""
    missing = []
    for path in sorted(base.folder.iterdir()):
        if TERMS.fullmatch(path.name) and path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif not (path.name.startswith(".") or WEIGHTS.fullmatch(path.name)):
            missing += [path.name] if path.name == CARD or not (folder / path.name).exists() else []
    for name in (HF_CONFIG, GENERATION):
        if (base.folder / name).is_file() and (folder / name).is_file():
            theirs, ours = read_json(base.folder / name), read_json(folder / name)
            kept = {key for key, v in ours.items() if v is not None or "token_id" not in key}
            keys = sorted(theirs.keys() - kept - FILE_KEYS)
            missing += [f"{key} of {name}" for key in keys if theirs[key] is not None]
    return missing


# ---- weights


def write_weights(
    source: TensorSource, tensors: dict[str, HFTensor], folder: Path, cast: Cast, shard_gb: float
) -> None:
    """Files of at most `shard_gb`, one in memory at a time, and their index where they are many."""
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name in tensors:
        size = cast(source.tensors[name]).nbytes
        if shards[-1] and filled + size > shard_gb * 1e9:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        weights = {
            tensors[name].name: cast(tensors[name].reorder(t, to_hf=True))
            for name, t in source.whole(names).items()
        }
        save_file(weights, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors creates files that others cannot read
        weight_map |= dict.fromkeys(weights, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


# ---- tokenizer


def end_tokens(data: DataArgs, tokenizer: Tokenizer, base_ends: Any) -> int | list[int] | None:
    """The tokens that end a text: the training's, of a document and of an answer in conversations,
    and those of the base (a list, one, or None). One by itself is no list."""
    ends: list[Any] = [tokenizer.eos_id]
    if data.chat is not None:
        from lingua.tools.chat_template import ChatError, open_chat

        with suppress(ChatError):  # it renders no conversation of one question
            ends.append(open_chat(data.tokenizer, tokenizer, data.chat.template).turn_end[0])
    ends += base_ends if isinstance(base_ends, list) else [base_ends]
    ids = list(dict.fromkeys(i for i in ends if type(i) is int))
    return ids if len(ids) > 1 else ids[0] if ids else None


def write_tokenizer(folder: Path, data: DataArgs, tokenizer: Tokenizer, max_positions: int) -> str:
    """The tokenizer's files where it has transformers' form, with the chat template that the model
    was trained with, or else the tokenizer's; returns a note for the user."""
    args: TokenizerArgs = data.tokenizer
    if args.name == "hf" or (args.name == "sp" and is_llama_tokenizer(tokenizer)):
        shutil.copyfile(args.file, folder / f"tokenizer.{'json' if args.name == 'hf' else 'model'}")
    else:
        return f"transformers has no form of its {args.name} tokenizer: no file of it is there"
    special, config = special_tokens(tokenizer), load_config(args)
    config.pop("auto_map", None)  # names code to execute
    if not config:
        config = special | {
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": data.add_bos,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if args.name == "sp":
            config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_eos_token": False}
    elif args.bos or args.eos:
        config |= special
    names = [CHAT_TEMPLATE] if args.bos or args.eos else [CHAT_TEMPLATE, SPECIAL_TOKENS]
    for path in map(args.file.with_name, names):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    named = data.chat.template if data.chat is not None else None
    if named is not None:
        config.pop("chat_template", None)
        shutil.copyfile(named, folder / CHAT_TEMPLATE)
    write_json(folder / TOKENIZER_CONFIG, config)
    has_template = "chat_template" in config or (folder / CHAT_TEMPLATE).exists()
    # A config of others may name any file: what is published is named.
    of = f" of {named}" if named is not None else ""
    return "with its tokenizer" + f" and chat template{of}" * has_template


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


# ---- card


def card(name: str, source: TensorSource, base: Base | None, missing: list[str]) -> str:
    """The model card: what the model was trained from, on what, how far, and with what losses."""
    config = plain(parse_mapping(source.config, source.config_path))
    config = {key: without_folders(config[key]) for key in CARD_KEYS if key in config}
    lines = [f"Trained with lingua {__version__}."]
    if base is not None:
        lines.append(f"Base: {base.folder.resolve().name}, whose terms of use apply.")
    if source.checkpoint is not None:
        state = read_state(source.checkpoint)
        if state.progress is not None:
            lines.append(f"Step {state.progress.step:,}, {state.tokens:,} tokens.")
        lines += losses(source.checkpoint.path.parent.parent, source.step or 0)
    sources = config.get("data", {}).get("sources") or {}
    shares = ", ".join(f"{source} {weight:g}" for source, weight in sources.items())
    lines += [f"Data, by weight: {shares}."] * bool(shares)
    if missing:
        lines.append(f"Not carried over from the base: {', '.join(missing)}.")
    facts = "\n".join(f"- {line}" for line in lines)
    front = "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---"
    return f"{front}\n# {name}\n\n{facts}\n\n```yaml\n{to_yaml(config)}```\n"


def losses(dump_dir: Path, step: int) -> Iterator[str]:
    """The newest losses that a run wrote up to a step; none where its folder is not there."""
    record = Record(dump_dir)
    kinds = {"Training loss": (record.lines(METRICS), "loss", "nats per token")}
    for source, lines in grouped(record.lines(VALIDATION), "source").items():
        kinds[f"Held-out loss of {source}"] = lines, "nats_per_byte", "nats per byte"
    for kind, (lines, key, unit) in kinds.items():
        measured = [x for x in lines if x["step"] <= step and isinstance(x.get(key), float)]
        if measured:
            yield f"{kind}: {measured[-1][key]:.4g} {unit}, at step {measured[-1]['step']:,}."


def without_folders(value: Any) -> Any:
    """Values of a config; of absolute paths, which are those of one machine, the last part."""
    if isinstance(value, dict):
        return {key: without_folders(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_folders(v) for v in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
