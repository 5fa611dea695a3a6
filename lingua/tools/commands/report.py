"""One page that shows runs, as a file that needs no network:

    python -m lingua report runs/debug
    python -m lingua report runs/rates runs/other out=rates.html

A folder is a run, or is searched for runs. The page has the curves of all of them, their events,
held-out losses, benchmark scores, samples, and what differs in their configs and code. --help lists
the keys.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.base.format import counted, human_bytes, printable
from lingua.config.load import load
from lingua.config.schema import Free
from lingua.tools.commands.arguments import split_folders


@dataclass
class ReportArgs:
    out: Free[str] = "report.html"  # the file that is written

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.out.endswith(".html"):
            yield "out", "must end with .html"


def main(argv: list[str]) -> None:
    folders, words = split_folders(argv)
    args, _ = load(ReportArgs, words, program_doc=__doc__)
    if not folders:
        raise UserError("no folder is given; `python -m lingua report runs` shows all runs in runs")
    # Imported here, since --help needs no numpy.
    from lingua.tools.runs.records import open_runs
    from lingua.tools.runs.report.content import page_content
    from lingua.tools.runs.report.page import Arrays, build_page

    records = open_runs(folders)
    arrays = Arrays()
    content = page_content(records, arrays)
    page, out = build_page(content, arrays), Path(args.out)
    try:
        write_atomically(out, page)
    except OSError as error:
        raise UserError(f"out = {out}: cannot be written: {error.strerror}") from None
    for problem in content["problems"]:
        print(printable(f"warning: {problem}"), file=sys.stderr)
    runs = counted(len(records), "run")
    print(printable(f"{out} shows {runs} ({human_bytes(len(page))}); open it in a browser"))
