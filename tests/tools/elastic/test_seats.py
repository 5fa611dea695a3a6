"""Which of the launched ranks a run uses. Each rank is a process, started as torchrun does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lingua.base.errors import UserError
from lingua.parallel.args import DistributedArgs, fitting, mesh_sizes
from tests.programs import python
from tests.ranks import free_port

ROOT = Path(__file__).parents[3]
RANK = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.program import run_program

def rank():
    number, folder, args = os.environ["RANK"], Path(sys.argv[1]), json.loads(sys.argv[2])
    mesh = start(torch.device("cpu"), detect_launch(), DistributedArgs(**args), dump_dir=folder)
    sums = torch.ones(1)
    dist.all_reduce(sums)
    values = [int(number), dist.get_rank(), detect_launch().rank, list(mesh.shape), sums.item()]
    print(json.dumps(values), flush=True)

run_program(rank)
"""


def in_hosts(command: list[str], host: str | None) -> list[str]:
    """The command as a process of another host, by name."""
    if host is None:
        return command
    return ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *command]


needs_hosts = pytest.mark.skipif(
    subprocess.run(in_hosts(["true"], "node9"), capture_output=True, check=False).returncode != 0,
    reason="needs the right to name a host",
)


def start_ranks(
    folder: Path, n: int, args: dict[str, Any], hosts: dict[int, str] | None = None, **env: str
) -> list[tuple[int, str]]:
    """(exit code, output) of each of n ranks."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    processes = []
    for rank in range(n):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)}
        first = [sys.executable] if hosts else python()  # a fork has the host of its server
        command = [*first, "-c", RANK, str(folder), json.dumps(args)]
        processes.append(
            subprocess.Popen(
                in_hosts(command, (hosts or {}).get(rank)), cwd=ROOT, text=True,
                env=os.environ | place | numbers | env | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]


def values_of(results: list[tuple[int, str]]) -> list[list[Any]]:
    """What each rank that was used has printed."""
    lines = [line for _, output in results for line in output.splitlines() if line[:1] == "["]
    return [json.loads(line) for line in lines if line[1:2].isdigit()]


@pytest.mark.parametrize("given", [(None, 1, 1), (1, None, 2), (2, None, 3), (2, 3, 1), (1, 1, 4)])
def test_the_numbers_that_fit_are_those_that_have_a_mesh(given):
    args = DistributedArgs(*given)
    for n in range(1, 20):
        have_mesh = []
        for smaller in range(1, n + 1):
            try:
                mesh_sizes(args, smaller)
                have_mesh.append(smaller)
            except UserError:
                pass
        assert fitting(args, n) == max(have_mesh, default=0)


def test_ranks_beyond_the_mesh_stay_idle_until_the_others_have_left(tmp_path):
    results = start_ranks(tmp_path, 3, {"dp_shard": 2, "spare": True})
    assert [code for code, _ in results] == [0, 0, 0], results
    assert values_of(results) == [[0, 0, 0, [1, 2, 1], 2.0], [1, 1, 1, [1, 2, 1], 2.0]]
    assert results[0][1].startswith("2 of 3 ranks are used; idle: 1 more than fit")


@pytest.mark.soak
@needs_hosts
def test_ranks_of_a_host_that_has_computed_wrongly_stay_idle(tmp_path):
    """Also where rank 0, whose process has the store, is one of them."""
    for wrong in (0, 1):
        line = {"host": "node7", "rank": wrong, "step": 3}
        (tmp_path / "wrong_hosts.jsonl").write_text(json.dumps(line) + "\n")
        results = start_ranks(tmp_path, 3, {"spare": True}, {wrong: "node7"})
        used = [rank for rank in range(3) if rank != wrong]
        assert [code for code, _ in results] == [0, 0, 0], results
        mesh = [1, 2, 1]
        assert values_of(results) == [[rank, i, i, mesh, 2.0] for i, rank in enumerate(used)]
        said = "".join(output for _, output in results)
        assert said.count("2 of 3 ranks are used; idle: 1 rank on a host that ") == 1
    results = start_ranks(tmp_path, 2, {}, {0: "node7"})
    assert [code for code, _ in results] == [2, 2] and not values_of(results)


@pytest.mark.soak
def test_ranks_that_do_not_fit_wait_for_others_where_these_can_come(tmp_path):
    begin = time.monotonic()
    results = start_ranks(tmp_path, 3, {"dp_shard": 2}, TORCHELASTIC_MAX_RESTARTS="0")
    assert [code for code, _ in results] == [2, 2, 2]
    said = "".join(output for _, output in results)
    assert "2 does not divide" in said or "their product is 2, but 3" in said
    assert "waiting" not in said
    args = {"tp_size": 2, "rendezvous_s": 20}
    results = start_ranks(tmp_path, 3, args, TORCHELASTIC_MAX_RESTARTS="3")
    assert time.monotonic() - begin > 20
    assert [code for code, _ in results] == [2, 2, 2]
    said = "".join(output for _, output in results)
    assert said.count("3 ranks can be used, and 2, 4, ... fit the mesh of the config: waiting") == 1
    assert "tp_size = 2: 2 does not divide the number of processes, 3" in said


# ---- with torchrun

SMALL = [
    "config=apps/main/configs/small.yaml", "steps=60", "logging.freq=1", "model.dim=32",
    "model.n_heads=2", "data.seq_len=32", "device=cpu", "optim.warmup=5", "validation.every=0",
    "data.global_batch_size=8", "data.batch_size=2", "deterministic=mesh",
]  # fmt: skip


STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(1000)
"""


class Agents:
    """torchrun on several hosts, by name, with one rank each."""

    def __init__(self, folder: Path, nodes: str) -> None:
        text = folder / "text"
        text.mkdir()
        rows = [json.dumps({"text": f"some text of {i} " * 30}) + "\n" for i in range(200)]
        (text / "words.jsonl").write_text("".join(rows))
        self.folder, self.port, self.nodes = folder, free_port(), nodes
        self.words = [*SMALL, f"data.root_dir={text}", "data.sources={words: 1}"]
        self.started: dict[str, subprocess.Popen[str]] = {}
        self.store = subprocess.Popen([*python(), "-c", STORE, str(self.port)])

    def start(self, host: str | None, *words: str) -> subprocess.Popen[str]:
        conf = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1",
            f"--nnodes={self.nodes}", "--rdzv-backend=c10d", "--rdzv-id=night",
            f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={conf}",
            "--local-addr=127.0.0.1", "--max-restarts=9", "-m", "apps.main.train", *self.words,
            f"dump_dir={self.folder / 'run'}", *words,
        ]  # fmt: skip
        env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        output = (self.folder / f"{host or len(self.started)}.log").open("w")
        self.started[host or str(len(self.started))] = started = subprocess.Popen(
            in_hosts(command, host), cwd=ROOT, env=env, text=True, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        return started

    def said(self, name: str, words: str, seconds: float = 180) -> str:
        """Wait until an agent or its rank has printed this."""
        end = time.monotonic() + seconds
        while words not in (text := (self.folder / f"{name}.log").read_text()):
            assert time.monotonic() < end, text
            time.sleep(0.2)
        return text

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        for started in self.started.values():
            started.send_signal(signal.SIGTERM)  # torchrun ends its ranks, of other sessions
        for started in self.started.values():
            started.wait(60)
        self.store.kill()
        self.store.wait()


@pytest.mark.soak
@needs_hosts
def test_the_agent_of_a_host_that_has_computed_wrongly_ends_and_the_others_go_on(tmp_path):
    with Agents(tmp_path, "1:2") as agents:
        (tmp_path / "run").mkdir()
        line = {"host": "node2", "rank": 1, "step": 3}
        (tmp_path / "run" / "wrong_hosts.jsonl").write_text(json.dumps(line) + "\n")
        one, two = agents.start("node1"), agents.start("node2")
        agents.said("node2", "node2, whose device has computed wrongly: its torchrun ends")
        assert two.wait(60) != 0
        agents.said("node1", "done: 60 steps")  # its torchrun waits five minutes for the other one
        assert one.poll() is None
    lines = [json.loads(t) for t in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {tuple(line["hosts"]) for line in lines if line.get("event") == "start"} == {("node1",)}
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 61))


@pytest.mark.soak
def test_ranks_with_too_little_memory_wait_for_others(tmp_path):
    """A device on which one rank has too little, and two have enough."""
    device = {"name": "Small", "memory_gb_per_s": 100, "bf16_tflops": 1, "tf32_tflops": 1,
              "fp32_tflops": 1, "node_gb_per_s": 1, "network_gb_per_s": 1}  # fmt: skip
    needs = {n: needs_gib(tmp_path, n, device | {"memory_gib": 9.0}) for n in (1, 2)}
    assert needs[2] < needs[1]
    gpu = tmp_path / "small_gpu.yaml"
    gpu.write_text(json.dumps(device | {"memory_gib": (needs[1] + needs[2]) / 2}))
    with Agents(tmp_path, "1:2") as agents:
        agents.start(None, f"distributed.gpu={gpu}", "model.vocab_size=512")
        agents.said("0", "1 rank would each need")
        agents.start(None, f"distributed.gpu={gpu}", "model.vocab_size=512")
        assert [agent.wait(150) for agent in agents.started.values()] == [0, 0]


def needs_gib(folder: Path, n: int, device: dict[str, Any]) -> float:
    gpu, out = folder / "any_gpu.yaml", folder / "plan.json"
    gpu.write_text(json.dumps(device))
    words = ["model.vocab_size=512", f"ngpu={n}", f"gpu={gpu}", f"json={out}"]
    subprocess.run([*python(), "-m", "lingua", "plan", *SMALL, *words], cwd=ROOT, check=True)
    return json.loads(out.read_text())["needs_gib"]
