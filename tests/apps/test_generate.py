"""The program that generates text: prompts in, results out on any topology. What it refuses is in
tests/mistakes.txt."""

import contextlib
import io
import json
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from apps.main.generate import main
from lingua.base.errors import UserError
from tests.apps.meshes import mesh
from tests.apps.test_model import initialised
from tests.disk import full_disk
from tests.model.test_generation import step_by_step
from tests.programs import python
from tests.ranks import Ranks
from tests.tools.exchange.converted import a_model, save_here

MODEL = a_model(dim=36, n_heads=6, n_kv_heads=3, init_base_std=0.3)
REPO = Path(__file__).parents[2]
LINES = ["A", "four", "some longer prompt than the others", "", "of ten too"]


@pytest.fixture(scope="module")
def ckpt(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, whose checkpoint was saved by two ranks."""
    folder = tmp_path_factory.mktemp("run")
    ranks.run(2, save_here, folder / "checkpoints", MODEL, {})
    return folder


def main_here(*arguments: str, stdin: bytes = b"") -> tuple[str, str]:
    """(the error, what it prints)."""
    printed, refused = io.StringIO(), ""
    typed = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "stdin", typed):
        try:
            main(list(arguments))
        except UserError as error:
            refused = str(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return refused, printed.getvalue()


@pytest.fixture
def results(ranks: Ranks, ckpt: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The lines that the program writes for a file of prompts."""

    def run(prompts: Path, *arguments: str, sizes: tuple[int, int, int] = (1, 1, 1)):
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}.jsonl"
        argv = [f"ckpt={ckpt}", f"prompts={prompts}", f"out={out}", "max_gen_tokens=8", *arguments]
        argv += [f"{key}={size}" for key, size in mesh(sizes).items()]
        for refused, _ in ranks.run(sizes[0] * sizes[1] * sizes[2], main_here, *argv):
            assert not refused
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    return run


def likeliest(text: str, n: int) -> list[int]:
    return step_by_step(initialised(MODEL), [256, *text.encode()], n)[0]


def test_results_come_in_the_order_of_the_prompts_the_same_on_every_topology(results, tmp_path):
    prompts = tmp_path / "prompts.txt"
    lines = [line for line in LINES if line]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    alone = results(prompts, "temperature=0", "stop_tokens=[]")
    assert [line["prompt"] for line in alone] == lines
    assert [line["tokens"] for line in alone] == [likeliest(line, 8) for line in lines]
    assert all(len(line["logprobs"]) == 8 and line["finish"] == "length" for line in alone)
    prompts.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    assert [line["prompt"] for line in results(prompts, "max_gen_tokens=1")] == lines
    drawn = results(prompts, "seed=5", "batch_size=2")
    assert [line["seed"] for line in drawn] == [5, 6, 7, 8]
    found = results(prompts, "seed=5", "batch_size=3", sizes=(1, 1, 3))
    assert [line["tokens"] for line in found] == [line["tokens"] for line in drawn]
    assert [line["text"] for line in found] == [line["text"] for line in drawn]


def test_keys_of_a_json_line_win_over_those_of_the_command_line(results, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a line\nand another", "temperature": 0, "id": "x1"},
        {"prompt": "A", "seed": 7, "max_gen_tokens": 3, "top_k": None, "stop_tokens": [], "id": 1},
        {"prompt": "A", "seed": 7, "stop_tokens": []},
        {"prompt": ""},  # of which bos is left
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first, short, long, empty = results(prompts, "stop_tokens=[]")
    assert first["id"] == "x1" and first["tokens"] == likeliest(lines[0]["prompt"], 8)
    assert short["id"] == 1 and short["seed"] == 7 and "id" not in long
    assert len(short["tokens"]) == 3 and short["tokens"] == long["tokens"][:3]
    assert empty["seed"] == 3 and len(empty["tokens"]) == 8


def test_one_prompt_is_streamed_and_without_one_the_terminal_is_asked(ranks, ckpt, tmp_path):
    argv = [f"ckpt={ckpt / 'checkpoints/0000000003'}", "temperature=0", "max_gen_tokens=8"]
    argv.append("stop_tokens=[]")
    [(refused, printed)] = ranks.run(1, main_here, *argv, "prompt=four")
    text = bytes(i for i in likeliest("four", 8) if i < 256).decode(errors="replace")
    assert not refused and printed == f"four{text}\n"
    out = tmp_path / "out.jsonl"
    typed = b"four\nfo\\nur\n" + b"x" * 80 + b"\n"
    asked = ranks.run(2, main_here, *argv, f"out={out}", stdin=typed)
    assert [refused for refused, _ in asked] == ["", ""]
    first, second, rest = asked[0][1].split("\n", 2)
    assert "0000000003 (checkpoint, step 3): enter a prompt" in first and "Ctrl-D" in second
    assert asked[1][1] == ""
    assert rest.startswith(f"> {text}\n> ") and "1 of 1 prompts cut" in rest
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in written] == ["four", "fo\nur", "x" * 80]
    assert written[0]["tokens"] == likeliest("four", 8)


def test_an_answer_of_an_older_checkpoint_than_the_newest_is_announced(ranks, ckpt, tmp_path):
    run = shutil.copytree(ckpt, tmp_path / "run")
    newest = run / "checkpoints/0000000010"
    shutil.copytree(run / "checkpoints/0000000003", newest)
    argv = [f"ckpt={run}", "max_gen_tokens=2", "prompt=four"]
    (newest / "__0_0.distcp").unlink()
    [(refused, printed)] = ranks.run(1, main_here, *argv)
    why = f"{newest} is not a whole checkpoint (__0_0.distcp is missing): skipped"
    used = f"this program uses {run / 'checkpoints/0000000003'}"
    assert not refused and f"warning: ckpt = {run}: {why}; {used}" in printed
    shutil.rmtree(newest)
    [(refused, printed)] = ranks.run(1, main_here, *argv)
    assert not refused and "warning" not in printed


def test_ctrl_c_ends_a_generation_then_the_program_without_a_traceback(ckpt):
    """In the real program; ten thousand tokens take longer than any wait here."""
    command = [*python(), "-m", "apps.main.generate", f"ckpt={ckpt}", "device=cpu"]
    command += ["context=20000", "max_gen_tokens=10000", "stop_tokens=[]"]

    def start(*more: str) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*command, *more], cwd=REPO, **pipes)

    def read_until(process: subprocess.Popen, end: bytes) -> bytes:
        found = b""
        while not found.endswith(end):
            byte = process.stdout.read(1)
            assert byte, f"it ended after {found!r}"
            found += byte
        return found

    asking, single = start(), start("prompt=four")
    with asking, single:
        read_until(asking, b"> ")
        for _ in range(2):
            asking.stdin.write(b"four\n")
            asking.stdin.flush()
            asking.stdout.read(5)  # of the text
            asking.send_signal(signal.SIGINT)
            read_until(asking, b"\n> ")
        # Python's input() misses a signal between its prompt and its read: send it once more then.
        # The end of the input, which comes next, would end the program too.
        ended = []
        while not ended:
            time.sleep(1)
            asking.send_signal(signal.SIGINT)
            ended, _, _ = select.select([asking.stdout], [], [], 5)
        read_until(asking, b"\n")
        assert asking.communicate(timeout=60) == (b"", None) and asking.returncode == 0
        read_until(single, b"four")
        single.stdout.read(5)
        single.send_signal(signal.SIGINT)
        rest, _ = single.communicate(timeout=60)
        assert b"Traceback" not in rest and single.returncode == 130


def main_on_a_full_disk_here(*arguments: str) -> tuple[str, str]:
    with full_disk(20):  # a part of a line fits
        return main_here(*arguments)


def test_a_full_disk_leaves_a_file_that_the_same_command_may_write(ranks, ckpt, tmp_path):
    out = tmp_path / "out.jsonl"
    argv = [f"ckpt={ckpt}", f"out={out}", "prompt=a", "max_gen_tokens=2"]
    [(refused, _)] = ranks.run(1, main_on_a_full_disk_here, *argv)
    assert f"out = {out}: cannot be written (No space left on device)" in refused
    assert out.read_bytes() == b""
    [(refused, _)] = ranks.run(1, main_here, *argv)
    assert not refused and json.loads(out.read_text())["prompt"] == "a"
    [(refused, _)] = ranks.run(1, main_here, *argv)
    assert "exists already; must be a new file" in refused
