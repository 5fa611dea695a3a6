"""Random changes to every file that is read of a checkpoint or a model of anybody: each is accepted
or refused by a message that names the file or the key. No traceback, no hang, bounded memory.

The changes follow from SEED. Manifests fit the changed files, as if somebody had forged them.
"""

import json
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lingua import convert
from lingua.app import find_app
from lingua.checkpoint.__main__ import main
from lingua.checkpoint.resume import find_start
from lingua.checkpoint.retention import CheckpointArgs
from lingua.errors import UserError
from lingua.hugging_face import open_weights
from lingua.inference.trained import open_trained
from lingua.parallel.launch import one_process
from tests.checkpoint.test_foreign import SAMPLE, STEP
from tests.checkpoints import resign, write_manifest

pytestmark = pytest.mark.soak

SEED = 14
BUDGET_S = 5.0  # of each kind of file
CASE_S = 20  # in which a case must be answered
MEMORY = 2 << 30  # bytes that all cases together may add

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e300, -0.5, "", "x", "../../x", "/dev/zero",
    "\x1b[31m", "${oc.env:HOME}", "${", "\x00", [], {}, [[]], {"a": 1}, "9" * 5000, list(range(99)),
]  # fmt: skip


def a_value(draw: random.Random) -> Any:
    return deepcopy(draw.choice(VALUES))


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value of dicts and lists, and attributes of objects."""
    pairs: Any = ()
    if isinstance(tree, dict):
        pairs = list(tree.items())
    elif isinstance(tree, list):
        pairs = list(enumerate(tree))
    elif hasattr(tree, "__dict__") and not isinstance(tree, type):
        tree = vars(tree)
        pairs = list(tree.items())
    for key, value in pairs:
        yield tree, key
        yield from places_in(value)


def change_tree(tree: Any, draw: random.Random) -> Any:
    """A value replaced, removed or put under another name, one to three times."""
    for _ in range(draw.randint(1, 3)):
        places = list(places_in(tree))
        if not places:
            break
        container, key = draw.choice(places)
        how = draw.random()
        if how < 0.7:
            container[key] = a_value(draw)
        elif how < 0.9:
            del container[key]
        elif isinstance(container, dict):
            container[f"{key}_"] = container.pop(key)
    return tree if draw.random() < 0.97 else a_value(draw)


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, cut out, repeated or inserted, a few times."""
    changed = bytearray(content)
    # Half of the changes are near the begin, where headers are.
    span = len(changed) if draw.random() < 0.5 else min(len(changed), 400)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, n = draw.randrange(span + 1), draw.choice((1, 4, 50))
        how = draw.randrange(5)
        if how == 0:
            changed[at : at + 1] = bytes([draw.randrange(256)])
        elif how == 1:
            del changed[at : at + n]
        elif how == 2:
            changed[at:at] = changed[at : at + n]
        elif how == 3:
            changed[at:at] = draw.choice((b"\xff" * n, bytes(n), b"[" * 5000, b"r\0\0\0\x7f"))
        else:
            del changed[at + 200 * n :]
    return bytes(changed)


def change_file(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    if draw.random() < 0.5 or path.suffix in (".distcp", ".pth"):
        path.write_bytes(change_bytes(content, draw))
    elif path.name == ".metadata":
        with suppress(AttributeError, TypeError, RuntimeError):  # what does not pickle
            path.write_bytes(pickle.dumps(change_tree(pickle.loads(content), draw)))
    elif path.suffix == ".safetensors":
        n = int.from_bytes(content[:8], "little")
        header = json.dumps(change_tree(json.loads(content[8 : 8 + n]), draw)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + n :])
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(change_tree(yaml.safe_load(content), draw)))
    else:
        tree = change_tree(json.loads(content), draw)
        path.write_text(json.dumps(tree))
        if path.name == "manifest.json" and isinstance(tree, dict):
            write_manifest(path.parent, tree)


# ---------------------------------------------------------------------------- what is checked


@contextmanager
def bounded() -> Iterator[None]:
    """Fails where memory grows too much, also where that is an error inside."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + MEMORY // 1024


def check(case: str, folder: Path, programs: list[Callable[[], Any]]) -> int:
    """How many of the programs refuse the folder."""

    def too_long(*_: Any) -> None:
        raise TimeoutError(case)

    refused = 0
    signal.signal(signal.SIGALRM, too_long)
    for program in programs:
        signal.alarm(CASE_S)
        try:
            program()
        except UserError as error:
            told = str(error)
            none_left = f"{folder.parent}: has checkpoints, but none that can be used"
            named = (str(folder), none_left, "in the checkpoint, ", "data.tokenizer.")
            assert any(name in told for name in named), f"{case}: {told}"
            assert "MemoryError" not in told and len(told) < 20_000, f"{case}: {told}"
            refused += 1
        except Exception as error:
            raise AssertionError(case) from error
        finally:
            signal.alarm(0)
    return refused


def fuzz(
    original: Path, names: list[str], folder: Path, programs: list[Callable[[], Any]], signed: bool
) -> None:
    """Change one of the files `names` of a copy at `folder` at a time, until the time is over."""
    assert check("unchanged", folder, programs) == 0
    end, case, refused = time.monotonic() + BUDGET_S * len(names), 0, 0
    with bounded():
        while time.monotonic() < end:
            draw, name = random.Random(f"{SEED} {original} {case}"), names[case % len(names)]
            change_file(folder / name, draw)
            if signed and name != "manifest.json":
                resign(folder)
            some = draw.sample(programs, min(3, len(programs)))
            refused += check(f"{name}, case {case}", folder, some)
            shutil.rmtree(folder)
            shutil.copytree(original, folder)
            case += 1
    assert case > 5 * len(names) and refused > case / 10, (case, refused)
    print(f"{case} cases of {', '.join(names)}, {refused} refusals")


def export_to(source: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    convert.main([f"source={source}", f"out={out}", "tokenizer.name=bytes"])


def convert_to(source: Path, out: Path) -> None:
    """`out` is the folder of what is written."""
    shutil.rmtree(out, ignore_errors=True)
    main(["convert", str(source), str(out / "made")])


def start_in(root: Path, **settings: Any) -> None:
    with one_process():
        find_start(root, CheckpointArgs(**settings), ["seed", "data.sources", "model.dim"])


def test_any_change_of_a_checkpoint_is_accepted_or_refused_by_name(tmp_path: Path) -> None:
    original, config = SAMPLE / "run/checkpoints" / STEP, f"config={SAMPLE / 'config.yaml'}"
    folder = shutil.copytree(original, tmp_path / "root" / STEP)
    programs = [
        lambda: main(["show", str(folder)]),
        lambda: main(["diff", str(folder), config]),
        lambda: convert_to(folder, tmp_path / "file"),
        lambda: export_to(folder, tmp_path / "hf"),
        lambda: open_trained("ckpt", str(folder), None),
        lambda: start_in(folder.parent),
        lambda: start_in(tmp_path / "none", init_ckpt_path=str(folder), verify="size"),
    ]
    names = [".metadata", "train_state.json", "manifest.json", "config.yaml", "__0_0.distcp"]
    fuzz(original, names, folder, programs, signed=True)


def test_any_change_of_another_programs_model_is_accepted_or_refused_by_name(
    tmp_path: Path,
) -> None:
    """Of a folder of transformers, of Meta Lingua's, and of a file of torch.save."""
    sample = SAMPLE / "run/checkpoints" / STEP
    export_to(sample, tmp_path / "original")
    hf = shutil.copytree(tmp_path / "original", tmp_path / "hf")
    app, model = find_app(None, ""), open_trained("ckpt", str(sample), None).args.model
    programs: list[Callable[[], Any]] = [
        lambda: export_to(hf, tmp_path / "out"),
        lambda: open_weights(app, str(hf), model, []),
    ]
    fuzz(tmp_path / "original", ["config.json", "model.safetensors"], hf, programs, signed=False)

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        shutil.copy(sample / name, theirs)
    config = yaml.safe_load((sample / "config.yaml").read_text())
    (theirs / "params.json").write_text(json.dumps(config))
    (theirs / "train_state_00000.json").write_text(json.dumps({"step": 6, "acc_step": 0}))
    folder = shutil.copytree(theirs, tmp_path / "lingua")
    programs = [
        lambda: convert_to(folder, tmp_path / "file"),
        lambda: start_in(
            tmp_path / "none", init_ckpt_path=str(folder), continue_training_from_init=True
        ),
    ]
    names = [".metadata", "params.json", "train_state_00000.json"]
    fuzz(theirs, names, folder, programs, signed=False)

    files = tmp_path / "files"
    files.mkdir()
    main(["convert", str(sample), str(files / "model.pth")])
    copy = shutil.copytree(files, tmp_path / "copy")
    programs = [
        lambda: convert_to(copy / "model.pth", tmp_path / "file"),
        lambda: start_in(tmp_path / "none", init_ckpt_path=str(copy / "model.pth")),
    ]
    fuzz(files, ["model.pth"], copy, programs, signed=False)
    for content in VALUES + [{"model": v} for v in VALUES] + [{"model": {"a": v}} for v in VALUES]:
        torch.save(content, copy / "model.pth")
        check(repr(content)[:80], copy, programs)
    for key in ("step", "config"):
        for value in VALUES:
            torch.save({"model": {"a": torch.ones(2)}, key: value}, copy / "model.pth")
            check(f"{key} {value!r}"[:80], copy, programs)


def test_the_program_ends_with_one_line_and_code_2_and_quietly_where_its_reader_leaves(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(SAMPLE / "run/checkpoints" / STEP, tmp_path / STEP)
    command = f"{sys.executable} -m lingua.checkpoint show"
    done = subprocess.run(
        ["bash", "-c", f"{command} {folder} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("141\n", "")
    (folder / ".metadata").write_bytes(pickle.dumps("\x1b[31m"))
    resign(folder)
    done = subprocess.run(
        [*command.split(), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {folder / '.metadata'} cannot be read")
