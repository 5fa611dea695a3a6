"""URLs in a configuration: what object stores have, which lingua.tools.storage fetches."""

import re
from collections.abc import Iterable
from pathlib import Path

from lingua.base.errors import tool_needed_by


def is_url(path: object) -> bool:
    """Whether it names what a store has, such as s3://bucket/name, and no file here."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def wrong_url(url: str) -> str:
    """What is wrong with a URL of a configuration, which is saved; empty where nothing is."""
    if not is_url(url):
        return "must be a URL such as s3://bucket/name"
    if ".." in url.split("/") or "::" in url:
        return "must be a URL without .. and ::"
    if re.match(r"\w+://[^/]*@|https?://[^?]*\?", url):
        return "must have no user and no query: credentials are those of the environment"
    return ""


def local_copy(path: str | Path, alone: bool = False) -> Path:
    """The path, or that of the copy here of what a URL names: a file, the folder of a model, or the
    newest checkpoint below it. Called by every rank, or by a process that is `alone` or without a
    group. Raises UserError."""
    if not is_url(path):
        return Path(path)
    with tool_needed_by(str(path)):
        from lingua.tools.storage.fetch import fetched
    return fetched(str(path), alone)


def url_of_copy(url: str, path: Path) -> str:
    """What a config records of `path`, which `local_copy` of `url` has: that may name a run, which
    goes on, and this a checkpoint of it. The path itself, where that is no URL."""
    if not is_url(url):
        return str(path)
    with tool_needed_by(url):
        from lingua.tools.storage.fetch import local_path
    return url.rstrip("/") + str(path).removeprefix(str(local_path(url)))


def matching_objects(pattern: str) -> list[tuple[str, str, int, int]]:
    """The objects that the URL `pattern` names, sorted: their URLs, their places on this machine
    once they are fetched, bytes, and a number made of the etag. Raises UserError."""
    with tool_needed_by(pattern):
        from lingua.tools.storage.fetch import list_remote
    return [(file.url, str(file.local), file.size, file.version) for file in list_remote(pattern)]


def fetch_objects(objects: Iterable[tuple[str, int, int]]) -> list[str]:
    """Download objects (URL, bytes, number made of the etag) that this machine does not have in
    this version. Returns their places. Raises UserError."""
    with tool_needed_by("reading URLs"):
        from lingua.tools.storage.fetch import RemoteFile, download
    files = [RemoteFile(*each) for each in objects]
    download(files)
    return [str(file.local) for file in files]
