"""Runs a program on the stub driver and prints, step by step, which of its lines made the host wait
for a device, made a context on one, copied or communicated; with --json also sums of launches.

    tests/ghost/run DIR python -m tests.ghost.trace [OPTION ...] -- [KEY=VALUE ...]
    tests/ghost/run DIR torchrun --nproc-per-node 2 -m tests.ghost.trace ...
"""

import argparse
import ctypes
import functools
import importlib
import json
import os
import runpy
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MODULE, MARKER = "apps.main.train", "lingua.monitor.profiling:Unprofiled.step"
COUNTS = ("launches", "matrix products", "cudaMalloc", "cudaFree")  # in the order of ghost.cpp
ROOT = os.getcwd() + os.sep
LIBRARIES = tuple(
    path + os.sep
    for path in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), sys.prefix)
)


class Event(NamedTuple):
    """A call of the driver that waits, copies, pins, makes a context or communicates."""

    what: str
    line: str  # of the program, the innermost first
    thread: str  # "" for the main one and those of a backward pass


class Recorder:
    """Events by phase: the first is what precedes step 1, each other one is a step."""

    def __init__(self, library: ctypes.CDLL, depth: int) -> None:
        self.library, self.depth = library, depth
        self.phases: list[dict[Event, list[int]]] = [{}]  # {event: [calls, bytes]} of each
        self.totals = [self._totals()]  # COUNTS at the begin of each phase
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_long)
        self.callback = kind(self._record)  # kept: the library calls it
        library.ghost_report(self.callback)

    def _record(self, what: bytes, device: int, n_bytes: int) -> None:
        thread = threading.current_thread()  # a dummy is not Python's own: a backward pass
        main = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
        text = what.decode() + (f" on cuda:{device}" if what.startswith(b"context") else "")
        event = Event(text, caller(self.depth), "" if main else thread.name)
        calls = self.phases[-1].setdefault(event, [0, 0])
        calls[0] += 1
        calls[1] += n_bytes

    def _totals(self) -> list[int]:
        counts = (ctypes.c_long * len(COUNTS))()
        self.library.ghost_counts(counts)
        return list(counts)

    def next_phase(self) -> None:
        self.totals.append(self._totals())
        self.phases.append({})

    def end(self) -> list[dict[str, Any]]:
        """What each phase did: its events, and how much COUNTS grew."""
        self.library.ghost_report(None)
        self.totals.append(self._totals())
        return [
            {"events": [{**e._asdict(), "calls": n, "bytes": size} for e, (n, size) in p.items()]}
            | {name: b - a for name, a, b in zip(COUNTS, *self.totals[i : i + 2], strict=True)}
            for i, p in enumerate(self.phases)
        ]


@functools.cache
def place(file: str) -> tuple[bool, str]:
    """Whether a file is the program's own, and how it is shown."""
    path = os.path.abspath(file)
    own = path.startswith(ROOT) and not path.startswith(LIBRARIES) and path != __file__
    if own and not file.startswith("<"):
        return True, path.removeprefix(ROOT)
    return False, functools.reduce(str.removeprefix, LIBRARIES, path)


def caller(depth: int) -> str:
    """The innermost lines of the program on this thread's stack, else other lines in brackets."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    frame = sys._getframe(2)
    while frame is not None:
        own, shown = place(frame.f_code.co_filename)
        lines[own].append(f"{shown}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines[True][:depth]) or f"[{' < '.join(lines[False][:depth])}]"


def before_each_call(name: str, begin: Callable[[], None]) -> None:
    """Call `begin` before each call of `package.module:Class.method`."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, last)

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        begin()
        return original(*args, **kwargs)

    setattr(owner, last, marked)


def report(phases: list[dict[str, Any]]) -> Iterator[str]:
    """A line of each event, for people: the step (0: before the first), calls, bytes and place."""
    for step, phase in enumerate(phases):
        for e in phase["events"]:
            numbers = f"{e['calls']:6d}  {e['what']:28s} {e['bytes']:>14,} B"
            yield f"{step:5d} {numbers}  {e['line']} {e['thread']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ghost.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-m", dest="module", default=MODULE, help=f"the program ({MODULE})")
    add("--step", metavar="MODULE:NAME", default=MARKER, help=f"begins a step ({MARKER})")
    add("--rank", type=int, default=0, help="under torchrun: the rank that is traced (0)")
    add("--depth", type=int, default=2, help="lines of the program shown for an event (2)")
    add("--json", type=Path, metavar="FILE", help="write the events here too")
    add("arguments", nargs="*", metavar="key=value", help="of the program")
    options = parser.parse_args()
    library = ctypes.CDLL(None)
    if not hasattr(library, "ghost_report"):
        sys.exit("trace: this process has no stub driver; start it with tests/ghost/run DIR")
    recorder = None
    if int(os.environ.get("RANK", 0)) == options.rank:
        recorder = Recorder(library, options.depth)
        before_each_call(options.step, recorder.next_phase)
    sys.argv = [options.module, *options.arguments]
    try:
        runpy.run_module(options.module, run_name="__main__", alter_sys=True)
    finally:
        if recorder is not None:
            phases = recorder.end()
            print("\n".join(report(phases)), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(phases, indent=1))


if __name__ == "__main__":
    main()
