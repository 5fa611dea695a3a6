"""`apps.bench gpu` on CUDA, where the stub driver computes nothing."""

import json


def test_parts_of_a_gpu_run_with_their_memory(ghost, tmp_path):
    only = "1B,1B-float8,saving,machine"
    words = ("small=true", "compile=false", f"out={tmp_path}", f"--only={only}")
    ghost("python", "-m", "apps.bench", "gpu", *words)
    parts = {p["part"]: p for p in json.loads((tmp_path / "results.json").read_text())["parts"]}
    assert {p["verdict"] for p in parts.values()} == {"right"} and len(parts) == 4
    assert parts["machine"]["values"]["GiB"] == 79
    assert 0 < parts["1B"]["values"]["GiB"] < 1
    assert parts["1B"]["values"]["a steady step"]["waits"] == 0
    assert list(tmp_path.glob("trace-*")) == [tmp_path / "trace-1B.json.gz"]
