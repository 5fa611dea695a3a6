"""What a GPU does with a run: numbers, bits, speed and memory, each part beside what it should be.

    python -m apps.bench gpu
    python -m apps.bench gpu minutes=9 nanogpt=../nanoGPT meta_lingua=../lingua
    python -m apps.bench gpu --list
    python -m apps.bench gpu --only attention,1B
    python -m apps.bench gpu prepare out=prepared wheels=omegaconf,orjson python=3.12
    python -m apps.bench gpu prepared=prepared

The last two are for a machine without a network: the first makes, on one that has it, what the
second takes. Each part is a process with a time limit. On a CPU the sizes are small. Exit code: 0,
or 1 where something is wrong, or a part has not run to its end.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from apps.bench.gpu import numbers, speed
from apps.bench.gpu.prepare import Setting, download, found, prepare
from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.base.version import code_version
from lingua.config.help import print_help_if_asked
from lingua.config.load import load
from lingua.config.schema import Free, require
from lingua.parallel.launch import detect_launch, pick_device


@dataclass
class GpuArgs:
    out: Free[str] = "gpu"  # folder of results.json, log and the trace of 1B, or of what is made
    minutes: Free[float] = 9.0  # for all parts, once all is prepared; what does not fit is not run
    prepared: Free[str | None] = None  # folder that `gpu prepare` has made; null: made in `out`
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"
    small: Free[bool | None] = None  # small sizes; null: on a CPU
    compile: Free[bool] = True  # on CUDA, compile what a run compiles
    nanogpt: Free[str | None] = None  # a clone of github.com/karpathy/nanoGPT to measure beside
    meta_lingua: Free[str | None] = None  # one of github.com/facebookresearch/lingua
    wheels: Free[str | None] = None  # of prepare: packages of requirements.txt, by comma
    python: Free[str] = "3.12"  # of prepare: the Python that they are for

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from require(self, "above 0", lambda v: v > 0, "minutes")

    def setting(self) -> Setting:
        device, out = pick_device(self.device, detect_launch()), Path(self.out).absolute()
        small = device.type == "cpu" if self.small is None else self.small
        prepared = out / "prepared" if self.prepared is None else Path(self.prepared).absolute()
        compiled = self.compile and device.type == "cuda"
        return Setting(device, small, compiled, prepared, out / "work")


class Part(NamedTuple):
    about: str
    limit_s: int  # on a GPU; it is ended then
    measure: Callable[[Setting], str]  # returns its line of the table
    timed: bool = True  # it has the device for itself


LEAST_S = 30.0  # with less time left no part is begun
CPU_LIMITS = 5  # times as long as on a GPU: two cores that others slow down are no fault of a part
PARTS = {  # by value
    "machine": Part("products, copies, disk", 60, speed.machine),
    "recurrences": Part("numbers of scans", 100, numbers.recurrences, False),
    "bits": Part("runs again, resumed, beside the CPU's", 240, numbers.bits, False),
    "attention": Part("numbers and costs, by implementation and mask", 120, numbers.attention),
    "loss": Part("numbers and costs", 150, numbers.loss),
    "1B": Part("a step of llama_1B", 140, partial(speed.train, name="1B")),
    "nanogpt": Part("beside nanoGPT", 100, partial(speed.beside, project="nanogpt")),
    "1B-eager": Part("1B, not compiled", 80, partial(speed.train, name="1B-eager")),
    "meta_lingua": Part("beside Meta's", 120, partial(speed.beside, project="meta_lingua")),
    "saving": Part("saves and loads", 120, speed.saving),
    "generation": Part("beside transformers", 80, speed.generation),
    "1B-muon": Part("1B with Muon", 80, partial(speed.train, name="1B-muon")),
    "124M": Part("a small model", 60, partial(speed.train, name="124M")),
    "1B-float8": Part("1B in float8", 90, partial(speed.train, name="1B-float8")),
    "3B": Part("a step of llama_3B", 90, partial(speed.train, name="3B")),
}


def main(argv: list[str]) -> None:
    print_help_if_asked(GpuArgs, argv, __doc__)
    parser = argparse.ArgumentParser(prog="python -m apps.bench gpu")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--only")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_intermixed_args(argv)
    words = [word for word in options.words if word != "prepare"]
    args: GpuArgs = load(GpuArgs, words)[0]
    s, clones = args.setting(), {"nanogpt": args.nanogpt, "meta_lingua": args.meta_lingua}
    if options.list:
        print("\n".join(f"{name:12} {part.about}" for name, part in PARTS.items()))
    elif options.words != words:
        if args.wheels is not None:
            download(Path(args.out, "wheels"), args.wheels.split(","), args.python)
        prepare(Path(args.out), clones, small=False)
    elif options.part is not None:
        found("summary", PARTS[options.part].measure(s))
    else:
        asked = options.only.split(",") if options.only else list(PARTS)
        if unknown := [name for name in asked if name not in PARTS]:
            raise UserError(f"--only: {', '.join(unknown)} is no part; --list prints them")
        if args.prepared is None or any(clones.values()):
            prepare(s.prepared, clones, s.small)
        if options.only is None:
            asked = [p for p in PARTS if p not in clones or (s.prepared / "projects" / p).is_dir()]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        sys.exit(measure(s, [name for name in PARTS if name in asked], words, args.minutes))


def measure(s: Setting, names: list[str], words: list[str], minutes: float) -> int:
    """Run the parts: those that are not timed at once on a GPU, then each alone. Returns the exit
    code."""
    out, end, rows = s.work.parent, time.monotonic() + 60 * minutes, list[dict[str, Any]]()
    code = code_version(Path(__file__))
    about = {"device": s.device_name(), "torch": torch.__version__, "words": words}
    shutil.rmtree(s.work, ignore_errors=True)
    s.work.mkdir(parents=True)
    at_once = [name for name in names if s.device.type == "cuda" and not PARTS[name].timed]
    groups = [*([at_once] if at_once else []), *([name] for name in names if name not in at_once)]
    processes = dict[str, subprocess.Popen[bytes]]()
    times = 1 if s.device.type == "cuda" else CPU_LIMITS
    with (out / "log").open("w", encoding="utf-8") as log:
        try:
            for group in groups:
                begin = time.monotonic()
                for name in group if end - begin > LEAST_S else ():
                    processes[name] = start(name, s, words)
                for name in group:
                    deadline = min(begin + times * PARTS[name].limit_s, end)
                    row = finish(name, processes.get(name), deadline, s.work / f"{name}.log")
                    processes.pop(name, None)
                    print(f"\n== {name}\n{row.pop('output')}", file=log, flush=True)
                    rows.append(row | {"s": time.monotonic() - begin})
                    content = json.dumps(about | {"code": code, "parts": rows}, indent=1)
                    write_atomically(out / "results.json", content + "\n")
        finally:
            for process in processes.values():
                end_group(process)
    shutil.rmtree(s.work, ignore_errors=True)
    print(f"\n{s.device_name()}, torch {torch.__version__}\n")
    for row in rows:
        print(f"{row['part']:12} {row['s']:4.0f} s  {row['verdict']}: {row['summary']}")
    print(f"\nall values and output: results.json and log in {out}")
    return 0 if all(row["verdict"] == "right" for row in rows) else 1


def start(name: str, s: Setting, words: list[str]) -> subprocess.Popen[bytes]:
    print(f"{name}: {PARTS[name].about}", file=sys.stderr)
    command = [sys.executable, "-m", "apps.bench", "gpu", *words, f"--part={name}"]
    with (s.work / f"{name}.log").open("wb") as f:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=f, stderr=f, process_group=0
        )


def finish(
    name: str, process: subprocess.Popen[bytes] | None, deadline: float, log: Path
) -> dict[str, Any]:
    """The verdict of a part once it has ended, its summary, all its values and its output."""
    if process is None:
        return {"part": name, "verdict": "not run", "summary": "no time left", "output": ""}
    verdict, values = "FAILED: out of time", dict[str, Any]()
    with suppress(subprocess.TimeoutExpired):
        verdict = "FAILED" if process.wait(max(0.0, deadline - time.monotonic())) else ""
    end_group(process)
    output = log.read_text(encoding="utf-8", errors="replace")
    for line in output.splitlines():
        with suppress(ValueError):
            values |= json.loads(line) if line.startswith("{") else {}
    wrong = [key for key, value in values.items() if value == "wrong"]
    print("".join(f"  {line}\n" for line in wrong), end="", file=sys.stderr)
    verdict = verdict or ", ".join(dict.fromkeys(key.partition(":")[0] for key in wrong)) or "right"
    summary = values.pop("summary", output.strip().rpartition("\n")[2][:200])
    row = {"part": name, "verdict": verdict, "summary": summary}
    return row | {"values": values, "output": output}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
