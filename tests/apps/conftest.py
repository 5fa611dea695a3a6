"""Fixtures of the tests that run apps."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from apps.dpo import app as dpo
from apps.sft import app as sft
from lingua.tokenizer.build import build_tokenizer
from tests.apps.runs import Outcome, Runs, arguments, prepare, write_sources
from tests.chats import CHATML, write_tokenizer
from tests.data.prepared import EOS
from tests.data.token_writers import write_megatron, write_plain
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    text = tmp_path_factory.mktemp("text")
    write_sources(text)
    return Runs(ranks, text, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def through(runs: Runs) -> Outcome:
    """Seven steps that one process takes without a stop. Tests copy it, or only read."""
    return runs.train((1, 1, 1), {"stop_at": 7})


@pytest.fixture(scope="session")
def stopped(runs: Runs) -> Outcome:
    """Four steps that two ranks take, at their end saved. Tests copy it, or only read."""
    return runs.train((1, 2, 1), {"stop_at": 4})


def write_chats(folder: Path, source: str, records: list[Any]) -> dict[str, Any]:
    """The settings of a run on these records, with a tokenizer that has a chat template."""
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / f"{source}.jsonl").write_text("".join(lines))
    return {
        "data.root_dir": folder,
        "data.sources": f"{{{source}: 1}}",
        "data.tokenizer.name": "hf",
        "data.tokenizer.path": write_tokenizer(folder / "tokenizer", CHATML),
        "data.workers": 0,
        "model.vocab_size": -1,
    }


@pytest.fixture(scope="session")
def talk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run of apps.sft on conversations."""
    chance, records = random.Random(1), []
    for i in range(150):
        said = [chance.choice("abcdefgh") * chance.randint(1, 9) for _ in range(2 + 2 * (i % 2))]
        roles = ("user", "assistant") * 2
        turns = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
        records.append({"messages": turns})
    settings = write_chats(tmp_path_factory.mktemp("talk"), "talk", records)
    return prepare(settings | {"data.seq_len": 80, "validation.tokens": 100000}, sft)


@pytest.fixture(scope="session")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run on a source of Megatron's files, whose documents no token ends, one of
    nanoGPT's form, and text; masks show the documents of each."""
    folder, chance = tmp_path_factory.mktemp("token_files"), random.Random(1)
    write_sources(folder)
    texts = [chance.choice("abcdefgh") * chance.randint(1, 40) for _ in range(300)]
    documents = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
    write_megatron(folder / "stored.bin", documents)
    write_plain(folder / "plain.bin", [np.append(document, EOS) for document in documents * 5])
    settings = {"data.root_dir": folder, "data.sources": "{one: 1, stored: 2, plain: 2}"}
    return prepare(settings | {"data.document_mask": "ignore"})


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run of apps.dpo on pairs, and a model of transformers that is the reference."""
    folder, chance = tmp_path_factory.mktemp("pairs"), random.Random(1)
    said = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 9))) for _ in range(400)]
    triples = zip(said[:390:3], said[1:390:3], said[2:390:3], strict=True)
    records = [{"prompt": p, "chosen": c + "!", "rejected": r} for p, c, r in triples]
    settings = write_chats(folder, "pairs", records)
    settings |= {"data.seq_len": 120, "model.dim": 24, "checkpoint.init_from": folder / "llama"}
    args = arguments(prepare(settings, dpo), dpo)
    torch.manual_seed(2)
    assert dpo.hugging_face is not None
    args.model.vocab_size = build_tokenizer(args.data.tokenizer).vocab_size
    llama = LlamaForCausalLM(LlamaConfig.from_dict(dpo.hugging_face().to_config(args.model, 120)))
    for p in llama.parameters():
        nn.init.normal_(p, std=0.3)
    llama.save_pretrained(folder / "llama")
    return settings


@pytest.fixture(scope="session")
def based(runs: Runs) -> dict[str, Any]:
    """Settings of a run that changes the model of another run, whose layers it has."""
    base = runs.train((1, 1, 1), {"seed": 7, "stop_at": 4}).dump_dir
    new = "[layers.*.attention.*.down, layers.*.attention.*.up]"
    return {"checkpoint.init_from": base, "checkpoint.init_new": new}


@pytest.fixture(scope="session")
def based_alone(based: dict[str, Any]) -> dict[str, Any]:
    return {"checkpoint.init_from": based["checkpoint.init_from"]}


@pytest.fixture(scope="session")
def taught(runs: Runs) -> dict[str, Any]:
    """Settings of a run that learns from another run, with another seed."""
    return {"teacher": runs.train((1, 1, 1), {"seed": 7, "stop_at": 4}).dump_dir}


@pytest.fixture(scope="session")
def talk_based(runs: Runs, talk: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run on conversations that changes the model of another."""
    base = runs.train((1, 1, 1), talk | {"seed": 7, "stop_at": 4}, app=sft).dump_dir
    return talk | {"checkpoint.init_from": base}
