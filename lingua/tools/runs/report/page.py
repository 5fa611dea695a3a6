"""One page that shows runs, as a file that needs no network:

    python -m lingua report runs/debug
    python -m lingua report runs/rates runs/other out=rates.html
    python -m lingua report runs/rates watch=30

A folder is a run, or is searched for runs. The page has the curves of all of them, their events,
held-out losses, benchmark scores, samples, and what differs in their configs and code. With watch
it is written again and again until Ctrl-C, and an open page follows. --help lists the keys.
"""

import base64
import gzip
import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.base.format import counted, human_bytes, printable
from lingua.config.load import load
from lingua.config.schema import Free, bounds
from lingua.tools.arguments import split_folders


@dataclass
class ReportArgs:
    out: Free[str] = "report.html"  # the file that is written
    watch: Free[int | None] = None  # seconds after which it is written again; null: once

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.out.endswith(".html"):
            yield "out", "must end with .html"
        yield from bounds(self, 1, "watch", maximum=86_400)


def main(argv: list[str]) -> None:
    folders, words = split_folders(argv)
    args, _ = load(ReportArgs, words, program_doc=__doc__)
    if not folders:
        raise UserError("no folder is given; `python -m lingua report runs` shows all runs in runs")
    if args.watch is not None:
        _watch(folders, args, args.watch)
    else:
        print(printable(f"{args.out} shows {_write(folders, args)}; open it in a browser"))


def _watch(folders: list[str], args: ReportArgs, seconds: int) -> None:
    """Write the page until Ctrl-C, from when all folders have a run."""
    from lingua.tools.runs.records import NoRunError

    printed = ""  # what the last line was about
    try:
        while True:
            try:
                state, line = "shown", f"{args.out} shows {_write(folders, args)}, again"
                line += f" every {seconds} s; open it in a browser, Ctrl-C ends"
            except NoRunError as error:
                state, line = "waiting", f"{error}; waiting for a run there, Ctrl-C ends"
            if state != printed:
                print(printable(line), flush=True)
            printed = state
            time.sleep(seconds)
    except KeyboardInterrupt:
        with suppress(NoRunError):
            _write(folders, replace(args, watch=None))  # the last page does not wait for another


def _write(folders: list[str], args: ReportArgs) -> str:
    """Write the page, and return how much is in it."""
    # Imported here, since --help needs no numpy.
    from lingua.tools.runs.records import open_runs
    from lingua.tools.runs.report.content import page_content
    from lingua.tools.study.show import studies_in

    records = open_runs(folders)
    content = page_content(records, args.watch) | {"studies": studies_in(folders)}
    page, out = build_page(content), Path(args.out)
    try:
        write_atomically(out, page)
    except OSError as error:
        raise UserError(f"out = {out}: cannot be written: {error.strerror}") from None
    for problem in content["problems"]:
        print(printable(f"warning: {problem}"), file=sys.stderr)
    return f"{counted(len(records), 'run')} ({human_bytes(len(page))})"


def build_page(content: dict[str, Any]) -> str:
    """The HTML of the page, one file: a template, its style and scripts, and the content, plain
    values of finite numbers. No text of a run is ever parsed as HTML or as a script: it lies in
    base64, and the script of the page inserts it as text. The page's own policy forbids it to load
    anything."""
    payload = io.BytesIO()
    with gzip.GzipFile(fileobj=payload, mode="wb", compresslevel=6, mtime=0) as packed:
        for text in json.JSONEncoder(allow_nan=False).iterencode(content):  # never as a whole
            packed.write(text.encode())
    parts = {
        "uplot.css": _read("uplot/uPlot.min.css"),
        "page.css": _read("page.css"),
        "uplot.js": _read("uplot/uPlot.iife.min.js"),
        "charts.js": _read("charts.js"),
        "page.js": _read("page.js"),
        "payload": base64.b64encode(payload.getbuffer()).decode(),
    }
    page = _read("page.html")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def _read(name: str) -> str:
    return files("lingua.tools.runs.report").joinpath(name).read_text(encoding="utf-8")
