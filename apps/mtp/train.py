"""Train a language model that predicts several tokens ahead, one head for each further view.

    python -m apps.mtp.train config=apps/mtp/configs/debug.yaml [key=value ...]

The loop is that of apps.main; `data.n_views` says how far the heads look: 4 for the next 3 tokens.
The logged loss is the sum over the heads; the held-out loss is that of the next token alone.
"""

from dataclasses import dataclass, field, replace

from apps.main import train as app
from apps.main.train import Built
from apps.mtp.model import ModelArgs, build_multi_token, parallel_plan
from lingua.parallel.program import run_program
from lingua.transformer import flops_per_token


@dataclass
class TrainArgs(app.TrainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


def build(args: TrainArgs) -> Built:
    """The model of this app: every head has its blocks and its product with the output matrix."""
    model, n_heads = args.model, args.data.n_views - 1
    n_layers = model.n_layers + model.head_layers * (n_heads - 1)
    return Built(
        build_multi_token(model, n_heads),
        parallel_plan(model, args.data.seq_len),
        flops_per_token(
            replace(model, n_layers=n_layers), model.vocab_size * n_heads, args.data.seq_len
        ),
    )


def check(argv: list[str], world_size: int) -> tuple[TrainArgs, list[str]]:
    """What a launcher asks before it submits a run."""
    return app.check(argv, world_size, TrainArgs, build)


if __name__ == "__main__":
    run_program(lambda: app.main(TrainArgs, build))
