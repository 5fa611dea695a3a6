"""The measurements of docs/measurements.md, each by one command:

    python -m apps.bench NAME [key=value ...]

`key=value` changes the configuration, which is apps/main/configs/small.yaml unless `config=FILE`
names another. For `step` it is a model of each size, for `busy`, `debug` and `elastic` the debug
run of apps/main, for `ablate` the speedrun with all of its parts.
"""

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from apps.bench.report import show
from lingua.base.errors import UserError
from lingua.parallel.environment import detect_launch
from lingua.parallel.program import run_program

# What `measure(keys, repeats)` of a module reports, and its rounds, where it has any; keys are
# the command line of the training program.
MEASUREMENTS: dict[str, tuple[str, int | None]] = {
    "step": ("tokens per second, MFU and memory beside a bare loop, by shape", 3),
    "loop": ("what the loop costs over a bare forward, backward and step", 8),
    "onefile": ("tokens per second of apps/onefile over apps/main", 8),
    "attention": ("documents on a CPU one by one, over a mask of whole rows", 10),
    "recurrence": ("scans on a CPU, over a loop of positions and over attention", 5),
    "busy": ("tokens per second beside busy processes, by how threads wait", 3),
    "startup": ("seconds to the first step, by part", 5),
    "elastic": ("seconds from the kill of one of four agents to the next step, by part", 5),
    "ranks": ("descriptors, messages and seconds of 8 to 64 ranks, by what grows", None),
    "sync": ("what distributed.grad_sync and deterministic: mesh send, and cost", 5),
    "context": ("what dividing the positions of rows costs, over dividing rows", 5),
    "recheck": ("what distributed.check_every costs, as a share of a step", 5),
    "lora": ("time and memory of a step with adapters, over full tuning", 5),
    "receipt": ("what a run records for audits, as a share of a step", 3),
    "debug": ("time and held-out loss of the debug run, from nothing to its end", None),
    "generate": ("tokens per second of generation, against transformers", 5),
    "data": ("tokenizing and reading rows, each over its plain reference", 8),
    "checkpoint": ("saving and loading 1.2 GB, each over plain files", 12),
    "exchange": ("models of transformers: load, import, export, over plain files", 5),
    "promise": ("losses of a run, of any app, stopped and resumed on other meshes", None),
    "ablate": ("the speedrun without each of its parts, and with others", 5),
    "gpu": ("what a GPU does with a run, beside what it should (`gpu --help`)", None),
}
NANOGPT = "reference=nanogpt"  # of step: forward and backward beside another model
APPS = Path(__file__).parents[1]
CONFIG = APPS / "main/configs/small.yaml"
CONFIGS = {
    "busy": APPS / "main/configs/debug.yaml",
    "debug": APPS / "main/configs/debug.yaml",
    "elastic": APPS / "main/configs/debug.yaml",
    "ablate": APPS / "speedrun/configs/all_parts.yaml",
}
MODULES = {"ablate": "apps.speedrun.ablate"}  # of others: apps.bench.NAME


def main() -> None:
    if detect_launch().world_size != 1:
        raise UserError("apps.bench starts the processes that it measures: start it as one")
    if sys.argv[1:2] == ["gpu"]:  # it has arguments of its own
        from apps.bench.gpu.command import main as measure_gpu

        measure_gpu(sys.argv[2:])
        return
    names = "\n".join(
        f"  {name:<10}  {about}{'' if rounds is None else f' [{rounds} rounds]'}"
        for name, (about, rounds) in MEASUREMENTS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m apps.bench",
        description=__doc__,
        epilog=f"measurements:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurement", choices=MEASUREMENTS, metavar="NAME")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="changes the configuration")
    parser.add_argument("--repeats", type=int, help="rounds, where the list below has them")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw promise (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    options = parser.parse_intermixed_args()
    name, keys, given = options.measurement, options.keys, dict[str, Any]()
    _, rounds = MEASUREMENTS[name]
    if options.repeats is not None and (rounds is None or options.repeats < 1):
        parser.error(f"--repeats: {'must be at least 1' if rounds else f'{name} has no rounds'}")
    if rounds is not None:
        given["repeats"] = options.repeats or rounds
    if options.png is not None:
        if name != "promise":
            parser.error("--png: must be given with promise")
        given["png"] = options.png
    if name == "step" and NANOGPT in keys:
        name, keys = "nanogpt", [key for key in keys if key != NANOGPT]
    if name != "step" and not any(key.startswith("config=") for key in keys):
        keys = [f"config={CONFIGS.get(name, CONFIG)}", *keys]
    command = shlex.join(["python", "-m", "apps.bench", *sys.argv[1:]])
    module = import_module(MODULES.get(name, f"apps.bench.{name}"))
    show(module.measure(keys, **given), command, options.json)


if __name__ == "__main__":
    run_program(main)
