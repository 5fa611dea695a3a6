"""The entry point of commands that read files and do not import torch; programs that train have
`lingua.parallel.program`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from lingua.errors import UserError
from lingua.format import printable


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
