"""lingua.Job: a run as a job of submitit, with the executors of submitit itself."""

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core.utils import FailedJobError

import lingua
from lingua.base.errors import UserError
from lingua.run.records import Record
from tests.apps.runs import SMALL, write_sources
from tests.local_slurm import needs_slurm, slurm_here
from tests.programs import python

REPO = Path(__file__).parents[3]
RANKS = 2


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_sources(folder)
    return folder


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folder, and no place among ranks that a test of another file has left here."""
    monkeypatch.chdir(REPO)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SIGNALS"):
        monkeypatch.delenv(name, raising=False)


def job(text: Path, dump_dir: Path, **more: Any) -> lingua.Job:
    values = SMALL | {"data.sources": {"one": 2, "two": 1}, "data.root_dir": text, "probe.every": 1}
    values |= {"deterministic": True, "dump_dir": dump_dir}
    return lingua.Job("tests.submitit_app", {k: str(v) if isinstance(v, Path) else v
                                             for k, v in (values | more).items()})  # fmt: skip


def local(folder: Path, timeouts: int = 3) -> submitit.LocalExecutor:
    executor = submitit.LocalExecutor(folder, timeouts, python=shlex.join(python()))
    executor.update_parameters(tasks_per_node=RANKS, timeout_min=3)
    return executor


def lines(record: Record) -> list[Any]:
    columns = record.metrics
    return [columns[name].tolist() for name in ("step", "loss", "grad_norm")]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The run, in one start."""
    folder = tmp_path_factory.mktemp("whole")
    here = os.getcwd()
    os.chdir(REPO)
    try:
        records = local(folder).submit(job(text, folder / "run")).results()
    finally:
        os.chdir(here)
    assert [record.folder for record in records] == [folder / "run"] * RANKS
    assert records[0].state == "finished" and len(records[0].metrics.step) == 6
    return records[0]


# SIGTERM, which Slurm sends before submitit's signal, and submitit ignores.
@pytest.mark.parametrize("signals", ["SIGUSR2", "SIGTERM SIGUSR2"])
def test_a_preempted_job_saves_is_queued_again_and_ends_as_the_same_run(
    text, whole, tmp_path, monkeypatch, signals
):
    monkeypatch.setenv("SIGNALS", signals)
    submitted = local(tmp_path).submit(job(text, tmp_path / "run"))
    record = submitted.results()[0]
    assert lines(record) == lines(whole)
    stops = [event for event in record.events if event["event"] == "stop"]
    assert [event["reason"] for event in stops] == ["SIGUSR2", "stop_at"]
    logs = submitted.stdout()
    assert stops[0]["step"] < 6 and f"(step {stops[0]['step']})" in logs  # "resuming ... (step 3)"
    # Its handler came after the save, on every rank.
    _, saved, after = logs.partition(f"saved {tmp_path}/run/checkpoints/{stops[0]['step']:010d}")
    assert saved and "Requeued job" in after and logs.count("Requeued job") == 2  # console and log
    assert "Not checkpointing nor requeuing" in submitted.task(1).stdout()


def test_sigterm_alone_saves_and_waits_for_what_follows(text, tmp_path, monkeypatch):
    """As where Slurm ends the job: it is no end that submitit knows."""
    monkeypatch.setenv("SIGNALS", "SIGTERM")
    executor = local(tmp_path)
    # 10 seconds after its start submitit's own signal comes
    executor.update_parameters(timeout_min=0.5, signal_delay_s=20)
    submitted = executor.submit(job(text, tmp_path / "run"))
    record = submitted.results()[0]
    assert record.state == "finished" and "Bypassing signal SIGTERM" in submitted.stdout()
    assert [e["reason"] for e in record.events if e["event"] == "stop"] == ["SIGTERM", "stop_at"]


def test_without_a_timeout_left_the_job_fails_and_the_record_says_why(text, tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNALS", "SIGUSR2")
    submitted = local(tmp_path, timeouts=0).submit(job(text, tmp_path / "run"))
    with pytest.raises(FailedJobError, match="not requeued because: timed-out too many times"):
        submitted.task(0).results()
    record = Record(tmp_path / "run")
    stop, why = record.events[-2:]
    assert (stop["event"], stop["reason"]) == ("stop", "SIGUSR2")
    assert why["event"] == "not_requeued" and "timed-out too many times" in why["reason"]
    assert why["step"] == stop["step"] and record.state == "stopped" and not record.problems
    monkeypatch.delenv("SIGNALS")
    [again, _] = local(tmp_path).submit(job(text, tmp_path / "run")).results()
    assert again.state == "finished" and why["reason"] in str(again.events)


def test_a_mistake_is_the_message_of_a_failed_job(text, tmp_path):
    submitted = local(tmp_path).submit(job(text, tmp_path / "run", steps=-1))
    error = str(submitted.exception())
    assert isinstance(submitted.exception(), FailedJobError)
    assert "UserError: steps = -1: must be at least 1" in error, error
    assert "lingua/config" not in error  # no traceback of what found it


def test_the_error_of_a_rank_is_that_of_its_task(text, tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNALS", "ERROR")
    submitted = local(tmp_path).submit(job(text, tmp_path / "run"))
    assert "RuntimeError: as SIGNALS asks" in str(submitted.task(1).exception())
    assert "RuntimeError" in str(submitted.task(0).exception())  # it lost the other
    assert "lost its connection after rank 1 failed" in submitted.task(0).stderr()


def test_a_signal_that_no_step_boundary_waits_for_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    error = local(tmp_path).submit(job(text, tmp_path / "run")).exception()
    assert "SUBMITIT_PREEMPT_SIGNAL = USR1: must be USR2, or unset" in str(error)


def test_the_debug_executor_trains_in_this_process(text, tmp_path):
    before = signal.getsignal(signal.SIGUSR2), dict(os.environ)
    executor = submitit.DebugExecutor(tmp_path)
    record = executor.submit(job(text, tmp_path / "run")).result()
    assert record.state == "finished" and "tests.submitit_app" in sys.modules
    assert (signal.getsignal(signal.SIGUSR2), dict(os.environ)) == before
    refused = executor.submit(job(text, tmp_path / "other", steps=-1)).exception()
    assert isinstance(refused, UserError)


@needs_slurm
def test_on_slurm_a_job_is_queued_again_by_submitit_alone(
    text, whole, tmp_path_factory, monkeypatch
):
    folder = tmp_path_factory.mktemp("submitit")
    with slurm_here(folder / "cluster", 2) as env:
        monkeypatch.setenv("SLURM_CONF", env["SLURM_CONF"])
        monkeypatch.setenv("SIGNALS", "SIGTERM SIGUSR2")
        executor = submitit.SlurmExecutor(folder, python=shlex.join(python()))
        executor.update_parameters(
            nodes=RANKS, ntasks_per_node=1, time=5, setup=["export OMP_NUM_THREADS=1"],
            additional_parameters={"requeue": True},  # the cluster requeues only those that ask
        )  # fmt: skip
        submitted = executor.submit(job(text, folder / "run"))
        records = submitted.results()
        assert [lines(record) for record in records] == [lines(whole)] * RANKS
        restarts = {event.get("start_number") for event in records[0].events}
        assert restarts == {1, 2} and submitted.stdout().count("Requeued job") == 2
        assert "is requeued, and will resume" not in submitted.stdout()  # by stool's own
