"""Between checkpoints and plain files, on one CPU, without training:

    python -m lingua.checkpoint convert SRC DST [--all]

SRC is anything checkpoint.init_ckpt_path takes. From a folder, the file DST is written, with
torch.save: {"model": {name: tensor}, "config": text of YAML, "step": n}, whose model is what Meta
Lingua has in its consolidated.pth. From a file, the checkpoint DST/<step> is written, which
checkpoint.init_ckpt_path takes. `--all` takes the optimizer and the train state along, as
{"optim": {"state": {name: {key: tensor}}, "param_groups": [...]}, "train_state": {...}} in a file,
which is torch's own form for them; a checkpoint made of that can be resumed.

What is written has another name until it is whole. A file is put together in memory, once; of a
file that is read, only what is being written is in memory.
"""

import argparse
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lingua.checkpoint.save import save
from lingua.checkpoint.source import TensorSource, find_source
from lingua.errors import UserError
from lingua.files import open_synced, sync_folder
from lingua.parallel.launch import one_process


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m lingua.checkpoint convert",
        description="A checkpoint into one plain file, or such a file into a checkpoint.",
    )
    parser.add_argument("src", type=Path, metavar="SRC", help="checkpoint, dump_dir, or file")
    parser.add_argument("dst", type=Path, metavar="DST", help="file, or folder of checkpoints")
    parser.add_argument("--all", action="store_true", help="optimizer and train state too")
    args = parser.parse_args(arguments)
    with one_process():
        written = convert(args.src, args.dst, everything=args.all)
    size = sum(p.stat().st_size for p in (written, *written.glob("*")) if p.is_file())
    print(f"wrote {written} ({size:,} bytes)")


def convert(src: Path, dst: Path, everything: bool) -> Path:
    """Write what is in `src` as the other kind, and return the file or checkpoint made.

    Raises:
        UserError: there is nothing to read, not everything that is asked for, or something where
            it is to be written; or it cannot be written.
    """
    source = find_source(src, "full", report=print)
    kinds = ("model.", "optim.") if everything else ("model.",)
    names = [name for name in source.tensors if name.startswith(kinds)]
    if everything and (not source.state or not any(n.startswith("optim.") for n in names)):
        raise UserError(f"{source.path} has no optimizer and train state for --all, only a model")
    print(f"{'all' if everything else 'the model'} of {source}: {len(names)} tensors")
    if source.kind == "file":
        return _to_checkpoint(source, names, dst, everything)
    return _to_file(source, names, dst, everything)


def _to_checkpoint(source: TensorSource, names: list[str], dst: Path, everything: bool) -> Path:
    step = source.step or 0
    if everything and "progress" not in source.state:
        raise UserError(f"{source.path}: its train state is not of a run of ours; leave out --all")
    final = dst / f"{step:010d}"
    if final.exists() or dst.is_file():
        raise UserError(f"{final if dst.is_dir() else dst} exists: nothing is overwritten")
    tensors = {name: source.tensors[name] for name in names}  # mapped into memory
    return save(dst, step, tensors, source.state if everything else {}, source.config)


def _to_file(source: TensorSource, names: list[str], dst: Path, everything: bool) -> Path:
    if dst.exists():
        raise UserError(f"{dst} exists: nothing is overwritten")
    tensors = source.whole(names)
    content: dict[str, Any] = {
        "model": {n.removeprefix("model."): t for n, t in tensors.items() if n[0] == "m"},
        "config": source.config,
    }
    if source.step is not None:
        content["step"] = source.step
    if everything:
        content["optim"] = _optim(tensors, source.state)
        content["train_state"] = source.state
    temporary = dst.with_name(f"{dst.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        with open_synced(temporary) as f:
            torch.save(content, f)
        temporary.rename(dst)
        sync_folder(dst.parent)
    except (OSError, RuntimeError) as error:  # torch reports a write that failed as the latter
        temporary.unlink(missing_ok=True)
        raise UserError(f"{dst} cannot be written: {error}") from error
    return dst


def _optim(tensors: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """Optimizer state as torch.distributed.checkpoint.state_dict gives it."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        kind, _, rest = name.partition(".")
        key, _, parameter = rest.partition(".")
        if kind == "optim":
            by_name.setdefault(parameter, {})[key] = t
    groups = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": group["param_names"]}
        for group in state.get("param_groups", [])
    ]
    return {"state": by_name, "param_groups": groups}
