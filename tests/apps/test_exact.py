"""`deterministic: mesh`: the same run to the last bit on every data-parallel mesh."""

from typing import Any

import pytest

from tests.apps.runs import Outcome, digests

END = 4
EXACT = {
    "deterministic": "mesh",
    "stop_at": END,
    "steps": END,
    "validation.every": 2,
    "data.batch_size": 2,
}
TIMES = {
    "step_time_s",
    "data_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "created_at",
    "peak_mem_gib",
}


def results(run: Outcome) -> dict[str, Any]:
    """Everything that must be equal to the bit."""
    lines = [*run.lines, *run.held_out, *run.samples]
    kept = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    return {"lines": kept, "tensors": digests(run.tensors(END))}


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 5, 1)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_x(runs, sizes, batch_size):
    keys = EXACT | {"data.batch_size": batch_size}
    assert results(runs.train(sizes, keys)) == results(runs.train((1, 1, 1), keys))
