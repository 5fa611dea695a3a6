"""How often the host waits for the device, and on which devices a rank makes contexts."""

import json
from typing import Any

import pytest

from tests.apps.meshes import Sizes, mesh
from tests.apps.runs import SMALL, write_sources

LOG, SAVE, MEASURE = 4, 5, 6  # the only steps in which something is due
KEYS = SMALL | {
    "device": "cuda",
    "stop_at": 8,
    "steps": 1000,
    "logging.freq": LOG,
    "data.batch_size": 1,
    "model.head_dim": 8,  # which kernels of attention take
    "checkpoint.dump.every": SAVE,
    "checkpoint.async_save": True,
    "data.sources": "{one: 1}",
    "validation.every": MEASURE,
    "validation.tokens": 400,
    "distributed.model_dtype": "bf16",
}
VARIANTS: list[tuple[Sizes, dict[str, Any]]] = [
    ((1, 1, 1), {"data.document_mask": "ignore", "model.dropout": 0.1}),
    ((1, 2, 1), {"optim.name": "muon", "distributed.activation_checkpointing": "selective"}),
    ((2, 1, 1), {"distributed.grad_sync": "every"}),
    ((1, 1, 2), {"data.n_views": 2, "distributed.activation_checkpointing": "full"}),
    ((1, 2, 1), {"deterministic": "mesh"}),
    ((2, 1, 1), {"deterministic": "mesh"}),
]


def waits(phase: dict[str, Any]) -> list[str]:
    """Lines of the main thread in which the host waited for the device, once for each time."""
    return [
        event["line"]
        for event in phase["events"]
        for _ in range(event["calls"])
        if not event["thread"] and "Synchronize" in event["what"]
    ]


@pytest.mark.parametrize(("sizes", "keys"), VARIANTS)
def test_the_host_waits_once_for_a_line_and_never_for_a_step_or_a_held_out_batch(
    ghost, tmp_path, sizes, keys
):
    write_sources(tmp_path)
    n = sizes[0] * sizes[1] * sizes[2]
    values = KEYS | mesh(sizes) | keys | {"dump_dir": tmp_path / "run", "data.root_dir": tmp_path}
    launch = ["python"] if n == 1 else ["torchrun", "--nproc-per-node", str(n)]
    trace = ["-m", "tests.ghost.trace", "-m", "tests.ghost.held_out", "--rank", str(n - 1)]
    arguments = [f"{key}={value}" for key, value in values.items()]
    ghost(*launch, *trace, "--json", str(tmp_path / "events"), "--", *arguments)
    phases = json.loads((tmp_path / "events").read_text())

    for step in (2, 3, 7):
        assert waits(phases[step]) == [], step
    [line] = waits(phases[LOG])
    assert "lingua/monitor/reporter.py" in line
    # Updates that were suppressed are settled, the step ends before its time is taken, and the
    # source's sums are read.
    assert len(waits(phases[MEASURE])) == 3
    copies = [e for e in phases[MEASURE]["events"] if "loader.py" in e["line"]]
    assert sum(e["calls"] for e in copies if "H2D pinned" in e["what"]) >= 12  # a step, two batches

    events = [event["what"] for phase in phases for event in phase["events"]]
    assert {what for what in events if "context" in what} == {
        f"context by cudaSetDevice on cuda:{n - 1}"
    }
    assert "save_0" in {event["thread"] for phase in phases for event in phase["events"]}
    late = [e["what"] for phase in phases[1:] for e in phase["events"]]
    assert not [what for what in late if what.startswith("ncclComm")]


STARTED = """
import json, torch
from lingua.tools.exchange.trained import OpenArgs
from lingua.parallel.launch import detect_launch, pick_device, start
args, launch = OpenArgs().distributed, detect_launch()
start(pick_device("cuda", launch), launch, args)
kept = torch.ones(1000, device="cuda")
[segment, *_] = torch.cuda.memory_snapshot()
print(json.dumps([args.model_dtype, segment["is_expandable"]]))
"""


def test_what_is_left_open_on_cuda(ghost):
    """The dtype of evaluation and generation; the allocator, unless the user configured it."""

    def started(**variables: str) -> list[Any]:
        return json.loads(ghost("python", "-c", STARTED, **variables).splitlines()[-1])

    assert started() == ["bf16", True]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert started(**{name: "max_split_size_mb:512"}) == ["bf16", False]
