"""Models of other programs: Meta Lingua's checkpoints, and files of torch.save.

A checkpoint of Meta Lingua's is a folder of DCP's with `params.json`, its config, and
`train_state_<rank>.json`. A file is a dict with tensors by name under "model", as Meta Lingua's
`consolidated.pth` is; ours also has "config", text of YAML, and "step". Nothing of what is read is
executed.
"""

from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from lingua.base.errors import UserError
from lingua.base.files import file_size, open_synced, read_json, sync_folder, temporary
from lingua.checkpoint.dcp import DCPFolder, check_size
from lingua.checkpoint.origin import CONSOLIDATED, PARAMS
from lingua.checkpoint.saved import flat_config
from lingua.checkpoint.source import TensorSource
from lingua.checkpoint.tensors import Part
from lingua.config.load import to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.config.values import show

# Meta Lingua's names of an embedding, and of the same weight in a head that is tied to it
TIED = ("tok_embeddings.weight", "output.tied_module.weight")


def open_meta_lingua(path: Path) -> TensorSource:
    """Open what Meta Lingua or torch.save wrote: a file, the folder of a checkpoint, or its folder
    `consolidated`. Raises UserError, or what reading a damaged file raises."""
    path = path / CONSOLIDATED if (path / CONSOLIDATED).exists() else path
    return _open_file(path) if path.is_file() else _open_folder(path)


def _open_folder(path: Path) -> TensorSource:
    folder = DCPFolder(path)
    stored_as = {ours: name for name in folder.tensors if (ours := our_name(name)) is not None}
    states = sorted(path.glob("train_state_*.json"))  # one of each dp rank, of the same step
    return TensorSource(
        path,
        "Meta Lingua checkpoint",
        {ours: folder.tensors[name] for ours, name in stored_as.items()},
        lambda parts: folder.read([part._replace(name=stored_as[part.name]) for part in parts]),
        step=read_json(states[0]).get("step") if states else None,
        config=_our_config(path),
    )


def _open_file(path: Path) -> TensorSource:
    """Tied weights, which share memory in the file, are taken once, under their first name."""
    # A compressed entry, which torch.save does not write, could be far larger in memory.
    with ZipFile(path) as archive:
        if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
            raise UserError(f"{path}: is compressed; must be a file of torch.save")
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    content = content if isinstance(content, dict) else {}
    model = content.get("model", content)  # or the tensors alone, without a name for them all
    model = model if isinstance(model, dict) else {}
    if not model or not all(isinstance(t, Tensor) for t in model.values()):
        raise UserError(f'{path} has no model: must be a dict {{"model": {{name: tensor}}}}')
    tensors: dict[str, Tensor] = {}
    places = set()
    for name, t in model.items():
        place = (t.data_ptr(), t.shape, t.stride())
        if our_name(f"model.{name}") is not None and (place not in places or t.numel() == 0):
            tensors[f"model.{name}"] = t
            places.add(place)
    check_size(tensors, file_size(path))

    def read(parts: list[Part]) -> None:
        for part in parts:
            part.out.copy_(tensors[part.name][part.box])

    config = content.get("config") or _our_config(path.parent)
    return TensorSource(path, "file", tensors, read, content.get("step"), config)


def _our_config(folder: Path) -> str:
    """Returns, as the YAML text of a config of ours, those of Meta Lingua's parameters in a folder
    that describe a model and how it was trained. Its keys that mean the same have the same name
    here."""
    if not (params := folder / PARAMS).exists():
        return "{}"
    content, foreign = read_json(params), {*META_LINGUA.ignored, *META_LINGUA.same_as}
    config: dict[str, Any] = {k: content[k] for k in ("name", "seed", "steps") if k in content}
    for group in ("data", "model", "optim"):
        keys = content.get(group, {})
        if not isinstance(keys, dict):
            raise UserError(f"{params}: {group} = {show(keys)}: must be a group of keys")
        config[group] = {key: v for key, v in keys.items() if f"{group}.{key}" not in foreign}
    return to_yaml(config)


def our_name(stored: str) -> str | None:
    """Our name of a tensor that Meta Lingua stores, or None for one that needs no place."""
    if stored.endswith(TIED[1]):
        return None
    if stored.startswith("optim.state."):
        name, _, key = stored.removeprefix("optim.state.").rpartition(".")
        return f"optim.{key}.{name}"
    return stored if stored.startswith("model.") else None


def write_file(source: TensorSource, tensors: dict[str, Tensor], path: Path) -> None:
    """Write a model's tensors, and the config and step of `source`, as a file that Meta Lingua
    loads as its consolidated.pth: tied weights are under both of its names. Raises UserError; what
    was written in part is removed."""
    model = {name.removeprefix("model."): t for name, t in tensors.items()}
    embedding, head = TIED
    tying = "model.weight_tying"
    if flat_config(source, [tying]).get(tying) is True and embedding in model:
        model[head] = model[embedding]  # shares its memory
    content: dict[str, Any] = {"model": model, "config": source.config}
    if source.step is not None:
        content["step"] = source.step
    unfinished = temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_synced(unfinished) as f:
            torch.save(content, f)
        unfinished.rename(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a write that failed as the latter
        raise UserError(f"{path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
