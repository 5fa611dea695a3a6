"""Which of the launched ranks a run uses, where they need not be all: `distributed.spare`, torchrun
with a range of nodes, and hosts that have computed wrongly. Imported where that matters."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch.distributed as dist

from lingua.base.dump_dir import WRONG_HOSTS
from lingua.base.errors import UserError
from lingua.base.format import counted, printable
from lingua.parallel.args import DistributedArgs, fitting, least_ranks, mesh_sizes
from lingua.parallel.environment import Launch, restarts_in_torchrun
from lingua.parallel.mesh import LEFT, READ_S, share

POLL_S = 1.0  # seconds between two looks of a rank that is idle
LOST_S = 60.0  # seconds for a launcher to end a rank that is idle once the store is lost


def take_seat(
    launch: Launch, args: DistributedArgs, store: dist.Store, dump_dir: Path | None
) -> Launch:
    """The place of this rank among those that the run uses, which keep their order. Called by every
    rank; it does not return on one that stays idle, whose process ends with the run.

    Where the ranks do not fit, all wait `rendezvous_s` seconds for torchrun to start them again
    with more, and raise UserError then; at once where nothing starts them again.
    """
    store.set(f"lingua/host/{launch.rank}", socket.gethostname())
    number, file = launch.rank, f"{dump_dir}/{WRONG_HOSTS}"

    def choose() -> tuple[list[int], int, str]:
        hosts = [store.get(f"lingua/host/{r}").decode() for r in range(launch.world_size)]
        wrong = wrong_hosts(dump_dir)
        able = [r for r, host in enumerate(hosts) if host not in wrong]
        if not able:
            raise UserError(f"{file} names all hosts of this start: remove lines to use them again")
        n = fitting(args, len(able))
        if restarts_in_torchrun():
            too_large = _beyond_memory(args, n) if n else ""
            return able, 0 if too_large else n, too_large
        if not args.spare and len(able) < launch.world_size:
            need = "must be true to go on without the hosts that it names, or remove their lines"
            raise UserError(f"distributed.spare = false: {need} ({file})")
        if n == 0 or (n < len(able) and not args.spare):
            mesh_sizes(args, len(able))  # raises an error that names the keys
        return able, n, ""

    able, n, too_large = share(choose, store, "lingua/seats", number, launch.world_size)
    if not args.spare and len(able) < launch.world_size:
        _leave_out(launch, able, file)
    if n == 0 or (n < len(able) and not args.spare):
        _wait(launch, args, able, too_large)
    others = [r for r in range(launch.world_size) if r not in able[:n]]
    if number == able[0] and others:
        left_out = [f"{counted(launch.world_size - len(able), 'rank')} on a host that {file} names"]
        left_out = left_out * (len(able) < launch.world_size)
        left_out += [f"{len(able) - n} more than fit"] * (n < len(able))
        _say(f"{n} of {counted(launch.world_size, 'rank')} are used; idle: {', '.join(left_out)}")
    seat = [*able[:n], *others].index(number)
    # Programs ask for it again; it is also in the reports of failures.
    os.environ["SLURM_PROCID" if launch.by == "slurm" else "RANK"] = str(seat)
    if seat >= n:
        _stay_idle(launch, store, n)
    return replace(launch, rank=seat, world_size=n)


def wrong_hosts(dump_dir: Path | None) -> set[str]:
    """The hosts that `distributed.check_every` has named in a dump dir."""
    if dump_dir is None or not (dump_dir / WRONG_HOSTS).exists():
        return set()
    lines = (dump_dir / WRONG_HOSTS).read_text().splitlines()
    try:
        return {json.loads(line)["host"] for line in lines}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{dump_dir / WRONG_HOSTS}: cannot be read: {error}") from None


def _leave_out(launch: Launch, able: list[int], file: str) -> None:
    """Have torchrun go on without the hosts of the ranks that are not `able`: their agents end by a
    signal, which leaves the rendezvous open for the others."""
    if launch.rank not in able:
        if launch.local_rank == 0:
            here = f"{file} names {socket.gethostname()}, whose device has computed wrongly"
            _say(f"{here}: its torchrun ends; remove the line to use it again")
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(LOST_S)
        os._exit(1)
    if able[0] > 0:  # the store is in a process that ends: meet again, without it
        time.sleep(POLL_S)
        os._exit(1)


def _beyond_memory(args: DistributedArgs, n: int) -> str:
    """What the plan of this run for `n` ranks has against them; empty where its device has memory
    enough, or none is named."""
    if args.gpu is None:
        return ""
    with TemporaryDirectory() as folder:
        file = Path(folder, "plan")
        of_run = [word for word in sys.argv[1:] if "=" in word]  # without the name of a command
        words = [*of_run, "nodes=1", f"ngpu={n}", f"gpu={args.gpu}", f"json={file}"]
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", "lingua", "plan", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"distributed.gpu = {args.gpu}: {done.stderr.strip()}")
        plan = json.loads(file.read_text())
    needs = f"{counted(n, 'rank')} would each need {plan['needs_gib']:.3g} GiB"
    return "" if plan["fits"] else f"{needs}, more than {args.gpu} has"


def _wait(launch: Launch, args: DistributedArgs, able: list[int], too_large: str) -> NoReturn:
    """Wait for torchrun to start all again with more ranks. Raises UserError in the end."""
    least = least_ranks(args)
    fits = str(least) if fitting(args, 2 * least) == least else f"{least}, {2 * least}, ..."
    text = f"{counted(len(able), 'rank')} can be used, and {fits} fit the mesh of the config"
    text = too_large or text
    if able[:1] == [launch.rank]:
        _say(f"{text}: waiting {args.rendezvous_s:g} s (distributed.rendezvous_s) for others")
    time.sleep(args.rendezvous_s)
    if not too_large:
        mesh_sizes(args, len(able))  # names the keys
    raise UserError(text)


def _stay_idle(launch: Launch, store: dist.Store, n_used: int) -> NoReturn:
    """End this process with the run, whose `n_used` ranks count themselves as they leave."""
    lost_at, parent = None, os.getppid()
    while lost_at is None or time.monotonic() - lost_at < LOST_S:
        try:
            if store.add(LEFT, 0) >= n_used:
                store.add(LEFT, 1)
                if launch.rank == 0:
                    time.sleep(READ_S)  # the store is in this process, and others read it
                os._exit(0)
        except dist.DistError:  # a rank failed, and torchrun starts all again
            lost_at = lost_at or time.monotonic()
        if os.getppid() != parent:  # torchrun was killed
            break
        time.sleep(POLL_S)
    os._exit(1)


def _say(line: str) -> None:
    with suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)
