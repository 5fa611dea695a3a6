"""URLs in a configuration: what object stores have, which lingua.tools.storage fetches."""

import re
from collections.abc import Iterable
from pathlib import Path

from lingua.base.errors import tool_needed_by

Version = tuple[str, int, int]  # of an object: its URL, bytes, and a number made of its etag


def is_url(path: object) -> bool:
    """Whether it names what a store has, such as s3://bucket/name, and no file here."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def wrong_url(url: str) -> str:
    """What is wrong with a URL of a configuration, which is saved; empty where nothing is."""
    if not is_url(url):
        return "must be a URL such as s3://bucket/name"
    if ".." in url.split("/"):
        return "must be a URL without .."
    has = re.match(r"\w+://[^/]*@|https?://[^?]*\?", url)
    return "must have no user and no query: credentials are those of the environment" * bool(has)


def local_copy(path: str | Path, alone: bool = False) -> Path:
    """The path, or that of the copy here of what a URL names: a file, the folder of a model, or the
    newest checkpoint below it. Called by every rank, or by a process that is `alone` or without a
    group. Raises UserError."""
    if not is_url(path):
        return Path(path)
    with tool_needed_by(str(path)):
        from lingua.tools.storage.fetch import fetched
    return fetched(str(path), alone)


def matching_objects(pattern: str) -> list[Version]:
    """The objects that the URL `pattern` names, sorted. By one process. Raises UserError."""
    with tool_needed_by(pattern):
        from lingua.tools.storage.fetch import list_remote
    return [(file.url, file.size, file.version) for file in list_remote(pattern)]


def place_of(url: str) -> str:
    """Where this machine has, or will have, the object of a URL."""
    with tool_needed_by(url):
        from lingua.tools.storage.fetch import local_path
    return str(local_path(url))


def fetch_objects(objects: Iterable[Version]) -> None:
    """Download objects that this machine does not have in this version. Raises UserError."""
    with tool_needed_by("reading URLs"):
        from lingua.tools.storage.fetch import RemoteFile, download
    download([RemoteFile(*version) for version in objects])
