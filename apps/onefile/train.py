"""A training run in one file: the definition of what `python -m apps.main.train` computes.

    python apps/onefile/train.py bin=data/train.bin                    # tokens, as nanoGPT has them
    python apps/onefile/train.py runs/a/config.yaml dump_dir=runs/b    # the run of a config

It shares no code with lingua and computes the same bits on a CPU in float32, in one process. Each
resumes the checkpoints of the other, and `lingua audit RUN by=FILE` checks a run with this file.

A run is a function of its config. Step s takes the next G rows of a stream in which a position
decides, by arithmetic, from which source its row is and which row of that source: nothing is
shuffled in memory, and the position is all the state that data has. Initial weights are hashes of
(seed, name, index). The gradient is that of (sum of token losses) / (targets) over the G rows,
however micro-batches divide them; AdamW follows it at a rate that depends on the step. A checkpoint
has weights, moments and the position. In this order: rows, model, initial weights, loss, optimizer
and rate, loop, checkpoint, config.
"""

import functools
import hashlib
import json
import math
import os
import pickle
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from fractions import Fraction
from itertools import count, pairwise
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.optim.adamw import adamw
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

# fmt: off
IGNORE = -100  # a target without a loss
Named = dict[str, Tensor]

class Mistake(Exception):
    """A mistake of the user: printed in one line, exit code 2."""

# ---------------------------------------------------------------------------------- rows
# A source is one long array of tokens, cut into rows of seq_len + 1 tokens that share one with the
# next. Row k of an epoch is element k of a permutation of the rows, keyed by (seed, source, epoch).

def key_of(*parts: object) -> int:
    """A signed hash of 64 bits of the parts."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)

def hash_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 bits for each int64 of `index`: SplitMix64 (Steele, Lea and Flood, 2014) in the state
    key + index * golden ratio, modulo 2^64."""
    x = index * (0x9E3779B97F4A7C15 - 2**64) + key
    for n, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 2**64 + 1)):
        shifted = (x >> n) & ((1 << (64 - n)) - 1)  # >> of int64 repeats the sign
        x = (x ^ shifted) * (factor - 2**64)
    return x

def mix(x: int, key: int) -> int:
    """A hash of 32 bits of two numbers below 2^64 (murmur3's finaliser, Stafford's constants)."""
    x = (x ^ key) * 0xBF58476D1CE4E5B9 % 2**64
    return ((x ^ x >> 32) * 0x94D049BB133111EB % 2**64) >> 32

def permuted(k: int, size: int, *key: int | str) -> int:
    """Element k of a permutation of range(size): a Feistel network of 8 rounds on the bits of
    size - 1, again where its result is not below size."""
    text = json.dumps(key).encode()
    digest = hashlib.blake2b(text, digest_size=64, person=b"lingua rows").digest()
    keys = np.frombuffer(digest, "<u8").tolist()
    n_low = (size - 1).bit_length() // 2
    low_mask, high_mask = (1 << n_low) - 1, (1 << (size - 1).bit_length() - n_low) - 1
    while True:
        high, low = k >> n_low, k & low_mask
        for key_1, key_2 in zip(keys[::2], keys[1::2], strict=True):
            high ^= mix(low, key_1) & high_mask
            low ^= mix(high, key_2) & low_mask
        if (k := high << n_low | low) < size:
            return k

class Source(NamedTuple):  # measured: from here to its end, what a study may not change
    name: str
    fingerprint: str  # of its tokens
    tokenizer: dict[str, Any]  # fingerprint, vocab_size, bos_id, eos_id
    parts: list[np.ndarray]  # the tokens to train on, one after another
    held_out: list[tuple[int, int, np.ndarray]]  # by hash: hash and bytes of the text, or 0; tokens
    first: int | None  # the token before the first held-out document

def open_source(name: str, c: Any, saved: dict[str, str]) -> Source:
    """What `lingua data prepare` has prepared, or a .bin as nanoGPT writes it. `saved` has
    the fingerprint that a run has recorded, if any. Raises Mistake."""
    cache, found = Path(c.data.cache_dir or Path(c.data.root_dir, ".tokens")), list[Source]()
    marks = c.data.add_bos, c.data.add_eos
    for path in sorted(cache.glob("*/*.json")):
        if path.parent.name.rpartition("-")[0] != name:
            continue
        about = json.loads(path.read_text(encoding="utf-8"))
        if about.get("tokenizer", {}).get("name") != c.data.tokenizer.name or about.get("chat"):
            continue
        if path.name == "files.json":
            source = open_bin(name, [file["full"] for file in about["files"]], about["tokenizer"])
            if source.fingerprint != about["fingerprint"]:
                raise Mistake(f"data.sources.{name}: {path}: files of another form, or changed")
            found = [other for other in found if other.fingerprint != source.fingerprint] + [source]
        elif [about[key] for key in ("source", "add_bos", "add_eos")] == [name, *marks]:
            try:
                found.append(open_shards(path.parent, about))
            except ValueError as error:  # of numpy: a file is shorter than it was
                raise Mistake(f"{path.parent}: is not what its manifest says: {error}") from None
    if (known := saved.get(f"data.content.{name}")) is not None:
        found = [source for source in found if source.fingerprint == known]
    if not found and (file := Path(c.data.root_dir, name)).suffix == ".bin" and file.is_file():
        found = [open_bin(name, [str(file)], {})]
    if len(found) != 1:
        why = "there are several" if found else f"none{' that the run used' * bool(known)}"
        raise Mistake(f"data.sources.{name}: {why} in {cache}; `lingua data prepare` makes them")
    if sum(map(len, found[0].parts)) <= c.data.seq_len:
        raise Mistake(f"data.sources.{name}: has no row of {c.data.seq_len} + 1 tokens")
    return found[0]

def open_shards(folder: Path, manifest: dict[str, Any]) -> Source:
    """Of each shard files of tokens and int64 [documents, 3]: tokens, bytes, hash of the text."""
    tokenizer, train, held_out = manifest["tokenizer"], list[np.ndarray](), list[Any]()
    for shard in manifest["shards"]:
        path, dtype = folder / shard["name"], manifest["dtype"]
        sizes, n_bytes, hashes = np.fromfile(f"{path}.heldout.documents", "<i8").reshape(-1, 3).T
        if n := shard["train"]["tokens"]:  # np.memmap refuses a shorter file
            train.append(np.memmap(f"{path}.train.tokens", dtype, "r", shape=n))
        if n := shard["heldout"]["tokens"]:
            tokens = np.memmap(f"{path}.heldout.tokens", dtype, "r", shape=n)
            texts = np.split(tokens, sizes.cumsum())[:-1]
            held_out += zip(hashes.tolist(), n_bytes.tolist(), texts, strict=True)
    held_out.sort(key=lambda document: document[0])  # at random, and always the same
    first = tokenizer["eos_id"] if manifest["add_eos"] else tokenizer["bos_id"]
    return Source(manifest["source"], manifest["fingerprint"], tokenizer, train, held_out, first)

def open_bin(name: str, paths: list[str], tokenizer: dict[str, Any]) -> Source:
    """Files of uint16 tokens. One block in 50 is held out, by a hash of its number: from the first
    document that begins in it up to the first of the next block."""
    if wrong := [path for path in paths if (n := Path(path).stat().st_size) == 0 or n % 2]:
        raise Mistake(f"data.sources.{name}: {', '.join(wrong)}: must have tokens of two bytes")
    files, samples = [np.memmap(path, "<u2", "r") for path in paths], list[np.ndarray]()
    for file in files:
        n = min(4096, len(file))
        places = np.unique(np.linspace(0, len(file) - n, 16).astype(np.int64)).tolist()
        samples.append(np.stack([file[at : at + n] for at in places]).astype("<u4"))
    tokenizer = {"fingerprint": "", "bos_id": None, "eos_id": None} | tokenizer
    tokenizer.setdefault("vocab_size", 1 + max(int(file.max()) for file in files))
    eos = tokenizer["eos_id"] if any((s == tokenizer["eos_id"]).any() for s in samples) else None
    blocks = list[tuple[int, int, np.ndarray]]()  # in order: hash, number, tokens
    for file in files:
        starts = range(0, len(file), min(max(len(file) // 4096, 1024), 2**16))
        for begin, end in pairwise([*(next_document(file, at, eos) for at in starts), len(file)]):
            blocks.append((mix(len(blocks), 0x9E3779B97F4A7C15), len(blocks), file[begin:end]))
    held = sorted(block for block in blocks if block[0] < 2**32 // 50)
    held = held or sorted(blocks)[: len(blocks) >= 50]  # one at least of 50
    kept = {number for _, number, _ in held}
    train = [tokens for _, number, tokens in blocks if number not in kept and len(tokens)]
    texts = [t for *_, b in held for t in np.split(b, np.flatnonzero(b == eos) + 1) if len(t)]
    digest, pairs = xxh3_128_hexdigest, zip(files, samples, strict=True)
    content = [eos, *([len(file), digest(b""), digest(sample.data)] for file, sample in pairs)]
    fingerprint = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return Source(name, fingerprint, tokenizer, train, [(0, 0, text) for text in texts], eos)

def next_document(file: np.ndarray, at: int, eos: int | None) -> int:
    """Where the first document from token `at` on begins; `at` where a million tokens have none."""
    for first in range(at, min(len(file), at + 2**20), 4096) if at and eos is not None else ():
        ends = np.flatnonzero(file[first - 1 : min(first + 4095, len(file) - 1)] == eos)
        if len(ends):
            return first + int(ends[0])
    return at  # end of measured

class Rows:
    """The rows of a run. In blocks of positions each source has its exact share to within a row,
    spread evenly: a position alone decides from which source its row is, and which."""

    def __init__(self, c: Any, sources: list[Source]) -> None:
        self.c, self.sources, self.seq_len = c, sources, c.data.seq_len
        weights = [Fraction(getattr(c.data.sources, source.name)) for source in sources]
        unit = math.lcm(*(weight.denominator for weight in weights))
        self.sums = [int(sum(weights[:i]) * unit) for i in range(len(weights) + 1)]
        self.block = max(1024, math.ceil(sum(weights) / min(weights)))
        self.ends = [np.cumsum([len(part) for part in source.parts]) for source in sources]

    def row(self, position: int) -> np.ndarray:
        """Tokens [seq_len + 1]."""
        (block, place), places, seq_len = divmod(position, self.block), self.block, self.seq_len
        blocks = (block * self.block, (block + 1) * self.block)
        first, last = ([n * total // self.sums[-1] for total in self.sums] for n in blocks)
        for s in range(len(self.sources)):
            before = first[s + 1] - first[s]  # rows of the source in the blocks before
            quota = last[s + 1] - last[s] - before  # of the places that are left
            taken = place * quota // places
            if (place + 1) * quota // places > taken:
                break
            place, places = place - taken, places - quota
        (name, _, _, parts, *_), ends = self.sources[s], self.ends[s]
        n_rows = (int(ends[-1]) - 1) // seq_len
        epoch, k = divmod(before + taken, n_rows)
        start = permuted(k, n_rows, self.c.seed, name, epoch) * seq_len
        i = int(np.searchsorted(ends, start, "right"))
        tokens = parts[i][start - int(ends[i]) + len(parts[i]) :][: seq_len + 1]
        while len(tokens) <= seq_len:  # it goes on in the next part
            i += 1
            tokens = np.concatenate((tokens, parts[i][: seq_len + 1 - len(tokens)]))
        return tokens

    def step(self, position: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """The micro-batches of the G rows from `position` on: tokens and targets, int64 R S, and a
        hash of the rows. Rounding depends on R, so all have as many; padding has no targets."""
        c, size, seq_len = self.c, self.c.data.global_batch_size, self.seq_len
        n = c.grad_acc_steps or -(-size // c.data.batch_size)
        cuts, n_rows = [m * size // n for m in range(n + 1)], -(-size // n)
        if c.deterministic == "mesh":  # the same micro-batches for any number of ranks
            n_rows = min(c.data.batch_size, size)
            cuts = [*range(0, size, n_rows), size]
        for begin, end in pairwise(cuts):
            ids = range(position + begin, position + end)
            rows = torch.from_numpy(np.stack([self.row(at) for at in ids]).astype(np.int64))
            if (largest := int(rows.max())) >= c.model.vocab_size:
                raise Mistake(f"model.vocab_size = {c.model.vocab_size}: a token is {largest}")
            x, y, rest = rows[:, :-1], rows[:, 1:], (0, 0, 0, n_rows - len(rows))
            values = torch.cat((x, y), 1)
            words = hash_bits(hash_bits(0, torch.arange(2 * seq_len)), values).sum(1)
            hashed = int(hash_bits(words, torch.tensor(ids)).sum())
            yield F.pad(x, rest), F.pad(y, rest, value=IGNORE), hashed

# ---------------------------------------------------------------------------------- model
# Llama: RMSNorm before attention and feed-forward, rotary positions, grouped keys and values,
# SwiGLU. B rows, S positions, H heads, D features of a head, E features of the residual stream.
# Where several ways compute the same, this is the one of apps/main, since each rounds differently.

class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and x.dtype == torch.float32:  # for which torch has no kernel
            return Normalise.apply(x, self.weight, self.eps)
        return super().forward(x)

class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        product = grad * x
        along = (product @ weight)[..., None] * (scale.square() / -x.shape[-1])
        x_grad = (grad * weight).addcmul_(x, along).mul_(scale)
        return x_grad, product.flatten(0, -2).T.mv(scale.flatten()), None

class Attention(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.head_dim = m.head_dim or m.dim // m.n_heads
        n_heads = m.n_heads or m.dim // self.head_dim
        n_features, n_kv_features = (n * self.head_dim for n in (n_heads, m.n_kv_heads or n_heads))
        self.wq = nn.Linear(m.dim, n_features, bias=False)
        self.wk = nn.Linear(m.dim, n_kv_features, bias=False)
        self.wv = nn.Linear(m.dim, n_kv_features, bias=False)
        self.wo = nn.Linear(n_features, m.dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:  # B S E -> B S E
        """`turn` is complex, S 1 D/2: each pair of neighbouring features of queries and keys is
        turned by the angle of its position (Su et al., 2021)."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        pairs = (t.float().contiguous().unflatten(-1, (-1, 2)) for t in (q, k))
        turned = (torch.view_as_real(torch.view_as_complex(t) * turn).flatten(-2) for t in pairs)
        q, k, v = (t.type_as(x).transpose(1, 2) for t in (*turned, v))  # B H S D
        if q.is_cuda and q.dtype == torch.float32:  # whose kernels do not know grouped heads
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape != q.shape)
        return self.wo(out.transpose(1, 2).flatten(-2))

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
        self.attention_norm, self.ffn_norm = (RMSNorm(m.dim, m.norm_eps) for _ in range(2))

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
        """The sum of the losses in nats, float32 [1]; tokens and targets are int64 B S."""
        head_dim, device = self.m.head_dim or self.m.dim // self.m.n_heads, tokens.device
        pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
        position = torch.arange(tokens.shape[1], device=device).float()
        angle = position[:, None] * (1.0 / self.m.rope_theta ** (pair / head_dim))
        turn = torch.complex(angle.cos(), angle.sin())[:, None]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return loss_sum(self.norm(x), self.output.weight, targets)

    @torch.no_grad()
    def init(self, seed: int) -> "Transformer":
        """Matrices are normal, cut off at three deviations: what lies beyond is drawn again."""
        m = self.m
        for name, p in self.named_parameters():
            std = m.init_base_std or p.shape[-1] ** -0.5
            if name.endswith(("wo.weight", "w2.weight")):  # which write to the residual stream
                depth = int(name.split(".")[1])
                std /= {"disabled": 1.0, "global_depth": (2 * (m.n_layers + 1)) ** 0.5,
                        "current_depth": (2 * (depth + 1)) ** 0.5, "dim_ratio": m.dim / 4096,
                        "zero": math.inf}[m.init_std_factor]
            draws = (normal(key_of(seed, name, i), p.shape, std) for i in count())
            values = next(draws)
            while bool((beyond := values.abs() > 3 * std).any()):
                values = torch.where(beyond, next(draws), values)
            p.copy_(values if p.dim() > 1 else torch.ones(p.shape))
        return self

def normal(key: int, shape: torch.Size, std: float) -> Tensor:
    """float32, a function of key and index (Box and Muller, 1958), computed in float64."""
    values, size = torch.empty(shape.numel()), 1 << 22
    for i, part in enumerate(values.split(size)):
        bits = hash_bits(key, torch.arange(i * size, i * size + len(part)))
        high, low = ((bits >> 32) & 0xFFFFFFFF).double(), (bits & 0xFFFFFFFF).double()
        radius = ((high + 0.5) / 2**32).log().mul(-2).sqrt()
        part.copy_(radius * (low * (2 * math.pi / 2**32)).cos() * std)
    return values.view(shape)

# ---------------------------------------------------------------------------------- loss

CHUNK_BYTES = 1 << 29  # float32 logits at a time: of a large vocabulary they take most memory

def loss_sum(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # measured
    """Sum of the cross-entropies, float32 [1]: x is B S E, weight vocabulary E, targets B S."""
    size = max(1, CHUNK_BYTES // (4 * len(weight)))
    size = size if size < 128 else size // 128 * 128  # whole tiles of a matrix product
    if targets.numel() > size:
        return ChunkedLoss.apply(x.flatten(0, 1), weight, targets.flatten(), size)
    logits, flat_targets = F.linear(x, weight).float().flatten(0, 1), targets.flatten()
    losses = F.cross_entropy(logits, flat_targets, ignore_index=IGNORE, reduction="none")
    return losses.view(1, *targets.shape).sum((1, 2))

class ChunkedLoss(torch.autograd.Function):
    """The gradients are computed with the losses, while a chunk's logits exist. Those of the weight
    are added up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
        losses, x_grad = list[Tensor](), torch.empty_like(x)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for h, t, out in zip(*(a.split(size) for a in (x, targets, x_grad)), strict=True):
            logits, is_target, column = F.linear(h, weight), t != IGNORE, t.clamp(min=0)[:, None]
            wide, counted = logits.float(), is_target.float()[:, None]
            total = wide.logsumexp(-1)
            losses.append(torch.where(is_target, total - wide.gather(1, column)[:, 0], 0.0))
            grad = (wide - total[:, None]).exp_().scatter_add_(1, column, -counted)
            grad = grad.mul_(counted).to(logits.dtype)
            torch.mm(grad, weight, out=out)
            if grad.dtype == torch.float32 or grad.is_cpu:
                torch.addmm(weight_grad, grad.T.float(), h.float(), out=weight_grad)
            else:
                torch.addmm(weight_grad, grad.T, h, out_dtype=torch.float32, out=weight_grad)
        ctx.save_for_backward(x_grad, weight_grad.to(weight.dtype))
        return torch.cat(losses).sum()[None]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad.mul_(upstream) for grad in ctx.saved_tensors), None, None  # end of measured

# ---------------------------------------------------------------------------------- optimizer

@torch.no_grad()
def update(tensors: Named, grads: Named, groups: Any, c: Any, lr: float, divisor: Tensor) -> None:
    """AdamW by torch's fused kernel, of gradients over `divisor`; nothing changes where that is not
    finite. `tensors` are those of a checkpoint, `groups` names with their weight decay."""
    pad = c.deterministic == "mesh" and divisor.is_cpu
    for decay, names in groups:
        kinds = ("model", "optim.exp_avg", "optim.exp_avg_sq", "optim.step")
        weights, means, squares, steps = ([tensors[f"{kind}.{n}"] for n in names] for kind in kinds)
        live, n = [*weights, *(grads[name] for name in names), *means, *squares], len(names)
        # Of a CPU tensor the kernel rounds the end, which fills no vector, in another way. For the
        # same bits on any mesh it gets copies without such an end.
        used = [F.pad(t.flatten(), (0, -t.numel() % 16)) if pad else t for t in live]
        weights, gradients, means, squares = (used[i * n : i * n + n] for i in range(4))
        adamw(weights, gradients, means, squares, [], steps, fused=True, grad_scale=divisor,
              found_inf=(~divisor.isfinite()).float(), amsgrad=False, maximize=False, lr=lr,
              beta1=c.optim.beta1, beta2=c.optim.beta2, weight_decay=decay, eps=c.optim.epsilon)
        for t, copy in zip(live, used, strict=True) if pad else ():
            t.copy_(copy[: t.numel()].view_as(t))

def lr_at(step: float, o: Any, steps: int) -> float:
    """The rate of the update after `step` completed ones: a linear rise, then the decay."""
    step, height = min(step, steps), 1.0
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    progress = (step - o.warmup) / max(steps - o.warmup, 1)
    if o.scheduler == "linear":
        height = 1 - progress
    elif o.scheduler == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif o.scheduler == "wsd":  # constant, then 1 - sqrt: Hägele et al., 2024
        begin = max(steps - o.decay_fraction * steps, o.warmup)
        height = 1 - max(0.0, min((step - begin) / (steps - begin or 1), 1.0)) ** o.exp_factor
    return o.lr * (height + (1 - height) * o.lr_min_ratio)

@torch.no_grad()
def grad_norm(grads: list[Tensor], exact: bool) -> Tensor:
    """The norm of all gradients, float32; `exact`, for `deterministic: mesh`, from squares as
    integers of 60 bits, in units of a tensor's largest element: no order changes their sum."""
    if not exact:
        return nn.utils.get_total_norm(grads).square().sqrt()
    largest = torch.stack([g.abs().max() for g in grads])
    unit = torch.ldexp(torch.ones_like(largest).double(), largest.frexp().exponent)
    squares = [(g.double() / u).square_().mul_(2.0**30) for g, u in zip(grads, unit, strict=True)]
    high = torch.stack([s.sum(dtype=torch.int64) for s in map(torch.floor, squares)]).double()
    low = torch.stack([(s.frac() * 2.0**30).sum(dtype=torch.int64) for s in squares]).double()
    norm = ((high / 2.0**30 + low / 2.0**60) * unit.square()).sum().sqrt().float()
    return torch.where(largest.isfinite().all(), norm, math.inf)

# ---------------------------------------------------------------------------------- loop

VERSIONS = {"lingua": "onefile", "torch": torch.__version__, "python": sys.version.split()[0],
            "cpu_capability": torch.backends.cpu.get_cpu_capability()}

def train(config: dict[str, Any], check_lock: Callable[[], None]) -> int:
    """The run of a config by dotted key, from its newest checkpoint on; returns the exit code."""
    seconds, folder, state = config.pop("seconds"), Path(config["dump_dir"]), dict[str, Any]()
    root = folder / "checkpoints"
    newest = next((path for _, path in reversed(checkpoints(root, verify=True))), None)
    if newest is not None:
        state = json.loads((newest / "train_state.json").read_bytes())
    elif any(root.glob("[0-9]" * 10)):
        raise Mistake(f"{root}: has checkpoints, but none that is whole; move them away")
    # ---- what the config leaves open, and what a resumed run must not change
    of_run = sorted(Path(config.pop("run") or folder).glob("checkpoints/*/train_state.json"))
    known = json.loads(of_run[-1].read_bytes())["data"] if of_run else {}
    c, saved_data = namespace(config), state.get("data", {})
    names = sorted(name for name, weight in config["data.sources"].items() if weight > 0)
    sources = [open_source(name, c, known | saved_data) for name in names]
    is_cuda = c.device == "cuda" or (c.device == "auto" and torch.cuda.is_available())
    for key, value in {
        "data.global_batch_size": c.data.batch_size * (c.grad_acc_steps or 1),
        "distributed.model_dtype": "bf16" if is_cuda else "fp32",
        "distributed.threads": 1 if c.deterministic == "mesh" else None,
        "model.n_heads": None if c.model.head_dim else 4,
        "model.vocab_size": max(source.tokenizer["vocab_size"] for source in sources),
    }.items():
        config[key] = value if config[key] in (None, -1) else config[key]
    c, text = namespace(config), yaml.safe_dump(nested(config), sort_keys=False)
    n_rows = c.data.global_batch_size
    if c.grad_acc_steps not in (None, *range(-(-n_rows // c.data.batch_size), n_rows + 1)):
        raise Mistake(f"grad_acc_steps = {c.grad_acc_steps}: does not fit the global batch size")
    content = {f"data.content.{source.name}": source.fingerprint for source in sources}
    content["data.tokenizer.content"] = sources[0].tokenizer["fingerprint"]
    if newest is not None:
        before = flat(yaml.safe_load((newest / "config.yaml").read_bytes())) | saved_data
        fixed = ("data.batch_size", "distributed.threads") if c.deterministic == "mesh" else ()
        both = (config | content).items()
        now = {key: value for key, value in both if GUARDED.match(key) or key in fixed}
        if changed := [key for key, value in now.items() if before.get(key, value) != value]:
            raise Mistake(f"{newest}: has another {', '.join(changed)}; use another dump_dir")
    # ---- model, and the state it continues from
    if c.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(c.distributed.threads or torch.get_num_threads())
    torch.backends.cuda.matmul.allow_tf32 = c.distributed.matmul_allow_tf32
    device = torch.device("cuda" if is_cuda else "cpu")
    dtype = torch.bfloat16 if c.distributed.model_dtype == "bf16" else torch.float32
    rows, model = Rows(c, sources), Transformer(c.model).init(c.seed).to(device)
    named, tensors = dict(model.named_parameters()), Named()  # live: they are saved and loaded
    for name, p in named.items():
        moments = {key: torch.zeros_like(p).detach() for key in ("exp_avg", "exp_avg_sq")}
        moments["step"] = torch.zeros((), device=device)
        tensors[f"model.{name}"] = p.detach()
        tensors |= {f"optim.{key}.{name}": t for key, t in moments.items()}
    no_decay = [name for name in named if "norm." in name or name.startswith("tok_embeddings")]
    groups = [(c.optim.weight_decay, [n for n in named if n not in no_decay]), (0.0, no_decay)]
    if newest is not None:
        (reader := Reader(newest)).read_metadata()  # a Mistake in it would be one of torch's
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        print(f"resuming {newest}")
    progress = state.get("progress", {"step": 0, "position": 0, "skipped_steps": 0, "trained_s": 0})
    began = time.monotonic() - progress["trained_s"]

    def write(file: str, line: dict[str, Any]) -> None:
        check_lock()
        with (folder / file).open("a", encoding="utf-8") as f:
            now = {"created_at": datetime.now(UTC).isoformat()}  # JSON has no NaN and no infinity
            f.write(re.sub(r"\b(NaN|-?Infinity)\b", "null", json.dumps(line | now)) + "\n")

    def replace(path: Path, content: bytes) -> None:  # also where it is killed in between
        (copy := path.with_name(f"{path.name}.tmp")).write_bytes(content)
        copy.replace(path)

    for file in folder.glob("metrics*.jsonl"):  # without the lines of steps that are undone
        whole = [t for t in file.read_bytes().splitlines(keepends=True) if t.endswith(b"}\n")]
        kept = [t for t in whole if json.loads(t).get("step", 0) <= progress["step"]]
        replace(file, b"".join(kept))
    for path in root.glob("[0-9]*.tmp-*"):  # a save that did not end
        rmtree(path)
    replace(folder / "config.yaml", text.encode())
    name = torch.cuda.get_device_name() if is_cuda else "cpu"
    about = {"event": "start", "topology": [1, 1, 1], "config": text, "device": name} | VERSIONS
    write("metrics.jsonl", about | {"step": progress["step"]})
    # ---- the parts of a step
    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward are in `dtype`; weights and their gradients stay float32."""
        check_lock()
        weights = {name: p.to(dtype) for name, p in named.items()}
        return torch.func.functional_call(model, weights, (tokens.to(device), targets.to(device)))

    def rate() -> float:
        """Of the next update; with `seconds` by the share of them that is over."""
        share = 0.0 if seconds is None else min(1.0, (time.monotonic() - began) / seconds)
        return lr_at(progress["step"] if seconds is None else share * c.steps, c.optim, c.steps)

    def save() -> None:
        """Publish the checkpoint of the step, unless it is, and remove old ones."""
        final, progress["trained_s"] = root / f"{progress['step']:010d}", time.monotonic() - began
        if final in (path for _, path in checkpoints(root)):
            return
        new = final.with_name(f"{final.name}.tmp-{os.urandom(4).hex()}")
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(new), no_dist=True)
        state = {"progress": progress, "tokens": progress["position"] * c.data.seq_len,
                 "schedule": {"step": progress["step"], "lr": rate()}, "topology": [1, 1, 1],
                 "param_groups": [{"weight_decay": w, "param_names": names} for w, names in groups],
                 "data": content, "versions": VERSIONS}
        (new / "train_state.json").write_text(json.dumps(state, indent=1))
        (new / "config.yaml").write_text(text)
        files = {file.name: {"size": file.stat().st_size, "xxh3_64": hash_of(file)}
                 for file in sorted(new.iterdir())}
        serial = 1 + max((serial for serial, _ in checkpoints(root)), default=0)
        manifest: Any = {"format": 1, "step": progress["step"], "serial": serial, "files": files,
                         "created_at": datetime.now(UTC).isoformat(timespec="seconds")}
        manifest["xxh3_64"] = hash_of(manifest)
        (new / "manifest.json").write_text(json.dumps(manifest, indent=1))
        os.sync()
        check_lock()
        rmtree(final, ignore_errors=True)  # a damaged one
        new.rename(final)
        print(f"saved {final}")
        keep = c.checkpoint.dump.keep  # one with a mark of lingua's stays
        for _, path in checkpoints(root)[: -keep if keep > 0 else 0]:
            if not any(root.glob(f"{path.name}.[A-Za-z]*")):
                rmtree(path)
    # ---- the loop
    signals = list[int]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, lambda number, frame: signals.append(number))
    end, step_tokens = min(c.steps, c.stop_at or c.steps), c.data.global_batch_size * c.data.seq_len
    n_parameters, exact = sum(p.numel() for p in named.values()), c.deterministic == "mesh"
    limit = "" if seconds is None else f", for {seconds:g} s: on another machine it is another run"
    print(f"{c.name}: {n_parameters:,} parameters, {step_tokens:,} tokens a step, {device}{limit}")
    n_targets = torch.tensor([step_tokens], device=device)
    shown_step, shown_at, saved_at = progress["step"], time.monotonic(), time.monotonic()
    held_out, over = "", progress["step"] >= end
    while not over:
        losses, hashed, totals = list[Tensor](), 0, Named()
        for tokens, targets, rows_hash in rows.step(progress["position"]):
            loss = (loss_of(tokens, targets) / n_targets).sum()
            loss.backward()
            losses, hashed = [*losses, loss.detach()], hashed + rows_hash
            for name, p in named.items() if exact else ():  # in float64, and rounded once
                grad: Any = p.grad
                totals[name], p.grad = totals.get(name, 0) + grad.double(), None
        grads: Any = {n: totals[n].float() if exact else p.grad for n, p in named.items()}
        norm, lr = grad_norm(list(grads.values()), exact), rate()
        divisor = torch.where(norm.isfinite(), ((norm + 1e-6) / c.optim.clip).clamp(min=1.0), norm)
        update(tensors, grads, groups, c, lr, divisor)
        model.zero_grad()
        if not math.isfinite(norm):  # once a step the host waits for the device
            if c.optim.on_nonfinite == "stop":
                save()
                raise Mistake(f"step {progress['step'] + 1}: the gradient is not finite")
            progress["skipped_steps"] += 1
        step = progress["step"] = progress["step"] + 1
        progress["position"] += c.data.global_batch_size

        out_of_time = seconds is not None and time.monotonic() - began >= seconds
        over = bool(signals) or out_of_time or (seconds is None and step >= end)
        if step % c.logging.freq == 0 or over:
            speed = (step - shown_step) * step_tokens / (time.monotonic() - shown_at)
            line = {"step": step, "tokens": progress["position"] * c.data.seq_len, "lr": lr,
                    "loss": math.fsum(torch.stack(losses).tolist()), "grad_norm": float(norm),
                    "tokens_per_s": speed, "batch_hash": f"{hashed % 2**64:016x}",
                    "skipped_steps": progress["skipped_steps"]}
            write("metrics.jsonl", line)
            print(f"step {step}: loss {line['loss']:.4f}, norm {float(norm):.3f}, rate {lr:.2e}, "
                  f"{speed:,.0f} tokens/s", flush=True)
            shown_step, shown_at = step, time.monotonic()
        due = step == c.steps or (c.validation.every > 0 and step % c.validation.every == 0)
        if due or (over and not signals):
            held_out, lines = validate(c, rows, loss_of)
            for of_source in lines if due or seconds is not None else []:
                write("metrics.validation.jsonl", {"step": step, **of_source})
        dump, since_s = c.checkpoint.dump, time.monotonic() - saved_at
        overdue = 0 < 60 * (dump.every_minutes or 0) <= since_s
        if over or overdue or (dump.every > 0 and step % dump.every == 0):
            save()
            saved_at = time.monotonic()
    stopped = f"stopped after step {progress['step']}" if signals else ""
    print(stopped or held_out or validate(c, rows, loss_of)[0])
    return 128 + signals[0] if signals else 0

@torch.no_grad()  # measured
def validate(c: Any, rows: Rows, loss_of: Callable[..., Tensor]) -> tuple[str, list[Any]]:
    """The loss on held-out documents of all sources, in words, and a line of metrics for each."""
    seq_len, v = c.data.seq_len, c.validation
    nats, n_bytes, n_tokens, lines = 0.0, 0, 0, list[dict[str, Any]]()
    for source in rows.sources:
        sizes = [n if n and not v.tokens else len(t) for _, n, t in source.held_out]
        begins = zip(np.cumsum([0, *sizes]), source.held_out, strict=False)
        left = [(at, document) for at, document in begins if at >= v.skip]
        chosen = [document for at, document in left if at - left[0][0] < (v.tokens or v.bytes)]
        known, text = sum(n for _, n, _ in chosen), np.array([h for h, *_ in chosen], "<i8")
        first = [] if source.first is None else [source.first]
        stream = torch.from_numpy(np.concatenate([first, *(t for *_, t in chosen)]).astype("<i8"))
        if not (chosen and (n := len(stream) - 1)):
            continue
        shape = -1, min(-(-n // seq_len), max(c.data.batch_size, 4096 // seq_len)), seq_len
        rest = (0, -n % (shape[1] * seq_len))
        tokens = F.pad(stream[:-1], rest).view(shape)
        targets = F.pad(stream[1:], rest, value=IGNORE).view(shape)
        total = math.fsum(float(loss_of(x, y)) for x, y in zip(tokens, targets, strict=True))
        line = {"source": source.name, "nats_per_token": total / n, "tokens": n}
        line["text"] = hashlib.blake2b(text.tobytes(), digest_size=6).hexdigest()
        if known:
            bits = total / known / torch.tensor(2.0).log().item()
            line |= {"nats_per_byte": total / known, "bits_per_byte": bits, "bytes": known}
        lines.append(line)
        nats, n_tokens, n_bytes = nats + total, n_tokens + n, n_bytes + known
    if not n_tokens:
        return "no document is held out", lines
    per, unit = (n_bytes, "byte") if n_bytes else (n_tokens, "token")
    return f"held-out {nats / per:.4f} nats/{unit}", lines  # end of measured

# ---------------------------------------------------------------------------------- checkpoint
# A folder a step: DCP's files of model.NAME and optim.STATE.NAME, train_state.json, config.yaml and
# a manifest of sizes and checksums. Written under another name and renamed last, it is whole or not
# there. Nothing that is read is executed.

ALLOWED = {  # what DCP's .metadata may refer to
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "_MEM_FORMAT_ENCODING ChunkStorageMetadata TensorStorageMetadata",  # bytes torch would execute
    "torch.distributed.checkpoint.filesystem": "_StorageInfo", "pathlib": "PosixPath",
    "torch.serialization": "_get_layout", "torch": "Size float32",
}

class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, "").split():
            raise Mistake(f".metadata refers to {module}.{name}, which is not executed")
        return super().find_class(module, name)

class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with open(Path(self.path, ".metadata"), "rb") as f:
            metadata = Unpickler(f).load()
        files = [str(place.relative_path) for place in metadata.storage_data.values()]
        if any(Path(file).name != file for file in files):
            raise Mistake(f"{self.path}: refers to files outside of its folder")
        return metadata

def hash_of(content: Path | dict[str, Any]) -> str:  # of a file or a manifest
    manifest = json.dumps(content, sort_keys=True).encode() if isinstance(content, dict) else b""
    return xxh3_64_hexdigest(manifest or np.memmap(str(content), "u1", "r").data)

def checkpoints(root: Path, verify: bool = False) -> list[tuple[int, Path]]:
    """(serial, folder), in the order of publication, of those whose files have their sizes, or
    their checksums too."""
    found = []
    for path in root.glob("[0-9]" * 10):
        with suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((path / "manifest.json").read_bytes())
            right = manifest.pop("xxh3_64") == hash_of(manifest)
            for file, entry in ((path / name, entry) for name, entry in manifest["files"].items()):
                right &= file.stat().st_size == entry["size"]
                right = right and (not verify or hash_of(file) == entry["xxh3_64"])
            if right and manifest["step"] == int(path.name):
                found.append((manifest["serial"], path))
    return sorted(found)

@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock of a dump dir, a file that names its process, as apps/main does. Yields a check
    that it is still held, which also renews it. Raises Mistake where another process has it."""

    def place_of(pid: int) -> str:  # this machine since its start, and the start of the process
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            if state not in "ZX":
                return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino} {fields[18]}"
        return ""

    path, host, mine = folder / "run.lock", os.uname().nodename, place_of(os.getpid())
    content = f"process {os.getpid()} on {host}, {mine}, {os.urandom(8).hex()}\n"
    if path.exists():
        other = re.match(r"(process (\d+) on [^,]*), ((\S+) \d+),", path.read_text())
        if other is None or other[4] != mine.split(" ")[0] or place_of(int(other[2])) == other[3]:
            who = other[1] if other is not None else "an unknown process"
            raise Mistake(f"{path}: {who} has this folder; if that is gone, remove the file")
        path.unlink()  # its process died
    with suppress(FileExistsError), path.open("x") as f:
        f.write(content)

    def check() -> None:
        if not path.exists() or path.read_text() != content:
            raise Mistake(f"{path}: another run has this folder; nothing more is written here")
        os.utime(path)

    check()
    try:
        yield check
    finally:
        with suppress(Mistake):
            check()
            path.unlink()

# ---------------------------------------------------------------------------------- config
# All keys of apps/main, whose --help explains them, so that each reads the other's config.yaml.
# Of FIXED only these values are implemented. Some have no effect in one process (data.workers).
DEFAULTS = """
{name: onefile, dump_dir: null, seed: 42, steps: 1000, stop_at: null, grad_acc_steps: null,
device: auto, deterministic: false, # true, or mesh: the same bits as on any number of ranks
data: {root_dir: data, cache_dir: null, sources: {}, source_files: {}, seq_len: 256, batch_size: 16,
  global_batch_size: null, add_bos: true, add_eos: true, workers: 1, on_bad_record: stop,
  tokenizer: {name: bytes, path: null, bos: null, eos: null}},
model: {dim: 128, n_layers: 4, head_dim: null, n_heads: null, n_kv_heads: null, multiple_of: 32,
  ffn_dim_multiplier: null, norm_eps: 1.0e-05, rope_theta: 10000.0, init_base_std: null,
  init_std_factor: disabled, attn_impl: auto, vocab_size: -1, weight_tying: false},
optim: {lr: 4.0e-3, weight_decay: 0.1, beta1: 0.9, beta2: 0.95, epsilon: 1.0e-08, clip: 1.0,
  scheduler: cosine, warmup: 100, lr_min_ratio: 0.1, decay_fraction: 0.1, exp_factor: 0.5,
  on_nonfinite: stop, muon: {momentum: 0.95, nesterov: true, ns_steps: 5, rms: 0.2, dtype: bf16}},
distributed: {spare: false, gpu: null, rendezvous_s: 600.0, timeout_s: 1800.0,
  step_timeout_s: 240.0, grad_sync: null, reshard: always, threads: null, check_every: null,
  model_dtype: null, matmul_allow_tf32: false}, probe: {every: null},
checkpoint: {dump: {every: 100, keep: 2, every_minutes: null}, on_error: continue, verify: full},
validation: {every: 0, bytes: 200000, tokens: null, skip: 0}, logging: {freq: 10},
profiling: {mem_warmup: 0, mem_steps: 2, profile_warmup: 10, profile_steps: 2}}
"""
FIXED = """
{app: apps.main, samples: {every: 0}, eval: null, profiling: {run: false},
logging: {to: [], wandb: null, trackio: null},
data: {stages: [], n_views: 2, chat: null, document_mask: none, on_no_targets: stop},
model: {rope_scaling: null, sliding_window: null, qkv_bias: false, qk_norm: null,
  norm_placement: null, dropout: 0.0},
optim: {name: adamw, lr_scale: {}, cycle_length: 1.0, cosine_theta: 1.0},
distributed: {dp_replicate: 1, dp_shard: null, tp_size: 1, cp_size: 1, float8: null, compile: false,
  activation_checkpointing: none},
checkpoint: {eval: {every: 0, keep: -1}, keep_every: 0, keep_best: false, path: null,
  mirror: null, async_save: false, init_from: null, init_new: [],
  continue_training_from_init: false, allow_change: []}, validation: {sources: []}}
"""
MAPS = ("data.sources", "data.source_files", "optim.lr_scale")  # keys whose values are mappings
CHOICES = {
    "deterministic": (False, True, "mesh"), "distributed.dp_shard": (None, 1),
    "device": ("auto", "cpu", "cuda"), "distributed.model_dtype": (None, "bf16", "fp32"),
    "model.init_std_factor": ("disabled", "global_depth", "current_depth", "dim_ratio", "zero"),
    "model.attn_impl": ("auto", "sdpa"), "optim.on_nonfinite": ("stop", "skip"),
    "optim.scheduler": ("constant", "linear", "cosine", "wsd")}
# Keys that may be null are text, float or else int.
TEXT = re.compile(r"run|dump_dir|.*(cache_dir|tokenizer\.\w+|grad_sync|gpu|_dtype)")
FLOAT = re.compile(r"seconds|.*(multiplier|std|minutes)")
ANY_NUMBER = re.compile(r"seed|model\.vocab_size|checkpoint\.dump\.(every|keep)")
MAY_BE_0 = re.compile(r"pr.*|.*(every\w*|skip|workers|warmup|decay|ratio|beta\d|lr|fraction|mom.*)")
GUARDED = re.compile(r"seed|data\.(content|sources|seq_l|global|add_|tokenizer)|model\.(?!attn)")

def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    items = dict[str, Any]()
    for name, value in tree.items():
        is_group = isinstance(value, dict) and prefix + name not in MAPS
        items |= flat(value, f"{prefix}{name}.") if is_group else {prefix + name: value}
    return items

def nested(items: dict[str, Any]) -> dict[str, Any]:
    tree = dict[str, Any]()
    for key, value in items.items():
        *groups, last = key.split(".")
        functools.reduce(lambda at, group: at.setdefault(group, {}), groups, tree)[last] = value
    return tree

def namespace(items: dict[str, Any]) -> Any:  # has c.model.dim for the key model.dim
    return json.loads(json.dumps(nested(items)), object_hook=lambda d: SimpleNamespace(**d))

def read_config(words: list[str]) -> dict[str, Any]:
    """The config of the words of a command, by dotted key. Raises Mistake."""
    fixed, given = flat(yaml.safe_load(FIXED)), dict[str, Any]()
    config = flat(yaml.safe_load(DEFAULTS)) | fixed | {"seconds": None, "run": None}
    for word in words:
        key, equals, text = word.partition("=")
        try:
            tree = yaml.safe_load(text if equals else Path(word).read_text(encoding="utf-8"))
            given |= flat({key: tree} if equals else tree | {"run": str(Path(word).parent)})
        except (OSError, AttributeError, yaml.YAMLError) as error:
            raise Mistake(f"{word}: is no KEY=VALUE and no config.yaml: {error}") from None
    if (path := given.pop("bin", None)) is not None:
        given |= {"data.root_dir": str(Path(path).parent), "data.sources": {Path(path).name: 1.0}}
        if not Path(path).is_file():
            raise Mistake(f"bin = {path}: is no file")
    for key, value in given.items():
        is_fixed = any(key == k or key.startswith(f"{k}.") for k in fixed)
        if key not in config and not is_fixed:
            raise Mistake(f"{key}: unknown key, near {get_close_matches(key, config) or 'none'}")
        default = config.get(key)
        with suppress(TypeError, ValueError):  # to YAML 4e-3 is text
            value = float(value) if type(default) is float or FLOAT.fullmatch(key) else value
        allowed = CHOICES.get(key, (default,) if is_fixed else (value,))
        if value not in allowed:
            why = "is not implemented here (apps/main has it); " if is_fixed else ""
            raise Mistake(f"{key} = {value}: {why}must be {' or '.join(map(str, allowed))}")
        if key not in CHOICES and default is not None and type(value) is not type(default):
            raise Mistake(f"{key} = {value}: must be of type {type(default).__name__}")
        is_number, kind = type(value) in (int, float), float if FLOAT.fullmatch(key) else int
        is_text = default is not None or value is None or is_fixed or TEXT.fullmatch(key)
        if not (is_text or type(value) is kind):
            raise Mistake(f"{key} = {value}: must be null or of type {kind.__name__}")
        least = value > 0 or (value == 0 and MAY_BE_0.fullmatch(key)) if is_number else True
        if not (least or ANY_NUMBER.fullmatch(key) or is_fixed):
            raise Mistake(f"{key} = {value}: must be above 0")
        config[key] = value
    weights = dict[str, float]()
    with suppress(TypeError, ValueError):
        weights = {name: float(weight) for name, weight in config["data.sources"].items()}
    is_whole = len(weights) == len(config["data.sources"])
    if not is_whole or not all(0 <= weight < math.inf for weight in weights.values()):
        raise Mistake(f"data.sources = {config['data.sources']}: must be numbers, 0 or above")
    config["data.sources"] = weights
    if not any(weights.values()) or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise Mistake("needs data.sources or bin=FILE, and one process: apps/main has any number")
    return config | {"dump_dir": str(config["dump_dir"] or f"runs/{config['name']}")}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        given = read_config(sys.argv[1:])
        Path(given["dump_dir"]).mkdir(parents=True, exist_ok=True)
        with locked(Path(given["dump_dir"])) as still_locked:
            sys.exit(train(given, still_locked))
    except (Mistake, OSError) as mistake:
        print(f"onefile: {mistake}", file=sys.stderr)
        sys.exit(2)
