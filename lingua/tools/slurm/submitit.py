"""A run as a job of submitit, whose tasks are its ranks (docs/python.md)."""

import atexit
import os
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

from lingua.base.dump_dir import METRICS
from lingua.base.errors import UserError, import_optional
from lingua.checkpoint.run_config import load_run
from lingua.parallel.signals import STOPPING
from lingua.parallel.slurm import set_rendezvous
from lingua.run.program import load_loop
from lingua.run.records import Record


@dataclass
class Job:
    """The run of lingua.train, for an executor of submitit; each task returns its record."""

    app: Any  # an import path, a module or an App
    config: Any = None  # a file, a mapping or a list of key=value

    def checkpoint(self) -> Any:
        """What submitit queues again: the same call, which resumes the run."""
        return import_optional("submitit.helpers", "lingua.Job").DelayedSubmission(self)

    def __call__(self) -> Record:
        from torch.cuda import device_count

        from lingua.monitor.metrics import append_line
        from lingua.parallel.launch import leave
        from lingua.run.in_process import app_of, train_here, words

        if "SUBMITIT_FOLDER" not in os.environ:  # in the process that submits, by DebugExecutor
            return train_here(self.app, self.config)
        env = import_optional("submitit.helpers", "lingua.Job").JobEnvironment()

        # The place of this task in torchrun's variables. As Slurm's the run would queue its job.
        local_rank = env.local_rank if device_count() != 1 else 0  # each task may see one device
        place = {"RANK": env.global_rank, "WORLD_SIZE": env.num_tasks, "LOCAL_RANK": local_rank}
        place["LOCAL_WORLD_SIZE"] = -(-env.num_tasks // env.num_nodes)
        os.environ |= {name: str(number) for name, number in place.items()}
        if env.cluster == "slurm" and env.num_tasks > 1:
            set_rendezvous(dict(os.environ))
        os.environ.setdefault("MASTER_ADDR", env.hostnames[0] if env.num_nodes > 1 else "localhost")
        os.environ.setdefault("MASTER_PORT", str(20000 + zlib.crc32(env.job_id.encode()) % 12000))
        preemption, came = signal.Signals[f"SIG{env.USR_SIG}"], list[int]()
        atexit.register(os._exit, 1)  # after an error a thread that waits for the store would abort
        try:
            if preemption not in STOPPING:
                raise UserError(f"SUBMITIT_PREEMPT_SIGNAL = {env.USR_SIG}: must be USR2, or unset")
            args, notices = load_run(app := app_of(self.app, "lingua.Job"), words(self.config))
            print("", *notices, sep="\n")
            loop = load_loop()
            handler = signal.signal(preemption, lambda number, _: came.append(number))
            stopped_by = loop.train(app, args)
        except UserError as error:  # sys.excepthook reports this and others to the other ranks
            raise error.with_traceback(None) from None
        leave(patience_s=30)
        atexit.unregister(os._exit)
        if stopped_by is None:
            return Record(args.folder.absolute())

        signal.raise_signal(signal.Signals[stopped_by])
        while not came:  # it was SIGTERM, which submitit ignores: its own follows, or the end
            time.sleep(1)
        try:
            signal.signal(preemption, handler)
            signal.raise_signal(preemption)  # on rank 0 the job is queued again and this one ends
        except Exception as error:  # as without a timeout that is left
            step = Record(args.folder).newest.get("step", 0)
            line = {"event": "not_requeued", "step": step, "reason": str(error)}
            append_line(args.folder / METRICS, line)
            raise
        sys.exit()  # other ranks, without a result
