"""Real ranks for tests: processes started once, each test runs its function in the first n of them.

Every run makes a process group of its own, of just its n ranks, by the variables that torchrun
sets, so what is tested is what torchrun starts; only the seconds of importing torch are shared:
a server imports it once, and every rank is forked from that.
"""

import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ANSWER_S = 240.0  # compiling on eight ranks of two busy cores takes a minute or two
LEAVE_S = 30.0  # for the others, on a busy machine
GRACE_S = 5.0  # for the others once a rank has failed: they may wait for it in a collective


def free_port() -> int:
    """Below the ephemeral ports, of which a connection could take one before it is listened to."""
    while True:
        port = random.SystemRandom().randrange(10000, 20000)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def each_here(work: Callable[..., Any], cases: dict[str, list[str]]) -> dict[str, Any]:
    """What a program returns for each case, one after another in this rank."""
    return {case: work(*arguments) for case, arguments in cases.items()}


def _caches() -> list[Any]:
    """What torch remembers by the layout of a mesh, and the mesh with it."""
    wrapper = functools._lru_cache_wrapper
    found = [thing for thing in gc.get_objects() if type(thing) is wrapper]
    return [cache for cache in found if (cache.__module__ or "").startswith("torch.distributed")]


def _meet_again() -> None:
    """Wait for the other ranks: one may still be making the groups of a mesh, which fails where a
    rank that is done closes its connections."""
    import torch.distributed as dist

    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + LEAVE_S
    store.add("tests/done", 1)
    while store.add("tests/done", 0) < dist.get_world_size() and time.monotonic() < end:
        time.sleep(0.005)


def _serve(pipe: Connection, crashes: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from lingua.parallel.launch import leave
    from lingua.run import describe

    # The code stays the same: asking git for its version takes a third of the time of a short run.
    describe.code_version = functools.cache(describe.code_version)
    describe.code_hash = functools.cache(describe.code_hash)
    faulthandler.enable(open(crashes, "w"))  # noqa: SIM115 (it stays open)
    torch.set_num_threads(1)
    caches = _caches()
    gc.freeze()  # what is imported stays: looking through it again and again takes the time
    while (job := pipe.recv()) is not None:
        env, work, args, kwargs = job
        os.environ.update(env)
        try:
            answer = (True, work(*args, **kwargs))
            if dist.is_initialized():
                _meet_again()
                leave(patience_s=LEAVE_S)
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()
        # A mesh that lives keeps its groups, whose threads wake every 10 ms: some hundred runs of
        # them take both cores. So would a wrong result that is kept by the layout of a mesh.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        for cache in caches + _caches():
            cache.cache_clear()
        gc.collect()
        pipe.send(answer)


class Ranks:
    """`run(n, work, ...)` calls `work(...)` in n ranks at once and returns their n results."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[mp.process.BaseProcess] = []
        self.crashes: list[Path] = []  # files for the stacks of a process that a signal ended

    def _grow(self, n: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["apps.main.train", "torch._inductor.compile_fx"])
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or each rank starts compilers
        while len(self.processes) < n:
            ours, theirs = context.Pipe()
            handle, crashes = tempfile.mkstemp(suffix=".crash")
            os.close(handle)
            process = context.Process(target=_serve, args=(theirs, crashes), daemon=True)
            process.start()
            theirs.close()
            self.crashes.append(Path(crashes))
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, n: int, work: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Raises AssertionError with every rank's traceback when one fails."""
        self._grow(n)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        # As a run sets it. Left over from one in some of the ranks, it would end the others.
        env |= {"TORCH_GLOO_LAZY_INIT": "1"}
        for rank in range(n):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.pipes[rank].send((env | place, work, args, kwargs))
        results: list[Any] = [None] * n
        failures: list[str] = []
        waiting = dict(zip(self.pipes[:n], range(n), strict=True))
        end = time.monotonic() + ANSWER_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                failures += [f"rank {rank}: no answer" for rank in waiting.values()]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join()
                    code, stacks = self.processes[rank].exitcode, self.crashes[rank].read_text()
                    fine, results[rank] = False, f"its process ended with code {code}\n{stacks}"
                if not fine:
                    failures.append(f"rank {rank}: {results[rank]}")
                    end = min(end, time.monotonic() + GRACE_S)
        if failures:
            self.close()  # a rank may still wait inside a collective for one that failed
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for file in self.crashes:
            file.unlink(missing_ok=True)
        self.pipes, self.processes, self.crashes = [], [], []
