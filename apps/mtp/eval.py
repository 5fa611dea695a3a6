"""Benchmark a checkpoint of this app, as apps.main.eval does one of apps.main."""

from apps.main import eval as app
from apps.main.eval import EvalArgs
from apps.mtp.model import ModelArgs, build_trained
from lingua.parallel.program import run_program


def check(argv: list[str], world_size: int) -> tuple[EvalArgs, list[str]]:
    """What a launcher asks before it submits an evaluation."""
    return app.check(argv, world_size, ModelArgs, build_trained)


if __name__ == "__main__":
    run_program(lambda: app.main(None, ModelArgs, build_trained))
