"""A checkpoint's folder: one per step, whole or not a checkpoint.

Tensors go through torch.distributed.checkpoint (DCP), keyed by parameter name; everything else is
`train_state.json`, one file for the run. `manifest.json` lists every file with size and checksum.
"""

import json
import re
import secrets
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from lingua.base.dump_dir import CONFIG, MANIFEST, RUN_ID, STATE, STEP_FOLDER
from lingua.base.errors import UserError
from lingua.base.files import file_size, load_json, read_bytes, read_json
from lingua.checkpoint.state import TrainState
from lingua.config.load import from_values
from lingua.parallel.mesh import on_rank_0

Entry = dict[str, Any]  # a file in the manifest: {"size": bytes, "xxh3_64": hexadecimal}
# A checkpoint's folder while it is written or removed, by the start of this number
LEFTOVER = re.compile(rf"({STEP_FOLDER.pattern})\.tmp-(?:(\d+)-)?[0-9a-f]{{8}}")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a valid manifest whose files have the sizes that it lists."""

    path: Path
    step: int
    serial: int  # order of publication, which can differ from the order of steps
    files: dict[str, Entry]  # by name
    created_at: str = ""
    # content of train_state.json and config.yaml, where this process has read them to verify them
    texts: dict[str, bytes] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Its values, which another rank makes it of."""
        return asdict(self) | {"path": str(self.path)}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Checkpoint":
        return cls(**(values | {"path": Path(values["path"])}))


def unpublished(path: Path, start: int) -> Path:
    """A name for the folder of a step, `path`, while the start of that number works on it."""
    return path.with_name(f"{path.name}.tmp-{start}-{secrets.token_hex(4)}")


def checksum_of(manifest: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "xxh3_64"}, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_checkpoint(path: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint in a folder, or None and why the folder is not one. Compares sizes too."""
    try:
        manifest = load_json(path / MANIFEST)
        if manifest["xxh3_64"] != checksum_of(manifest):
            return None, f"{MANIFEST} is damaged"
        step, serial, files = manifest["step"], manifest["serial"], manifest["files"]
        if type(step) is not int or not 0 <= step < 10**10 or type(serial) is not int:
            return None, f"{MANIFEST} must have whole numbers as step and serial"
        if not isinstance(files, dict) or not {STATE, CONFIG} <= files.keys():
            return None, f"{MANIFEST} must list {STATE} and {CONFIG} in files"
        for name, entry in files.items():
            if Path(name).name != name or not isinstance(entry["xxh3_64"], str):
                return None, f"{MANIFEST} has a wrong entry for {name}"
            size = file_size(path / name)
            if size != entry["size"]:
                return None, f"{name} has {size} bytes, its manifest lists {entry['size']}"
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return None, f"{MANIFEST} cannot be read: {error}"
    return Checkpoint(path, step, serial, files, str(manifest.get("created_at", ""))), ""


def read_state(checkpoint: Checkpoint) -> TrainState:
    """Read the fields of `train_state.json` that a resume needs. Raises UserError."""
    content = read_json(checkpoint.path / STATE, checkpoint.texts.get(STATE))
    known = TrainState.__dataclass_fields__
    values = {key: value for key, value in content.items() if key in known}
    return from_values(TrainState(), values, str(checkpoint.path / STATE))


def find(root: Path, report: Callable[[str], None] = lambda line: None) -> list[Checkpoint]:
    """The checkpoints in a folder, the last published first.

    `report` is called with a line for each folder that is skipped."""
    checkpoints = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not path.is_dir():
            continue
        if not STEP_FOLDER.fullmatch(path.name):
            report(f"{path} is not a checkpoint: skipped")
            continue
        checkpoint, why = read_checkpoint(path)
        if checkpoint is not None and checkpoint.step != int(path.name):
            why = f"its manifest is of step {checkpoint.step}"
        if checkpoint is None or why:
            report(f"{path} is not a whole checkpoint ({why}): skipped")
        else:
            checkpoints.append(checkpoint)
    return sorted(checkpoints, key=lambda c: c.serial, reverse=True)


def published(root: Path, report: Callable[[str], None]) -> list[Checkpoint]:
    """What `find` finds in the folder of a run. Raises UserError where there are checkpoints, but
    none is whole."""
    checkpoints = find(root, report)
    if not checkpoints and _has_steps(root):
        raise none_usable(root)
    return checkpoints


def none_usable(root: Path) -> UserError:
    """To start from scratch beside checkpoints would remove what may be whole (a disk that fails, a
    folder without permission)."""
    advice = "move them away to start from scratch"
    return UserError(f"{root}: has checkpoints, but none that can be used; {advice}")


def _has_steps(root: Path) -> bool:
    return any(STEP_FOLDER.fullmatch(path.name) for path in root.glob("*"))


def check_run_id(root: Path, dump_dir: Path) -> None:
    """Raise UserError where the checkpoints in `root` are those of another run than `dump_dir`'s.
    Checkpoints without an id, as of an earlier version, are any run's."""
    where = root.resolve()
    marked = next(filter(_run_id, (where, where.parent)), dump_dir)
    if _has_steps(where) and _run_id(marked) != _run_id(dump_dir):
        raise UserError(
            f"{root}: has checkpoints of another run, as {marked / RUN_ID} shows; choose another "
            "dump_dir or checkpoint.path, start from them with checkpoint.init_from, or, to go on "
            f"with them here, copy that file to {dump_dir}"
        )


def write_run_id(root: Path, dump_dir: Path) -> None:
    """Mark `dump_dir`, and `root` where it lies elsewhere, as one run's. The caller holds their
    locks. Raises OSError where a file cannot be written."""
    run_id = _run_id(dump_dir) or uuid.uuid4().hex
    outside = root.resolve().parent != dump_dir.resolve()
    for folder in (dump_dir, *[root] * outside):
        if _run_id(folder) != run_id:
            (folder / RUN_ID).write_text(run_id)


def _run_id(folder: Path) -> str:
    """The id in a folder, empty where there is none."""
    file = folder / RUN_ID
    try:
        return read_bytes(file).decode(errors="replace") if file.exists() else ""
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def find_on_rank_0(work: Callable[[], list[Checkpoint]]) -> list[Checkpoint]:
    """The checkpoints that `work` finds on rank 0. Called by every rank."""
    return list(map(Checkpoint.of_json, on_rank_0(lambda: [c.to_json() for c in work()])))
