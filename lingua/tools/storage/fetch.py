"""What URLs name, brought to the cache: sources of text, token files, tokenizers, and what a run or
a program starts from."""

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lingua.base.dump_dir import MANIFEST, METADATA
from lingua.base.errors import UserError
from lingua.base.files import sync_folder
from lingua.base.format import counted, human_bytes
from lingua.base.lock import exclusive
from lingua.parallel.mesh import on_rank_0
from lingua.tools.storage.store import (
    RemoteFile,
    list_remote,
    local_path,
    open_store,
    remote_file,
    retrying,
)

PART_BYTES = 16 << 20  # of a request
THREADS = 8  # files at a time
MODEL_FILES = {  # one of them is in every folder of a model or tokenizer that other programs write
    "config.json", "adapter_config.json", "tokenizer.json", "params.json", "consolidated.pth",
    METADATA,
}  # fmt: skip
# The folder of a checkpoint, in a mirror with the number of the start that uploaded it
STEP = re.compile(r"\d{10}(?:-(\d+))?")

logger = logging.getLogger(__name__)


def fetched(url: str, alone: bool = False) -> Path:
    """The copy in the cache of what a URL names: a file, a folder of a model, or the newest whole
    checkpoint below it. Called by every rank, or by a process that is `alone` or without a group:
    rank 0 decides what it is, and each brings it to its own cache. Raises UserError."""
    listed = _choose(url) if alone else on_rank_0(partial(_choose, url))
    place, files = local_path(listed[0]), [RemoteFile(*file) for file in listed[1]]
    download(files)
    if place.is_dir():  # files that the folder in the store has no more are none of it
        for path in set(place.iterdir()) - {file.local for file in files}:
            if path.is_file() and path.suffix not in (".part", ".lock"):
                path.unlink()
    return place


def _choose(url: str) -> list[Any]:
    """[the URL of a file or folder, its files], as values of JSON."""
    files = list_remote(url)
    if not files:
        raise UserError(f"{url}: no such object or folder")
    place = files[0].url if len(files) == 1 and files[0].url == url else url.rstrip("/")
    if place != files[0].url:
        checkpoint = next(whole_checkpoints(files), None)
        if checkpoint is not None:
            place, files = checkpoint
        else:
            files = [file for file in files if file.url.rpartition("/")[0] == place]
            if not MODEL_FILES & {Path(file.url).name for file in files}:
                need = "must have a whole checkpoint, or be the folder of a model"
                raise UserError(f"{url}: {need}")
    return [place, [astuple(file) for file in files]]


def whole_checkpoints(
    files: Collection[RemoteFile],
) -> Iterator[tuple[str, list[RemoteFile]]]:
    """The URL and files of each checkpoint whose manifest lists files of these sizes, the newest
    first: those that the last start has uploaded, the last published first."""
    folders: dict[str, dict[str, RemoteFile]] = {}
    for file in files:
        folder, _, name = file.url.rpartition("/")
        folders.setdefault(folder, {})[name] = file
    found = []
    for folder, inside in folders.items():
        match = STEP.fullmatch(folder.rpartition("/")[2])
        if match is None or MANIFEST not in inside:
            continue
        with suppress(ValueError, KeyError, TypeError):
            manifest = json.loads(read_remote(inside[MANIFEST].url))
            sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
            if all(name in inside and inside[name].size == n for name, n in sizes.items()):
                parts = [inside[name] for name in (*sizes, MANIFEST)]
                found.append((int(match[1] or 0), int(manifest["serial"]), folder, parts))
                continue
        logger.warning(f"{folder} is not a whole checkpoint: skipped")
    for _, _, folder, parts in sorted(found, key=lambda c: c[:2], reverse=True):
        yield folder, parts


def read_remote(url: str) -> bytes:
    """The content of an object. Raises UserError."""
    fs, path = open_store(url)
    return retrying(partial(fs.cat_file, path), f"{url}: cannot be read")


def download(files: Iterable[RemoteFile], folder: Path | None = None) -> None:
    """Bring files to the cache, or to a folder, but for those that are there as they are now. One
    that was begun goes on where it ended. Raises UserError."""
    places = {file: file.local if folder is None else folder / file.local.name for file in files}
    missing = {file: place for file, place in places.items() if not file.is_at(place)}
    if not missing:
        return
    total, stopped = sum(file.size for file in missing), threading.Event()
    first = next(iter(missing)).url
    what = first if len(missing) == 1 else f"{counted(len(missing), 'file')} such as {first}"
    logger.info(f"downloading {what} ({human_bytes(total)})")
    with tqdm(total=total, desc="downloading", unit="B", unit_scale=True, disable=None) as bar:
        threads = ThreadPoolExecutor(THREADS)
        get = partial(_download, stopped=stopped, progress=bar.update)
        try:
            for done in [threads.submit(get, file, place) for file, place in missing.items()]:
                done.result()
        finally:  # also where a signal ends the wait
            stopped.set()
            threads.shutdown(cancel_futures=True)


def _download(
    file: RemoteFile, place: Path, stopped: threading.Event, progress: Callable[[int], object]
) -> None:
    fs, path = open_store(file.url)
    lock = place.with_name(f"{place.name}.lock")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock, logger.warning, patient=True):
            if file.is_at(place):  # another process has brought it
                return
            part = place.with_name(f"{place.name}.{file.version // 10**9}.part")
            if not _get_parts(file, part, stopped, progress):
                return
            info = retrying(partial(fs.info, path), file.url, stopped.wait)
            if part.stat().st_size != file.size or remote_file(fs, path, info) != file:
                part.unlink()
                raise UserError(f"{file.url}: changed while it was downloaded; start again")
            os.utime(part, ns=(file.version, file.version))
            os.replace(part, place)
            sync_folder(place.parent)
    except OSError as error:
        why = f"{error.filename or place}: {error.strerror or error}"
        raise UserError(f"{file.url}: cannot be downloaded: {why}", local=True) from None


def _get_parts(
    file: RemoteFile, part: Path, stopped: threading.Event, progress: Callable[[int], object]
) -> bool:
    """Append to `part` what it lacks of a file. Returns whether it is complete."""
    fs, path = open_store(file.url)
    with open(part, "ab") as out:
        progress(at := out.tell())
        while at < file.size and not stopped.is_set():
            end = min(at + PART_BYTES, file.size)
            get = partial(fs.cat_file, path, start=at, end=end)
            data = retrying(get, f"{file.url}: cannot be read", stopped.wait)
            if not 0 < len(data) <= end - at:
                raise UserError(f"{file.url}: its server does not send parts of it")
            out.write(data)
            at += len(data)
            progress(len(data))
        out.flush()
        os.fsync(out.fileno())
    return at >= file.size
