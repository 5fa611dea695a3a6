"""apps/onefile/train.py computes the run of apps/main: the same bits on a CPU in float32, whichever
of the two begins it, and of several ranks with `deterministic: mesh`. Each equality has a control,
a copy of the file with one fault.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from apps.bench.promise import outcome
from lingua.config.load import load
from lingua.model import head
from tests.apps.onefile.conftest import COLUMNS, ONE, different, in_chunks, module, results
from tests.apps.runs import Outcome, prepare, train_here

MIXED = {"data.sources": "{one: 0.3, two: 2}", "data.batch_size": 3, "optim.clip": 0.05}
MIXED |= {"model.init_std_factor": "global_depth", "optim.scheduler": "wsd"}
MIXED |= {"optim.decay_fraction": 0.5, "steps": 6, "optim.weight_decay": 0.7}
MESH = {"deterministic": "mesh", "data.batch_size": 2}
TIED = {"model.weight_tying": True, "optim.scheduler": "linear", "deterministic": True}
CASES: dict[str, dict[str, Any]] = {
    "the small config": {},
    "constant rate": {"optim.scheduler": "constant", "model.init_std_factor": "current_depth"},
    "cosine from the first step": {"optim.warmup": 0, "optim.lr_min_ratio": 0.0, "steps": 6},
    "warmup alone": {"optim.warmup": 30, "optim.beta1": 0.8, "optim.beta2": 0.99},
    "weights divided": {"model.init_std_factor": "dim_ratio", "model.init_base_std": 0.05},
    "branches of zero": {"model.init_std_factor": "zero", "optim.weight_decay": 0.0},
    "accumulation": {"grad_acc_steps": 3, "data.batch_size": 7},
    "lines of every fourth step": {"logging.freq": 4},
    "rows one by one": {"data.batch_size": 1, "optim.epsilon": 1e-4},
    "one source of two": {"data.sources": "{one: 1, two: 0}", "seed": -(2**40)},
    "another model": {
        "model.dim": 24,
        "model.n_heads": 6,
        "model.n_kv_heads": "null",
        "model.head_dim": "null",
        "model.ffn_dim_multiplier": 1.3,
        "model.multiple_of": 16,
        "model.rope_theta": 5e5,
        "model.norm_eps": 1e-3,
        "model.n_layers": 3,
    },
    "a rare source": {"data.sources": "{one: 1e-9, two: 1}", "data.batch_size": 2},
    "squares of the rate's fall": {"optim.scheduler": "wsd", "optim.exp_factor": 2.0}
    | {"steps": 6, "optim.decay_fraction": 0.9},
    "in bfloat16 on any mesh": MESH | {"distributed.model_dtype": "bf16"},
    "steps that are skipped": {"optim.lr": 1e30, "optim.on_nonfinite": "skip", "optim.clip": 1e30},
}
WIDE = {
    "steps": 50,
    "stop_at": "null",
    "data.sources": "{one: 5, two: 2}",
    "data.seq_len": 48,
    "data.batch_size": 3,
    "data.global_batch_size": 11,
    "model.dim": 96,
    "model.n_heads": 6,
    "model.n_kv_heads": 2,
    "model.head_dim": 16,
    "model.n_layers": 3,
    "model.multiple_of": 32,
}
# Text of the file, what a faulty copy has there, and in what its run first differs.
FAULTS = {
    "another order": ('person=b"lingua rows"', 'person=b"other rows"', "batch_hash"),
    "other weights": (".init(c.seed)", ".init(c.seed + 1)", "loss"),
    "a rounded loss": ("F.linear(x, weight).float()", "F.linear(x, weight).bfloat16()", "loss"),
    "another divisor": (
        "(loss_of(tokens, targets) / n_targets)",
        "loss_of(tokens, targets)",
        "loss",
    ),
    "another rate": ("o.lr * (step + 1)", "o.lr * step", "lr"),
    "decay of every weight": ("(0.0, no_decay)", "(c.optim.weight_decay, no_decay)", "tensors"),
    "rows that are not hashed": ("hashed + rows_hash", "rows_hash", "batch_hash"),
}
DEFAULT_FAULTS = ("another order", "other weights", "a rounded loss")


def one_process(runs: Any, settings: dict[str, Any], **options: Any) -> Outcome:
    return runs.train(ONE, settings, **options)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(case, id=i) for i, case in {"mixed": MIXED, "tied": TIED}.items()]
    + [pytest.param(case, id=i, marks=pytest.mark.soak) for i, case in CASES.items()],
)
def test_losses_norms_rates_rows_and_tensors_are_equal_to_the_bit(onefile, runs, settings):
    main, file = results(one_process(runs, settings)), results(onefile.train(settings))
    assert main["lines"][-1]["step"] == 6 and different(file, main) == []


def test_a_skipped_step_is_counted_in_both(onefile, runs):
    settings = CASES["steps that are skipped"]
    assert one_process(runs, settings).column("skipped_steps")[-1] > 0


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=() if name in DEFAULT_FAULTS else pytest.mark.soak)
        for name in FAULTS
    ],
)
def test_a_fault_in_the_file_is_seen(onefile, runs, mixed, fault):
    before, after, first = FAULTS[fault]
    settings = {"optim.weight_decay": 0.5, "data.batch_size": 3}
    faulty = results(onefile.train(settings, changes=((before, after),)))
    assert first in different(faulty, mixed)
    assert fault != "other weights" or "batch_hash" not in different(faulty, mixed)


@pytest.fixture(scope="module")
def mixed(onefile):
    return results(onefile.train({"optim.weight_decay": 0.5, "data.batch_size": 3}))


@pytest.mark.parametrize("file_first", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_stop_in_one_and_a_resume_in_the_other_change_no_bit(onefile, runs, tmp_path, file_first):
    begin, end = (onefile, runs) if file_first else (runs, onefile)
    ends = {"stop_at": 2}, {"stop_at": 4}, {"stop_at": 6}
    run, programs = tmp_path / "run", (begin, end, begin)
    for program, settings in zip(programs, ends, strict=True):
        mesh = () if program is onefile else (ONE,)
        stopped = program.train(*mesh, MIXED | settings, dump_dir=run)
    alone = one_process(runs, MIXED)
    assert different(results(stopped), results(alone)) == []
    assert outcome(stopped.dump_dir)[1] == outcome(alone.dump_dir)[1]  # as lingua reads them
    assert [event["step"] for event in stopped.events if event["event"] == "start"] == [0, 2, 4]


@pytest.mark.soak
def test_moments_that_are_lost_on_a_resume_are_seen(onefile, runs, tmp_path):
    one_process(runs, MIXED | {"stop_at": 2}, dump_dir=tmp_path / "run")
    lost = ("dcp.load(tensors, ", 'dcp.load({n: t for n, t in tensors.items() if "exp" not in n}, ')
    run = onefile.train(MIXED, tmp_path / "run", changes=(lost,))
    assert "tensors" in different(results(run), results(one_process(runs, MIXED)))


@pytest.mark.soak
def test_one_process_and_four_ranks_are_the_same_run(onefile, runs, tmp_path):
    four, run = (2, 2, 1), tmp_path / "run"
    runs.train(four, MESH | {"stop_at": 3}, dump_dir=run)
    half = Outcome(run, []).copy(tmp_path / "copy").dump_dir
    ranks = results(runs.train(four, MESH, dump_dir=run))
    assert different(results(onefile.train(MESH)), ranks) == []
    assert different(results(onefile.train(MESH, half)), ranks) == []
    begun = onefile.train(MESH | {"stop_at": 2}).dump_dir
    assert different(results(runs.train(four, MESH, dump_dir=begun)), ranks) == []
    # Sums of another order are seen.
    ordered = (("+ grad.double(), None", "+ grad, None"),)
    assert "tensors" in different(results(onefile.train(MESH, changes=ordered)), ranks)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
def test_chunks_of_the_loss_are_those_of_apps_main(onefile, runs, tmp_path, dtype):
    assert module().CHUNK_BYTES == head.CHUNK_BYTES
    n_bytes = 4 * 259 * 40  # of the 3 * 16 targets of a micro-batch 40 at a time
    size = head.CHUNK_BYTES.bit_length() - 1
    chunked = ((f"CHUNK_BYTES = 1 << {size}", f"CHUNK_BYTES = {n_bytes}"),)
    settings = MIXED | {"distributed.model_dtype": dtype}
    config = runs.config(ONE, settings | {"dump_dir": tmp_path / "main"})
    answers = runs.ranks.run(1, in_chunks, n_bytes, train_here, config)
    main = results(Outcome(tmp_path / "main", answers))
    assert different(results(onefile.train(settings, changes=chunked)), main) == []
    assert different(results(onefile.train(settings)), main)


def test_in_bfloat16_losses_are_within_a_thousandth(onefile, runs):
    settings = MIXED | {"distributed.model_dtype": "bf16"}
    main, file = one_process(runs, settings), onefile.train(settings)
    assert main.column("batch_hash") == file.column("batch_hash")
    assert file.column("loss") == pytest.approx(main.column("loss"), rel=1e-3)
    other = onefile.train(settings, changes=((".init(c.seed)", ".init(c.seed + 1)"),))
    assert other.column("loss") != pytest.approx(main.column("loss"), rel=1e-3)
    in_float = one_process(runs, settings | {"distributed.model_dtype": "fp32"})
    assert in_float.column("loss") != file.column("loss")


@pytest.mark.parametrize("every", [3, pytest.param(0, marks=pytest.mark.soak)])
def test_the_held_out_loss_is_that_of_apps_main(onefile, runs, every):
    settings = {"steps": 6, "stop_at": "null", "validation.every": every, "validation.bytes": 5000}
    settings["validation.tokens"] = "null"
    main, file = one_process(runs, settings), onefile.train(settings)
    keys = ["step", "source", "nats_per_token", "nats_per_byte", "bits_per_byte"]
    keys += ["tokens", "bytes", "text"]
    measured = [[line[key] for key in keys] for line in file.held_out]
    expected = [[line[key] for key in keys] for line in main.held_out]
    assert len(expected) == (4 if every else 2)
    for found, line in zip(measured, expected, strict=True):
        assert found[:2] + found[5:] == line[:2] + line[5:]
        assert found[2:5] == pytest.approx(line[2:5], rel=1e-6)
    last = main.held_out[-2:]
    nats = sum(line["nats_per_byte"] * line["bytes"] for line in last)
    words = file.ranks[0]["printed"].splitlines()[-1].split()
    assert [words[0], words[2]] == ["held-out", "nats/byte"]
    assert float(words[1]) == pytest.approx(nats / sum(line["bytes"] for line in last), abs=5.1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("marks", [(False, True), (True, False), (False, False)])
def test_documents_may_have_no_marks(onefile, runs, tmp_path, marks):
    settings = {"data.root_dir": shutil.copytree(runs.text, tmp_path / "text")}
    settings |= {"data.add_bos": marks[0], "data.add_eos": marks[1], "validation.every": 6}
    main, file = one_process(runs, prepare(settings)), onefile.train(settings)
    assert different(results(file), results(main)) == []
    keys = ("source", "tokens", "bytes", "text")
    measured, expected = ([[r[k] for k in keys] for r in run.held_out] for run in (file, main))
    assert measured == expected != []


def small_config(folder: Path, text: Path, settings: dict[str, Any]) -> list[str]:
    """The words for apps/main/configs/small.yaml on other text."""
    values = {"data.root_dir": text, "data.sources": "{one: 1}", "device": "cpu"} | settings
    words = [f"{key}={value}" for key, value in values.items()]
    return ["config=apps/main/configs/small.yaml", f"dump_dir={folder}", *words]


def train_words(words: list[str]) -> dict[str, Any]:
    from apps.main import app
    from apps.main.train import train
    from lingua.base.errors import UserError

    try:
        train(app, load(app.config, words)[0])
    except UserError as error:
        return {"error": str(error)}
    return {"error": None}


@pytest.mark.soak
def test_a_hundred_steps_of_the_small_config_are_equal_to_the_bit(onefile, runs, tmp_path):
    settings = {"steps": 100, "logging.freq": 1, "optim.warmup": 20, "checkpoint.dump.every": 40}
    words = small_config(tmp_path / "main", runs.text, settings)
    main = Outcome(tmp_path / "main", runs.ranks.run(1, train_words, words))
    assert main.error is None
    config = [str(tmp_path / "main" / "config.yaml"), f"dump_dir={tmp_path / 'file'}"]
    file = onefile.start(config)
    assert len(main.lines) == 100 and different(results(file), results(main)) == []
    assert main.column("loss")[-1] < 0.7 * main.column("loss")[0]


@pytest.mark.soak
def test_fifty_steps_of_a_wider_config_are_equal_to_the_bit(onefile, runs):
    main, file = results(one_process(runs, WIDE)), results(onefile.train(WIDE))
    assert len(main["lines"]) == 50 and different(file, main) == []
    assert [
        key for key in COLUMNS if key in different(results(onefile.train(WIDE | {"seed": 1})), main)
    ]
