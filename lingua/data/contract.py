"""Whether an app's own source of rows returns what is read of it."""

import numpy as np

from lingua.base.errors import UserError, check_array
from lingua.data.args import DataArgs
from lingua.data.rows import HeldOut, OpenData


def check_opened(opened: OpenData, args: DataArgs) -> None:
    """Raise UserError where the first rows, or what is held out, are not of the shapes and dtypes
    that are read, or rows of other sizes than `args` has."""
    rows, documents = opened.rows, opened.documents
    first, name = np.arange(min(2, args.step_rows)), type(rows).__name__
    for key in ("seq_len", "n_views"):
        if getattr(rows, key) != getattr(args, key):
            need = f"must be {getattr(rows, key)}, that of {name}"
            raise UserError(f"data.{key} = {getattr(args, key)}: {need}")
    shape = (len(first), args.row_tokens)
    check_array(f"{name}.rows", rows.rows(first), "int", shape)
    if (is_target := rows.is_target(first)) is not None:
        check_array(f"{name}.is_target", is_target, "bool", shape)
    if documents is not None:
        check_array("OpenData.documents", documents(first), "int64", shape)
    for source, windows in opened.held_out.items():
        check_held_out(source, windows, args.seq_len)


def check_held_out(name: str, windows: HeldOut, seq_len: int) -> None:
    """Raise UserError where the loss of these windows, of the source `name`, would."""
    for key in ("tokens", "targets", "documents"):
        array = getattr(windows, key)
        if array is not None or key != "documents":
            check_array(f"held-out {key} of {name}", array, "int64", (len(windows.tokens), seq_len))
    if not windows.have_text():
        raise UserError(f"held-out text of {name}: must have at least one target and one byte")
