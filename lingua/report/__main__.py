"""One page that shows runs, as a file that needs no network:

    python -m lingua.report runs/debug
    python -m lingua.report runs/rates runs/other out=rates.html

A folder is a run, or is searched for runs. The page has the curves of all of them, their events,
held-out losses, benchmark scores, samples, and what differs in their configs and code. --help lists
the keys.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lingua.config.load import load
from lingua.config.schema import Free, bounds
from lingua.errors import UserError
from lingua.files import write_atomically
from lingua.format import counted, human_bytes, printable
from lingua.records import open_runs
from lingua.report.content import describe
from lingua.report.page import Arrays, build_page


@dataclass
class ReportArgs:
    out: Free[str] = "report.html"  # the file that is written
    half_life: Free[int | None] = None  # of the smoothed lines, in steps; null: a 40th of the run

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "half_life")
        if not self.out.endswith(".html"):
            yield "out", "must end with .html"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    # A run of a sweep may be a folder such as optim.lr=0.001.
    folders = [w for w in argv if not w.startswith("-") and ("=" not in w or Path(w).is_dir())]
    args, _ = load(ReportArgs, [word for word in argv if word not in folders])
    if not folders:
        raise UserError("no folder is given; `python -m lingua.report runs` shows all runs in runs")
    records = open_runs(folders)
    arrays = Arrays()
    content = describe(records, arrays, args.half_life)
    page, out = build_page(content, arrays), Path(args.out)
    try:
        write_atomically(out, page)
    except OSError as error:
        raise UserError(f"out = {out}: cannot be written: {error.strerror}") from None
    for problem in content["problems"]:
        print(printable(f"warning: {problem}"), file=sys.stderr)
    runs = counted(len(records), "run")
    print(printable(f"{out} shows {runs} ({human_bytes(len(page))}); open it in a browser"))


if __name__ == "__main__":
    from lingua.parallel.program import run_program

    run_program(main)
