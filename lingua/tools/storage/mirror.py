"""A copy of a run's checkpoints in an object store: `checkpoint.mirror`.

    <mirror>/names/<name>                    the id of the run of that name
    <mirror>/<run id>/starts/<number>        a start that uploads: the last one has the run
    <mirror>/<run id>/<step>-<number>/       a checkpoint that it has uploaded, the manifest last

Each is written once: nothing there is overwritten, and only retention removes what the run has
uploaded. Rank 0 uploads in a thread: a store that is slow or absent does not hold up training.
"""

import errno
import json
import logging
import math
import os
import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from lingua.base.dump_dir import MANIFEST, RUN_ID, STATE, step_folder
from lingua.base.errors import UserError
from lingua.base.files import read_bytes, sync_folder
from lingua.base.format import counted
from lingua.checkpoint.folder import Checkpoint, find, read_checkpoint
from lingua.checkpoint.retention import to_keep
from lingua.checkpoint.saved import wrong_files
from lingua.checkpoint.saver import Saver
from lingua.parallel.signals import StopRequest
from lingua.tools.storage.fetch import STEP, download, read_remote, whole_checkpoints
from lingua.tools.storage.store import (
    PAUSES_S,
    RemoteFile,
    list_remote,
    listing,
    open_store,
    reason,
    retrying,
)

GIVE_UP_S = 600.0  # at the end of a run, of attempts that fail
KEY = "checkpoint.mirror"
logger = logging.getLogger(__name__)


class SupersededError(Exception):
    """A later start has the run in the store."""


class Mirror:
    """The uploads of a start, by rank 0. A context manager, which is left once they are done."""

    def __init__(self, url: str, name: str, saver: Saver, stop: StopRequest) -> None:
        self.url, self.saver, self.stop = url.rstrip("/"), saver, stop
        self.name_url = f"{self.url}/names/{name}"
        self.folder = ""  # URL of the run's folder, once its id is known
        self.number = 0  # of this start there
        self.there: dict[str, Checkpoint] = {}  # uploaded, by URL; their paths are those here
        self._newest: str | None = None  # the newest checkpoint there when this start looked
        self._waiting: list[Checkpoint] = []  # the first is under way, then the newest is
        self._error = ""  # why the newest attempt failed
        self._failing_since: float | None = None  # time.monotonic; None: the newest attempt works
        self._closing = self._left = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._upload_all, name="mirror", daemon=True)

    # ---- before the first step, on rank 0

    def restore(self, dump_dir: Path) -> None:
        """Where the run has no checkpoint here, bring the newest one that is whole and verifies.
        Raises UserError."""
        own = dump_dir / RUN_ID
        run_id, named = own.read_text() if own.exists() else "", self._id_of_name()
        if run_id and named not in ("", run_id):
            raise self._other_run(named)
        run_id = run_id or named
        if not run_id:
            return
        self.folder, here = f"{self.url}/{run_id}", find(self.saver.root)
        for folder, files in whole_checkpoints(list_remote(self.folder)):
            self._newest = self._newest or folder
            if here:
                step = int(folder.rpartition("/")[2].partition("-")[0])
                if step > max(c.step for c in here):
                    newer = f"{folder} is newer than every checkpoint here"
                    logger.warning(f"{newer}, from which this start goes on all the same")
                return
            logger.info(f"{self.saver.root} has no checkpoint: taking {folder}")
            if self._take_from(folder, files):
                own.write_text(run_id)
                return
        if self._newest is not None:
            raise UserError(f"{self.folder}: has checkpoints, but none that can be used")

    def _take_from(self, url: str, files: list[RemoteFile]) -> bool:
        """Make files of the store a checkpoint here. Returns whether they verify."""
        folder = self.saver.root / f".{url.rpartition('/')[2]}"
        download(files, folder)
        checkpoint, why = read_checkpoint(folder)
        if checkpoint is not None and not (
            why := "; ".join(wrong_files(checkpoint, checkpoint.files))
        ):
            for path in folder.iterdir():
                os.utime(path)
            folder.rename(self.saver.root / step_folder(checkpoint.step))
            sync_folder(self.saver.root)
            return True
        logger.warning(f"{url} is damaged ({why}): skipped")
        return False

    def begin(self, dump_dir: Path) -> None:
        """Take the run's folder in the store, and begin to upload what it lacks. Raises UserError
        where another run has the name, or published since `restore`."""
        run_id = (dump_dir / RUN_ID).read_text()
        self.folder = f"{self.url}/{run_id}"
        if not self._create(self.name_url, run_id) and (named := self._id_of_name()) != run_id:
            raise self._other_run(named)
        self._claim()
        newest = None
        for folder, files in whole_checkpoints(list_remote(self.folder)):
            newest = newest or folder
            self._add(folder, json.loads(read_remote(f"{folder}/{MANIFEST}")), files)
        if newest != self._newest:
            raise UserError(f"{newest} was published while this start began; start it again")
        logger.info(f"checkpoints are uploaded to {self.folder}")
        self.saver.mirror = self
        self.take()
        self._thread.start()

    def _id_of_name(self) -> str:
        return read_remote(self.name_url).decode() if list_remote(self.name_url) else ""

    def _other_run(self, named: str) -> UserError:
        what = f"{KEY} = {self.url}: another run of this name is there, {named}"
        return UserError(f"{what}; choose another name, or another mirror")

    def _claim(self) -> None:
        about = {
            "host": socket.gethostname(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.number = 1 + max(self._starts(), default=0)
        while not self._create(self._start_url, json.dumps(about)):
            self.number += 1
        if self._create(self._start_url, json.dumps(about)):
            logger.warning(
                f"{KEY} = {self.url}: this store has no conditional writes: of two starts of the "
                "run at the same moment, on machines that share no disk, both may upload"
            )

    @property
    def _start_url(self) -> str:
        return f"{self.folder}/starts/{self.number:06d}"

    def _starts(self) -> list[int]:
        files = listing(*open_store(f"{self.folder}/starts"))
        return [int(name) for file in files if (name := file.url.rpartition("/")[2]).isdecimal()]

    def _create(self, url: str, text: str) -> bool:
        """Write an object. Returns whether there was none; a store without conditional writes
        writes it all the same."""
        fs, path = open_store(url)

        def write() -> None:
            _make_parent(fs, path)
            try:
                fs.pipe_file(path, text.encode(), mode="create")
            except Exception as error:
                if not (isinstance(error, TypeError) or getattr(error, "errno", 0) == errno.ENOSYS):
                    raise
                fs.pipe_file(path, text.encode())

        try:
            retrying(write, f"{KEY} = {self.url}: cannot be written")
        except FileExistsError:
            return False
        return True

    def _add(self, folder: str, manifest: dict[str, Any], files: list[RemoteFile]) -> None:
        step, serial = manifest["step"], manifest["serial"]
        path = self.saver.root / step_folder(step)
        texts = {STATE: read_remote(f"{folder}/{STATE}")}
        self.there[folder] = Checkpoint(path, step, serial, manifest["files"], texts=texts)

    # ---- while it trains

    def take(self) -> list[Path]:
        """Have the checkpoints uploaded that are here, not there, and kept. Returns those that must
        stay for it. By one thread at a time, on rank 0."""
        with self._changed:
            under_way = self._waiting[:1]
            self._waiting = under_way + [c for c in self._missing() if c not in under_way]
            self._changed.notify_all()
            return [] if self._left else [c.path for c in self._waiting]

    def _missing(self) -> list[Checkpoint]:
        """What is kept here and not there, the newest first."""
        here, there = find(self.saver.root), [c.files for c in self.there.values()]
        keep = to_keep(here, self.saver.args)
        return [c for c in here if c in keep and c.files not in there]

    def _upload_all(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._left or not self._waiting:
                    return
                checkpoint = self._waiting[0]
            try:
                self._upload(checkpoint)
                failures = 0
            except SupersededError as error:
                self._error = str(error)
                logger.error(f"{KEY}: {error}; nothing more is uploaded")
                self._leave()
            except Exception as error:  # of any library
                self._error = reason(error)
                self._failing_since = self._failing_since or time.monotonic()
                pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
                if failures < len(PAUSES_S):  # then every minute, without a line
                    what = f"{KEY}: {checkpoint.path} is not uploaded: {self._error}"
                    logger.warning(f"{what}; trying again in {pause_s} s")
                failures += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._left, pause_s)

    def _leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _upload(self, checkpoint: Checkpoint) -> None:
        folder = f"{self.folder}/{checkpoint.path.name}-{self.number}"
        fs, path = open_store(folder)
        there = {file.url: file.size for file in listing(fs, path)}
        for name, entry in checkpoint.files.items():
            if there.get(f"{folder}/{name}") != entry["size"]:
                _make_parent(fs, f"{path}/{name}")
                fs.put_file(str(checkpoint.path / name), f"{path}/{name}")
            self._failing_since = None
        self._check_number()
        fs.pipe_file(f"{path}/{MANIFEST}", read_bytes(checkpoint.path / MANIFEST))
        texts = {STATE: read_bytes(checkpoint.path / STATE)}
        with self._changed:
            self.there[folder] = replace(checkpoint, texts=texts)
            self._waiting.remove(checkpoint)
            self._changed.notify_all()
        logger.info(f"uploaded {folder}")
        self._remove_old(fs)

    def _check_number(self) -> None:
        if (last := max(self._starts(), default=0)) > self.number:
            raise SupersededError(f"start {last} of the run has {self.folder} now")

    def _remove_old(self, fs: Any) -> None:
        """Remove what retention does not keep there, manifests first, and what earlier starts have
        not completed."""
        newest_first = sorted(self.there.items(), key=lambda c: _order(c[0]), reverse=True)
        keep = to_keep([c for _, c in newest_first], self.saver.args)
        gone = [folder for folder, c in self.there.items() if c not in keep]
        files = listing(*open_store(self.folder))
        by_folder: dict[str, list[str]] = {}
        for file in files:
            by_folder.setdefault(file.url.rpartition("/")[0], []).append(file.url)
        for folder, urls in by_folder.items():
            of_start, _ = _order(folder)
            is_left = 0 < of_start < self.number and f"{folder}/{MANIFEST}" not in urls
            if folder in gone or is_left:
                self._check_number()
                for url in sorted(urls, key=lambda url: not url.endswith(MANIFEST)):
                    fs.rm_file(fs._strip_protocol(url))
                self.there.pop(folder, None)

    # ---- the end of a run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.saver.mirror is not self:  # on other ranks, and where the start failed
            return
        if kind is not None and not issubclass(kind, Exception):
            return self._leave()
        self.take()
        signals, began = set(self.stop.received), time.monotonic()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._waiting:
                logger.info(
                    f"waiting for the upload of {counted(len(self._waiting), 'checkpoint')}"
                )
        while self._thread.is_alive():
            self._thread.join(0.1)
            failing_s = time.monotonic() - max(began, self._failing_since or math.inf)
            if failing_s > GIVE_UP_S or self.stop.received - signals:
                break
        self._leave()
        missing = [c.path.name for c in self._missing()]
        self.saver.mirror = None
        self.saver.prune()
        if not missing:
            logger.info(f"{self.folder} has {counted(len(self.there), 'checkpoint')}")
            return None
        text = f"{self.folder} lacks {', '.join(missing)} ({self._error or 'not yet uploaded'})"
        if kind is None and not signals:
            raise UserError(f"{KEY}: {text}; the same command uploads what is missing", True, 1)
        logger.warning(f"{KEY}: {text}; the next start uploads it")


def _make_parent(fs: Any, path: str) -> None:
    if "file" in fs.protocol:  # stores have no folders
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def _order(folder: str) -> tuple[int, int]:
    """(number of the start, step) of a checkpoint's folder; zeros for another folder."""
    match = STEP.fullmatch(folder.rpartition("/")[2])
    return (int(match[1] or 0), int(match[0][:10])) if match else (0, 0)
