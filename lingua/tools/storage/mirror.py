"""A copy of a run's checkpoints in an object store: `checkpoint.mirror`.

    <mirror>/names/<name>                    the id of the run of that name
    <mirror>/<run id>/starts/<number>        a start that uploads: the last one has the run
    <mirror>/<run id>/<step>-<number>/       a checkpoint that it has uploaded, the manifest last
    <mirror>/<run id>/marks/<step>.<mark>    a mark of a checkpoint

Each is written once: nothing there is overwritten, and only retention removes what the run has
uploaded. Rank 0 uploads in a thread: a store that is slow or absent does not hold up training.
"""

import errno
import json
import logging
import math
import shutil
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

from lingua.base.dump_dir import MANIFEST, RUN_ID, STATE, step_folder
from lingua.base.errors import UserError
from lingua.base.files import read_bytes, sync_folder
from lingua.base.format import counted
from lingua.checkpoint.folder import Checkpoint, find, read_checkpoint, unpublished
from lingua.checkpoint.retention import BEST, marks, to_keep
from lingua.checkpoint.saved import wrong_files
from lingua.checkpoint.saver import Saver
from lingua.parallel.mesh import on_rank_0
from lingua.parallel.signals import StopRequest
from lingua.run.args import RunArgs
from lingua.tools.storage.fetch import (
    STEP,
    RemoteFile,
    by_folder,
    download,
    list_remote,
    listing,
    open_store,
    read_remote,
    reason,
    retrying,
    whole_checkpoints,
)

MAX_PAUSE_S = 300.0  # between two attempts
GIVE_UP_S = 600.0  # of attempts that fail, at the end of a run
LEAVE_S = 30.0  # after a signal or an error: the next start uploads the rest
TRAINING, CLOSING, LEFT = range(3)  # CLOSING: what waits is uploaded
KEY = "checkpoint.mirror"
logger = logging.getLogger(__name__)


class Mirror:
    """The uploads of a start, by rank 0. A context manager, which is left once they are done."""

    def __init__(self, args: RunArgs, saver: Saver, stop: StopRequest) -> None:
        self.url, self.saver, self.stop = str(args.checkpoint.mirror).rstrip("/"), saver, stop
        self.name_url, self.id_file = f"{self.url}/names/{args.name}", args.folder / RUN_ID
        self.run_id = self.folder = ""  # and the URL of the run's folder
        self.number = 0  # of this start there; 0: it has not reached the store yet
        # By URL; their paths are those here, and a later start's have higher serials
        self.uploaded: dict[str, Checkpoint] = {}
        self._waiting: list[Checkpoint] = []  # the first is under way
        self._failing_since: float | None = None  # time.monotonic
        self._phase = TRAINING
        self._changed = threading.Condition()  # of what is uploaded and waiting, and of the phase
        self._thread = threading.Thread(target=self._upload_all, name="mirror", daemon=True)

    # ---- before the first step, on rank 0

    def restore(self) -> None:
        """Where the run has no checkpoint here, bring the newest one that is whole and verifies.
        Raises UserError."""
        own, root = self.id_file, self.saver.root
        if find(root):
            return
        what = f"{KEY} = {self.url}: cannot be read"
        look = partial(read_remote, self.name_url)
        run_id = own.read_text() if own.exists() else retrying(look, what).decode()
        if not run_id:
            return
        own.write_text(run_id)
        files, folder = list_remote(f"{self.url}/{run_id}"), None
        for folder, _, parts in whole_checkpoints(files):
            logger.info(f"{root} has no checkpoint: taking {folder}")
            if self._take(folder, parts):
                for mark in by_folder(files).get(f"{self.url}/{run_id}/marks", ()):
                    (root / mark).touch()
                return
        if folder is not None:
            raise UserError(f"{self.url}/{run_id}: has checkpoints, but none that can be used")

    def _take(self, url: str, files: list[RemoteFile]) -> bool:
        """Make files of the store a checkpoint here. Returns whether they verify."""
        folder = self.saver.root / f".{url.rpartition('/')[2]}"  # a killed download goes on there
        download(files, folder, url)
        checkpoint, why = read_checkpoint(folder)
        wrong = [why] if checkpoint is None else wrong_files(checkpoint, checkpoint.files)
        if checkpoint is None or wrong:
            logger.warning(f"{url} is damaged ({'; '.join(wrong)}): skipped")
            shutil.rmtree(folder)
            return False
        final = self.saver.root / step_folder(checkpoint.step)
        if final.exists():  # and is not whole
            final.rename(unpublished(final, self.saver.start.number))
        folder.rename(final)
        sync_folder(self.saver.root)
        return True

    def __enter__(self) -> Self:
        on_rank_0(self._begin)
        return self

    def _begin(self) -> None:
        """Take the run's folder in the store, and begin to upload what it lacks. Where the store is
        absent, training begins all the same. Raises UserError where another run has the name."""
        self.run_id = self.id_file.read_text()
        self.folder = f"{self.url}/{self.run_id}"
        try:
            self._claim()
        except UserError:
            raise
        except Exception as error:  # of any library
            logger.warning(f"{KEY} = {self.url}: {reason(error)}; training begins all the same")
        logger.info(f"checkpoints are uploaded to {self.folder}")
        self.saver.mirror = self
        self.take()
        self._thread.start()

    def _claim(self) -> None:
        """Become the last start of the run there, and look what it has. Raises UserError, and what
        the library of the store does."""
        if listing(f"{self.url}/starts"):
            raise UserError(f"{KEY} = {self.url}: is the folder of a run; give the one above it")
        if not self._create(self.name_url, self.run_id):
            named = read_remote(self.name_url).decode()
            if named != self.run_id:
                what = f"{KEY} = {self.url}: another run of this name is there, {named}"
                raise UserError(f"{what}; choose another name, or another mirror")
        number, host = self._last_start() + 1, socket.gethostname()
        while not self._create(f"{self.folder}/starts/{number:06d}", host):
            number += 1
        if self._create(f"{self.folder}/starts/{number:06d}", host):
            logger.warning(
                f"{KEY} = {self.url}: this store has no conditional writes: of two starts of the "
                "run at the same moment, on machines that share no disk, both may upload"
            )
        here = max((c.step for c in find(self.saver.root)), default=-1)
        for folder, manifest, _ in whole_checkpoints(listing(self.folder)):
            keep_best = self.saver.args.keep_best
            self._add(folder, manifest, read_remote(f"{folder}/{STATE}") if keep_best else b"")
            if manifest["step"] > here >= 0:
                logger.warning(f"{folder} is newer than every checkpoint here")
        self.number = number

    def _last_start(self) -> int:
        names = (file.local.name for file in listing(f"{self.folder}/starts"))
        return max(map(int, filter(str.isdecimal, names)), default=0)

    def _create(self, url: str, text: str) -> bool:
        """Write an object. Returns whether there was none; a store without conditional writes
        writes it all the same."""
        fs, path = open_store(url)
        try:
            fs.pipe_file(path, text.encode(), mode="create")
        except FileExistsError:
            return False
        except (OSError, TypeError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                raise
            fs.pipe_file(path, text.encode())
        return True

    def _add(self, folder: str, manifest: dict[str, Any], state: bytes) -> None:
        path = self.saver.root / step_folder(manifest["step"])
        serial = (number_of(folder) << 32) + manifest["serial"]
        c = Checkpoint(path, manifest["step"], serial, manifest["files"], texts={STATE: state})
        with self._changed:
            self.uploaded[folder] = c

    # ---- while it trains

    def take(self) -> list[Path]:
        """Have the checkpoints uploaded that are kept and not there. Returns those that must stay
        here for it. On rank 0, by one thread at a time."""
        with self._changed:
            under_way = self._waiting[:1]
            self._waiting = under_way + [c for c in self._missing() if c not in under_way]
            self._changed.notify_all()
            return [] if self._phase == LEFT else [c.path for c in self._waiting]

    def _missing(self) -> list[Checkpoint]:
        """What is kept and not there, the newest first."""
        return [c for c in self._kept() if c not in self.uploaded.values()]

    def _kept(self) -> list[Checkpoint]:
        """What retention keeps of the checkpoints here and there together, the newest first."""
        ordered = [(c.serial, c) for c in self.uploaded.values()]
        there, first = [c.files for _, c in ordered], self.number << 32  # serial of this start
        here = [c for c in find(self.saver.root) if c.files not in there]
        ordered += [(first + c.serial, c) for c in here]
        newest_first = [c for _, c in sorted(ordered, key=lambda item: -item[0])]
        return to_keep(newest_first, self.saver.args)

    def _upload_all(self) -> None:
        pause_s = 1.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._phase != TRAINING)
                if self._phase == LEFT or not self._waiting:
                    return
                checkpoint, phase = self._waiting[0], self._phase
            try:
                self._upload(checkpoint)
            except UserError as error:
                logger.error(f"{error}; nothing more is uploaded")
                return self._enter(LEFT)
            except Exception as error:  # of any library
                self._failing_since = self._failing_since or time.monotonic()
                what = f"{KEY}: {checkpoint.path} is not uploaded: {reason(error)}"
                logger.warning(f"{what}; trying again in {pause_s:.0f} s")
                self._pause(pause_s, phase)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            pause_s, self._failing_since = 1.0, None
            with self._changed:
                self._waiting.remove(checkpoint)
            try:
                self._remove_old()
            except Exception as error:  # of any library
                logger.warning(f"{KEY}: old checkpoints are not removed: {reason(error)}")

    def _pause(self, seconds: float, phase: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._phase > phase, seconds)

    def _upload(self, checkpoint: Checkpoint) -> None:
        if not self.number:
            self._claim()
        known = [c.files for c in self.uploaded.values()]
        if checkpoint.files in known or not (checkpoint.path / MANIFEST).exists():
            return  # it was there when this start reached the store, or was removed by hand
        folder = f"{self.folder}/{checkpoint.path.name}-{self.number}"
        fs, path = open_store(folder)
        there = {file.local.name: file.size for file in listing(folder)}
        for name, entry in checkpoint.files.items():
            if there.get(name) != entry["size"]:
                fs.put_file(str(checkpoint.path / name), f"{path}/{name}")
                self._failing_since = None
        if (last := self._last_start()) > self.number:
            raise UserError(f"{KEY}: start {last} of the run has {self.folder} now")
        manifest, state = (read_bytes(checkpoint.path / name) for name in (MANIFEST, STATE))
        fs.pipe_file(f"{path}/{MANIFEST}", manifest)
        self._add(folder, json.loads(manifest), state)
        logger.info(f"uploaded {folder}")
        for c in self._kept():
            for mark in set(marks(c.path)) - {BEST}:
                self._create(f"{self.folder}/marks/{c.path.name}.{mark}", "")

    def _remove_old(self) -> None:
        """Remove what retention does not keep there, manifests first, and what earlier starts have
        not completed."""
        if self._phase == LEFT or self._last_start() > self.number:
            return
        keep = self._kept()
        for folder, files in by_folder(listing(self.folder)).items():
            c = self.uploaded.get(folder)
            begun = MANIFEST not in files and 0 < number_of(folder) < self.number
            if begun or (c is not None and c not in keep):
                fs, path = open_store(folder)
                for file in sorted(files, key=lambda file: file != MANIFEST):
                    fs.rm_file(f"{path}/{file}")
                with self._changed:
                    self.uploaded.pop(folder, None)

    # ---- the end of a run

    def _enter(self, phase: int) -> None:
        with self._changed:
            self._phase = max(phase, self._phase)
            self._changed.notify_all()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.saver.mirror is not self:  # on other ranks
            return
        signals, began = set(self.stop.received), time.monotonic()
        clean = kind is None and not signals
        if waiting := self.take():
            logger.info(f"waiting for the upload of {counted(len(waiting), 'checkpoint')}")
            self.stop.note = "leaving without this upload"
        self._enter(CLOSING)
        while self._thread.is_alive() and not self.stop.received - signals:
            self._thread.join(0.1)
            now = time.monotonic()
            failing_s = now - max(began, self._failing_since or math.inf)
            if failing_s > GIVE_UP_S or (now - began > LEAVE_S and not clean):
                break
        self._enter(LEFT)
        with self._changed:
            missing = [c.path.name for c in self._missing()]
        self.saver.mirror = None
        if kind is None:  # else a save may be under way
            self.saver.prune()
        if not missing:
            logger.info(f"{self.folder} has {counted(len(self.uploaded), 'checkpoint')}")
            return
        text = f"{self.folder} lacks {', '.join(missing)}"
        if clean:
            raise UserError(f"{KEY}: {text}; the same command uploads what is missing", True, 1)
        logger.warning(f"{KEY}: {text}; the next start uploads it")


def number_of(folder: str) -> int:
    """The number of the start that has uploaded the folder of a checkpoint; 0 for others."""
    match = STEP.fullmatch(folder.rpartition("/")[2])
    return int(match[1] or 0) if match else 0
