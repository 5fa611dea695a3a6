"""A training run in one file: the definition of what `python -m apps.main.train` computes.

    python apps/onefile/train.py bin=data/train.bin                    # tokens of nanoGPT's prepare.py
    python apps/onefile/train.py runs/a/config.yaml dump_dir=runs/b    # the run of a config again
    python apps/onefile/train.py bin=data/train.bin seconds=300 model.dim=384

It shares no code with lingua and gives the same bits on a CPU in float32: the same rows, initial
weights, losses, rates and updates. So either can go on with the other's checkpoints, and a run can
be checked by a program that has none of its faults (`lingua audit RUN by=apps/onefile/train.py`).
To read it takes half an hour. It runs in one process, on a CPU or one GPU.

A run is a function of its config. Step s takes the next G rows of a stream, in which a position
decides by arithmetic which source a row comes from and which row of that source it is; nothing is
shuffled in memory, so the position is all the state that data has. Initial weights are hashes of
(seed, name, index). The gradient is that of (sum of token losses) / (targets) over the G rows,
however they are divided into micro-batches; AdamW takes it at a rate that depends on the step. A
checkpoint has weights, moments and the position.

Reading order: config, rows, model, initial weights, loss, optimizer and rate, checkpoint, loop.
"""

import difflib
import functools
import hashlib
import json
import math
import os
import pickle
import platform
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import xxhash
import yaml
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim.adamw import adamw

IGNORE = -100  # a target without a loss


class Mistake(Exception):
    """Of the user: printed in a line, exit code 2."""


# ---------------------------------------------------------------------------------- config
# All keys of apps/main with their defaults, so that its config.yaml can be read, and this one's by
# it. Keys of FIXED are not implemented here: another value is refused. Keys of UNUSED may have any
# value, since they change nothing in one process.

DEFAULTS = """
name: onefile
dump_dir: null # folder of everything the run writes; null: runs/<name>
seed: 42 # what the order of rows and the initial weights depend on
steps: 1000 # updates of the whole run
stop_at: null # leave after this step; null: never
grad_acc_steps: null # micro-batches of a step; null: as few as data.batch_size allows
device: auto # auto, cpu or cuda
deterministic: false # true: the same bits on this machine; mesh: on any number of apps/main's ranks
data:
  root_dir: data
  cache_dir: null # folder of the token shards; null: <root_dir>/.tokens
  sources: {} # shares of rows by name: what `lingua data prepare` prepared, or FILE.bin of root_dir
  seq_len: 256
  batch_size: 16 # rows of a micro-batch, at most
  global_batch_size: null # rows of a step; null: batch_size * grad_acc_steps
  add_bos: true
  add_eos: true
  tokenizer: {name: bytes, path: null, bos: null, eos: null}
model:
  dim: 128
  n_layers: 4
  head_dim: null # null: dim / n_heads
  n_heads: 4
  n_kv_heads: null # null: n_heads
  ffn_dim_multiplier: null
  multiple_of: 32 # the feed-forward's hidden size is rounded up to it
  norm_eps: 1.0e-05
  rope_theta: 10000.0
  init_base_std: null # deviation of every matrix; null: 1 / sqrt(inputs)
  init_std_factor: disabled # what divides it where a matrix writes to the residual stream
  attn_impl: auto # auto or sdpa
  vocab_size: -1 # -1: the tokenizer's
  weight_tying: false
optim:
  lr: 0.004
  weight_decay: 0.1 # of matrices, the embedding's left out
  beta1: 0.9
  beta2: 0.95
  epsilon: 1.0e-08
  clip: 1.0 # largest norm of the gradient
  scheduler: cosine # constant, linear, inv_sqrt, cosine or wsd
  warmup: 100
  lr_min_ratio: 0.1
  decay_fraction: 0.1 # wsd: share of the run in which the rate decays
  exp_factor: 0.5 # power of the decay of inv_sqrt and wsd
  on_nonfinite: stop # stop, or skip: count the step and go on
distributed:
  threads: null # of the CPU; rounding depends on it
  model_dtype: null # bf16 or fp32; null: bf16 on CUDA
  matmul_allow_tf32: false
checkpoint:
  dump: {every: 100, keep: 2, every_minutes: 30.0} # steps; 0: none
validation:
  every: 0 # steps; 0: at the end alone
  bytes: 200000 # of held-out text of each source
  tokens: null # in place of bytes
logging: {freq: 10} # steps per line
"""
FIXED = """
app: apps.main
data: {stages: [], n_views: 2, chat: null, document_mask: none, on_no_targets: stop}
model: {rope_scaling: null, sliding_window: null, qkv_bias: false, qk_norm: null,
        norm_placement: null, dropout: 0.0}
optim: {name: adamw, lr_scale: {}, cycle_length: 1.0, cosine_theta: 1.0}
distributed: {dp_replicate: 1, dp_shard: null, tp_size: 1, float8: null, compile: false,
              activation_checkpointing: none}
checkpoint: {eval: {every: 0, keep: -1}, keep_every: 0, keep_best: false, path: null,
             async_save: false, init_from: null, continue_training_from_init: false,
             allow_change: []}
validation: {sources: []}
samples: {every: 0}
eval: null
logging: {wandb: null}
profiling: {run: false}
"""
UNUSED = """
data: {source_files: {}, workers: 1, on_bad_record: stop}
optim: {muon: {momentum: 0.95, nesterov: true, ns_steps: 5, rms: 0.2, dtype: bf16}}
distributed: {rendezvous_s: 600.0, timeout_s: 1800.0, step_timeout_s: 240.0, grad_sync: null,
              reshard: always}
checkpoint: {on_error: continue, verify: full}
probe: {every: 1}
profiling: {mem_warmup: 0, mem_steps: 2, profile_warmup: 10, profile_steps: 2}
"""
CHOICES = {
    "device": ("auto", "cpu", "cuda"), "deterministic": (False, True, "mesh"),
    "model.init_std_factor": ("disabled", "global_depth", "current_depth", "dim_ratio", "zero"),
    "model.attn_impl": ("auto", "sdpa"), "distributed.model_dtype": (None, "bf16", "fp32"),
    "optim.scheduler": ("constant", "linear", "inv_sqrt", "cosine", "wsd"),
    "optim.on_nonfinite": ("stop", "skip"), "distributed.dp_shard": (None, 1),
}  # fmt: skip
MAPS = ("data.sources", "data.source_files", "optim.lr_scale")  # values that are mappings
# What a resumed run must not change (more is announced by apps/main).
GUARDED = re.compile(r"seed|data\.(sources|seq_len|global_batch_size|add_|tokenizer)|model\.(?!attn)")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    items = dict[str, Any]()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        nested = isinstance(value, dict) and key not in MAPS
        items |= flat(value, f"{key}.") if nested else {key: value}
    return items


def nested(items: dict[str, Any]) -> dict[str, Any]:
    tree = dict[str, Any]()
    for key, value in items.items():
        *parts, last = key.split(".")
        functools.reduce(lambda at, part: at.setdefault(part, {}), parts, tree)[last] = value
    return tree


def read_config(words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config that words of the command line name, by dotted key, and what is no part of it:
    `bin` and `seconds`. Raises Mistake."""
    defaults, fixed, unused = (flat(yaml.safe_load(t)) for t in (DEFAULTS, FIXED, UNUSED))
    config, own = defaults | fixed | unused, {"bin": None, "seconds": None}
    given = dict[str, Any]()
    for word in words:
        key, equals, value = word.partition("=")
        try:
            if equals:
                given |= flat({key: yaml.safe_load(value)})
            else:
                given |= flat(yaml.safe_load(Path(word).read_text(encoding="utf-8")))
        except (OSError, AttributeError, yaml.YAMLError) as error:
            raise Mistake(f"{word}: is no config.yaml and no KEY=VALUE: {error}") from None
    if (path := given.get("bin")) is not None:
        given |= {"data.root_dir": str(Path(path).parent), "data.sources": {Path(path).name: 1.0}}
    for key, value in given.items():
        if key in own:
            own[key] = value
            continue
        if key not in config and not (key in nested(config) and value is None):
            close = difflib.get_close_matches(key, config, 1)
            raise Mistake(f"{key}: unknown key{f'; did you mean {close[0]}?' if close else ''}")
        number = isinstance(config.get(key), float) or key == "seconds"
        with suppress(TypeError, ValueError):  # YAML takes 4e-3 for text
            value = float(value) if number and not isinstance(value, bool) else value
        if key in fixed and value not in CHOICES.get(key, (fixed[key],)):
            raise Mistake(f"{key} = {value}: is not implemented here; must be {fixed[key]}, or "
                          "trained by apps/main")  # fmt: skip
        if value not in CHOICES.get(key, (value,)):
            raise Mistake(f"{key} = {value}: must be one of {CHOICES[key]}")
        kind = type(config.get(key))
        if key in defaults and kind not in (type(None), bool) and type(value) is not kind:
            raise Mistake(f"{key} = {value}: must be of type {kind.__name__}")
        config[key] = value
    if own["bin"] is None and not config["data.sources"]:
        raise Mistake("data.sources = {}: name a source, or bin=FILE of tokens as nanoGPT has them")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise Mistake("more than one process: train with apps/main, which has any number")
    return config, own


def namespace(tree: Any) -> Any:
    """A mapping as an object, whose keys are attributes."""
    if not isinstance(tree, dict):
        return tree
    return SimpleNamespace(**{k: v if k == "sources" else namespace(v) for k, v in tree.items()})


# ---------------------------------------------------------------------------------- hashing


def key_of(*parts: object) -> int:
    """64 bits, signed, of the parts."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def hash_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 bits for each int64 of `index`: SplitMix64 (Steele, Lea and Flood, 2014) at the state
    key + index * golden ratio, modulo 2^64."""

    def xor_shifted(x: Tensor, n: int) -> Tensor:  # >> of int64 copies the sign: it is masked
        return x ^ ((x >> n) & ((1 << (64 - n)) - 1))

    x = xor_shifted(index * (0x9E3779B97F4A7C15 - 2**64) + key, 30)
    x = xor_shifted(x * (0xBF58476D1CE4E5B9 - 2**64), 27) * (0x94D049BB133111EB - 2**64)
    return xor_shifted(x, 31)


# ---------------------------------------------------------------------------------- rows
# A source is one long array of tokens, cut into rows of seq_len + 1 that overlap by a token. Row k
# of an epoch is element k of a permutation of its rows, keyed by (seed, source, epoch). Which
# source position p takes is decided by the shares, in exact fractions.


def mix(x: int, key: int) -> int:
    """32 bits of two numbers below 2^64: the finaliser of murmur3, with Stafford's constants."""
    x = (x ^ key) * 0xBF58476D1CE4E5B9 % 2**64
    return ((x ^ x >> 32) * 0x94D049BB133111EB % 2**64) >> 32


@functools.lru_cache(maxsize=4096)
def round_keys(seed: int, source: str, epoch: int) -> list[int]:
    text = json.dumps([seed, source, epoch]).encode()
    digest = hashlib.blake2b(text, digest_size=64, person=b"lingua rows").digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8)]


def permuted(k: int, size: int, keys: list[int]) -> int:
    """Element k of a permutation of range(size): a Feistel network of 8 rounds on the bits of
    size - 1. A result beyond `size` is permuted again, which keeps it one to one."""
    n_low = (size - 1).bit_length() // 2
    low_mask, high_mask = (1 << n_low) - 1, (1 << (size - 1).bit_length() - n_low) - 1
    while True:
        high, low = k >> n_low, k & low_mask
        for r in range(0, 8, 2):
            high ^= mix(low, keys[r]) & high_mask
            low ^= mix(high, keys[r + 1]) & low_mask
        if (k := high << n_low | low) < size:
            return k


class Mixture:
    """Which source gives the row at a position, and how many rows that gave before."""

    def __init__(self, weights: dict[str, float]) -> None:
        exact = {name: Fraction(w) for name, w in sorted(weights.items()) if w > 0}
        total = sum(exact.values())
        self.names = list(exact)
        self.ends = [sum(list(exact.values())[: i + 1]) / total for i in range(len(exact))]
        self.block = max(1024, math.ceil(total / min(exact.values())))

    @functools.lru_cache(maxsize=64)  # noqa: B019, one of it lives as long as the run
    def before(self, block: int) -> list[int]:
        """Rows that each source gave in the blocks before: differences of floors of exact shares,
        so that each is within a row of its share."""
        floors = [0, *(math.floor(block * self.block * end) for end in self.ends)]
        return [b - a for a, b in zip(floors, floors[1:], strict=False)]

    def locate(self, position: int) -> tuple[int, int]:
        block, n = divmod(position, self.block)
        given, places = self.before(block), self.block
        for s, after in enumerate(self.before(block + 1)):
            quota = after - given[s]  # of the places that are left, spread evenly
            taken = n * quota // places
            if (n + 1) * quota // places > taken:
                return s, given[s] + taken
            n, places = n - taken, places - quota
        raise AssertionError("quotas of a block add up to its places")


@dataclass
class Source:
    """Tokens to train on, in parts that lie one after another, and held-out documents."""

    name: str
    fingerprint: str  # of its tokens
    tokenizer: dict[str, Any]  # fingerprint, vocab_size, bos_id, eos_id
    train: list[np.ndarray]
    # documents of so many "tokens" or "bytes", their bytes if known, and a hash of their text
    held_out: Callable[[int, str], tuple[list[np.ndarray], int | None, str]]
    first: int | None  # the token before a held-out document

    def __post_init__(self) -> None:
        self.ends = np.cumsum([len(part) for part in self.train], dtype=np.int64).tolist()

    def tokens(self, start: int, n: int) -> np.ndarray:
        i, parts = bisect_right(self.ends, start), list[np.ndarray]()
        begin = start - (self.ends[i - 1] if i else 0)
        while n:
            parts.append(self.train[i][begin : begin + n])
            n, i, begin = n - len(parts[-1]), i + 1, 0
        return np.concatenate(parts)


def open_source(name: str, c: Any, saved: dict[str, str]) -> Source:
    """A source that `lingua data prepare` has prepared, or a .bin of nanoGPT; `saved` has the
    fingerprints of a checkpoint. Raises Mistake."""
    cache = Path(c.data.cache_dir or Path(c.data.root_dir, ".tokens"))
    found = list[Source]()
    for path in sorted([*cache.glob(f"{name}-*/manifest.json"), *cache.glob(f"{name}-*/files.json")]):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("tokenizer", {}).get("name") != c.data.tokenizer.name:
            continue
        if path.name == "files.json":
            found.append(open_bin(name, [f["full"] for f in content["files"]], content["tokenizer"]))
        elif [content[k] for k in ("source", "add_bos", "add_eos")] == [
            name, c.data.add_bos, c.data.add_eos,
        ]:  # fmt: skip
            found.append(open_shards(path.parent, content))
    if len(found) > 1:  # of several tokenizers of that kind: the one that the run has used
        found = [s for s in found if s.fingerprint == saved.get(f"data.content.{name}")] or found
    if not found and (file := Path(c.data.root_dir, name)).suffix == ".bin" and file.is_file():
        found = [open_bin(name, [str(file)], None)]
    if len(found) != 1:
        need = "several in" if found else "prepare it with `lingua data prepare config=...`, for"
        raise Mistake(f"data.sources.{name}: {need} {cache}/{name}-*")
    if (found[0].ends or [0])[-1] <= c.data.seq_len:
        raise Mistake(f"data.sources.{name}: has not one row of {c.data.seq_len} + 1 tokens")
    return found[0]


def open_shards(folder: Path, manifest: dict[str, Any]) -> Source:
    """Token files and, for each, int64 [documents, 3]: tokens, bytes and hash of the text."""
    tokenizer, names = manifest["tokenizer"], [s["name"] for s in manifest["shards"]]

    def tokens(name: str, split: str) -> np.ndarray:
        path = folder / f"{name}.{split}.tokens"
        return np.memmap(path, manifest["dtype"], "r") if path.stat().st_size else np.empty(0)

    def held_out(budget: int, unit: str) -> tuple[list[np.ndarray], int | None, str]:
        tables = [np.fromfile(folder / f"{n}.heldout.documents", "<i8").reshape(-1, 3) for n in names]
        table = np.concatenate([np.empty((0, 3), np.int64), *tables])
        parts = [
            part
            for name, of_shard in zip(names, tables, strict=True)
            for part in np.split(tokens(name, "heldout"), of_shard[:, 0].cumsum())[:-1]
        ]
        order = np.argsort(table[:, 2], kind="stable")  # the hash of the text: random, and fixed
        sizes = table[order, ("tokens", "bytes").index(unit)]
        order = order[: max(1, int((sizes.cumsum() - sizes < budget).sum()))]
        text = hashlib.blake2b(table[order, 2].astype("<i8").tobytes(), digest_size=6).hexdigest()
        return [parts[i] for i in order], int(table[order, 1].sum()), text

    first = tokenizer["eos_id"] if manifest["add_eos"] else tokenizer["bos_id"]
    train = [part for name in names if len(part := tokens(name, "train"))]
    return Source(
        manifest["source"], manifest["fingerprint"], tokenizer, train, held_out, first
    )  # fmt: skip


def open_bin(name: str, paths: list[str], tokenizer: dict[str, Any] | None) -> Source:
    """Files of uint16 tokens. Of their blocks one in 50 is held out, by a hash of its number, from
    the first document that begins in it up to the first of the next block."""
    files = [np.memmap(path, "<u2", "r") for path in paths]
    samples = list[np.ndarray]()
    for file in files:
        size = min(4096, len(file))
        places = np.unique(np.linspace(0, len(file) - size, 16).astype(np.int64))
        samples.append(np.stack([file[p : p + size] for p in places]).astype("<u4"))
    tokenizer = dict(tokenizer or {"fingerprint": "", "bos_id": None, "eos_id": None})
    eos = tokenizer["eos_id"]
    eos = eos if eos is not None and any((sample == eos).any() for sample in samples) else None
    tokenizer.setdefault("vocab_size", 1 + max(int(file.max()) for file in files))
    train, held, number = list[np.ndarray](), list[tuple[int, np.ndarray]](), 0
    for file in files:
        block = min(max(len(file) // 4096, 1024), 2**16)
        begins = [begin_of_document(file, at, eos) for at in range(0, len(file), block)]
        for begin, end in zip(begins, [*begins[1:], len(file)], strict=True):
            hashed = mix(number, 0x9E3779B97F4A7C15)
            if hashed < 2**32 // 50:
                held.append((hashed, file[begin:end]))
            elif end > begin:
                train.append(file[begin:end])
            number += 1

    def held_out(budget: int, unit: str) -> tuple[list[np.ndarray], int | None, str]:
        parts = list[np.ndarray]()
        for _, tokens in sorted(held, key=lambda pair: pair[0]):
            cuts = [] if eos is None else np.flatnonzero(tokens == eos) + 1
            for part in np.split(tokens, cuts):
                if len(part) and (not parts or sum(map(len, parts)) < budget):
                    parts.append(part)
        return parts, None, ""

    empty = xxhash.xxh3_128_hexdigest(b"")
    facts = [[len(f), empty, xxhash.xxh3_128_hexdigest(s.data)]
             for f, s in zip(files, samples, strict=True)]  # fmt: skip
    fingerprint = hashlib.blake2b(json.dumps([eos, *facts]).encode(), digest_size=16).hexdigest()
    return Source(name, fingerprint, tokenizer, train, held_out, eos)


def begin_of_document(file: np.ndarray, at: int, eos: int | None) -> int:
    if at == 0 or eos is None:
        return at
    ends = np.flatnonzero(file[at - 1 : at - 1 + 2**20] == eos)
    return at + int(ends[0]) if len(ends) else at


class Rows:
    """The rows of a run, by position."""

    def __init__(self, c: Any, sources: dict[str, Source]) -> None:
        self.c, self.mixture = c, Mixture(c.data.sources)
        self.sources = [sources[name] for name in self.mixture.names]

    def row(self, position: int) -> np.ndarray:
        """Tokens [seq_len + 1]."""
        s, given = self.mixture.locate(position)
        source, seq_len = self.sources[s], self.c.data.seq_len
        n_rows = (source.ends[-1] - 1) // seq_len
        epoch, k = divmod(given, n_rows)
        k = permuted(k, n_rows, round_keys(self.c.seed, source.name, epoch))
        return source.tokens(k * seq_len, seq_len + 1)

    def step(self, position: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Micro-batches of the global batch from `position` on: int64 row ids [R], tokens R S and
        targets R S. All have as many rows, since rounding depends on it: the last of them may be
        padding, with id -1 and without targets."""
        d, size = self.c.data, self.c.data.global_batch_size
        n = self.c.grad_acc_steps or -(-size // d.batch_size)
        cuts, n_rows = [m * size // n for m in range(n + 1)], -(-size // n)
        if self.c.deterministic == "mesh":  # grains: the same on any number of ranks
            n_rows = min(d.batch_size, size)
            cuts = [*range(0, size, n_rows), size]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            ids = torch.full((n_rows,), -1)
            tokens, targets = torch.zeros(2, n_rows, d.seq_len, dtype=torch.int64)
            targets.fill_(IGNORE)
            for i, at in enumerate(range(position + begin, position + end)):
                row = torch.from_numpy(self.row(at).astype(np.int64))
                ids[i], tokens[i], targets[i] = at, row[:-1], row[1:]
            if int(tokens.max()) >= self.c.model.vocab_size:
                raise Mistake(f"a token of rows {position + begin} to {position + end - 1} is beyond "
                              f"model.vocab_size = {self.c.model.vocab_size}")  # fmt: skip
            yield ids, tokens, targets


def batch_hash(ids: Tensor, tokens: Tensor, targets: Tensor) -> int:
    """Of the rows that went through the model, padding left out; modulo 2^64, so that it can be
    added up in any order."""
    values = torch.cat((tokens, targets), 1)
    words = hash_bits(hash_bits(0, torch.arange(values.shape[1])), values)
    return int(torch.where(ids >= 0, hash_bits(words.sum(1), ids), 0).sum())


# ---------------------------------------------------------------------------------- model
# Llama: RMSNorm before attention and feed-forward, rotary positions on pairs of neighbouring
# features, grouped keys and values, SwiGLU. B rows, S positions, H heads, D features of a head, E
# features of the residual stream. Where torch has several ways to compute the same, the one here is
# that of apps/main, since rounding differs.


class Normalise(torch.autograd.Function):
    """RMSNorm for float32 on a CPU, where torch has no kernel for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, weight, scale) = upstream, ctx.saved_tensors
        product = grad * x
        along = (product @ weight)[..., None] * (scale.square() / -x.shape[-1])
        x_grad = (grad * weight).addcmul_(x, along).mul_(scale)
        return x_grad, product.flatten(0, -2).T.mv(scale.flatten()), None


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and x.dtype == torch.float32:
            return Normalise.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.head_dim = m.head_dim or m.dim // m.n_heads
        n_heads = m.n_heads or m.dim // self.head_dim
        kv_features = (m.n_kv_heads or n_heads) * self.head_dim
        self.wq = nn.Linear(m.dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(m.dim, kv_features, bias=False)
        self.wv = nn.Linear(m.dim, kv_features, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, m.dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:  # B S E -> B S E
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, turn), rotate(k, turn), v))  # B H S D
        if q.is_cuda and q.dtype == torch.float32:  # its kernels do not know grouped heads
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(out.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair of features of x (B S H D) by the angle of its position: `turn` is complex
    S 1 D/2 (Su et al., 2021)."""
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        hidden = int(int(2 * 4 * m.dim / 3) * (m.ffn_dim_multiplier or 1))
        hidden = -(-hidden // m.multiple_of) * m.multiple_of
        self.w1 = nn.Linear(m.dim, hidden, bias=False)
        self.w3 = nn.Linear(m.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, m.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(m), FeedForward(m)
        self.attention_norm, self.ffn_norm = (RMSNorm(m.dim, m.norm_eps) for _ in "ab")

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m = m
        self.tok_embeddings = nn.Embedding(m.vocab_size, m.dim)
        self.layers = nn.ModuleList(Block(m) for _ in range(m.n_layers))
        self.norm = RMSNorm(m.dim, m.norm_eps)
        self.output = nn.Linear(m.dim, m.vocab_size, bias=False)
        if m.weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of the targets in nats, float32 [1]; both are int64 B S."""
        head_dim, device = self.layers[0].attention.head_dim, tokens.device
        pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
        position = torch.arange(tokens.shape[1], device=device).float()
        angle = position[:, None] * (1.0 / self.m.rope_theta ** (pair / head_dim))
        turn = torch.complex(angle.cos(), angle.sin())[:, None]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return loss_sum(self.norm(x), self.output.weight, targets)

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Normal, cut off at three deviations, by name."""
        m = self.m
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0)
                continue
            std = m.init_base_std or p.shape[1] ** -0.5
            if "embeddings" in name:
                std = m.init_base_std or m.dim**-0.5
            if name.endswith(("wo.weight", "w2.weight")):
                depth = int(name.split(".")[1])
                std /= {
                    "disabled": 1.0, "global_depth": (2 * (m.n_layers + 1)) ** 0.5,
                    "current_depth": (2 * (depth + 1)) ** 0.5, "dim_ratio": m.dim / 4096,
                    "zero": math.inf,
                }[m.init_std_factor]  # fmt: skip
            values, draw = normal(key_of(seed, name, 0), p.shape, std), 0
            while bool((beyond := values.abs() > 3 * std).any()):
                draw += 1
                values = torch.where(beyond, normal(key_of(seed, name, draw), p.shape, std), values)
            p.copy_(values)


def normal(key: int, shape: torch.Size, std: float) -> Tensor:
    """float32, a function of key and index (Box and Muller, 1958), made in float64."""
    values = torch.empty(shape.numel())
    for part, begin in zip(values.split(1 << 22), range(0, len(values), 1 << 22), strict=True):
        bits = hash_bits(key, torch.arange(begin, begin + len(part)))
        high, low = ((bits >> 32) & 0xFFFFFFFF).double(), (bits & 0xFFFFFFFF).double()
        radius = ((high + 0.5) / 2**32).log().mul(-2).sqrt()
        part.copy_(radius * (low * (2 * math.pi / 2**32)).cos() * std)
    return values.view(shape)


# ---------------------------------------------------------------------------------- loss

CHUNK_BYTES = 1 << 29  # float32 logits at a time: with a large vocabulary they take most memory


def loss_sum(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies, float32 [1]: x is B S E, weight vocabulary E, targets B S."""
    size = max(1, CHUNK_BYTES // (4 * len(weight)))
    size = size if size < 128 else size // 128 * 128  # whole tiles of a matrix product
    if targets.numel() <= size:
        logits = F.linear(x, weight).float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
        return losses.view(1, *targets.shape).sum((1, 2))
    return ChunkedLoss.apply(x.flatten(0, 1), weight, targets.flatten(), size)


class ChunkedLoss(torch.autograd.Function):
    """The gradients are computed with the losses, while a chunk's logits are there; those of the
    weight are added up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
        losses, x_grad = list[Tensor](), torch.empty_like(x)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for h, t, out in zip(*(a.split(size) for a in (x, targets, x_grad)), strict=True):
            logits, is_target = F.linear(h, weight), t != IGNORE
            wide, column = logits.float(), t.clamp(min=0)[:, None]
            total = wide.logsumexp(-1)
            losses.append(torch.where(is_target, total - wide.gather(1, column)[:, 0], 0.0))
            if not any(ctx.needs_input_grad):
                continue
            grad = (wide - total[:, None]).exp_()
            grad.scatter_add_(1, column, -is_target.float()[:, None])
            grad = grad.mul_(is_target.float()[:, None]).to(logits.dtype)
            torch.mm(grad, weight, out=out)
            if grad.dtype == torch.float32 or grad.is_cpu:
                torch.addmm(weight_grad, grad.T.float(), h.float(), out=weight_grad)
            else:
                torch.addmm(weight_grad, grad.T, h, out_dtype=torch.float32, out=weight_grad)
        ctx.save_for_backward(x_grad, weight_grad.to(weight.dtype))
        every = torch.cat(losses)
        return every.sum()[None] if any(ctx.needs_input_grad) else every[None].sum(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad.mul_(upstream[0]), weight_grad.mul_(upstream[0]), None, None


# ---------------------------------------------------------------------------------- optimizer


class AdamW:
    """AdamW by torch's fused kernel, which divides gradients by the clipping's divisor and changes
    nothing where they are not finite. Weight decay is for matrices, the embedding's left out."""

    def __init__(self, model: nn.Module, c: Any) -> None:
        self.c, named = c, dict(model.named_parameters())
        decay = [n for n, p in named.items() if p.dim() > 1 and n != "tok_embeddings.weight"]
        self.groups = [(decay, c.optim.weight_decay), ([n for n in named if n not in decay], 0.0)]
        self.parameters = named
        self.state = {
            name: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p),
                   "step": torch.zeros((), device=p.device)}
            for name, p in named.items()
        }  # fmt: skip

    @torch.no_grad()
    def update(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        o = self.c.optim
        for names, weight_decay in self.groups:
            states = [self.state[n] for n in names]
            tensors = [(p := self.parameters[n], p.grad, s["exp_avg"], s["exp_avg_sq"])
                       for n, s in zip(names, states, strict=True)]  # fmt: skip
            # The kernel rounds a CPU tensor's last part, which fills no vector, in another way. For
            # the bits of any mesh it gets copies that have no such part.
            pad = self.c.deterministic == "mesh" and tensors[0][0].is_cpu
            used = [[F.pad(t.flatten(), (0, -t.numel() % 16)) if pad and t.numel() % 16 else t
                     for t in of_p] for of_p in tensors]  # fmt: skip
            adamw(
                *map(list, zip(*used, strict=True)), [], [s["step"] for s in states], fused=True,
                grad_scale=divisor, found_inf=(~finite).float(), amsgrad=False, beta1=o.beta1,
                beta2=o.beta2, lr=lr, weight_decay=weight_decay, eps=o.epsilon, maximize=False,
            )  # fmt: skip
            for old, new in zip(tensors, used, strict=True):
                for a, b in zip(old, new, strict=True):
                    if a is not b:
                        a.copy_(b[: a.numel()].view_as(a))


def lr_at(step: float, o: Any, steps: int) -> float:
    """The rate of the update after `step` completed ones: a linear rise, then the decay."""
    step = min(step, steps)
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    progress, height = (step - o.warmup) / max(steps - o.warmup, 1), 1.0
    if o.scheduler == "inv_sqrt":
        return o.lr * max((max(o.warmup, 1) / max(step, 1)) ** o.exp_factor, o.lr_min_ratio)
    if o.scheduler == "linear":
        height = 1 - progress
    elif o.scheduler == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif o.scheduler == "wsd":
        begin = max(steps - o.decay_fraction * steps, o.warmup)
        if step > begin:
            height = 1 - min((step - begin) / (steps - begin), 1.0) ** o.exp_factor
    return o.lr * (height + (1 - height) * o.lr_min_ratio)


@torch.no_grad()
def exact_norm(grads: list[Tensor]) -> Tensor:
    """The norm for `deterministic: mesh`, float32: squares in units of each tensor's largest element
    as integers of 60 bits, whose sum no order changes."""
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    sums, units = list[Tensor](), list[Tensor]()
    for g in grads:
        largest = g.abs().max()
        if not bool(largest.isfinite()):
            return torch.full_like(largest, math.inf)
        units.append(torch.ldexp(torch.ones_like(total), largest.frexp().exponent))
        count = torch.zeros(2, dtype=torch.int64, device=g.device)
        for part in g.flatten().split(1 << 22):
            squares = (part.double() / units[-1]).square_().mul_(2.0**30)
            high = squares.floor()
            low = squares.sub_(high).mul_(2.0**30)
            count += torch.stack((high.sum(dtype=torch.int64), low.sum(dtype=torch.int64)))
        sums.append(count)
    high, low = torch.stack(sums).double().unbind(1)
    unit = torch.stack(units)
    return ((high / 2.0**30 + low / 2.0**60) * unit.square()).sum().sqrt().float()


# ---------------------------------------------------------------------------------- checkpoint
# One folder a step: DCP's files of `model.NAME` and `optim.STATE.NAME`, train_state.json,
# config.yaml, and the manifest with sizes and checksums. It is written under another name and
# renamed last, so that it is whole or not there. Of what is read nothing is executed.

ALLOWED = {
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "_MEM_FORMAT_ENCODING BytesStorageMetadata ChunkStorageMetadata TensorStorageMetadata",
    "collections": "OrderedDict", "pathlib": "PosixPath", "torch.serialization": "_get_layout",
    "torch": "Size " + " ".join(n for n, v in vars(torch).items() if isinstance(v, torch.dtype)),
}  # fmt: skip


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, "").split():
            raise Mistake(f".metadata refers to {module}.{name}, which is not executed")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with open(Path(self.path, ".metadata"), "rb") as f:
            metadata = Unpickler(f).load()
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise Mistake(f"{self.path}: refers to {place.relative_path}")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle it
                raise Mistake(f"{self.path}: {name} is no tensor")
        return metadata


def manifest_hash(manifest: dict[str, Any]) -> str:
    kept = {key: value for key, value in manifest.items() if key != "xxh3_64"}
    return xxhash.xxh3_64_hexdigest(json.dumps(kept, sort_keys=True).encode())


def entry_of(path: Path) -> dict[str, Any]:
    checksum = xxhash.xxh3_64()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            checksum.update(block)
        os.fsync(f.fileno())
    return {"size": path.stat().st_size, "xxh3_64": checksum.hexdigest()}


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(serial, folder) of those that are whole, the last published last."""
    found = []
    for path in root.glob("[0-9]" * 10):
        with suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((path / "manifest.json").read_bytes())
            sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
            if (manifest["xxh3_64"] == manifest_hash(manifest) and manifest["step"] == int(path.name)
                    and all((path / name).stat().st_size == n for name, n in sizes.items())):  # fmt: skip
                found.append((manifest["serial"], path))
    return sorted(found)


def newest(root: Path) -> Path | None:
    """The last published checkpoint whose files have their checksums. Raises Mistake where there
    are some, but none is whole."""
    for _, path in reversed(checkpoints(root)):
        files = json.loads((path / "manifest.json").read_bytes())["files"]
        if all(entry_of(path / name) == entry for name, entry in files.items()):
            return path
        print(f"{path} is damaged: skipped")
    if any(root.glob("[0-9]" * 10)):
        raise Mistake(f"{root}: has checkpoints, but none that is whole; move them away")
    return None


def tensors_of(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """The live tensors of a run: saving reads them, loading fills them."""
    tensors = dict[str, Tensor]()
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        tensors |= {f"optim.{key}.{name}": t for key, t in optimizer.state[name].items()}
    return tensors


def digest(tensors: dict[str, Tensor]) -> str:
    """A hash of all tensors to the bit: the bits of each element times an odd number for its index
    in each dimension, added up modulo 2^64."""
    total = 0
    for name, t in tensors.items():
        kind = torch.int32 if t.element_size() == 4 else torch.int64
        bits = t.cpu().contiguous().view(kind).long()
        for dim, n in enumerate(t.shape):
            factors = hash_bits(key_of(name, t.dtype, dim), torch.arange(n)) | 1
            bits = bits * factors.view(-1, *[1] * (t.dim() - dim - 1))
        total += int(bits.sum()) + key_of(name, t.dtype, *t.shape)
    return f"{total % 2**64:016x}"


def save(run: "Run") -> None:
    """Publish the checkpoint of the run's step."""
    root, step = run.folder / "checkpoints", run.step
    final = root / f"{step:010d}"
    if final in (path for _, path in checkpoints(root)):
        return
    folder = root / f"{final.name}.tmp-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    tensors = tensors_of(run.model, run.optimizer)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    o, lr = run.c.optim, run.rate()
    state = {
        "progress": {"step": step, "position": run.position, "skipped_steps": run.skipped,
                     "trained_s": run.trained_s()},
        "tokens": run.position * run.c.data.seq_len,
        "schedule": {"step": step, "lr": lr},
        "param_groups": [
            {"weight_decay": decay, "algorithm": "adamw", "betas": [o.beta1, o.beta2],
             "eps": o.epsilon, "param_names": names, "lr": lr}
            for names, decay in run.optimizer.groups
        ],
        "topology": [1, 1, 1], "data": run.fingerprints, "held_out": None,
        "tensors": digest(tensors), "versions": VERSIONS,
    }  # fmt: skip
    (folder / "train_state.json").write_text(json.dumps(state, indent=1))
    (folder / "config.yaml").write_text(run.config_text)
    files = {path.name: entry_of(path) for path in sorted(folder.iterdir())}
    serial = 1 + max((serial for serial, _ in checkpoints(root)), default=0)
    created_at = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {"format": 1, "step": step, "serial": serial, "created_at": created_at, "files": files}
    manifest["xxh3_64"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    entry_of(folder / "manifest.json")
    run.check_lock()
    if final.exists():  # damaged
        final.rename(root / f"{final.name}.tmp-{secrets.token_hex(4)}")
    folder.rename(final)
    for path in (final, root):
        os.fsync(descriptor := os.open(path, os.O_RDONLY))
        os.close(descriptor)
    print(f"saved {final}")
    keep = run.c.checkpoint.dump.keep
    for _, old in checkpoints(root)[:-keep] if keep > 0 else []:
        if not any(root.glob(f"{old.name}.[A-Za-z]*")):  # a mark keeps it
            old.rename(root / f"{old.name}.tmp-{secrets.token_hex(4)}")
    for left in root.glob("[0-9]*.tmp-" + "[0-9a-f]" * 8):
        shutil.rmtree(left, ignore_errors=True)


VERSIONS = {
    "lingua": "onefile", "torch": torch.__version__, "python": platform.python_version(),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
}  # fmt: skip


def place_of(pid: int) -> str:
    """This machine since its start, and when the process started; empty where it does not run."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return "" if state in "ZX" else f"{boot}-{os.stat('/proc/self/ns/pid').st_ino} {fields[18]}"
    return ""


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock of a dump dir, a file that names its process and that apps/main takes too.
    Yields a check that it is still held. Raises Mistake where another process has it."""
    path, host = folder / "run.lock", re.sub(r"[^\w.-]", "-", socket.gethostname())
    content = f"process {os.getpid()} on {host}, {place_of(os.getpid())}, {secrets.token_hex(8)}\n"
    if path.exists():
        match = re.match(r"process (\d+) on [^,]*, ((\S+) \d+),", path.read_text(errors="replace"))
        here = match is not None and match[3] == place_of(os.getpid()).split()[0]
        if match is None or not here or place_of(int(match[1])) == match[2]:
            raise Mistake(f"{path}: another run has this folder ({path.read_text().strip()}); remove "
                          "the file if that process is gone")  # fmt: skip
        path.unlink()  # of a process that died
    with suppress(FileExistsError), path.open("x") as f:
        f.write(content)
    done = threading.Event()

    def check() -> None:
        if not path.exists() or path.read_text() != content:
            raise Mistake(f"{path}: was taken by another run; nothing more is written here")

    def renew() -> None:
        while not done.wait(15):
            with suppress(OSError, Mistake):
                check()
                os.utime(path)

    check()
    threading.Thread(target=renew, daemon=True).start()
    try:
        yield check
    finally:
        done.set()
        with suppress(Mistake):
            check()
            path.unlink()


# ---------------------------------------------------------------------------------- loop


class Run:
    """A run between two steps, and the loop that takes them."""

    def __init__(self, config: dict[str, Any], own: dict[str, Any], check_lock: Any) -> None:
        self.folder, self.check_lock, self.seconds = Path(config["dump_dir"]), check_lock, own["seconds"]
        path = newest(self.folder / "checkpoints")
        state = {} if path is None else json.loads((path / "train_state.json").read_bytes())
        c = self.c = namespace(nested(config))
        sources = {name: open_source(name, c, state.get("data", {}))
                   for name, weight in sorted(c.data.sources.items()) if weight > 0}  # fmt: skip
        tokenizer = next(iter(sources.values())).tokenizer
        if config["data.global_batch_size"] is None:
            config["data.global_batch_size"] = c.data.batch_size * (c.grad_acc_steps or 1)
        if config["model.vocab_size"] == -1:
            config["model.vocab_size"] = max(s.tokenizer["vocab_size"] for s in sources.values())
        self.device = torch.device(c.device if c.device != "auto" else
                                   "cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
        if c.distributed.model_dtype is None:
            config["distributed.model_dtype"] = "bf16" if self.device.type == "cuda" else "fp32"
        if c.deterministic == "mesh":
            config["distributed.threads"] = c.distributed.threads or 1
        c = self.c = namespace(nested(config))
        self.config_text = yaml.safe_dump(nested(config), sort_keys=False)
        self.fingerprints = {f"data.content.{name}": s.fingerprint for name, s in sources.items()}
        self.fingerprints["data.tokenizer.content"] = tokenizer["fingerprint"]
        if path is not None:
            saved = flat(yaml.safe_load((path / "config.yaml").read_bytes()))
            before, now = saved | state["data"], config | self.fingerprints
            changed = [key for key in now if GUARDED.match(key) or key in self.fingerprints
                       if before.get(key) != now[key]]  # fmt: skip
            if changed:
                raise Mistake(f"{path}: differs in {', '.join(changed)}; use another dump_dir")
        if c.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if c.distributed.threads:
            torch.set_num_threads(c.distributed.threads)
        torch.backends.cuda.matmul.allow_tf32 = c.distributed.matmul_allow_tf32
        self.dtype = torch.bfloat16 if c.distributed.model_dtype == "bf16" else torch.float32
        self.rows = Rows(c, sources)
        self.model = Transformer(c.model)
        if path is None:
            self.model.init(c.seed)
        self.model.to(self.device)
        self.optimizer = AdamW(self.model, c)
        progress = state.get("progress", {"step": 0, "position": 0, "skipped_steps": 0})
        self.step, self.position = progress["step"], progress["position"]
        self.skipped, self.before_s = progress["skipped_steps"], progress.get("trained_s", 0.0)
        self.began = time.monotonic()
        if path is not None:
            dcp.load(tensors_of(self.model, self.optimizer), storage_reader=Reader(path), no_dist=True)
            print(f"resuming {path}")
        for name in ("metrics.jsonl", "metrics.validation.jsonl"):  # lines of steps that are undone
            if (file := self.folder / name).exists():
                lines = [t for t in file.read_text().splitlines() if t.endswith("}")]
                kept = [t for t in lines if json.loads(t).get("step", 0) <= self.step]
                file.write_text("".join(f"{t}\n" for t in kept))
        (self.folder / "config.yaml").write_text(self.config_text)
        about = {"topology": [1, 1, 1], "config": self.config_text, "device": self.device.type}
        self.write("metrics.jsonl", {"event": "start", "step": self.step, **about, **VERSIONS})

    def trained_s(self) -> float:
        return self.before_s + time.monotonic() - self.began

    def rate(self) -> float:
        """That of the next update; with `seconds` by the share of the time that is over."""
        steps, done = self.c.steps, self.step
        share = 0 if self.seconds is None else min(1, self.trained_s() / self.seconds)
        return lr_at(done if self.seconds is None else share * steps, self.c.optim, steps)

    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Weights, gradients and moments are float32; forward and backward are in `dtype`."""
        weights = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        inputs = tokens.to(self.device), targets.to(self.device)
        return torch.func.functional_call(self.model, weights, inputs)

    def train_step(self) -> dict[str, Any]:
        """One update. Returns its metrics."""
        c, parts, hashed = self.c, list[Tensor](), 0
        parameters, exact = list(self.model.parameters()), c.deterministic == "mesh"
        n_targets = torch.tensor([c.data.global_batch_size * c.data.seq_len], device=self.device)
        totals = [torch.zeros_like(p, dtype=torch.float64) for p in parameters] if exact else []
        for p in parameters:
            p.grad = None
        for ids, tokens, targets in self.rows.step(self.position):
            part = (self.losses(tokens, targets) / n_targets).sum()
            part.backward()
            parts.append(part.detach())
            hashed += batch_hash(ids, tokens, targets)
            for p, total in zip(parameters, totals, strict=False):  # in float64, rounded once
                total += p.grad
                p.grad = None
        for p, total in zip(parameters, totals, strict=False):
            p.grad = total.float()
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = exact_norm(grads) if exact else nn.utils.get_total_norm(grads).square().sqrt()
        finite, lr = norm.isfinite(), self.rate()
        divisor = torch.where(finite, ((norm + 1e-6) / c.optim.clip).clamp(min=1.0), 1.0)
        self.optimizer.update(lr, divisor, finite)
        if not bool(finite):  # the host waits for the device here, once a step
            if c.optim.on_nonfinite == "stop":
                save(self)
                raise Mistake(f"step {self.step + 1}: the gradient is not finite; the run stops")
            self.skipped += 1
        self.step, self.position = self.step + 1, self.position + c.data.global_batch_size
        loss = math.fsum(torch.stack(parts).tolist())
        return {
            "step": self.step, "tokens": self.position * c.data.seq_len, "loss": loss,
            "grad_norm": float(norm), "lr": lr, "batch_hash": f"{hashed % 2**64:016x}",
            "skipped_steps": self.skipped,
        }  # fmt: skip

    @torch.no_grad()
    def validate(self) -> str:
        """Write the loss on the held-out documents of each source; returns that of all, in words."""
        c, nats, n_bytes, n_tokens = self.c, 0.0, 0, 0
        budget = (c.validation.bytes, "bytes") if c.validation.tokens is None else (
            c.validation.tokens, "tokens")  # fmt: skip
        for source in self.rows.sources:
            documents, known, text = source.held_out(*budget)
            first = [np.array([source.first])] if source.first is not None else []
            stream = torch.from_numpy(np.concatenate([*first, *documents, []]).astype(np.int64))
            n, seq_len = max(0, len(stream) - 1), c.data.seq_len
            if n == 0 or not documents:
                continue
            tokens = torch.zeros(-(-n // seq_len), seq_len, dtype=torch.int64)
            targets = torch.full_like(tokens, IGNORE)
            tokens.view(-1)[:n], targets.view(-1)[:n] = stream[:-1], stream[1:]
            size = min(len(tokens), max(c.data.batch_size, 4096 // seq_len))
            sums = list[float]()
            for x, y in zip(tokens.split(size), targets.split(size), strict=True):
                padding = (0, 0, 0, size - len(x))
                sums.append(float(self.losses(F.pad(x, padding), F.pad(y, padding, value=IGNORE))))
            total = math.fsum(sums)
            line = {"step": self.step, "source": source.name, "nats_per_token": total / n, "tokens": n}
            if known:
                line |= {"nats_per_byte": total / known, "bytes": known,
                         "bits_per_byte": total / known / math.log(2)}  # fmt: skip
            self.write("metrics.validation.jsonl", line | {"text": text})
            nats, n_tokens, n_bytes = nats + total, n_tokens + n, n_bytes + (known or 0)
        per = ("byte", n_bytes) if n_bytes else ("token", n_tokens)
        return f"held-out {nats / per[1]:.4f} nats/{per[0]}" if per[1] else "nothing is held out"

    def write(self, file: str, line: dict[str, Any]) -> None:
        self.check_lock()
        with (self.folder / file).open("a") as f:
            f.write(json.dumps(line | {"created_at": datetime.now(UTC).isoformat()}) + "\n")


def train(config: dict[str, Any], own: dict[str, Any]) -> None:
    config["dump_dir"] = str(config["dump_dir"] or f"runs/{config['name']}")
    Path(config["dump_dir"]).mkdir(parents=True, exist_ok=True)
    signals = list[int]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda n, _: signals.append(n) or print("saving after this step"))
    with locked(Path(config["dump_dir"])) as check_lock:
        run = Run(config, own, check_lock)
        c, end = run.c, min(run.c.steps, run.c.stop_at or run.c.steps)
        n = sum(p.numel() for p in run.model.parameters())
        print(f"{c.name}: {n:,} parameters on {run.device}, {c.data.global_batch_size} rows of "
              f"{c.data.seq_len} tokens a step")  # fmt: skip
        if run.seconds:
            print(f"it trains for {run.seconds:g} seconds: another machine gives another run")
        shown, since, saved_at, held_out = run.step, time.monotonic(), time.monotonic(), ""
        measured, every = -1, c.validation.every

        def going() -> bool:
            timed_out = run.seconds is not None and run.trained_s() >= run.seconds
            return not (signals or timed_out) and (run.seconds is not None or run.step < end)

        while going():
            metrics = run.train_step()
            over = not going()
            if run.step % c.logging.freq == 0 or over:
                now = time.monotonic()
                rate = (run.step - shown) * c.data.global_batch_size * c.data.seq_len / (now - since)
                run.write("metrics.jsonl", metrics | {"tokens_per_s": rate})
                print(f"step {run.step}/{end}  loss {metrics['loss']:.4f}  norm "
                      f"{metrics['grad_norm']:.3f}  lr {metrics['lr']:.2e}  {rate:,.0f} tok/s",
                      flush=True)  # fmt: skip
                shown, since = run.step, now
            if (every and run.step % every == 0) or run.step == c.steps:
                held_out, measured = run.validate(), run.step
            dump, late = c.checkpoint.dump, time.monotonic() - saved_at
            due = dump.every > 0 and run.step % dump.every == 0
            if due or over or 0 < 60 * (dump.every_minutes or 0) <= late:
                save(run)
                saved_at = time.monotonic()
        print(held_out if measured == run.step else run.validate())


if __name__ == "__main__":
    try:
        train(*read_config(sys.argv[1:]))
    except Mistake as mistake:
        print(f"apps/onefile: {mistake}", file=sys.stderr)
        sys.exit(2)
