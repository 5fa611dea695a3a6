"""Multi-token prediction: a fork that changes the model, and nothing else.

    python -m apps.main.train config=apps/mtp/configs/debug.yaml [key=value ...]

`data.n_views` is one more than the number of heads: 4 for the next 3 tokens. The logged loss is the
sum over the heads; the held-out loss is that of the next token alone.
"""

from dataclasses import dataclass, field, replace

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from apps.mtp.model import ModelArgs, build_multi_token, parallel_plan
from lingua.app import Built
from lingua.model.transformer import flops_per_token


@dataclass
class TrainArgs(MainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


def build(args: TrainArgs) -> Built:
    """Every head has its blocks and its product with the output matrix."""
    model, n_heads, seq_len = args.model, args.data.n_views - 1, args.data.seq_len
    n_layers = model.n_layers + model.head_layers * (n_heads - 1)
    flops = flops_per_token(replace(model, n_layers=n_layers), model.vocab_size * n_heads, seq_len)
    return Built(build_multi_token(model, n_heads), parallel_plan(model, n_heads, seq_len), flops)


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
