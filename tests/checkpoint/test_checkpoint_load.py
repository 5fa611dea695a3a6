"""Loading checkpoints: on any topology, never what does not fit, and nothing is executed."""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard, distribute_tensor

from lingua.checkpoint.folder import Checkpoint, read_checkpoint
from lingua.checkpoint.source import open_checkpoint
from tests.checkpoints import ANY, join, refusal, tensors_on, whole

DTYPES = (
    # with a storage class of their own in torch, and without
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
    *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
)


def of_every_kind(fill: float) -> dict[str, torch.Tensor]:
    rows = torch.arange(60).reshape(5, 4, 3).remainder(7) + fill
    tensors = {name: rows.to(getattr(torch, name)) for name in DTYPES}
    strided = {"transposed": rows.permute(2, 0, 1), "every second": rows[:, ::2], "part": rows[1:3]}
    return tensors | strided | {"scalar": rows[1, 2, 0], "empty": rows[:0]}


def every_kind_here(root: Path) -> dict[str, bool]:
    """As DCP itself saves them, one by one as they are, not as parts of a model."""
    join()
    saved, loaded = of_every_kind(0), of_every_kind(1)
    dcp.save(saved, checkpoint_id=root)
    open_checkpoint(Checkpoint(root, 1, 1, {})).load(loaded)
    return {name: loaded[name].tolist() == t.tolist() for name, t in saved.items()}


def test_tensors_of_every_dtype_and_layout_are_read(ranks, tmp_path):
    [equal] = ranks.run(1, every_kind_here, tmp_path / "root")
    assert equal == dict.fromkeys(of_every_kind(0), True)


def view_here(root: Path) -> bool:
    """A tensor that was saved together with the elements before and behind it, as a view is."""
    join()
    part = torch.arange(60.0).reshape(5, 4, 3)[1:3].transpose(0, 2)
    dcp.save({"t": part}, checkpoint_id=root)
    torch.save(part, root / "view")
    redirect(root, "view", (root / "view").stat().st_size)
    loaded = torch.zeros(part.shape)
    open_checkpoint(Checkpoint(root, 1, 1, {})).load({"t": loaded})
    return torch.equal(loaded, part)


def test_a_tensor_that_is_a_part_of_what_was_saved_is_read(ranks, tmp_path):
    assert ranks.run(1, view_here, tmp_path / "root") == [True]


def read_here(path: Path, size: int) -> int:
    """The bytes that this rank reads of a tensor of `size` rows, to load what it holds of it."""
    mesh = join()
    t = distribute_tensor(torch.zeros(size, 256), mesh["dp_shard"], [Shard(0)])
    source = open_checkpoint(Checkpoint(path, 1, 1, {}))
    n_read = bytes_read(lambda: source.load({"t": t}))
    assert whole(t).eq(torch.arange(size)[:, None]).all()
    return n_read


def bytes_read(work: Callable[[], None]) -> int:
    """By this process while it does `work`, as the system counts them."""
    before = Path("/proc/self/io").read_text()
    work()
    after = Path("/proc/self/io").read_text()
    return int(after.split()[1]) - int(before.split()[1]) - len(before)


def save_whole_here(path: Path, size: int) -> None:
    join()
    dcp.save({"t": torch.arange(float(size))[:, None].expand(-1, 256).clone()}, checkpoint_id=path)


def test_a_rank_reads_what_it_holds_of_a_tensor_that_was_saved_whole(ranks, tmp_path):
    size, n_bytes = 4096, 4096 * 256 * 4
    ranks.run(1, save_whole_here, tmp_path / "root", size)
    [alone] = ranks.run(1, read_here, tmp_path / "root", size)
    assert n_bytes <= alone < 1.1 * n_bytes
    for n_read in ranks.run(4, read_here, tmp_path / "root", size):
        assert n_bytes / 4 <= n_read < 0.3 * n_bytes


def misfit_here(path: Path) -> dict[str, tuple[str, bool]]:
    """Each case: what is said, and whether every tensor is as it was."""
    mesh = join()
    checkpoint, _ = read_checkpoint(path)
    as_saved = tensors_on(mesh, fill=-99)
    cases: dict[str, dict[str, Any]] = {
        "shape": as_saved | {"model.matrix": torch.full((7, 4), -99.0)},
        "missing": as_saved | {"model.new": torch.zeros(2, 5)},
        "extra": {n: t for n, t in as_saved.items() if n not in ("model.small", "model.flag")},
        "many": as_saved | {f"model.new{i:02d}": torch.zeros(1) for i in range(30)},
        "fits": as_saved,
    }
    results = {}
    for case, tensors in cases.items():
        before = {name: whole(t).clone() for name, t in tensors.items()}
        said = refusal(lambda tensors=tensors: open_checkpoint(checkpoint).load(tensors))
        untouched = all(torch.equal(whole(t), before[name]) for name, t in tensors.items())
        results[case] = (said, untouched)
    return results


def test_tensors_that_do_not_fit_are_named_before_anything_is_loaded(ranks, saved):
    for results in ranks.run(2, misfit_here, saved / "0000000002"):
        said = {case: text for case, (text, _) in results.items()}
        assert "model.matrix: (7, 4) here, (7, 3) in the checkpoint" in said["shape"]
        assert "model.new: (2, 5) here, not in the checkpoint" in said["missing"]
        assert "model.small: in the checkpoint, not here" in said["extra"]
        assert "model.flag: in the checkpoint, not here" in said["extra"]
        assert said["many"].count("\n") == 11 and "and 20 more" in said["many"]
        assert said["fits"] == "not refused"
        untouched = {case: unchanged for case, (_, unchanged) in results.items()}
        assert untouched == dict.fromkeys(untouched, True) | {"fits": False}


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def trusting_here(path: Path) -> str:
    """Loads without looking at checksums, as `verify: size` would of files of the right size."""
    mesh = join()
    tensors = tensors_on(mesh)
    checkpoint = Checkpoint(path, 2, 2, {})
    return refusal(lambda: open_checkpoint(checkpoint).load(tensors), ANY)


def edit(folder: Path, change: Callable[[Metadata], Any]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def redirect(folder: Path, name: str, length: int) -> None:
    """Let every tensor be read from one file."""

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path, info.offset, info.length = name, 0, length

    edit(folder, change)


def evil_metadata(folder: Path, marker: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def evil_deep_in_metadata(folder: Path, marker: Path) -> None:
    edit(folder, lambda metadata: setattr(metadata, "planner_data", {"innocent": Evil(marker)}))


def evil_tensor(folder: Path, marker: Path) -> None:
    torch.save(Evil(marker), folder / "evil.distcp")
    redirect(folder, "evil.distcp", (folder / "evil.distcp").stat().st_size)


@pytest.mark.parametrize("plant", [evil_metadata, evil_deep_in_metadata, evil_tensor])
def test_reading_a_checkpoint_executes_nothing_from_it(ranks, saved, tmp_path, plant):
    folder = shutil.copytree(saved / "0000000002", tmp_path / "0000000002")
    plant(folder, tmp_path / "executed")
    for said in ranks.run(2, trusting_here, folder):
        assert "posix.mkdir" in said and "not refused" not in said
    assert not (tmp_path / "executed").exists()
    # the bait does bite: a reader that trusts runs it
    if plant is evil_tensor:
        torch.load(folder / "evil.distcp", weights_only=False)
    else:
        pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "executed").exists()


def without_a_part(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.matrix"].chunks.pop()


def twice(metadata: Metadata) -> None:
    """A part of a tensor in place of another: at least as many elements as it has."""
    chunks = metadata.state_dict_metadata["model.matrix"].chunks
    assert chunks[0].sizes[0] >= chunks[1].sizes[0]
    chunks[1] = chunks[0]


def moved(metadata: Metadata) -> None:
    """Parts that overlap, and leave a row out."""
    chunk = metadata.state_dict_metadata["model.matrix"].chunks[1]
    before, chunk.offsets = chunk.offsets, torch.Size((chunk.offsets[0] - 1, 0))
    for index in [i for i in metadata.storage_data if i.fqn == "model.matrix"]:
        if index.offset == before:
            entry = metadata.storage_data.pop(index)
            metadata.storage_data[replace(index, offset=chunk.offsets)] = entry


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: redirect(folder, "../../etc/passwd", 10), "../../etc/passwd"),
        # what no chunk fills would stay as it was
        (lambda folder: edit(folder, without_a_part), "model.matrix"),
        (lambda folder: edit(folder, twice), "each element of model.matrix once"),
        (lambda folder: edit(folder, moved), "each element of model.matrix once"),
        (lambda folder: os.truncate(folder / ".metadata", 100), ".metadata cannot be read"),
    ],
)
def test_a_metadata_of_another_folder_is_refused(ranks, saved, tmp_path, damage, named):
    folder = shutil.copytree(saved / "0000000002", tmp_path / "0000000002")
    damage(folder)
    for said in ranks.run(2, trusting_here, folder):
        assert said.startswith(f"UserError: {folder}") and named in said
