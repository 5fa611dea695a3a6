"""Gradient traffic of a step under the three modes of `distributed.grad_sync`, and what it costs.

Each mode is a real torchrun launch of the training program, 2 replicas of 2 shards on the CPU with
4 micro-steps unless keys set other numbers. The loop's own profiler counts the collectives of rank
0 in a step; what the rank keeps between micro-steps is counted in the same step (`sync_rank.py`).
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from apps.bench.launch import run
from apps.bench.report import Report
from apps.main.config import TrainArgs
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.data.loader import micro_steps
from lingua.errors import UserError
from lingua.format import align, human_bytes

MODES = ("last", "replica_last", "every")
MESH = ["distributed.dp_replicate=2", "distributed.dp_shard=2", "device=cpu"]
ROWS = ["data.global_batch_size=16", "data.batch_size=1"]


def measure(keys: list[str]) -> Report:
    """`keys` is the command line of the training program."""
    config = [key for key in keys if key.startswith("config=")]
    keys = [*config, *MESH, *ROWS, *(key for key in keys if key not in config)]
    args, _ = load(TrainArgs, keys, foreign=META_LINGUA)
    data, tp = args.data, args.distributed.tp_size
    replicas, shards = args.distributed.dp_replicate, args.distributed.dp_shard
    if replicas is None or shards is None:
        raise UserError(
            "distributed.dp_replicate and dp_shard must be numbers: their product with tp_size is "
            "the number of processes"
        )
    n_micro, rows = micro_steps(
        data.step_rows, replicas * shards, data.batch_size, args.grad_acc_steps
    )
    modes = []
    for mode in MODES:
        print(f"{replicas * shards * tp} processes, grad_sync = {mode}", file=sys.stderr)
        modes.append(launch([*keys, f"distributed.grad_sync={mode}"], replicas * shards * tp))
    lines = [
        *table(modes),
        "",
        f"gradients in one step of rank 0: dp_replicate {replicas}, dp_shard {shards}, tp {tp}; "
        f"{n_micro} micro-steps of at most {rows} rows; {modes[0]['parameters']:,} parameters;",
        "bytes: of the larger side of each collective, the gradient before it is reduced;",
        "kept: memory of gradients between micro-steps",
    ]
    return Report(lines, {"mesh": (replicas, shards, tp), "micro_steps": n_micro, "modes": modes})


def launch(keys: list[str], processes: int) -> dict:
    """The counts of one torchrun launch."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "counts.json"
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        program = ["-m", "apps.bench.sync_rank", str(out), *keys, f"dump_dir={folder}/run"]
        command = [sys.executable, "-m", *torchrun, *program]
        run(command)
        return json.loads(out.read_text(encoding="utf-8"))


def table(modes: list[dict]) -> list[str]:
    rows = [("grad_sync", "reduce-scatters", "bytes", "all-reduces", "bytes", "kept")]
    for m in modes:
        scatter, reduce = m["reduce_scatter"], m["all_reduce"]
        rows.append(
            (
                m["mode"],
                str(scatter["count"]),
                human_bytes(scatter["bytes"]),
                str(reduce["count"]),
                human_bytes(reduce["bytes"]),
                human_bytes(m["kept_bytes"]),
            )
        )
    return align(rows, left=1)
