"""apps/dpo: the loss of a run on pairs as the paper writes it, and its reference on disk."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import lingua
from apps.dpo import PairData, TrainArgs, app
from lingua.config.saved import load_saved
from lingua.data.rows import OpenData
from lingua.optim.schedule import lr_at
from lingua.tokenizer.build import build_tokenizer
from lingua.tools.chat_template import open_chat
from tests.apps.runs import Outcome, Runs


@pytest.fixture(scope="module")
def trained(runs: Runs, pairs: dict[str, Any]) -> Outcome:
    settings = {"steps": 6, "stop_at": "null", "optim.weight_decay": 0, "optim.warmup": 2}
    return runs.train((1, 1, 1), pairs | settings, app=app)


Encoded = tuple[Tensor, Tensor]  # ids int64 [n] of a conversation, whether they carry loss bool [n]


def log_p(model: nn.Module, ids: Tensor, is_target: Tensor) -> Tensor:
    """Of the answer in a conversation, alone."""
    of_tokens = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return of_tokens[is_target[1:]].sum()


def margins_of(policy: nn.Module, reference: nn.Module, pairs: list[list[Encoded]]) -> Tensor:
    """What equation 7 of Rafailov et al. has the sigmoid of, for each pair."""
    found = []
    for chosen, rejected in pairs:
        ratio_w = log_p(policy, *chosen) - log_p(reference, *chosen).detach()
        ratio_l = log_p(policy, *rejected) - log_p(reference, *rejected).detach()
        found.append(0.1 * ratio_w - 0.1 * ratio_l)
    return torch.stack(found)


def pairs_of(data: OpenData, positions: np.ndarray) -> list[list[Encoded]]:
    """The chosen and the rejected conversation of each pair in some rows."""
    assert data.documents is not None and data.rows.is_target(positions) is not None
    read: Any = (data.rows.rows, data.documents, data.rows.is_target)
    found = []
    for row, index, target in zip(*(of(positions) for of in read), strict=True):
        for d in range(0, index[target].max(), 2):
            parts = [(row[i].astype(np.int64), target[i]) for i in (index == d, index == d + 1)]
            found.append([tuple(map(torch.from_numpy, part)) for part in parts])
    return found


def test_the_loss_is_that_of_each_pair_alone_written_out(pairs, trained):
    args: Any = load_saved(TrainArgs, trained.dump_dir / "config.yaml")
    tokenizer = build_tokenizer(args.data.tokenizer)
    models = [LlamaForCausalLM.from_pretrained(pairs["checkpoint.init_from"]) for _ in range(2)]
    policy, reference = models
    data, size = PairData().open(args, tokenizer), args.data.step_rows
    betas, eps = (args.optim.beta1, args.optim.beta2), args.optim.epsilon
    optimizer = torch.optim.AdamW(policy.parameters(), 1.0, betas, eps, weight_decay=0)
    for step, line in enumerate(trained.lines):
        of_step = pairs_of(data, np.arange(step * size, (step + 1) * size))
        margins = margins_of(policy, reference, of_step)
        loss = -torch.log(torch.sigmoid(margins)).mean()
        assert len(of_step) > size  # rows have several
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert line["margin"] == pytest.approx(margins.mean().item(), rel=1e-3, abs=1e-5)
        shown = f" accuracy {line['accuracy']:.3g} margin {line['margin']:.3g} grad "
        assert f"step {step + 1} loss {line['loss']:.3f}{shown}" in trained.log
        if step:  # where the policy is still the reference, rounding decides
            assert line["accuracy"] == pytest.approx((margins > 0).float().mean().item())
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), args.optim.clip)
        optimizer.param_groups[0]["lr"] = lr_at(step, args.optim, args.steps)
        optimizer.step()
        optimizer.zero_grad()
    assert abs(line["loss"] - np.log(2)) > 0.01

    # Held out are the others of the file.
    chat, records = open_chat(args.data.tokenizer, tokenizer), []
    n_rows = data.rows.stream.sources["pairs"].n_tokens // args.data.row_tokens  # type: ignore[attr-defined]  # of ChatRows
    seen = {str(pair) for pair in pairs_of(data, np.arange(n_rows))}
    for text in (Path(args.data.root_dir) / "pairs.jsonl").read_text().splitlines():
        record = json.loads(text)
        prompt = {"role": "user", "content": record["prompt"]}
        both = record["chosen"], record["rejected"]
        said = [[prompt, {"role": "assistant", "content": answer}] for answer in both]
        encoded = [chat.encode_example(chat.examples(c)[0]) for c in said]
        records.append([tuple(map(torch.from_numpy, e)) for e in encoded])
    held_out = [pair for pair in records if str(pair) not in seen]
    assert len(records) == len(seen) + len(held_out) and held_out
    margins = margins_of(policy, reference, held_out).detach()
    last = trained.held_out[-1]
    shown = ", ".join(f"{key} {last[key]:.4f}" for key in ("loss", "accuracy", "margin"))
    assert f"step 6 held-out pairs: {shown}" in trained.log
    assert last["margin"] == pytest.approx(margins.mean().item(), rel=1e-3)
    assert last["accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert last["loss"] == pytest.approx(-F.logsigmoid(margins).mean().item(), rel=1e-4)
    own = replace(app, data=PairData())  # data keeps what it has opened
    with lingua.open_run(own, trained.dump_dir / "config.yaml") as run:
        assert run.measure() == last["loss"]


def test_what_is_stale_or_damaged_on_disk_is_computed_again(runs, pairs, trained, tmp_path):
    """In one process: numbers that were changed on disk are used, of another reference they are
    not."""
    stored = json.loads((trained.dump_dir / "reference.json").read_text())
    stored["rows"] = [row and [ratio + 50.0 for ratio in row] for row in stored["rows"]]
    losses = []
    contents = (json.dumps(stored), json.dumps(stored | {"key": "another"}), "{")
    for i, content in enumerate(contents):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "reference.json").write_text(content)
        settings = pairs | {"steps": 6, "stop_at": 1}
        run = runs.train((1, 1, 1), settings, app=app, dump_dir=folder)
        losses += run.column("loss")
        assert ("the reference is computed again" in run.log) == (i > 0)
    # -log sigmoid(-0.1 * 50)
    assert losses == pytest.approx([5.0067, np.log(2), np.log(2)], rel=1e-4)

    # A run does not go on with another reference.
    other = shutil.copytree(pairs["checkpoint.init_from"], tmp_path / "llama")
    file = other / "model.safetensors"
    save_file({n: t + 0.01 for n, t in load_file(file).items()}, file, {"format": "pt"})
    settings |= {"stop_at": 2, "checkpoint.init_from": other}
    again = runs.train((1, 1, 1), settings, app=app, dump_dir=folder, refused=True)
    assert "data.reference" in again.error
