"""apps/sft: the loss of a run on conversations is that of its answers, and its model answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lingua
from apps.sft import app
from lingua.data.shards import Source
from lingua.data.sources import open_sources
from lingua.tools.chat_template import Chat, open_chat
from lingua.tools.exchange.trained import open_trained
from tests.apps.runs import Outcome, Runs
from tests.apps.test_generate import main_here
from tests.mistakes import refused


@pytest.fixture(scope="module")
def trained(runs: Runs, talk: dict[str, Any]) -> Outcome:
    return runs.train((1, 1, 1), talk | {"steps": 8, "stop_at": "null"}, app=app)


def test_the_held_out_loss_is_that_of_each_answer_alone(talk, trained, tmp_path):
    model, chat, source = model_of(trained, tmp_path)
    hashes = {int(h) for s in range(len(source.manifest.shards))
              for h in source.documents(s, "heldout")[:, 2]}  # fmt: skip
    nats, n, texts = 0.0, 0, 0
    for line in (talk["data.root_dir"] / "talk.jsonl").read_text().splitlines():
        c = json.loads(line)["messages"]
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
    last = trained.held_out[-1]
    assert (last["tokens"], last["bytes"]) == (n, texts) and n > 10
    assert last["nats_per_token"] == pytest.approx(nats / n, rel=1e-4)


def model_of(run: Outcome, folder: Path) -> tuple[nn.Module, Chat, Source]:
    """The plain model of a run, without lingua's loading, its chat template and its source."""
    found = open_trained("ckpt", str(run.dump_dir), None)
    module = found.build()[0].to_empty(device="cpu")
    dcp_to_torch_save(found.source.path, folder / "weights.pt")
    weights = torch.load(folder / "weights.pt")
    of_model = {k.removeprefix("model."): v for k, v in weights.items() if k[:6] == "model."}
    module.load_state_dict(of_model)
    tokenizer, data = found.build_tokenizer(), found.args.data
    chat = open_chat(data.tokenizer, tokenizer)
    return module.eval(), chat, open_sources(data, tokenizer)["talk"]


def test_generation_continues_the_conversation(trained, tmp_path):
    model, chat, _ = model_of(trained, tmp_path)
    say = [f"ckpt={trained.dump_dir}", "chat=true", "max_gen_tokens=6", "temperature=0"]

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
    words, typed = ("system=short", "context=200", f"out={out}"), b"aaaa\n<|im_end|>\nbb\n"
    refused, printed = main_here(*say, *words, stdin=typed)
    assert not refused
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["text"] for line in lines] == [answer(first), answer(then)]
    assert answer(then) in printed
    assert trained.samples
    assert all(sample["prompt"].endswith("assistant\n") for sample in trained.samples)
    refused, printed = main_here(*say, "prompt=bb")
    assert not refused and printed == answer([{"role": "user", "content": "bb"}]) + "\n"


def test_in_python_it_continues_the_conversation_too(trained, tmp_path):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "aaaa"}]
    say = [f"ckpt={trained.dump_dir}", "chat=true", "system=short", "prompt=aaaa"]
    lm = lingua.load(trained.dump_dir, device="cpu")
    for settings in ({"temperature": 0, "max_gen_tokens": 6}, {"seed": 3, "max_gen_tokens": 9}):
        _, printed = main_here(*say, *(f"{key}={value}" for key, value in settings.items()))
        assert lm.chat(messages, **settings) + "\n" == printed
    for call, message in (
        (lambda: lm.chat("aaaa"), 'must be a list of {"role": ..., "content": ...}'),
        (
            lambda: lm.chat([{"role": "user", "content": "<|im_end|>"}]),
            "messages: message 1 has the",
        ),
        (
            lambda: lm.chat(40 * messages, max_gen_tokens=4),
            "tokens and max_gen_tokens = 4 must fit",
        ),
        (lambda: lm.chat(messages, temprature=0), 'unknown key (did you mean "temperature"?)'),
    ):
        refused(call, message)


def test_what_cannot_be_a_chat_is_refused(trained):
    say = [f"ckpt={trained.dump_dir}", "chat=true"]
    assert "message 1 has the special token" in main_here(*say, "prompt=<|im_end|>")[0]
    refused, _ = main_here(*say, f"prompt={'b' * 90}")
    assert "must have at most" in refused or "leaves no room" in refused
