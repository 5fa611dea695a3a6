"""apps/sft: a run on conversations is one run on every topology, and its model answers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from apps.bench.promise import compare, steps_of
from apps.main.generate import GenerateArgs
from apps.sft import TrainArgs
from lingua.chat import Chat, open_chat
from lingua.config.load import load
from lingua.data.prepare.sources import open_sources, prepare_sources
from lingua.data.shards import Source
from lingua.errors import UserError
from lingua.inference.trained import open_trained
from lingua.tokenizer import build_tokenizer
from tests.apps.meshes import Sizes
from tests.apps.test_generate import main_here
from tests.chats import TEMPLATES, write_tokenizer
from tests.forks.test_forks import CLOSE, train
from tests.ranks import Ranks

STEPS = 8


@pytest.fixture(scope="module")
def conversations() -> list[list[dict[str, str]]]:
    chance = random.Random(1)
    found = []
    for i in range(150):
        said = [chance.choice("abcdefgh") * chance.randint(1, 9) for _ in range(2 + 2 * (i % 2))]
        roles = ("user", "assistant") * 2
        found.append([{"role": r, "content": c} for r, c in zip(roles, said, strict=False)])
    return found


@pytest.fixture(scope="module")
def settings(conversations: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sft")
    lines = [json.dumps({"messages": c}) + "\n" for c in conversations]
    (folder / "talk.jsonl").write_text("".join(lines))
    tokenizer = write_tokenizer(folder / "tokenizer", TEMPLATES["chatml"])
    keys: dict[str, Any] = {
        "steps": STEPS,
        "data.root_dir": folder,
        "data.sources": "{talk: 1}",
        "data.tokenizer.name": "hf",
        "data.tokenizer.path": tokenizer,
        "data.seq_len": 80,
        "data.workers": 0,
        "validation.tokens": 100000,
    }
    args = load(
        TrainArgs, [f"{k}={v}" for k, v in keys.items() if k != "steps"] + ["model.n_heads=4"]
    )[0]
    prepare_sources(args.data, build_tokenizer(args.data.tokenizer), str, processes=1)
    return keys


@pytest.fixture(scope="module")
def trained(ranks: Ranks, settings: dict[str, Any], tmp_path_factory: Any) -> Path:
    """A run that never stopped, of one process."""
    folder = tmp_path_factory.mktemp("run")
    train(ranks, "apps.sft", (1, 1, 1), settings | {"dump_dir": folder})
    return folder


def measured(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


STARTS: list[tuple[Sizes, int, int]] = [((1, 2, 1), 1, 3), ((1, 1, 2), 3, STEPS)]


def test_a_run_on_conversations_resumes_on_any_topology(
    ranks: Ranks, settings: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    stopped = settings | {"dump_dir": tmp_path / "b"}
    for sizes, rows, end in STARTS:
        train(ranks, "apps.sft", sizes, stopped | {"stop_at": end, "data.batch_size": rows})
    one = steps_of(trained)
    apart, equal = compare(one, steps_of(tmp_path / "b"))
    assert len(equal) == STEPS and all(equal) and max(apart) < CLOSE
    losses = [[line["nats_per_token"] for line in measured(d)] for d in (trained, tmp_path / "b")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    # Other answers with a loss, of the same tokens, are other batches: the comparison sees it.
    marked = Path(settings["data.tokenizer.path"]).parent / "marked.jinja"
    marked.write_text(TEMPLATES["marked"])
    other = settings | {"dump_dir": tmp_path / "c", "data.chat.template": marked, "stop_at": 2}
    words = [f"{k}={v}" for k, v in other.items() if k.startswith("data.")] + ["model.n_heads=4"]
    args = load(TrainArgs, words)[0]
    prepare_sources(args.data, build_tokenizer(args.data.tokenizer), str, processes=1)
    train(ranks, "apps.sft", (1, 1, 1), other)
    apart, equal = compare(one[:2], steps_of(tmp_path / "c"))
    assert not any(equal) and max(apart) > 50 * CLOSE


def test_the_held_out_loss_is_that_of_each_answer_alone(
    settings: dict[str, Any], conversations: list[Any], trained: Path, tmp_path: Path
) -> None:
    model, chat, source = model_of(trained, tmp_path)
    hashes = {int(h) for s in range(len(source.manifest.shards))
              for h in source.documents(s, "heldout")[:, 2]}  # fmt: skip
    nats, n, texts = 0.0, 0, 0
    for c in conversations:
        content = json.dumps([c, None], sort_keys=True).encode()
        if np.uint64(xxhash.xxh3_64_intdigest(content)).astype(np.int64) not in hashes:
            continue
        [example] = chat.examples(c)
        ids, is_answer = chat.encode_example(example)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None])[0, :-1]
        losses = F.cross_entropy(logits, torch.from_numpy(ids)[1:], reduction="none")
        nats += float(losses[torch.from_numpy(is_answer)[1:]].sum())
        n += int(is_answer[1:].sum())
        texts += sum(len(m["content"]) for m in c[1::2])
    last = measured(trained)[-1]
    assert (last["tokens"], last["bytes"]) == (n, texts) and n > 10
    assert last["nats_per_token"] == pytest.approx(nats / n, rel=1e-4)


def model_of(run: Path, folder: Path) -> tuple[nn.Module, Chat, Source]:
    """The plain model of a run, without lingua's loading, its chat template and its source."""
    found = open_trained("ckpt", str(run), None)
    module = found.build()[0].to_empty(device="cpu")
    dcp_to_torch_save(found.checkpoint.path, folder / "weights.pt")
    weights = torch.load(folder / "weights.pt")
    of_model = {k.removeprefix("model."): v for k, v in weights.items() if k[:6] == "model."}
    module.load_state_dict(of_model)
    tokenizer, data = found.build_tokenizer(), found.args.data
    chat = open_chat(data.tokenizer, tokenizer)
    return module.eval(), chat, open_sources(data, tokenizer)["talk"]


def test_generation_continues_the_conversation(trained: Path, tmp_path: Path) -> None:
    model, chat, _ = model_of(trained, tmp_path)
    say = [f"ckpt={trained}", "chat=true", "max_gen_tokens=6", "temperature=0"]

    def answer(messages: list[dict[str, str]]) -> str:
        """By the plain model, every token from all before it."""
        ids = chat.encode(chat.render(messages, add_generation_prompt=True)).tolist()
        n = len(ids)
        end, _ = chat.turn_end
        while len(ids) < n + 6 and ids[-1] != end:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        return chat._library.decode(ids[n:])

    system = {"role": "system", "content": "short"}
    first = [system, {"role": "user", "content": "aaaa"}]
    then = [*first, {"role": "assistant", "content": answer(first).strip()}]
    then.append({"role": "user", "content": "bb"})
    out = tmp_path / "out.jsonl"
    refused, printed = main_here(
        *say, "system=short", "context=200", f"out={out}", stdin=b"aaaa\n<|im_end|>\nbb\n"
    )
    assert not refused
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["text"] for line in lines] == [answer(first), answer(then)]
    assert answer(then) in printed
    samples = [json.loads(line) for line in (trained / "samples.jsonl").read_text().splitlines()]
    assert samples and all(s["prompt"].endswith("assistant\n") for s in samples)
    refused, printed = main_here(*say, "prompt=bb")
    assert not refused and printed == answer([{"role": "user", "content": "bb"}]) + "\n"


def test_what_cannot_be_a_chat_is_refused(trained: Path, settings: dict[str, Any]) -> None:
    assert (
        "message 1 has the special token"
        in main_here(f"ckpt={trained}", "chat=true", "prompt=<|im_end|>")[0]
    )
    refused, _ = main_here(f"ckpt={trained}", "chat=true", f"prompt={'b' * 90}")
    assert "must have at most" in refused or "leaves no room" in refused
    with pytest.raises(UserError, match="must be given together with chat=true"):
        load(GenerateArgs, [f"ckpt={trained}", "system=x"])
    words = [f"{k}={v}" for k, v in settings.items()]
    with pytest.raises(UserError, match=r"data\.chat.*must not be null"):
        load(TrainArgs, [*words, "data.chat=null"])
