"""Steps of other projects' models: compiled, clipped and updated as their train.py does it."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lingua.base.errors import UserError
from lingua.run.args import RunArgs

Step = Callable[[], object]


class Project(NamedTuple):
    files: list[str]  # that are read
    sizes: list[str]  # a name of apps.bench.gpu.prepare.SHAPES, and keys


PROJECTS = {
    "nanogpt": Project(["model.py"], ["124M"]),
    "meta_lingua": Project(
        ["lingua/transformer.py", "lingua/probe.py", "apps/main/transformer.py"],
        ["1B", "model.n_layers=8"],
    ),
}


def project_step(
    project: str, folder: Path, args: RunArgs, mesh: DeviceMesh, compiled: bool
) -> Step:
    """A step of a model of the size of `args`, on tokens that stay the same. `folder` has the files
    of the project. Raises UserError where it has not."""
    rows, device, is_nanogpt = _rows(args), torch.device(mesh.device_type), project == "nanogpt"
    x, y = torch.randint(args.model.vocab_size, (2, *rows), device=device)
    build: Any = nanogpt if is_nanogpt else meta_lingua
    model, optimizer = build(folder, args, mesh)
    if compiled:
        model.compile()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_nanogpt):
            loss = model(x, y)[1] if is_nanogpt else model(x, y, attn_impl="sdpa")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def nanogpt(folder: Path, args: RunArgs, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """github.com/karpathy/nanoGPT."""
    m, module = args.model, load_file(folder, "model.py", "nanogpt_model")
    sizes = {"n_layer": m.n_layers, "n_head": m.n_heads, "n_embd": m.dim, "bias": False}
    config = module.GPTConfig(_rows(args)[1], m.vocab_size, dropout=0.0, **sizes)
    model = module.GPT(config).to(mesh.device_type)
    return model, model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), mesh.device_type)


def meta_lingua(folder: Path, args: RunArgs, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """github.com/facebookresearch/lingua: FSDP2 in bf16."""
    for name in ("xformers", "xformers.ops", "meta_lingua"):  # xformers is unused with sdpa
        sys.modules.setdefault(name, ModuleType(name))
    stand_in: Any = sys.modules["xformers.ops"]
    stand_in.fmha, stand_in.AttentionBias = ModuleType("fmha"), object
    for name in ("probe", "transformer"):
        module = load_file(folder, f"lingua/{name}.py", f"meta_lingua.{name}")
        setattr(sys.modules["meta_lingua"], name, module)
    module = load_file(folder, "apps/main/transformer.py", "meta_lingua_app")
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
    sizes = {key: getattr(args.model, key) for key in keys}
    with torch.device(mesh.device_type):
        model = module.LMTransformer(module.LMTransformerArgs(**sizes, max_seqlen=_rows(args)[1]))
        model.init_weights()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.tok_embeddings, *model.layers, model.output, model):
        whole = part in (model.output, model)
        fully_shard(part, mesh=mesh["dp_shard"], mp_policy=policy, reshard_after_forward=whole)
    return model, torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.033, fused=True)


def load_file(folder: Path, file: str, name: str) -> Any:
    """A file of a project as a module. Meta Lingua's package has the name of this one, and is
    called meta_lingua in it. Raises UserError."""
    path = folder / file
    if not path.exists():
        raise UserError(f"{folder.name}: not given; {folder.name}=FOLDER names a clone of it")
    source = re.sub(r"^from lingua\b", "from meta_lingua", path.read_text(), flags=re.MULTILINE)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def _rows(args: RunArgs) -> tuple[int, int]:
    return args.data.step_rows, args.data.seq_len
