"""Check a run: compute some of its steps again on this machine, and compare with what it recorded.

    python -m lingua audit runs/debug
    python -m lingua audit runs/debug steps=11..30 device=cpu
    python -m lingua audit runs/debug run=false
    python -m lingua audit runs/debug by=apps/onefile/train.py
    torchrun --nproc-per-node 2 -m lingua audit runs/debug sample=1

A segment begins at a checkpoint and is computed by the training program, or by a file of another
implementation, in a temporary folder (of TMPDIR). Each line that the config makes due is compared,
held-out losses too, and all tensors with those of the next checkpoint. Other keys go to the
training program, over the run's own. Nothing is written into the run's folder, unless record=true
asks for it. Exit code: 0 where all is equal, to the bit, or up to rounding where the run did not
promise bits; 1 where something differs; 2 where it cannot be compared.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.config.load import load
from lingua.parallel.environment import detect_launch
from lingua.tools.arguments import split_folders
from lingua.tools.audit.args import AuditArgs


def arguments(argv: Sequence[str]) -> tuple[Path, AuditArgs, list[str]]:
    """(dump dir, keys of the audit, keys of the training program). Raises UserError."""
    folders, words = split_folders(argv)
    names = {f.name for f in fields(AuditArgs)}
    keys = [w for w in words if re.split("=", w)[0] in names or w.startswith("-")]
    args, _ = load(AuditArgs, [*keys, *(folders if "--help" in argv else [])], program_doc=__doc__)
    if len(folders) != 1:
        raise UserError("usage: python -m lingua audit RUN [key=value ...]")
    others = [word for word in words if word not in keys]
    if others and not args.run:
        raise UserError(f"{others[0]}: must not be given with run = false, which computes nothing")
    return Path(folders[0]), args, others


def main(argv: Sequence[str]) -> None:
    folder, args, words = arguments(argv)
    from lingua.tools.audit.run import audit  # imported here, since --help needs no torch

    def say(line: str) -> None:
        if rank == 0:
            print(printable(line), flush=True)

    rank = detect_launch().rank
    code = audit(folder, args, words, say)
    sys.exit(code if rank == 0 else 0)
