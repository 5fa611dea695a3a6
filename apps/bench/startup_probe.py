"""One start of the training program, stamped with the time at which each part of it was done.

python -m apps.bench.startup_probe stamps.json config=... key=value ...
"""

import json
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

# What a part ends with: the return of a function, by its name in a module that calls it.
ENDS = {
    "config": ("apps.main.train", "load_run"),
    "process group and mesh": ("lingua.run.start", "start"),
    "checks, which build the model on the meta device": ("lingua.run.start", "check_run"),
    "data: shards, held-out rows": ("lingua.run.start", "open_data"),
}


def main() -> None:
    path, *keys = sys.argv[1:]
    stamps: dict[str, float] = {}

    def stamp(part: str) -> None:
        stamps.setdefault(part, time.time())

    def stamp_after(module: Any, name: str, part: str) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            stamp(part)
            return result

        setattr(module, name, call)

    torch = import_module("torch")  # measured, so not at the top
    stamp("Python and import torch")
    train = import_module("apps.main.train")
    stamp("the other imports")
    for part, (module, name) in ENDS.items():
        stamp_after(import_module(module), name, part)
    first_forward = partial(stamp, "model, optimizer, first rows")
    torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: first_forward())

    def run() -> None:
        train.main(keys)
        Path(path).write_text(json.dumps(stamps), encoding="utf-8")

    train.run_program(run)


if __name__ == "__main__":
    main()
