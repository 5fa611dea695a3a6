"""What the parts of `apps.bench gpu` run with: sizes, text, losses of a CPU, plans, models of other
projects, and wheels, of which a machine with a GPU may be able neither to make nor to fetch all."""

import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from apps.bench.launch import run
from apps.bench.projects import PROJECTS
from apps.main.config import TrainArgs
from lingua.base.dump_dir import METRICS
from lingua.base.errors import UserError
from lingua.base.format import human_bytes
from lingua.config.load import load
from lingua.tools.plan.device import find_device
from lingua.tools.plan.make import make_plan

APPS = Path(__file__).parents[2]
CONFIGS = APPS / "main/configs"
_4_ROWS = ["data.batch_size=4", "data.global_batch_size=4"]
_1B = [f"config={CONFIGS}/llama_1B.yaml", "model.vocab_size=128256", *_4_ROWS]
# Keys of the runs whose speed is measured and planned, on one GPU.
SHAPES = {
    "1B": _1B,
    "1B-eager": [*_1B, "distributed.compile=false"],
    "1B-float8": [*_1B, "distributed.float8=tensorwise"],
    "1B-muon": [*_1B, "optim.name=muon"],
    "3B": [
        f"config={CONFIGS}/llama_3B.yaml", "model.vocab_size=128256", "data.batch_size=1",
        "data.global_batch_size=1", "distributed.activation_checkpointing=selective",
    ],
    # of GPT-2's size, as nanoGPT trains it
    "124M": [
        *_1B, "model.dim=768", "model.n_layers=12", "model.n_heads=12", "model.vocab_size=50304",
        "model.weight_tying=true", "data.seq_len=1024", "data.batch_size=32",
        "data.global_batch_size=32", "optim.lr=6.0e-4",
    ],
}  # fmt: skip
SMALL = [  # what replaces sizes on a CPU
    "model.vocab_size=512", "model.dim=64", "model.n_layers=2", "model.n_heads=4",
    "model.n_kv_heads=2", "model.multiple_of=32", "data.seq_len=128", *_4_ROWS,
]  # fmt: skip
# Runs of a CPU in float32.
REFERENCES = {
    "plain": [f"config={CONFIGS}/debug.yaml"],
    "documents": [f"config={CONFIGS}/debug.yaml", "data.document_mask=ignore"],
    "multi-token": [f"config={APPS}/mtp/configs/debug.yaml"],
    "Mamba-2": [f"config={APPS}/mamba/configs/debug.yaml"],
    "Hawk": [f"config={APPS}/fastrnn/configs/debug.yaml", "model.cell=hawk"],
    "minLSTM": [f"config={APPS}/fastrnn/configs/debug.yaml", "model.cell=minlstm"],
    "dropout": [f"config={CONFIGS}/small.yaml", "model.dropout=0.1", "model.n_kv_heads=2"],
}
BF16, RUN_STEPS = "distributed.model_dtype=bf16", 25
GPUS = ("h100", "h200", "b200", "l40s")  # that have products in float8


@dataclass(frozen=True)
class Setting:
    device: torch.device
    small: bool  # sizes that a CPU computes in seconds
    compile: bool  # compile what a run on this device compiles
    prepared: Path  # the folder that `gpu prepare` has made
    work: Path  # a folder for runs

    def shape(self, name: str, *more: str) -> list[str]:
        """Keys of a run of SHAPES on this device, without a log, and `more`."""
        eager = [] if self.compile else ["distributed.compile=false"]
        own = [f"device={self.device.type}", "logging.freq=1000000", f"dump_dir={self.work}/{name}"]
        sizes = SMALL if self.small else []
        return [*SHAPES[name], *text_keys(self.prepared), *own, *eager, *more, *sizes]

    def config(self, name: str, *more: str) -> TrainArgs:
        return load(TrainArgs, self.shape(name, *more))[0]

    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"


def text_keys(prepared: Path) -> list[str]:
    """Keys of a run on the prepared text."""
    return [
        f"data.root_dir={prepared}/text", "data.sources={python: 1.0}", "data.source_files={}",
        "data.tokenizer={name: bytes, path: null}",
    ]  # fmt: skip


def found(key: str, value: Any) -> Any:
    """Report a value of a part, and return it: a line of its output, read even if it is killed."""
    print(json.dumps({key: value}, default=asdict), flush=True, file=sys.__stdout__)
    return value


def wrong(verdict: str, what: str) -> None:
    """Report that something is not as it should be, and in which way."""
    found(f"{verdict}: {what}", "wrong")


def run_keys(reference: str, steps: int) -> list[str]:
    """Keys of a run with a line for each step, and one save at its end."""
    kept = ["validation.every=0", "checkpoint.dump.every=0", "logging.freq=1", f"stop_at={steps}"]
    return [*REFERENCES[reference], *kept]


def prepare(folder: Path, clones: dict[str, str | None], small: bool) -> None:
    """Make what `folder` lacks; for a CPU, where `small`, only text. Raises UserError."""
    for name, clone in clones.items():
        for file in PROJECTS[name].files if clone is not None else ():
            command = ["git", "-c", "safe.directory=*", "-C", str(clone), "show", f"HEAD:{file}"]
            done = subprocess.run(command, capture_output=True)
            if done.returncode != 0:
                raise UserError(f"{name} = {clone}: must be a git clone that has {file}")
            target = folder / "projects" / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(done.stdout)
    prepare_text(folder)
    for name in REFERENCES if not small else ():
        if not (target := folder / "reference" / f"{name}.jsonl").exists():
            prepare_reference(folder, name, target)
    for name in SHAPES if not small else ():
        if not (target := folder / "plans" / f"{name}.json").exists():
            prepare_plan(name, target)
    n_bytes = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{folder}: {human_bytes(n_bytes)}", flush=True)


def prepare_text(folder: Path) -> None:
    """Files of the standard library of this Python, and their tokens."""
    if not (target := folder / "text/python/text.jsonl").exists():
        target.parent.mkdir(parents=True)
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = (path.read_text(encoding="utf-8", errors="ignore") for path in paths)
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        target.write_text("".join(lines), encoding="utf-8")
    run("lingua", ["data", "prepare", f"config={CONFIGS}/debug.yaml", *text_keys(folder)])


def prepare_reference(folder: Path, name: str, target: Path) -> None:
    print(f"{RUN_STEPS} steps on this CPU: {name}", flush=True)
    with TemporaryDirectory() as dump_dir:
        words = [*run_keys(name, RUN_STEPS), *text_keys(folder), "device=cpu"]
        run("apps.main.train", [*words, f"dump_dir={dump_dir}/run"])
        target.parent.mkdir(exist_ok=True)
        target.with_suffix(".torch").write_text(torch.__version__, encoding="utf-8")
        shutil.copy(Path(dump_dir, "run", METRICS), target)


def prepare_plan(name: str, target: Path) -> None:
    """Plans for one of each GPU, by the name that torch has for it: all of one trace."""
    print(f"the plan of {name}", flush=True)
    plan, plans = make_plan([*SHAPES[name], "device=cuda", f"gpu={GPUS[0]}"])[0], {}
    for device in map(find_device, GPUS):
        times = replace(plan, device=replace(device, node_size=1)).times
        assert times is not None
        plans[device.name] = {"seconds": times.range, "GiB": plan.trace.allocated / 2**30}
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


def download(folder: Path, names: list[str], python: str) -> None:
    """Wheels of the pinned versions, for a Python on Linux and x86-64. Raises UserError."""
    lines = (APPS.parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0]: line for line in lines}
    if unknown := [name for name in names if name not in pinned]:
        raise UserError(f"wheels = {', '.join(unknown)}: must be packages of requirements.txt")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform=manylinux{glibc}_x86_64" for glibc in ("_2_28", "_2_17", "2014")]
    if subprocess.run([*command, *(pinned[name] for name in names)]).returncode != 0:
        raise UserError(f"wheels = {', '.join(names)}: pip failed (above)")
