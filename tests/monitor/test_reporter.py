"""What a run says to Weights & Biases: the lines of its files, under names that tell them apart."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from lingua.monitor.metrics import LoggingArgs, WandbArgs
from lingua.monitor.reporter import Reporter
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs


def report_here(dump_dir: Path) -> dict[str, Any]:
    os.environ["WANDB_SILENT"] = "true"
    mesh = start(torch.device("cpu"), detect_launch(), DistributedArgs())
    report = Reporter(
        LoggingArgs(wandb=WandbArgs(mode="offline")), dump_dir, mesh, name="a", config={}, step=0,
        steps=9, global_batch_size=1, seq_len=1, flops_per_token=1.0, dtype=torch.float32,
        trained_s=0.0, evaluates=True,
    )  # fmt: skip
    held_out = {"nats_per_byte": 2.0, "nats_per_token": 2.0, "tokens": 5}
    report.validation(3, "wiki", held_out)
    report.evaluation([{"step": 4, "task": "arc", "acc,none": 0.5}])
    summary = dict(report.wandb.summary)
    report.close()
    return summary


def test_benchmarks_and_held_out_losses_are_told_under_the_names_of_tasks_and_sources(
    ranks, tmp_path
):
    [summary] = ranks.run(1, report_here, tmp_path)
    assert summary["eval/arc/acc,none"] == 0.5 and summary["step"] == 4
    assert summary["validation/wiki/nats_per_byte"] == 2.0
    assert "validation/wiki/source" not in summary and "eval/arc/task" not in summary
    [line] = (tmp_path / "metrics.eval.jsonl").read_text().splitlines()
    assert json.loads(line)["task"] == "arc"
