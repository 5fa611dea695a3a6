"""`lingua check`: what is wrong with a rank is named, whatever it is."""

import io
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

from lingua.tools.commands.check import main
from tests.disk import full_disk
from tests.ranks import Ranks

HOST = socket.gethostname()
ON_MORE_DEVICES = "memory in use, GiB", "all-reduce, GB/s"


@contextmanager
def faulty_machine() -> Iterator[None]:
    """What this process sees of its machine: products take 0.5 s more, attention is wrong
    by a thousandth, a link changes one number in a thousand, the disk is full, and the clock is 5
    seconds ahead."""
    mm, attention, send, now = torch.mm, F.scaled_dot_product_attention, dist.all_reduce, time.time

    def corrupted(t: torch.Tensor, *args: object, **options: object) -> None:
        send(t, *args, **options)
        t.view(-1)[999::1000] += 1

    with pytest.MonkeyPatch.context() as patch, full_disk():
        patch.setattr(torch, "mm", lambda a, b: (time.sleep(0.5), mm(a, b)))
        patch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: 1.001 * attention(*a, **o))
        patch.setattr(dist, "all_reduce", corrupted)
        patch.setattr(time, "time", lambda: now() + 5)
        yield


@contextmanager
def dead_device() -> Iterator[None]:
    """This process is told of CUDA devices, and each call to one fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 3)
        yield


Fault = Callable[[], AbstractContextManager[None]]


def check_here(argv: list[str], faulty_rank: int | None, fault: Fault) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    machine = fault() if os.environ["RANK"] == str(faulty_rank) else nullcontext()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left, machine:
        main(argv)
    return left.value.code, out.getvalue(), err.getvalue()


def check(
    ranks: Ranks,
    folder: Path,
    *words: str,
    n: int = 2,
    faulty_rank: int | None = None,
    fault: Fault = faulty_machine,
) -> tuple[int, dict[str, list[str]], list[str]]:
    """(exit code, {check: its line of the table}, errors) of the command on n ranks, which all
    leave with that code and leave no file."""
    argv = [f"folder={folder}", *words]
    (code, out, err), *others = ranks.run(n, check_here, argv, faulty_rank, fault)
    assert others == [(code, "", "")] * (n - 1)  # rank 0 alone prints
    assert not list(folder.iterdir())
    lines = out.splitlines()
    assert re.fullmatch(rf"{n} ranks?; device: .*", lines[0])
    table = {re.split("  +", line)[0]: re.split("  +", line)[1:] for line in lines[2:]}
    return code, table, err.splitlines()


def test_what_is_right_is_measured_and_one_rank_is_compared_with_none(ranks, tmp_path):
    code, table, errors = check(ranks, tmp_path, n=1)
    assert (code, errors) == (0, [])
    assert {name for name, row in table.items() if row[0] == "not measured"} == set(ON_MORE_DEVICES)
    assert all(row[0] == "right" for name, row in table.items() if name not in ON_MORE_DEVICES)
    least, median, most = map(float, table["products, TFLOP/s"][-3:])
    assert 0.0001 < least == median == most < 10  # of one thread: 10 MFLOP/s to 10 TFLOP/s
    assert 0.5 < float(table["attention, error / plain"][-1]) <= 2


def test_a_rank_whose_machine_is_faulty_is_named_with_what_is_wrong(ranks, tmp_path):
    code, table, errors = check(ranks, tmp_path, faulty_rank=1)
    errors = [line for line in errors if "copies" not in line]  # other processes slow them
    number = r"\d[\d.e+-]*"
    expected = {
        "products, TFLOP/s": number,
        "attention, error / plain": number,
        "masked attention, error / plain": number,
        "all-reduce, GB/s": "[\\d,]+ wrong sums",
        "disk, GB/s": f"{re.escape(str(tmp_path))}: File too large",
        "clock, s from the median": number,
    }
    named = dict(line.removeprefix("error: ").split(": ", 1) for line in errors)
    assert code == 1 and len(errors) == len(named) and named.keys() == expected.keys(), errors
    for label, why in expected.items():
        assert re.fullmatch(rf"rank 1 on {re.escape(HOST)} \(cpu\): {why}", named[label])
        assert table[label][0] == "OUT OF LINE"
    slow, median = (float(table["products, TFLOP/s"][i]) for i in (-3, -2))
    assert named["products, TFLOP/s"].endswith(f": {slow:.4g}") and 2 * slow < median
    seconds = float(named["clock, s from the median"].rpartition(" ")[2])
    assert 4 < seconds < 6.5  # ranks read their clocks one after another
    assert table["loss, error / plain"][0] == "right"


@pytest.mark.parametrize("dead", [0, 2])  # rank 0 prints the table
def test_a_rank_whose_device_has_failed_is_named_in_all_that_needs_it(ranks, tmp_path, dead):
    code, table, errors = check(ranks, tmp_path, n=3, faulty_rank=dead, fault=dead_device)
    named: dict[str, list[str]] = {}
    for line in errors:
        label, place, _ = line.removeprefix("error: ").split(": ", 2)
        named.setdefault(label, []).append(place)
    place = f"rank {dead} on {HOST} (cuda:{dead})"
    on_hosts = {"all-reduce, GB/s", "disk, GB/s", "clock, s from the median"}
    for label in {"device", *table} - on_hosts:
        # CPUs of ranks that are right may be slowed by other processes
        assert place in named[label] and (named[label] == [place] or label.endswith("/s")), errors
    assert code == 1 and table["all-reduce, GB/s"][0] == "not measured"


def test_a_device_that_is_not_what_it_is_said_to_be_is_named(ranks, tmp_path):
    code, _, errors = check(ranks, tmp_path, "gpu=h100")
    devices = [line for line in errors if line.startswith("error: device: ")]
    assert code == 1 and devices == [
        f"error: device: rank {rank} on {HOST} (cpu): cpu, not NVIDIA H100 80GB HBM3"
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("tflops", "need"),
    # 0.55 of the peak over 1.25, the longest that a planned step takes, to 1.1 of the peak
    [(1000, "at least 440, at most 1100"), (1e-6, "at least 4.4e-07, at most 1.1e-06")],
)
def test_a_device_that_is_slower_or_faster_than_its_kind_is_named(ranks, tmp_path, tflops, need):
    gpu, folder = tmp_path / "own.yaml", tmp_path / "folder"
    folder.mkdir()
    others = ("memory_gib", "memory_gb_per_s", "bf16_tflops", "tf32_tflops")
    kind = dict.fromkeys(others, 10) | {"node_gb_per_s": 1e-3, "network_gb_per_s": 1e-3}
    gpu.write_text(yaml.safe_dump(kind | {"name": "cpu", "fp32_tflops": tflops}))
    code, table, errors = check(ranks, folder, f"gpu={gpu}", n=1)
    label = "products, TFLOP/s"
    assert code == 1 and table[label][:2] == ["OUT OF LINE", need]
    value = table[label][-1]
    assert f"error: {label}: rank 0 on {HOST} (cpu): {value}" in errors
