"""A run that starts from a folder of transformers: its weights, if they are of its model."""

import ctypes
import gc
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from apps.main.hugging_face import llama
from apps.main.transformer import ModelArgs, build_transformer, parallel_plan
from lingua.checkpoint.tensors import local_parts, tensors_of
from lingua.parallel.init import canonical_name
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.parallelize import parallelize_model
from lingua.tools.exchange.hugging_face import INDEX, SINGLE, open_folder
from tests.apps.meshes import on_mesh
from tests.mistakes import refused
from tests.tools.exchange.converted import SCALING, a_model, convert_to, same, save_here, tensors_in

# of DCP, where the tests read a checkpoint outside the ranks
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CPU = torch.device("cpu")
TOPOLOGIES = [(1, 1, 1), (1, 3, 1), (1, 2, 2)]


def bytes_read(work: Callable[[], None]) -> int:
    """By this process while it does `work`, as the system counts them."""
    before = Path("/proc/self/io").read_text()
    work()
    after = Path("/proc/self/io").read_text()
    return int(after.split()[1]) - int(before.split()[1]) - len(before)


def begin_here(folder: Path, args: ModelArgs, sizes: tuple[int, int, int]) -> Any:
    """The model's tensors whole, bytes of what this rank holds of them, and bytes it read."""
    plan = parallel_plan(args, 16)
    model, _ = on_mesh(build_transformer(args), plan, sizes, model_dtype="bf16")
    source, _, _ = open_folder(llama, folder)
    parts = local_parts(tensors_of(model))
    n_read = bytes_read(lambda: source.read_parts(parts))
    found, held = {}, 0
    for name, p in model.named_parameters():
        split = isinstance(p, DTensor)
        held += (p.to_local() if split else p).nbytes
        found[canonical_name(name)] = (p.full_tensor() if split else p).detach().clone()
    return found, held, n_read


@pytest.mark.parametrize(
    ("tied", "topologies"), [(False, TOPOLOGIES), (True, TOPOLOGIES[-1:])], ids=["untied", "tied"]
)
def test_a_folder_gives_every_topology_its_weights_and_a_rank_reads_what_it_holds(
    ranks, tmp_path, tied, topologies
):
    args = a_model(dim=36, n_heads=4, n_kv_heads=2, head_dim=10, multiple_of=7, weight_tying=tied)
    ranks.run(1, save_here, tmp_path / "ours", args, {})
    folder = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs", "shard_gb=3e-5")
    expected = tensors_in(tmp_path / "ours" / "0000000003")
    for sizes in topologies:
        n = sizes[0] * sizes[1] * sizes[2]
        for found, held, n_read in ranks.run(n, begin_here, folder, args, sizes):
            assert same(found, expected), sizes
            assert n_read == held


# ---------------------------------------------------------------------------- memory and reads


def peak_bytes() -> int:
    """The most memory of this process since `reset_peak`, files mapped into it included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def growth_here(folder: Path) -> tuple[int, int, int]:
    """Bytes: by which memory grows while this rank loads its part, what it holds of the model, and
    by which memory grows where it then loads all of the folder."""
    mesh = start(CPU, detect_launch(), parallel := DistributedArgs(model_dtype="fp32"))
    source, args, _ = open_folder(llama, folder)
    model = parallelize_model(build_transformer(args), mesh, parallel_plan(args, 16), parallel)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be taken again
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak_bytes()
    model.to_empty(device="cpu")
    source.load(tensors_of(model), "model.")
    grown = peak_bytes() - before
    held = sum(part.out.nbytes for part in local_parts(tensors_of(model)))
    everything = source.whole(source.tensors)
    return grown, held, peak_bytes() - before - grown if everything else 0


def test_a_rank_loads_with_the_memory_of_its_part_and_no_more_than_one_tensor(ranks, tmp_path):
    """Of 137 MB in bfloat16, to be held in float32."""
    args = replace(a_model(dim=1024, n_heads=8, n_layers=4, multiple_of=256), vocab_size=8192)
    (tmp_path / "config.json").write_text(json.dumps(llama.to_config(args, 16)))
    tensors = llama.tensors(args).values()
    save_file({t.name: torch.randn(t.shape).bfloat16() for t in tensors}, tmp_path / SINGLE)
    one_tensor = 2 * max(math.prod(t.shape) for t in tensors)
    for grown, held, of_all in ranks.run(2, growth_here, tmp_path):
        assert held <= grown < held + one_tensor
        assert of_all > 5 * one_tensor  # the count notices more


# ------------------------------------------------------------------------------------- refusals


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"dim": 48}, "model.dim = 48: must be 32"),
    ({"n_layers": 3}, "model.n_layers = 3: must be 2"),
    ({"n_kv_heads": 2}, "model.n_kv_heads = 2: must be 4"),
    ({"multiple_of": 64}, "which give a hidden size = 128: must be 88"),
    ({"rope_theta": 5e5}, "model.rope_theta = 500000.0: must be 10000.0"),
    ({"sliding_window": 8}, "model.sliding_window = 8: must be null"),
    ({"qk_norm": "per_head"}, "model.qk_norm = per_head: must be null"),
    ({"weight_tying": True}, "model.weight_tying = True: must be False"),
    ({"rope_scaling": SCALING}, "model.rope_scaling = RopeScaling(factor=4.0"),
]


def test_a_run_whose_model_is_another_is_refused_by_key(ranks, tmp_path):
    ranks.run(1, save_here, tmp_path / "ours", a_model(), {})
    folder = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs")
    source, _, _ = open_folder(llama, folder)
    source.check_model(a_model(), [])
    for changed, said in OTHERS:
        check = partial(source.check_model, a_model(**changed))
        refused(partial(check, []), "is not that of", said, folder)
        if "rope_theta" in changed:  # the same tensors: that can be meant
            check(["model.rope_theta"])


def test_a_folder_whose_files_are_not_what_it_says_is_refused_by_file(ranks, tmp_path):
    ranks.run(1, save_here, tmp_path / "ours", a_model(), {})
    folder = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs", "shard_gb=3e-5")

    refusal = partial(refused, lambda: open_folder(llama, folder))
    index = json.loads((folder / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    other = index | {"weight_map": index["weight_map"] | {name: "none.safetensors"}}
    (folder / INDEX).write_text(json.dumps(other))
    assert refusal().startswith(f"{folder / INDEX}: refers to the file none.safetensors, which ")
    (folder / INDEX).write_text(json.dumps(index))
    weights = load_file(folder / file)
    save_file({n: t[:-1] for n, t in weights.items()}, folder / file)
    assert f"{name}: (259, 32) in config.json, (258, 32) in the folder" in refusal()
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in weights.items()}, folder / file)
    assert refusal().startswith(f"{folder / file}: {name} is F8_E4M3: must be of F64, F32, F16")
    save_file(weights, folder / file)
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    assert refusal().startswith(f"{folder / file}: cannot be read as safetensors")
