"""apps/dpo: a run on pairs is one run on every topology, with the loss as the paper writes it."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from apps.bench.promise import compare, steps_of
from apps.dpo import PairData, TrainArgs, app
from apps.sft import TrainArgs as SFTArgs
from lingua.chat import open_chat
from lingua.config.load import load
from lingua.data.prepare.sources import prepare_sources
from lingua.data.rows import OpenData
from lingua.errors import UserError
from lingua.optim.schedule import lr_at
from lingua.plan.__main__ import make_plan
from lingua.tokenizer import Tokenizer, build_tokenizer
from tests.apps.meshes import Sizes
from tests.apps.test_sft import measured
from tests.chats import CHATML, write_tokenizer
from tests.forks.test_forks import CLOSE, SMALL, train, train_here, words
from tests.ranks import Ranks

STEPS = 6


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Pairs, and a model of transformers that is the reference."""
    folder, chance = tmp_path_factory.mktemp("dpo"), random.Random(1)
    said = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 9))) for _ in range(400)]
    pairs = [
        {"prompt": said[i], "chosen": said[i + 1] + "!", "rejected": said[i + 2]}
        for i in range(0, 390, 3)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    keys: dict[str, Any] = {
        "steps": STEPS,
        "data.root_dir": folder,
        "data.sources": "{pairs: 1}",
        "data.tokenizer.name": "hf",
        "data.tokenizer.path": write_tokenizer(folder / "tokenizer", CHATML),
        "data.seq_len": 120,
        "data.workers": 0,
        "optim.weight_decay": 0,
        "checkpoint.init_from": folder / "llama",
    }
    args, tokenizer = loaded(keys)
    prepare_sources(args.data, tokenizer, str, processes=1)
    torch.manual_seed(2)
    assert app.hugging_face is not None
    llama = LlamaForCausalLM(LlamaConfig.from_dict(app.hugging_face.to_config(args.model, 120)))
    for p in llama.parameters():
        nn.init.normal_(p, std=0.3)
    llama.save_pretrained(folder / "llama")
    return keys


def loaded(settings: dict[str, Any]) -> tuple[TrainArgs, Tokenizer]:
    args: Any = load(TrainArgs, [f"{k}={v}" for k, v in (SMALL | settings).items()])[0]
    tokenizer = build_tokenizer(args.data.tokenizer)
    args.model.vocab_size = tokenizer.vocab_size
    return args, tokenizer


@pytest.fixture(scope="module")
def trained(ranks: Ranks, settings: dict[str, Any], tmp_path_factory: Any) -> Path:
    """A run that never stopped, of one process."""
    folder = tmp_path_factory.mktemp("run")
    train(ranks, "apps.dpo", (1, 1, 1), settings | {"dump_dir": folder})
    return folder


STARTS: list[tuple[Sizes, int, int]] = [((2, 1, 1), 1, 2), ((1, 1, 2), 3, 4), ((1, 2, 1), 2, STEPS)]


def test_a_run_on_pairs_resumes_on_any_topology(
    ranks: Ranks, settings: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    stopped = settings | {"dump_dir": tmp_path / "b"}
    for sizes, rows, end in STARTS:
        if end == STEPS:  # what is on disk is damaged: it is computed again
            (tmp_path / "b/reference.json").write_text("{")
        train(ranks, "apps.dpo", sizes, stopped | {"stop_at": end, "data.batch_size": rows})
    one = steps_of(trained)
    apart, equal = compare(one, steps_of(tmp_path / "b"))
    assert len(equal) == STEPS and all(equal) and max(apart) < CLOSE
    numbers = [
        [line[key] for line in [*steps_of(d), *measured(d)] for key in ("accuracy", "margin")]
        for d in (trained, tmp_path / "b")
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-5)
    kept = [json.loads((d / "reference.json").read_text()) for d in (trained, tmp_path / "b")]
    assert kept[0]["key"] == kept[1]["key"] and len(kept[0]["rows"]) == len(kept[1]["rows"])
    # Another order of the rows is another run: the comparison sees it.
    train(ranks, "apps.dpo", (1, 1, 1), settings | {"dump_dir": tmp_path / "c", "seed": 7})
    apart, equal = compare(one, steps_of(tmp_path / "c"))
    assert not any(equal) and max(apart) > 50 * CLOSE


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
            both = [index == i for i in (d, d + 1)]
            found.append(
                [
                    tuple(torch.from_numpy(a[i]) for a in (row.astype(np.int64), target))
                    for i in both
                ]
            )
    return found


def test_the_loss_is_that_of_each_pair_alone_written_out(
    settings: dict[str, Any], trained: Path
) -> None:
    args, tokenizer = loaded(settings)
    models = [LlamaForCausalLM.from_pretrained(settings["checkpoint.init_from"]) for _ in range(2)]
    policy, reference = models
    data, size = PairData().open(args, tokenizer), args.data.step_rows
    betas, eps = (args.optim.beta1, args.optim.beta2), args.optim.epsilon
    optimizer = torch.optim.AdamW(policy.parameters(), 1.0, betas, eps, weight_decay=0)
    for step, line in enumerate(steps_of(trained)):
        pairs = pairs_of(data, np.arange(step * size, (step + 1) * size))
        margins = margins_of(policy, reference, pairs)
        loss = -torch.log(torch.sigmoid(margins)).mean()
        assert len(pairs) > size  # rows have several
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert line["margin"] == pytest.approx(margins.mean().item(), rel=1e-3, abs=1e-5)
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
        said = [
            [
                {"role": "user", "content": record["prompt"]},
                {"role": "assistant", "content": answer},
            ]
            for answer in (record["chosen"], record["rejected"])
        ]
        encoded = [chat.encode_example(chat.examples(c)[0]) for c in said]
        records.append([tuple(map(torch.from_numpy, e)) for e in encoded])
    held_out = [pair for pair in records if str(pair) not in seen]
    assert len(records) == len(seen) + len(held_out) and held_out
    margins = margins_of(policy, reference, held_out).detach()
    last = measured(trained)[-1]
    assert last["margin"] == pytest.approx(margins.mean().item(), rel=1e-3)
    assert last["accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert last["loss"] == pytest.approx(-F.logsigmoid(margins).mean().item(), rel=1e-4)


def test_what_is_on_disk_is_read_and_what_is_stale_is_computed_again(
    settings: dict[str, Any], trained: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """In one process: numbers that were changed on disk are used, of another reference they are
    not."""
    given = settings | {"dump_dir": tmp_path, "stop_at": 1}
    stored = json.loads((trained / "reference.json").read_text())
    stored["rows"] = [row and [ratio + 50.0 for ratio in row] for row in stored["rows"]]
    losses = []
    for key in (stored["key"], "another"):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        (tmp_path / "reference.json").write_text(json.dumps(stored | {"key": key}))
        train(ranks, "apps.dpo", (1, 1, 1), given)
        losses.append(steps_of(tmp_path)[0]["loss"])
    assert losses == pytest.approx([5.0067, np.log(2)], rel=1e-4)  # -log sigmoid(-0.1 * 50)
    assert "is of another reference" in (tmp_path / "train.log").read_text()

    # A run does not go on with another reference.
    other = tmp_path / "llama"
    shutil.copytree(settings["checkpoint.init_from"], other)
    weights = load_file(other / "model.safetensors")
    save_file(
        {n: t + 0.01 for n, t in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    words_of = words("apps.dpo", given | {"stop_at": 2, "checkpoint.init_from": other})
    assert "data.reference" in ranks.run(1, train_here, words_of)[0]


def test_a_run_on_pairs_is_planned_without_its_pairs(settings: dict[str, Any]) -> None:
    absent = {"data.root_dir": "absent", "dump_dir": "absent"}
    given = ["app=apps.dpo", *(f"{k}={v}" for k, v in (SMALL | settings | absent).items())]
    made, _ = make_plan(given)
    assert made.trace.peak["activations"] > 0 and not Path("absent").exists()


def test_what_the_app_cannot_train_on_is_refused(settings: dict[str, Any]) -> None:
    for change, message in (
        ({"dpo.beta": 0}, r"dpo\.beta.*must be a finite number above 0"),
        ({"data.chat": "{pairs: false}"}, r"data\.chat\.pairs.*must be true"),
        ({"data.document_mask": "none"}, r"data\.document_mask.*must be ignore or keep"),
        ({"data.n_views": 3}, r"data\.n_views.*must be 2"),
        ({"checkpoint.init_from": "null"}, r"checkpoint\.init_from.*is the reference"),
    ):
        with pytest.raises(UserError, match=message):
            loaded(settings | change)
    with pytest.raises(UserError, match=r"data\.chat\.pairs.*apps\.dpo trains on pairs"):
        load(SFTArgs, ["data.sources={a: 1}", "data.chat={pairs: true}"])
