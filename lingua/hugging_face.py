"""A model in the form of Hugging Face's transformers: a folder with config.json and safetensors.

What a family of models is called there belongs to an app, whose `App.hugging_face` is a
`HuggingFace`. Of a folder only JSON and safetensors are read, so nothing of it is executed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lingua.app import App
from lingua.checkpoint.source import TensorSource, check_fit
from lingua.checkpoint.tensors import Part
from lingua.errors import UserError
from lingua.files import file_size, read_json
from lingua.tokenizer import Tokenizer, TokenizerArgs, tokenizer_config, tokenizer_file

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a model in transformers."""

    name: str  # there
    shape: tuple[int, ...]  # here and there
    # Where the order of the rows differs, which it does in the same way in each group of so many:
    # row i of a group here is row row_order[i] of it there.
    row_order: tuple[int, ...] = ()

    def reorder(self, t: Tensor, to_hf: bool) -> Tensor:
        """Whole groups of rows in transformers' order, or from it in ours."""
        if not self.row_order:
            return t
        order = torch.tensor(self.row_order)
        order = order.argsort() if to_hf else order
        return t.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


@dataclass(frozen=True)
class HuggingFace:
    """How transformers keeps the models of an app. `model` is the `model` group of its config."""

    # (model, seq_len) -> content of config.json. UserError names what it cannot express.
    to_config: Callable[[Any, int], dict[str, Any]]
    # (content of config.json, its path) -> (model, seq_len). UserError names what the app lacks.
    from_config: Callable[[Mapping[str, Any], str], tuple[Any, int]]
    # Every tensor by its name here, in the order in which they are written.
    tensors: Callable[[Any], dict[str, HFTensor]]
    unused: Callable[[Any], tuple[str, ...]]  # how names end that a folder may have besides
    # By key in `model`, all that matters for the same weights to compute the same.
    computes: Callable[[Any], dict[str, Any]]


def form_of(app: App, shown: str) -> HuggingFace:
    """The app's form in transformers. UserError begins with `shown`, the key that needs it."""
    if app.hugging_face is None:
        raise UserError(f"{shown}: {app.path} has no form in transformers (App.hugging_face)")
    return app.hugging_face


def open_weights(app: App, path: str, model: Any, allowed: list[str]) -> TensorSource:
    """What checkpoint.init_from names, for a run with this `model` group. Raises UserError where it
    is no such folder, or its model is another.

    allowed: `checkpoint.allow_change`, for what leaves every shape as it is.
    """
    form = form_of(app, f"checkpoint.init_from = {path}")
    source, model_there, _ = open_folder(form, path, "checkpoint.init_from")
    there = form.computes(model_there)
    wrong = [
        f"model.{key} = {value}: must be {there[key]}".replace("None", "null")
        for key, value in form.computes(model).items()
        if value != there[key] and f"model.{key}" not in allowed
    ]
    if wrong:
        lines = "\n  ".join(wrong)
        advice = "leave these keys out: they default to the folder's"
        raise UserError(f"the model is not that of {source.path / CONFIG}:\n  {lines}\n{advice}")
    return source


def open_folder(form: HuggingFace, path: str, key: str) -> tuple[TensorSource, Any, int]:
    """A folder's tensors by our names (`model.<name>`), `model` group and seq_len. Raises UserError
    where it is no such folder, or names what the app lacks or what does not fit.

    key: the config key that names the folder, for messages.
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
    found = {
        name: tuple(s.get_shape())
        for name, s in slices.items()
        if name in expected or not name.endswith(form.unused(model))
    }
    check_fit(f"{path}: its tensors do not fit", expected, found, f"in {CONFIG}", "in the folder")

    def read(parts: list[Part]) -> None:
        for name, (rows, *others), out in parts:
            group = max(1, len(ours[name].row_order))
            # Whole groups, of which what was not asked for is cut off again.
            first, last = rows.start // group * group, -(-rows.stop // group) * group
            groups = slices[ours[name].name][(slice(first, last), *others)]
            ordered = ours[name].reorder(groups, to_hf=False)
            out.copy_(ordered[rows.start - first : rows.stop - first])

    dtypes = {name: slices[t.name][0:0].dtype for name, t in ours.items()}
    tensors = {n: torch.empty(t.shape, dtype=dtypes[n], device="meta") for n, t in ours.items()}
    return TensorSource(folder, "Hugging Face folder", tensors, read), model, seq_len


def _open_files(folder: Path) -> list[Any]:
    """The safetensors files, mapped into memory: a slice of a tensor reads just its bytes."""
    index, files = folder / INDEX, [SINGLE]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: must have a mapping weight_map of tensors to files")
        files = sorted(set(map(str, weight_map.values())))
    elif not (folder / SINGLE).is_file():
        raise UserError(f"{folder}: must have {SINGLE} or {INDEX}; only safetensors are read")
    opened = []
    for name in files:
        if Path(name).name != name:
            raise UserError(f"{index}: refers to the file {name} outside its folder")
        try:
            file_size(folder / name)
            opened.append(safe_open(folder / name, framework="pt", device="cpu"))
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{folder / name}: cannot be read as safetensors ({error})") from None
    return opened


def find_tokenizer(folder: Path, key: str, of_user: str) -> TokenizerArgs:
    """The tokenizer in a folder. UserError where it has none; `key` names the folder, and `of_user`
    is what names another tokenizer, for that message."""
    for args in (
        TokenizerArgs("hf", str(folder / "tokenizer.json")),
        TokenizerArgs("sp", str(folder / "tokenizer.model")),
    ):
        if tokenizer_file(args).is_file():
            return args
    need = f"has no tokenizer.json or tokenizer.model; {of_user} names the model's tokenizer"
    raise UserError(f"{key} = {folder}: {need}")


def adds_bos(args: TokenizerArgs, tokenizer: Tokenizer) -> bool:
    """Whether texts of the model begin with bos: what a tokenizer.json puts before one, or what
    add_bos_token in the tokenizer_config.json beside it says; else, unless it is `hf`, they do."""
    if args.name == "bytes":
        return True
    if args.name == "hf" and tokenizer.library.encode("").ids[:1] == [tokenizer.bos_id]:
        return True
    asked = tokenizer_config(args).get("add_bos_token", args.name != "hf")
    return tokenizer.bos_id is not None and bool(asked)
