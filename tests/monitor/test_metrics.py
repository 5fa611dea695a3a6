"""The lines that programs and people read, and the numbers of the device."""

import json
import logging
import math
import re
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.monitor.logger import init_logger, progress_line
from lingua.monitor.means import mean_parts, means
from lingua.monitor.metrics import Chain, append_line, cut_back, mfu, peak_mem_gib
from lingua.monitor.peaks import peak_flops
from tests.disk import full_disk
from tests.mistakes import refused
from tests.programs import python


def strict(text: str):
    """Parse JSON as the standard defines it: no NaN, no Infinity."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_a_line_is_strict_json_with_its_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1, "loss": math.nan, "lr": 0.1, "by": {"a": [math.inf, "ü"]}})
    (line,) = path.read_text(encoding="utf-8").splitlines()
    written = strict(line)
    created = datetime.fromisoformat(written.pop("created_at"))
    assert written == {"step": 1, "loss": None, "lr": 0.1, "by": {"a": [None, "ü"]}}
    assert created.utcoffset() == timedelta(0)
    append_line(path, {"step": 2, "loss": 1.5})
    assert steps_of(path) == [1, 2]


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1})
    before = path.read_bytes()
    with full_disk(len(before) + 20), pytest.raises(OSError, match="No space left"):
        append_line(path, {"step": 2, "loss": 1.0})
    assert path.read_bytes() == before
    append_line(path, {"step": 3})
    assert steps_of(path) == [1, 3]


def write_lines(path: Path, steps: list[int], torn: bytes = b"") -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps]
    path.write_bytes("".join(lines).encode() + torn)


def steps_of(path: Path) -> list[int]:
    return [strict(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "torn", [b"", b'{"step": 3, "lo', b'{"step": 3}', b'{"step": 2}', b"\x00\xff", b"\n"]
)
def test_cutting_back_removes_later_lines_and_an_incomplete_one(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [1, 2, 2, 10, 11], torn)
    cut_back(path, 2)
    assert steps_of(path) == [1, 2, 2]
    assert list(tmp_path.iterdir()) == [path]
    append_line(path, {"step": 3})
    assert steps_of(path) == [1, 2, 2, 3]


def test_cutting_back_does_not_touch_a_file_whose_lines_all_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut_back(path, 5)
    assert not path.exists()
    write_lines(path, [0, 5])
    before = path.stat()
    cut_back(path, 5)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    cut_back(path, 0)
    assert steps_of(path) == [0]


def test_the_links_that_are_left_after_cutting_back_are_those_of_a_file_that_was_never_longer(
    tmp_path,
):
    """Also where a probe writes about a step that then fails, as the event of the end says."""

    def write(path, chain, lines):
        for line in lines:
            linked = line if (link := chain.link(line)) is None else {**line, "chain": link}
            append_line(path, linked)
            chain = chain.after(linked)
        return chain

    first = [{"event": "start", "step": 0}, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    look, failed = {"event": "look", "step": 3}, {"event": "stop", "step": 2, "reason": "error"}
    longer, path = tmp_path / "longer", tmp_path / "path"
    write(longer, Chain(), [*first, look, failed])
    chain = write(path, Chain(), [*first, failed])
    assert cut_back(longer, 2).chain == cut_back(path, 2).chain == chain
    assert chain.lines and chain.events and chain.link(look) is None
    others = [dict(line) for line in first]
    others[1]["loss"] = 3.5  # in a line before the event
    assert write(tmp_path / "other", Chain(), [*others, failed]).events != chain.events
    assert cut_back(path, 0).chain.lines == "" != cut_back(path, 0).chain.events


def test_peaks_are_of_the_very_device_or_not_known():
    known = {"A100-SXM4-80GB": 312, "A100 80GB PCIe": 312, "H100 80GB HBM3": 989, "H100 PCIe": 756}
    known |= {"H100 NVL": 835.5, "H200": 989, "B200": 2250, "L40S": 362, "GeForce RTX 4090": 165.2}
    peaks = {f"NVIDIA {name}": 1e12 * tflops for name, tflops in known.items()}
    for name, peak in (peaks | {"AMD Instinct MI300X": 1307.4e12}).items():
        assert peak_flops(name, torch.bfloat16) == pytest.approx(peak), name
        assert peak_flops(name, torch.float32) is None
    others = ["", "cpu", "NVIDIA A10G", "Tesla V100-SXM2-32GB", "NVIDIA GeForce RTX 4090 D"]
    others += ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"]
    assert [peak_flops(name, torch.bfloat16) for name in others] == [None] * len(others)
    # In percent, and not known where the peak is not.
    assert mfu(6e9, 20_000, 312e12) == pytest.approx(100 * 6e9 * 20_000 / 312e12)
    assert mfu(6e9, 20_000, None) is None


def test_peak_memory_of_the_process_grows_by_what_it_touches():
    before = peak_mem_gib(torch.device("cpu"))
    block = bytearray(b"x") * 2**28  # 0.25 GiB
    assert 0.05 < before < 50
    assert peak_mem_gib(torch.device("cpu")) >= min(before + 0.2, len(block) / 2**30)


@pytest.fixture
def restored_logging():
    """The loggers are global to the process: restore them."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    for handler in [h for h in root.handlers if h not in before[1]]:
        handler.close()
    root.level, root.handlers = before
    for name in ("lingua", "apps", "__main__"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_rank_0_logs_and_other_ranks_only_warn(tmp_path, capsys, restored_logging):
    dump_dir = tmp_path / "runs" / "a"
    for message in ("first start", "second start"):
        init_logger(dump_dir, rank=0)
        logging.getLogger("lingua.data").info(message)
    logging.getLogger("apps.main.train").warning("mind %s", "this")
    logging.getLogger("somebody.else").info("not shown")
    out, err = capsys.readouterr()
    expected = ["first start", "second start", "warning: mind this"]
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in out.splitlines()] == expected
    assert err == ""
    stamped = [line.split(" ", 1) for line in (dump_dir / "train.log").read_text().splitlines()]
    assert [text for _, text in stamped] == expected
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", when) for when, _ in stamped)

    init_logger(tmp_path, rank=3)
    logging.getLogger("lingua.data").info("quiet")
    logging.getLogger("lingua.data").warning("loud")
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"\d\d:\d\d:\d\d \[rank 3\] warning: loud\n", err)
    assert not (tmp_path / "train.log").exists()
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    refused(lambda: init_logger(folder, rank=0), f"dump_dir = {folder}", "train.log")


LINE = {"loss": 2.13449, "grad_norm": 0.8123, "lr": 3e-4, "tokens_per_s": 31_234.0, "mfu": 41.23}
LINE |= {"peak_mem_gib": 1.23, "skipped_steps": 0}


def test_the_progress_line_shows_what_is_known():
    shown = progress_line(120, 2000, LINE, 125.2, {})
    assert shown == "step  120 loss 2.134 grad 0.81 lr 3.0e-4 31.2k tok/s mfu 41% eta 2.1m"
    unknown = LINE | {"mfu": None, "skipped_steps": 2, "loss": math.nan}
    shown = progress_line(120, 2000, unknown, 125.2, {f"n{i}": i / 3 for i in range(9)})
    assert " loss nan n0 0 n1 0.333 n2 0.667 grad 0.81 " in shown  # of many the first
    assert shown.endswith(" tok/s 1.2 GiB eta 2.1m skipped 2")


FULL_DISK = """
import logging, pathlib, resource, sys
from lingua.monitor.logger import init_logger
init_logger(pathlib.Path(sys.argv[1]), 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for i in range(200):
    logging.getLogger("lingua.x").info("line %d", i)
"""


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path):
    command = [*python(), "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "line 199" in done.stdout
    assert done.stderr.startswith(f"error: {tmp_path / 'train.log'} cannot be written: File too ")
    assert len(done.stderr.splitlines()) == 1
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as closed:
        closed.stdout.close()
        assert "Logging error" not in closed.stderr.read()


def test_the_mean_of_a_metric_leaves_out_padding_and_ignored_targets():
    targets = torch.tensor([[[1, IGNORE], [2, 3], [IGNORE, IGNORE]]])  # 1 view, 3 rows, 2 positions
    micro = MicroBatch(torch.tensor([5, 6, -1]), targets[0].clamp(0), targets)
    by_target = torch.tensor([[1.0, math.nan], [2.0, 6.0], [math.nan, math.nan]])
    pairs = torch.tensor([[True], [False], [True]])
    metrics = {
        "row": torch.tensor([1.0, 4.0, math.inf]),
        "target": by_target,
        "view": by_target[None],
        "pair": (torch.tensor([[7.0], [math.nan], [8.0]]), pairs),
        "none": (pairs, pairs & False),
    }
    parts = mean_parts(metrics, micro)
    assert means(parts, [part.tolist() for part in parts.values()]) == {
        "row": 2.5, "target": 3.0, "view": 3.0, "pair": 7.5,
    }  # fmt: skip
    with pytest.raises(UserError, match=r'metric "odd": has shape \[3, 1\]; must be .*\[3, 2\]'):
        mean_parts({"odd": torch.zeros(3, 1)}, micro)
