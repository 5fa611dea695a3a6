"""The measurements that the README quotes, each by one command.

    python -m apps.bench step      tokens per second, MFU and memory, over a bare loop, by shape
    python -m apps.bench loop      what the loop costs over a bare forward, backward and step; of
                                   config=apps/sft/configs/debug.yaml over plain training
    python -m apps.bench attention documents on a CPU one by one, over a mask of whole rows
    python -m apps.bench startup   seconds to the first step, and what they go into
    python -m apps.bench sync      gradient traffic of the three modes of distributed.grad_sync
    python -m apps.bench debug     time and held-out loss of the debug run, from nothing to its end
    python -m apps.bench generate  tokens per second of generation, against transformers
    python -m apps.bench data      tokenizing and reading rows, each over its plain reference
    python -m apps.bench checkpoint  saving and loading 1.2 GB, each over plain files
    python -m apps.bench exchange  models of transformers: loading, import, export, over plain files
    python -m apps.bench promise   losses of a run stopped and resumed on five topologies
    python -m apps.bench pairs     variance of the difference of two runs that share a seed

`key=value` changes the configuration, which is apps/main/configs/debug.yaml unless `config=FILE`
names another; of `step` it is a model of each size.
"""

import argparse
import inspect
import shlex
import sys
from pathlib import Path

from apps.bench import (
    attention,
    checkpoint,
    data,
    debug,
    exchange,
    generate,
    loop,
    pairs,
    promise,
    startup,
    step,
    sync,
)
from apps.bench.report import show
from lingua.parallel.program import run_program

MEASUREMENTS = {
    "step": step.measure,
    "loop": loop.measure,
    "attention": attention.measure,
    "startup": startup.measure,
    "sync": sync.measure,
    "debug": debug.measure,
    "data": data.measure,
    "generate": generate.measure,
    "checkpoint": checkpoint.measure,
    "exchange": exchange.measure,
    "promise": promise.measure,
    "pairs": pairs.measure,
}
CONFIG = Path(__file__).parents[1] / "main" / "configs" / "debug.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m apps.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the configuration")
    parser.add_argument(
        "--repeats",
        type=int,
        help="rounds: checkpoint (12), attention, pairs (10), loop, data (8), startup, "
        "generate, exchange (5), step (3)",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw promise (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    options = parser.parse_intermixed_args()
    measure, keys = MEASUREMENTS[options.measurement], options.keys
    given = {}
    if options.repeats is not None:
        if "repeats" not in inspect.signature(measure).parameters or options.repeats < 1:
            parser.error(
                "--repeats is a number from 1 on, for step, loop, attention, data, checkpoint, "
                "startup, generate, exchange, pairs"
            )
        given["repeats"] = options.repeats
    if options.png is not None:
        if measure is not promise.measure:
            parser.error("--png is for promise")
        given["png"] = options.png
    if measure is not step.measure and not any(key.startswith("config=") for key in keys):
        keys = [f"config={CONFIG}", *keys]
    command = shlex.join(["python", "-m", "apps.bench", *sys.argv[1:]])
    show(measure(keys, **given), command, options.json)


if __name__ == "__main__":
    run_program(main)
