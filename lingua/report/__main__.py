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

from lingua.command import run_command, split_folders
from lingua.config.load import load
from lingua.config.schema import Free
from lingua.errors import UserError
from lingua.files import write_atomically
from lingua.format import counted, human_bytes, printable
from lingua.records import open_runs
from lingua.report.content import describe
from lingua.report.page import Arrays, build_page


@dataclass
class ReportArgs:
    out: Free[str] = "report.html"  # the file that is written

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.out.endswith(".html"):
            yield "out", "must end with .html"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    folders, words = split_folders(argv)
    args, _ = load(ReportArgs, words)
    if not folders:
        raise UserError("no folder is given; `python -m lingua.report runs` shows all runs in runs")
    records = open_runs(folders)
    arrays = Arrays()
    content = describe(records, arrays)
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
    run_command(main)
