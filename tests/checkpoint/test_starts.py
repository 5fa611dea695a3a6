"""The starts of a run: their numbers, and what one does after a later one has the run."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lingua.base.errors import UserError
from lingua.base.lock import claimed, exclusive
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import find, unpublished
from lingua.checkpoint.retention import prune, set_aside
from lingua.checkpoint.save import publish
from lingua.checkpoint.starts import NUMBER, Job, begin, in_order, job_of_launch, last_start
from lingua.monitor.metrics import append_line, cut_back
from lingua.run.files import read_lines
from tests.locks import hold_lock
from tests.mistakes import refused
from tests.programs import python, wait_for
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
# As torchrun sets it for the only rank of a job with restarts.
PLACE = {"TORCHELASTIC_MAX_RESTARTS": "3", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
TORCHRUN = Job("torchrun night", 0, "night")


def test_starts_that_begin_at_once_have_a_number_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        starts = list(pool.map(lambda i: begin(tmp_path, tmp_path, (str(i),), TORCHRUN), range(40)))
    assert sorted(start.number for start in starts) == list(range(1, 41))
    assert last_start(tmp_path).number == 40


def test_a_number_is_not_used_again_where_the_folder_of_starts_was_lost(tmp_path):
    append_line(tmp_path / "metrics.jsonl", {"step": 1, NUMBER: 7})
    (tmp_path / "0000000001.tmp-12345678").mkdir()  # of an earlier version, without a number
    assert begin(tmp_path, tmp_path, (), TORCHRUN).number == 8
    unpublished(tmp_path / f"{7:010d}", 30).mkdir()
    (tmp_path / "survivors-12").mkdir()
    assert begin(tmp_path, tmp_path, (), TORCHRUN).number == 31


def test_shards_are_known_to_a_restart_alone(tmp_path, monkeypatch):
    """Before another launch, somebody may have changed the text."""
    known = []
    for restarts, job in (("1", TORCHRUN), ("0", TORCHRUN), ("1", Job("slurm 7"))):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        begin(tmp_path, tmp_path, (), TORCHRUN).write(tmp_path, ("shards",))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        known.append(begin(tmp_path, tmp_path, (), job).shards)
    assert [len(shards) for shards in known] == [1, 0, 0]


@pytest.mark.parametrize(
    ("job", "earlier", "follows"),
    [
        (TORCHRUN, TORCHRUN, True),
        (TORCHRUN, Job("torchrun other", 0, "other"), False),
        (Job("slurm 7", 1, "7.1"), Job("slurm 7", 0, "7.0"), True),  # torchrun in a requeued job
        (Job("slurm 7", 1, "7.1"), Job("slurm 7", 1, "7.1"), True),
        (Job("slurm 7", 0, "7.0"), Job("slurm 7", 1, "7.1"), False),
        (Job(), Job(), False),
        (Job("slurm 7", 1), Job("slurm 7", 0), True),
        (Job("slurm 7", 1), Job("slurm 7", 1), False),  # two at once in one allocation
        (Job("slurm 8", 1), Job("slurm 7", 0), False),
    ],
)
def test_only_a_later_start_of_the_same_job_may_take_the_lock(tmp_path, job, earlier, follows):
    assert job.follows(earlier) == follows
    path = tmp_path / "run.lock"
    with hold_lock(path):  # a process that is alive
        begin(tmp_path, tmp_path, (path.read_text(),), earlier)

        def take() -> None:
            with exclusive(path, print, may_take=lambda c: last_start(tmp_path).is_before(job, c)):
                assert str(os.getpid()) in path.read_text()

        if follows:
            take()
        else:
            refused(take, "is held by process", "which is running")


def test_the_job_is_that_of_torchrun_or_slurm(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert job_of_launch() == Job()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert job_of_launch() == Job("slurm 7", 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun has without --rdzv-id
    assert job_of_launch() == Job("slurm 7", 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    assert job_of_launch() == Job("slurm 7", 2, "night")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert job_of_launch() == TORCHRUN
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")  # a second launch by mistake is refused
    assert job_of_launch() == Job()


def test_a_holder_whose_lock_is_taken_finds_that_out_and_leaves_it(tmp_path):
    path = tmp_path / "run.lock"
    with claimed(path) as old, claimed(path, may_take=lambda content: True) as new:
        assert old is not None and new is not None
        refused(old.check, "is held by process")
        new.check()
    assert not path.exists()


# ---- what an earlier start writes


def test_a_line_that_an_earlier_start_adds_is_not_read_and_is_removed(tmp_path):
    """It was stopped between its check and the write."""
    path = tmp_path / "metrics.jsonl"
    for number, step in ((1, 1), (1, 2), (2, 2), (2, 3), (1, 3), (2, 4), (1, 4)):
        append_line(path, {"step": step, NUMBER: number})
    kept = [(1, 1), (1, 2), (2, 2), (2, 3), (2, 4)]
    assert [(line[NUMBER], line["step"]) for line in read_lines(path)] == kept
    cut_back(path, 10)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(line[NUMBER], line["step"]) for line in lines] == kept


def test_lines_without_a_number_are_all_read():
    """Those of earlier versions, and of apps/onefile."""
    lines = [{"step": 1}, {"step": 2, NUMBER: 3}, {"step": 3}, {"step": 4, NUMBER: "x"}]
    assert list(in_order(lines)) == lines


def test_lines_stay_as_they_are_where_a_later_start_has_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 5):
        append_line(path, {"step": step})
    before = path.read_bytes()
    cut_back(path, 2, may_write=lambda: False)
    assert path.read_bytes() == before
    cut_back(path, 2, may_write=lambda: True)
    assert len(path.read_bytes()) < len(before)


def write(root: Path, step: int, number: int, check: Callable[[], None] = lambda: None) -> Path:
    """Publish a checkpoint of no tensors, by the start of this number."""
    final = root / f"{step:010d}"
    folder = unpublished(final, number)
    folder.mkdir(parents=True)
    publish(folder, final, step, {}, {"by": number}, "", number, check)
    return final


def by(final: Path) -> int:
    return json.loads((final / "train_state.json").read_text())["by"]


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("published", [False, True])
def test_an_earlier_start_publishes_nothing_once_a_later_one_has_the_run(
    tmp_path, damaged, published
):
    """It was stopped after its check, and goes on once the later one has begun, or has published
    the same step, of which there was a damaged checkpoint."""
    final = tmp_path / f"{7:010d}"
    if damaged:
        final.mkdir()
        (final / "manifest.json").write_text("{}")

    def stopped() -> None:
        set_aside(tmp_path, 2)
        if published:
            write(tmp_path, 7, 2)

    with pytest.raises(FileNotFoundError):
        write(tmp_path, 7, 1, stopped)
    assert [by(c.path) for c in find(tmp_path)] == [2] * published
    write(tmp_path, 8, 2)
    prune(tmp_path, CheckpointArgs(), 2)  # removes what the earlier one has left
    names = [final.name] * (published or damaged) + [f"{8:010d}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_an_earlier_start_removes_nothing_of_a_later_one(tmp_path):
    args = CheckpointArgs()
    args.dump.keep = 1
    for step in (1, 2):
        write(tmp_path, step, 1)
    theirs = unpublished(tmp_path / f"{3:010d}", 2)
    theirs.mkdir()
    (theirs / "__0_0.distcp").touch()

    def lost() -> None:
        raise UserError("lost")

    refused(lambda: prune(tmp_path, args, 1, lost), "lost")
    assert [c.step for c in find(tmp_path)] == [2, 1]
    prune(tmp_path, args, 1)
    assert [c.step for c in find(tmp_path)] == [2] and (theirs / "__0_0.distcp").exists()


# ---- whole runs

RUN = [
    "apps/main/configs/small.yaml", "steps=200", "logging.freq=1", "model.dim=32",
    "model.n_heads=2", "data.seq_len=32", "checkpoint.dump.every=20", "checkpoint.dump.keep=2",
    "model.n_layers=2", "data.global_batch_size=2", "data.batch_size=1",
    "deterministic=mesh", "device=cpu", "optim.warmup=5", "validation.every=0",
]  # fmt: skip


def train(text: Path, dump_dir: Path, job: str = "", **options: object) -> subprocess.Popen[str]:
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = os.environ | ({"TORCHELASTIC_RUN_ID": job} | PLACE | port if job else {})
    words = [f"config={RUN[0]}", *RUN[1:], f"data.root_dir={text}", "data.sources={words: 1}"]
    command = [*python(), "-m", "apps.main.train", *words, f"dump_dir={dump_dir}"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **output, **options)


def lines_of(dump_dir: Path) -> dict[int, tuple[object, ...]]:
    steps = [line for line in read_lines(dump_dir / "metrics.jsonl") if "event" not in line]
    kept = {line["step"]: (line["loss"], line["batch_hash"], line["chain"]) for line in steps}
    assert len(kept) == len(steps)
    return kept


def tensors_of(dump_dir: Path) -> str:
    last = find(dump_dir / "checkpoints")[0].path
    return json.loads((last / "train_state.json").read_text())["tensors"]


@pytest.mark.soak
@pytest.mark.parametrize(("mount", "steps"), [(False, (0, 60)), (True, (30,))])
def test_a_start_that_is_stopped_and_wakes_up_later_changes_nothing(tmp_path, mount, steps):
    """Stopped after some steps, and continued while the later one trains or after its end. With
    `mount` the later one has the dump dir on a second mount."""
    folder = tmp_path / "text"
    folder.mkdir()
    texts = [json.dumps({"text": f"some text of document {i} " * 30}) + "\n" for i in range(200)]
    (folder / "words.jsonl").write_text("".join(texts))
    alone = train(folder, tmp_path / "alone")
    assert alone.communicate()[1] is None and alone.returncode == 0
    for i, step in enumerate(steps):
        dump_dir, seen = tmp_path / f"run{i}", tmp_path / f"run{i}"
        dump_dir.mkdir()
        if mount:
            seen = tmp_path / f"mount{i}"
            seen.mkdir()
            if subprocess.run(["mount", "--bind", dump_dir, seen], capture_output=True).returncode:
                pytest.skip("needs the right to mount")
        first = train(folder, dump_dir, "night")
        try:
            starts, metrics = dump_dir / "starts", dump_dir / "metrics.jsonl"
            wait_for((starts / "000001").exists, first)
            if step:
                wait_for(metrics.exists, first)
                wait_for(lambda file=metrics, n=step: file.read_text().count('"loss"') > n, first)
            first.send_signal(signal.SIGSTOP)
            second = train(folder, seen, "night")
            if i % 2:
                wait_for((starts / "000002").exists, second)
                first.send_signal(signal.SIGCONT)
            said, _ = second.communicate(timeout=120)
            assert second.returncode == 0, said
            first.send_signal(signal.SIGCONT)
            said, _ = first.communicate(timeout=60)
            assert first.returncode == 2 and ("is held by process" in said or "is gone" in said)
        finally:
            first.kill()
            if mount:
                subprocess.run(["umount", seen], check=False)
        assert lines_of(dump_dir) == lines_of(tmp_path / "alone")
        assert tensors_of(dump_dir) == tensors_of(tmp_path / "alone")
        refusals = subprocess.run(
            [*python(), "-m", "lingua", "audit", str(dump_dir), "run=false"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert refusals.returncode == 0, refusals.stdout
