"""`device: mps` on a fake device, since nothing here has a GPU of Apple, and what a build of torch
for AMD's GPUs chooses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.train import train
from lingua.config.load import load
from lingua.model.attention import choose_attention
from lingua.optim.optimizer import build_optimizer, update
from lingua.parallel.alone import one_process, process_restored
from lingua.parallel.environment import Launch
from lingua.parallel.float8 import check_float8
from lingua.parallel.gradients import set_gradient_sync
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import pick_device
from lingua.parallel.mesh import AXES
from lingua.parallel.mps import MpsMesh, adopt
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.tensors import local
from lingua.run import samples
from lingua.run.records import Record
from lingua.run.start import make_optimizer
from tests.apps.runs import SMALL, write_sources
from tests.fake_mps import OnMps, fake_mps
from tests.mistakes import refused

MPS = torch.device("mps")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_sources(folder)
    return folder


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLE_TOKENS", 4)


def arguments(**more: Any) -> TrainArgs:
    values = SMALL | {"steps": 3, "stop_at": "null", "model.n_layers": 1} | more
    return load(TrainArgs, [f"{key}={value}" for key, value in values.items()])[0]


def trained(text: Path, dump_dir: Path, *stops: int, **more: Any) -> Record:
    """A run, in as many starts as there are steps to stop at."""
    for stop in stops or (3,):
        args = arguments(**{"data.root_dir": text, "dump_dir": dump_dir, "stop_at": stop} | more)
        with process_restored(app.path):
            train(app, args)
    return Record(dump_dir)


@pytest.mark.parametrize(
    "keys",
    [
        # rows of several lengths in each forward, noise, a mask, a micro-batch that is not full
        {"data.document_mask": "keep", "data.add_bos": True, "model.dropout": 0.1,
         "data.batch_size": 4, "model.sliding_window": 9,
         "distributed.activation_checkpointing": "full"},
        # heads that are not grouped: their gradients are rounded in the order of FSDP's
        {"distributed.model_dtype": "bf16", "model.n_kv_heads": 4, "optim.clip": 0.1},
    ],
    ids=["fp32", "bf16"],
)  # fmt: skip
def test_a_run_on_mps_is_that_of_the_cpu(text, tmp_path, capfd, keys):
    cpu = trained(text, tmp_path / "cpu", **keys)
    with fake_mps() as seen:
        mps = trained(text, tmp_path / "mps", 2, 3, device="mps", **keys)
    assert sum(seen.values()) > 3000 and "aten._fused_adamw_.default" in seen
    assert mps.metrics.text("batch_hash") == cpu.metrics.text("batch_hash")
    close = {"rel": 1e-3 if "distributed.model_dtype" in keys else 1e-6}
    for name in ("loss", "grad_norm"):
        assert mps.metrics[name].tolist() == pytest.approx(cpu.metrics[name].tolist(), **close)
    assert len(mps.samples) == len(cpu.samples) > 0
    assert not [t for run in (mps, cpu) for t in run.problems]
    [nats, other] = [run.validation["one"]["nats_per_byte"][-1] for run in (mps, cpu)]
    assert nats == pytest.approx(other, **close)
    assert mps.events[0]["device"] == "mps" and "samples could not" not in capfd.readouterr().out


def test_the_fake_device_refuses_what_mps_refuses():
    with fake_mps():
        ones = torch.ones(2, device="mps")
        assert ones.device.type == "mps" and (ones + 1).tolist() == [2.0, 2.0]
        with pytest.raises(TypeError, match=r"no torch\.float64"):
            ones.double()
        with pytest.raises(TypeError, match=r"no torch\.float64"):
            torch.zeros(2, dtype=torch.float64, device="mps")
        with pytest.raises(RuntimeError, match="tensors of mps and of the CPU"):
            ones + torch.ones(2)


WORDS: list[dict[str, Any]] = [
    {},
    {"model.weight_tying": True, "distributed.activation_checkpointing": "selective"},
    {"model.dropout": 0.1, "distributed.activation_checkpointing": "full"},
]


@pytest.mark.parametrize("keys", WORDS)
def test_bf16_without_fsdp_has_the_bits_of_fsdp(keys):
    def gradients(kind: type | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
        args = arguments(**{"distributed.model_dtype": "bf16", "model.n_layers": 2} | keys)
        args.distributed.resolve(exact=False)
        built, losses = app.build(args), []
        with one_process():
            mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=AXES)
            mesh.__class__ = kind or mesh.__class__
            model = parallelize_model(built.module, mesh, built.plan, args.distributed)
            assert ("Sharded" in type(model).__name__) == (kind is None)
            init_parameters(model, 1, torch.device("cpu"))
            chance = torch.Generator().manual_seed(0)
            for last in (False, True):
                tokens, *targets = torch.randint(0, 259, (2, 3, 16), generator=chance)
                noise = {"noise": torch.arange(3)} if args.noisy else {}
                set_gradient_sync(model, "last", last)
                loss = model(tokens, targets[0][None], **noise)[0]
                loss.sum().backward()
                losses.append(loss.tolist())
            grads = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        return losses, dict(enumerate(grads))

    (losses, ours), (others, fsdp) = gradients(MpsMesh), gradients(None)
    assert losses == others and len(ours) == len(fsdp) > 10
    assert all(torch.equal(ours[i], fsdp[i]) and ours[i].dtype == torch.float32 for i in fsdp)


@pytest.mark.parametrize("admitted", [True, False])
def test_an_update_divides_and_is_suppressed_though_the_kernel_of_mps_ignores_both(admitted):
    def updated(device: str) -> dict[str, list[float]]:
        """State by name after a plain update, and one that is not finite or not `admitted`."""
        place = OnMps if device == "mps" else torch.Tensor.clone
        model = torch.nn.ParameterDict({"a": torch.linspace(0, 1, 6).view(2, 3)})
        model["a"] = p = torch.nn.Parameter(place(model["a"].detach()))
        optimizer = make_optimizer(app, model, arguments(device=device), None)
        for grad, admit in ((1.0, True), (3.0 if admitted else float("nan"), admitted)):
            p.grad = place(torch.full(p.shape, grad))
            update(optimizer, 1e-2, place(torch.tensor(admit)), place(torch.tensor(2.0)))
        state = {"a": p} | optimizer.state_of(p)
        return {name: t.detach().flatten().tolist() for name, t in state.items()}

    reference = updated("cpu")
    with fake_mps():
        ours = updated("mps")
    assert ours.keys() == reference.keys() == {"a", "exp_avg", "exp_avg_sq", "step"}
    for name, values in ours.items():
        assert values == pytest.approx(reference[name], rel=1e-6), name
    assert ours["step"] == [2.0 if admitted else 1.0]


def test_the_kernel_would_ignore_both():
    """A control: with the optimizer of other devices, on mps the same update differs."""
    with fake_mps():
        p = torch.nn.Parameter(OnMps(torch.ones(4)))
        model = torch.nn.ParameterDict({"p": p})
        optimizer = build_optimizer(model, arguments().optim)
        p.grad = OnMps(torch.ones(4))
        update(optimizer, 1e-2, OnMps(torch.tensor(False)), OnMps(torch.tensor(1.0)))
        assert p.tolist() != [1.0] * 4


def test_what_is_not_for_mps_is_refused_together():
    keys = {"distributed.compile": True, "optim.name": "muon", "deterministic": "mesh"}
    error = refused(lambda: arguments(device="mps", **keys))
    assert error.count("is not for device = mps") == len(keys)


def test_mps_needs_its_gpu_and_one_process(monkeypatch):
    assert pick_device("mps", Launch()) == MPS
    with one_process():
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=AXES)
        assert "torch finds no GPU of Apple" in refused(lambda: adopt(mesh))
        monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
        adopt(mesh)
        assert mesh.device_type == "mps" and mesh["tp"].size() == 1
    monkeypatch.setattr(type(mesh), "size", lambda self: 2)
    assert "device = mps: is for one process, and here are 2" in refused(lambda: adopt(mesh))


def test_auto_does_not_choose_mps(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto", Launch()) == torch.device("cpu")


def test_a_build_of_torch_for_amd_takes_no_kernels_of_nvidia(monkeypatch):
    def choose(masked: bool) -> str:
        return choose_attention("auto", 64, torch.device("cuda"), torch.bfloat16, masked)[0]

    assert (choose(False), choose(True)) == ("sdpa", "varlen")
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert (choose(False), choose(True)) == ("sdpa", "flex_attention")
    args = arguments(**{"model.dim": 32, "model.head_dim": 16, "model.ffn_dim_multiplier": 1.0,
                        "model.multiple_of": 16, "model.n_kv_heads": 4})  # fmt: skip
    built = app.build(args)
    check = partial(check_float8, built.module, built.plan, (1, 1, 1), 16, 1, "cuda")
    refused(check, "distributed.float8 = tensorwise: is for GPUs of NVIDIA, and CPUs")
