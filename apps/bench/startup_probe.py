"""One start of the training program, stamped with the time at which each part of it was done.

python -m apps.bench.startup_probe stamps.json config=... key=value ...

The first call of an app's data follows the process group, the last one opens the data, and the
first call of its model begins the first step.
"""

import json
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any


class StampedData:
    """An app's data, whose calls are stamped."""

    def __init__(self, data: Any, stamps: dict[str, float]) -> None:
        self.data, self.stamps = data, stamps

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.stamps.setdefault("process group", time.time())
            result = getattr(self.data, name)(*args, **kwargs)
            self.stamps["data"] = time.time()
            return result

        return call


def main() -> None:
    path, *keys = sys.argv[1:]
    import_module("torch")  # measured, so not at the top
    stamps = {"torch": time.time()}
    from apps.main.train import train
    from lingua.app import choose_app
    from lingua.checkpoint.run_config import load_run
    from lingua.data.sources import TextData
    from lingua.parallel.program import run_program

    stamps["imports"] = time.time()

    def stamp_model(*_: Any) -> None:
        stamps.setdefault("model", time.time())

    def run() -> None:
        app = choose_app(keys)
        args: Any = load_run(app, keys)[0]
        stamps["config"] = time.time()

        def build(args: Any) -> Any:
            built = app.build(args)
            built.module.register_forward_pre_hook(stamp_model)
            return built

        data = StampedData(app.data or TextData(), stamps)
        train(replace(app, build=build, data=data), args)
        Path(path).write_text(json.dumps(stamps), encoding="utf-8")

    run_program(run)


if __name__ == "__main__":
    main()
