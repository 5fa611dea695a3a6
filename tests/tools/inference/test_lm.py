"""`lingua.load`: a trained model in Python, which computes what plain PyTorch does."""

import ctypes
import gc
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import apps.main
import lingua
from lingua.parallel.alone import one_process
from tests.apps.test_model import initialised, model_args
from tests.mistakes import refused
from tests.ranks import Ranks
from tests.tokenizer.test_tokenizer import write_byte_level
from tests.tools.exchange.converted import convert_to, save_here, tensors_in
from tests.tools.exchange.test_families import peak_bytes

TEXT = "The quick brown fox jumps"
MODEL = model_args(vocab_size=400)


@pytest.fixture(scope="module")
def folders(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, as a checkpoint, as a folder of transformers, and as a file made of that."""
    root = tmp_path_factory.mktemp("lm")
    tokenizer = {"name": "hf", "path": write_byte_level(root / "tokenizer.json")}
    ranks.run(1, save_here, root / "ours", MODEL, {"tokenizer": tokenizer})
    theirs = convert_to(ranks, root / "ours", root / "theirs")
    file = convert_to(ranks, theirs, root / "model.pth")
    return {"ours": root / "ours", "theirs": theirs, "file": file}


def used(path: Path, text: str) -> dict[str, Any]:
    excepthook = sys.excepthook
    lm = lingua.load(path, device="cpu")
    assert not dist.is_initialized() and sys.excepthook is excepthook
    return {
        "tokens": lm.encode(text),
        "logits": lm.logits(text),
        "loss": lm.loss(text),
        "hidden": [lm.hidden(text, layer) for layer in (0, 1, -1)],
        "generated": lm.generate(text, temperature=0, max_gen_tokens=8),
        "drawn": [lm.generate(text, seed=seed, max_gen_tokens=8) for seed in (1, 1, 2)],
        "decoded": lm.tokenizer.decode,
    }


def test_a_model_computes_what_it_does_in_plain_pytorch_and_in_transformers(folders):
    model = initialised(MODEL).eval()
    with torch.no_grad():
        found = used(folders["ours"], TEXT)
        tokens = torch.tensor([found["tokens"]])
        expected = model(tokens)[0]
        torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-5)
        loss = F.cross_entropy(expected[:-1], tokens[0, 1:]).item()
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        shorter = F.cross_entropy(expected[1:-1], tokens[0, 2:]).item()
        assert shorter != pytest.approx(loss, rel=1e-3)
        first, second, last = found["hidden"]
        torch.testing.assert_close(model.output(model.norm(last)), expected, rtol=0, atol=1e-5)
        assert torch.equal(second, last) and not torch.allclose(first, last, atol=1e-2)
        likeliest = tokens
        for _ in range(8):
            likeliest = F.pad(likeliest, (0, 1), value=int(model(likeliest)[0, -1].argmax()))
        assert found["generated"] == found["decoded"](likeliest[0, tokens.shape[1] :].tolist())
        assert found["drawn"][0] == found["drawn"][1] != found["drawn"][2]

        theirs = used(folders["theirs"], TEXT)
        assert theirs["tokens"] == found["tokens"]
        reference = AutoModelForCausalLM.from_pretrained(folders["theirs"])(tokens).logits[0]
        torch.testing.assert_close(theirs["logits"], reference, rtol=0, atol=1e-5)
        assert theirs["generated"] == found["generated"]
        file = used(folders["file"], TEXT)
        assert torch.equal(file["logits"], theirs["logits"]) and file["tokens"] == found["tokens"]


def test_a_text_ends_where_transformers_ends_it(folders, tmp_path):
    """At each of the tokens of generation_config.json, or else of config.json."""
    folder = shutil.copytree(folders["theirs"], tmp_path / "theirs")
    ids = torch.tensor([lingua.load(folder, device="cpu").encode(TEXT)])
    settings = {"max_new_tokens": 6, "do_sample": False}

    def generated(file: str, ends: Any) -> list[int]:
        """The tokens there, whose text is that here."""
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(config | {"eos_token_id": ends}))
        there = AutoModelForCausalLM.from_pretrained(folder).generate(ids, **settings)[0]
        lm = lingua.load(folder, device="cpu")
        new = there[ids.shape[1] :].tolist()
        stopped = new[:-1] if new[-1] in lm.tokenizer.ends else new
        text = lm.generate(TEXT, temperature=0, max_gen_tokens=6)
        assert text == lm.tokenizer.decode(stopped)
        return new

    whole = generated("generation_config.json", 0)
    assert len(whole) == 6
    third = whole[2]
    n = whole.index(third) + 1
    assert len(generated("generation_config.json", [0, third])) == n < 6
    (folder / "generation_config.json").unlink()
    assert len(generated("config.json", [third, 0])) == n
    refused(lambda: generated("config.json", [third, 400]), "eos_token_id", "from 0 to 399")


def load_here(path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes by which memory grows at most while a model is loaded in bfloat16, and its tensors."""
    for _ in range(2):  # the first time it imports
        lm = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would be taken again
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = peak_bytes()
        lm = lingua.load(path, device="cpu", dtype="bf16")
        grown = peak_bytes() - before
    return grown, {name: t.clone() for name, t in lm.model.state_dict().items()}


def test_in_bfloat16_a_model_is_never_held_in_float32(ranks, tmp_path):
    """Of 20 MB, 17 of them in two tensors; in float32 and in bfloat16 in the files."""
    args = replace(model_args(dim=256, multiple_of=256), vocab_size=16384)
    tokenizer = {"name": "hf", "path": write_byte_level(tmp_path / "tokenizer.json")}
    ranks.run(1, save_here, tmp_path / "ours", args, {"tokenizer": tokenizer})
    folders = [tmp_path / "ours" / "0000000003"]
    for dtype in ("float32", "bfloat16"):
        folders.append(convert_to(ranks, folders[0], tmp_path / dtype, f"dtype={dtype}"))
    stored = {name: t.bfloat16() for name, t in tensors_in(folders[0]).items()}
    held = sum(t.nbytes for t in stored.values())
    for folder in folders:
        [(grown, found)] = ranks.run(1, load_here, folder)
        assert found.keys() == stored.keys()
        assert all(torch.equal(t, found[name]) for name, t in stored.items())
        assert 0.95 * held < grown < 1.3 * held, (folder, grown, held)


def test_mistakes_are_named(folders, tmp_path):
    lm = lingua.load(str(folders["ours"]), device="cpu")
    for call, message in (
        (lambda: lingua.load(tmp_path), f"path: {tmp_path} has no whole checkpoint: must be"),
        (lambda: lingua.load(folders["theirs"], app="apps.mtp"), "has no form in transformers"),
        (lambda: lingua.load(folders["ours"], app="no.app"), "app = no.app (lingua.load)"),
        (lambda: lingua.load(folders["ours"], app=sys), "has no lingua.app.App named app"),
        (lambda: lm.logits("word " * 200), "must have at most 64"),
        (lambda: lm.loss(""), "no token that another precedes"),
        (lambda: lm.logits("\ud800"), "half a surrogate pair"),
        (lambda: lm.hidden(TEXT, 2), "layer = 2: must be -2 to 1"),
        (lambda: lm.generate(TEXT, temprature=0), 'unknown key (did you mean "temperature"?)'),
        (lambda: lm.generate(TEXT, max_gen_tokens=64), "leaves no room for a prompt"),
        (lambda: lm.chat([]), "its folder has no chat template"),
    ):
        refused(call, message)
    n = sum(p.numel() for p in initialised(MODEL).parameters())
    where = f"{folders['ours'] / '0000000003'} (checkpoint, step 3)"
    settings = "torch.float32 on cpu, context 64, tokenizer hf"
    assert repr(lm) == f"<LM of {where}: {n:,} parameters in 2 layers, {settings}>"
    assert len(repr(lm.tokenizer)) < 500
    for app in (apps.main, apps.main.app):
        same = lingua.load(folders["ours"], app=app, device="cpu")
        assert torch.equal(same.logits(TEXT), lm.logits(TEXT))
    with one_process():
        refused(lambda: lm.generate(TEXT, max_gen_tokens=4), "process group")
