"""Jobs on a real Slurm: launched, interrupted in every way, swept, and refused where they must be.

All jobs run from a checkout of their own, which tests may edit. They are launched together, so
that they run at the same time while the tests wait for one after the other.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lingua.tools.slurm.job import JobArgs
from lingua.tools.slurm.launch import launch
from lingua.tools.slurm.status import status, status_table
from tests.apps.runs import SMALL, Outcome, differs, write_sources
from tests.local_slurm import needs_slurm, slurm_here
from tests.mistakes import refused
from tests.programs import OF_OTHERS, python
from tests.tools.slurm.test_launch import HOSTILE

pytestmark = needs_slurm

REPO = Path(__file__).parents[3]
STEPS = 12
SLOW = {"setup": ["export STEP_S=2"]}  # it takes 24 seconds, in which a test interrupts it
ON_TWO_NODES = {"nodes": 2, "exclude": "n3,n4,n5,n6"}
WAIT_S = 180.0  # for a job: two busy cores run a dozen of them
LAUNCH = """
import json, sys
from lingua.tools.slurm.job import JobArgs
from lingua.tools.slurm.launch import launch
for job, arguments in json.load(sys.stdin):
    [launched] = launch(JobArgs(**job), arguments)
    print("launched", json.dumps([launched.job_id, launched.exit_code]))
"""


@dataclass
class Cluster:
    """A checkout, a text, a folder of runs, and a Slurm to run them on."""

    repo: Path
    text: Path
    runs: Path
    env: dict[str, str]

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def until(self, found: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + WAIT_S
        while not (result := found()):
            assert time.monotonic() < end, (
                f"no {what} in {WAIT_S} s\n{self.ask('squeue', '--states=all')}\n{self.logs()}"
            )
            time.sleep(0.2)
        return result

    def arguments(self, dump_dir: Path) -> list[str]:
        """The arguments of a run of STEPS steps."""
        values = SMALL | {"stop_at": "null", "steps": STEPS, "data.root_dir": self.text}
        values |= {"checkpoint.dump.every": 2, "dump_dir": dump_dir}
        return [f"{k}={'null' if v is None else v}" for k, v in values.items()]

    def launch(self, *jobs: tuple[dict, list[str]], within: Sequence[str] = ()) -> list[list[Any]]:
        """(job id, exit code) of each, launched from the checkout (by the command `within`)."""
        common = {"script": "tests.slurm_app", "gpus": "none", "time": "5"}
        given = json.dumps([(common | job, arguments) for job, arguments in jobs])
        command = [*within, *python(OF_OTHERS), "-c", LAUNCH]
        where = {"cwd": self.repo, "env": self.env, "capture_output": True, "text": True}
        done = subprocess.run(command, input=given, **where)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
        return [json.loads(line[1]) for line in lines if line[0] == "launched"]

    def shown(self, job: str) -> dict[str, str]:
        """What Slurm shows of a job: JobState, Restarts, NodeList, ..."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str, state: str = "COMPLETED") -> dict[str, str]:
        """Wait until a job has ended, in that state. Returns what Slurm shows of it."""

        def found() -> dict[str, str] | None:
            shown = self.shown(job)
            ended = ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"]
            # A job that is preempted, or whose node fails, is requeued.
            ended += ["PREEMPTED", "NODE_FAIL", "BOOT_FAIL"] * (state != "COMPLETED")
            return shown if shown["JobState"] in ended else None

        shown = self.until(found, f"job {job} to end")
        own = "".join(f"{key}={shown.get(key)} " for key in ("JobState", "Reason", "ExitCode"))
        assert shown["JobState"] == state, f"job {job}: {own}\n{self.logs(job)}"
        return shown

    def wait_for_steps(self, dump_dir: Path) -> None:
        """Wait until the run has completed some steps, not all."""
        metrics = dump_dir / "metrics.jsonl"

        def lines() -> int:
            return metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0

        self.until(lambda: lines() >= 3, f"{dump_dir.name} to train")
        assert lines() < STEPS

    def logs(self, job: str = "") -> str:
        """The ends of all logs, or of a job's."""
        paths = [p for p in self.runs.glob("*/logs/**/*") if p.is_file() and p.suffix != ".pkl"]
        paths = [p for p in paths if p.name.startswith(job) and p.suffix != ".sh"]
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-3000:]}" for p in paths)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    repo, text = folder / "checkout", folder / "text"
    for part in ("lingua", "apps", "tests"):
        shutil.copytree(REPO / part, repo / part, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    text.mkdir()
    write_sources(text)
    with slurm_here(folder / "cluster", 6) as env:
        env |= {"OMP_NUM_THREADS": "1", "A_SECRET": secrets.token_hex()}
        yield Cluster(repo, text, folder / "runs", env)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, tuple[Path, str]]:
    """Dump dir and job id of every job of two ranks on two nodes, by what happens to it."""
    told = {name: cluster.runs / f"{name}.told" for name in ("fail", "kill")}
    tell = 'echo "$LINGUA_REASON $LINGUA_EXIT_CODE $LINGUA_ERROR" >>"$0"'
    wanted = {"plain": {"slurm": {"hold": True}}, "fail": {"setup": ["export FAIL_RANK=1"]}}
    wanted["fail"]["max_restarts"] = 0
    wanted["kill"] = {"setup": ["export KILL_RANK=1"]}
    for name, file in told.items():
        wanted[name]["on_stop"] = ["sh", "-c", tell, str(file)]
    wanted |= {"signal": SLOW, "cancel": SLOW}
    wanted["check"] = {"check": True, "gpu": "h100", "script": None}  # which its nodes do not have
    places = [cluster.runs / (HOSTILE if name == "plain" else name) for name in wanted]
    asked = zip(wanted.values(), places, strict=True)
    pairs = [(ON_TWO_NODES | job, cluster.arguments(place)) for job, place in asked]
    launched = cluster.launch(*pairs)
    jobs = dict(zip(wanted, zip(places, (job for job, _ in launched), strict=True), strict=True))
    edited = cluster.repo / "tests" / "slurm_app.py"
    edited.rename(edited.with_suffix(".was"))
    edited.write_text("raise SystemExit('edited')\n")
    try:
        cluster.ask("scontrol", "release", jobs["plain"][1])
        for name in ("signal", "cancel"):
            cluster.wait_for_steps(jobs[name][0])
            interrupt(cluster, name, jobs[name][1])
        cluster.ended(jobs["plain"][1])
    finally:
        edited.with_suffix(".was").rename(edited)
    return jobs


def interrupt(cluster: Cluster, how: str, job: str) -> None:
    if how == "signal":
        cluster.ask("scancel", "--signal=USR2", job)
    elif how == "cancel":
        cluster.ask("scancel", job)
    elif how == "preemption":
        more = ["--partition=urgent", "--nodelist=n6", "--exclusive", "--output=/dev/null"]
        cluster.ask("sbatch", *more, "--wrap=true")
    elif how == "node":
        nodes = cluster.ask("scontrol", "show", "hostnames", cluster.shown(job)["NodeList"])
        pid_file = Path(cluster.env["SLURM_CONF"]).parent / f"slurmd.{nodes.split()[1]}.pid"
        os.kill(int(pid_file.read_text()), 9)


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> Outcome:
    """The same run by torchrun, which is what launcher=local starts."""
    place = cluster.runs / "here"
    [[job_id, code]] = cluster.launch(({"launcher": "local", "nodes": 2}, cluster.arguments(place)))
    assert (job_id, code) == (None, 0)
    return Outcome(place, [])


def same(dump_dir: Path, reference: Outcome) -> bool:
    """One line for every step, with the same rows and losses within 1e-5."""
    run = Outcome(dump_dir, [])
    assert run.column("step") == list(range(1, STEPS + 1))
    return not {"batch_hash", "loss"} & set(differs(run, reference))


def test_a_job_trains_from_the_code_it_was_launched_with(cluster, jobs, reference, tmp_path):
    dump_dir, job = jobs["plain"]
    cluster.ended(job)
    assert same(dump_dir, reference)
    lines = [line | {"loss": line["loss"] * 1.0001} for line in reference.lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not same(tmp_path, reference)  # which other losses are not

    commit = cluster.ask("git", "-C", str(cluster.repo), "rev-parse", "HEAD")
    assert (dump_dir / "code.commit").read_text() == commit
    ranks = [dump_dir / "logs" / job / f"{job}_{rank}_log.out" for rank in (0, 1)]
    assert f"step {STEPS} loss" in ranks[0].read_text() and ranks[1].exists()
    # Nothing in the hostile name ran, and nothing wrote the environment down.
    assert not list(cluster.runs.parent.rglob("pwned"))
    secret = cluster.env["A_SECRET"].encode()
    kept = [p for p in dump_dir.rglob("*") if p.is_file()]
    assert len(kept) > 100 and not any(secret in p.read_bytes() for p in kept)


@pytest.mark.soak
def test_a_printed_script_is_the_same_run_by_hand(cluster, reference, monkeypatch):
    dump_dir = cluster.runs / "by hand"
    job = "script=tests.slurm_app launcher=print nodes=2 gpus=none time=5 slurm.exclude='n3,n4'"
    command = [*python(OF_OTHERS), "-m", "lingua", "stool", *job.split()]
    where = {"env": cluster.env, "capture_output": True, "text": True}
    arguments = cluster.arguments(dump_dir)
    done = subprocess.run([*command, *arguments], cwd=cluster.repo, **where)
    script = dump_dir / "submit.slurm"
    assert done.returncode == 0 and done.stdout == script.read_text(), done.stderr
    debug = "export NCCL_DEBUG=INFO"
    edited = done.stdout.replace(f"# {debug}", f"echo edited; {debug}")
    script.write_text(edited)
    sbatch = subprocess.run(["sbatch", "--parsable", script], cwd="/", **where)
    job_id = sbatch.stdout.strip()
    assert cluster.ended(job_id)["NumNodes"] == "2"
    assert same(dump_dir, reference)
    log = (dump_dir / "logs" / f"{job_id}.log").read_text()
    assert log == f"edited\njob {job_id}: finished, exit code 0\n"
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    [run] = status(dump_dir)
    assert (run.state, run.job_id, run.row.step) == ("COMPLETED", job_id, STEPS)


@pytest.mark.parametrize(
    "how",
    ["signal", *(pytest.param(how, marks=pytest.mark.soak) for how in ("preemption", "node"))],
)
def test_an_interrupted_job_comes_back_and_ends_as_the_same_run(cluster, jobs, reference, how):
    if how not in jobs:
        other = {"exclude": "n1,n2,n6", "setup": ["export STEP_S=4"]}  # Slurm takes seconds
        if how == "preemption":
            other |= {"nodes": 1, "exclude": None, "slurm": {"nodelist": "n6"}}
        place = cluster.runs / how
        [[job, _]] = cluster.launch((ON_TWO_NODES | other, cluster.arguments(place)))
        cluster.wait_for_steps(place)
        interrupt(cluster, how, job)
        jobs[how] = place, job
    dump_dir, job = jobs[how]
    assert cluster.ended(job)["Restarts"] == "1"
    assert same(dump_dir, reference)
    log = (dump_dir / "train.log").read_text()
    assert ("stopped by SIGUSR2" in log) == (how == "signal")
    if how == "preemption":
        assert "stopped by SIGTERM" in log
    assert "resuming" in log


@pytest.mark.soak
def test_a_job_saves_and_comes_back_before_its_time_limit(cluster, reference):
    # Slurm checks times every 30 seconds and sends the signal up to 60 seconds early: here it
    # comes 30 to 90 seconds after the start.
    place = cluster.runs / "time limit"
    limit = {"setup": ["export STEP_S=10"], "time": "2", "signal_s": 30, "nodes": 2}
    [[job, _]] = cluster.launch((limit, cluster.arguments(place)))
    assert cluster.ended(job)["Restarts"] == "1"
    assert same(place, reference)
    assert "stopped by SIGUSR2" in (place / "train.log").read_text()


def test_a_cancelled_job_resumes_on_fewer_nodes_when_launched(cluster, jobs, reference):
    dump_dir, job = jobs["cancel"]
    assert cluster.ended(job, "CANCELLED")["Restarts"] == "0"
    again = {"nodes": 1, "exclude": "n3,n4,n5", "dirs_exists_ok": True}
    [[second, _]] = cluster.launch((again, cluster.arguments(dump_dir)))
    cluster.ended(second)
    assert same(dump_dir, reference)
    [moved] = [e for e in Outcome(dump_dir, []).events if e["event"] == "topology"]
    assert (moved["old"], moved["new"]) == ([1, 2, 1], [1, 1, 1])
    assert (dump_dir / "code.1").is_dir() and (dump_dir / "base_config.yaml.1").exists()


def test_a_failing_rank_is_the_first_error_that_status_shows(cluster, jobs, monkeypatch):
    dump_dir, job = jobs["fail"]
    cluster.ended(job, "FAILED")
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    [run] = status(dump_dir)
    assert (run.state, run.job_id, run.row.step) == ("FAILED", job, 2)
    rank_1 = dump_dir / "logs" / job / f"{job}_1_log.err"
    assert run.errors[0] == f"[rank1]: RuntimeError: this rank fails, as FAIL_RANK asks ({rank_1})"
    # The code may be that of the other rank, which srun ends.
    assert re.fullmatch(rf"job {job}: failed, exit code \d+ \(.*logs/{job}.log\)", run.errors[-1])
    assert all(error in status_table([run]) for error in run.errors)
    [line] = told(dump_dir)  # once for all ranks
    assert re.fullmatch(r"failed \d+ \[rank1\]: RuntimeError: this rank fails, as .*", line)


def told(dump_dir: Path) -> list[str]:
    """What on_stop was given at each end."""
    return dump_dir.with_suffix(".told").read_text().splitlines()


def test_a_job_whose_rank_was_killed_comes_back_and_ends_as_the_same_run(cluster, jobs, reference):
    dump_dir, job = jobs["kill"]
    assert cluster.ended(job)["Restarts"] == "1"
    assert same(dump_dir, reference) and "resuming" in (dump_dir / "train.log").read_text()
    restarted, finished = told(dump_dir)
    assert re.fullmatch(r"restarted 137 srun: error: n\d: task 1: Killed", restarted)
    assert finished == "finished 0 "


@pytest.mark.soak
def test_a_job_that_fails_without_progress_or_by_a_mistake_does_not_come_back(cluster):
    for name, job, code, restarts in (
        ("limit", {"setup": ["export FAIL_RANK=1"], "max_restarts": 1}, r"\d+:0", "1"),
        ("mistake", {"setup": ["export MISTAKE='it is wrong'"]}, "2:0", "0"),
    ):
        place = cluster.runs / name
        words = [*cluster.arguments(place), "checkpoint.dump.every=100"]
        [[job_id, _]] = cluster.launch((ON_TWO_NODES | job, words))
        shown = cluster.ended(job_id, "FAILED")
        ended = re.fullmatch(code, shown["ExitCode"]) and shown["Restarts"] == restarts
        assert ended, cluster.logs(job_id)


def test_a_job_whose_check_fails_gives_its_nodes_back(cluster, jobs, monkeypatch):
    dump_dir, job = jobs["check"]
    shown = cluster.ended(job, "FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("1:0", "0")
    assert not (dump_dir / "metrics.jsonl").exists()
    table = (dump_dir / "logs" / f"{job}.log").read_text()
    assert re.search("^products, TFLOP/s +OUT OF LINE", table, re.M)
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    [run] = status(dump_dir)
    assert run.errors[-2].startswith("error: all-reduce, GB/s: rank 1 on ")  # the last line


def test_a_rank_sees_all_gpus_of_its_job_or_one_that_no_other_sees(cluster, tmp_path):
    # Another job has the first GPU of n1, so that what a job has is another part of either node.
    other = ["--parsable", "--nodelist=n1", "--gpus=1", "--output=/dev/null", "--wrap=sleep 300"]
    holder = cluster.ask("sbatch", *other).strip()
    cluster.until(lambda: cluster.shown(holder)["JobState"] == "RUNNING", "the other job")
    job = {"script": "tests.gpu_app", "nodes": 2, "ngpu": 2, "exclude": "n3,n4,n5,n6"}
    places = {gpus: cluster.runs / f"gpus {gpus}" for gpus in ("node", "task")}
    scratch = ("env", f"TMPDIR={tmp_path}")
    # They are launched from within a job whose GPUs are bound, which they must not inherit.
    launched = cluster.launch(
        *((job | {"gpus": gpus}, [f"dump_dir={place}"]) for gpus, place in places.items()),
        within=("salloc", "--nodelist=n6", "--ntasks=2", "--gpus-per-task=1", *scratch),
    )
    shown, folders = {}, set()
    for (gpus, place), (job_id, _) in zip(places.items(), launched, strict=True):
        cluster.ended(job_id)
        logs = (place / "logs" / job_id).glob("*_log.out")
        printed = [log.read_text().splitlines()[-2:] for log in logs]
        shown[gpus] = sorted(place for _, place in printed)
        folders |= {folder for folder, _ in printed}
    cluster.ask("scancel", holder)
    assert folders == {str(tmp_path)}
    assert shown == {  # rank, node, local rank, GPUs
        "node": ["0 n1 0 1,2", "1 n1 1 1,2", "2 n2 0 0,1", "3 n2 1 0,1"],
        "task": ["0 n1 0 1", "1 n1 1 2", "2 n2 0 0", "3 n2 1 1"],
    }


def test_a_sweep_runs_two_at_a_time_each_with_a_folder_and_a_name(cluster, monkeypatch):
    root = cluster.runs / "sweep"
    values = ["sweep.data.sources={one: 1},{one: 1, two: 1},{two: 1}", "at_once=2"]
    job = ["script=tests.slurm_app", "gpus=none", "setup=[export STEP_S=0.2]"]
    command = [*python(OF_OTHERS), "-m", "lingua.stool", *values, *job, *cluster.arguments(root)]
    where = {"cwd": cluster.repo, "env": cluster.env}
    done = subprocess.run(command, **where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    array = (root / "job_id").read_text().strip()
    assert f"job {array} was submitted: 3 runs" in done.stdout
    assert f"scancel {array}" in done.stdout and f"lingua stool status {root}" in done.stdout

    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    seen = [status(root)]
    while any(run.state in ("PENDING", "RUNNING", "COMPLETING") for run in seen[-1]):
        assert len(seen) < 2 * WAIT_S
        time.sleep(0.5)
        seen.append(status(root))
    running = [sum(run.state == "RUNNING" for run in runs) for runs in seen]
    assert max(running) == 2
    rows = [run.row for runs in seen for run in runs]
    assert any(0 < row.step < STEPS and (row.left_s or 0) > 0 for row in rows)
    assert [(r.row.name[:3], r.state, r.row.step, r.job_id) for r in seen[-1]] == [
        (f"{i:03d}", "COMPLETED", STEPS, f"{array}_{i}") for i in range(3)
    ], cluster.logs()
    assert "001_sources=-one-1-two-1-" in status_table(seen[-1])
    members = [run.row.folder for run in seen[-1]]
    hashes = [tuple(Outcome(member, []).column("batch_hash")) for member in members]
    assert len(set(hashes)) == 3
    assert all((m / "logs" / f"{array}_{i}").is_dir() for i, m in enumerate(members))


@pytest.fixture
def launches(cluster, monkeypatch, tmp_path):
    """A launch that is refused by names, and has submitted, written and deleted nothing."""
    for key in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(key, cluster.env[key])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "kept").write_text("kept")

    def known() -> set[str]:
        return set(cluster.ask("squeue", "--noheader", "--states=all", "--format=%i").split())

    def call(*names: str, dump_dir: str = "new", arguments: Any = (), **job: Any) -> None:
        args = JobArgs(**{"script": "tests.slurm_app", "gpus": "none", "time": "5"} | job)
        here = sorted(tmp_path.rglob("*"))
        before = known()
        words = [*cluster.arguments(tmp_path / dump_dir), *arguments]
        refused(lambda: launch(args, words), *names)
        assert known() == before
        assert sorted(tmp_path.rglob("*")) == here

    return call


def test_wrong_input_is_refused_by_name_before_anything_is_done(launches, tmp_path, monkeypatch):
    rows = ["data.global_batch_size=10"]
    for job, *named in (
        ({"partition": "nope"}, "nope"),
        ({"nodes": 9}, "node configuration is not available"),
        *(  # nodes have four
            ({"gpus": gpus, "ngpu": 5, "arguments": rows}, f"nodes = 1, ngpu = 5, gpus = {gpus}")
            for gpus in ("node", "task")
        ),
        ({"slurm": {"gpus": 5}}, "slurm = {'gpus': 5}"),
        ({"dump_dir": "there"}, "there", "dirs_exists_ok=true"),
        ({"account": "a\n#SBATCH --wrap=id"}, "account = "),
    ):
        launches(*named, **job)
    monkeypatch.setenv("PATH", str(tmp_path))
    launches("sbatch")


def test_a_dump_dir_in_use_is_refused_and_a_sweep_names_its_bad_member(cluster, launches, tmp_path):
    job = cluster.ask("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
    (tmp_path / "there" / "job_id").write_text(job)
    launches(f"job {job} is PENDING there", dump_dir="there", dirs_exists_ok=True)
    cluster.ask("scancel", job)
    args = JobArgs(script="tests.slurm_app", gpus="none")
    words, sweep = cluster.arguments(tmp_path / "new"), {"model.dim": ["22", "0"]}
    refused(lambda: launch(args, words, sweep), "model.dim=0: model.dim = 0")
