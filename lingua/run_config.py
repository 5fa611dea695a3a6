"""The configuration of a training run. Keys that it leaves open are those of the trained model that
it starts from (`checkpoint.init_from`, `checkpoint.init_ckpt_path`), if it names one; others have
the app's defaults."""

import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lingua.app import App
from lingua.checkpoint.folder import CONFIG
from lingua.checkpoint.resume import TRAINING_ONLY, pick
from lingua.checkpoint.retention import CheckpointArgs
from lingua.checkpoint.source import is_of_transformers, locate
from lingua.config.load import draft, load, resume_classes
from lingua.config.meta_lingua import META_LINGUA
from lingua.config.values import LocatedValue, Values, plain, read_file
from lingua.errors import UserError
from lingua.files import read_json
from lingua.hugging_face import CONFIG as HF_CONFIG
from lingua.hugging_face import adds_bos, find_tokenizer, form_of
from lingua.tokenizer import build_tokenizer

OF_TOKENIZER = ["data.tokenizer.name", "data.tokenizer.path"]
OF_TEXT = ["data.tokenizer.bos", "data.tokenizer.eos", "data.add_bos", "data.add_eos"]


def load_run(app: App, argv: list[str], part: Any = None) -> tuple[Any, list[str]]:
    """As lingua.config.load.load: an app's configuration, or a `part` of it, for which `argv` may
    have the app's other keys."""
    below: Values = {}
    if not {"-h", "--help"} & set(argv):
        below = of_origin(app, *draft(app.config, argv, META_LINGUA))
    if part is None:
        return load(app.config, argv, META_LINGUA, below=below)
    others = {f.name for f in fields(app.config)} - {f.name for f in fields(part)}
    argv = [word for word in argv if re.split(r"[.=]", word)[0] not in others]
    return load(type(part), argv, META_LINGUA, partial=True, below=below, defaults=part)


def of_origin(app: App, args: Any, given: set[str]) -> Values:
    """What defines the model that a run with these `args` starts from, by key: its sizes, and its
    tokenizer unless one is `given`; nothing where it starts from none. Raises UserError."""
    start = args.checkpoint
    if not isinstance(start, CheckpointArgs):  # a mistake, which `load` reports
        return {}
    name = "init_from" if start.init_from is not None else "init_ckpt_path"
    key, path = f"checkpoint.{name}", getattr(start, name)
    if path is None:
        return {}
    kinds = resume_classes(app.config)
    keys = [k for k, kind in kinds.items() if k.startswith("model.") and kind == "guarded"]
    keys = [k for k in keys if k not in TRAINING_ONLY]
    keys += [] if given.intersection(OF_TOKENIZER) else OF_TOKENIZER + OF_TEXT
    dotted = {f"{k}." for k in given}  # a group that is given, such as null, has its keys
    keys = [
        k for k in keys if not any(f"{k}.".startswith(d) or d.startswith(f"{k}.") for d in dotted)
    ]
    if not keys:  # the config of a run that has started
        return {}
    if is_of_transformers(path):
        file: Path | None = Path(path) / HF_CONFIG
        tree = of_folder(app, key, Path(path), OF_TOKENIZER[0] in keys)
    else:
        file = config_of_checkpoint(key, path, args.folder / CONFIG)
        tree = {} if file is None else plain(read_file(file, str(file)))
    return {k: LocatedValue.of(value, str(file)) for k, value in pick(tree, keys).items()}


def config_of_checkpoint(key: str, path: str, own: Path) -> Path | None:
    """The config of the checkpoint at `path`; None where it is Meta Lingua's or a file. Where there
    is none, `own`, the config of the run itself: once it has started, it needs the other no more.
    Raises UserError where that does not exist either."""
    try:
        found = locate(Path(path), lambda line: None)
    except UserError as error:
        if own.exists():
            return own
        need = ""
        if key.endswith("init_from"):
            need = "must be a folder of transformers with its config.json, or a checkpoint; "
        raise UserError(f"{key} = {path}: {need}{error}", error.local) from None
    return found[0].path / CONFIG if found else None


def of_folder(app: App, key: str, folder: Path, with_tokenizer: bool) -> dict[str, Any]:
    """The config of a folder of transformers: `model`, and `data` with its tokenizer."""
    file = folder / HF_CONFIG
    model, _ = form_of(app, f"{key} = {folder}").from_config(read_json(file), str(file))
    if not with_tokenizer:
        return {"model": plain(model)}
    chosen = find_tokenizer(folder, key, "data.tokenizer")
    tokenizer = build_tokenizer(chosen)
    special = {"add_bos": adds_bos(chosen, tokenizer), "add_eos": tokenizer.eos_id is not None}
    return {"model": plain(model), "data": {"tokenizer": asdict(chosen), **special}}
