"""Random changes to the files that preparation reads: each gives tokens or an error of the project,
within seconds and bounded memory."""

import copy
import gzip
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lingua.data.shards import Source
from lingua.data.text import held_out_windows
from lingua.errors import UserError
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.data.prepared import TEXTS, Prepared, expected_tokens, make_args, train_tokens
from tests.test_tokenizer import write_byte_level, write_metaspace, write_ranks, write_sentencepiece

SECONDS = 15  # of cases of one kind
LIMIT_S = 30  # of one case
MEMORY = 6 << 30  # bytes of address space

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**400, 1.5, 1e308, "", "x", "\0", "\ud800",
    "\u202e", "../x", "/dev/zero", [], {}, [[]], {"a": 1}, ["a", 5], "[" * 50,
]  # fmt: skip


def changed_bytes(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 20])):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(6):
            case 0 if at < len(out):
                out[at] = chance.randrange(256)
            case 1:
                out[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 2:
                del out[at : at + chance.randrange(1, 200)]
            case 3:
                begin = chance.randrange(len(out) + 1)
                out[at:at] = out[begin : begin + chance.randrange(1, 200)]
            case 4:
                out[at:at] = chance.choice([b"\0", b"\xff", b"[" * 5000, b"9" * 5000, b"\n" * 99])
            case _:
                out = out[:at]
    return bytes(out)


def changed_json(chance: random.Random, data: bytes) -> bytes:
    value = json.loads(data)
    places: list[tuple[Any, Any]] = []  # container and key

    def walk(inside: Any) -> None:
        keys = inside if isinstance(inside, dict) else range(len(inside))
        for key in list(keys)[:50]:
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                walk(inside[key])

    walk(value)
    for inside, key in chance.sample(places, min(len(places), chance.choice([1, 1, 2, 4]))):
        if chance.random() < 0.75 or not isinstance(inside, dict):
            inside[key] = copy.deepcopy(chance.choice(ODD))
        else:
            inside.pop(key, None)
    return json.dumps(value).encode()


# ---- the kinds of cases, each a function that makes one


def text_files(folder: Path) -> Callable[[random.Random], None]:
    lines = b"".join(json.dumps({"n": 1, "text": text}).encode() + b"\n" for text in TEXTS[:200])
    table = pa.table({"n": list(range(200)), "text": TEXTS[:200]})
    pq.write_table(table, folder / "p", row_group_size=50)
    forms = {
        "jsonl": lines,
        "jsonl.gz": gzip.compress(lines),
        "jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True),
        "parquet": (folder / "p").read_bytes(),
        "txt": "".join(TEXTS).encode(),
        "txt.gz": gzip.compress("".join(TEXTS).encode()),
    }

    def case(chance: random.Random) -> None:
        form = chance.choice(list(forms))
        (folder / f"a.{form}").write_bytes(changed_bytes(chance, forms[form]))
        args = make_args(folder, on_bad_record=chance.choice(["stop", "skip"]))
        try:
            train_tokens(Prepared(args, unit_bytes=chance.choice([1000, 10**9])).source)
        finally:
            (folder / f"a.{form}").unlink()

    return case


def shards(folder: Path) -> Callable[[random.Random], None]:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    args, tokens = make_args(folder), expected_tokens(TEXTS)
    whole = Prepared(args, unit_bytes=20_000).source.folder.parent
    backup = shutil.copytree(whole, folder / "backup")

    def case(chance: random.Random) -> None:
        shutil.rmtree(whole)
        shutil.copytree(backup, whole)
        source = Source.open(next(whole.glob("a-*[!d]")))
        path = chance.choice([path for path in whole.glob("**/*") if path.is_file()])
        data = path.read_bytes()
        is_json = path.suffix == ".json" and chance.random() < 0.7
        path.write_bytes(changed_json(chance, data) if is_json else changed_bytes(chance, data))
        for read in (train_tokens, lambda source: held_out_windows(source, 64, 10**6)):
            with suppress(UserError):
                read(source)  # as a run that has them open
        found = train_tokens(Prepared(args, unit_bytes=20_000).source)
        assert found == tokens or path.name == "manifest.json"

    return case


def tokenizers(folder: Path) -> Callable[[random.Random], None]:
    files = [
        ("sp", write_sentencepiece(folder / "bpe.model", model_type="bpe")),
        ("tiktoken", write_ranks(folder / "ranks")),
        ("hf", write_byte_level(folder / "byte_level.json")),
        ("hf", write_metaspace(folder / "metaspace.json")),
    ]
    config = json.dumps({"bos_token": "<s>", "eos_token": {"content": "<s>"}, "x": [1]}).encode()

    def case(chance: random.Random) -> None:
        name, source = chance.choice(files)
        data = Path(source).read_bytes()
        beside = chance.random() < 0.2  # the file of names or the pattern is the odd one
        if not beside:
            is_json = name == "hf" and chance.random() < 0.8
            data = changed_json(chance, data) if is_json else changed_bytes(chance, data)
        (folder / "changed").write_bytes(data)
        odd = (
            changed_json(chance, config) if chance.random() < 0.7 else changed_bytes(chance, config)
        )
        (folder / "tokenizer_config.json").write_bytes(odd if beside else b"{}")
        pattern = changed_bytes(chance, rb"\w+|\s+|[^\w\s]+(?!\S)|.") if beside else b"."
        (folder / "changed.pattern").write_bytes(pattern)
        tokenizer = build_tokenizer(TokenizerArgs(name, str(folder / "changed")))
        for ids in tokenizer.encode_batch(["", TEXTS[0], "a\0 \u2028😀" * 500, "<s>"]):
            assert not len(ids) or ids.max() < tokenizer.vocab_size
            tokenizer.decode(ids)
        tokenizer.encode("x", bos=True, eos=True)

    return case


def fuzz(kind: str) -> None:
    """What the process of the test runs."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = Path(tempfile.mkdtemp())
    try:
        case, end, seed = globals()[kind](folder), time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            seed += 1
            signal.alarm(LIMIT_S)
            try:
                case(random.Random(seed))
            except UserError as error:
                assert str(error)
            except BaseException:
                print(f"{kind}: case {seed}", file=sys.stderr)
                raise
        signal.alarm(0)
        print(f"{seed} cases")
    finally:
        shutil.rmtree(folder)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["text_files", "shards", "tokenizers"])
def test_any_change_to_a_file_gives_tokens_or_a_named_error(kind):
    command = [sys.executable, "-c", f"from tests.data.test_fuzz import fuzz; fuzz('{kind}')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) > 20
