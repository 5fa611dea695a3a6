"""What is trained, a package each, and the programs for it in apps.main."""

import sys
from types import TracebackType


def hide_interrupts(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an exception that nothing caught, unless it is that of Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # Python imports the packages of a program, which takes seconds
    sys.excepthook = hide_interrupts
