"""How the processes of a run meet, and look after each other from then on. A single process does
without."""

import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lingua.base.errors import UserError
from lingua.parallel.args import DistributedArgs
from lingua.parallel.environment import Launch
from lingua.parallel.heartbeat import Heartbeat

FILES = 256  # open files and connections of a process beside one for each rank


def meet(launch: Launch, args: DistributedArgs) -> dist.Store:
    """The store of rank 0, once all processes have reached it. Raises UserError if they do not."""
    _allow_files(FILES + launch.world_size)
    patience_s = args.rendezvous_s
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by all starts of torchrun
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shared and restarts and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
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
    """Write where this rank is from now on, name ranks that are late, and report an error that ends
    this one to the others."""
    heart.start(store, launch.rank, launch.world_size, _log_late)
    sys.excepthook = partial(_report_failure, heart, sys.excepthook)


def _log_late(heart: Heartbeat) -> None:
    from lingua.parallel.failure import log_late  # imported where a rank is late

    log_late(heart)


def _report_failure(heart: Heartbeat, print_error: Callable[..., object], *error: Any) -> None:
    from lingua.parallel.failure import report  # imported where a rank fails

    report(heart, print_error, error[1])
