"""A run that an earlier version began: tests/samples/VERSION has its text, its shards, its dump dir
after step 6, and the metrics of the whole run as that version made them."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from apps.bench.launch import read_lines
from apps.bench.promise import compare
from apps.main import train as program
from lingua.base.dump_dir import METRICS
from lingua.tools.runs.records import Record
from tests.apps.meshes import mesh, on_meshes

CLOSE = 1e-5  # of losses, relative
SAMPLES = Path(__file__).parents[1] / "samples"


@on_meshes((1, 1, 2), soak=[(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("version", [folder.name for folder in SAMPLES.iterdir()])
def test_a_run_of_an_earlier_version_goes_on_as_the_same_run(ranks, tmp_path, version, sizes):
    sample = shutil.copytree(SAMPLES / version, tmp_path / "sample")
    shards = {path: path.read_bytes() for path in sample.glob("text/.tokens/*/*.tokens")}
    inodes = {path: path.stat().st_ino for path in shards}
    config = sample / "config.yaml"  # without the key: a run keeps its held-out text
    config.write_text(config.read_text().replace("tokens: 200, ", ""))
    argv = [f"config={config}", f"dump_dir={sample}/run"]
    argv += [f"{key}={n}" for key, n in mesh(sizes).items()]
    argv += [f"data.root_dir={sample}/text", "data.workers=0"]
    n = sizes[0] * sizes[1] * sizes[2]
    ranks.run(n, program.main, argv)

    assert "(step 6)" in (sample / "run" / "train.log").read_text()
    whole = [json.loads(line) for line in (sample / "metrics.jsonl").read_text().splitlines()]
    whole = [line for line in whole if "loss" in line]
    found = read_lines(sample / "run" / METRICS)
    apart, equal = compare(whole, found)
    assert len(equal) == 12 and all(equal) and max(apart) < CLOSE
    a_step_off = [abs(b["loss"] / a["loss"] - 1) for a, b in pairwise(found)]
    assert min(a_step_off) > CLOSE and max(a_step_off) > 100 * CLOSE  # is seen
    assert [line["lr"] for line in found] == [line["lr"] for line in whole]
    assert Record(sample / "run").config["validation.tokens"] == 200
    # Its shards are used as they are, and no others are built.
    assert shards and set(sample.glob("text/.tokens/*/*.tokens")) == shards.keys()
    assert {path: path.stat().st_ino for path in shards} == inodes
