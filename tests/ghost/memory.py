"""Peak memory of a training step of a config at full size, by torch's own allocator, on the stub
driver:

    tests/ghost/run DIR python -m tests.ghost.memory --ranks 8 config=FILE [key=value ...]

The training program itself takes the steps, on a text of its own. This process is rank 0 of the
ranks; the others do not exist, and what they would send is not waited for. Of the config,
`distributed.compile` is taken as false: what Triton compiles needs a GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("GHOST_MEMORY_GIB", "1024")  # more than a GPU has: what a step would take

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`

from apps.main.train import set_up, take_steps
from lingua.app import choose_app
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.data.loader import MicroBatch
from lingua.errors import UserError
from lingua.monitor.logger import init_logger
from lingua.signals import StopRequest

TEXT = ["{'text': 'A step reads rows of this document, again and again. '}"] * 2_000


class Finished(Exception):
    """All steps that are measured were taken."""


def only_rank_0(ranks: int) -> None:
    """Let this process be rank 0 of groups whose collectives return at once."""
    world = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(ranks, 8)}
    os.environ |= {name: str(value) for name, value in world.items()}
    store, start = dist.HashStore(), dist.init_process_group
    dist.rendezvous = lambda *_, **__: iter([(store, 0, ranks)])
    dist.init_process_group = lambda *_, **__: start("fake", store=store, rank=0, world_size=ranks)


def measured(
    steps: Iterator[list[MicroBatch]], n: int, peaks: list[int]
) -> Iterator[list[MicroBatch]]:
    """The batches of n steps; adds the peak (bytes) of what came before each of them."""
    for batch in islice(steps, n):
        peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        yield batch
    raise Finished


def measure(keys: list[str], ranks: int, n_steps: int) -> dict[str, Any]:
    """`keys` is the command line of the training program. Peaks are in GiB."""
    if ranks > 1:
        only_rank_0(ranks)
    with TemporaryDirectory() as folder, closing(StopRequest("")) as stop, ExitStack() as parts:
        (Path(folder) / "text").mkdir()
        (Path(folder) / "text" / "text.jsonl").write_text("\n".join(TEXT).replace("'", '"'))
        own = {
            "dump_dir": f"{folder}/run",
            "data.root_dir": folder,
            "data.sources": "{text: 1.0}",
            "data.tokenizer": "{name: bytes, path: null}",
            "distributed.compile": "false",
            "device": "cuda",
            "logging.freq": "1000000",
            "validation.every": "0",
        }
        app = choose_app(keys)
        keys = [*keys, *(f"{key}={value}" for key, value in own.items())]
        args, _ = load(app.config, keys, foreign=META_LINGUA)
        if args.model.vocab_size == -1:
            raise UserError("model.vocab_size: must be given, since no tokenizer is read")
        init_logger(None, 0, app.path)
        run, steps, benchmarks = set_up(app, args, stop, parts)
        peaks: list[int] = []
        try:
            take_steps(run, measured(steps, n_steps, peaks), benchmarks, stop)
        except Finished:
            peaks.append(torch.cuda.max_memory_allocated())
        return {
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "mesh": list(run.mesh.shape),
            "start_gib": round(peaks[0] / 2**30, 2),
            "step_gib": round(max(peaks[1:]) / 2**30, 2),
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
    print(json.dumps(result))


if __name__ == "__main__":
    main()
