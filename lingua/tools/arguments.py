"""What several commands read from their command lines alike."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lingua.base.dump_dir import CONFIG
from lingua.base.errors import UserError
from lingua.config.help import asks_help, print_help_if_asked

if TYPE_CHECKING:
    from lingua.app import App

C = TypeVar("C")


def split_folders(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are paths, and the others: options, and `key=value`. The folder of a run of a
    sweep is a path, though its name has a `=`. Those of `--help GROUP` are no paths."""
    if asks_help(argv):
        return [], list(argv)
    folders: list[str] = []
    words: list[str] = []
    for word in argv:
        is_key = word[:1] == "-" or re.fullmatch(r"[\w.]+=.*", word, re.DOTALL)
        (words if is_key and not Path(word).is_dir() else folders).append(word)
    return folders, words


def split_run(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """(dump dir of the run that a command line names, if it names one, its other words, of which
    `config=` is then that run's). Raises UserError."""
    folders, words = split_folders(argv)
    if not folders:
        return None, words
    if len(folders) > 1 or any(word.startswith("config=") for word in words):
        raise UserError(f"{', '.join(folders)}: must be one dump dir of a run, or else config=FILE")
    run = Path(folders[0])
    config = run / CONFIG
    if not config.is_file():
        raise UserError(f"{run}: must be the dump dir of a run, with its {CONFIG}")
    return run, [f"config={config}", *words]


def load_data(cls: type[C], words: list[str], program_doc: str | None) -> "tuple[App, C]":
    """(app, the part `cls` of its configuration) of a command line; `cls` has the group `data`.
    Where help is asked for it is printed, without importing an app. Notices go to stderr. Raises
    UserError."""
    print_help_if_asked(cls, words, program_doc)
    from lingua.app import choose_app  # imports torch
    from lingua.checkpoint.run_config import load_run

    app = choose_app(words)
    args, notices = load_run(app, words, cls(**{"data": app.config().data}), program_doc)
    for line in notices:
        print(line, file=sys.stderr, flush=True)
    return app, args
