"""`python -m lingua data show RUN step=N worst=K`: the losses of a step's rows are those that the
step trained on, of any app, and rows of garbage come first."""

import json
import random
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from apps.main.config import TrainArgs
from lingua.app import import_app
from lingua.base.errors import UserError
from lingua.config.saved import load_saved
from lingua.data.rows import document_marks
from lingua.data.sources import TextData
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import Launch, start
from lingua.tokenizer.build import build_tokenizer
from lingua.tools.commands.data_show import main
from lingua.tools.exchange.trained import open_trained
from lingua.tools.inference.row_losses import RowLosses, row_losses
from tests.apps.runs import GLOBAL_BATCH, Outcome, Runs, prepare
from tests.ranks import Ranks


def losses_here(folder: Path, app: str, saved: int, step: int) -> tuple[RowLosses, list[float]]:
    """Of the rows of `step` under the checkpoint `saved`; and the framework's own loss of each row
    as a whole, on logits."""
    chosen = import_app(app, "test")
    args: Any = load_saved(chosen.config, folder / "config.yaml")
    trained = open_trained("run", str(folder / "checkpoints" / f"{saved:010d}"), chosen)
    tokenizer = trained.build_tokenizer()
    rows = (chosen.data or TextData()).open(args, tokenizer).rows
    settings = DistributedArgs(model_dtype="fp32")
    model = trained.load(settings, start(torch.device("cpu"), Launch(), settings))
    first, seq_len = (step - 1) * GLOBAL_BATCH, args.data.seq_len
    found = row_losses(model, args, rows, document_marks(args.data, tokenizer), step, first)
    model.eval()
    tokens = rows.rows(np.arange(first, first + GLOBAL_BATCH)).astype(np.int64)
    whole = []
    with torch.no_grad():
        for row in torch.from_numpy(tokens):
            logits = model(row[None, :seq_len])[0]
            whole.append(F.cross_entropy(logits, row[1 : seq_len + 1]).item())
    return found, whole


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("apps.main", {}),
    "masks and dropout": ("apps.main", {"data.document_mask": "ignore", "model.dropout": 0.2}),
    "views": ("apps.mtp", {"data.n_views": 4}),
    "terms of rows": ("tests.forks.moe", {}),
    "other rows": ("tests.forks.synthetic", {"data.sources": "{copy: 1}"}),
}


SOAK = ("terms of rows", "other rows")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.soak] * (c in SOAK)) for c in CASES]
)
def test_the_rows_of_a_step_have_the_loss_that_it_trained_on(runs, case):
    app, settings = CASES[case]
    settings = {"stop_at": 6, "checkpoint.dump.every": 3} | settings
    run = runs.train((1, 2, 1), settings, app=import_app(app, "test"))
    folder, logged = run.dump_dir, run.column("loss")

    [(found, whole)] = runs.ranks.run(1, losses_here, folder, app, saved=3, step=4)
    row_means, n = found.row_means(), found.counts[:, 0]
    assert np.average(row_means, weights=n) == pytest.approx(logged[3], rel=1e-6)
    assert found.step_loss() == pytest.approx(logged[3], rel=1e-6)
    if case == "plain":
        np.testing.assert_allclose(row_means, whole, rtol=1e-5)
    if case == "masks and dropout":  # of rows with unequal numbers of targets
        assert len(set(n.tolist())) > 1 and abs(row_means.mean() / logged[3] - 1) > 1e-4
    # Under other weights it is another loss.
    [(other, _)] = runs.ranks.run(1, losses_here, folder, app, saved=3, step=5)
    assert abs(other.step_loss() / logged[4] - 1) > 1e-4


GARBAGE = "\u00ff\u00fe" * 60
HEADER = re.compile(r"=== loss ([\d.]+) over 16 targets")


def show_here(*words: Any) -> str:
    """What the command prints."""
    with redirect_stdout(StringIO()) as printed:
        main([str(word) for word in words])
    return printed.getvalue()


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run on text with one document, on line 71, of characters that no other has."""
    text = tmp_path_factory.mktemp("text")
    chance = random.Random(1)
    documents = ["".join(chance.choices("abcdef ", k=40)) for _ in range(150)]
    documents[70] = GARBAGE
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    (text / "one.jsonl").write_text("".join(lines))
    settings = {"data.root_dir": text, "data.sources": "{one: 1}", "checkpoint.dump.every": 5}
    settings |= {"stop_at": 18, "checkpoint.dump.keep": -1}
    prepare(settings)
    return Runs(ranks, text, tmp_path_factory.mktemp("run")).train((1, 2, 1), settings)


def test_garbage_among_the_rows_is_found(ranks, run, tmp_path):
    """Also in a run that was moved: its config has the folder it was in."""
    run = run.copy(tmp_path / "moved")
    args = load_saved(TrainArgs, run.dump_dir / "config.yaml")
    rows = TextData().open(args, build_tokenizer(args.data.tokenizer)).rows
    tokens = rows.rows(np.arange(18 * GLOBAL_BATCH))
    of_garbage = ((tokens >= 0x80) & (tokens < 256)).sum(1).reshape(18, GLOBAL_BATCH)
    step = 6 + int(of_garbage[6:].max(1).argmax())  # counted from 0
    row = int(of_garbage[step].argmax())
    assert of_garbage[step, row] == 17

    [shown] = ranks.run(1, show_here, run.dump_dir, f"step={step + 1}", "worst=3")
    heading, loss, *lines = shown.splitlines()
    saved = run.checkpoint(step // 5 * 5)
    assert f"step {step + 1} under the weights of {saved}, " in heading
    assert f"(logged: {run.column('loss')[step]:.4f})" in loss
    losses = [float(found[1]) for line in lines if (found := HEADER.fullmatch(line))]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert lines[1].startswith(f"step {step + 1}, row {row}: position {step * 7 + row} of the run")
    assert f"({args.data.root_dir}/one.jsonl:71)" in lines[3] and set(lines[4]) <= set("ÿþ\ufffd")


def test_shards_that_the_run_did_not_read_are_refused(run, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "another text, again and again"}\n' * 200)
    prepare({"data.root_dir": tmp_path, "data.sources": "{one: 1}"})
    with pytest.raises(UserError, match=r"data\.content\.one: is not what the run read"):
        main([str(run.dump_dir), "step=7", "worst=1", f"data.root_dir={tmp_path}"])
