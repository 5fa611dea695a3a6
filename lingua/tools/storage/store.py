"""Object stores by their URLs, through fsspec: s3:// needs the package s3fs, gs:// gcsfs.
Credentials are those of the environment.

A file of the cache lies at the path of its URL, `<LINGUA_CACHE>/s3/bucket/name`. It has the size of
the object, and as its time a number made of the object's etag: so a `stat` says whether it is the
object as it is now.
"""

import glob
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from lingua.base.errors import UserError, import_optional
from lingua.base.files import wrong_url

T = TypeVar("T")
logger = logging.getLogger(__name__)
CACHE = "LINGUA_CACHE"  # variable of the environment: folder of what was downloaded
LASTING = "NotFound|Permission|Credential|Validation"  # errors that another attempt has too
PAUSES_S = (1, 2, 4, 8, 16, 30, 60)  # between attempts, where a start needs what it asks for
# What a store has of an object's version: fields of fsspec's file systems, the best first.
VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime")


@dataclass(frozen=True)
class RemoteFile:
    """An object of a store, as it was when it was listed."""

    url: str
    size: int  # bytes
    version: int  # whole seconds, in ns, made of its etag

    @property
    def local(self) -> Path:
        return local_path(self.url)

    def is_at(self, place: Path) -> bool:
        """Whether this file here is a whole copy of it."""
        try:
            info = place.stat()
        except OSError:
            return False
        return (info.st_size, info.st_mtime_ns) == (self.size, self.version)


def local_path(url: str) -> Path:
    """Where the cache has what a URL names."""
    scheme, _, rest = url.partition("://")
    cache = os.environ.get(CACHE) or Path.home() / ".cache" / "lingua"
    return Path(cache, scheme, rest.strip("/"))


def open_store(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, which keeps no listings, and the path. Raises UserError."""
    if need := wrong_url(url):
        raise UserError(f"{url}: {need}")
    core = import_optional("fsspec.core", url)
    try:
        fs, path = core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return fs, path


def list_remote(url: str) -> list[RemoteFile]:
    """The objects that a URL names: that one, all below it, or those of a pattern, sorted. Raises
    UserError."""
    return retrying(partial(listing, *open_store(url)), f"{url}: cannot be listed")


def listing(fs: Any, path: str) -> list[RemoteFile]:
    """What `list_remote` returns, by one attempt. Raises what the library of the store does."""
    try:
        is_pattern = glob.has_magic(path)
        found = fs.glob(path, detail=True) if is_pattern else {path: fs.info(path)}
        for name in [n for n, info in found.items() if info["type"] == "directory"]:
            del found[name]
            found |= fs.find(name, detail=True)
    except FileNotFoundError:
        return []
    files = (remote_file(fs, name, info) for name, info in found.items())
    return sorted(files, key=lambda file: file.url)


def remote_file(fs: Any, name: str, info: dict[str, Any]) -> RemoteFile:
    url = fs.unstrip_protocol(name)
    if not isinstance(info.get("size"), int):
        raise UserError(f"{url}: its server does not tell its size")
    known = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    seconds = (
        xxhash.xxh3_64_intdigest(f"{known} {info['size']}".encode()) % 2**31
    )  # as any file system has
    return RemoteFile(url, info["size"], seconds * 10**9)


def reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def retrying(work: Callable[[], T], what: str, pause: Callable[[float], object] = time.sleep) -> T:
    """`work`, which asks a store, again where it fails. Raises UserError, which begins with `what`,
    where it fails too often, or the object does not exist or may not be read; FileExistsError."""
    for pause_s in (*PAUSES_S, None):
        try:
            return work()
        except (UserError, FileExistsError):
            raise
        except Exception as error:  # of any library
            lasting = re.search(LASTING, type(error).__name__)
            if pause_s is None or lasting:
                raise UserError(f"{what}: {reason(error)}") from None
            logger.warning(f"{what}: {reason(error)}; trying again in {pause_s} s")
            pause(pause_s)
    raise AssertionError
