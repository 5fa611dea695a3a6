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
import shutil
import socket
import threading
import time
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Self

from lingua.base.dump_dir import MANIFEST, RUN_ID, STATE, step_folder
from lingua.base.errors import UserError
from lingua.base.files import read_bytes, sync_folder
from lingua.base.format import counted
from lingua.checkpoint.folder import Checkpoint, find, read_checkpoint
from lingua.checkpoint.retention import to_keep
from lingua.checkpoint.saved import wrong_files
from lingua.checkpoint.saver import Saver
from lingua.parallel.signals import StopRequest
from lingua.tools.storage.fetch import (
    PAUSES_S,
    STEP,
    RemoteFile,
    by_folder,
    download,
    list_remote,
    listing,
    open_store,
    read_remote,
    retrying,
    whole_checkpoints,
)

MAX_PAUSE_S = 300.0  # between attempts
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
        # What is uploaded, by URL. The paths are those here; serials are ordered by start first.
        self.there: dict[str, Checkpoint] = {}
        self._newest: str | None = None  # the newest there when this start looked
        self._waiting: list[Checkpoint] = []  # the first is under way
        self._failing_since: float | None = None  # time.monotonic
        self._closing = self._left = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._upload_all, name="mirror", daemon=True)

    # ---- before the first step, on rank 0

    def restore(self, dump_dir: Path) -> None:
        """Where the run has no checkpoint here, bring the newest one that is whole and verifies.
        Raises UserError."""
        if list_remote(f"{self.url}/starts"):
            raise UserError(f"{KEY} = {self.url}: is the folder of a run; give the one above it")
        own, here = dump_dir / RUN_ID, find(self.saver.root)
        run_id = own.read_text() if own.exists() else self._id_of_name()
        if not run_id:
            return
        own.write_text(run_id)
        self.folder = f"{self.url}/{run_id}"
        for folder, files in whole_checkpoints(list_remote(self.folder)):
            self._newest = self._newest or folder
            if here:
                if int(folder.rpartition("/")[2][:10]) > max(c.step for c in here):
                    logger.warning(f"{folder} is newer than what this start goes on from")
                return
            logger.info(f"{self.saver.root} has no checkpoint: taking {folder}")
            if self._take_from(folder, files):
                return
        if self._newest is not None:
            raise UserError(f"{self.folder}: has checkpoints, but none that can be used")

    def _take_from(self, url: str, files: list[RemoteFile]) -> bool:
        """Make files of the store a checkpoint here. Returns whether they verify."""
        folder = self.saver.root / f".{url.rpartition('/')[2]}"  # kept by a kill
        download(files, folder)
        checkpoint, why = read_checkpoint(folder)
        wrong = [why] if checkpoint is None else wrong_files(checkpoint, checkpoint.files)
        if checkpoint is None or wrong:
            logger.warning(f"{url} is damaged ({'; '.join(wrong)}): skipped")
            shutil.rmtree(folder)
            return False
        for path in folder.iterdir():
            os.utime(path)
        folder.rename(self.saver.root / step_folder(checkpoint.step))
        sync_folder(self.saver.root)
        return True

    def begin(self, dump_dir: Path) -> None:
        """Take the run's folder in the store, and begin to upload what it lacks. Raises UserError
        where another run has the name, or published since `restore`."""
        run_id = (dump_dir / RUN_ID).read_text()
        self.folder = f"{self.url}/{run_id}"
        if not self._create(self.name_url, run_id) and (other := self._id_of_name()) != run_id:
            what = f"{KEY} = {self.url}: another run of this name is there, {other}"
            raise UserError(f"{what}; choose another name, or another mirror")
        last = retrying(self._last_start, f"{KEY} = {self.url}: cannot be listed")
        self.number, host = last + 1, socket.gethostname()
        while not self._create(f"{self.folder}/starts/{self.number:06d}", host):
            self.number += 1
        if self._create(f"{self.folder}/starts/{self.number:06d}", host):
            logger.warning(
                f"{KEY} = {self.url}: this store has no conditional writes: of two starts of the "
                "run at the same moment, on machines that share no disk, both may upload"
            )
        for folder, _ in whole_checkpoints(list_remote(self.folder)):
            self._add(folder, *(read_remote(f"{folder}/{name}") for name in (MANIFEST, STATE)))
        if (newest := next(iter(self.there), None)) != self._newest:
            raise UserError(f"{newest} was published while this start began; start it again")
        logger.info(f"checkpoints are uploaded to {self.folder}")
        self.saver.mirror = self
        self.take()
        self._thread.start()

    def _id_of_name(self) -> str:
        return read_remote(self.name_url).decode() if list_remote(self.name_url) else ""

    def _last_start(self) -> int:
        names = by_folder(listing(f"{self.folder}/starts")).get(f"{self.folder}/starts", {})
        return max(map(int, filter(str.isdecimal, names)), default=0)

    def _create(self, url: str, text: str) -> bool:
        """Write an object. Returns whether there was none; a store without conditional writes
        writes it all the same."""
        fs, path = open_store(url)

        def write() -> None:
            try:
                fs.pipe_file(path, text.encode(), mode="create")
            except (OSError, TypeError) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                    raise
                fs.pipe_file(path, text.encode())

        try:
            retrying(write, f"{KEY} = {self.url}: cannot be written")
        except FileExistsError:
            return False
        return True

    def _add(self, folder: str, manifest: bytes, state: bytes) -> None:
        content, name = json.loads(manifest), folder.rpartition("/")[2]
        path, start = self.saver.root / name[:10], int(name[11:] or 0)
        serial = (start << 32) + content["serial"]
        texts = {STATE: state} if self.saver.args.keep_best else {}
        self.there[folder] = Checkpoint(
            path, content["step"], serial, content["files"], texts=texts
        )

    # ---- while it trains

    def take(self) -> list[Path]:
        """Have the checkpoints uploaded that are kept here and not there. Returns those that must
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
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing or self._left)
                if self._left or not self._waiting:
                    return
                checkpoint = self._waiting[0]
            what = f"{KEY}: {checkpoint.path} is not uploaded"
            upload = partial(self._upload, checkpoint)
            pauses_s = chain(PAUSES_S[:-1], repeat(MAX_PAUSE_S))
            try:
                retrying(upload, what, self._pause, pauses_s, lasting=SupersededError.__name__)
                with self._changed:
                    self._waiting.remove(checkpoint)
            except UserError as error:
                logger.error(f"{error}; nothing more is uploaded")
                self._leave()

    def _pause(self, seconds: float) -> None:
        """After an attempt that has failed."""
        self._failing_since = self._failing_since or time.monotonic()
        with self._changed:
            closing = self._closing  # the end of the run ends the wait
            self._changed.wait_for(lambda: self._left or self._closing is not closing, seconds)

    def _leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _upload(self, checkpoint: Checkpoint) -> None:
        if self._left or not (checkpoint.path / MANIFEST).exists():  # removed by hand
            return
        folder = f"{self.folder}/{checkpoint.path.name}-{self.number}"
        fs, path = open_store(folder)
        there = {file.local.name: file.size for file in listing(folder)}
        for name, entry in checkpoint.files.items():
            if there.get(name) != entry["size"]:
                fs.put_file(str(checkpoint.path / name), f"{path}/{name}")
            self._failing_since = None
        if (last := self._last_start()) > self.number:
            raise SupersededError(f"start {last} of the run has {self.folder} now")
        manifest, state = (read_bytes(checkpoint.path / name) for name in (MANIFEST, STATE))
        fs.pipe_file(f"{path}/{MANIFEST}", manifest)
        with self._changed:
            self._add(folder, manifest, state)
        logger.info(f"uploaded {folder}")
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove what retention does not keep there, manifests first, and what earlier starts have
        not completed."""
        newest_first = sorted(self.there.values(), key=lambda c: -c.serial)
        keep = to_keep(newest_first, self.saver.args)
        for folder, files in by_folder(listing(self.folder)).items():
            name = STEP.fullmatch(folder.rpartition("/")[2])
            begun = name is not None and MANIFEST not in files and int(name[1]) < self.number
            if begun or (folder in self.there and self.there[folder] not in keep):
                fs, path = open_store(folder)
                for file in sorted(files, key=lambda file: file != MANIFEST):
                    fs.rm_file(f"{path}/{file}")
                self.there.pop(folder, None)

    # ---- the end of a run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.saver.mirror is not self:  # on other ranks
            return
        signals, began = set(self.stop.received), time.monotonic()
        if waiting := self.take():
            logger.info(f"waiting for the upload of {counted(len(waiting), 'checkpoint')}")
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        wanted = kind is None or issubclass(kind, Exception)  # and no insisting interrupt
        while wanted and self._thread.is_alive():
            self._thread.join(0.1)
            failing_s = time.monotonic() - max(began, self._failing_since or math.inf)
            wanted = failing_s < GIVE_UP_S and not self.stop.received - signals
        self._leave()
        missing, self.saver.mirror = [c.path.name for c in self._missing()], None
        self.saver.prune()
        if not missing:
            logger.info(f"{self.folder} has {counted(len(self.there), 'checkpoint')}")
            return
        text = f"{self.folder} lacks {', '.join(missing)}"
        if kind is None and not signals:
            raise UserError(f"{KEY}: {text}; the same command uploads what is missing", True, 1)
        logger.warning(f"{KEY}: {text}; the next start uploads it")
