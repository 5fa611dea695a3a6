"""Chaos: the agents and workers of an elastic job are killed, stopped, continued and started again
at random moments, and the run that they finish is to the bit the run of one process left alone.

Minutes and seed of a longer one, by hand:

    LINGUA_CHAOS_MINUTES=60 LINGUA_CHAOS_SEED=1 pytest -s -m soak tests/apps/test_chaos.py -k shards
"""

import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from apps.bench.agents import Agents, environment, send, wait_until
from lingua.base.dump_dir import CHECKPOINTS, METRICS, STATE, TRAIN_LOG, step_folder
from lingua.run.files import read_lines
from tests.apps.runs import SMALL, write_sources
from tests.programs import python

MINUTES = float(os.environ.get("LINGUA_CHAOS_MINUTES", "5"))
SEED = int(os.environ.get("LINGUA_CHAOS_SEED", "0"))
AGENTS, RANKS = 3, 2
STUCK_S = 240.0  # without a step while nothing happens
SETTINGS: dict[str, Any] = SMALL | {
    "name": "chaos",
    "steps": 1_000_000,
    "stop_at": "null",
    "deterministic": "mesh",
    "data.workers": 0,
    "checkpoint.dump.every": 5,
    "checkpoint.dump.keep": 3,
    "distributed.step_timeout_s": 10,  # after which a rank that is stopped is left behind
}
MESHES = {
    "shards": {"distributed.dp_shard": "null"},
    "replicas": {"distributed.dp_replicate": "null", "distributed.dp_shard": RANKS},
}
# What is compared of each step. Times and memory are of the machine.
SAME = ("step", "loss", "grad_norm", "lr", "tokens", "batch_hash", "chain")


@dataclass
class Chaos:
    """A job and what happens to it."""

    agents: Agents
    dump_dir: Path
    chance: random.Random
    stopped: dict[int, float] = field(default_factory=dict)  # agents, and when they continue
    returns: dict[int, float] = field(default_factory=dict)  # killed ones, and when they return
    halted: dict[int, float] = field(default_factory=dict)  # workers that were stopped alone
    given_up: int = 0  # agents that have ended by themselves
    events: int = 0
    begin: float = field(default_factory=time.monotonic)

    def run(self, seconds: float) -> None:
        """The next event comes after some steps more, or after a time, also during a start."""
        due, due_at, last, moved_at = 1, math.inf, 0, time.monotonic()
        end = moved_at + seconds
        while (now := time.monotonic()) < end:
            step = self.last_step()
            if step != last:
                last, moved_at = step, now
            assert now - moved_at < STUCK_S, f"no step for {STUCK_S} s: {self.outputs()[-4000:]}"
            self.undo(now)
            if step >= due or now > due_at:
                self.disturb(now)
                due = self.last_step() + int(self.chance.expovariate(1 / 20))
                by_time = self.chance.random() < 0.25
                due_at = now + self.chance.uniform(0, 30) if by_time else math.inf
            time.sleep(0.05)
        self.undo(math.inf)

    def disturb(self, now: float) -> None:
        """Kill or stop something, so that one agent at least is left, at times in a save."""
        able = [i for i in self.agents.running if i not in self.stopped]
        kinds = ["worker", "worker stopped"]
        if len(able) > 1:
            kinds += ["machine", "machine", "agent", "machine stopped"]
        kind, which = self.chance.choice(kinds), self.chance.choice(able)
        until = now + self.chance.uniform(0.5, 25)
        if self.chance.random() < 0.4:
            in_save = self.wait_for_save()
            kind += " in a save" if in_save else ""
        workers = self.agents.workers(which)
        match kind.split()[:2]:
            case ["machine", "stopped"]:
                self.agents.send(which, signal.SIGSTOP)
                self.stopped[which] = until
            case ["machine" | "agent", *_]:
                self.agents.kill(which, workers=kind.startswith("machine"))
                self.returns[which] = until
            case ["worker", *rest] if workers:
                pid = self.chance.choice(workers)
                send(pid, signal.SIGSTOP if rest == ["stopped"] else signal.SIGKILL)
                if rest == ["stopped"]:
                    self.halted[pid] = until
        self.note(f"{kind}: agent {which}, for {until - now:.0f} s")

    def undo(self, now: float) -> None:
        """Continue what was stopped and start again what was killed, where that is due."""
        for i in [i for i, at in self.stopped.items() if at < now]:
            self.agents.send(i, signal.SIGCONT)
            del self.stopped[i]
            self.note(f"continued: agent {i}")
        for pid in [pid for pid, at in self.halted.items() if at < now]:
            send(pid, signal.SIGCONT)
            del self.halted[pid]
        for i, agent in list(self.agents.running.items()):
            if (code := agent.poll()) is not None:
                # One that joined a rendezvous whose others are gone before its workers have ranks
                # waits for them for a minute and raises that (torch 2.13).
                last = self.output(i)[-4000:]
                assert "in _assign_worker_ranks" in last and "DistStoreError: wait" in last, last
                self.agents.start(i)
                self.given_up += 1
                self.note(f"has ended with {code}, and is started again: agent {i}")
        for i in [i for i, at in self.returns.items() if at < now]:
            self.agents.start(i)
            del self.returns[i]
            self.note(f"returned: agent {i}")

    def is_whole(self) -> bool:
        """Whether the ranks of all agents, which run, are of one start."""
        self.undo(time.monotonic())
        ranks = [pid for i in self.agents.running for pid in self.agents.workers(i)]
        sizes = [environment(pid).get("WORLD_SIZE") for pid in ranks]
        return sizes == [str(AGENTS * RANKS)] * AGENTS * RANKS

    def wait_for_save(self, seconds: float = 5.0) -> bool:
        before = self.unfinished()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.unfinished() - before:
                time.sleep(self.chance.uniform(0, 0.03))
                return True
            time.sleep(0.001)
        return False

    def unfinished(self) -> set[str]:
        folder = self.dump_dir / CHECKPOINTS
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        return {name for name in names if ".tmp-" in name}

    def note(self, what: str) -> None:
        passed_s = time.monotonic() - self.begin
        self.events += 1
        print(f"{passed_s:7.1f} s, step {self.last_step()}: {what}", flush=True)

    def last_step(self) -> int:
        """The newest step in the log, which restarts cut back."""
        path = self.dump_dir / METRICS
        tail = path.read_bytes()[-4000:].decode() if path.exists() else ""
        steps = re.findall(r'^\{"step":(\d+),.*\}$', tail, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def output(self, i: int) -> str:
        return (self.agents.folder / f"agent{i}.txt").read_text(errors="replace")

    def outputs(self) -> str:
        return "".join(map(self.output, range(AGENTS)))


def done_again(log: str) -> list[int]:
    """Of each start but the first, how many steps had been logged after that it went on from."""
    counts, last, step = list[int](), 0, 0
    for match in re.finditer(r" step +(\d+) loss|resuming .*\(step (\d+)\)", log):
        step = int(match[1] or match[2])
        if match[2] or step <= last:  # or none was saved yet
            counts.append(last - step + bool(match[1]))
        last = step
    return counts


def write_config(path: Path, settings: dict[str, Any]) -> None:
    """A config that each start reads, of keys with points."""
    config: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = yaml.safe_load(str(value))
    path.write_text(yaml.safe_dump(config))


def lines_of(dump_dir: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_lines(dump_dir / METRICS) if "event" not in line]
    return [{key: line[key] for key in SAME} for line in lines]


def tensors_of(dump_dir: Path, step: int) -> str:
    state = dump_dir / CHECKPOINTS / step_folder(step) / STATE
    return json.loads(state.read_text())["tensors"]


@pytest.mark.soak
@pytest.mark.timeout(60 * (3 * MINUTES + 10))
@pytest.mark.parametrize(("mesh", "share"), [("shards", 0.6), ("replicas", 0.4)])  # of MINUTES
def test_a_job_that_is_killed_and_stopped_at_random_is_the_run_left_alone(mesh, share, tmp_path):
    write_sources(tmp_path)
    dump_dir, alone, other = tmp_path / "run", tmp_path / "alone", tmp_path / "other"
    config = tmp_path / "run.yaml"
    settings = SETTINGS | MESHES[mesh] | {"data.root_dir": str(tmp_path)}
    write_config(config, settings)
    train = ["-m", "apps.main.train", f"config={config}"]
    with Agents(tmp_path, [*train, f"dump_dir={dump_dir}"], AGENTS, RANKS) as agents:
        agents.start(*range(AGENTS))
        chaos = Chaos(agents, dump_dir, random.Random(SEED))
        wait_until(chaos.last_step, STUCK_S, "the first step")
        chaos.run(60 * MINUTES * share)
        wait_until(chaos.is_whole, STUCK_S, "all agents in one start")
        before = chaos.last_step()
        wait_until(lambda: chaos.last_step() > before, STUCK_S, "a step of all")
        last = chaos.last_step() + 50
        write_config(config, settings | {"stop_at": last})
        send(agents.workers(0)[0], signal.SIGKILL)  # all start again, and read that
        codes = {i: agent.wait(3 * STUCK_S) for i, agent in agents.running.items()}
        outputs = chaos.outputs()

    one = ["distributed.dp_replicate=1", "distributed.dp_shard=1", "checkpoint.dump.every=0"]
    for place, words in ((alone, [f"stop_at={last}"]), (other, ["stop_at=3", "seed=7"])):
        whole = [*python(), *train, f"dump_dir={place}", *one, *words]
        subprocess.run(whole, check=True, capture_output=True)
    again = done_again((dump_dir / TRAIN_LOG).read_text())
    print(f"{chaos.events} events, {len(again)} more starts, {last} steps")
    print(f"{chaos.given_up} agents have given up")
    print(f"steps done again: {again}, median {statistics.median(again)}")
    assert codes == dict.fromkeys(range(AGENTS), 0), outputs[-4000:]
    lines = lines_of(dump_dir)
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert lines == lines_of(alone)
    assert lines[:3] != lines_of(other)  # the control
    assert tensors_of(dump_dir, last) == tensors_of(alone, last)
    traces = re.findall(r"^(.*)Traceback \(most recent call last\)", outputs, re.MULTILINE)
    starts = outputs.count("chaos: training")
    ranks = [before for before in traces if re.match(r"\[rank\d+\]: ", before)]
    assert len(traces) - len(ranks) == chaos.given_up, traces
    assert len(ranks) <= starts
