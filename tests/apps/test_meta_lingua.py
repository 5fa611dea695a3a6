"""Models that come from Meta Lingua, and go there: used here by every program, and loaded there."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from apps.main import train
from tests import lingua_checkpoint
from tests.apps import test_eval, test_generate
from tests.apps.runs import Outcome
from tests.apps.tasks import write_tasks
from tests.lingua_checkpoint import DIM, TOKENS, LMTransformer
from tests.tools.exchange.converted import convert_here, convert_to
from tests.tools.inference.test_generation import step_by_step


def load_theirs(file: Path, tied: bool) -> nn.Module:
    """As its programs load a consolidated.pth: strictly."""
    model = LMTransformer(tied)
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    return model.eval()


def logits(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


def test_a_model_of_meta_linguas_generates_is_evaluated_and_exported(ranks, theirs, tmp_path):
    tied, folder, _ = theirs
    consolidated = folder / "consolidated" / "consolidated.pth"
    model = load_theirs(consolidated, tied)
    expected, _ = step_by_step(model, [256, *b"some words"], 8)  # 256: bos
    for i, (source, step) in enumerate(((folder, 3), (consolidated, 0))):
        ckpt = tmp_path / str(i)
        convert_to(ranks, source, ckpt)
        assert [path.name for path in ckpt.iterdir()] == [f"{step:010d}"]
        out = tmp_path / f"{i}.jsonl"
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("some words\n")
        argv = [f"prompts={prompts}", f"out={out}", "max_gen_tokens=8"]
        argv += ["temperature=0", "stop_tokens=[]"]
        for path in (ckpt, source):  # which are the same model
            [(refused, _)] = ranks.run(1, test_generate.main_here, f"ckpt={path}", *argv)
            assert not refused
            assert json.loads(out.read_text())["tokens"] == expected
            out.unlink()

    tasks = write_tasks(tmp_path / "tasks")
    argv = [f"ckpt={ckpt}", f"task_dir={tasks}", "tasks=[choice]", f"dump_dir={tmp_path / 'x'}"]
    [(refused, _)] = ranks.run(1, test_eval.eval_here, *argv)
    assert not refused
    sample = test_eval.samples_in(tmp_path / "x", "choice")[0]
    context, choice = sample["arguments"][0]
    tokens = torch.tensor([[256, *(context + choice).encode()]])
    of_each = logits(model, tokens)[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
    score = of_each[len(context.rstrip().encode()) :].sum().item()  # a space is the choice's
    assert test_eval.answers([sample])[0][0] == pytest.approx(score, rel=1e-4)

    [refused] = ranks.run(1, convert_here, f"source={ckpt}", f"out={tmp_path / 'hf'}")
    assert not refused
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(logits(exported), logits(model), rtol=1e-4, atol=1e-4)


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


def test_the_resolved_config_of_meta_lingua_trains_here(runs, ranks, tmp_path):
    """All but where its files are and on how many processes it ran."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(lingua_checkpoint.params(tied=True)))
    argv = [f"config={config}", f"dump_dir={tmp_path / 'run'}", "stop_at=1", "device=cpu"]
    argv += [f"data.root_dir={runs.text}", "data.sources={one: 1}", "data.seq_len=16"]
    argv += ["distributed.dp_shard=1", "checkpoint.path=null"]
    ranks.run(1, train.main, argv)
    run = Outcome(tmp_path / "run", [])
    assert "stopped after step 1" in run.log and run.checkpoint(1).is_dir()
