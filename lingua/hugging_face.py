"""A model in the form of Hugging Face's transformers: a folder with config.json and safetensors.

What a family of models is called there belongs to an app, whose `App.hugging_face` is a
`HuggingFace`. Of a folder only JSON and safetensors are read, so nothing of it is executed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lingua.app import App
from lingua.checkpoint.source import TensorSource, check_fit, read_json
from lingua.checkpoint.tensors import Part
from lingua.errors import UserError

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a model in transformers."""

    name: str  # there
    shape: tuple[int, ...]  # here and there
    # Where the order of the rows differs, which it does in the same way in each group of so many:
    # row i of a group here is row row_order[i] of it there.
    row_order: tuple[int, ...] = ()

    def from_hf(self, t: Tensor) -> Tensor:
        """Whole groups of rows in our order."""
        return self._reordered(t, torch.tensor(self.row_order))

    def to_hf(self, t: Tensor) -> Tensor:
        """What from_hf undoes."""
        return self._reordered(t, torch.tensor(self.row_order).argsort())

    def _reordered(self, t: Tensor, order: Tensor) -> Tensor:
        return t.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1) if self.row_order else t


@dataclass(frozen=True)
class HuggingFace:
    """How transformers keeps the models of an app. `model` is the `model` group of its config.

    to_config: (model, seq_len) -> content of config.json. UserError names what it cannot express.
    from_config: (content of config.json, its path) -> (model, seq_len). UserError names what it
        asks for that the app does not have.
    tensors: (model) -> every tensor by its name here, in the order in which they are written.
    unused: (model) -> how the names of other tensors end that a folder may have.
    differences: (model of a run, model of a folder) -> (key in `model`, "VALUE: must be VALUE") for
        all that matters for the same weights to compute the same.
    """

    to_config: Callable[[Any, int], dict[str, Any]]
    from_config: Callable[[Mapping[str, Any], str], tuple[Any, int]]
    tensors: Callable[[Any], dict[str, HFTensor]]
    unused: Callable[[Any], tuple[str, ...]]
    differences: Callable[[Any, Any], Iterable[tuple[str, str]]]


@dataclass(frozen=True)
class HFFolder:
    """A folder of transformers, opened."""

    source: TensorSource  # tensors by our names, `model.<name>`
    model: Any  # the `model` group of its config.json
    seq_len: int


def form_of(app: App, shown: str) -> HuggingFace:
    """The app's form in transformers. UserError begins with `shown`, the key that needs it."""
    if app.hugging_face is None:
        raise UserError(f"{shown}: {app.path} has no form in transformers (App.hugging_face)")
    return app.hugging_face


def open_weights(app: App, path: str, model: Any, allowed: list[str]) -> TensorSource:
    """What checkpoint.init_from names, for a run with this `model` group.

    Args:
        allowed: `checkpoint.allow_change`, for what leaves every shape as it is.

    Raises:
        UserError: it is no such folder, or its model is another.
    """
    form = form_of(app, f"checkpoint.init_from = {path}")
    folder = open_folder(form, path, "checkpoint.init_from")
    wrong = [
        f"model.{key} = {text}".replace("None", "null")
        for key, text in form.differences(model, folder.model)
        if f"model.{key}" not in allowed
    ]
    if wrong:
        lines = "\n  ".join(wrong)
        raise UserError(f"the model is not that of {folder.source.path / CONFIG}:\n  {lines}")
    return folder.source


def open_folder(form: HuggingFace, path: str, key: str) -> HFFolder:
    """A folder, of which config.json is read and the tensors are found.

    Args:
        key: the config key that names the folder, for messages.

    Raises:
        UserError: it is no such folder, or names what the app lacks or what does not fit in it.
    """
    folder, where = Path(path), Path(path) / CONFIG
    if not where.is_file():
        raise UserError(
            f"{key} = {path}: must be a folder with the config.json and safetensors of a model in "
            f"transformers; {where} does not exist"
        )
    model, seq_len = form.from_config(read_json(where), str(where))
    ours = {f"model.{name}": t for name, t in form.tensors(model).items()}
    slices = {n: f.get_slice(n) for f in _open_files(folder) for n in f.keys()}  # noqa: SIM118
    expected = {t.name: t.shape for t in ours.values()}
    found = {name: tuple(s.get_shape()) for name, s in slices.items()}
    unused = {n for n in found if n not in expected and n.endswith(form.unused(model))}
    found = {name: shape for name, shape in found.items() if name not in unused}
    check_fit(f"{path}: its tensors do not fit", expected, found, f"in {CONFIG}", "in the folder")

    def read(parts: list[Part]) -> None:
        for name, (rows, *others), out in parts:
            group = max(1, len(ours[name].row_order))
            # Whole groups, of which what was not asked for is cut off again.
            first, last = rows.start // group * group, -(-rows.stop // group) * group
            groups = slices[ours[name].name][(slice(first, last), *others)]
            out.copy_(ours[name].from_hf(groups)[rows.start - first : rows.stop - first])

    dtypes = {name: slices[t.name][0:0].dtype for name, t in ours.items()}
    tensors = {n: torch.empty(t.shape, dtype=dtypes[n], device="meta") for n, t in ours.items()}
    return HFFolder(TensorSource(folder, "Hugging Face folder", tensors, read), model, seq_len)


def _open_files(folder: Path) -> list[Any]:
    """The safetensors files, mapped into memory: a slice of a tensor reads just its bytes."""
    index, files = folder / INDEX, [SINGLE]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: must have a mapping weight_map of tensors to files")
        files = sorted(set(map(str, weight_map.values())))
    elif not (folder / SINGLE).is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin")) or ["neither exists"]
        raise UserError(
            f"{folder}: must have {SINGLE} or {INDEX}, for only safetensors are read ({pickled[0]})"
        )
    opened = []
    for name in files:
        if Path(name).name != name:
            raise UserError(f"{index}: refers to the file {name} outside its folder")
        try:
            opened.append(safe_open(folder / name, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name}: cannot be read as safetensors ({error})") from None
    return opened
