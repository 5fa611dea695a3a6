"""Hostile configs and command lines of every program."""

import os
import sys
from pathlib import Path

import pytest

from apps.main.check import check
from apps.main.config import TrainArgs
from apps.main.eval import EvalArgs
from apps.main.generate import GenerateArgs
from lingua.config.load import load, meta_lingua
from lingua.config.schema import schema
from lingua.tools.commands import stool as stool_command
from lingua.tools.commands.data_prepare import PrepareArgs
from lingua.tools.commands.data_show import ShowArgs
from lingua.tools.exchange.convert import ConvertArgs
from lingua.tools.slurm import launch
from tests.mutation import change_bytes, fuzz, hostile_argument

DEBUG = Path("apps/main/configs/debug.yaml")


def stool(argv: list[str]) -> None:
    stool_command.main(["launcher=print", *argv])


PROGRAMS = [
    (TrainArgs, lambda argv: load(TrainArgs, argv, meta_lingua)),
    (TrainArgs, lambda argv: check(argv, 2)),
    (launch.JobArgs, stool),
    *((cls, lambda argv, cls=cls: load(cls, argv)) for cls in (GenerateArgs, EvalArgs)),
    *((cls, lambda argv, cls=cls: load(cls, argv)) for cls in (ConvertArgs, ShowArgs)),
    (PrepareArgs, lambda argv: load(PrepareArgs, argv, meta_lingua, partial=True)),
]


def special_files(folder: Path) -> list[Path]:
    """What a `config=` or a `base:` may name by mistake."""
    texts = {"self": "base: self\n", "of_fifo": "base: fifo\n", "empty": ""}
    texts["zeros"] = "\0" * (2 << 20)
    texts["many"] = "".join(f"k{i}: 1\n" for i in range(20_000))
    for name, text in texts.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "unreadable").write_bytes(bytes(range(256)))
    names = [*texts, "fifo", "folder", "zero", "loop", "unreadable", "x" * 300, "\x1b[31m"]
    return [folder / name for name in names]


@pytest.mark.soak
def test_every_config_and_command_line_is_accepted_or_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    specials, changed = special_files(tmp_path), tmp_path / "changed.yaml"
    names = ["config=", "argument", "unknown key", "sweep.", str(tmp_path)]
    names += {key for cls, _ in PROGRAMS for key in schema(cls)}

    def make(draw):
        cls, program = draw.choice(PROGRAMS)
        changed.write_bytes(change_bytes(DEBUG.read_bytes(), draw))
        keys = list(schema(cls))
        if cls is launch.JobArgs:
            keys += [*schema(TrainArgs), *(f"sweep.{key}" for key in schema(TrainArgs))]
        argv = [f"config={draw.choice([DEBUG, DEBUG, changed, draw.choice(specials)])}"]
        argv = argv * draw.randint(0, 1)
        argv += [hostile_argument(draw, keys) for _ in range(draw.randint(0, 3))]
        return lambda: program(argv), names

    fuzz(make, 60)
