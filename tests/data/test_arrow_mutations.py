"""Arrow files of tokens with cuts and changed bytes: each is refused, or read as pyarrow reads a
copy of it in memory. In processes of their own, since a wrong size can end one."""

import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lingua.base.errors import UserError
from lingua.data.files import FilePart
from lingua.data.token_formats import open_file

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

N = 200  # files of each form
ROWS, BATCH = 300, 100
KINDS = {
    "stream": pa.list_(pa.int32()),
    "file": pa.list_(pa.int32()),
    "stream of large lists": pa.large_list(pa.int64()),
    "file of large lists": pa.large_list(pa.uint16()),
}
# What a size, a number of rows or an offset may be in their place.
NUMBERS = [0, -1, 1, 99, 101, 200, 10**6, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]


def write(path: Path, name: str) -> bytes:
    ids = pa.array([list(range(i % 7 + 1)) for i in range(ROWS)], KINDS[name])
    text = pa.array([f"é{i}" for i in range(ROWS)])
    table = pa.table({"n": range(ROWS), "input_ids": ids, "text": text})
    new = pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file
    with new(path, table.schema) as file:
        file.write_table(table, max_chunksize=BATCH)
    return path.read_bytes()


def mutated(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    if draw.random() < 0.15:
        return bytes(changed[: draw.randrange(len(changed))])
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, size = draw.randrange(len(changed)), draw.choice([1, 4, 8])
        at -= at % size
        value = draw.choice([1 << draw.randrange(8 * size), *NUMBERS])
        changed[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(changed)


def compare(path: Path, name: str, content: bytes, seed: int) -> str:
    path.write_bytes(mutated(content, random.Random(seed)))
    size = path.stat().st_size
    try:
        file = open_file("datasets", FilePart(path.name, str(path), size, 0, 0, size), 258, False)
    except UserError as error:
        assert str(path) in str(error)
        return "refused"
    with pa.OSFile(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()
    table.validate()
    lists = table["input_ids"].to_pylist()
    stored = np.memmap(path, file.dtype, "r", shape=(size // file.dtype.itemsize,))
    tokens = np.concatenate([stored[first : first + n] for first, n in file.pieces.tolist()])
    expected = [token % 2 ** (8 * file.dtype.itemsize) for tokens in lists for token in tokens]
    assert tokens.tolist() == expected, seed
    assert file.ends.tolist() == np.cumsum(list(map(len, lists))).tolist(), seed
    return "read"


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_arrow_file_is_refused_or_read_as_another_reader_does(tmp_path, name):
    content = write(tmp_path / "a.arrow", name)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        work = [
            process.submit(compare, tmp_path / f"{seed}.arrow", name, content, seed)
            for seed in range(N)
        ]
        seen = [future.result() for future in work]
    assert min(seen.count("read"), seen.count("refused")) > N / 10
