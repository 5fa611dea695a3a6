"""What a new run starts from: another run's model or everything of it, Meta Lingua's checkpoints,
files of torch.save; on any topology, and never what does not fit. Models that come from Meta Lingua
are used here by every program, and go there."""

import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.transformer import Transformer, build
from lingua.app import Built
from lingua.run.start import check
from tests import lingua_checkpoint
from tests.apps import test_generate
from tests.apps.meshes import mesh
from tests.apps.runs import TOLERANCES, Outcome, arguments, differs, digest, digests, opened, whole
from tests.checkpoint.test_checkpoint_load import Evil
from tests.forks import lora
from tests.lingua_checkpoint import DIM, STEP, TOKENS, LMTransformer
from tests.mistakes import refused
from tests.model.test_generation import step_by_step
from tests.tools.exchange.converted import convert_to
from tests.tools.exchange.test_convert import write_base

K, END = 4, 7
EVERYTHING = {"checkpoint.continue_training_from_init": True}


def start(path: Path) -> dict[str, Any]:
    return {"checkpoint.init_from": path}


def only(kind: str, digests_by_name: dict[str, str]) -> dict[str, str]:
    return {name: d for name, d in digests_by_name.items() if name.startswith(kind)}


def without(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if not name.startswith(kind)}


def stopped_at_once(args: TrainArgs) -> Built:
    """A builder of the model, in processes that are asked to stop before they train."""
    built = build(args)
    reset = built.module.reset_parameters

    def reset_and_ask() -> None:
        reset()
        os.kill(os.getpid(), signal.SIGUSR2)

    built.module.reset_parameters = reset_and_ask
    return built


def test_the_model_of_another_run_begins_a_new_one_on_any_topology(runs, stopped, tmp_path):
    begun = start(stopped.dump_dir) | {"stop_at": 1}
    restored = runs.train((1, 1, 2), begun, look=True).restored
    saved = stopped.tensors(K)
    assert only("model.", restored["tensors"]) == digests(without("optim.", saved))
    zeros = {name: torch.zeros_like(t) for name, t in without("model.", saved).items()}
    assert only("optim.", restored["tensors"]) == digests(zeros)
    assert restored["progress"] == {
        "step": 0, "position": 0, "skipped_steps": 0, "trained_s": 0.0,
    }  # fmt: skip

    other = {"data.seq_len": 8, "data.sources": "{two: 1}", "stop_at": 1, "optim.lr": 1e-3}
    run = runs.train((1, 1, 2), other | start(stopped.checkpoint(K)))
    assert run.column("step") == [1]
    assert f"starting from the model of {stopped.checkpoint(K)} (checkpoint, step {K})" in run.log
    table = [line.split()[1:] for line in run.log.splitlines()]
    assert ["data.seq_len", "16", "8", "announced"] in table
    assert not any(row[:1] == ["optim.lr"] for row in table)  # nothing of it is taken


def test_what_the_source_lacks_may_be_new_where_it_is_named(runs, stopped):
    """The rest is the source's, what is new that of a run that begins with nothing, on any mesh."""
    new = {"checkpoint.init_new": "[layers.*.attention.*.down, layers.1, layers.0.attention.*.up]"}
    settings = {"stop_at": 1, "lora.targets": "['layers.*.attention.w[qo]']"}
    fresh = runs.train((1, 1, 1), settings, app=lora.app).weights
    begun = settings | start(stopped.dump_dir)
    run = runs.train((1, 1, 2), begun | new, app=lora.app, look=True)
    tensors = {f"model.{name}": value for name, value in fresh.items()}
    added = {name for name in tensors if name.endswith((".down", ".up"))}
    assert len(added) == 8
    tensors |= digests(without("optim.", stopped.tensors(K)))
    assert only("model.", run.restored["tensors"]) == tensors
    n = sum(run.tensors(1)[name].numel() for name in added)
    assert f"checkpoint.init_new: initial values for 8 parameters of {n:,} elements: la" in run.log
    same = runs.train((1, 1, 1), begun | new, app=lora.app)
    assert differs(run, same) == []

    def error(*patterns: str) -> str:
        named = {"checkpoint.init_new": f"[{', '.join(patterns)}]"} if patterns else {}
        return runs.train((1, 1, 1), begun | named, app=lora.app, refused=True).error

    for given in ((), ("layers.*.attention.*.up",)):
        assert "layers.0.attention.wo.down: (2, 24) here, not in the checkpoint" in error(*given)
    nearest = 'no module that has one (did you mean "layers.0.attention.wq.down"?)'
    assert nearest in error("layers.0.attention.wq.dwn")
    assert "init_new" in runs.train((1, 1, 1), new, refused=True).error
    assert "init_new" in runs.train((1, 1, 1), new | begun | EVERYTHING, refused=True).error


def test_a_branch_goes_on_in_its_own_folder(runs, stopped, through, tmp_path):
    branch = EVERYTHING | start(stopped.checkpoint(K).parent)
    run = runs.train((1, 1, 2), branch | {"stop_at": K + 1}, look=True)
    assert run.restored["tensors"] == digests(stopped.tensors(K))
    assert run.restored["progress"] == stopped.state(K)["progress"]
    taken = "model, optimizer, step and position"
    assert f"branching from another run: {taken} of {stopped.checkpoint(K)}" in run.log
    # Stopped before a step of its own, it has what it was given.
    early = runs.train((2, 1, 1), branch, build=stopped_at_once)
    assert f"stopped by SIGUSR2 after step {K}, which is saved" in early.log
    assert digests(early.tensors(K)) == digests(stopped.tensors(K))
    # Requeued with the same command, it resumes what it has itself.
    run = runs.train((2, 1, 1), branch | {"stop_at": END}, dump_dir=run.dump_dir)
    assert f"resuming {run.checkpoint(K + 1)}" in run.log
    assert f"{stopped.checkpoint(K).parent} is not read" in run.log
    assert run.column("step") == list(range(K + 1, END + 1))

    whole_run = Outcome(tmp_path / "tail", [])
    whole_run.dump_dir.mkdir()
    lines = [json.dumps(line) + "\n" for line in through.lines[K:]]
    (whole_run.dump_dir / "metrics.jsonl").write_text("".join(lines))
    assert differs(run, whole_run) == []
    alone = runs.train((1, 1, 1), start(stopped.dump_dir) | {"stop_at": END - K})
    assert set(differs(alone, whole_run)) == {"batch_hash", *TOLERANCES}

    seed = runs.train((1, 1, 1), branch | {"seed": 1}, refused=True).error
    assert "seed: 42 in the checkpoint, 1 now" in seed  # as on resume


def test_what_cannot_be_started_from_is_refused_by_name(runs, stopped, tmp_path):
    """What a launcher refuses too: tests/mistakes.txt."""

    def refused(path: Path, **settings: Any) -> str:
        return runs.train((1, 1, 1), start(path) | settings, refused=True).error

    allow = {"checkpoint.allow_change": "[model.vocab_size]", "model.vocab_size": 300}
    said = refused(stopped.dump_dir, **allow)
    assert "model.tok_embeddings.weight: (300, 22) here, (259, 22) in the checkpoint" in said
    damaged = shutil.copytree(stopped.checkpoint(K), tmp_path / "damaged")
    shard = next(damaged.glob("__1_*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "is damaged (__1_0.distcp: wrong checksum)" in refused(damaged)
    shard.unlink()
    assert "is not a whole checkpoint: __1_0.distcp is missing" in refused(damaged)


def test_the_tokens_of_a_folder_of_transformers_keep_their_meaning(runs, tmp_path):
    """Refused as a launcher refuses it; that the folder's own is taken: test_run_config."""
    base = tmp_path / "base"
    write_base(base)
    content = json.loads((base / "tokenizer.json").read_text())
    rewritten = shutil.copytree(base, tmp_path / "rewritten") / "tokenizer.json"
    more = {"id": 299, "content": "<|tool|>", "special": True, "single_word": False}
    more |= {"lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append(more)
    rewritten.write_text(json.dumps(content, indent=1))
    words = [f"data.root_dir={runs.text}", "data.sources={one: 1}", f"dump_dir={tmp_path / 'run'}"]
    words += ["device=cpu", "data.seq_len=16", f"checkpoint.init_from={base}"]

    def tokenizer(*settings: str) -> str:
        return check([*words, *settings], 1)[0].data.tokenizer.name

    assert tokenizer() == tokenizer(f"data.tokenizer.path={rewritten}") == "hf"
    other = ["data.tokenizer.name=bytes", "data.add_bos=true"]
    advice = f"data.tokenizer={{name: hf, path: {base / 'tokenizer.json'}}}"
    need = 'data.tokenizer.name = bytes: token 7 is "\\u0007", and "!" in the training of'
    refused(lambda: tokenizer(*other), need, base, advice)
    allow = "checkpoint.allow_change=[data.tokenizer.content]"
    assert tokenizer(*other, allow) == "bytes"
    (base / "tokenizer.json").unlink()  # as that of a model of bytes, which has none there
    assert tokenizer(*other) == "bytes"


def logits_here(overrides: dict[str, Any]) -> Tensor:
    """Of TOKENS, by the model that a run begins with."""
    with opened(app, overrides) as run, torch.no_grad():
        return whole(run.model(TOKENS))


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.soak, id="untied"), True]
)
def theirs(request, ranks, tmp_path_factory) -> tuple[bool, Path, Tensor]:
    """Whether it ties weights, a checkpoint that Meta Lingua wrote, and its logits of TOKENS."""
    folder = tmp_path_factory.mktemp("lingua") / "0000000003"
    folder.mkdir()
    logits, _ = ranks.run(2, lingua_checkpoint.save_here, folder, request.param)
    return request.param, folder, logits


def by_our_names(folder: Path) -> dict[str, str]:
    """Digests of what Meta Lingua saved, as torch's own converter reads it."""
    dcp_to_torch_save(folder, folder.with_suffix(".pt"))
    saved = torch.load(folder.with_suffix(".pt"), weights_only=True)
    found = {f"model.{name}": digest(t) for name, t in saved["model"].items()}
    found.pop("model.output.tied_module.weight", None)
    for name, state in saved["optim"]["state"].items():
        found |= {f"optim.{key}.{name}": digest(t) for key, t in state.items()}
    return found


def test_a_checkpoint_of_meta_linguas_gives_its_state(runs, ranks, theirs, tmp_path):
    tied, folder, logits = theirs
    same = {"model.dim": DIM, "model.weight_tying": tied}
    for n, path in enumerate((folder, folder / "consolidated", *folder.glob("*/*.pth"))):
        where = {"dump_dir": tmp_path / str(n)} | mesh((1, 1, 2))
        config = {"data.root_dir": runs.text} | same | where | start(path)
        for ours in ranks.run(2, logits_here, config):
            torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
    other = {"model.rope_theta": 5000.0, "checkpoint.allow_change": "[model.rope_theta]"}
    for ours in ranks.run(2, logits_here, config | {"dump_dir": tmp_path / "other"} | other):
        assert not torch.allclose(ours, logits, rtol=1e-4, atol=1e-5)

    go_on = same | EVERYTHING | start(folder)
    run = runs.train((1, 2, 1), go_on | {"stop_at": STEP + 1}, look=True)
    assert run.restored["tensors"] == by_our_names(folder)
    progress = run.restored["progress"]
    assert (progress["step"], progress["position"]) == (STEP, STEP * 7)
    assert run.column("step") == [STEP + 1]
    plain = runs.train((1, 1, 1), {"stop_at": STEP + 1})
    assert run.lines[0]["batch_hash"] == plain.lines[STEP]["batch_hash"]
    assert run.lines[0]["lr"] == plain.lines[STEP]["lr"]
    assert "rows continue at 3 steps x 7 rows = 21" in run.log
    table = [line.split()[1:] for line in run.log.splitlines()]
    assert ["optim.lr", "0.01", "0.004", "announced"] in table
    assert ["data.seq_len", "1024", "16", "announced"] in table


def test_what_of_meta_linguas_does_not_fit_is_refused(runs, theirs, tmp_path):
    tied, folder, _ = theirs
    same = {"model.dim": DIM, "model.weight_tying": tied}
    copy = shutil.copytree(folder, tmp_path / "copy")

    def refused(path: Path, changed: dict[str, Any]) -> str:
        return runs.train((1, 2, 1), same | start(path) | changed, refused=True).error

    said = refused(copy, {"model.weight_tying": not tied})
    assert f"model.weight_tying: {tied} in the checkpoint, {not tied} now" in said
    assert "steps = 3: must be above 3" in refused(copy, EVERYTHING | {"steps": 3})
    file = copy / "consolidated" / "consolidated.pth"
    assert "gives a model alone" in refused(file, EVERYTHING)
    shard = next(copy.glob("__1_*"))
    shard.write_bytes(shard.read_bytes()[:1000])
    error = refused(copy, {})
    assert f"{copy} cannot be read: " in error and "__1_0.distcp" in error
    # Nothing of another's pickle is executed: that of files of torch, tests/tools/exchange.
    (copy / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    assert "refers to posix.mkdir" in refused(copy, {})
    assert not (tmp_path / "executed").exists()


def test_a_model_alone_is_no_run_to_go_on_with(runs, ranks, tmp_path):
    """Nor is a state dict of torch's, which has tied weights twice and no name for them all."""
    file, dump_dir = tmp_path / "model.pth", tmp_path / "run"
    tied = Transformer(arguments({"model.weight_tying": True}).model)
    nn.init.normal_(tied.tok_embeddings.weight)
    torch.save(tied.state_dict(), file)
    convert_to(ranks, file, dump_dir / "checkpoints")
    same = {"model.weight_tying": True}
    begun = runs.train((1, 1, 2), same | start(dump_dir) | {"stop_at": 1}, look=True)
    expected = {f"model.{name}": p for name, p in tied.named_parameters()}
    assert only("model.", begun.restored["tensors"]) == digests(expected)
    for settings in ({}, start(dump_dir / "checkpoints") | EVERYTHING):
        where = dump_dir if not settings else tmp_path / "b"
        said = runs.train((1, 1, 1), same | settings, dump_dir=where, refused=True).error
        assert "has only a model, and no run to resume" in said


def load_theirs(file: Path, tied: bool) -> nn.Module:
    """As its programs load a consolidated.pth: strictly."""
    model = LMTransformer(tied)
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    return model.eval()


def test_a_model_of_meta_linguas_generates_converted_or_as_it_is(ranks, theirs, tmp_path):
    """What is converted is a checkpoint like any other, which is evaluated and exported too."""
    tied, folder, _ = theirs
    consolidated = folder / "consolidated" / "consolidated.pth"
    expected, _ = step_by_step(load_theirs(consolidated, tied), [256, *b"some words"], 8)
    for source, step in ((folder, 3), (consolidated, 0)):
        ckpt = convert_to(ranks, source, tmp_path / str(step))
        assert [path.name for path in ckpt.iterdir()] == [f"{step:010d}"]
        out, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.txt"
        prompts.write_text("some words\n")
        argv = [f"prompts={prompts}", f"out={out}", "max_gen_tokens=8"]
        argv += ["temperature=0", "stop_tokens=[]"]
        for path in (ckpt, source):
            [(refused, _)] = ranks.run(1, test_generate.main_here, f"ckpt={path}", *argv)
            assert not refused
            assert json.loads(out.read_text())["tokens"] == expected
            out.unlink()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_file_of_a_model_is_one_that_meta_lingua_loads(runs, ranks, tmp_path, tied):
    run = runs.train((1, 2, 1), {"model.dim": DIM, "model.weight_tying": tied, "stop_at": 2})
    file = tmp_path / "consolidated.pth"
    convert_to(ranks, run.dump_dir, file)
    found = load_theirs(file, tied).state_dict()
    saved = run.tensors(2)
    for name, t in found.items():
        ours = "tok_embeddings.weight" if "tied_module" in name else name
        assert torch.equal(t, saved[f"model.{ours}"])
    content = torch.load(file, weights_only=True)["model"]
    places = {t.untyped_storage().data_ptr() for t in content.values()}
    assert len(places) == len(content) - tied  # the tied weight is in the file once
    # And the file begins a run here.
    settings = {"model.dim": DIM, "model.weight_tying": tied, "checkpoint.init_from": file}
    assert "starting from the model" in runs.train((1, 1, 1), settings | {"stop_at": 1}).log
