"""Files of the Hugging Face hub, for the two download scripts beside this file.

A download is retried as long as waiting may help, and one that was stopped resumes with the files
that are missing. The only token used is the environment's HF_TOKEN; no message contains it.
"""

import errno
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts run without install

from lingua.base.errors import UserError
from lingua.base.format import CONTROL, printable

T = TypeVar("T")

PAUSES_S = (1, 2, 4, 8, 16, 32, 64)  # seconds before each new attempt
RETRIED_STATUS = {408, 425, 429}  # client errors; every error of the server is retried
# Errors of the HTTP library, httpx or httpx2, about an address that another one redirects to
NOT_RETRIED = {"InvalidURL", "UnsupportedProtocol", "TooManyRedirects"}
# Not the path of a file in a folder: a part that is empty, "." or "..", one that is a drive or a
# path of Windows, two lines.
BAD_PATH = re.compile(r"(^|/)(\.{0,2}(/|$)|[A-Za-z]:)|[\\\t\n]")
WORKERS = 8  # files downloaded at the same time


def run_script(main: Callable[[], None]) -> None:
    """The outermost frame: a UserError is one message and exit code 2."""
    try:
        main()
    except UserError as error:
        report(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        report("stopped; the same command resumes the download")
        sys.exit(130)
    except Exception:
        report(traceback.format_exc())
        sys.exit(1)


def report(text: str) -> None:
    """Print a message, which may quote the library or the hub, without the token."""
    token = os.environ.get("HF_TOKEN", "").strip()
    text = text.replace(token, "<HF_TOKEN>") if token else text
    print(printable(text), file=sys.stderr, flush=True)


def hub_token() -> str | None:
    """HF_TOKEN without the blanks around it, None where it is not set. Raises UserError."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            "HF_TOKEN: must be a token of the hub, one word of ASCII characters; the value of this "
            "environment variable is another text"
        )
    return token or None


def fetch(repo: str, patterns: list[str], folder: Path, kind: str) -> dict[str, int]:
    """Download the files of `repo` that match a pattern into `folder`, at their paths in it.

    `kind` is "model" or "dataset". Returns the size in bytes of each by its path, all of them
    checked against what the hub lists. Raises UserError.
    """
    hub = _library()
    from huggingface_hub.utils import filter_repo_objects

    token = hub_token() or False  # False: the token of a stored login is not used either
    api = hub.HfApi(token=token)

    def listed() -> tuple[str, dict[str, int]]:
        revision = api.repo_info(repo, repo_type=kind).sha
        tree = api.list_repo_tree(repo, repo_type=kind, revision=revision, recursive=True)
        return revision, {str(f.path): f.size for f in tree if isinstance(f, hub.RepoFile)}

    def explain(error: Exception) -> str:
        return _explain(error, repo, kind, folder)

    revision, sizes = retry(repo, listed, explain)
    wanted = {path: sizes[path] for path in filter_repo_objects(sizes, allow_patterns=patterns)}
    if not wanted:
        some = f", as {', '.join(sorted(sizes)[:5])}" if sizes else ""
        raise UserError(
            f"no file of {repo} matches {' or '.join(patterns)}: it has {len(sizes):,} files{some}"
        )
    _check_listing(repo, revision, wanted)
    _check_space(wanted, folder)

    def downloaded() -> None:
        before = {path: _inode(folder / path) for path in _missing(wanted, folder)}
        hub.snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            local_dir=folder,
            allow_patterns=patterns,
            token=token,
            max_workers=WORKERS,
        )
        missing = _missing(wanted, folder)
        for path in missing:
            if _inode(folder / path) not in (None, before.get(path)):
                size = (folder / path).stat().st_size
                (folder / path).unlink()
                listed = f"the hub lists {wanted[path]:,} bytes and has sent {size:,}"
                raise UserError(f"{repo}: {path}: {listed}; it is removed")
        # Where it cannot reach the hub, the library is content with what the folder has.
        if missing:
            raise OSError(f"{len(missing):,} of {len(wanted):,} files are missing")

    print(f"{repo}: {len(wanted):,} files, {sum(wanted.values()) / 1e9:,.2f} GB, into {folder}")
    retry(repo, downloaded, explain)
    for part in (folder / ".cache").rglob("*.incomplete"):  # killed processes left these
        part.unlink(missing_ok=True)
    return wanted


def retry(what: str, action: Callable[[], T], explain: Callable[[Exception], str]) -> T:
    """The result of `action`, tried again after each of PAUSES_S where it raises an error.

    `explain` returns why another attempt cannot help, which ends it at once, or nothing.
    """
    for pause in (*PAUSES_S, None):
        try:
            return action()
        except UserError:
            raise
        except Exception as error:
            if why := explain(error):
                raise UserError(why) from None
            reason = first_line(error)
            if pause is None:
                raise UserError(
                    f"{what}: gave up after {len(PAUSES_S) + 1} attempts: {reason}. Is there a "
                    "connection to the network? The same command resumes the download"
                ) from None
        report(f"{what}: {reason}; trying again in {pause} s")
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")


def _library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "downloads need the Python package huggingface_hub, which is not installed "
            "(pip install huggingface_hub)"
        ) from None
    return huggingface_hub


def _explain(error: Exception, repo: str, kind: str, folder: Path) -> str:
    """Why another attempt cannot help, or nothing where it may."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError):  # raised from what the hub answered
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repo}"
    token = "HF_TOKEN is set" if hub_token() else "HF_TOKEN is not set"
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: ask for access at {page}, then set the environment variable "
            f"HF_TOKEN to a token of that account ({token})"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo}: there is no such {kind}, or it is private and needs the environment variable "
            f"HF_TOKEN ({token}); see {page}"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"{repo}: access is refused ({status}; {token}); see {page}"
        if 400 <= status < 500 and status not in RETRIED_STATUS:
            shown = error.server_message or " ".join(str(error).split())
            return f"{repo}: the hub answered {status}: {shown}"
        return ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{folder}: {error.strerror}; with more space the same command resumes the download"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: cannot be written: {error.strerror}"
    if type(error).__name__ in NOT_RETRIED:
        return f"{repo}: the hub redirects to where nothing can be read: {first_line(error)}"
    if str(error).startswith("Consistency check failed"):  # of a body that is complete
        return f"{repo}: {first_line(error)}"
    if not isinstance(error, (OSError, HTTPError, RuntimeError)):  # of the library that reads it
        return f"{repo}: the answer of the hub cannot be used: {first_line(error)}"
    return ""


def _check_listing(repo: str, revision: str, files: dict[str, int]) -> None:
    """Raise UserError where a file would be written elsewhere than in the folder."""
    if not re.fullmatch("[0-9a-f]{40}", revision):
        raise UserError(f'{repo}: the hub names "{revision}" as its revision, which is no commit')
    for path, size in files.items():
        if BAD_PATH.search(path) or CONTROL.search(path):
            need = "must be the path of a file in a folder, without .., \\ and control characters"
            raise UserError(f"{repo}: has a file named {path!r}; {need}. Nothing is downloaded")
        if type(size) is not int or size < 0:
            raise UserError(f"{repo}: {path}: the hub lists {size!r} as its size")


def _inode(path: Path) -> int | None:
    """A number that changes where the file is replaced; None where there is none."""
    return path.stat().st_ino if path.exists() else None


def _missing(wanted: dict[str, int], folder: Path) -> dict[str, int]:
    """Those files that are not in `folder` in full."""

    def size(path: str) -> int:
        return (folder / path).stat().st_size if (folder / path).is_file() else -1

    return {path: expected for path, expected in wanted.items() if size(path) != expected}


def _check_space(wanted: dict[str, int], folder: Path) -> None:
    needed = sum(_missing(wanted, folder).values())
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{folder}: needs {needed / 1e9:,.2f} GB more, but only {free / 1e9:,.2f} GB are free"
        )
