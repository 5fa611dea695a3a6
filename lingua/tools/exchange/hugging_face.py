"""A model in the form of Hugging Face's transformers: a folder with config.json and safetensors.

What a family of models is called there belongs to an app, whose `App.hugging_face` is a
function that gives a `HuggingFace`. Of a folder only JSON and safetensors are read, so nothing of
it is executed.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lingua.app import App, find_app
from lingua.base.errors import UserError
from lingua.base.files import file_size, read_into, read_json
from lingua.checkpoint.dcp import READ_BYTES
from lingua.checkpoint.origin import HF_CONFIG
from lingua.checkpoint.source import TensorSource, check_fit
from lingua.checkpoint.tensors import Part
from lingua.config.values import plain, show
from lingua.data.rows import TOKENIZER
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import kind_of_file, library_errors, load_config, wrong_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GENERATION, TOKENIZERS = "generation_config.json", ("tokenizer.json", "tokenizer.model")
DTYPES = {  # names of the safetensors format
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a model in transformers."""

    name: str  # name in transformers
    shape: tuple[int, ...]  # the same in both
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
    """Describes how transformers stores the models of an app. `model` is the `model` group of its
    config."""

    # (model, seq_len) -> content of config.json. UserError names what it cannot express.
    to_config: Callable[[Any, int], dict[str, Any]]
    # (content of config.json, its path) -> (model, seq_len). UserError names what the app lacks.
    from_config: Callable[[Mapping[str, Any], str], tuple[Any, int]]
    # Every tensor by its name here, in the order in which they are written.
    tensors: Callable[[Any], dict[str, HFTensor]]
    # Endings of tensor names that are not read, with the tensor that one must be equal to, if any.
    unused: Callable[[Any], dict[str, str | None]]
    # By key in `model`, all that matters for the same weights to compute the same.
    computes: Callable[[Any], dict[str, Any]]


def form_of(app: App | None, path: Path) -> HuggingFace:
    """The form in transformers of an app, None: apps.main. Raises UserError where it has none;
    `path` is what needs it."""
    app = app or find_app(None, str(path))
    if app.hugging_face is None:
        raise UserError(f"{path}: {app.path} has no form in transformers (App.hugging_face)")
    form: HuggingFace = app.hugging_face()
    return form


def config_of_hf_folder(
    app: App | None, folder: Path, key: str | None, tokenizer: TokenizerArgs | None = None
) -> dict[str, Any]:
    """A folder of transformers as a config of ours: `app`, `model`, and `data` with seq_len and the
    tokenizer, which is the folder's unless one is given. Raises UserError.

    key: the key that can name another tokenizer, for a message; None: no tokenizer is needed.
    """
    app, file = app or find_app(None, str(folder)), folder / HF_CONFIG
    model, seq_len = form_of(app, folder).from_config(read_json(file), str(file))
    data: dict[str, Any] = {"seq_len": seq_len}
    if key is not None:
        tokenizer = tokenizer or next(tokenizers_of(folder), None)
        if tokenizer is None:
            need = f"has no {' or '.join(TOKENIZERS)}; {key} names the model's tokenizer"
            raise UserError(f"{folder}: {need}")
        built = build_tokenizer(tokenizer)
        data |= {"add_bos": adds_bos(tokenizer, built), "add_eos": built.eos_id is not None}
        data |= {"tokenizer": asdict(tokenizer)}
    return {"app": app.path, "model": plain(model), "data": data}


def tokenizers_of(folder: Path) -> Iterator[TokenizerArgs]:
    """Yields the forms in which a folder of transformers has its tokenizer."""
    for file in filter(Path.is_file, (folder / name for name in TOKENIZERS)):
        yield TokenizerArgs(kind_of_file(str(file), "data.tokenizer.name"), str(file))


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises UserError where tokens of the folder's tokenizer, if it has one, are others in
    `tokenizer`, in a sample. More tokens, or spaces around one, are no difference."""
    theirs = list(tokenizers_of(folder))
    if not theirs or tokenizer.content in (args.file.read_bytes() for args in theirs):
        return
    own = build_tokenizer(theirs[0])
    n = min(own.vocab_size, tokenizer.vocab_size)
    for i in range(0, n, -(-n // 4096)):
        here, there = (show(t.decode([i]).strip()) for t in (tokenizer, own))
        if here != there and '""' not in (here, there):
            raise UserError(
                f"data.tokenizer.name = {tokenizer.name}: token {i} is {here}, and {there} in the "
                f"training of {folder}; set data.tokenizer={{name: {own.name}, path: "
                f"{theirs[0].path}}}, or name {TOKENIZER} in checkpoint.allow_change"
            )


def open_folder(form: HuggingFace, folder: Path) -> tuple[TensorSource, Any, int]:
    """A folder's tensors by our names (`model.<name>`), `model` group and seq_len. Raises
    UserError: what the app lacks, or what does not fit."""
    where = folder / HF_CONFIG
    model, seq_len = form.from_config(read_json(where), str(where))
    ours = {f"model.{name}": t for name, t in form.tensors(model).items()}
    stored = stored_tensors(folder)
    expected = {t.name: t.shape for t in ours.values()}
    unused = form.unused(model)
    extra = [name for name in stored if name not in expected and name.endswith(tuple(unused))]
    for name in extra:
        copied = next(equal for end, equal in unused.items() if name.endswith(end))
        if copied in stored and not _are_equal(stored[name], stored[copied]):
            raise UserError(
                f"{stored[name].file}: {name} is not {copied}, and {where} ties them: set "
                "tie_word_embeddings = false there to read both, or remove the former"
            )
    shapes = {name: t.shape for name, t in stored.items() if name not in extra}
    check_fit(
        f"{folder}: its tensors do not fit", expected, shapes, f"in {HF_CONFIG}", "in the folder"
    )
    tensors = {}
    for name, t in ours.items():
        if (dtype := DTYPES.get(stored[t.name].dtype)) is None:
            raise UserError(
                f"{stored[t.name].file}: {t.name} is {stored[t.name].dtype}: must be of "
                f"{', '.join(DTYPES)}; weights that are quantized are not read"
            )
        tensors[name] = torch.empty(t.shape, dtype=dtype, device="meta")

    def read(parts: list[Part]) -> None:
        parts_of_file: dict[Path, list[Part]] = {}
        for part in sorted(parts, key=lambda part: stored[ours[part.name].name].begin):
            parts_of_file.setdefault(stored[ours[part.name].name].file, []).append(part)
        for file, inside in parts_of_file.items():
            with file.open("rb", buffering=0) as f:
                for part in inside:
                    t, dtype = ours[part.name], tensors[part.name].dtype
                    _read_part(f.fileno(), stored[t.name], dtype, t.row_order, part)

    def check_model(wanted: Any, allowed: list[str]) -> None:
        hf_values = form.computes(model)
        wrong = [
            f"model.{key} = {value}: must be {hf_values[key]}".replace("None", "null")
            for key, value in form.computes(wanted).items()
            if value != hf_values[key] and f"model.{key}" not in allowed
        ]
        if wrong:
            lines = "\n  ".join(wrong)
            advice = "leave these keys out: they default to the folder's"
            raise UserError(f"the model is not that of {where}:\n  {lines}\n{advice}")

    kind = "Hugging Face folder"
    return TensorSource(folder, kind, tensors, read, check_model=check_model), model, seq_len


class StoredTensor(NamedTuple):
    """The place of a tensor in a safetensors file; its elements are in row-major order."""

    file: Path
    begin: int  # byte of the file
    dtype: str  # key of DTYPES, or a type that is not read
    shape: tuple[int, ...]

    def runs(
        self, box: tuple[slice, ...], itemsize: int, row_order: tuple[int, ...] = ()
    ) -> tuple[np.ndarray, int]:
        """The bytes of a box of the tensor: (int64 [N], the byte of the file at which each run
        begins, in the order of the box; bytes of each run).

        row_order: that of its HFTensor; the rows of the box are in our order.
        """
        # A run goes over the box's part of dimension `d` and all of those after it.
        cut = [d for d, side in enumerate(box) if side.stop - side.start < self.shape[d]]
        d = max(cut, default=0)
        d = max(d, 1) if row_order else d
        index = [np.arange(side.start, side.stop) for side in box[:d]]
        if row_order:
            place = index[0] % len(row_order)
            index[0] += np.array(row_order)[place] - place
        begins = np.array([self.begin])
        for dim, places in enumerate(index):
            step = itemsize * math.prod(self.shape[dim + 1 :])
            begins = (begins[:, None] + places * step).ravel()
        size = itemsize * math.prod(self.shape[d + 1 :])
        if d < len(box):
            begins, size = begins + box[d].start * size, (box[d].stop - box[d].start) * size
        return begins, size


def _are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in DTYPES:
        return False
    left = math.prod(a.shape) * DTYPES[a.dtype].itemsize
    with a.file.open("rb") as one, b.file.open("rb") as other:
        one.seek(a.begin)
        other.seek(b.begin)
        while left > 0:
            size = min(left, READ_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def _read_part(
    descriptor: int,
    stored: StoredTensor,
    dtype: torch.dtype,
    row_order: tuple[int, ...],
    part: Part,
) -> None:
    """Fill the memory of a part; where it has another dtype or is on another device, a few rows at
    a time. Not by a map of the file into memory: that ends the process where a file is cut short,
    and what was read of it counts as the process's memory."""
    box, out = part.box, part.out
    if out.dim() == 0:
        box, out, stored = (slice(0, 1),), out.view(1), stored._replace(shape=(1,))
    in_place = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
    row_bytes, first = out[0].numel() * dtype.itemsize, box[0].start
    for rows in out.split(len(out) if in_place else max(1, READ_BYTES // row_bytes)):
        memory = rows if in_place else torch.empty_like(rows, dtype=dtype, device="cpu")
        view, at = memory.view(-1).view(torch.uint8).numpy().data, 0
        rows_of_box = (slice(first, first + len(rows)), *box[1:])
        begins, size = stored.runs(rows_of_box, dtype.itemsize, row_order)
        for begin in begins.tolist():
            if read_into(descriptor, view[at : at + size], begin) < size:
                raise ValueError(f"{stored.file.name}: ends too early")
            at += size
        if not in_place:
            rows.copy_(memory)
        first += len(rows)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """A folder's tensors by their names in transformers. Raises UserError, which names the file
    that cannot be read."""
    index, files = folder / INDEX, [SINGLE]
    if (folder / SINGLE).is_file():
        pass  # transformers reads it where there are both
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: must have a mapping weight_map of tensors to files")
        files = sorted(set(map(str, weight_map.values())))
    else:
        raise UserError(f"{folder}: must have {SINGLE} or {INDEX}; only safetensors are read")
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        file = folder / name
        if file.name != name:
            raise UserError(f"{index}: refers to the file {name} outside its folder")
        if not file.exists():
            raise UserError(f"{index}: refers to the file {name}, which {folder} does not have")
        try:
            file_size(file)
            safe_open(file, framework="pt", device="cpu")  # checks the header and the file's size
            with file.open("rb") as f:
                begin = 8 + int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(begin - 8))
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read as safetensors ({error})") from None
        header.pop("__metadata__", None)
        for tensor, t in header.items():
            at = begin + t["data_offsets"][0]
            tensors[tensor] = StoredTensor(file, at, t["dtype"], tuple(t["shape"]))
    return tensors


def end_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens with which transformers ends a text of a folder's model. Raises UserError."""
    for file in (folder / GENERATION, folder / HF_CONFIG):
        value = read_json(file).get("eos_token_id") if file.is_file() else None
        if value is not None:
            tokens = value if isinstance(value, list) else [value]
            if all(type(token) is int and 0 <= token < vocab_size for token in tokens):
                return tuple(tokens)
            need = f"must be a token or a list of tokens, numbers from 0 to {vocab_size - 1}"
            raise UserError(f"{file}: eos_token_id = {show(value)}: {need}")
    return ()


def adds_bos(args: TokenizerArgs, tokenizer: Tokenizer) -> bool:
    """Whether texts of the model begin with bos: what a tokenizer.json puts before one, or what
    add_bos_token in the tokenizer_config.json beside it says; else, unless it is `hf`, they do."""
    if args.name == "bytes":
        return True
    if args.name == "hf":
        with library_errors(lambda why: wrong_file(args, f": {why}")):
            if tokenizer.library.encode("").ids[:1] == [tokenizer.bos_id]:
                return True
    asked = load_config(args).get("add_bos_token", args.name != "hf")
    return tokenizer.bos_id is not None and bool(asked)
