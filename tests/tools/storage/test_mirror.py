"""Checkpoints in an object store: `checkpoint.mirror`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

import lingua
from lingua.base.dump_dir import MANIFEST
from lingua.base.errors import UserError
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import checksum_of, find
from lingua.checkpoint.retention import to_keep
from lingua.tools.storage import mirror as mirror_module
from tests.mistakes import refused
from tests.programs import wait_for

MODEL = {"dim": 16, "n_layers": 1, "n_heads": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = [f"word {i * i} of {i}" for i in range(400)]
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
    return folder


def config(text: Path, dump_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "mirrored",
        "dump_dir": str(dump_dir),
        "steps": 6,
        "data": {
            "root_dir": str(text),
            "sources": {"words": 1},
            "seq_len": 32,
            "global_batch_size": 2,
            "workers": 0,
        },
        "model": MODEL,
        "deterministic": True,
        "logging": {"freq": 1},
        "checkpoint": {
            "mirror": "s3://bucket/runs/",
            "dump": {"every": 2, "keep": 2},
            **more.pop("checkpoint", {}),
        },
        **more,
    }


def train(*args: Any, **more: Any) -> Any:
    return lingua.train("apps.main", config(*args, **more))


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("?" * 10))


def run_id(folder: Path) -> str:
    return (folder / "run.id").read_text()


def uploaded(store: Any, folder: Path) -> list[str]:
    """The names of the whole checkpoints there."""
    keys = store.keys(f"runs/{run_id(folder)}/")
    names = {key.split("/")[2] for key in keys if key.endswith(MANIFEST)}
    for name in names:
        manifest = json.loads(store.get(f"runs/{run_id(folder)}/{name}/{MANIFEST}"))
        for file, entry in manifest["files"].items():
            assert len(store.get(f"runs/{run_id(folder)}/{name}/{file}")) == entry["size"]
    return sorted(names)


def tensors_of(folder: Path, step: int = 6) -> str:
    state = folder / "checkpoints" / f"{step:010d}" / "train_state.json"
    return json.loads(state.read_text())["tensors"]


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory) -> str:
    """The hash of the tensors of the run that was never stopped, without a mirror."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(text, folder, checkpoint={"mirror": None})
    return tensors_of(folder)


def test_a_run_goes_on_from_its_mirror_on_a_machine_without_its_disk(
    store, text, tmp_path, plain, capsys
):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    train(text, first, stop_at=4)
    assert steps_of(first) == [2, 4] and uploaded(store, first) == ["0000000002-1", "0000000004-1"]
    shutil.move(first, tmp_path / "lost")
    train(text, second)
    assert run_id(second) == run_id(tmp_path / "lost") and tensors_of(second) == plain
    shown = capsys.readouterr().out
    assert "has no checkpoint: taking s3://bucket/runs/" in shown and "resuming" in shown
    # Retention holds for what both have uploaded, and every object was written once.
    assert steps_of(second) == [4, 6]
    assert uploaded(store, second) == ["0000000004-1", "0000000006-2"]
    written = [path for method, path, _ in store.log if method == "PUT" and "distcp" in path]
    assert len(written) == len(set(written)) == 3
    # The same command again has nothing to do, and another name is another run.
    train(text, second)
    assert "the run is finished" in capsys.readouterr().out
    train(text, third, name="other", stop_at=2)
    assert run_id(third) != run_id(second) and uploaded(store, third) == ["0000000002-1"]
    error = refused(lambda: train(text, third, steps=8), run_id(second))
    assert "choose another name" in error
    own = {"mirror": f"s3://bucket/runs/{run_id(second)}"}
    refused(lambda: train(text, tmp_path / "fourth", checkpoint=own), "the folder of a run")


def test_what_is_not_whole_or_damaged_in_the_mirror_is_skipped(store, text, tmp_path, capsys):
    folder = tmp_path / "run"
    train(text, folder)
    where = f"runs/{run_id(folder)}"
    (tensors,) = (key for key in store.keys(f"{where}/0000000006-1") if key.endswith("distcp"))
    content = store.get(tensors)
    store.put(tensors, content[:-1] + bytes([content[-1] ^ 1]))
    for key in store.keys(f"{where}/0000000004-1"):  # as an upload that was killed leaves it
        if not key.endswith(MANIFEST):
            store.put(key.replace("0000000004-1", "0000000005-1"), b"half")
    shutil.rmtree(folder)
    train(text, folder, steps=8)
    shown = capsys.readouterr().out
    assert "0000000006-1 is damaged (__0_0.distcp: wrong checksum): skipped" in shown
    assert "resuming" in shown and "(step 4)" in shown
    assert uploaded(store, folder) == ["0000000006-2", "0000000008-2"]
    assert not store.keys(f"{where}/0000000005-1")  # retention has removed it
    for key in store.keys(where):
        if key.endswith("distcp"):
            store.put(key, b"0" * len(store.get(key)))
    shutil.rmtree(folder)
    refused(lambda: train(text, folder, steps=8), "none that can be used")


def test_an_absent_store_stops_no_training_and_the_next_start_uploads(
    store, text, tmp_path, plain, monkeypatch, capsys
):
    folder = tmp_path / "run"
    monkeypatch.setattr(mirror_module, "GIVE_UP_S", 0.5)

    def end_network(step: int) -> None:
        if step == 3:
            wait_for(lambda: uploaded(store, folder) == ["0000000002-1"])
            store.failures = 10**6

    with pytest.raises(UserError) as caught:
        follow(config(text, folder), end_network)
    assert caught.value.exit_code == 1
    assert "lacks 0000000006, 0000000004" in str(caught.value)
    assert "the same command uploads what is missing" in str(caught.value)
    shown = capsys.readouterr().out
    assert "0000000004 is not uploaded: " in shown and "trying again in 1 s" in shown
    assert "done: 6 steps" in shown and tensors_of(folder) == plain
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8  # 6 steps, start, stop
    wait_for(lambda: "mirror" not in {thread.name for thread in threading.enumerate()})
    store.failures = 0
    train(text, folder)
    assert uploaded(store, folder) == ["0000000004-2", "0000000006-2"]


def test_conditional_writes_keep_an_older_start_from_publishing(store, text, tmp_path, capsys):
    folder = tmp_path / "run"

    def other_start(step: int) -> None:
        if step == 3:
            wait_for(lambda: uploaded(store, folder) == ["0000000002-1"])
            store.put(f"runs/{run_id(folder)}/starts/000002", b"{}")

    error = refused(lambda: follow(config(text, folder), other_start), "0000000006")
    assert "lacks" in error and uploaded(store, folder) == ["0000000002-1"]
    shown = capsys.readouterr().out
    assert "start 2 of the run has s3://bucket" in shown and "nothing more is uploaded" in shown
    assert steps_of(folder) == [4, 6]
    train(text, folder)  # is start 3, which has it
    assert uploaded(store, folder) == ["0000000004-3", "0000000006-3"]


def follow(keys: dict[str, Any], after: Any) -> None:
    """Train, and call `after` with the number of each completed step."""
    with lingua.open_run("apps.main", keys) as run:
        for step in run:
            after(step)


@pytest.mark.parametrize("how", ["ignores_conditions", "refuses_conditions"])
def test_a_store_without_conditional_writes_is_named(how, store, text, tmp_path, capsys):
    setattr(store, how, True)
    train(text, tmp_path / "run", stop_at=2)
    assert "this store has no conditional writes" in capsys.readouterr().out
    assert uploaded(store, tmp_path / "run") == ["0000000002-1"]


def test_pruning_waits_for_an_upload(store, text, tmp_path):
    folder, seen = tmp_path / "run", {}
    store.holds = lambda request: "PUT" in request and "0000000002-1/__0_0" in request

    def look(step: int) -> None:
        seen[step] = steps_of(folder)
        if step == 5:
            store.go_on.set()

    follow(config(text, folder, checkpoint={"dump": {"every": 1, "keep": 1}}), look)
    store.holds = lambda request: False
    assert seen[5][-1] == 5 and len(seen[5]) == 2, seen  # the one that is uploaded, and the newest
    assert steps_of(folder) == [6] and uploaded(store, folder) == ["0000000006-1"]


@pytest.mark.soak
def test_a_kill_in_an_upload_loses_nothing(store, text, tmp_path, plain, monkeypatch):
    folder = tmp_path / "run"
    store.holds = lambda request: "PUT" in request and "0000000004-1/__0_0" in request
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config(text, folder)))
    command = [sys.executable, "-m", "apps.main.train", f"config={file}"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: any("0000000004-1/__0_0" in path for _, path, _ in store.log), job)
        wait_for(lambda: 6 in steps_of(folder), job)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    store.holds = lambda request: False
    store.go_on.set()
    assert uploaded(store, folder) == ["0000000002-1"]
    elsewhere = tmp_path / "elsewhere"
    train(text, elsewhere)
    assert tensors_of(elsewhere) == plain
    assert uploaded(store, elsewhere) == ["0000000004-2", "0000000006-2"]


def test_no_credential_is_written(store, text, tmp_path, capfd):
    folder = tmp_path / "run"
    store.failures = 1
    train(text, folder, stop_at=2)
    shown = "".join(capfd.readouterr())
    for path in folder.rglob("*"):
        shown += path.read_bytes().decode(errors="replace") if path.is_file() else ""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ[name] not in shown
    for url in ("s3://KEY:VALUE@bucket/runs", "https://host/runs?X-Signature=VALUE"):
        error = refused(lambda url=url: train(text, folder, checkpoint={"mirror": url}), "user")
        assert "VALUE" not in error


def test_commands_take_the_url_of_a_run(store, text, tmp_path, capsys):
    folder = tmp_path / "run"
    train(text, folder)
    url = f"s3://bucket/runs/{run_id(folder)}"
    loaded, here = lingua.load(url), lingua.load(str(folder))
    assert loaded.generate("word", max_gen_tokens=8, temperature=0) == here.generate(
        "word", max_gen_tokens=8, temperature=0
    )


@pytest.mark.soak
def test_ranks_without_a_shared_folder_fetch_what_rank_0_decides(store, text, tmp_path):
    """Two ranks with a cache each start from a run in the store, and go on from their mirror."""
    first, folder = tmp_path / "first", tmp_path / "run"
    train(text, first)
    url = f"s3://bucket/runs/{run_id(first)}"
    init = {"init_from": url, "dump": {"every": 2, "keep": 1}}
    keys = config(text, folder, name="second", deterministic="mesh", checkpoint=init)
    for step in (2, 4):
        (tmp_path / "run.yaml").write_text(json.dumps(keys | {"stop_at": step}))
        script = f"LINGUA_CACHE={tmp_path}/cache-$RANK exec {sys.executable} -m apps.main.train "
        subprocess.run(
            ["torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
             "localhost:0", "--no-python", "bash", "-c", script + f"config={tmp_path}/run.yaml"],
            check=True,
        )  # fmt: skip
        assert steps_of(folder) == [step]
        newest = Path(url.replace("s3://", "s3/")) / "0000000006-1" / "__0_0.distcp"
        caches = [tmp_path / f"cache-{rank}" / newest for rank in (0, 1)]
        assert caches[0].read_bytes() == caches[1].read_bytes()
        shutil.rmtree(folder)
    one = tmp_path / "one"
    alone = {"dump_dir": str(one), "name": "one", "stop_at": 4, "checkpoint": init}
    lingua.train("apps.main", keys | alone)
    second = store.get("runs/names/second").decode()
    state = json.loads(store.get(f"runs/{second}/0000000004-2/train_state.json"))
    assert state["tensors"] == tensors_of(one, 4)  # to the bit


def test_a_store_that_refuses_to_remove_still_gets_everything(store, text, tmp_path, capsys):
    folder = tmp_path / "run"
    store.refuses_deletes = True
    train(text, folder, checkpoint={"dump": {"every": 1, "keep": 1}})
    assert "old checkpoints are not removed: " in capsys.readouterr().out
    assert "0000000006-1" in uploaded(store, folder) and steps_of(folder) == [6]
    manifests = [p for m, p, _ in store.log if m == "PUT" and p.endswith(MANIFEST)]
    assert len(manifests) == len(set(manifests))


def test_marks_are_kept_where_the_disk_was_lost(store, text, tmp_path):
    folder, keep_one = tmp_path / "run", {"dump": {"every": 2, "keep": 1}}

    def mark(step: int) -> None:
        if step == 2:
            (folder / "checkpoints" / f"{2:010d}.paper").touch()

    follow(config(text, folder, stop_at=4, checkpoint=keep_one), mark)
    where = f"runs/{run_id(folder)}"
    store.put(f"{where}/0000000001/file", b"as a copy by hand leaves it")
    assert uploaded(store, folder) == ["0000000002-1", "0000000004-1"]
    shutil.rmtree(folder)
    train(text, folder, checkpoint=keep_one)
    assert uploaded(store, folder) == ["0000000002-1", "0000000006-2"]
    assert f"{where}/0000000001/file" in store.keys(where)


def test_the_best_there_is_kept_and_no_other_is_uploaded_again(store, text, tmp_path):
    folder = tmp_path / "run"
    best = {"dump": {"every": 1, "keep": 1}, "keep_best": True}
    train(text, folder, stop_at=3, checkpoint=best)
    where = f"runs/{run_id(folder)}"
    state = json.loads(store.get(f"{where}/0000000003-1/train_state.json"))
    content = json.dumps(state | {"held_out": 0.0})  # a loss that no later step has
    store.put(f"{where}/0000000003-1/train_state.json", content.encode())
    manifest = json.loads(store.get(f"{where}/0000000003-1/{MANIFEST}"))
    manifest["files"]["train_state.json"] = {
        "size": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content.encode())
    }  # fmt: skip
    manifest["xxh3_64"] = checksum_of(manifest)
    store.put(f"{where}/0000000003-1/{MANIFEST}", json.dumps(manifest).encode())
    shutil.rmtree(folder)
    train(text, folder, checkpoint=best)
    assert uploaded(store, folder) == ["0000000003-1", "0000000006-2"]
    written = [p for m, p, _ in store.log if m == "PUT" and "distcp" in p]
    assert len(written) == len(set(written))
    here = find(folder / "checkpoints")
    assert to_keep(here, CheckpointArgs(keep_best=True)) == here  # the best of them is there once


def test_a_damaged_checkpoint_here_gives_way_to_one_there(store, text, tmp_path, capsys):
    folder = tmp_path / "x[1]"
    train(text, folder, name="x[1]", stop_at=2)
    (folder / "checkpoints" / f"{2:010d}" / "__0_0.distcp").write_bytes(b"cut")
    train(text, folder, name="x[1]")
    assert "taking s3://bucket/runs/" in capsys.readouterr().out and 6 in steps_of(folder)


def test_an_absent_store_lets_a_run_go_on_from_its_own_checkpoint(store, text, tmp_path, capsys):
    folder = tmp_path / "run"
    train(text, folder, stop_at=2)
    store.failures = 8  # s3fs itself tries 5 times

    def wait(step: int) -> None:
        if step == 5:
            wait_for(lambda: not store.failures)

    follow(config(text, folder), wait)
    assert "training begins all the same" in capsys.readouterr().out
    assert uploaded(store, folder) == ["0000000004-2", "0000000006-2"]


def test_adapters_resume_over_the_checkpoint_that_they_began_with(store, text, tmp_path):
    """Of a run in a store, which has gone on meanwhile."""
    base, folder = tmp_path / "base", tmp_path / "run"
    keep_all = {"dump": {"every": 2}}
    train(text, base, stop_at=2, checkpoint=keep_all)
    init = {"init_from": f"s3://bucket/runs/{run_id(base)}", "mirror": None}
    keys = config(text, folder, name="lora", stop_at=2, checkpoint=init)
    keys["lora"] = {"rank": 2}
    lingua.train("apps.lora", keys)
    train(text, base, checkpoint=keep_all)
    record = lingua.train("apps.lora", keys | {"stop_at": 4})
    assert record.config["checkpoint.init_from"].endswith(f"/{run_id(base)}/0000000002-1")
