"""A checkpoint as Meta Lingua writes it, without any code of ours.

Its model, optimizer and calls of torch.distributed.checkpoint are those of its public sources
(apps/main/transformer.py, lingua/optim.py, lingua/checkpoint.py), its formulas written again.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from tests.checkpoints import join

DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 24, 4, 2, 6, 2, 259
STEP = 3  # updates made
CONFIG = Path(__file__).parent / "apps/meta_lingua/resolved.yaml"
TOKENS = torch.arange(32).view(2, 16) * 37 % VOCABULARY


def linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim, hidden = DIM, int(0.92 * int(8 * DIM / 3))
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.attention = linears(wq=(dim, q), wk=(dim, kv), wv=(dim, kv), wo=(q, dim))
        self.feed_forward = linears(w1=(dim, hidden), w3=(dim, hidden), w2=(hidden, dim))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (self.attention[w](h).unflatten(-1, (-1, HEAD_DIM)) for w in ("wq", "wk", "wv"))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turns).flatten(-2)
            for t in (q, k)
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + self.attention["wo"](torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))
        h, ff = self.ffn_norm(x), self.feed_forward
        return x + ff["w2"](F.silu(ff["w1"](h)) * ff["w3"](h))


class LMTransformer(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.norm = nn.RMSNorm(DIM, 1e-5)
        if tied:  # its TiedLinear keeps the embedding as a module of its own
            self.output = nn.ModuleDict({"tied_module": self.tok_embeddings})
        else:
            self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.outer(torch.arange(tokens.shape[1]), frequencies)
        turns = torch.polar(torch.ones_like(angle), angle)[:, None]  # S 1 D/2
        for layer in self.layers:
            h = layer(h, turns)
        head = self.output["tied_module"] if isinstance(self.output, nn.ModuleDict) else self.output
        return F.linear(self.norm(h), head.weight)


def save_here(folder: Path, tied: bool) -> Tensor:
    """Train a little on these ranks, save, and return the logits of TOKENS."""
    mesh = join()
    torch.manual_seed(3)
    model = LMTransformer(tied)
    fully_shard(model, mesh=mesh["dp_shard"])
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    for _ in range(STEP):
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(-1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    rank = dist.get_rank()
    state = {"step": STEP, "acc_step": 0, "data_loader_state": {"it_state": {}}, "scheduler": {}}
    (folder / f"train_state_{rank:05d}.json").write_text(json.dumps(state))
    with torch.no_grad():
        logits = model(TOKENS)
    if rank == 0:
        (folder / "params.json").write_text(json.dumps(params(tied)))
        whole = folder / "consolidated"
        whole.mkdir()
        dcp_to_torch_save(folder, whole / "consolidated.pth")
        (whole / "params.json").write_text(json.dumps(params(tied)))
    return logits


def params(tied: bool) -> dict[str, Any]:
    """The whole configuration, resolved, as its config.yaml and params.json have it."""
    config = yaml.safe_load(CONFIG.read_text())
    config["model"] |= {"dim": DIM, "weight_tying": tied}
    return config
