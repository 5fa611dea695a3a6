"""The entry point of commands that read files and do not import torch; programs that train have
`lingua.parallel.program`."""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lingua.errors import UserError
from lingua.format import printable


def split_folders(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are paths, and the others: options, and `key=value`. The folder of a run of a
    sweep is a path, though its name has a `=`. Those of `--help GROUP` are no paths."""
    if {"-h", "--help"} & set(argv):
        return [], list(argv)
    folders: list[str] = []
    words: list[str] = []
    for word in argv:
        is_key = word[:1] == "-" or re.fullmatch(r"[\w.]+=.*", word, re.DOTALL)
        (words if is_key and not Path(word).is_dir() else folders).append(word)
    return folders, words


def run_command(command: Callable[[], None]) -> NoReturn:
    """Run `command` and exit: with code 2 and one message after a mistake of the user."""
    code = 0
    try:
        command()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # the reader of stdout, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)
