"""Random hostile command lines, files of prompts and configs for generation and evaluation: each
works, or is refused with the key, the line or the file, soon and without a traceback."""

import contextlib
import io
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from apps.main import eval as evaluation
from apps.main import generate as generation
from lingua.errors import UserError
from lingua.inference.sampling import SamplingArgs
from tests.apps.tasks import write_tasks
from tests.apps.test_generate import MODEL
from tests.converted import save_here
from tests.ranks import Ranks

SEED, SECONDS, LONGEST_S = 14, 20.0, 60.0  # of each test; of one command on a busy machine
NAMES = ["", "a", "a" * 300, "\x1b[31mred", "${", "${ckpt}", "${oc.env:HOME}", "é", "\udcff"]
NUMBERS = ["-1", "0", "3", "1.5", "1e400", "1e-320", "nan", ".inf", "1e13", "0x10", "1_0"]
NUMBERS += [str(2**63), "9" * 400, "9" * 5000]
OTHERS = ["null", "true", "[]", "{}", "[[1], {a: 2}]", "&a [*a]", "!!x 1", "- 1"]
OTHERS += ["[" * 1000, "{a: " * 500]
FILES = ["/", ".", "/dev/zero", "/dev/null", "/no/such/file"]
VALUES = NAMES + NUMBERS + OTHERS + FILES
JSON = ["NaN", "1e999", "-1", "9" * 400, "2.5", "1e300", "null", "true", "{}", "[[]]", "[-1]"]
JSON += ['"\\ud800"', '"\\u0000"', '"\\u001b[2J"', '["a", 1]', "[1e3]", "[" * 3000]
JSON += ["[" * 300 + "]" * 300]


class Late(BaseException):
    """A command that does not end."""


def end_late(*_: Any) -> None:
    raise Late


def fuzz_here(main: Callable[[list[str]], None], commands: list[list[str]]) -> list[tuple]:
    """(command, the error or None, what was printed, whether it is the user's mistake) of those
    that are run in SECONDS."""
    results, end = [], time.monotonic() + SECONDS
    signal.signal(signal.SIGALRM, end_late)
    for command in commands:
        printed, error, mistake = io.StringIO(), None, False
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
            try:
                main(command)
            except UserError as refused:
                error, mistake = str(refused), True
            except BaseException as failed:
                error = f"{type(failed).__name__}: {str(failed)[:300]}"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if dist.is_initialized():
                    dist.destroy_process_group()
        results.append((command, error, printed.getvalue(), mistake))
        if time.monotonic() > end:
            break
    return results


def check(results: list[tuple], names: Callable[[list[str]], list[str]]) -> None:
    """Every error is a mistake of the user's, and has one of the command's `names`."""
    n_refused = 0
    for command, error, printed, mistake in results:
        shown = [word[:80] for word in command]
        assert "Traceback" not in printed, (shown, printed[-2000:])
        assert error is None or mistake, (shown, error)
        if error is not None:
            n_refused += 1
            assert any(name in error for name in names(command)), (shown, error[:500])
    assert len(results) > 20 and n_refused > len(results) / 4


def keys_of(command: list[str]) -> list[str]:
    """The last names of the keys that a command gives. What is no `key=value` is quoted."""
    keys = [word.partition("=")[0].strip(".").rpartition(".")[2] for word in command]
    return [key for key in keys if key] + ["argument", "must have the form key=value"]


@pytest.fixture(scope="module")
def ckpt(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ranks.run(1, save_here, folder / "checkpoints", MODEL, {})
    return folder


def words(draw: random.Random, keys: list[str]) -> Iterator[str]:
    """Some arguments with hostile values, and now and then a hostile key."""
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(keys)
        if draw.random() < 0.1:
            at = draw.randrange(len(key))
            key = key[:at] + draw.choice(["", ".", "x", "\x1b", " ", "="]) + key[at + 1 :]
        yield f"{key}={draw.choice(VALUES)}"


@pytest.mark.soak
def test_hostile_command_lines_of_generation_are_refused_by_key(ranks, ckpt, tmp_path):
    draw = random.Random(SEED)
    keys = [f.name for f in fields(generation.GenerateArgs) if f.name not in ("app", "out")]
    keys += ["distributed.tp_size", "distributed.dp_shard", "distributed.model_dtype", "config"]
    plain = [f"ckpt={ckpt}", "prompt=a", "device=cpu", "max_gen_tokens=2"]
    commands = [[*plain, *words(draw, keys)] for _ in range(2000)]
    commands += [[*plain, f"out={value}"] for value in NAMES if value[:1] in ("a", "/")]
    [results] = ranks.run(1, fuzz_here, generation.main, commands)
    check(results, keys_of)


def prompt_lines(draw: random.Random) -> bytes:
    """Lines of JSON, of which one has a hostile key, value or byte."""
    keys = [f.name for f in fields(SamplingArgs)] + ["prompt", "id", "seed", "x", "", "\x1b[31m"]
    line = f'{{"prompt": "a", {json.dumps(draw.choice(keys))}: {draw.choice(JSON)}}}'.encode()
    if draw.random() < 0.3:
        at = draw.randrange(len(line))
        line = line[:at] + bytes([draw.randrange(256)]) + line[at + draw.randint(0, 1) :]
    lines = [b'{"prompt": "good"}'] * draw.randint(0, 2)
    return b"\n".join([*lines, line, *lines])


@pytest.mark.soak
def test_hostile_files_of_prompts_are_refused_by_line(ranks, ckpt, tmp_path):
    draw, commands = random.Random(SEED), []
    for i in range(1000):
        path = tmp_path / f"{i}.jsonl"
        path.write_bytes(prompt_lines(draw))
        commands.append([f"ckpt={ckpt}", f"prompts={path}", "device=cpu", "max_gen_tokens=2"])
    [results] = ranks.run(1, fuzz_here, generation.main, commands)
    check(results, lambda command: [command[1].removeprefix("prompts=") + ":"])


@pytest.mark.soak
def test_hostile_configs_of_an_evaluation_are_refused_by_key(ranks, ckpt, tmp_path):
    draw, commands = random.Random(SEED), []
    task_dir = write_tasks(tmp_path / "tasks", n=2)
    skipped = ("app", "tasks", "wandb", "dump_dir")
    keys = [f.name for f in fields(evaluation.EvalArgs) if f.name not in skipped]
    plain = {"ckpt": str(ckpt), "tasks": ["choice", "reply"], "task_dir": str(task_dir)}
    plain |= {"device": "cpu", "limit": 1, "dump_dir": str(tmp_path / "out"), "max_gen_tokens": 2}
    for i in range(300):
        path, config = tmp_path / f"{i}.yaml", dict(plain)
        lines = [f"{key}: {json.dumps(value)}\n" for key, value in config.items()]
        given = list(words(draw, keys))
        if draw.random() < 0.5:  # in the file
            lines += [word.replace("=", ": ", 1) + "\n" for word in given if "\udcff" not in word]
            given = []
        path.write_text("".join(lines), encoding="utf-8")
        commands.append([f"config={path}", *given])
    [results] = ranks.run(1, fuzz_here, evaluation.main, commands)
    check(results, lambda command: [command[0].removeprefix("config="), *keys_of(command)])
