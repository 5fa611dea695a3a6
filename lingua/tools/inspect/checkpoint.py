"""What the commands for checkpoints do: show, diff, mark, unmark."""

import sys
from typing import Any

from torch import Tensor

from lingua.app import choose_app
from lingua.base.dump_dir import STATE
from lingua.base.errors import UserError
from lingua.base.files import read_json
from lingua.base.format import human_bytes, printable
from lingua.base.urls import is_url, local_copy
from lingua.checkpoint.changes import changes_table, check_changes, check_config, check_data
from lingua.checkpoint.folder import Checkpoint, read_state
from lingua.checkpoint.origin import locate
from lingua.checkpoint.retention import BEST, mark_file, marks
from lingua.checkpoint.run_config import load_run
from lingua.checkpoint.saved import read_saved
from lingua.checkpoint.source import open_checkpoint
from lingua.config.load import flatten, resume_classes, to_yaml
from lingua.data.rows import TOKENIZER
from lingua.data.sources import TextData
from lingua.run.args import RunArgs
from lingua.tokenizer.build import build_tokenizer


def _newest(folder: str) -> Checkpoint:
    path = local_copy(folder)
    for checkpoint in locate(path, lambda line: print(printable(line), file=sys.stderr)):
        return checkpoint
    raise UserError(f"{folder} is no checkpoint of a run here; python -m lingua convert makes one")


# ---------------------------------------------------------------------------------------- show


def show_command(folder: str) -> None:
    print(to_yaml(summary(_newest(folder))).strip())


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a checkpoint without reading a tensor."""
    path = checkpoint.path
    state = read_json(path / STATE)
    hashed = {"hash of tensors": state.pop("tensors")} if "tensors" in state else {}
    if groups := read_state(checkpoint).param_groups:
        state["param_groups"] = [
            group | {"param_names": f"{len(group['param_names'])} parameters"} for group in groups
        ]
    kinds: dict[str, list[Tensor]] = {}
    for name, t in open_checkpoint(checkpoint).tensors.items():
        kind, _, rest = name.partition(".")
        kinds.setdefault(rest.partition(".")[0] if kind == "optim" else kind, []).append(t)
    return (
        {
            "checkpoint": str(path),
            "step": checkpoint.step,
            "saved": checkpoint.created_at,
            "marks": marks(path),
            "tensors": {kind: _describe(tensors) for kind, tensors in kinds.items()},
            "files": human_bytes(sum(entry["size"] for entry in checkpoint.files.values())),
        }
        | hashed
        | state
    )


def _describe(tensors: list[Tensor]) -> str:
    values, size = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
    return f"{values:,} values, {len(tensors)} tensors, {dtypes}, {human_bytes(size)}"


# ---------------------------------------------------------------------------------------- diff


def diff_command(folder: str, *arguments: str) -> None:
    """Print the table of a resume, then refuse what a resume would refuse."""
    argv = list(arguments)
    app = choose_app(argv)
    args: RunArgs
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
    changes = check_config(saved, config, classes, allowed=list(config))
    changes += check_data(saved, data, allowed=list(data))
    nothing = f"nothing that matters differs from {saved.checkpoint.path}"
    print(printable("\n".join(changes_table(changes))) or nothing, flush=True)
    check_changes(changes, args.checkpoint.allow_change)


# ---------------------------------------------------------------------------------------- marks


def mark_command(folder: str, name: str = "keep") -> None:
    if is_url(folder):
        raise UserError(f"{folder}: the run that has it here can be marked, and uploads its marks")
    path = _newest(folder).path
    if name == BEST:
        raise UserError(f"mark {BEST}: is that of the lowest held-out loss, and put by training")
    mark_file(path, name).touch()
    print(f"{path} is marked {name}: it is kept until that is unmarked")


def unmark_command(folder: str, name: str = "keep") -> None:
    path = _newest(folder).path
    if name not in marks(path):
        raise UserError(f"{path} is not marked {name} (marks: {', '.join(marks(path)) or 'none'})")
    mark_file(path, name).unlink(missing_ok=True)
    print(f"{path} is no longer marked {name}")
