"""One start of the training program, stamped with the time at which each part of it was done.

python -m apps.bench.startup_probe stamps.json config=... key=value ...

The file is written at the first step; `{pid}` in its name stands for the process.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# What a part ends with: the return of a function, by its name in lingua.run.start, which calls it.
ENDS = {
    "process group and mesh": "start",
    "checks, which build the model on the meta device": "check_run",
    "data: shards, held-out rows": "open_data",
}


def main() -> None:
    name, *keys = sys.argv[1:]
    path = Path(name.replace("{pid}", str(os.getpid())))
    stamps: dict[str, float] = {}

    def stamp(part: str) -> None:
        stamps.setdefault(part, time.time())

    def call_after(module: ModuleType, name: str, then: Callable[[], object]) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            then()
            return result

        setattr(module, name, call)

    def after_config() -> None:
        stamp("Python and config")
        torch = import_module("torch")
        stamp("import torch")
        import_module("apps.main.train")
        stamp("the other imports")
        for part, name in ENDS.items():
            call_after(import_module("lingua.run.start"), name, partial(stamp, part))
        hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: first_step())

        def first_step() -> None:
            hook.remove()
            stamp("model, optimizer, first rows")
            path.write_text(json.dumps(stamps), encoding="utf-8")

    program = import_module("lingua.run.program")
    call_after(program, "load_run", after_config)
    program.run_program(partial(program.main, keys))


if __name__ == "__main__":
    main()
