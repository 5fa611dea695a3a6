"""How the processes of a run meet, and look after each other from then on. A single process does
without."""

import json
import os
import resource
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lingua.base.errors import UserError
from lingua.parallel.args import DistributedArgs
from lingua.parallel.environment import Launch, restarts_in_torchrun
from lingua.parallel.heartbeat import BEAT_S, LOOK_S, Heartbeat

FILES = 256  # open files and connections of a process beside one for each rank


def meet(launch: Launch, args: DistributedArgs) -> dist.Store:
    """The store of rank 0, once all processes have reached it. Raises UserError if they do not."""
    _allow_files(FILES + launch.world_size)
    patience_s = args.rendezvous_s
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by all starts of torchrun
    if shared and restarts_in_torchrun() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise UserError(
            "torchrun --max-restarts on several machines needs the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, a restart would find what the start "
            "before has left in the store"
        )
    try:
        if launch.by == "slurm":
            from lingua.parallel.slurm import set_rendezvous

            set_rendezvous(dict(os.environ))
        if launch.rank:
            _wait_for_rank_0(patience_s)
        patience = timedelta(seconds=patience_s)
        rendezvous = dist.rendezvous("env://", launch.rank, launch.world_size, timeout=patience)
        store: dist.Store = next(rendezvous)[0]
        if shared:  # what an earlier start wrote is still there
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    except (dist.DistError, UserError, OSError, ValueError, KeyError) as error:
        place = ":".join(os.environ.get(f"MASTER_{part}", "?") for part in ("ADDR", "PORT"))
        reason = f"{str(error).splitlines()[0]} (distributed.rendezvous_s = {patience_s:g})"
        if "EADDRINUSE" in reason:
            reason = "another program uses this port; set MASTER_PORT to a free one"
        elif isinstance(error, KeyError):
            reason = f"the environment variable {error} is not set"
        raise UserError(
            f"rank {launch.rank} of {launch.world_size} cannot meet the others at MASTER_ADDR:"
            f"MASTER_PORT = {place}: {reason}",
            local=True,
        ) from None
    store.set_timeout(timedelta(seconds=args.timeout_s))
    return store


def _wait_for_rank_0(patience_s: float) -> None:
    """Wait until rank 0 listens: torch's own attempts fill the console with stack traces. Raises
    the OSError of the last attempt."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline, pause_s = time.monotonic() + patience_s, 0.01
    while True:
        try:
            socket.create_connection(address, timeout=patience_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def _allow_files(n: int) -> None:
    """Raise the limit of open files to the hard one. Raises UserError where that is below `n`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        raise UserError(
            f"this process may open {hard} files and connections and needs up to {n}: raise the "
            "hard limit (ulimit -Hn; LimitNOFILE of a systemd service; under Slurm that of slurmd, "
            "with PropagateResourceLimitsExcept=NOFILE)",
            local=True,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def watch(heart: Heartbeat, store: dist.Store, launch: Launch) -> None:
    """Write where this rank of several is from now on, name ranks that are late, and report an
    error that ends this one to the others. Called by the main thread."""
    heart.store, heart.rank, heart.main = store, launch.rank, threading.get_ident()
    heart.keys = [f"lingua/heartbeat/{r}" for r in range(launch.world_size)]
    heart.group = weakref.ref(dist.group.WORLD)
    _write(heart)
    for work in (_beat, _look):
        threading.Thread(target=work, args=(heart,), daemon=True).start()
    sys.excepthook = partial(_report_failure, heart, sys.excepthook)


def _beat(heart: Heartbeat) -> None:
    with suppress(dist.DistError):  # the store has gone, and so does the run
        while heart.wait():
            _write(heart)
            heart.first_failure()


def _write(heart: Heartbeat) -> None:
    place, step, phase, _ = heart.place
    frame = sys._current_frames()[heart.main]
    file = os.path.basename(frame.f_code.co_filename)
    function = f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"
    beat = time.time(), place, step, phase, function, socket.gethostname()
    heart.store.set(heart.keys[heart.rank], json.dumps(beat))


def _look(heart: Heartbeat) -> None:
    """Apart from `_beat`, which waits for as long as the main thread waits for the store."""
    looked = -1
    look_s = LOOK_S + 2 * BEAT_S * (heart.rank > 0)  # what rank 0 logs is in train.log
    while heart.wait():
        place, *_, since = heart.place
        if looked < place and time.monotonic() - since > heart.patience_s + look_s:
            from lingua.parallel.failure import log_late  # imported where a rank is late

            looked = place
            threading.Thread(target=log_late, args=(heart,), daemon=True).start()


def _report_failure(heart: Heartbeat, print_error: Callable[..., object], *error: Any) -> None:
    from lingua.parallel.failure import report  # imported where a rank fails

    report(heart, print_error, error[1])
