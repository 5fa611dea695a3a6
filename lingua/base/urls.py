"""URLs in a configuration: what object stores have, which lingua.tools.storage fetches."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

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


class RemoteFile(NamedTuple):
    """An object of a store, as it was when it was listed."""

    url: str
    size: int  # bytes
    version: int  # whole seconds, in ns, made of its etag: the time of its copy here

    @property
    def local(self) -> Path:
        return local_path(self.url)


def local_path(url: str) -> Path:
    """Where the cache has what a URL names."""
    scheme, _, rest = url.partition("://")
    cache = Path(os.environ.get("LINGUA_CACHE") or "~/.cache/lingua").expanduser()
    return cache / scheme / rest.strip("/")


def local_copy(path: str | Path, alone: bool = False) -> Path:
    """The path, or that of the copy here of what a URL names: a file, the folder of a model, or the
    newest checkpoint below it. Called by every rank, or by a process that is `alone` or without a
    group. Raises UserError."""
    return storage(str(path)).fetched(str(path), alone) if is_url(path) else Path(path)


def url_of_copy(url: str, path: Path) -> str:
    """What a config records of `path`, which `local_copy` of `url` has: that may name a run, which
    goes on, and this a checkpoint of it. The path itself, where that is no URL."""
    copied = url.rstrip("/") + str(path).removeprefix(str(local_path(url)))
    return copied if is_url(url) else str(path)


def storage(url: str) -> Any:
    """The tool that lists and downloads what a URL names. Raises UserError where there is none."""
    with tool_needed_by(url):
        from lingua.tools.storage import fetch
    return fetch
