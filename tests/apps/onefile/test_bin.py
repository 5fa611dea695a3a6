"""Files of uint16 as nanoGPT writes them: by a config of apps/main, whose rows and bits they give,
and alone."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingua.data.stream import RowStream
from tests.apps.onefile.conftest import ONE, different, module, results
from tests.apps.runs import SMALL, prepare
from tests.data.prepared import EOS
from tests.data.token_writers import write_llmc, write_plain


def tokens_of(n: int, seed: int = 1, eos: int | None = EOS) -> list[np.ndarray]:
    """Documents of about 50 bytes, n tokens together, each with its end."""
    chance, documents = np.random.default_rng(seed), list[np.ndarray]()
    while n > 0:
        text = chance.integers(97, 113, min(n, int(chance.integers(2, 100))))
        text[-1] = eos if eos is not None else text[-1]
        documents.append(text)
        n -= len(text)
    return documents


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {"data.root_dir": folder, "data.sources": "{a: 1}", "validation.tokens": 5000}
    return prepare(settings | changes)


def rows_of(settings: dict[str, Any], positions: range) -> np.ndarray:
    """By the file."""
    file = module()
    words = [f"{k}={v}" for k, v in (SMALL | settings | {"dump_dir": "unused"}).items()]
    c = file.namespace(file.read_config(words))
    rows = file.Rows(c, [file.open_source(n, c, {}) for n in sorted(vars(c.data.sources))])
    return np.stack([rows.row(at) for at in positions])


def expected_rows(runs: Any, settings: dict[str, Any], positions: range) -> np.ndarray:
    from lingua.data.sources import open_sources
    from lingua.tokenizer.build import build_tokenizer
    from tests.apps.runs import arguments

    args = arguments(settings)
    sources = open_sources(args.data, build_tokenizer(args.data.tokenizer))
    stream = RowStream(sources, args.data.sources, args.data.seq_len, 2, args.seed)
    return stream.rows(np.arange(positions.start, positions.stop))


def one(folder: Path, documents: list[np.ndarray]) -> None:
    write_plain(folder / "a.bin", documents)


def several(folder: Path, documents: list[np.ndarray]) -> None:
    cut = len(documents) // 3
    (folder / "a").mkdir()
    write_plain(folder / "a" / "1.bin", documents[:cut])
    write_plain(folder / "a" / "2.bin", documents[cut:])


SHAPES = {
    "of one block": (one, tokens_of(900)),
    "of few blocks": (one, tokens_of(45_000)),
    # From 50 blocks on one is held out, which the hash of none of the first 82 asks for.
    "of sixty blocks": (one, tokens_of(61_234)),
    "of many blocks": (one, tokens_of(290_000)),
    # Block 288, which is held out, has one end of a document: the last token of the file.
    "that ends with a document's end": (
        one,
        [*tokens_of(288 * 1024 - 20), np.full(500, 98), np.array([97, EOS])],
    ),
    "whose documents have no end": (one, tokens_of(130_000, eos=None)),
    "of several": (several, tokens_of(250_000)),
}
DEFAULT_SHAPES = ("of one block", "of sixty blocks", "of several")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(name, marks=() if name in DEFAULT_SHAPES else pytest.mark.soak)
        for name in SHAPES
    ],
)
def test_rows_are_those_of_apps_main(runs, tmp_path, shape):
    writer, documents = SHAPES[shape]
    writer(tmp_path, documents)
    settings, positions = settings_of(tmp_path), range(0, 3000 if shape != "of one block" else 150)
    expected = expected_rows(runs, settings, positions)
    assert np.array_equal(rows_of(settings, positions), expected)
    assert not np.array_equal(rows_of(settings | {"seed": 1}, positions), expected)


def test_an_end_of_documents_may_have_the_number_0(tmp_path):
    for name, eos in (("usual", EOS), ("zero", 0)):
        write_plain(tmp_path / f"{name}.bin", tokens_of(200_000, eos=eos))
    usual, zero = (
        module().open_bin("a", [str(tmp_path / f"{name}.bin")], {"eos_id": eos, "vocab_size": 258})
        for name, eos in (("usual", EOS), ("zero", 0))
    )
    sizes = [[len(part) for part in source.parts] for source in (usual, zero)]
    assert sizes[0] == sizes[1] and len(usual.held_out) == len(zero.held_out) > 10


def test_the_run_is_that_of_apps_main_and_each_resumes_the_other(onefile, runs, tmp_path):
    write_plain(tmp_path / "a.bin", tokens_of(120_000))
    settings = settings_of(tmp_path) | {"steps": 6, "stop_at": "null"}
    settings |= {"validation.tokens": 300, "validation.skip": 500}  # of 2,048
    main, file = runs.train(ONE, settings), onefile.train(settings)
    assert different(results(file), results(main)) == []
    keys = ("source", "nats_per_token", "tokens")
    measured, expected = ([[r[k] for k in keys] for r in run.held_out] for run in (file, main))
    assert measured[0][::2] == expected[0][::2] and 300 <= measured[0][2] < 400
    assert measured[0][1] == pytest.approx(expected[0][1], rel=1e-6)
    half = onefile.train(settings | {"stop_at": 3}).copy(tmp_path / "half").dump_dir
    back = runs.train(ONE, settings | {"stop_at": 5}, dump_dir=half)
    again = onefile.train(settings, back.dump_dir)
    assert different(results(again), results(main)) == []


def test_files_of_another_form_and_files_that_changed_are_refused(onefile, runs, tmp_path):
    documents = tokens_of(20_000)
    for folder in (tmp_path / "llmc", tmp_path / "uint32"):
        folder.mkdir()
    write_llmc(tmp_path / "llmc" / "a.bin", documents)
    write_plain(tmp_path / "uint32" / "a.bin", documents, "u4")
    wide = {"data.source_files": "{a: {files: [a.bin], format: uint32}}"}
    for folder, changes in ((tmp_path / "llmc", {}), (tmp_path / "uint32", wide)):
        settings = settings_of(folder, **changes)
        assert "data.sources.a" in onefile.train(settings, refused=True).error
    write_plain(tmp_path / "a.bin", documents)
    settings = settings_of(tmp_path)
    write_plain(tmp_path / "a.bin", documents[:-3])
    assert "data.sources.a" in onefile.train(settings, refused=True).error


def test_a_bin_alone_is_trained_on_and_measured_in_nats_per_token(onefile, tmp_path):
    chance = random.Random(1)
    words = [chance.choices(range(200), k=5) for _ in range(9)]
    write_plain(tmp_path / "mine.bin", [np.concatenate(chance.choices(words, k=30_000))])
    small = ["model.dim=16", "model.n_layers=1", "data.seq_len=32", "data.batch_size=4"]
    small += ["steps=30", "optim.warmup=5", "logging.freq=10", "device=cpu", "validation.bytes=900"]
    command = [f"bin={tmp_path / 'mine.bin'}", *small, f"dump_dir={tmp_path / 'run'}"]
    run = onefile.start(command)
    last = run.ranks[0]["printed"].splitlines()[-1]
    assert re.fullmatch(r"held-out \d\.\d{4} nats/token", last)
    assert run.column("step") == [10, 20, 30]
    losses = run.column("loss")
    assert losses[-1] < losses[0] and float(last.split()[1]) == pytest.approx(losses[-1], rel=0.2)
    more = onefile.start([str(tmp_path / "run" / "config.yaml"), "steps=40", *command[-1:]])
    assert more.column("step") == [10, 20, 30, 40]


def test_a_bin_that_cannot_be_one_is_refused(onefile, tmp_path):
    obstacles = {"empty.bin": b"", "odd.bin": b"abc", "short.bin": b"ab" * 20}
    for name, content in obstacles.items():
        (tmp_path / name).write_bytes(content)
        words = [f"bin={tmp_path / name}", f"dump_dir={tmp_path / 'run'}", "device=cpu"]
        assert name in onefile.start(words, refused=True).error
    words = [f"bin={tmp_path / 'none.bin'}", f"dump_dir={tmp_path / 'run'}", "device=cpu"]
    assert "none.bin" in onefile.start(words, refused=True).error
    write_plain(tmp_path / "a.bin", tokens_of(20_000))
    settings = settings_of(tmp_path) | {"model.vocab_size": 256}
    error = onefile.train(settings | {"model.vocab_size": 100}, refused=True).error
    assert "model.vocab_size" in error


def test_a_source_is_not_taken_for_another_of_a_longer_name(runs, tmp_path):
    write_plain(tmp_path / "a.bin", tokens_of(20_000))
    write_plain(tmp_path / "a-b.bin", tokens_of(20_000, seed=2))
    settings = settings_of(tmp_path)
    prepare(settings | {"data.sources": "{a-b: 1}"})
    prepare(settings | {"data.add_bos": False})  # the same tokens, recorded once more
    positions = range(100)
    expected = expected_rows(runs, settings, positions)
    assert np.array_equal(rows_of(settings, positions), expected)


@pytest.mark.parametrize(
    "weights", ["{one: 2, two: 1}", "{one: 0.37, two: 3}", "{one: 1, two: 3.0e-5}"]
)
def test_rows_of_a_mixture_are_those_of_apps_main_at_any_position(runs, weights):
    settings = {"data.root_dir": runs.text, "data.sources": weights}
    for first in (0, 1000, 33_300, 10**9, 2**40):
        positions = range(first, first + 60)
        expected = expected_rows(runs, settings, positions)
        assert np.array_equal(rows_of(settings, positions), expected)
