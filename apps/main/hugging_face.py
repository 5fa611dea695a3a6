"""The model of apps/main as Llama, Mistral, Qwen2, Qwen3 and OLMo 2 are in transformers:
config.json, tensor names, order of features."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from apps.main.config import ModelArgs
from lingua.base.errors import UserError
from lingua.config.values import show
from lingua.model.args import RopeScaling, TransformerArgs
from lingua.tools.exchange.hugging_face import HFTensor, HuggingFace


@dataclass(frozen=True)
class Family:
    """The properties that the models of a `model_type` in transformers share."""

    model: dict[str, Any]  # values in our `model` group that all of them share
    missing: dict[str, Any]  # what a config.json says that lacks a key
    windows: bool = True  # may have a sliding window


PLAIN = {"qkv_bias": False, "qk_norm": None, "norm_placement": None}
QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
QWEN |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
# Of those that can express a model, the first is what it is exported as.
FAMILIES = {
    "llama": Family(PLAIN, {"max_position_embeddings": 2048}, windows=False),
    "mistral": Family(
        PLAIN,
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(PLAIN | {"qkv_bias": True}, QWEN),
    "qwen3": Family(PLAIN | {"qk_norm": "per_head"}, QWEN | {"head_dim": 128}),
    "olmo2": Family(
        PLAIN | {"qk_norm": "all_heads", "norm_placement": "output"},
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        windows=False,
    ),
}


def family_of(args: ModelArgs) -> str:
    """The `model_type` that a model has in transformers. UserError names what none of them has."""
    model = {key: getattr(args, key) for key in PLAIN}
    families = [name for name, family in FAMILIES.items() if family.model == model]
    if not families:
        values = ", ".join(f"model.{key} = {show(value)}" for key, value in model.items())
        raise UserError(f"{values}: none of {', '.join(FAMILIES)} in transformers has these")
    for name in families:
        # Llama's configuration refuses numbers of heads that do not divide the residual stream.
        if name == "llama" and args.dim % args.heads()[0]:
            continue
        if args.sliding_window is None or FAMILIES[name].windows:
            return name
    raise UserError(
        f"model.sliding_window = {args.sliding_window}: {families[0]} in transformers has no "
        "sliding window; only null can be exported"
    )


def tensors(args: ModelArgs) -> dict[str, HFTensor]:
    """Every tensor of the model in transformers, by our names.

    Rotary features that turn together are (2i, 2i + 1) here, as Meta keeps them, and (i, i + D/2)
    in transformers.
    """
    (n_heads, n_kv_heads, head_dim), dim, hidden = args.heads(), args.dim, args.hidden_dim()
    n_q, n_kv, half = n_heads * head_dim, n_kv_heads * head_dim, head_dim // 2
    pairs = tuple(i + second * half for i in range(half) for second in (0, 1))
    norms = ("input_layernorm", "post_attention_layernorm")
    if args.norm_placement == "output":
        norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    block_tensors = {
        "attention.wq.weight": HFTensor("self_attn.q_proj.weight", (n_q, dim), pairs),
        "attention.wk.weight": HFTensor("self_attn.k_proj.weight", (n_kv, dim), pairs),
        "attention.wv.weight": HFTensor("self_attn.v_proj.weight", (n_kv, dim)),
        "attention.wo.weight": HFTensor("self_attn.o_proj.weight", (dim, n_q)),
        "feed_forward.w1.weight": HFTensor("mlp.gate_proj.weight", (hidden, dim)),
        "feed_forward.w3.weight": HFTensor("mlp.up_proj.weight", (hidden, dim)),
        "feed_forward.w2.weight": HFTensor("mlp.down_proj.weight", (dim, hidden)),
        "attention_norm.weight": HFTensor(f"{norms[0]}.weight", (dim,)),
        "ffn_norm.weight": HFTensor(f"{norms[1]}.weight", (dim,)),
    }
    if args.qkv_bias:
        block_tensors |= {
            "attention.wq.bias": HFTensor("self_attn.q_proj.bias", (n_q,), pairs),
            "attention.wk.bias": HFTensor("self_attn.k_proj.bias", (n_kv,), pairs),
            "attention.wv.bias": HFTensor("self_attn.v_proj.bias", (n_kv,)),
        }
    if args.qk_norm is not None:
        q, k = (n_q, n_kv) if args.qk_norm == "all_heads" else (head_dim, head_dim)
        block_tensors |= {
            "attention.q_norm.weight": HFTensor("self_attn.q_norm.weight", (q,), pairs),
            "attention.k_norm.weight": HFTensor("self_attn.k_norm.weight", (k,), pairs),
        }
    vocabulary = (args.vocab_size, dim)
    by_name = {"tok_embeddings.weight": HFTensor("model.embed_tokens.weight", vocabulary)}
    for depth in range(args.n_layers):
        for name, t in block_tensors.items():
            by_name[f"layers.{depth}.{name}"] = replace(t, name=f"model.layers.{depth}.{t.name}")
    by_name["norm.weight"] = HFTensor("model.norm.weight", (dim,))
    if not args.weight_tying:
        by_name["output.weight"] = HFTensor("lm_head.weight", vocabulary)
    return by_name


def unused(args: ModelArgs) -> dict[str, str | None]:
    """Returns the tensors that are not read: those of an old form, and the copy of a tied head."""
    head = {"lm_head.weight": "model.embed_tokens.weight"} if args.weight_tying else {}
    return {".rotary_emb.inv_freq": None, **head}


def to_config(args: ModelArgs, seq_len: int) -> dict[str, Any]:
    """config.json of the model. UserError names what no family of transformers has."""
    n_heads, n_kv_heads, head_dim = args.heads()
    family, window = family_of(args), args.sliding_window
    rope: dict[str, Any] = {"rope_type": "default"}
    if args.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_seq_len,
        }
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
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
        "rope_parameters": {"rope_theta": args.rope_theta, **rope},
        # the same for programs that read the form before transformers 5
        "rope_theta": args.rope_theta,
        "rope_scaling": None if args.rope_scaling is None else rope,
    }
    if family in ("llama", "qwen3", "olmo2"):
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    if FAMILIES[family].windows:
        config["sliding_window"] = window
    if family in ("qwen2", "qwen3"):
        full = 0 if window else args.n_layers  # how many layers see everything, the first ones
        config |= {"use_sliding_window": window is not None, "max_window_layers": full}
    return config


# Options of config.json with the only values that the model of apps/main can have.
ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": tuple(FAMILIES),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "rope_type": ("default", "llama3"),
    "attention_dropout": (0.0,),  # of the weights of attention; model.dropout is another
    "tie_word_embeddings": (True, False),
}


def from_config(config: Mapping[str, Any], where: str) -> tuple[ModelArgs, int]:
    """Our `model` group of a config.json, and seq_len. UserError names what the model lacks."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # the first wins
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{where}: {name} = {show(rope)}: must be a group of keys, or null")
    given = {**config, **rope, "rope_type": rope.get("rope_type") or rope.get("type")}
    for key, allowed in ONLY.items():
        value = given.get(key)
        if value not in (*allowed, None) or (key == "model_type" and value is None):
            need = " or ".join(json.dumps(v) for v in allowed) or "null"
            raise UserError(f"{where}: {key} = {show(value)}: must be {need}")
    family = FAMILIES[given["model_type"]]
    given = family.missing | given

    def number(key: str, kind: type, default: Any = None, at_most: float = 2**31) -> Any:
        value = default if given.get(key) is None else given[key]
        if type(value) not in (int, kind) or not 0 < value <= at_most:
            need = f"must be a number above 0 and at most {at_most:.10g}"
            need += ", without a fraction" if kind is int else ""
            raise UserError(f"{where}: {key} = {show(value)}: {need}")
        return kind(value)

    scaling, seq_len = None, number("max_position_embeddings", int, 2048)
    if given["rope_type"] == "llama3":
        scaling = RopeScaling(
            number("factor", float),
            number("low_freq_factor", float),
            number("high_freq_factor", float),
            number("original_max_position_embeddings", int, seq_len),
        )
    dim, n_heads = number("hidden_size", int), number("num_attention_heads", int)
    n_layers = number("num_hidden_layers", int, at_most=10_000)
    window = number("sliding_window", int) if has_window(given, n_layers, where) else None
    multiplier, multiple_of = feed_forward_size(dim, number("intermediate_size", int))
    args = ModelArgs(
        dim=dim,
        n_layers=n_layers,
        head_dim=number("head_dim", int, dim // n_heads, at_most=2**16),
        n_heads=n_heads,
        n_kv_heads=number("num_key_value_heads", int, n_heads),
        ffn_dim_multiplier=multiplier,
        multiple_of=multiple_of,
        norm_eps=number("rms_norm_eps", float, 1e-6),
        rope_theta=number("rope_theta", float, 10000.0, at_most=1e30),
        rope_scaling=scaling,
        sliding_window=window,
        vocab_size=number("vocab_size", int),
        weight_tying=bool(config.get("tie_word_embeddings")),
        **family.model,
    )
    for group in (args, scaling):
        for key, need in group.validate() if group is not None else ():
            raise UserError(f"{where}: gives {key} = {getattr(group, key)}: {need}")
    return args, seq_len


def has_window(config: Mapping[str, Any], n_layers: int, where: str) -> bool:
    """Whether the layers of a model in transformers have its sliding window. UserError where some
    have and some have not."""
    family, key = config["model_type"], "layer_types"
    asked = config.get("use_sliding_window", family == "mistral")
    if config.get(key) is not None:
        kinds = config[key]
    elif "max_window_layers" in config and asked:  # Qwen's: the first ones see everything
        key = "max_window_layers"
        n_full = config[key] if isinstance(config[key], int) else 1
        kinds = ["full_attention" if i < n_full else "sliding_attention" for i in range(n_layers)]
    else:
        kinds = ["sliding_attention"]
    if not isinstance(kinds, list) or any(kind != kinds[0] for kind in kinds):
        raise UserError(
            f"{where}: {key} = {show(config[key])}: must give all {n_layers} layers the same "
            "attention"
        )
    has = FAMILIES[family].windows and asked and config.get("sliding_window") is not None
    return has and (family == "mistral" or kinds[:1] == ["sliding_attention"])


def feed_forward_size(dim: int, hidden: int) -> tuple[float | None, int]:
    """(ffn_dim_multiplier, multiple_of) that make a feed-forward of this hidden size, the former
    with as few digits as possible."""
    multiple_of = max(1, min(hidden & -hidden, 256))  # the largest power of two that divides it
    exact = (hidden + 0.5) / max(int(8 * dim / 3), 1)
    for multiplier in (None, *(round(exact, digits) for digits in range(1, 17)), exact):
        args = TransformerArgs(dim=dim, ffn_dim_multiplier=multiplier, multiple_of=multiple_of)
        if multiplier != 0 and args.hidden_dim() == hidden:
            break
    return multiplier, multiple_of


def computes(args: ModelArgs) -> dict[str, Any]:
    """Returns, by key in `model`, all settings that change what the same weights compute."""
    keys = "dim n_layers norm_eps rope_theta rope_scaling sliding_window vocab_size weight_tying"
    values = {key: getattr(args, key) for key in (*keys.split(), *PLAIN)}
    values |= zip(("n_heads", "n_kv_heads", "head_dim"), args.heads(), strict=True)
    values["ffn_dim_multiplier and multiple_of, which give a hidden size"] = args.hidden_dim()
    return values


llama = HuggingFace(to_config, from_config, tensors, unused, computes)
