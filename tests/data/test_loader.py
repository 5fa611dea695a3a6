"""Any number of ranks, any micro-batch size, any number of threads: the same rows every step."""

import threading
import time
import traceback

import numpy as np
import pytest
import torch

from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.args import micro_steps
from lingua.data.documents import DocumentMarks
from lingua.data.loader import STEPS_AHEAD, Loader
from lingua.data.stream import RowStream
from tests.data.sources import make_source
from tests.mistakes import refused

pytestmark = pytest.mark.quick

SEQ_LEN = 8


@pytest.fixture
def sources(tmp_path):
    rng = np.random.default_rng(0)
    return {
        name: make_source(tmp_path, name, [rng.integers(0, 50000, n).astype(np.uint16)])
        for name, n in (("a", 5003), ("b", 977))
    }


def make_stream(sources, n_views=2, seed=42):
    return RowStream(sources, {"a": 3.0, "b": 1.0}, SEQ_LEN, n_views, seed)


def real_rows(step):
    """(row id, tokens, targets) of every row of a step that is not padding, in order."""
    return [
        (row_id, tuple(tokens), tuple(map(tuple, targets)))
        for micro in step
        for row_id, tokens, targets in zip(
            micro.row_ids.tolist(),
            micro.tokens.tolist(),
            micro.targets.transpose(0, 1).tolist(),
            strict=True,
        )
        if row_id >= 0
    ]


@pytest.mark.parametrize(
    "given, expected",  # G, dp_size, batch_size, and grad_acc_steps where it is set
    [
        ((8, 1, 8), (1, 8)),
        ((8, 1, 3), (3, 3)),
        ((10, 4, 2), (2, 2)),
        ((5, 8, 4), (1, 1)),
        ((9, 1, 8), (2, 5)),
        ((7, 3, 1), (3, 1)),
        ((8, 1, 8, 4), (4, 2)),
        ((9, 2, 8, 2), (2, 3)),
    ],
)
def test_micro_steps_are_as_few_and_as_equal_as_possible_or_as_set(given, expected):
    assert micro_steps(*given) == expected
    for steps in (1, 9):
        names = (f"grad_acc_steps = {steps}", "data.batch_size = 4", "global_batch_size = 8")
        refused(lambda n=steps: micro_steps(8, 1, 4, n), *names, "2 to 8")


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("dp_size, batch_size", [(1, 2), (2, 3), (3, 1), (4, 10), (13, 2)])
def test_any_topology_and_workers_give_the_same_rows(sources, workers, dp_size, batch_size):
    G, steps, start = 10, 6, 230
    stream = make_stream(sources, n_views=3)
    expected = stream.rows(np.arange(start, start + steps * G)).astype(np.int64)
    n_micro, rows = micro_steps(G, dp_size, batch_size)
    loaders = [Loader(stream, G, r, dp_size, n_micro, rows) for r in range(dp_size)]
    ranks = [loader.steps(start, workers) for loader in loaders]
    for step in range(steps):
        batches = [next(loader) for loader in ranks]
        for batch in batches:
            assert len(batch) == n_micro
            for micro in batch:
                assert micro.tokens.shape == (rows, SEQ_LEN)
                assert micro.targets.shape == (2, rows, SEQ_LEN)
                assert micro.tokens.dtype == micro.targets.dtype == torch.int64
                assert micro.row_ids.dtype == torch.int64
                padding = micro.row_ids < 0
                assert (micro.row_ids[padding] == -1).all()
                assert (micro.targets[:, padding] == IGNORE).all()
                assert ((micro.tokens[padding] >= 0) & (micro.tokens[padding] < 50000)).all()
        found = [row for batch in batches for row in real_rows(batch)]
        begin = start + step * G
        assert [row[0] for row in found] == list(range(begin, begin + G))
        for row_id, tokens, targets in found:
            row = expected[row_id - start]
            assert list(tokens) == row[:SEQ_LEN].tolist()
            for v, view in enumerate(targets, start=1):
                assert list(view) == row[v : v + SEQ_LEN].tolist()
    for loader in ranks:
        loader.close()


def test_the_tensors_of_a_step_fill_one_block(sources):
    """Of pinned memory for CUDA."""
    for marks, n in ((None, 6), (DocumentMarks(5, 6, True), 8)):
        loader = Loader(make_stream(sources, n_views=3), 7, 0, 2, 2, 2, marks=marks)
        step = next(loader.steps(0))
        tensors = [t for m in step for t in (m.row_ids, *m.inputs())]
        [block] = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values()
        filled = sum(t.nbytes for t in tensors)  # with room for as many documents as positions
        assert len(tensors) == n
        assert filled == block.nbytes() if marks is None else filled <= block.nbytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_read_reaches_the_caller_as_it_is(sources, workers, tmp_path):
    stream = make_stream(sources)
    (tmp_path / "b" / "0.train.tokens").unlink()
    loader = Loader(stream, 6, 0, 1, 1, 6).steps(0, workers)
    with pytest.raises(UserError, match=r"b/0\.train\.tokens: cannot be read") as error:
        for _ in range(10):
            next(loader)
    assert "_read" in "".join(traceback.format_tb(error.value.__traceback__))
    assert list(loader) == []  # it is closed


def test_reading_ahead_is_bounded_and_ends_with_close(sources):
    before = threading.active_count()
    stream, asked = make_stream(sources), []
    read = stream.rows
    stream.rows = lambda positions: (asked.append(int(positions.max())), read(positions))[1]
    loader = Loader(stream, 4, 0, 1, 1, 4).steps(0, workers=2)
    next(loader)
    time.sleep(0.2)
    assert len(asked) == 2 * STEPS_AHEAD
    assert max(asked) == 4 * 2 * STEPS_AHEAD - 1
    loader.close()
    assert threading.active_count() == before
