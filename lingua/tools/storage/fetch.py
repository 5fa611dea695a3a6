"""What URLs name, brought to the cache through fsspec: s3:// needs the package s3fs, gs:// gcsfs,
hf:// huggingface_hub. Credentials are those of the environment, for hf:// only HF_TOKEN.

A file of the cache lies at the path of its URL, `<LINGUA_CACHE>/s3/bucket/name`. It has the size of
the object, and as its time a number made of its etag: `stat` says whether it is the object as it is
now.
"""

import glob
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from tqdm import tqdm

from lingua.base.dump_dir import MANIFEST, METADATA
from lingua.base.errors import UserError, import_optional
from lingua.base.files import sync_folder
from lingua.base.format import CONTROL, counted, human_bytes
from lingua.base.lock import POLL_S, claimed
from lingua.base.urls import RemoteFile, local_path, wrong_url

PART_BYTES = 16 << 20  # of a request
THREADS = 8  # files at a time
PAUSES_S = (1, 2, 4, 8, 16, 30, 60)  # between attempts
# Types of errors that another attempt would have too
NOT_RETRIED = "NotFound|Permission|Credential|Validation|TypeError|ValueError|NotImplemented|IsADir"
NOT_RETRIED += "|InvalidURL|UnsupportedProtocol|Redirects"
RETRIED_STATUS = {408, 425, 429}  # errors of a client that another attempt may not have
# What a store has of an object's version: fields of fsspec's file systems, the best first
VERSION_KEYS = "ETag etag md5Hash blob_id xet_hash generation LastModified Last-Modified "
VERSION_KEYS += "last_modified mtime created"
# One of them is in every folder of a model or tokenizer that another program has written
MODEL_FILES = {"config.json", "adapter_config.json", "tokenizer.json", "params.json", METADATA}
HUB_REPO = re.compile("hf://((?:datasets/|spaces/)?[^/]+/[^/@:]+)")
# A checkpoint's folder, in a mirror with the number of the start that has uploaded it
STEP = re.compile(r"\d{10}(?:-(\d+))?")

# A part that is empty, "." or "..", one that is a drive or a path of Windows, two lines
BAD_PATH = re.compile(rf"(^|/)(\.{{0,2}}(/|$)|[A-Za-z]:)|[\\\t\n]|{CONTROL.pattern}")

T = TypeVar("T")
logger = logging.getLogger(__name__)


# ---- asking a store


def open_store(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, which keeps no listings, and the path. Raises UserError."""
    if need := wrong_url(url):
        raise UserError(f"{url}: {need}")
    core = import_optional("fsspec.core", url)
    try:
        options: dict[str, Any] = {"auto_mkdir": True} if url.startswith("file:") else {}
        if url.startswith("hf:"):
            import_optional("huggingface_hub", url)
            options = {"token": hub_token() or False}  # False: nor that of a stored login
        fs, path = core.url_to_fs(url, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    scheme = fs.unstrip_protocol(path).partition("://")[0]
    if not url.startswith(f"{scheme}://"):  # one object would have several URLs
        raise UserError(f"{url}: must begin with {scheme}://")
    return fs, path


def hub_token() -> str:
    """HF_TOKEN without the blanks around it, empty where it is not set. Raises UserError."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch("[!-~]*", token):
        raise UserError("HF_TOKEN: must be a token of the hub, one word of ASCII characters")
    return token


def retrying(work: Callable[[], T], what: str, pause: Callable[[float], object] = time.sleep) -> T:
    """`work`, which asks a store, again where it fails. Raises UserError, which begins with `what`,
    where it fails too often, or with an error that another attempt would have too."""
    for pause_s in (*PAUSES_S, None):
        try:
            return work()
        except UserError:
            raise
        except Exception as error:  # of any library
            status = getattr(getattr(error, "response", None), "status_code", 0)
            why = f"{what}: {reason(error)}"
            why += f" (HTTP {status})" * (status > 0)
            if status in (401, 403, 404) and (repo := HUB_REPO.match(what)):
                has = "is set" if hub_token() else "is not set"
                why += f"; is it gated or private? Ask at https://huggingface.co/{repo[1]}, then"
                why += f" set HF_TOKEN to a token of that account (HF_TOKEN {has})"
            failure = UserError(why)  # without secrets
            refused = 400 <= status < 500 and status not in RETRIED_STATUS
            if pause_s is None or refused or re.search(NOT_RETRIED, type(error).__name__):
                raise failure from None
            logger.warning(f"{failure}; trying again in {pause_s} s")
            pause(pause_s)
    raise AssertionError


def reason(error: Exception) -> str:
    """An error's message, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def list_remote(url: str) -> list[RemoteFile]:
    """The objects that a URL names: that one, all below it, or those of a pattern, sorted. Raises
    UserError."""
    return retrying(partial(listing, url), f"{url}: cannot be listed")


def listing(url: str) -> list[RemoteFile]:
    """What `list_remote` returns, by one attempt. Raises what the library of the store does."""
    fs, path = open_store(url)
    fs.invalidate_cache()  # that of the hub keeps listings nevertheless
    try:
        is_pattern = glob.has_magic(path)
        found = fs.glob(path, detail=True) if is_pattern else {path: fs.info(path)}
        for name in [n for n, info in found.items() if info["type"] == "directory"]:
            del found[name]
            found |= fs.find(name, detail=True)
    except FileNotFoundError as error:
        if url.startswith("hf:") and error.__cause__:  # the repository is not open to this user
            raise error.__cause__ from None
        return []
    # A name that ends with / is none of a file: consoles of S3 make such objects for folders.
    files = (remote_file(fs, name, info) for name, info in found.items() if name[-1:] != "/")
    return sorted(files, key=lambda file: file.url)


def remote_file(fs: Any, name: str, info: dict[str, Any]) -> RemoteFile:
    url = fs.unstrip_protocol(name)
    if BAD_PATH.search(url.partition("://")[2].removeprefix("/")):
        need = "must be the path of a file in a folder, without .., \\ and control characters"
        raise UserError(f"{url!r} of that store: {need}")
    if not isinstance(size := info.get("size"), int) or size < 0:
        raise UserError(f"{url}: its server does not tell its size, but {size!r}")
    known = next((str(info[key]) for key in VERSION_KEYS.split() if info.get(key)), None)
    if known is None:
        raise UserError(f"{url}: its server does not tell which version it is")
    seconds = xxhash.xxh3_64_intdigest(f"{known} {size}".encode()) % 2**31
    return RemoteFile(url, size, seconds * 10**9)  # every file system keeps seconds


def read_remote(url: str) -> bytes:
    """The content of an object, nothing where there is none. Raises what the library does."""
    fs, path = open_store(url)
    try:
        return fs.cat_file(path)
    except FileNotFoundError:
        return b""


def by_folder(files: Iterable[RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    """Files by the URL of their folder, and their names."""
    folders: dict[str, dict[str, RemoteFile]] = {}
    for file in files:
        folder, _, name = file.url.rpartition("/")
        folders.setdefault(folder, {})[name] = file
    return folders


def whole_checkpoints(
    files: Iterable[RemoteFile],
) -> Iterator[tuple[str, dict[str, Any], list[RemoteFile]]]:
    """The URL, manifest and files of each checkpoint whose manifest lists files of these sizes, the
    newest first: those that the last start has uploaded, the last published first."""
    found = []
    for folder, inside in by_folder(files).items():
        match = STEP.fullmatch(folder.rpartition("/")[2])
        if match is None or MANIFEST not in inside:
            continue
        with suppress(ValueError, KeyError, TypeError):
            read = partial(read_remote, inside[MANIFEST].url)
            manifest = json.loads(retrying(read, f"{folder}: cannot be read"))
            parts = [inside[name] for name in (*manifest["files"], MANIFEST)]
            if [f.size for f in parts[:-1]] == [e["size"] for e in manifest["files"].values()]:
                found.append((int(match[1] or 0), int(manifest["serial"]), folder, manifest, parts))
                continue
        logger.warning(f"{folder} is not a whole checkpoint: skipped")
    return (tuple(c[2:]) for c in sorted(found, key=lambda c: c[:2], reverse=True))


# ---- fetching


def fetched(url: str, alone: bool = False) -> Path:
    """As lingua.base.urls.local_copy: rank 0 decides what it is, and each rank brings it here."""
    from lingua.parallel.mesh import on_rank_0  # and torch, which a download does without

    folder_url, listed = _choose(url) if alone else on_rank_0(partial(_choose, url))
    place, files = local_path(folder_url), [RemoteFile(*file) for file in listed]
    download(files)
    if place.is_dir():  # a file that the folder in the store has no more is none of it
        for path in set(place.iterdir()) - {file.local for file in files}:
            if path.is_file() and path.suffix not in (".part", ".lock"):
                path.unlink(missing_ok=True)
    return place


def _choose(url: str) -> tuple[str, list[RemoteFile]]:
    """The URL of a file or folder, and its files."""
    files, place = list_remote(url), url.rstrip("/")
    if not files:
        raise UserError(f"{url}: no such object or folder")
    if files[0].url != place:
        model = by_folder(files).get(place, {})
        newest = next(whole_checkpoints(files), (place, {}, [*model.values()]))
        if newest[0] == place and not {MANIFEST, *MODEL_FILES} & model.keys():
            raise UserError(f"{url}: must have a whole checkpoint, or the files of a model")
        place, _, files = newest
    return place, files


def download(files: Iterable[RemoteFile], folder: Path | None = None, url: str = "") -> None:
    """Bring files to the cache, or those below `url` to a folder, but for those that are there as
    they are now. One that was begun goes on where it ended. Raises UserError."""
    places = {f: folder / f.url.removeprefix(f"{url}/") if folder else f.local for f in files}
    missing = {file: place for file, place in places.items() if not _is_copy(place, file)}
    if not missing:
        return
    total, stopped = sum(file.size for file in missing), threading.Event()
    left = total - sum(p.stat().st_size for p in starmap(_part, missing.items()) if p.exists())
    at = folder or local_path("")
    free = shutil.disk_usage(next(p for p in (at, *at.absolute().parents) if p.exists())).free
    if left > free:
        need = f"needs {human_bytes(left)} more, but only {human_bytes(free)} are free"
        raise UserError(f"{at}: {need}", local=True)
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


def download_matching(url: str, patterns: Sequence[str], folder: Path) -> set[str]:
    """Download the files below `url` that match a pattern, in which a * goes across folders, to
    their paths in `folder`, which are returned. Raises UserError."""
    files = {file.url.removeprefix(f"{url}/"): file for file in list_remote(url)}
    wanted = {path for path in files if any(fnmatchcase(path, pattern) for pattern in patterns)}
    if not wanted:
        some = f", as {', '.join(sorted(files)[:5])}" if files else ""
        matches = f"no file of {url} matches {' or '.join(patterns)}"
        raise UserError(f"{matches}: it has {len(files):,} files{some}")
    download([files[path] for path in sorted(wanted)], folder, url)
    return wanted


@contextmanager
def _locked(path: Path, stopped: threading.Event) -> Iterator[bool]:
    """Hold a lock once it is free. Yields whether it is held: the wait may be `stopped`."""
    while not stopped.is_set():
        with claimed(path) as lock:
            if lock is not None:
                yield True
                return
        stopped.wait(POLL_S)
    yield False


def _is_copy(place: Path, file: RemoteFile) -> bool:
    with suppress(OSError):
        info = place.stat()
        return (info.st_size, info.st_mtime_ns) == (file.size, file.version)
    return False


def _part(file: RemoteFile, place: Path) -> Path:
    return place.with_name(f"{place.name}.{file.version // 10**9}.part")


def _download(
    file: RemoteFile, place: Path, stopped: threading.Event, progress: Callable[[int], object]
) -> None:
    fs, path = open_store(file.url)
    part = _part(file, place)
    # What the hub's file system has to know so that it asks for these bytes and no others
    options = {"cache_type": "none", "size": file.size} if file.url.startswith("hf:") else {}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            locked = held.enter_context(_locked(place.with_name(f"{place.name}.lock"), stopped))
            if not locked or _is_copy(place, file):  # another process has brought it
                return
            out = held.enter_context(open(part, "ab"))
            progress(at := out.tell())
            while at < file.size:
                end = min(at + PART_BYTES, file.size)
                more = end == file.size  # a byte, of an object that is larger than listed
                get = partial(fs.cat_file, path, start=at, end=end + more, **options)
                data = retrying(get, f"{file.url}: cannot be read", stopped.wait)
                if stopped.is_set():
                    return
                out.write(data[: end - at])
                progress(len(data))
                at = end if len(data) == end - at else file.size + 1  # no part, or all of it
            out.flush()
            os.fsync(out.fileno())
            fs.invalidate_cache()
            info = retrying(partial(fs.info, path), file.url, stopped.wait)
            if at != file.size or remote_file(fs, path, info) != file:
                part.unlink()
                why = f"not the {file.size:,} bytes that its server lists, or changed while it was"
                raise UserError(f"{file.url}: {why} downloaded; start again")
            os.utime(part, ns=(file.version, file.version))
            os.replace(part, place)
            sync_folder(place.parent)
    except OSError as error:
        why = f"{error.filename or place}: {error.strerror or error}"
        raise UserError(f"{file.url}: cannot be downloaded: {why}", local=True) from None
