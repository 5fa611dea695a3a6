"""apps/mtp: each head against a plain model of its own, training on meshes against one process."""

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import apps.mtp
from apps.main import eval as evaluation
from apps.main import generate as generation
from apps.main import train as program
from apps.main.start import check
from apps.main.train import set_up, train
from apps.main.transformer import ModelArgs as PlainArgs
from apps.main.transformer import build_transformer
from apps.mtp import TrainArgs, app, build
from apps.mtp.model import ModelArgs, MultiToken, build_multi_token
from lingua.app import Built
from lingua.config.load import load
from lingua.data import IGNORE
from lingua.errors import UserError
from lingua.init import canonical_name, init_parameters
from lingua.signals import StopRequest
from tests.apps.runs import SMALL as RUN
from tests.apps.runs import write_sources
from tests.apps.tasks import write_tasks

CPU = torch.device("cpu")
SMALL = ModelArgs(dim=24, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=8)
ROWS, SEQ, HEADS = 2, 11, 3


def multi_token(args: ModelArgs, n_heads: int = HEADS) -> MultiToken:
    model = build_multi_token(args, n_heads)
    init_parameters(model, 1, CPU)
    return model


def tokens_and_targets(n_heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as the loader cuts them: view v + 1 is the input moved on by v + 1 tokens."""
    row = torch.randint(0, 50, (ROWS, SEQ + n_heads), generator=torch.Generator().manual_seed(3))
    targets = torch.stack([row[:, v + 1 : v + 1 + SEQ] for v in range(n_heads)])
    targets[0, 0, 2] = targets[-1, 1, -1] = IGNORE
    return row[:, :SEQ], targets


def plain_model_of(model: MultiToken, head: int):
    """apps.main's model that has the trunk and the blocks of one head as its layers, and the name
    that each of its parameters has in `model`."""
    args = model.args
    trunk = args.n_layers - args.head_layers
    fields = {k: v for k, v in asdict(args).items() if k != "head_layers"}
    plain = build_transformer(PlainArgs(**fields)).to_empty(device="cpu")
    if args.weight_tying:
        plain.output.weight = plain.tok_embeddings.weight
    names = {}
    for name, _ in plain.named_parameters():
        names[name] = name
        if head and name.startswith("layers.") and int(name.split(".")[1]) >= trunk:
            _, depth, rest = name.split(".", 2)
            names[name] = f"extra_heads.{head - 1}.{int(depth) - trunk}.{rest}"
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(own[names[name]])
    return plain, names


# --------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize(
    "args",
    [
        SMALL,
        replace(SMALL, head_layers=2),
        replace(SMALL, head_layers=3),  # no trunk: the heads share the embedding alone
        replace(SMALL, weight_tying=True, sliding_window=4),
    ],
)
def test_each_head_is_a_plain_model_trained_on_its_own_tokens(args):
    model = multi_token(args)
    tokens, targets = tokens_and_targets()
    sums, counts, _ = model(tokens, targets)
    sums.sum().backward()
    assert counts.tolist() == [21, 22, 21]
    grads = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for head in range(HEADS):
        plain, names = plain_model_of(model, head)
        expected, count, _ = plain(tokens, targets[head : head + 1])
        assert count.item() == counts[head].item()
        torch.testing.assert_close(sums[head], expected[0], rtol=1e-6, atol=0)
        expected.sum().backward()
        for name, p in plain.named_parameters():
            grads[names[name]] += p.grad
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-5, msg=name)
    assert len({round(s.item(), 3) for s in sums}) == HEADS  # the heads differ


def test_with_document_masks_each_head_sees_each_document_alone():
    model = multi_token(SMALL)
    tokens, targets = tokens_and_targets()
    documents = torch.tensor([[0, 6]]).repeat(ROWS, 1)
    for view in range(HEADS):  # what is not predicted from a document of its own
        targets[view, :, 6 - view - 1 : 6] = IGNORE
    sums, counts, _ = model(tokens, targets, documents)
    parts = [model(tokens[:, s], targets[..., s]) for s in (slice(0, 6), slice(6, SEQ))]
    assert counts.tolist() == sum(part.counts for part in parts).tolist()
    torch.testing.assert_close(sums, sum(part.sums for part in parts), rtol=1e-6, atol=0)
    assert not torch.isclose(sums, model(tokens, targets)[0], rtol=1e-4).any()


def test_the_next_token_needs_no_further_head():
    model = multi_token(SMALL)
    tokens, _ = tokens_and_targets()
    plain, _ = plain_model_of(model, 0)
    assert torch.equal(model(tokens), plain(tokens))
    del model.extra_heads[:]
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in plain.named_parameters()}


def test_with_one_target_it_is_the_plain_model_bit_for_bit():
    model = multi_token(SMALL, n_heads=1)
    plain, _ = plain_model_of(model, 0)
    init_parameters(plain, 1, CPU)
    tokens, targets = tokens_and_targets(1)
    assert torch.equal(model(tokens, targets)[0], plain(tokens, targets)[0])


@pytest.mark.parametrize("head_layers", [0, 4])
def test_a_head_has_at_least_one_layer_and_at_most_all(head_layers):
    validate = list(replace(SMALL, head_layers=head_layers).validate())
    assert validate == [("head_layers", "must be between 1 and model.n_layers = 3")]


def test_flops_are_what_torch_counts():
    args = TrainArgs(model=replace(SMALL, head_layers=2))
    args.data.n_views, args.data.seq_len = HEADS + 1, SEQ
    built = build(args)
    model = built.module.to_empty(device="cpu")
    tokens, targets = tokens_and_targets()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, targets)[0].sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")
    (products,) = counts.values()
    needed = products + attention * (SEQ + 1) / (2 * SEQ)  # of the keys it sees a query needs half
    assert built.flops_per_token == pytest.approx(needed / (ROWS * SEQ), rel=1e-12)


def test_the_fork_is_a_model_a_config_and_no_program():
    folder = Path(apps.mtp.__file__).parent
    assert {file.name for file in folder.glob("*.py")} == {"__init__.py", "model.py"}
    args, _ = load(TrainArgs, ["config=apps/mtp/configs/debug.yaml"])
    assert (args.data.n_views, args.model.head_layers) == (4, 1)


# --------------------------------------------------------------------------------------- training

# The last has heads of two blocks on a trunk of one.
MODEL = {"data.n_views": 4, "model.n_layers": 3, "model.head_layers": 2}
SINGLE = (1, 1, 1)
MESHES = [(1, 2, 2), (2, 1, 1)]  # (1, 2, 1) and (1, 1, 2) are in the run that is resumed


def command_line(overrides: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in (RUN | MODEL | overrides).items()]


def arguments(overrides: dict[str, Any]) -> TrainArgs:
    return load(TrainArgs, command_line(overrides))[0]


def on_mesh(mesh: tuple[int, int, int], rows: int = 7) -> dict[str, Any]:
    keys = ("dp_replicate", "dp_shard", "tp_size")
    sizes = {f"distributed.{key}": size for key, size in zip(keys, mesh, strict=True)}
    return sizes | {"data.batch_size": rows}


def train_here(overrides: dict[str, Any]) -> None:
    """The program itself."""
    program.main(["app=apps.mtp", *command_line(overrides)])


def build_shifted(args: TrainArgs) -> Built:
    """The control: the second head learns the token after the one it should."""
    built = build(args)
    forward = built.module.forward

    def shifted(tokens, targets=None):
        if targets is not None:
            targets = targets[torch.tensor([0, 2, 2])]
        return forward(tokens, targets)

    built.module.forward = shifted
    return built


def train_shifted_here(overrides: dict[str, Any]) -> None:
    train(replace(app, build=build_shifted), arguments(overrides))


def look_here(overrides: dict[str, Any]) -> tuple[dict[str, bool], set[str], list]:
    """Whether tensor parallelism splits each parameter, the FSDP units, and the logits without
    targets."""
    with closing(StopRequest()) as stop, ExitStack() as open_parts:
        run, _, _ = set_up(app, arguments(overrides), stop, open_parts)
    split = {
        canonical_name(name): isinstance(p, DTensor)  # of one process: the plain model
        and any(isinstance(place, Shard) for place in p.placements[1:])
        for name, p in run.model.named_parameters()
    }
    units = {name for name, m in run.model.named_modules() if isinstance(m, FSDPModule)}
    logits = run.model(torch.arange(32).view(2, 16)).detach()
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return split, units, whole.tolist()


def lines_of(dump: Path) -> dict[int, dict[str, Any]]:
    lines = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "loss" in line}


def held_out_of(dump: Path) -> list[tuple[int, str, float]]:
    lines = map(json.loads, (dump / "metrics.validation.jsonl").read_text().splitlines())
    return [(line["step"], line["source"], line["nats_per_token"]) for line in lines]


def same_run(lines: dict[int, dict], expected: dict[int, dict]) -> bool:
    return lines.keys() == expected.keys() and all(
        line["batch_hash"] == expected[step]["batch_hash"]
        and line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
        and line["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-4)
        for step, line in lines.items()
    )


def same_everywhere(dump: Path, single: Path) -> None:
    assert len(lines_of(single)) == 6
    assert same_run(lines_of(dump), lines_of(single))
    assert held_out_of(single)
    for line, expected in zip(held_out_of(dump), held_out_of(single), strict=True):
        assert line == (expected[0], expected[1], pytest.approx(expected[2], rel=1e-5))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Any]:
    text = tmp_path_factory.mktemp("mtp") / "text"
    text.mkdir()
    write_sources(text)
    return {"data.root_dir": str(text), "stop_at": 6, "validation.every": 6}


@pytest.fixture(scope="module")
def single(ranks, data, tmp_path_factory) -> Path:
    """Six steps in one process."""
    dump = tmp_path_factory.mktemp("single")
    ranks.run(1, train_here, data | on_mesh(SINGLE) | {"dump_dir": str(dump)})
    return dump


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
def test_on_a_mesh_it_is_the_run_of_one_process(ranks, data, single, tmp_path, mesh):
    n = mesh[0] * mesh[1] * mesh[2]
    ranks.run(n, train_here, data | on_mesh(mesh, rows=2) | {"dump_dir": str(tmp_path)})
    same_everywhere(tmp_path, single)


def test_the_comparison_sees_a_head_that_learns_the_wrong_token(ranks, data, single, tmp_path):
    ranks.run(1, train_shifted_here, data | on_mesh(SINGLE) | {"dump_dir": str(tmp_path)})
    assert not same_run(lines_of(tmp_path), lines_of(single))


def test_with_dropout_it_is_that_run_too(ranks, data, single, tmp_path):
    dropping = data | {"model.dropout": 0.1, "stop_at": 2}
    for mesh in (SINGLE, (1, 1, 2)):
        settings = dropping | on_mesh(mesh) | {"dump_dir": str(tmp_path / str(mesh))}
        ranks.run(mesh[2], train_here, settings)
    one, two = (lines_of(tmp_path / str(mesh)) for mesh in (SINGLE, (1, 1, 2)))
    assert same_run(two, one)
    assert not same_run(one, {step: lines_of(single)[step] for step in one})


def test_a_run_resumes_on_another_mesh(ranks, data, single, tmp_path):
    overrides = data | {"dump_dir": str(tmp_path)}
    ranks.run(2, train_here, overrides | on_mesh((1, 2, 1)) | {"stop_at": 2})
    ranks.run(1, train_here, overrides | on_mesh(SINGLE, rows=4) | {"stop_at": 4})
    ranks.run(2, train_here, overrides | on_mesh((1, 1, 2), rows=3))
    same_everywhere(tmp_path, single)


def command_here(command: Callable, *arguments: str) -> None:
    """apps.main.eval's or generate's main: the checkpoint names this app."""
    try:
        command(list(arguments))
    finally:
        dist.destroy_process_group()


def checked_here(overrides: dict[str, Any]) -> str:
    """The error that a launcher gets, or nothing."""
    try:
        check(["app=apps.mtp", *command_line(overrides)], 1)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.soak
def test_its_checkpoints_are_evaluated_as_while_it_trains(ranks, data, tmp_path):
    task_dir, run = write_tasks(tmp_path / "tasks", n=4), tmp_path / "run"
    settings = data | on_mesh(SINGLE) | {"dump_dir": str(run), "stop_at": 2, "eval.every": 2}
    settings |= {"eval.tasks": "[rolling,reply]", "eval.task_dir": task_dir}
    ranks.run(1, train_here, settings)
    argv = [f"ckpt={run}", "tasks=[rolling,reply]", f"task_dir={task_dir}"]
    argv += [f"dump_dir={tmp_path / 'out'}", "distributed.tp_size=2"]
    ranks.run(2, command_here, evaluation.main, *argv)
    then, now = (
        [json.loads(line) for line in (folder / "metrics.eval.jsonl").read_text().splitlines()]
        for folder in (run, tmp_path / "out")
    )
    assert [line["task"] for line in then] == ["rolling", "reply"]
    for line, alone in zip(then, now, strict=True):
        numbers = {key: value for key, value in line.items() if "," in key}
        assert numbers and numbers == pytest.approx({k: alone[k] for k in numbers}, rel=1e-4)

    written = []
    for n in (1, 2):
        out = tmp_path / f"{n}.jsonl"
        argv = [f"ckpt={run}", "prompt=def main", "max_gen_tokens=5", f"out={out}"]
        ranks.run(n, command_here, generation.main, *argv, f"distributed.tp_size={n}")
        written.append(json.loads(out.read_text())["text"])
    assert written[0] and written[0] == written[1]

    jobs = settings | {"eval.launcher": "slurm", "dump_dir": str(tmp_path / "later")}
    for named, message in (("apps.main", "model.head_layers: unknown key"), ("apps.mtp", "")):
        [found] = ranks.run(1, checked_here, jobs | {"eval.job": f"{{app: {named}}}"})
        assert message in found if message else not found


def test_under_tensor_parallelism_heads_are_split_as_the_trunk_is(ranks, data, tmp_path):
    [(_, _, expected)] = ranks.run(
        1, look_here, data | on_mesh(SINGLE) | {"dump_dir": str(tmp_path / "1")}
    )
    for split, units, logits in ranks.run(
        2, look_here, data | on_mesh((1, 1, 2)) | {"dump_dir": str(tmp_path / "2")}
    ):
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(expected))

        def block(prefix: str, split=split) -> dict[str, bool]:
            return {n.removeprefix(prefix): v for n, v in split.items() if n.startswith(prefix)}

        assert sum(block("layers.0.").values()) == 7  # the matrices; norms are whole
        for head in (0, 1):
            for depth in (0, 1):
                assert block(f"extra_heads.{head}.{depth}.") == block("layers.0.")
                assert {"layers.0", f"extra_heads.{head}.{depth}"} <= units
