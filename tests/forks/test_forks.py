"""Forks as a stranger writes them: each trains, is stopped, and is resumed on another topology."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from apps.bench.promise import compare, steps_of
from apps.main import train as program
from apps.main.start import check
from lingua.errors import UserError
from tests.ranks import Ranks

CLOSE = 2e-5  # of losses, relative
FORKS = Path(__file__).parent
LINES = {
    "mingru": 110,
    "optimizer": 40,
    "synthetic": 60,
    "moe": 150,
    "probe": 40,
}  # at most, after `ruff format`

SMALL: dict[str, Any] = {
    "name": "fork",
    "device": "cpu",
    "steps": 6,
    "logging.freq": 1,
    "data.seq_len": 16,
    "data.batch_size": 5,
    "data.global_batch_size": 5,
    "model.dim": 16,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.n_layers": 2,
    "model.multiple_of": 8,
    "optim.lr": 4e-3,
    "optim.warmup": 2,
    "distributed.model_dtype": "fp32",
    "validation.every": 3,
    "validation.tokens": 200,
}
# Where a run is stopped and on what it resumes: (dp_replicate, dp_shard, tp), micro-batch, end.
STARTS = (((1, 2, 1), 1, 2), ((1, 1, 2), 3, 4), ((1, 1, 1), 2, 6))


def words(fork: str, settings: dict[str, Any]) -> list[str]:
    return [
        f"app={fork}" if "." in fork else f"app=tests.forks.{fork}",
        *(f"{k}={v}" for k, v in (SMALL | settings).items()),
    ]


def train_here(argv: list[str]) -> str:
    """What the training program refuses, or nothing."""
    try:
        program.main(argv)
    except UserError as error:
        return str(error)
    return ""


def train(ranks: Ranks, fork: str, sizes: tuple[int, int, int], settings: dict[str, Any]) -> None:
    keys = ("distributed.dp_replicate", "distributed.dp_shard", "distributed.tp_size")
    argv = words(fork, settings | dict(zip(keys, sizes, strict=True)))
    refused = set(ranks.run(sizes[0] * sizes[1] * sizes[2], train_here, argv))
    assert refused == {""}, refused


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each fork reads: text, or nothing."""
    chance, folder = random.Random(1), tmp_path_factory.mktemp("forks")
    some = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 5))) for _ in range(40)]
    texts = [" ".join(chance.choices(some, k=9)) for _ in range(120)]
    (folder / "one.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    text = {"data.root_dir": folder, "data.sources": "{one: 1}", "data.workers": 0}
    prepared = ranks_prepare(folder)
    assert prepared
    # An expert is a discrete choice: where two are nearly as likely, rounding may decide.
    of_fork = {"synthetic": {}, "moe": text | {"seed": 1}}
    return dict.fromkeys(LINES, text) | of_fork


def ranks_prepare(folder: Path) -> bool:
    """Tokenize here: a rank of the pool is daemonic, and starts no processes."""
    from apps.main.config import TrainArgs
    from lingua.config.load import load
    from lingua.data.prepare.sources import prepare_sources
    from lingua.tokenizer import build_tokenizer

    argv = [f"data.root_dir={folder}", "data.sources={one: 1}", "model.n_heads=4"]
    args = load(TrainArgs, argv)[0].data
    return bool(prepare_sources(args, build_tokenizer(args.tokenizer), report=str))


@pytest.mark.parametrize("fork", LINES)
def test_a_fork_resumes_on_any_topology(
    ranks: Ranks, given: dict[str, dict[str, Any]], tmp_path: Path, fork: str
) -> None:
    never, stopped = (
        given[fork] | {"dump_dir": tmp_path / "a"},
        given[fork] | {"dump_dir": tmp_path / "b"},
    )
    train(ranks, fork, (1, 1, 1), never)
    for sizes, rows, end in STARTS:
        train(ranks, fork, sizes, stopped | {"stop_at": end, "data.batch_size": rows})
    one, other = steps_of(tmp_path / "a"), steps_of(tmp_path / "b")
    apart, equal = compare(one, other)
    assert len(equal) == 6 and all(equal) and max(apart) < CLOSE
    assert max(apart_in(fork, tmp_path / "a", tmp_path / "b")) < 1e-4
    # Another seed is another run: the comparison sees it.
    train(ranks, fork, (1, 1, 1), given[fork] | {"dump_dir": tmp_path / "c", "seed": 7})
    apart, equal = compare(one, steps_of(tmp_path / "c"))
    assert not any(equal) and max(apart) > 50 * CLOSE
    assert max(apart_in(fork, tmp_path / "a", tmp_path / "c")) > 1e-3


def apart_in(fork: str, one: Path, other: Path) -> list[float]:
    """Relative differences of what a fork writes besides losses; of a step they are in order."""

    def numbers(dump_dir: Path) -> list[float]:
        metrics = (dump_dir / "metrics.jsonl").read_text().splitlines()
        measured = dump_dir / "metrics.validation.jsonl"
        lines = [json.loads(line) for line in [*metrics, *measured.read_text().splitlines()]]
        match fork:
            case "probe":
                events = [line["norms"] for line in lines if line.get("event") == "gradients"]
                assert len(events) == 3
                return [norm for norms in events for norm in norms.values()]
            case _:
                return [line["nats_per_token"] for line in lines if "nats_per_token" in line]

    pairs = list(zip(numbers(one), numbers(other), strict=True))
    assert pairs
    return [abs(a - b) / max(abs(a), 1e-3) for a, b in pairs]


@pytest.mark.parametrize("fork", LINES)
def test_a_launcher_validates_a_fork(
    given: dict[str, dict[str, Any]], tmp_path: Path, fork: str
) -> None:
    argv = words(fork, given[fork] | {"dump_dir": tmp_path})
    assert check(argv, 2)[0].app == f"tests.forks.{fork}"
    with pytest.raises(UserError, match=r"distributed\.tp_size = 3"):
        check([*argv, "distributed.tp_size=3"], 3)


@pytest.mark.parametrize(("fork", "most"), LINES.items())
def test_a_fork_is_short(fork: str, most: int) -> None:
    text = (FORKS / f"{fork}.py").read_text()
    assert len(text.splitlines()) <= most
    assert "mock" not in text and "setattr" not in text
