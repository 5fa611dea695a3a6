"""apps/lora against PEFT: logits, a step of training, and files of either in the other. And the
base of adapters, which must be there, and be the one that they were trained with."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import lingua
from apps.lora import app
from apps.lora.dpo import app as dpo
from apps.main.hugging_face import llama
from lingua.checkpoint.origin import open_source
from lingua.config.saved import load_saved
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start
from lingua.tools.exchange.trained import load_weights
from tests.apps.meshes import Sizes
from tests.apps.runs import GLOBAL_BATCH, Outcome, Runs, arguments, differs, digests
from tests.checkpoints import resign
from tests.mistakes import refused
from tests.tools.exchange.converted import convert_here, convert_to

ONE, TP, SHARDS = (1, 1, 1), (1, 1, 2), (1, 3, 1)
RANK, ALPHA = 3, 5
# The layers that have adapters, as PEFT calls them: of every block, and of one.
OF_PEFT = r".*self_attn\.[qvo]_proj|.*1\.mlp\..*_proj"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EXACT = {"optim.warmup": 0, "optim.lr": 1e-3, "optim.weight_decay": 0.1, "optim.clip": 0.05}
# Of this size transformers' heads take equal parts; the others are those of the tests' runs, in the
# words of a config.json.
SIZES = {"model.dim": 24, "model.ffn_dim_multiplier": 0.9, "model.multiple_of": 2}
TOKENS = torch.randint(3, 259, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers, of the sizes of the tests' runs."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig.from_dict(llama.to_config(arguments(SIZES).model, 16)))
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    model.save_pretrained(folder)
    return folder


def peft_model(base: Path, adapters: Path | None = None) -> Any:
    """The base with these adapters, or with some of random values, to train."""
    model = LlamaForCausalLM.from_pretrained(base)
    if adapters is not None:
        return PeftModel.from_pretrained(model, adapters, is_trainable=True)
    torch.manual_seed(4)
    made = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=OF_PEFT))
    for name, p in made.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.2)
    return made


@pytest.fixture(scope="module")
def of_peft(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    peft_model(base).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(runs: Runs, of_peft: Path) -> Outcome:
    """Two steps from PEFT's adapters, with a checkpoint after each."""
    begun = {"checkpoint.init_from": of_peft, "checkpoint.dump.every": 1, "stop_at": 2}
    layers = [f"layers.{i}.attention.{w}" for i in (0, 1) for w in ("wo", "wq", "wv")]
    layers += [f"layers.1.feed_forward.w{i}" for i in (1, 2, 3)]
    begun |= {"lora.rank": RANK, "lora.alpha": ALPHA, "lora.targets": f"[{', '.join(layers)}]"}
    return runs.train(ONE, EXACT | SIZES | begun, app=app)


@pytest.fixture(scope="module")
def adapters(runs: Runs, based_alone: dict[str, Any]) -> Outcome:
    """Adapters of all layers of a run of apps.main."""
    return runs.train(SHARDS, based_alone | {"lora.rank": 2, "stop_at": 3}, app=app)


def logits_here(folder: Path, sizes: Sizes, **where: Any) -> Tensor:
    parallel = DistributedArgs(*sizes, model_dtype="fp32")
    mesh = start(torch.device("cpu"), detect_launch(), parallel)
    source = open_source("ckpt", folder, None, "size", **where)
    args: Any = load_saved(app.config, source.config_path, source.config)
    args.distributed = parallel
    built = app.build(args)
    assert built.plan is not None
    model = load_weights(built.module, built.plan, source, parallel, mesh)
    with torch.no_grad():
        logits = model(TOKENS)
    return logits.full_tensor() if sizes[2] > 1 else logits


def logits_there(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool(((found - expected).abs() <= tolerance * expected.abs().max()).all())


def test_adapters_of_peft_compute_what_they_do_there_and_go_back_as_they_were(
    ranks, base, of_peft, tmp_path
):
    expected = logits_there(peft_model(base, of_peft))
    assert not close(expected, logits_there(LlamaForCausalLM.from_pretrained(base)), 0.1)
    read = convert_to(ranks, of_peft, tmp_path / "read")
    for folder in (of_peft, read):
        for sizes in (ONE, TP):
            for found in ranks.run(math.prod(sizes), logits_here, folder, sizes):
                assert close(found, expected)
    again = load_file(convert_to(ranks, read, tmp_path / "again", "to=peft") / WEIGHTS)
    stored = load_file(of_peft / WEIGHTS)
    assert again.keys() == stored.keys() and all(torch.equal(again[n], stored[n]) for n in stored)


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_a_model_with_biases_compute_what_they_do_there(ranks, tmp_path, tied):
    torch.manual_seed(5)
    sizes = {"vocab_size": 259, "hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=16))
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    model.save_pretrained(tmp_path / "qwen2")
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "k_proj", "down_proj"]))
    for name, p in made.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.2)
    made.save_pretrained(tmp_path / "adapters")
    base = {"base": str(tmp_path / "qwen2")}
    [found] = ranks.run(1, logits_here, tmp_path / "adapters", ONE, **base)
    assert close(found, logits_there(made))
    config = json.loads((tmp_path / "adapters" / CONFIG).read_text())
    assert config["base_model_name_or_path"] != str(tmp_path / "qwen2")
    read = convert_to(ranks, tmp_path / "adapters", tmp_path / "read", f"base_model={base['base']}")
    again = convert_to(ranks, read, tmp_path / "again", "to=peft")
    stored = [load_file(folder / WEIGHTS) for folder in (tmp_path / "adapters", again)]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(t, stored[1][name]) for name, t in stored[0].items())


def test_a_base_that_is_itself_is_refused(runs, based_alone, tmp_path):
    run = runs.train(ONE, based_alone | {"lora.rank": 2, "stop_at": 1}, app=app)
    config = run.checkpoint(1) / "config.yaml"
    text = config.read_text().replace(f"init_from: {based_alone['checkpoint.init_from']}", "@")
    assert "@" in text
    config.write_text(text.replace("@/checkpoints/0000000004", f"init_from: {run.dump_dir}"))
    resign(run.checkpoint(1))
    refused(lambda: lingua.load(run.dump_dir), "must be another model")
    config.write_text(text.replace("@/checkpoints/0000000004", "other: 1").replace(
        "checkpoint:\n", "checkpoint: 5\nmore:\n"))  # fmt: skip
    resign(run.checkpoint(1))
    refused(lambda: lingua.load(run.dump_dir), "None: no such file")
    lingua.load(run.dump_dir, base_model=based_alone["checkpoint.init_from"])


def test_a_step_is_that_of_peft(runs, base, of_peft, trained, ranks, tmp_path):
    """Of the same rows, by torch's AdamW, its clipping and its loss."""
    model, stream = peft_model(base, of_peft), runs.stream()
    new = [p for n, p in model.named_parameters() if "lora_" in n]
    optimizer = torch.optim.AdamW(new, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    rows = stream.rows(np.arange(2 * GLOBAL_BATCH)).astype(np.int64)
    for step, line in enumerate(trained.lines):
        part = torch.from_numpy(rows[step * GLOBAL_BATCH :][:GLOBAL_BATCH])
        logits = model(part[:, :-1]).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, part[:, 1:].flatten())
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(new, 0.05)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5) and norm > 0.05
        optimizer.param_groups[0]["lr"] = line["lr"]
        optimizer.step()
        optimizer.zero_grad()
        out = tmp_path / str(step)
        ours = load_file(convert_to(ranks, trained.checkpoint(step + 1), out, "to=peft") / WEIGHTS)
        theirs = {n.replace(".default", ""): p for n, p in model.named_parameters()}
        for name, t in ours.items():
            assert (t - theirs[name]).abs().max() < 1e-6, name


def test_a_run_goes_to_peft_and_to_one_model(ranks, base, trained, tmp_path):
    [expected] = ranks.run(1, logits_here, trained.dump_dir, ONE)
    exported = convert_to(ranks, trained.dump_dir, tmp_path / "peft", "to=peft")
    assert json.loads((exported / CONFIG).read_text())["base_model_name_or_path"] == str(base)
    model = peft_model(base, exported)
    assert close(logits_there(model), expected)
    merged = convert_to(ranks, trained.dump_dir, tmp_path / "merged")
    assert close(logits_there(LlamaForCausalLM.from_pretrained(merged)), expected)
    assert close(logits_there(model.merge_and_unload()), expected)


def test_checkpoints_have_what_is_trained_alone(trained, adapters, of_peft):
    for run in (trained, adapters):
        model = {n for n in run.tensors(2 + (run is adapters)) if n.startswith("model.")}
        assert model and all(name.endswith((".down", ".up")) for name in model)
    size = sum(t.numel() for t in load_file(of_peft / WEIGHTS).values())
    assert sum(t.numel() for n, t in trained.tensors(2).items() if "model" in n) == size
    assert f"({size:,} trained)" in trained.log


def test_programs_find_the_base_or_name_what_is_wrong_with_it(ranks, runs, based_alone, tmp_path):
    at, moved = tmp_path / "base", tmp_path / "moved"
    shutil.copytree(based_alone["checkpoint.init_from"], at)
    settings = {"checkpoint.init_from": at, "lora.rank": 2, "stop_at": 3, "optim.lr": 0.1}
    run = runs.train(ONE, settings, app=app).dump_dir
    say: dict[str, Any] = {"max_gen_tokens": 8, "temperature": 0}
    text = lingua.load(run, device="cpu").generate("ab", **say)
    merged = convert_to(ranks, run, tmp_path / "merged.pth")
    assert lingua.load(merged, device="cpu").generate("ab", **say) == text
    assert lingua.load(at, device="cpu").generate("ab", **say) != text

    at.rename(moved)
    missing = f"{at}/checkpoints/0000000004: no such file"
    refused(lambda: lingua.load(run), missing, "base_model=PATH")
    assert lingua.load(run, device="cpu", base_model=moved).generate("ab", **say) == text
    [said] = ranks.run(1, convert_here, f"source={run}", f"out={tmp_path / 'no'}")
    assert missing in said
    convert_to(ranks, run, tmp_path / "hf", f"base_model={moved}", "to=hf")
    longer = settings | {"stop_at": 4}
    assert missing in runs.train(ONE, longer, app=app, dump_dir=run, refused=True).error
    refused(lambda: lingua.load(moved, base_model=at), f"base_model = {at}", "no base")

    shutil.copytree(runs.train(ONE, {"seed": 8, "stop_at": 4}).dump_dir, at)
    refused(lambda: lingua.load(run), f"{at}/checkpoints/0000000004: is not what", "its content")
    said = runs.train(ONE, longer, app=app, dump_dir=run, refused=True).error
    assert "checkpoint.init_from: " in said and "in the checkpoint" in said
    found = longer | {"checkpoint.init_from": moved}
    assert runs.train(ONE, found, app=app, dump_dir=run).column("step") == [1, 2, 3, 4]

    # The base's run goes on, and what has begun with an earlier checkpoint of it reads that.
    runs.train(ONE, {"seed": 7, "stop_at": 5, "checkpoint.dump.keep": 0}, dump_dir=moved)
    assert (moved / "checkpoints/0000000005").is_dir()
    found = found | {"stop_at": 5}
    assert runs.train(TP, found, app=app, dump_dir=run).column("step") == [1, 2, 3, 4, 5]
    by_a_link = tmp_path / "link"
    by_a_link.symlink_to(moved)
    found = found | {"stop_at": 6, "checkpoint.init_from": by_a_link}
    assert runs.train(ONE, found, app=app, dump_dir=run).column("step")[-1] == 6
    lingua.load(run, device="cpu")


def test_adapters_go_on_from_those_of_another_run(runs, adapters, tmp_path):
    """As they are: what they compute is guarded, and a branch is the run it branches from."""
    begun = {"checkpoint.init_from": adapters.dump_dir, "lora.rank": 2}
    run = runs.train(TP, begun | {"stop_at": 1}, app=app, look=True)
    stored = {n: t for n, t in adapters.tensors(3).items() if n.startswith("model.")}
    expected = digests(stored)
    assert {n: d for n, d in run.restored["tensors"].items() if n in expected} == expected
    assert all(n.startswith("optim.") for n in run.restored["tensors"].keys() - expected.keys())
    said = runs.train(ONE, begun | {"lora.alpha": 8}, app=app, refused=True).error
    assert "lora.alpha: 32.0 in the checkpoint, 8" in said

    longer = {"stop_at": 5, "lora.rank": 2}
    branched = longer | begun | {"checkpoint.continue_training_from_init": True}
    branch = runs.train(ONE, branched, app=app)
    whole = adapters.copy(tmp_path / "whole").dump_dir
    at = {"checkpoint.init_from": adapters.state(3) and begun_from(adapters)}
    through = runs.train(SHARDS, longer | at, app=app, dump_dir=whole)
    assert branch.column("step") == [4, 5]
    for name, t in through.tensors(5).items():
        if name.startswith("model."):
            torch.testing.assert_close(branch.tensors(5)[name], t, rtol=1e-4, atol=1e-6)


def begun_from(run: Outcome) -> str:
    return run.events[0]["config"].split("init_from: ")[1].split("\n")[0]


def test_the_reference_of_pairs_is_what_adapters_begin_with(runs, pairs):
    """Where they change nothing yet, no pair has a margin, and in any case the first loss is
    log 2."""
    begun = runs.train(ONE, pairs | {"lora.rank": 2, "stop_at": 2, "optim.lr": 0.1}, app=dpo)
    run = runs.train(ONE, pairs | {"lora.rank": 2, "stop_at": 1} | from_run(begun), app=dpo)
    for first in (begun.lines[0], run.lines[0]):
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-6) and abs(first["margin"]) < 1e-5
    assert begun.lines[1]["loss"] < 0.69


def from_run(run: Outcome) -> dict[str, Any]:
    return {"checkpoint.init_from": run.dump_dir}


def test_dropout_is_of_the_changes_in_training_alone(runs, adapters, based_alone):
    keys = based_alone | {"lora.rank": 2, "stop_at": 3, "validation.every": 3}
    without, dropped, again = (
        runs.train(ONE, keys | {"lora.dropout": p, "optim.lr": 0.1}, app=app) for p in (0, 0.5, 0.5)
    )
    assert without.lines[0]["loss"] == dropped.lines[0]["loss"]  # they change nothing yet
    assert without.lines[1]["loss"] != dropped.lines[1]["loss"]
    assert differs(dropped, again) == []
    # Changes that are trained already, and stay as they are.
    still = {"checkpoint.init_from": without.dump_dir, "optim.lr": 1e-12, "stop_at": 1}
    still |= {"lora.rank": 2, "validation.every": 1}
    found = [runs.train(ONE, still | {"lora.dropout": p}, app=app) for p in (0, 0.5)]
    assert found[0].lines[0]["loss"] != found[1].lines[0]["loss"]
    held_out = [run.held_out[-1]["nats_per_byte"] for run in found]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-9)
    assert held_out[0] == pytest.approx(without.held_out[-1]["nats_per_byte"], rel=1e-9)


def test_what_cannot_have_adapters_is_refused_by_name(
    runs, based_alone, of_peft, trained, tmp_path
):
    def error(**settings: Any) -> str:
        keys = {k.replace("__", "."): v for k, v in settings.items()}
        return runs.train(ONE, based_alone | keys, app=app, refused=True).error

    assert "lora.targets: tok_embeddings is Embedding" in error(lora__targets="[tok_embeddings]")
    nearest = 'no module of the model is named layers.0.attention.wx (did you mean "layers.0'
    assert f"lora.targets: {nearest}" in error(lora__targets="[layers.0.attention.wx]")
    assert "*.wq; a pattern has as many parts as the name" in error(lora__targets='["*.wq"]')
    none = {"checkpoint.init_from": "null"}
    refused(lambda: arguments(none, app), "checkpoint.init_from", "must be given")
    refused(lambda: arguments(based_alone | {"lora.dropout": 1}, app), "lora.dropout", "below 1")
    float8 = {"distributed.float8": "tensorwise"}
    refused(lambda: arguments(based_alone | float8, app), "distributed.float8")

    for key, value, need in (
        ("use_dora", True, "false"),
        ("peft_type", "IA3", '"LORA"'),
        ("r", 0, "above 0"),
        ("lora_alpha", None, "above 0"),
        ("rank_pattern", {"q_proj": 8}, "null or false"),
        ("init_lora_weights", "pissa", '"gaussian"'),
        ("alora_invocation_tokens", [5, 6], "null or false"),
        ("of a later version", 1, "null or false"),
        ("lora_dropout", 1.0, "below 1"),
        ("target_modules", ["k_proj"], "k_proj.lora_A.weight: (3, 24) by adapter_config.json, not"),
        ("base_model_name_or_path", "meta-llama/Llama-9", "base_model=PATH"),
    ):
        folder = shutil.copytree(of_peft, tmp_path / key)
        config = json.loads((folder / CONFIG).read_text()) | {key: value}
        (folder / CONFIG).write_text(json.dumps(config))
        refused(lambda folder=folder: open_source("ckpt", folder, None, "size"), folder, need)
    folder = shutil.copytree(of_peft, tmp_path / "file")
    stored = load_file(folder / WEIGHTS)
    save_file({n.replace("q_proj", "k_proj"): t for n, t in stored.items()}, folder / WEIGHTS)
    refused(lambda: open_source("ckpt", folder, None, "size"), "k_proj.lora_B.weight: (12, 3)")
    for named in (of_peft, trained.dump_dir):
        refused(lambda named=named: open_source("ckpt", of_peft, None, "size", base=str(named)),
                f"its base {named} has adapters itself")  # fmt: skip
    save_file({}, folder / WEIGHTS)
    refused(lambda: open_source("ckpt", folder, None, "size"), "must have adapters")
    (folder / WEIGHTS).write_bytes(b"no")
    refused(lambda: open_source("ckpt", folder, None, "size"), folder / WEIGHTS, "safetensors")
