"""What is trained, a package each, and the programs for it in apps.main."""

import sys

if sys.argv[:1] == ["-m"]:  # a program imports its packages: Ctrl-C ends it without a traceback
    report = sys.__excepthook__
    sys.excepthook = lambda kind, *error: kind is KeyboardInterrupt or report(kind, *error)

import lingua  # noqa: F401  (says how OpenMP's threads wait, before torch starts them)
