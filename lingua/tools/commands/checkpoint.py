"""Commands for checkpoints:

    python -m lingua checkpoint show DIR             what it contains
    python -m lingua checkpoint diff DIR config=FILE [key=value ...] [app=MODULE]
                                                     what resuming it would change, or refuse
    python -m lingua checkpoint mark DIR [NAME]      keep it until it is unmarked
    python -m lingua checkpoint unmark DIR [NAME]

DIR is a checkpoint, or a folder of checkpoints or a dump dir, whose newest is taken. `python -m
lingua convert` makes one of a model in another form, and the other way round.
"""

from inspect import signature

from lingua.base.errors import UserError, nearest
from lingua.config.help import asks_help

COMMANDS = ("show", "diff", "mark", "unmark")


def main(argv: list[str]) -> None:
    if not argv or asks_help(argv):
        print(str(__doc__).strip())
        return
    name, *words = argv
    if name not in COMMANDS:
        raise UserError(f"{name}: must be one of {', '.join(COMMANDS)}{nearest(name, COMMANDS)}")
    from lingua.tools.inspect import checkpoint  # imported here, since it imports torch

    command = getattr(checkpoint, f"{name}_command")
    try:
        signature(command).bind(*words)
    except TypeError as error:
        raise UserError(f"{name}: {error}; --help shows what it takes") from None
    command(*words)
