"""What a checkpoint contains, and what a resume would change, without reading a tensor:

    python -m lingua.checkpoint show DIR
    python -m lingua.checkpoint diff DIR config=FILE [key=value ...] [app=MODULE]
    python -m lingua.checkpoint mark DIR [NAME]      keep it for ever
    python -m lingua.checkpoint unmark DIR [NAME]
    python -m lingua.checkpoint convert SRC DST [--all]   to and from one file; convert --help

DIR is a checkpoint, or a folder of checkpoints or a dump dir, whose newest is taken. `app` names
a fork, if the config does not.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import OmegaConf
from torch import Tensor

from lingua.app import choose_app
from lingua.checkpoint import convert as checkpoint_convert
from lingua.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    Checkpoint,
    read_state,
)
from lingua.checkpoint.resume import (
    TOKENIZER,
    changes_table,
    check_changes,
    check_config,
    check_data,
    read_saved,
)
from lingua.checkpoint.retention import BEST, mark, marks, unmark
from lingua.checkpoint.source import locate_newest, open_checkpoint
from lingua.config.load import flatten, load, resume_classes
from lingua.config.meta_lingua import META_LINGUA
from lingua.data.text import TextData
from lingua.errors import UserError, nearest
from lingua.format import human_bytes, short_time
from lingua.parallel.mesh import AXES
from lingua.parallel.program import run_program
from lingua.tokenizer import build_tokenizer

KEPT = "keep"  # the mark that has no name of its own


def main(argv: list[str]) -> None:
    commands: dict[str, Callable[[list[str]], None]] = {
        "show": _show,
        "diff": _diff,
        "mark": _mark,
        "unmark": _mark_off,
        "convert": checkpoint_convert.main,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return
    if argv[0] not in commands:
        known = ", ".join(commands)
        raise UserError(f"{argv[0]}: must be one of {known}{nearest(argv[0], commands)}")
    commands[argv[0]](argv[1:])


def _newest(folder: str) -> Checkpoint:
    return locate_newest(Path(folder), lambda line: print(line, file=sys.stderr))


# ---------------------------------------------------------------------------------------- show


def _show(argv: list[str]) -> None:
    if len(argv) != 1:
        raise UserError("show: takes one folder, `show DIR`")
    for label, text in summary(_newest(argv[0])):
        print(f"{label:<11} {text}")


def summary(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """What a checkpoint contains, as labels and texts to print."""
    state, path = read_state(checkpoint), checkpoint.path
    created = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["created_at"]
    marked = f", marked {', '.join(names)}" if (names := marks(path)) else ""
    yield "checkpoint", f"{path}"
    yield "saved", f"{created}{marked}"
    if "tokens" not in state:  # made by lingua.convert or from a file
        yield "step", f"{checkpoint.step:,}"
        yield "model", f"{_tensors(checkpoint)['model']}; nothing to resume"
        return
    progress = state["progress"]
    yield "step", f"{checkpoint.step:,} ({progress['skipped_steps']} of them changed nothing)"
    yield "tokens", f"{state['tokens']:,} in {progress['position']:,} rows"
    if state.get("held_out") is not None:
        yield "held-out", f"{state['held_out']:.4f} nats per byte"
    yield "trained", short_time(progress["trained_s"])
    yield "next rate", f"{state['schedule']['lr']:.3e}"
    sizes = zip(AXES, state["topology"], strict=True)
    yield "topology", ", ".join(f"{axis} {size}" for axis, size in sizes)
    optimizer = OmegaConf.select(OmegaConf.load(path / CONFIG), "optim.name")
    tensors = _tensors(checkpoint)
    yield "model", tensors.pop("model")
    yield "optimizer", f"{optimizer}"
    for kind, text in tensors.items():
        yield "", f"{kind}: {text}"
    for group in state["param_groups"]:
        settings = (f"{k} {v}" for k, v in group.items() if k != "param_names" and v)
        yield "", f"{len(group['param_names'])} parameters: {', '.join(settings)}"
    for key, fingerprint in state["data"].items():
        yield "data", f"{key} {fingerprint}"
    total = sum(entry["size"] for entry in checkpoint.files.values())
    yield "files", f"{len(checkpoint.files)}, {human_bytes(total)}"
    yield "versions", ", ".join(f"{what} {v}" for what, v in state["versions"].items())


def _tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Of the model and of each kind of optimizer state: how many values, dtype and size."""
    kinds: dict[str, list[Tensor]] = {}
    for name, t in open_checkpoint(checkpoint).tensors.items():
        kinds.setdefault(name.split(".")[1] if name.startswith("optim.") else "model", []).append(t)
    texts = {}
    for kind, tensors in kinds.items():
        values, size = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
        dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        texts[kind] = f"{values:,} values, {len(tensors)} tensors, {dtypes}, {human_bytes(size)}"
    return texts


# ---------------------------------------------------------------------------------------- diff


def _diff(argv: list[str]) -> None:
    """Print the table of a resume, then refuse what a resume would refuse."""
    if not argv or "=" in argv[0]:
        raise UserError("diff: takes a folder first, `diff DIR config=FILE [key=value ...]`")
    app = choose_app(argv[1:])
    args, notices = load(app.config, argv[1:], META_LINGUA)
    for line in notices:
        print(line, file=sys.stderr)
    classes = resume_classes(app.config)
    saved = read_saved(_newest(argv[0]), classes)
    tokenizer, config = build_tokenizer(args.data.tokenizer), flatten(args)
    # What is left open is decided as training decides it.
    if config["data.global_batch_size"] is None:
        config["data.global_batch_size"] = saved.config["data.global_batch_size"]
    if config["model.vocab_size"] == -1:
        config["model.vocab_size"] = tokenizer.vocab_size
    args.data.global_batch_size = config["data.global_batch_size"]
    data = {TOKENIZER: tokenizer.fingerprint()}
    try:
        data |= (app.data or TextData()).open(args, tokenizer).fingerprints
    except UserError as error:
        print(f"the data is not compared: it is not prepared here ({error})", file=sys.stderr)
    found = check_config(saved, config, classes, allowed=list(config))
    found += check_data(saved, data, allowed=list(data))
    if not found:
        print(f"nothing that matters differs from {saved.checkpoint.path}")
        return
    for line in changes_table(found):
        print(line)
    sys.stdout.flush()
    check_changes(found, args.checkpoint.allow_change)


# ---------------------------------------------------------------------------------------- marks


def _mark(argv: list[str]) -> None:
    path, name = _marked(argv)
    if name == BEST:
        raise UserError(f"mark {BEST}: is that of the lowest held-out loss, and put by training")
    mark(path, name)
    print(f"{path} is marked {name}: it is kept for ever")


def _mark_off(argv: list[str]) -> None:
    path, name = _marked(argv)
    if name not in marks(path):
        raise UserError(f"{path} is not marked {name} (marks: {', '.join(marks(path)) or 'none'})")
    unmark(path, name)
    print(f"{path} is no longer marked {name}")


def _marked(argv: list[str]) -> tuple[Path, str]:
    if len(argv) not in (1, 2):
        raise UserError("takes a folder and a name, `mark DIR [NAME]`")
    return _newest(argv[0]).path, (argv[1] if len(argv) == 2 else KEPT)


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
