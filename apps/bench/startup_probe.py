"""One start of the training program, stamped with the time at which each part of it was done.

python -m apps.bench.startup_probe STAMPS.json config=... key=value ...
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    path, *keys = sys.argv[1:]
    stamps: dict[str, float] = {}

    def stamp(part: str) -> None:
        stamps.setdefault(part, time.time())

    import_module("torch")  # measured, so not at the top
    stamp("torch")
    program = import_module("apps.main.train")
    foreign = import_module("lingua.config.meta_lingua").META_LINGUA
    stamp("imports")
    setup = import_module("apps.main.setup")
    start = setup.start

    def stamped_start(*args: Any) -> Any:
        mesh = start(*args)
        stamp("process group")
        return mesh

    def stamped_build(args: Any) -> Any:
        stamp("data")
        built = program.build(args)
        built.module.register_forward_pre_hook(lambda module, inputs: stamp("model"))
        return built

    def run() -> None:
        args, _ = program.load(program.TrainArgs, keys, foreign=foreign)
        stamp("config")
        setup.start = stamped_start
        program.train(args, stamped_build)
        Path(path).write_text(json.dumps(stamps), encoding="utf-8")

    program.run_program(run)


if __name__ == "__main__":
    main()
