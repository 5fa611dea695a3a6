"""Low-rank changes of a model's linear layers (`App.merges_into`): added to the layers that they
change, and in the files of Hugging Face's PEFT.

The layer `name` has the matrix `name.weight`, and its change `name.down` [rank, in] and `name.up`
[out, rank]; alpha / rank times their product is added to the matrix. PEFT calls them lora_A and
lora_B. Rank and alpha are in the group `lora` of the config.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lingua.app import App, find_app, known_apps
from lingua.base.errors import UserError
from lingua.base.files import read_json
from lingua.checkpoint.origin import PEFT_CONFIG, is_hf_folder, open_source, over
from lingua.checkpoint.saved import flat_config
from lingua.checkpoint.source import TensorSource, check_fit
from lingua.checkpoint.tensors import Part
from lingua.config.load import to_yaml
from lingua.config.saved import load_saved
from lingua.config.values import parse_mapping, plain, show
from lingua.tools.exchange.hugging_face import HFTensor, config_of_hf_folder, form_of, tokenizers_of

APP = "lora"  # the app of what PEFT has written, where none is named
WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."
KINDS = {"down": "lora_A", "up": "lora_B"}
# Options of adapter_config.json that say nothing about what stored adapters compute, or that are
# read below. Those of ONLY have one of these values; any other must be null, false or empty.
READ = {
    "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "inference_mode", "revision",
    "auto_mapping", "peft_version", "eva_config", "megatron_core", "qalora_group_size",
    "runtime_config",
}  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # those that leave the base as it is
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
}
STORED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that are read


def merged(source: TensorSource, app: App | None) -> tuple[TensorSource, App]:
    """The model of a source with its changes added to what they change, as a model of the app that
    `app`, None: the one that it names, has adapted. Sums are of float32, rounded once."""
    _, into, args = _read(source, app)
    lora = args.lora
    own = source.parts[0].tensors if source.parts else {}
    stems = {n.removesuffix("up") for n in own if n.endswith(".up")}

    def read(parts: list[Part]) -> None:
        source.read_parts(parts)
        for part in parts:
            stem = part.name.removesuffix("weight")
            if stem not in stems or not part.name.endswith("weight"):
                continue
            rows, columns = part.box
            up = torch.empty(rows.stop - rows.start, lora.rank)
            down = torch.empty(lora.rank, columns.stop - columns.start)
            all_ranks = slice(0, lora.rank)
            source.read_parts(
                [Part(f"{stem}up", (rows, all_ranks), up),
                 Part(f"{stem}down", (all_ranks, columns), down)]
            )  # fmt: skip
            change = (lora.alpha / lora.rank) * (up @ down)
            part.out.copy_(part.out.float() + change.to(part.out.device))

    config = plain(parse_mapping(source.config, source.config_path))
    config = {key: value for key, value in config.items() if key != "lora"} | {"app": into.path}
    tensors = {n: t for n, t in source.shapes("model.").items() if n not in own}
    kept = {n: source.tensors[n] for n in tensors}
    whole = replace(source, tensors=kept, read_parts=read, config=to_yaml(config), parts=None)
    return whole, into


def _read(source: TensorSource, app: App | None) -> tuple[App, App, Any]:
    """The app of a model with changes, that which it adapts, and the configuration. Raises
    UserError."""
    named = flat_config(source, ["app"]).get("app")
    app = app or find_app(named, source.config_path)
    if app.merges_into is None:
        raise UserError(f"{source.path}: has adapters, and {app.path} has none (App.merges_into)")
    args: Any = load_saved(app.config, source.config_path, source.config)
    return app, app.merges_into, args


# ---- PEFT


def write_peft(
    source: TensorSource, app: App | None, out: Path, cast: Callable[..., Tensor]
) -> str:
    """Write the changes of a model into the empty folder `out`, as PEFT has them. Returns a note
    for the user. Raises UserError where PEFT has no form of it, or what writing raises."""
    if source.parts is None:
        raise UserError(f"to = peft: {source.path} has no adapters")
    app, _, args = _read(source, app)
    own, base = source.parts
    by_name = form_of(app, source.path).tensors(args.model)
    names = {n: peft_name(n, by_name) for n in own.shapes("model.")}
    tensors = {
        names[name]: cast(_reordered(name, t, by_name, to_hf=True)).contiguous()
        for name, t in own.whole(names).items()
    }
    lora = args.lora
    targets = {name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in tensors}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.path.resolve()),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / WEIGHTS).chmod(0o644)  # safetensors creates files that others cannot read
    (out / PEFT_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if is_hf_folder(base.path):
        return ""
    return f"; PEFT loads them over a folder of transformers, which convert makes of {base.path}"


def peft_name(name: str, by_name: dict[str, HFTensor]) -> str:
    """PEFT's name of `model.<layer>.<down or up>`. `by_name`: all tensors in transformers."""
    layer, _, kind = name.removeprefix("model.").rpartition(".")
    return f"{PREFIX}{by_name[f'{layer}.weight'].name.removesuffix('.weight')}.{KINDS[kind]}.weight"


def _reordered(name: str, t: Tensor, by_name: dict[str, HFTensor], to_hf: bool) -> Tensor:
    """The rows of `up`, which are those of the matrix, in transformers' order or in ours."""
    layer, _, kind = name.removeprefix("model.").rpartition(".")
    return by_name[f"{layer}.weight"].reorder(t, to_hf) if kind == "up" else t


def open_peft(folder: Path, app: App | None, base: str | None) -> TensorSource:
    """A folder of PEFT over its base: the one that it names, a folder of transformers, or what is
    at `base`. Raises UserError, which names what is not read."""
    file = folder / PEFT_CONFIG
    given = _options(file)
    named = base if base is not None else given.get("base_model_name_or_path")
    if not isinstance(named, str) or not named or not os.path.exists(named):
        raise UserError(
            f"{folder}: its base {show(named)} is not here; base_model=PATH gives its place"
        )
    app = app or find_app(known_apps().get(APP), str(file))
    source = open_source("base_model", named, app, "size", alone=True)
    if source.parts is not None:
        raise UserError(f"{folder}: its base {named} has adapters itself; convert merges them")
    if is_hf_folder(source.path):
        has_tokenizer = any(tokenizers_of(source.path))
        config = config_of_hf_folder(app, source.path, "tokenizer" if has_tokenizer else None)
        source = replace(source, config=to_yaml(config))
    model: Any = load_saved(app.config, source.config_path, source.config).model
    by_name = form_of(app, folder).tensors(model)
    tensors = _stored(folder / WEIGHTS, by_name, given)
    lora: dict[str, Any] = {"rank": given["r"], "alpha": given["lora_alpha"]}
    lora |= {"dropout": given.get("lora_dropout") or 0.0, "targets": _patterns(tensors, by_name)}
    init_from = str(source.path.resolve())
    config = plain(parse_mapping(source.config, source.config_path))
    config |= {"app": app.path, "lora": lora, "checkpoint": {"init_from": init_from}}

    def read(parts: list[Part]) -> None:
        for part in parts:
            part.out.copy_(tensors[part.name][part.box])

    own = TensorSource(folder, "PEFT folder", tensors, read, config=to_yaml(config))
    args: Any = load_saved(app.config, str(file), own.config)
    for key, need in args.lora.validate():
        raise UserError(f"{file}: gives lora.{key} = {show(lora[key])}: {need}")
    return over(own, source)


def _options(file: Path) -> dict[str, Any]:
    """The content of an adapter_config.json. Raises UserError, which names what is not read."""
    given = read_json(file)
    for key, value in given.items():
        allowed = ONLY.get(key)
        if (value not in allowed) if allowed else (bool(value) and key not in READ):
            need = " or ".join(json.dumps(v) for v in allowed or (None, False))
            raise UserError(f"{file}: {key} = {show(value)}: must be {need}")
    if "peft_type" not in given:
        raise UserError(f"{file}: must have the key peft_type")
    rank, alpha = given.get("r"), given.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise UserError(f"{file}: r = {show(rank)}: must be a whole number above 0")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise UserError(f"{file}: lora_alpha = {show(alpha)}: must be a finite number above 0")
    return given


def _stored(path: Path, by_name: dict[str, HFTensor], given: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of PEFT's file by our names. Raises UserError where they do not fit the model
    whose tensors in transformers are `by_name`, or are not those that its config has."""
    if not path.is_file():
        raise UserError(f"{path.parent}: must have {WEIGHTS}; only safetensors are read")
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None
    tensors, expected = dict[str, Tensor](), dict[str, tuple[int, ...]]()
    rank, targets = given["r"], given.get("target_modules")
    chosen = given.get("layers_to_transform") is not None or given.get("exclude_modules")
    ends = tuple(f".{t}" for t in targets if not chosen) if isinstance(targets, list) else ()
    for name, t in by_name.items():
        if len(t.shape) != 2:
            continue
        layer = f"model.{name.removesuffix('.weight')}"
        names = {f"{layer}.{kind}": peft_name(f"{layer}.{kind}", by_name) for kind in KINDS}
        named = f".{t.name.removesuffix('.weight')}".endswith(ends)
        if not named and not stored.keys() & {*names.values()}:
            continue
        shapes = (rank, t.shape[1]), (t.shape[0], rank)
        expected |= zip(names.values(), shapes, strict=True)
        tensors |= {n: stored[p] for n, p in names.items() if p in stored}
    shapes_there = {n: tuple(t.shape) for n, t in stored.items()}
    there = "in the file"
    check_fit(f"{path}: does not fit", expected, shapes_there, f"by {PEFT_CONFIG}", there)
    if not tensors or any(t.dtype not in STORED for t in tensors.values()):
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED)
        raise UserError(f"{path}: must have adapters, of {kinds}")
    return {n: _reordered(n, t, by_name, to_hf=False) for n, t in tensors.items()}


def _patterns(tensors: Iterable[str], by_name: Iterable[str]) -> list[str]:
    """The layers of these changes; patterns, where all blocks have the same ones. `by_name`: the
    names of the model's tensors."""

    def pattern(name: str) -> str:
        return re.sub(r"\.\d+\.", ".*.", name)

    chosen = {name.removeprefix("model.").rpartition(".")[0] for name in tensors}
    patterns = {pattern(name) for name in chosen}
    layers = (name.rpartition(".")[0] for name in by_name if name.endswith(".weight"))
    exact = {layer for layer in layers if pattern(layer) in patterns} != chosen
    return sorted(chosen if exact else patterns)
