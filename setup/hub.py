"""Files of the Hugging Face hub, for the two download scripts beside this file."""

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts run without install

from lingua.base.errors import UserError
from lingua.base.format import CONTROL, human_bytes
from lingua.tools.storage.fetch import download, list_remote

# Not the path of a file in a folder: a part that is empty, "." or "..", one that is a drive or a
# path of Windows, two lines.
BAD_PATH = re.compile(r"(^|/)(\.{0,2}(/|$)|[A-Za-z]:)|[\\\t\n]")


def fetch(repo: str, patterns: list[str], folder: Path) -> set[str]:
    """Download the files of `repo`, owner/name or datasets/owner/name, that match a pattern into
    `folder`, at their paths in it, which are returned. Raises UserError."""
    url = f"hf://{repo}"
    files = {file.url.removeprefix(f"{url}/"): file for file in list_remote(url)}
    wanted = {path for path in files if any(fnmatchcase(path, pattern) for pattern in patterns)}
    if not wanted:
        some = f", as {', '.join(sorted(files)[:5])}" if files else ""
        raise UserError(
            f"no file of {repo} matches {' or '.join(patterns)}: it has {len(files):,} files{some}"
        )
    for path in wanted:
        if BAD_PATH.search(path) or CONTROL.search(path):
            need = "must be the path of a file in a folder, without .., \\ and control characters"
            raise UserError(f"{repo}: has a file named {path!r}; {need}. Nothing is downloaded")
    size = human_bytes(sum(files[path].size for path in wanted))
    print(f"{repo}: {len(wanted):,} files, {size}, into {folder}")
    download([files[path] for path in sorted(wanted)], folder, url)
    return wanted
