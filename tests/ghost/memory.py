"""Peak memory of a training step of a config at full size, by torch's own allocator, on the stub
driver:

    tests/ghost/run DIR python -m tests.ghost.memory --ranks 8 config=FILE [key=value ...]

The training program itself takes the steps, on a text of its own. This process is rank 0 of the
ranks; the others do not exist, and collectives return at once. `distributed.compile` is taken as
false: what Triton compiles needs a GPU.
"""

import argparse
import json
import os
import sys
from typing import Any

os.environ.setdefault("GHOST_MEMORY_GIB", "1024")  # more than a GPU has: what a step would take

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`

from apps.bench.step import run_steps
from apps.main.transformer import build
from lingua.base.errors import UserError
from lingua.parallel.args import mesh_sizes


def only_rank_0(ranks: int) -> None:
    """Let this process be rank 0 of groups whose collectives return at once."""
    world = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(ranks, 8)}
    os.environ |= {name: str(value) for name, value in world.items()}
    store, start = dist.HashStore(), dist.init_process_group
    dist.rendezvous = lambda *_, **__: iter([(store, 0, ranks)])
    dist.init_process_group = lambda *_, **__: start("fake", store=store, rank=0, world_size=ranks)


def measure(keys: list[str], ranks: int, n_steps: int) -> dict[str, Any]:
    """`keys` is the command line of the training program. Peaks are in GiB."""
    if ranks > 1:
        only_rank_0(ranks)
    peaks: list[float] = []  # of the start, then of each step

    def at(i: int) -> None:
        peaks.append(round(torch.cuda.max_memory_allocated() / 2**30, 2))
        torch.cuda.reset_peak_memory_stats()

    fixed = "device=cuda", "distributed.compile=false", "logging.freq=1000000"
    args = run_steps([*keys, *fixed], n_steps, at).args
    return {
        "parameters": sum(p.numel() for p in build(args).module.parameters()),
        "mesh": list(mesh_sizes(args.distributed, ranks)),
        "start_gib": peaks[0],
        "step_gib": max(peaks[1:]),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ghost.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=1, help="of the run (1)")
    parser.add_argument("--steps", type=int, default=3, help="that are measured (3)")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the configuration")
    options = parser.parse_intermixed_args()
    try:
        result = measure(options.keys, options.ranks, options.steps)
    except UserError as error:
        sys.exit(f"error: {error}")
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
