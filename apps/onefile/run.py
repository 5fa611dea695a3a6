"""The file beside this one, for programs of lingua that launch runs:

    python -m lingua stool script=apps.onefile.run bin=data/topics.bin launcher=local
    python -m lingua study new runs/file script=apps.onefile.run bin=data/topics.bin

The run itself is a process of the file, which imports nothing of lingua.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lingua.base.errors import UserError
from lingua.config.values import plain, read_file
from lingua.parallel.program import run_program
from lingua.run.files import flat
from lingua.run.records import Record

FILE = str(Path(__file__).with_name("train.py"))


def check(argv: Sequence[str], world_size: int) -> tuple[Any, list[str]]:
    """The configuration of a run, as the file reads it, and no notices. Raises UserError."""
    names = runpy.run_path(FILE, run_name="onefile")
    try:
        config = names["read_config"](keys(argv))
    except names["Mistake"] as mistake:
        raise UserError(str(mistake)) from None
    if world_size > 1:
        raise UserError(f"{world_size} ranks: must be 1; apps/main has any number")
    tree = names["nested"]({key: value for key, value in config.items() if key != "run"})
    return make_dataclass("Config", list(tree))(**tree), []


def keys(argv: Sequence[str]) -> list[str]:
    """The words of a command line, with the keys of `config=FILE` in its place."""
    words: list[str] = []
    for word in argv:
        if word.startswith("config="):
            path = word.removeprefix("config=")
            values = flat(plain(read_file(Path(path), path)))
            words += [f"{key}={json.dumps(value)}" for key, value in values.items()]
        else:
            words.append(word)
    return words


def measure_again(run: Path) -> None:
    """Print what this file measures for the newest checkpoint of a run, of this or another one."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, "run")
        shutil.copytree(run, copy)
        end = f"stop_at={Record(copy).newest.get('step', 0)}", "seconds=null"
        words = [FILE, *keys([f"config={copy / 'config.yaml'}"]), f"dump_dir={copy}", *end]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError((done.stderr.strip().splitlines() or ["it has failed"])[-1])
    print(done.stdout.strip().splitlines()[-1])


def main() -> None:
    if sys.argv[1].startswith("again="):
        measure_again(Path(sys.argv[1].removeprefix("again=")))
    else:
        os.execv(sys.executable, [sys.executable, FILE, *keys(sys.argv[1:])])


if __name__ == "__main__":
    run_program(main)
