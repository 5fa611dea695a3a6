"""The one exception for a mistake of the user, the hint that names the nearest valid word, and
optional packages."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lingua.base.format import printable, without_secrets

MAX_SHOWN = 50  # mistakes listed in one message


class UserError(Exception):
    """A mistake of the user. The message is complete: it names the key or file, the value
    and what is allowed. It may quote any file: it is `printable`, and a long line loses its middle.

    The entry points print it once, on one rank, without a traceback, and exit with its code. Ranks
    meet a mistake together; one that only this machine has is `local`.
    """

    def __init__(self, message: str, local: bool = False, exit_code: int = 2) -> None:
        text = printable(without_secrets(message))
        super().__init__(re.sub("(.{1000}).{99,}(.{500})", r"\1 ... \2", text))
        self.local, self.exit_code = local, exit_code

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython, and so a notebook, shows in place of a traceback."""
        return [f"error: {self}"]


def all_of(mistakes: Sequence[str]) -> UserError:
    """One error for all mistakes in a configuration, with their number if there are several."""
    if len(mistakes) == 1:
        return UserError(mistakes[0])
    shown = [f"{len(mistakes)} mistakes in the configuration:", *mistakes[:MAX_SHOWN]]
    shown += ["..."] if len(mistakes) > MAX_SHOWN else []
    return UserError("\n  ".join(shown))


def check_array(
    what: str, value: Any, dtype: str, shape: Sequence[int | None], on_host: bool = False
) -> None:
    """Raise UserError where `value`, which a part of an app has returned, is not a tensor or array
    of this dtype (`a or b` is either, `int` any of whole numbers) and shape, where None is any
    size. `what` names it."""
    sizes, came = getattr(value, "shape", None), str(getattr(value, "dtype", ""))
    came = came.removeprefix("torch.")
    fits = came in dtype.split(" or ") or (dtype == "int" and came.startswith(("int", "uint")))
    fits &= sizes is not None and len(sizes) == len(shape)
    fits &= not on_host or value.device.type in ("cpu", "meta")
    if not fits or any(n not in (None, size) for n, size in zip(shape, sizes or (), strict=True)):
        shown = type(value).__name__ if sizes is None else f"{came} {list(sizes)}"
        shown += f" on {value.device}" if on_host and sizes is not None else ""
        need = ", ".join("any" if n is None else str(n) for n in shape)
        raise UserError(f"{what}: {shown}; must be {dtype} [{need}]{' on the CPU' * on_host}")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """` (did you mean "x"?)` for the allowed word closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f' (did you mean "{match[0]}"?)' if match else ""


def import_optional(module: str, needed_by: str) -> Any:
    """A module of a package that not every installation has. Raises UserError, which begins with
    what it is `needed_by`."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        advice = f"which is not installed (pip install {package})"
        raise UserError(f"{needed_by} needs the Python package {package}, {advice}") from None


@contextmanager
def tool_needed_by(what: str) -> Iterator[None]:
    """Around the import of a module of lingua.tools: training on prepared shards does without.
    Raises UserError, which begins with `what`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("lingua.tools"):
            raise
        raise UserError(f"{what} needs {error.name}, which is not installed here") from None
