"""The hash of a checkpoint's tensors: the same on every mesh and from its files, and no other bits
have it."""

import json
from itertools import product

import torch
from torch import Tensor

from lingua.base.hashing import hash_bits, key_of
from lingua.checkpoint import digest as module
from lingua.checkpoint.digest import BITS, digest, hash_part
from lingua.checkpoint.folder import read_checkpoint
from lingua.checkpoint.source import open_checkpoint
from lingua.checkpoint.tensors import local_parts
from lingua.parallel.alone import one_process
from lingua.tools.audit.records import digest_of_files
from tests.apps.meshes import Sizes, on_meshes
from tests.checkpoints import save_here, whole_values


def by_elements(tensors: dict[str, Tensor]) -> str:
    """The hash, an element at a time in Python's integers."""
    total = 0
    for name, t in tensors.items():
        total += key_of(name, t.dtype, *t.shape)
        bits = t.view(BITS[t.element_size()])
        for place in product(*map(range, t.shape)):
            factor = 1
            for dim, i in enumerate(place):
                key = key_of(name, t.dtype, dim)
                factor *= int(hash_bits(key, torch.tensor(i))) | 1
            total += int(bits[place]) * factor
    return f"{total % 2**64:016x}"


@on_meshes((1, 2, 1), (2, 1, 1), (2, 1, 2), soak=[(1, 1, 1), (1, 2, 2), (2, 2, 2), (1, 3, 1)])
def test_it_is_that_of_the_elements_on_any_mesh_and_from_files(ranks, tmp_path, sizes: Sizes):
    ranks.run(sizes[0] * sizes[1] * sizes[2], save_here, tmp_path, [2], sizes)
    folder = tmp_path / "0000000002"
    expected = by_elements(whole_values(fill=2))
    assert json.loads((folder / "train_state.json").read_text())["tensors"] == expected
    checkpoint, _ = read_checkpoint(folder)
    assert digest_of_files(open_checkpoint(checkpoint)) == expected


def test_a_bit_a_place_a_name_a_dtype_and_a_shape_change_it(monkeypatch):
    def edited(name: str, t: Tensor) -> dict[str, Tensor]:
        return whole_values() | {name: t}

    matrix = whole_values()["model.matrix"]
    bit = matrix.clone()
    bit.view(torch.int32)[6, 2] ^= 1
    swapped = matrix.clone()
    swapped[0, 0], swapped[3, 1] = matrix[3, 1], matrix[0, 0]
    values = [
        whole_values(),
        edited("model.matrix", bit),
        edited("model.matrix", swapped),
        edited("model.matrix", matrix[[1, 0, 2, 3, 4, 5, 6]]),
        edited("model.matrix", matrix.view(torch.int32)),
        edited("model.matrix", matrix.view(3, 7)),
        edited("model.other", torch.zeros(3)),
        edited("model.other", torch.zeros(4)),
    ]
    with one_process():
        hashes = [digest(tensors) for tensors in values]
        assert len(set(hashes)) == len(values)
        monkeypatch.setitem(module.CHUNKS, "cpu", 4)  # some rows at a time
        assert [digest(tensors) for tensors in values] == hashes


def test_it_takes_little_memory():
    big = {"t": torch.ones(1 << 10, 1 << 10)}
    [part] = local_parts(big)
    with torch.profiler.profile(profile_memory=True) as profile:
        hash_part(part)
    peak = max(event.cpu_memory_usage for event in profile.events())
    assert peak <= 8 * module.CHUNKS["cpu"] + (1 << 14)
