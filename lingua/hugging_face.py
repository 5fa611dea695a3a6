"""Llama in the form that Hugging Face's transformers keeps it: a folder with config.json and
safetensors. Between its words and ours: config, tensor names, the order of rotary features.

Of a folder only JSON and safetensors are read, so nothing from outside is executed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lingua.config.schema import Guarded
from lingua.errors import UserError
from lingua.init import canonical_name
from lingua.transformer import RopeScaling, TransformerArgs

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


@dataclass
class LlamaArgs(TransformerArgs):
    """The `model` group of a config, as far as transformers' Llama can express it."""

    vocab_size: Guarded[int] = -1  # rows of the embedding and the head
    weight_tying: Guarded[bool] = False  # the head shares the embedding's matrix


# ---------------------------------------------------------------------------------------- tensors

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
OF_BLOCK = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


def to_hf_name(name: str) -> str:
    """transformers' name of one of our tensors."""
    if not name.startswith("layers."):
        return NAMES[name]
    _, depth, rest = name.split(".", 2)
    return f"model.layers.{depth}.{OF_BLOCK[rest]}"


def llama_shapes(args: LlamaArgs) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by our name, in order."""
    (n_heads, n_kv_heads, head_dim), dim, hidden = args.heads(), args.dim, args.hidden_dim()
    of_block = {
        "attention.wq.weight": (n_heads * head_dim, dim),
        "attention.wk.weight": (n_kv_heads * head_dim, dim),
        "attention.wv.weight": (n_kv_heads * head_dim, dim),
        "attention.wo.weight": (dim, n_heads * head_dim),
        "feed_forward.w1.weight": (hidden, dim),
        "feed_forward.w3.weight": (hidden, dim),
        "feed_forward.w2.weight": (dim, hidden),
        "attention_norm.weight": (dim,),
        "ffn_norm.weight": (dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (args.vocab_size, dim)}
    for depth in range(args.n_layers):
        shapes |= {f"layers.{depth}.{name}": shape for name, shape in of_block.items()}
    shapes["norm.weight"] = (dim,)
    if not args.weight_tying:
        shapes["output.weight"] = (args.vocab_size, dim)
    return shapes


def is_rotated(name: str) -> bool:
    """Whether the rows of this matrix are features that the rotary embedding turns in pairs."""
    return name.endswith(("attention.wq.weight", "attention.wk.weight"))


def to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads from pairs (2i, 2i + 1), as Meta keeps them, to (i, i + D/2)."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """What to_halves undoes."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


# ----------------------------------------------------------------------------------------- config


def to_hf_config(args: LlamaArgs, seq_len: int) -> dict[str, Any]:
    """What config.json says about the model.

    Raises:
        UserError: names the option that transformers' Llama does not have.
    """
    n_heads, n_kv_heads, head_dim = args.heads()
    if args.sliding_window is not None:
        raise UserError(
            f"model.sliding_window = {args.sliding_window}: Llama in transformers has no sliding "
            "window; only null can be exported"
        )
    if args.dim % n_heads:
        raise UserError(
            f"model.n_heads = {n_heads}: Llama in transformers takes only numbers of heads that "
            f"divide model.dim = {args.dim}"
        )
    rope: dict[str, Any] = {"rope_type": "default"}
    if args.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim(),
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": args.norm_eps,
        "tie_word_embeddings": args.weight_tying,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": args.rope_theta, **rope},
        # the same for what reads the form before transformers 5
        "rope_theta": args.rope_theta,
        "rope_scaling": None if args.rope_scaling is None else rope,
    }


# What config.json may say besides sizes: others ask for a model that is not here.
ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
}


def from_hf_config(config: Mapping[str, Any], where: str) -> LlamaArgs:
    """Our `model` group of a config.json. UserError names what it asks for that we lack."""
    if "model_type" not in config:
        raise UserError(f"{where}: has no model_type; must be the config.json of a Llama model")
    for key, allowed in ONLY.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            need = " or ".join(json.dumps(v) for v in allowed) or "null"
            raise UserError(f"{where}: {key} = {json.dumps(value)}: must be {need}")

    def number(key: str, kind: type, default: Any = None, of: Mapping[str, Any] = config) -> Any:
        value = of.get(key)
        value = default if value is None else value
        fits = isinstance(value, (int, float) if kind is float else int)
        if not fits or isinstance(value, bool):
            raise UserError(f"{where}: {key} = {json.dumps(value)}: must be a number")
        return kind(value)

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling, seq_len = None, number("max_position_embeddings", int, 2048)
    if kind == "llama3":
        scaling = RopeScaling(
            number("factor", float, of=rope),
            number("low_freq_factor", float, of=rope),
            number("high_freq_factor", float, of=rope),
            number("original_max_position_embeddings", int, seq_len, of=rope),
        )
    elif kind != "default":
        raise UserError(f"{where}: rope_type = {json.dumps(kind)}: must be default or llama3")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor: must be 1, all features are turned")
    dim, n_heads = number("hidden_size", int), number("num_attention_heads", int)
    multiplier, multiple_of = feed_forward_size(dim, number("intermediate_size", int))
    args = LlamaArgs(
        dim=dim,
        n_layers=number("num_hidden_layers", int),
        head_dim=number("head_dim", int, dim // max(n_heads, 1)),
        n_heads=n_heads,
        n_kv_heads=number("num_key_value_heads", int, n_heads),
        ffn_dim_multiplier=multiplier,
        multiple_of=multiple_of,
        norm_eps=number("rms_norm_eps", float, 1e-6),
        rope_theta=number("rope_theta", float, config.get("rope_theta", 10000.0), of=rope),
        rope_scaling=scaling,
        vocab_size=number("vocab_size", int),
        weight_tying=config.get("tie_word_embeddings") is True,
    )
    for group in (args, scaling):
        for key, need in group.validate() if group is not None else ():
            raise UserError(f"{where}: gives {key} = {getattr(group, key)}: {need}")
    return args


def feed_forward_size(dim: int, hidden: int) -> tuple[float | None, int]:
    """(ffn_dim_multiplier, multiple_of) that make a feed-forward of this hidden size."""

    def gives(multiplier: float | None, multiple_of: int) -> bool:
        args = TransformerArgs(dim=dim, ffn_dim_multiplier=multiplier, multiple_of=multiple_of)
        return args.hidden_dim() == hidden

    if dim < 1 or hidden < 1:
        raise UserError(f"hidden_size = {dim}, intermediate_size = {hidden}: must be at least 1")
    multiple_of = min(hidden & -hidden, 256)  # the largest power of two that divides it
    for power in (multiple_of, 1024, 4096):
        if gives(None, power):
            return None, power
    exact = (hidden + 0.5) / max(int(8 * dim / 3), 1)
    multipliers = (round(exact, digits) for digits in range(1, 18))
    return next(m for m in multipliers if m > 0 and gives(m, multiple_of)), multiple_of


# ----------------------------------------------------------------------------------------- folder


class LlamaFolder:
    """A folder of transformers, opened: its config is read and its tensors are found."""

    def __init__(self, path: str | Path, key: str) -> None:
        """`key` is the config key that names the folder, for messages. Raises UserError."""
        self.path = Path(path)
        where = self.path / CONFIG
        if not where.is_file():
            raise UserError(
                f"{key} = {path}: must be a folder with the config.json and safetensors of a Llama "
                f"model; {where} is not there"
            )
        self.config = _read_json(where)
        self.args = from_hf_config(self.config, str(where))
        self.seq_len = int(self.config.get("max_position_embeddings") or 2048)
        self._file_of = self._find_tensors()
        self._check_tensors()

    def _find_tensors(self) -> dict[str, Any]:
        """The opened file of each tensor, by transformers' names."""
        index, single = self.path / INDEX, self.path / SINGLE
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(f"{index}: must have a mapping weight_map of tensors to files")
            files = sorted(set(map(str, weight_map.values())))
            for name in files:
                if Path(name).name != name:
                    raise UserError(f"{index}: refers to the file {name} outside its folder")
        elif single.is_file():
            files = [SINGLE]
        else:
            pickled = sorted(p.name for p in self.path.glob("*.bin")) or ["neither is there"]
            raise UserError(
                f"{self.path}: must have {SINGLE} or {INDEX}, for only safetensors are read "
                f"({pickled[0]})"
            )
        opened = [_open(self.path / file) for file in files]
        return {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def _check_tensors(self) -> None:
        """UserError names what the folder lacks, has in another shape, or has besides."""
        shapes = {to_hf_name(n): shape for n, shape in llama_shapes(self.args).items()}
        wrong = []
        for name, shape in shapes.items():
            if name not in self._file_of:
                wrong.append(f"{name} is missing")
            else:
                there = tuple(self._file_of[name].get_slice(name).get_shape())
                if there != shape:
                    wrong.append(f"{name} is {there}, {CONFIG} makes it {shape}")
        # of an old form of the model, and of a head that is tied
        known = (".rotary_emb.inv_freq", *(("lm_head.weight",) if self.args.weight_tying else ()))
        extra = sorted(n for n in self._file_of if n not in shapes and not n.endswith(known))
        wrong += [f"{name} is no tensor of this model" for name in extra]
        if wrong:
            more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            lines = "\n  ".join(wrong[:10])
            raise UserError(f"{self.path}: its tensors do not fit:\n  {lines}{more}")

    def read(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The part of one of our tensors that begins at an index and has a shape, on the CPU."""
        there = to_hf_name(name)
        rows = (begin[0], begin[0] + shape[0])
        head_dim = self.args.heads()[2] if is_rotated(name) else 1
        # whole heads, of which what was not asked for is cut off again
        whole = rows[0] // head_dim * head_dim, -(-rows[1] // head_dim) * head_dim
        box = (slice(*whole), *(slice(b, b + n) for b, n in zip(begin[1:], shape[1:], strict=True)))
        part = self._file_of[there].get_slice(there)[box]
        if head_dim > 1:
            part = to_pairs(part, head_dim)[rows[0] - whole[0] : rows[1] - whole[0]]
        return part


def check_model(folder: LlamaFolder, args: Any, allowed: list[str]) -> None:
    """UserError unless `args`, the `model` group of an app, is the folder's model.

    allowed: `checkpoint.allow_change`, for what leaves every shape as it is.
    """
    theirs = folder.args
    keys = "dim n_layers norm_eps rope_theta rope_scaling sliding_window vocab_size weight_tying"
    pairs = {key: (getattr(args, key), getattr(theirs, key)) for key in keys.split()}
    heads = zip(("n_heads", "n_kv_heads", "head_dim"), args.heads(), theirs.heads(), strict=True)
    pairs |= {key: (ours, there) for key, ours, there in heads}
    wrong = [
        f"model.{key} = {ours}: must be {there}"
        for key, (ours, there) in pairs.items()
        if ours != there and f"model.{key}" not in allowed
    ]
    if args.hidden_dim() != theirs.hidden_dim():
        wrong.append(
            f"model.ffn_dim_multiplier = {args.ffn_dim_multiplier}, multiple_of = "
            f"{args.multiple_of}: must give a hidden size of {theirs.hidden_dim()}, as "
            f"{theirs.ffn_dim_multiplier} and {theirs.multiple_of} do"
        )
    if wrong:
        lines = "\n  ".join(line.replace("None", "null") for line in wrong)
        raise UserError(f"the model is not that of {folder.path / CONFIG}:\n  {lines}")


@torch.no_grad()
def load_llama(folder: LlamaFolder, model: nn.Module) -> None:
    """Fill the parameters of a model, each rank reading what it holds of them."""
    parameters = {canonical_name(name): p for name, p in model.named_parameters()}
    shapes = llama_shapes(folder.args)
    wrong = [
        f"{name}: {tuple(p.shape)} here, {shapes.get(name, 'nothing')} in the folder"
        for name, p in parameters.items()
        if tuple(p.shape) != shapes.get(name)
    ]
    wrong += [f"{name}: in the folder, not here" for name in shapes if name not in parameters]
    if wrong:
        raise UserError(f"{folder.path} does not fit this model:\n  " + "\n  ".join(wrong[:10]))
    for name, p in parameters.items():
        local, begin = p, (0,) * p.dim()
        if isinstance(p, DTensor):
            local = p.to_local()
            _, begin = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        if local.numel():
            local.copy_(folder.read(name, tuple(begin), tuple(local.shape)))


def _open(path: Path) -> Any:
    """The file, mapped into memory: a slice of a tensor reads just its bytes."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content
