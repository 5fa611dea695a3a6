"""What URLs name, brought to the cache through fsspec: s3:// needs the package s3fs, gs:// gcsfs.
Credentials are those of the environment.

A file of the cache lies at the path of its URL, `<LINGUA_CACHE>/s3/bucket/name`. It has the size of
the object, and as its time a number made of its etag: `stat` says whether it is the object as it is
now.
"""

import glob
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from tqdm import tqdm

from lingua.base.dump_dir import MANIFEST, METADATA
from lingua.base.errors import UserError, import_optional
from lingua.base.files import sync_folder
from lingua.base.format import counted, human_bytes
from lingua.base.lock import exclusive
from lingua.base.urls import wrong_url
from lingua.parallel.mesh import on_rank_0

PART_BYTES = 16 << 20  # of a request
THREADS = 8  # files at a time
PAUSES_S = (1, 2, 4, 8, 16, 30, 60, None)  # between attempts; None: no other attempt
LASTING = "NotFound|Permission|Credential|Validation"  # errors that another attempt has too
# What a store has of an object's version: fields of fsspec's file systems, the best first
VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime")
# One of them is in every folder of a model or tokenizer that another program has written
MODEL_FILES = {"config.json", "adapter_config.json", "tokenizer.json", "params.json", METADATA}
# A checkpoint's folder, in a mirror with the number of the start that has uploaded it
STEP = re.compile(r"\d{10}(?:-(\d+))?")

T = TypeVar("T")
logger = logging.getLogger(__name__)


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
        with suppress(OSError):
            info = place.stat()
            return (info.st_size, info.st_mtime_ns) == (self.size, self.version)
        return False


def local_path(url: str) -> Path:
    """Where the cache has what a URL names."""
    scheme, _, rest = url.partition("://")
    cache = Path(os.environ.get("LINGUA_CACHE") or "~/.cache/lingua").expanduser()
    return cache / scheme / rest.strip("/")


# ---- asking a store


def open_store(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, which keeps no listings, and the path. Raises UserError."""
    if need := wrong_url(url):
        raise UserError(f"{url}: {need}")
    core = import_optional("fsspec.core", url)
    try:
        options = {"auto_mkdir": True} if url.startswith("file:") else {}
        return core.url_to_fs(url, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None


def retrying(
    work: Callable[[], T],
    what: str,
    pause: Callable[[float], object] = time.sleep,
    pauses_s: Iterable[float | None] | None = None,
    lasting: str = LASTING,
) -> T:
    """`work`, which asks a store, again where it fails. Raises UserError, which begins with `what`,
    where it fails too often or with an error of a `lasting` type; FileExistsError."""
    for pause_s in pauses_s or PAUSES_S:
        try:
            return work()
        except (UserError, FileExistsError):
            raise
        except Exception as error:  # of any library
            why = f"{what}: {str(error) or type(error).__name__}"
            if pause_s is None or re.search(lasting, type(error).__name__):
                raise UserError(why) from None
            logger.warning(f"{why}; trying again in {pause_s} s")
            pause(pause_s)
    raise AssertionError


def list_remote(url: str) -> list[RemoteFile]:
    """The objects that a URL names: that one, all below it, or those of a pattern, sorted. Raises
    UserError."""
    return retrying(partial(listing, url), f"{url}: cannot be listed")


def listing(url: str) -> list[RemoteFile]:
    """What `list_remote` returns, by one attempt. Raises what the library of the store does."""
    fs, path = open_store(url)
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
    seconds = xxhash.xxh3_64_intdigest(f"{known} {info['size']}".encode()) % 2**31
    return RemoteFile(url, info["size"], seconds * 10**9)  # every file system keeps seconds


def read_remote(url: str) -> bytes:
    """The content of an object. Raises UserError."""
    fs, path = open_store(url)
    return retrying(partial(fs.cat_file, path), f"{url}: cannot be read")


def by_folder(files: Iterable[RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    """Files by the URL of their folder, and their names."""
    folders: dict[str, dict[str, RemoteFile]] = {}
    for file in files:
        folder, _, name = file.url.rpartition("/")
        folders.setdefault(folder, {})[name] = file
    return folders


def whole_checkpoints(files: Iterable[RemoteFile]) -> Iterator[tuple[str, list[RemoteFile]]]:
    """The URL and files of each checkpoint whose manifest lists files of these sizes, the newest
    first: those that the last start has uploaded, the last published first."""
    found = []
    for folder, inside in by_folder(files).items():
        match = STEP.fullmatch(folder.rpartition("/")[2])
        if match is None or MANIFEST not in inside:
            continue
        with suppress(ValueError, KeyError, TypeError):
            manifest = json.loads(read_remote(inside[MANIFEST].url))
            parts = [inside[name] for name in (*manifest["files"], MANIFEST)]
            if [f.size for f in parts[:-1]] == [e["size"] for e in manifest["files"].values()]:
                found.append((int(match[1] or 0), int(manifest["serial"]), folder, parts))
                continue
        logger.warning(f"{folder} is not a whole checkpoint: skipped")
    return ((folder, parts) for *_, folder, parts in sorted(found, key=lambda c: c[:2])[::-1])


# ---- fetching


def fetched(url: str, alone: bool = False) -> Path:
    """As lingua.base.urls.local_copy: rank 0 decides what it is, and each rank brings it here."""
    folder_url, listed = _choose(url) if alone else on_rank_0(partial(_choose, url))
    place, files = local_path(folder_url), [RemoteFile(*file) for file in listed]
    download(files)
    if place.is_dir():  # a file that the folder in the store has no more is none of it
        for path in set(place.iterdir()) - {file.local for file in files}:
            if path.is_file() and path.suffix not in (".part", ".lock"):
                path.unlink()
    return place


def _choose(url: str) -> tuple[str, list[Any]]:
    """The URL of a file or folder, and its files, as values of JSON."""
    files, place = list_remote(url), url.rstrip("/")
    if not files:
        raise UserError(f"{url}: no such object or folder")
    if files[0].url != place:
        model = by_folder(files).get(place, {})
        newest = next(whole_checkpoints(files), (place, [*model.values()]))
        if newest[0] == place and not {MANIFEST, *MODEL_FILES} & model.keys():
            raise UserError(f"{url}: must have a whole checkpoint, or the files of a model")
        place, files = newest
    return place, [astuple(file) for file in files]


def download(files: Iterable[RemoteFile], folder: Path | None = None) -> None:
    """Bring files to the cache, or to a folder, but for those that are there as they are now. One
    that was begun goes on where it ended. Raises UserError."""
    places = {file: file.local if folder is None else folder / file.local.name for file in files}
    missing = {file: place for file, place in places.items() if not file.is_at(place)}
    if not missing:
        return
    total, stopped = sum(file.size for file in missing), threading.Event()
    first, n = next(iter(missing)).url, counted(len(missing), "object")
    logger.info(f"downloading {n} ({human_bytes(total)}): {first}{' ...' * (len(missing) > 1)}")
    with tqdm(total=total, desc="downloading", unit="B", unit_scale=True, disable=None) as bar:
        threads = ThreadPoolExecutor(THREADS)
        get = partial(_download, stopped=stopped, progress=bar.update)
        try:
            for done in [threads.submit(get, *item) for item in missing.items()]:
                done.result()
        finally:  # also where a signal ends the wait
            stopped.set()
            threads.shutdown(cancel_futures=True)


def _download(
    file: RemoteFile, place: Path, stopped: threading.Event, progress: Callable[[int], object]
) -> None:
    fs, path = open_store(file.url)
    part = place.with_name(f"{place.name}.{file.version // 10**9}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = exclusive(place.with_name(f"{place.name}.lock"), logger.warning, patient=True)
        with lock, open(part, "ab") as out:
            if file.is_at(place):  # another process has brought it
                return part.unlink()
            progress(at := out.tell())
            while at < file.size:
                end = min(at + PART_BYTES, file.size)
                get = partial(fs.cat_file, path, start=at, end=end)
                data = retrying(get, f"{file.url}: cannot be read", stopped.wait)
                if stopped.is_set():
                    return
                out.write(data[: end - at])
                progress(len(data))
                at = end if len(data) == end - at else file.size + 1  # no part, or all of it
            out.flush()
            os.fsync(out.fileno())
            info = retrying(partial(fs.info, path), file.url, stopped.wait)
            if at != file.size or remote_file(fs, path, info) != file:
                part.unlink()
                raise UserError(f"{file.url}: changed while it was downloaded; start again")
            os.utime(part, ns=(file.version, file.version))
            os.replace(part, place)
            sync_folder(place.parent)
    except OSError as error:
        why = f"{error.filename or place}: {error.strerror or error}"
        raise UserError(f"{file.url}: cannot be downloaded: {why}", local=True) from None
