"""A table of runs, launched or plain, finished or not, found below the given folders:

    python -m lingua runs runs
    python -m lingua runs runs/a runs/b sort=heldout filter="state=running,optim.lr>1e-3"
    python -m lingua runs runs seeds=true --csv
    python -m lingua runs runs watch=5

Its columns are the config keys in which the runs differ, the state, the step, the held-out loss of
all sources in nats per byte, the smoothed training loss, tokens/s and the time left.
--csv and --json print all of it for programs, the numbers with all digits. With watch the table is
printed again in place until Ctrl-C.
"""

import csv
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lingua.base.errors import UserError
from lingua.base.format import counted, printable
from lingua.config.load import load
from lingua.config.schema import Free, bounds
from lingua.config.values import show
from lingua.tools.arguments import split_folders

if TYPE_CHECKING:
    from lingua.run.records import Record

MAX_PROBLEMS = 10  # lines about files that could not be read


@dataclass
class RunsArgs:
    # column or config key to sort by, with a minus for the largest first; null: by folder
    sort: Free[str | None] = None
    # runs to show, by columns and config keys: filter="state=running,optim.lr>=1e-3"
    filter: Free[str | None] = None
    seeds: Free[bool] = False  # one line for the runs that differ only in their seed
    sources: Free[bool] = False  # the held-out loss of each source too
    # config keys to show; null: those that differ between the runs, at most eight in the table
    columns: Free[list[str] | None] = None
    watch: Free[int | None] = None  # seconds after which the table is printed again; null: once

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "watch", maximum=86_400)


def arguments(argv: Sequence[str]) -> tuple[list[str], RunsArgs, str]:
    """(folders, keys, `--csv`, `--json` or empty) of a command line. Raises UserError."""
    folders, words = split_folders(argv)
    form = [word for word in words if word in ("--csv", "--json")]
    args, _ = load(RunsArgs, [word for word in words if word not in form], program_doc=__doc__)
    if args.watch is not None and form:
        raise UserError(f"watch = {args.watch}: refreshes the table; leave it out with {form[0]}")
    if not folders or len(form) > 1:
        raise UserError("usage: python -m lingua runs DIR... [key=value ...] [--csv | --json]")
    return folders, args, "".join(form)


def main(argv: Sequence[str]) -> None:
    folders, args, form = arguments(argv)
    if args.watch is None:
        print_runs(folders, args, form)
        return
    try:
        while True:
            text = io.StringIO()
            with redirect_stdout(text), redirect_stderr(text):
                print_runs(folders, args, form)
            print_in_place(f"{datetime.now():%H:%M:%S}, again every {args.watch} s; Ctrl-C ends\n"
                           + text.getvalue())  # fmt: skip
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return


def print_in_place(text: str) -> None:
    """Over what the terminal shows, and not more than it has room for; elsewhere below it."""
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    width, height = os.get_terminal_size(sys.stdout.fileno())
    lines = text.splitlines()
    rows = accumulate(max(1, -(-len(line) // width)) for line in lines)  # a long line is wrapped
    n = sum(row < height - 1 for row in rows)
    hidden = counted(len(lines) - n, "more line")
    shown = lines if n == len(lines) else [*lines[:n], f"{hidden}: a larger terminal, or filter="]
    print("\x1b[H\x1b[J" + "\n".join(shown), end="", flush=True)


def print_runs(folders: Sequence[str], args: RunsArgs, form: str) -> None:
    """The table, or with a `form` all of it for programs."""
    # Imported here, since --help needs no numpy.
    from lingua.tools.runs import table
    from lingua.tools.runs.records import open_runs
    from lingua.tools.runs.settings import differing

    records = open_runs(folders, table.TAIL_BYTES)
    rows = [table.row_of(record) for record in records]
    keys = differing(records)
    if args.seeds:
        rows, keys = table.over_seeds(records, rows), [key for key in keys if key != "seed"]
    if args.columns is not None:
        keys = [table.key_of(rows, name, "columns") for name in args.columns]
    if args.sort is not None:  # before the filter, which may leave no row whose keys are known
        rows = table.ordered(rows, args.sort)
    if args.filter is not None:
        rows = table.chosen(rows, args.filter)
    if form == "--json":
        print(json.dumps(list(table.entries(rows, keys)), indent=1, default=str))
    elif form == "--csv":
        print_csv(list(table.entries(rows, keys)))
    else:
        shown = keys if args.columns is not None else table.shown_keys(keys)
        print(table.table(rows, shown, args.sources))
        if hidden := [key for key in keys if key not in shown]:
            print(f"{counted(len(hidden), 'more key')} differ (columns=[...] chooses): "
                  + printable(", ".join(hidden)))  # fmt: skip
    report_problems(records)


def report_problems(records: "Iterable[Record]") -> None:
    """Print to stderr what could not be read."""
    problems = [problem for record in records for problem in record.problems]
    for problem in problems[:MAX_PROBLEMS]:
        print(f"warning: {printable(problem)}", file=sys.stderr)
    if len(problems) > MAX_PROBLEMS:
        print(f"warning: {len(problems) - MAX_PROBLEMS:,} more of this kind", file=sys.stderr)


def print_csv(lines: Sequence[Mapping[str, Any]]) -> None:
    def encodable(cell: Any) -> Any:  # half a surrogate pair, which UTF-8 lacks, as \ud800
        text = show(cell) if isinstance(cell, list | dict) else cell
        return text.encode(errors="backslashreplace").decode() if isinstance(text, str) else text

    names = dict.fromkeys(name for line in lines for name in line)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(encodable, names))
    for line in lines:
        writer.writerow([encodable(line.get(name, "")) for name in names])
