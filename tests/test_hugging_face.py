"""A run that starts from a folder of transformers: its weights, if they are of its model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from apps.main import app as main_app
from apps.main.hugging_face import llama
from apps.main.transformer import ModelArgs, build_transformer, parallel_plan
from lingua.checkpoint.tensors import Part, tensors_of
from lingua.errors import UserError
from lingua.hugging_face import open_folder, open_weights
from lingua.init import canonical_name, init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.parallelize import parallelize_model
from tests.converted import SCALING, a_model, convert_to, same, save_here, tensors_in

# of DCP, where the tests read a checkpoint outside the ranks
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CPU = torch.device("cpu")
TOPOLOGIES = [(1, 1, 1), (1, 3, 1), (2, 1, 2), (1, 2, 2)]


def begin_here(folder: Path, args: ModelArgs, sizes: tuple[int, int, int]) -> Any:
    """The model's tensors whole, what this rank holds of them, and what it read."""
    replicate, shard, tp = sizes
    parallel = DistributedArgs(dp_replicate=replicate, dp_shard=shard, tp_size=tp)
    mesh = start(CPU, detect_launch(), parallel)
    model = parallelize_model(build_transformer(args), mesh, parallel_plan(args, 16), parallel)
    init_parameters(model, 1, CPU)
    source, read = open_folder(llama, str(folder), "checkpoint.init_from")[0], []

    def count(parts: list[Part]) -> None:
        read.extend(part.out.numel() for part in parts)
        source.read_parts(parts)

    replace(source, read_parts=count).load(tensors_of(model), "model.")
    found, held = {}, 0
    for name, p in model.named_parameters():
        split = isinstance(p, DTensor)
        held += (p.to_local() if split else p).numel()
        found[canonical_name(name)] = (p.full_tensor() if split else p).detach().clone()
    return found, held, sum(read)


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_every_topology_its_weights_and_a_rank_reads_what_it_holds(
    ranks, tmp_path, tied
):
    args = a_model(dim=36, n_heads=4, n_kv_heads=2, head_dim=10, multiple_of=7, weight_tying=tied)
    ranks.run(1, save_here, tmp_path / "ours", args, {})
    folder = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs", "shard_gb=3e-5")
    expected = tensors_in(tmp_path / "ours" / "0000000003")
    for sizes in TOPOLOGIES:
        n = sizes[0] * sizes[1] * sizes[2]
        for found, held, n_read in ranks.run(n, begin_here, folder, args, sizes):
            assert same(found, expected), sizes
            assert n_read == held


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dim": 48}, "model.dim = 48: must be 32"),
        ({"n_layers": 3}, "model.n_layers = 3: must be 2"),
        ({"n_kv_heads": 2}, "model.n_kv_heads = 2: must be 4"),
        ({"multiple_of": 64}, "which give a hidden size = 128: must be 88"),
        ({"rope_theta": 5e5}, "model.rope_theta = 500000.0: must be 10000.0"),
        ({"sliding_window": 8}, "model.sliding_window = 8: must be null"),
        ({"qk_norm": "per_head"}, "model.qk_norm = per_head: must be null"),
        ({"weight_tying": True}, "model.weight_tying = True: must be False"),
        ({"rope_scaling": SCALING}, "model.rope_scaling = RopeScaling(factor=4.0"),
    ],
)
def test_a_run_whose_model_is_another_is_refused_by_key(ranks, tmp_path, changed, said):
    ranks.run(1, save_here, tmp_path / "ours", a_model(), {})
    folder = str(convert_to(ranks, tmp_path / "ours", tmp_path / "theirs"))
    assert open_weights(main_app, folder, a_model(), []).path == Path(folder)
    with pytest.raises(UserError, match="is not that of") as error:
        open_weights(main_app, folder, a_model(**changed), [])
    assert said in str(error.value) and folder in str(error.value)
    if "rope_theta" in changed:  # the same tensors: that can be meant
        open_weights(main_app, folder, a_model(**changed), ["model.rope_theta"])
