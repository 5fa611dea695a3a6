"""One start of the training program, stamped with the time at which each part of it was done.

python -m apps.bench.startup_probe STAMPS.json config=... key=value ...
"""

import json
import sys
import time
from dataclasses import replace
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
    from apps.main import app
    from apps.main import train as program
    from lingua.data.text import TextData

    stamp("imports")

    class StampedData(TextData):
        def check(self, *args: Any) -> None:
            stamp("process group")
            super().check(*args)

        def open(self, *args: Any) -> Any:
            opened = super().open(*args)
            stamp("data")
            return opened

    class StampedObjective(program.Objective):
        def gradients(self, *args: Any) -> Any:
            stamp("model")
            return super().gradients(*args)

    def run() -> None:
        args: Any = program.load_run(app, keys)[0]
        stamp("config")
        program.train(replace(app, data=StampedData(), objective=StampedObjective), args)
        Path(path).write_text(json.dumps(stamps), encoding="utf-8")

    program.run_program(run)


if __name__ == "__main__":
    main()
