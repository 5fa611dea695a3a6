"""The model of apps/main as transformers' Llama: config.json, tensor names, order of features."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from apps.main.transformer import ModelArgs
from lingua.config.values import show
from lingua.errors import UserError
from lingua.hugging_face import HFTensor, HuggingFace
from lingua.transformer import RopeScaling, TransformerArgs


def tensors(args: ModelArgs) -> dict[str, HFTensor]:
    """Every tensor of the model in transformers, by our names.

    Rotary features that turn together are (2i, 2i + 1) here, as Meta keeps them, and (i, i + D/2)
    in transformers.
    """
    (n_heads, n_kv_heads, head_dim), dim, hidden = args.heads(), args.dim, args.hidden_dim()
    n_q, n_kv, half = n_heads * head_dim, n_kv_heads * head_dim, head_dim // 2
    pairs = tuple(i + second * half for i in range(half) for second in (0, 1))
    of_block = {
        "attention.wq": HFTensor("self_attn.q_proj", (n_q, dim), pairs),
        "attention.wk": HFTensor("self_attn.k_proj", (n_kv, dim), pairs),
        "attention.wv": HFTensor("self_attn.v_proj", (n_kv, dim)),
        "attention.wo": HFTensor("self_attn.o_proj", (dim, n_q)),
        "feed_forward.w1": HFTensor("mlp.gate_proj", (hidden, dim)),
        "feed_forward.w3": HFTensor("mlp.up_proj", (hidden, dim)),
        "feed_forward.w2": HFTensor("mlp.down_proj", (dim, hidden)),
        "attention_norm": HFTensor("input_layernorm", (dim,)),
        "ffn_norm": HFTensor("post_attention_layernorm", (dim,)),
    }
    vocabulary = (args.vocab_size, dim)
    found = {"tok_embeddings": HFTensor("model.embed_tokens", vocabulary)}
    for depth in range(args.n_layers):
        for name, t in of_block.items():
            found[f"layers.{depth}.{name}"] = replace(t, name=f"model.layers.{depth}.{t.name}")
    found["norm"] = HFTensor("model.norm", (dim,))
    if not args.weight_tying:
        found["output"] = HFTensor("lm_head", vocabulary)
    return {f"{name}.weight": replace(t, name=f"{t.name}.weight") for name, t in found.items()}


def unused(args: ModelArgs) -> tuple[str, ...]:
    """Of an old form of the model, and of a head that is tied."""
    return (".rotary_emb.inv_freq", *(("lm_head.weight",) if args.weight_tying else ()))


def to_config(args: ModelArgs, seq_len: int) -> dict[str, Any]:
    """config.json of the model. UserError names the option that transformers' Llama lacks."""
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
        # the same for programs that read the form before transformers 5
        "rope_theta": args.rope_theta,
        "rope_scaling": None if args.rope_scaling is None else rope,
    }


# Options of config.json with the only values that the model of apps/main can have.
ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "rope_type": ("default", "llama3"),
    "tie_word_embeddings": (True, False),
}


def from_config(config: Mapping[str, Any], where: str) -> tuple[ModelArgs, int]:
    """Our `model` group of a config.json, and seq_len. UserError names what the model lacks."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UserError(
            f"{where}: rope_parameters = {show(rope)}: must be a group of keys, or null"
        )
    given = {**config, **rope, "rope_type": rope.get("rope_type") or rope.get("type")}
    for key, allowed in ONLY.items():
        value = given.get(key)
        if value not in (*allowed, None) or (key == "model_type" and value is None):
            need = " or ".join(json.dumps(v) for v in allowed) or "null"
            raise UserError(f"{where}: {key} = {show(value)}: must be {need}")

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
    multiplier, multiple_of = feed_forward_size(dim, number("intermediate_size", int))
    args = ModelArgs(
        dim=dim,
        n_layers=number("num_hidden_layers", int, at_most=10_000),
        head_dim=number("head_dim", int, dim // n_heads, at_most=2**16),
        n_heads=n_heads,
        n_kv_heads=number("num_key_value_heads", int, n_heads),
        ffn_dim_multiplier=multiplier,
        multiple_of=multiple_of,
        norm_eps=number("rms_norm_eps", float, 1e-6),
        rope_theta=number("rope_theta", float, 10000.0, at_most=1e30),
        rope_scaling=scaling,
        vocab_size=number("vocab_size", int),
        weight_tying=bool(config.get("tie_word_embeddings")),
    )
    for group in (args, scaling):
        for key, need in group.validate() if group is not None else ():
            raise UserError(f"{where}: gives {key} = {getattr(group, key)}: {need}")
    return args, seq_len


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
    """By key in `model`, all that matters for the same weights to compute the same."""
    keys = "dim n_layers norm_eps rope_theta rope_scaling sliding_window vocab_size weight_tying"
    found = {key: getattr(args, key) for key in keys.split()}
    found |= zip(("n_heads", "n_kv_heads", "head_dim"), args.heads(), strict=True)
    found["ffn_dim_multiplier and multiple_of, which give a hidden size"] = args.hidden_dim()
    return found


llama = HuggingFace(to_config, from_config, tensors, unused, computes)
