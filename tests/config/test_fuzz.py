"""Thousands of hostile configs and command lines, drawn from a seed: each is accepted or ends with
exit code 2 and a message that names the key or the file, at once and in little memory."""

import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

SECONDS, SLOWEST_S, MOST_GIB = 60, 30, 4  # of all cases, of one, more than after the imports
DEBUG = Path("apps/main/configs/debug.yaml")
WORDS = ["", " ", "null", "true", "???", "a", "-", "~", "&a [*a]", "*a", "!!x y", "{", "[", "'"]
WORDS += ["|", "a: b", "# x", "\t", "\n", "\r\n", "\x1b[31m", "é" * 99, "\u202e", "x" * 300, "/"]
WORDS += ["..", "${", "${}", "${seed}", "${name}", "${data}", "${.lr}", "${oc.env:HOME}", "${a:b}"]
WORDS += [
    "${" * 99 + "}" * 99,
    "${data.sources}" * 99,
    "\\${seed}",
    "${oc.create:[]}",
    "${oc.env:}",
]
NUMBERS = ["0", "-1", "1", "3", "1e3", "1e8", "1e13", "1e30", "1e308", "1e-320", "-1e99", "0.5"]
NUMBERS += [".inf", "-.inf", ".nan", "2147483648", "9223372036854775807", "9" * 40, "9" * 5000]
NUMBERS += ["0x1f", "0x" + "f" * 400, "010", "1:30", "2024-01-01", "1_000", "1__0_", "+.5", "--1"]
NESTED = ["[]", "{}", "[[[]]]", "[1, a]", "{a: 1}", "{a: {b: {c: 1}}}", "[" * 200 + "]" * 200]
NESTED += ["{" + ", ".join(f"k{i}: {i}" for i in range(500)) + "}", "{a: 1, a: 2}", "{? [a] : b}"]
NESTED += ["[" + "1, " * 3000 + "]", "{a: -1}", "{a: .nan}", "[-1]", "[[from_step, 1]]"]
VALUES = [*WORDS, *NUMBERS, *NESTED]
BYTES = [b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\t", b"\r", b"\x85", b": ", b"- "]
BYTES += [b"\n", b"&a ", b"*a", b"!!python/name:os.system ", b"---\n", b"%YAML 9\n", b"<<: *a\n"]
BYTES += [b"base: x.yaml\n", b"[" * 300, b"{", b"}", b'"', b"'", b"${", b"  " * 60 + b"a: \n"]


def argument(draw: random.Random, keys: list[str]) -> str:
    key, value, form = draw.choice(keys), draw.choice(VALUES), draw.randrange(10)
    if form == 0:
        odd = [key + ".x", key[:-1], key.upper(), key + "[0]", f".{key}", draw.choice(VALUES)]
        key = draw.choice(odd)
    elif form == 1:
        value += "".join(draw.choices(VALUES, k=2))
    elif form == 2:
        key = f"sweep.{key}"
    return key if form == 3 else f"{key}={value}"


def file(draw: random.Random, folder: Path) -> Path:
    """A config file that is a config with some of its bytes changed, or no config at all."""
    text, path = bytearray(DEBUG.read_bytes()), folder / f"{draw.getrandbits(60)}.yaml"
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        change = draw.randrange(4)
        if change == 0:
            text[at:at] = draw.choice(BYTES)
        elif change == 1:
            del text[at : at + draw.randint(1, 30)]
        elif change == 2:
            text[at:at] = draw.choice(VALUES).encode()
        else:
            text[at:at] = text[draw.randrange(len(text) + 1) :]
    odd = {1: b"", 2: b"[]", 3: b"\n".join(b"k%d: 1" % i for i in range(20_000)), 4: bytes(2 << 20)}
    path.write_bytes(odd.get(draw.randrange(60), bytes(text)))
    return path


def special(folder: Path) -> dict[str, Callable[[], Any]]:
    """Files that a config or a `base:` may name by mistake: what makes each."""
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 20)
    )
    chain = {f"chain{i}.yaml": f"base: chain{i + 1}.yaml\n" for i in range(1500)}
    return {
        "fifo": lambda: os.mkfifo(folder / "fifo"),
        "folder": lambda: (folder / "folder").mkdir(),
        "zero": lambda: (folder / "zero").symlink_to("/dev/zero"),
        "loop": lambda: (folder / "loop").symlink_to("loop"),
        "bomb": lambda: (folder / "bomb").write_text(bomb),
        "chain0.yaml": lambda: [(folder / name).write_text(text) for name, text in chain.items()],
        "self": lambda: (folder / "self").write_text("base: self\n"),
        "of_fifo": lambda: (folder / "of_fifo").write_text("base: fifo\n"),
        "unreadable": lambda: (folder / "unreadable").write_bytes(bytes(range(256))),
        "x" * 300: lambda: None,
        "\x1b[31m": lambda: None,
    }


Program = Callable[[list[str]], object]


def every_program() -> list[tuple[type, Program]]:
    """The configuration of each program, and what reads its command line."""
    from apps.main.config import TrainArgs
    from apps.main.eval import EvalArgs
    from apps.main.generate import GenerateArgs
    from apps.main.start import check
    from lingua.config.load import load
    from lingua.config.meta_lingua import META_LINGUA
    from lingua.convert import ConvertArgs
    from lingua.data.prepare.__main__ import PrepareArgs
    from lingua.data.show import ShowArgs
    from lingua.slurm import launch

    def stool(argv: list[str]) -> None:
        sys.argv = ["stool", "launcher=print", *argv]
        launch.main()

    return [
        (TrainArgs, lambda argv: load(TrainArgs, argv, META_LINGUA)),
        (TrainArgs, lambda argv: check(argv, 2)),
        (launch.JobArgs, stool),
        *((cls, lambda argv, cls=cls: load(cls, argv)) for cls in (GenerateArgs, EvalArgs)),
        *((cls, lambda argv, cls=cls: load(cls, argv)) for cls in (ConvertArgs, ShowArgs)),
        (PrepareArgs, lambda argv: load(PrepareArgs, argv, META_LINGUA, partial=True)),
    ]


def overrun(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer in {SLOWEST_S} s")


def answer(program: Program, argv: list[str], names: list[str]) -> tuple[Any, str | None]:
    """The exit code of a program, and what is wrong with its answer. A refusal must contain one of
    the `names`."""
    from lingua.parallel.program import run_program

    with redirect_stderr(io.StringIO()) as stderr, redirect_stdout(io.StringIO()):
        signal.alarm(SLOWEST_S)
        try:
            run_program(lambda: program(argv))
        except SystemExit as left:
            code = left.code
        except BaseException as error:  # one of ours, or of `overrun`
            return None, f"{type(error).__name__}: {error}"[:300]
        finally:
            signal.alarm(0)
    text = stderr.getvalue()
    named = text.startswith("error: ") and any(name in text for name in names)
    readable = len(text) < 20_000 and not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    fine = code == 0 or (code == 2 and named and readable)
    return code, None if fine else f"exit code {code}: {text[:300]!a}"


def main(seed: str, folder: Path) -> None:
    """Run cases for SECONDS and print those that were not answered as they must be."""
    from apps.main.config import TrainArgs
    from lingua.config.schema import schema
    from lingua.slurm.launch import JobArgs

    programs = every_program()
    names = ["config=", "argument", "unknown key", "sweep.", str(folder)]
    names += {key for cls, _ in programs for key in schema(cls)}
    codes: dict[Any, int] = {}
    signal.signal(signal.SIGALRM, overrun)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (MOST_GIB << 30),) * 2)
    specials = special(folder)
    for make in specials.values():
        make()
    cases = [[f"config={folder / name}"] for name in specials]
    draw, deadline = random.Random(seed), time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        cls, program = draw.choice(programs)
        if cases:
            argv = cases.pop()
        else:
            argv = [f"config={draw.choice([DEBUG, DEBUG, file(draw, folder)])}"] * draw.randint(
                0, 1
            )
            keys = list(schema(TrainArgs)) if cls is JobArgs and draw.random() < 0.5 else []
            argv += [argument(draw, keys or list(schema(cls))) for _ in range(draw.randint(1, 3))]
        code, wrong = answer(program, argv, names)
        codes[code] = codes.get(code, 0) + 1
        if wrong:
            print(json.dumps([cls.__name__, wrong, [word[:300] for word in argv]]), flush=True)
    print(json.dumps(codes))


@pytest.mark.soak
@pytest.mark.parametrize("seed", ["1"])
def test_every_config_and_command_line_is_accepted_or_refused_by_name(
    seed: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.config.test_fuzz", seed, tmp_path],
        capture_output=True,
        text=True,
        timeout=SECONDS + 3 * SLOWEST_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *wrong, codes = map(json.loads, done.stdout.splitlines())
    assert wrong == []
    assert codes["0"] > 0 and codes["2"] > 100  # of both kinds


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
