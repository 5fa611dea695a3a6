"""Tokens per second of apps/onefile over those of apps/main, a step each in turns in one process:
apps/onefile checks its lock before each micro-batch, and here that check lets apps/main take a
step. Saving and held-out losses are left out."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from apps.bench.launch import read_config, read_lines, training
from apps.bench.report import Report, spread
from apps.bench.turns import clock
from apps.main.config import TrainArgs
from apps.onefile import train as onefile
from lingua.app import choose_app
from lingua.base.dump_dir import METRICS

ROUND = 10  # steps of a round; the first is not measured


def measure(keys: list[str], repeats: int) -> Report:
    app = choose_app(keys)
    args: TrainArgs = read_config(keys, app)
    args.logging.freq = n_steps = (1 + repeats) * ROUND
    turns: list[list[np.ndarray]] = []  # by step: the file, apps/main
    with TemporaryDirectory() as folder:
        args.dump_dir, args.checkpoint.path = f"{folder}/main", None
        with training(app, args, n_steps) as (_, steps), redirect_stdout(io.StringIO()):
            n_micro, n_checks, since = args.micro_steps(1)[0], -1, clock()

            def check() -> None:
                nonlocal n_checks, since
                n_checks += 1  # the first is that of the start, those after the steps of the end
                if n_checks and (n_checks - 1) % n_micro == 0 and len(turns) < n_steps:
                    begin = clock()
                    next(steps)
                    turns.append([begin - since, clock() - begin])
                    since = clock()

            words = [f"dump_dir={folder}", f"stop_at={n_steps}", "validation.tokens=1"]
            onefile.train(onefile.read_config([f"{folder}/main/config.yaml", *words]), check)
        files = {"main": args.folder, "onefile": Path(folder)}
        last = {name: read_lines(file / METRICS)[-1] for name, file in files.items()}
    if len(turns) < n_steps:  # a signal stopped apps/onefile
        raise KeyboardInterrupt
    seconds = np.array(turns[ROUND:]).reshape(repeats, ROUND, 2, 2).sum(1)
    figures = {
        "apps/onefile, ms a step": spread(1000 * seconds[:, 0, 0] / ROUND),
        "apps/main, ms a step": spread(1000 * seconds[:, 1, 0] / ROUND),
        "tokens/s of onefile over main's": spread(seconds[:, 1, 0] / seconds[:, 0, 0]),
        "  tokens per processor second": spread(seconds[:, 1, 1] / seconds[:, 0, 1]),
    }
    rows = [{"": name, "median": s, "quartiles": s.quartiles()} for name, s in figures.items()]
    same = all(last["main"][k] == last["onefile"][k] for k in ("loss", "grad_norm", "batch_hash"))
    note = (
        f"{repeats} rounds of {ROUND} steps, in turns of one; loss, norm and hash of rows of the "
    )
    return Report(rows, [f"{note}last are {'equal' if same else 'NOT equal'}"], {"last": last})
