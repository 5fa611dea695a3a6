"""Models of transformers: loading, import and export, each over reading or copying the same files.

The folders have random weights of a model that keys describe, of 1.2 GB in float32 and half as much
in bfloat16. Eight processes load it as a training run does, in float32 and sharded eight ways, and
read as many bytes (`exchange_rank.py`), from the page cache and from the disk. The bfloat16 folder
is imported and exported, and its files are copied, with and without syncing the copies: an import
is a checkpoint, which is synced.
"""

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from apps.bench.launch import run
from apps.bench.report import Report, spread
from apps.main.config import TrainArgs
from apps.main.hugging_face import llama
from apps.main.transformer import ModelArgs
from lingua import convert
from lingua.config.load import load
from lingua.format import align

PROCESSES = 8
WHERE = ("from the page cache", "from the disk")
MODEL = ["model.dim=2048", "model.n_layers=4", "model.n_heads=16", "model.vocab_size=32000"]


def measure(keys: list[str], repeats: int = 5) -> Report:
    """`keys` is the command line of the training program. Everything is written into a folder of
    the current one, and removed."""
    config = [key for key in keys if key.startswith("config=")]
    keys = [*config, *MODEL, *(key for key in keys if key not in config)]
    args, _ = load(TrainArgs, keys)
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as temporary:
        for dtype in (torch.float32, torch.bfloat16):
            folder, out = Path(temporary) / str(dtype), Path(temporary) / "seconds.json"
            size = write_folder(folder, args.model, dtype)
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
            program = ["-m", "apps.bench.exchange_rank", str(out), str(folder), str(repeats)]
            run([sys.executable, "-m", *torchrun, *program])
            results[f"{size / 1e9:.2f} GB of {dtype}"] = json.loads(out.read_text("utf-8"))
        rounds = [convert_once(folder) for _ in range(repeats)]
        results["convert"] = {"rounds": rounds}
    return report(results)


def write_folder(folder: Path, model: ModelArgs, dtype: torch.dtype) -> int:
    """The bytes of a folder of transformers with this model, a file for each of its tensors."""
    folder.mkdir()
    tensors = list(llama.tensors(model).values())
    files = {t.name: f"{t.name}.safetensors" for t in tensors}
    for t in tensors:
        save_file({t.name: torch.randn(t.shape).to(dtype)}, folder / files[t.name])
    convert.write_json(folder / convert.INDEX, {"weight_map": files})
    convert.write_json(folder / convert.CONFIG, llama.to_config(model, 4096))
    return sum((folder / file).stat().st_size for file in files.values())


def convert_once(folder: Path) -> dict[str, float]:
    """Seconds of each turn; what is made is removed."""
    made = [folder.with_name(name) for name in ("copy", "synced", "checkpoint", "exported")]
    copy, synced, checkpoint, exported = made
    files = sorted(folder.glob("*.safetensors"))

    def copy_files(to: Path, sync: bool) -> None:
        to.mkdir()
        for file in files:
            with (to / file.name).open("wb") as out:
                with file.open("rb") as f:
                    shutil.copyfileobj(f, out, 1 << 20)
                if sync:
                    out.flush()
                    os.fsync(out.fileno())

    turns: dict[str, Callable[[], None]] = {
        "copy": lambda: copy_files(copy, False),
        "copy, synced": lambda: copy_files(synced, True),
        "import": lambda: convert_quietly(folder, checkpoint, "tokenizer.name=bytes"),
        "export": lambda: convert_quietly(checkpoint, exported),
    }
    seconds = {}
    for name, turn in turns.items():
        os.sync()  # what others wrote
        begin = time.perf_counter()
        turn()
        seconds[name] = time.perf_counter() - begin
    for path in made:
        shutil.rmtree(path)
    return seconds


def convert_quietly(source: Path, out: Path, *keys: str) -> None:
    with redirect_stdout(io.StringIO()):
        convert.main([f"source={source}", f"out={out}", *keys])


def report(results: dict[str, Any]) -> Report:
    """`results`: by what was measured, `rounds` of the seconds of every turn; of loading, what
    `exchange_rank.measure` returns."""
    rows: list[tuple[str, ...]] = [("", "median", "range", "of the fastest")]
    notes = []
    for title, found in results.items():
        turns = {turn: spread(s[turn] for s in found["rounds"]) for turn in found["rounds"][0]}
        pairs = [("import", "copy, synced"), ("export", "copy")]
        if title != "convert":
            pairs = [(f"load, {where}", f"read, {where}") for where in WHERE]
            notes += [
                f"{title}: a rank holds {found['held'] / 1e6:.0f} MB, and its memory grows by "
                f"{found['peak'] / 1e6:.0f} MB; the largest tensor has {found['largest'] / 1e6:.0f}"
            ]
        for turn, s in turns.items():
            rows.append(
                (f"{title}: {turn}, s", f"{s.median:.2f}", f"{s.low:.2f} to {s.high:.2f}", "")
            )
        for over, under in pairs:
            s = spread(seconds[over] / seconds[under] for seconds in found["rounds"])
            best = f"{turns[over].low / turns[under].low:.2f}"
            shown = (f"{s.median:.2f}", f"{s.low:.2f} to {s.high:.2f}", best)
            rows.append((f"{title}: {over} / {under}", *shown))
            found[f"{over} / {under}"] = s
    return Report([*align(rows, left=1), "", *notes], results)
