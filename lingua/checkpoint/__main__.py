"""Commands for checkpoints:

    python -m lingua.checkpoint show DIR             what it contains
    python -m lingua.checkpoint diff DIR config=FILE [key=value ...] [app=MODULE]
                                                     what resuming it would change, or refuse
    python -m lingua.checkpoint mark DIR [NAME]      keep it until it is unmarked
    python -m lingua.checkpoint unmark DIR [NAME]
    python -m lingua.checkpoint convert SRC DST      its model into one file, or from one

DIR is a checkpoint, or a folder of checkpoints or a dump dir, whose newest is taken. SRC is
anything that checkpoint.init_ckpt_path takes. From a checkpoint of ours, the file DST is written,
with torch.save: {"model": {name: tensor}, "config": text of YAML, "step": n}, whose model is what
Meta Lingua has in its consolidated.pth. From a file, or a checkpoint of Meta Lingua's, the
checkpoint DST/<step> is written.
"""

import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lingua.app import choose_app
from lingua.checkpoint.folder import STATE, Checkpoint, read_state, temporary
from lingua.checkpoint.resume import (
    TOKENIZER,
    changes_table,
    check_changes,
    check_config,
    check_data,
    flat_config,
    read_saved,
)
from lingua.checkpoint.retention import BEST, mark, marks, unmark
from lingua.checkpoint.save import save
from lingua.checkpoint.source import (
    TIED,
    TensorSource,
    find_source,
    locate_newest,
    open_checkpoint,
)
from lingua.config.load import flatten, resume_classes, to_yaml
from lingua.data.text import TextData
from lingua.errors import UserError, nearest
from lingua.files import open_synced, read_json, sync_folder
from lingua.format import human_bytes, printable
from lingua.parallel.launch import one_process
from lingua.parallel.program import run_program
from lingua.run_config import load_run
from lingua.tokenizer import build_tokenizer


def main(argv: list[str]) -> None:
    commands: dict[str, Callable[..., None]] = {
        "show": _show,
        "diff": _diff,
        "mark": _mark,
        "unmark": _unmark,
        "convert": _convert,
    }
    if not argv or {"-h", "--help"} & set(argv):
        print(str(__doc__).strip())
        return
    name, *words = argv
    if name not in commands:
        raise UserError(f"{name}: must be one of {', '.join(commands)}{nearest(name, commands)}")
    try:
        signature(commands[name]).bind(*words)
    except TypeError as error:
        raise UserError(f"{name}: {error}; --help shows what it takes") from None
    commands[name](*words)


def _newest(folder: str) -> Checkpoint:
    return locate_newest(Path(folder), lambda line: print(printable(line), file=sys.stderr))


# ---------------------------------------------------------------------------------------- show


def _show(folder: str) -> None:
    print(to_yaml(summary(_newest(folder))).strip())


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint contains, without reading a tensor."""
    path = checkpoint.path
    state = read_json(path / STATE)
    if groups := read_state(checkpoint).param_groups:
        state["param_groups"] = [
            group | {"param_names": f"{len(group['param_names'])} parameters"} for group in groups
        ]
    kinds: dict[str, list[Tensor]] = {}
    for name, t in open_checkpoint(checkpoint).tensors.items():
        kind, _, rest = name.partition(".")
        kinds.setdefault(rest.partition(".")[0] if kind == "optim" else kind, []).append(t)
    return {
        "checkpoint": str(path),
        "step": checkpoint.step,
        "saved": checkpoint.created_at,
        "marks": marks(path),
        "tensors": {kind: _describe(tensors) for kind, tensors in kinds.items()},
        "files": human_bytes(sum(entry["size"] for entry in checkpoint.files.values())),
    } | state


def _describe(tensors: list[Tensor]) -> str:
    values, size = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
    return f"{values:,} values, {len(tensors)} tensors, {dtypes}, {human_bytes(size)}"


# ---------------------------------------------------------------------------------------- diff


def _diff(folder: str, *arguments: str) -> None:
    """Print the table of a resume, then refuse what a resume would refuse."""
    argv = list(arguments)
    app = choose_app(argv)
    args: Any
    args, _ = load_run(app, argv)
    classes = resume_classes(app.config)
    saved, tokenizer = read_saved(_newest(folder), classes), build_tokenizer(args.data.tokenizer)
    # What is left open is decided as training decides it.
    args.data.global_batch_size = (
        args.data.global_batch_size or saved.config["data.global_batch_size"]
    )
    if args.model.vocab_size == -1:
        args.model.vocab_size = tokenizer.vocab_size
    data = {TOKENIZER: tokenizer.fingerprint()}
    try:
        data |= (app.data or TextData()).open(args, tokenizer).fingerprints
    except UserError as error:
        print(f"the data is not compared: it is not prepared here ({error})", file=sys.stderr)
    config = flatten(args)
    found = check_config(saved, config, classes, allowed=list(config))
    found += check_data(saved, data, allowed=list(data))
    nothing = f"nothing that matters differs from {saved.checkpoint.path}"
    print(printable("\n".join(changes_table(found))) or nothing, flush=True)
    check_changes(found, args.checkpoint.allow_change)


# ---------------------------------------------------------------------------------------- marks


def _mark(folder: str, name: str = "keep") -> None:
    path = _newest(folder).path
    if name == BEST:
        raise UserError(f"mark {BEST}: is that of the lowest held-out loss, and put by training")
    mark(path, name)
    print(f"{path} is marked {name}: it is kept until that is unmarked")


def _unmark(folder: str, name: str = "keep") -> None:
    path = _newest(folder).path
    if name not in marks(path):
        raise UserError(f"{path} is not marked {name} (marks: {', '.join(marks(path)) or 'none'})")
    unmark(path, name)
    print(f"{path} is no longer marked {name}")


# ---------------------------------------------------------------------------------------- convert


def _convert(src: str, dst: str) -> None:
    with one_process():
        source = find_source(Path(src), "full", lambda line: print(printable(line)))
        names = [name for name in source.tensors if name.startswith("model.")]
        print(f"the model of {source}: {len(names)} tensors")
        to = _to_checkpoint if source.checkpoint is None else _to_file
        written = to(source, names, Path(dst))
    size = sum(p.stat().st_size for p in (written, *written.glob("*")) if p.is_file())
    print(f"wrote {written} ({size:,} bytes)")


def _to_checkpoint(source: TensorSource, names: list[str], dst: Path) -> Path:
    step = source.step or 0
    final = dst / f"{step:010d}"
    if final.exists() or dst.is_file():
        raise UserError(f"{final if dst.is_dir() else dst} exists: nothing is overwritten")
    return save(dst, step, source.whole(names), {}, source.config)


def _to_file(source: TensorSource, names: list[str], dst: Path) -> Path:
    if dst.exists():
        raise UserError(f"{dst} exists: nothing is overwritten")
    model = {name.removeprefix("model."): t for name, t in source.whole(names).items()}
    embedding, head = TIED
    tying = "model.weight_tying"
    if flat_config(source, [tying]).get(tying) is True:
        model |= {head: model[embedding]} if embedding in model else {}  # the same memory
    content: dict[str, Any] = {"model": model, "config": source.config}
    if source.step is not None:
        content["step"] = source.step
    unfinished = temporary(dst)
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        with open_synced(unfinished) as f:
            torch.save(content, f)
        unfinished.rename(dst)
        sync_folder(dst.parent)
    except (OSError, RuntimeError) as error:  # torch reports a write that failed as the latter
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{dst} cannot be written: {error}") from error
    return dst


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
