"""What a run reports of its held-out parts and benchmarks: files, wandb and the console."""

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lingua.base.version import code_hash
from lingua.checkpoint.state import Progress
from lingua.data.sources import prepare_sources
from lingua.monitor.reporter import Reporter
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start
from lingua.run.records import Record
from lingua.tokenizer.build import build_tokenizer
from lingua.tools.runs.held_out import heldout
from tests.apps.runs import Runs, arguments
from tests.wandb_file import logged_in


def report_here(dump_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """What wandb has of each name, and the logged messages."""
    os.environ["WANDB_SILENT"] = "true"
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("lingua.monitor.reporter")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    mesh = start(torch.device("cpu"), detect_launch(), DistributedArgs())
    args = arguments({"dump_dir": dump_dir, "logging.wandb.mode": "offline"})
    with Reporter(args, mesh, Progress(), flops_per_token=1.0) as report:
        held_out = {"nats_per_byte": 2.0, "nats_per_token": 3.0, "tokens": 5}
        report.validation(54_000, "wiki", held_out)
        report.validation(54_000, "pairs", {"loss": 0.5, "accuracy": 1.0})
        report.evaluation([{"step": 54_000, "task": "arc", "acc,none": 0.5}])
        report.event("gradients", 54_000, norms={"wq": 0.25, "wk": np.float32(2)}, device="cpu")
        report.samples(54_000, "wiki", [("Once", " upon"), ("größer", " als")])
    logger.removeHandler(handler)
    [file] = dump_dir.glob("wandb/offline-run-*/run-*.wandb")
    return {key: value for line in logged_in(file) for key, value in line.items()}, logged


def test_held_out_losses_and_benchmarks_are_reported_under_their_sources_and_tasks(ranks, tmp_path):
    [(summary, logged)] = ranks.run(1, report_here, tmp_path)
    assert summary["eval/arc/acc,none"] == 0.5 and summary["step"] == 54_000
    assert summary["validation/wiki/nats_per_byte"] == 2.0
    assert "validation/wiki/source" not in summary and "eval/arc/task" not in summary
    [line] = (tmp_path / "metrics.eval.jsonl").read_text().splitlines()
    assert json.loads(line)["task"] == "arc"
    lines = (tmp_path / "metrics.validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in lines] == ["wiki", "pairs"]
    assert summary["gradients/norms/wq"] == 0.25 and "gradients/device" not in summary
    assert summary["samples/wiki/nrows"] == 2
    [table] = (tmp_path / "wandb").glob("offline-run-*/files/" + summary["samples/wiki/path"])
    shown = json.loads(table.read_text())
    assert shown["columns"] == ["prompt", "text"] and shown["data"][0] == ["Once", " upon"]
    lines = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    shown = [(line["source"], line["prompt"]) for line in lines]
    assert shown == [("wiki", "Once"), ("wiki", "größer")]
    first, second = logged
    assert "wiki: 2.0000 nats/byte, 3.0000" in first and "pairs: loss 0.5000, accuracy" in second
    assert max(map(len, logged)) <= 71  # 80 columns with the time


def test_the_held_out_loss_of_several_sources_is_logged_as_their_mean_over_bytes(ranks, tmp_path):
    for name, words in (("one", "some words"), ("two", "words and more words of it")):
        lines = [json.dumps({"text": f"{words} {i}"}) + "\n" for i in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    args = arguments({"data.root_dir": tmp_path})
    prepare_sources(args.data, build_tokenizer(args.data.tokenizer), report=str)
    run = Runs(ranks, tmp_path, tmp_path).train((1, 1, 1), {"stop_at": 1, "validation.every": 1})
    start, stop = run.events
    assert (start["event"], start["topology"], start["device"]) == ("start", [1, 1, 1], "cpu")
    assert (start["step"], start["hosts"]) == (0, [socket.gethostname()])
    assert start["torch"] == torch.__version__ and len(start["commit"].partition("-")[0]) == 40
    assert start["code"] == code_hash("lingua", "apps.main") and start["flops_per_token"] > 1000
    assert (stop["event"], stop["step"], stop["reason"]) == ("stop", 1, "stop_at")
    losses = [line["nats_per_byte"] for line in run.held_out]
    sizes = [line["bytes"] for line in run.held_out]
    nats = [loss * size for loss, size in zip(losses, sizes, strict=True)]
    mean = f"{sum(nats) / sum(sizes):.4f}"
    assert f"step 1 held-out mean of 2 sources: {mean} nats/byte" in run.log
    assert mean != f"{sum(losses) / 2:.4f}"
    steps, values = heldout(Record(run.dump_dir))
    assert (steps.tolist(), [f"{value:.4f}" for value in values]) == ([1], [mean])
