"""Sources, tokenizers and models that URLs name: what is downloaded, when, and when it fails."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from lingua.data.args import DataArgs, SourceFiles
from lingua.data.sources import prepare_sources
from lingua.data.token_files import open_recorded
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.storage import fetch
from lingua.tools.storage.fetch import download, fetched, list_remote
from tests.mistakes import refused
from tests.programs import wait_for
from tests.tokenizer.test_tokenizer import write_byte_level


def lines(n: int, seed: int = 0) -> bytes:
    words, draw = ["alpha", "beta", "gamma", "delta"], random.Random(seed)
    texts = [" ".join(draw.choice(words) for _ in range(20)) for _ in range(n)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def source_args(tmp_path: Path, pattern: str, **keys: str) -> DataArgs:
    files = SourceFiles(files=[pattern], **keys)
    cache = str(tmp_path / "shards")
    return DataArgs(
        root_dir=str(tmp_path), cache_dir=cache, sources={"web": 1.0}, source_files={"web": files}
    )


def bytes_read(store) -> int:
    """Requests that asked for the content of an object."""
    return sum(bool(part) for method, _, part in store.log if method == "GET")


def prepared(args: DataArgs) -> tuple[str, list[str]]:
    """The fingerprint of the source and what its preparation reports."""
    reported: list[str] = []
    source = prepare_sources(args, build_tokenizer(args.tokenizer), reported.append, 1)["web"]
    return source.fingerprint, reported


def test_text_at_a_url_is_that_text_and_is_downloaded_once(store, tmp_path):
    texts = {"a.jsonl": lines(300), "b.jsonl": lines(300, seed=1)}
    for name, text in texts.items():
        store.put(f"web/{name}", text)
        (tmp_path / "here").mkdir(exist_ok=True)
        (tmp_path / "here" / name).write_bytes(text)
    store.put("web/README.md", b"about it")
    store.put("web/.hidden/c.jsonl", lines(5))
    here, _ = prepared(source_args(tmp_path, "here/*.jsonl"))
    for pattern in ("s3://bucket/web/*.jsonl", "s3://bucket/web", "s3://bucket/web/[ab].jsonl"):
        args = source_args(tmp_path, pattern)
        assert prepared(args)[0] == here
        before = bytes_read(store)
        assert "tokenizing" not in "".join(prepared(args)[1])
        assert bytes_read(store) == before  # its listing was enough
    assert before == 2
    shutil.rmtree(tmp_path / "cache")  # of the text: the shards are what a run reads
    assert prepared(args)[0] == here
    assert bytes_read(store) == before


def test_a_changed_object_is_a_changed_source(store, tmp_path):
    store.put("web/a.jsonl", lines(300))
    args = source_args(tmp_path, "s3://bucket/web/*.jsonl")
    first, _ = prepared(args)
    other = lines(300).replace(b"alpha", b"ALPHA")  # of the same size
    store.put("web/a.jsonl", other)
    second, reported = prepared(args)
    assert second != first and "web/a.jsonl has changed" in "".join(reported)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.jsonl").write_bytes(other)
    assert second == prepared(source_args(tmp_path, "there/*.jsonl"))[0]
    store.put("web/b.jsonl", lines(10, seed=2))
    assert "web/b.jsonl was added" in "".join(prepared(args)[1])


def test_token_files_at_a_url_are_read_by_every_machine(store, tmp_path, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 256, 20_000).astype("<u2")
    store.put("tokens/a.bin", tokens.tobytes())
    args = source_args(tmp_path, "s3://bucket/tokens/*.bin", format="uint16")
    tokenizer = build_tokenizer(args.tokenizer)
    prepare_sources(args, tokenizer, print)
    (tmp_path / "cache").rename(tmp_path / "of the first machine")
    monkeypatch.setenv("LINGUA_CACHE", str(tmp_path / "of another"))
    recorded = open_recorded("web", args, tokenizer)
    assert (tmp_path / "of another/s3/bucket/tokens/a.bin").read_bytes() == tokens.tobytes()
    assert recorded.tokens(50, 100).tolist() == tokens[50:150].tolist()
    store.put("tokens/a.bin", tokens[::-1].tobytes())
    shutil.rmtree(tmp_path / "of another")
    refused(lambda: open_recorded("web", args, tokenizer), "changed while", "start again")


def test_a_download_survives_a_network_that_fails(store, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PART_BYTES", 1000)
    content = random.Random(0).randbytes(10_500)
    store.put("a.bin", content)
    files = list_remote("s3://bucket/a.bin")
    store.failures, store.cut = 2, 3
    download(files)
    assert files[0].local.read_bytes() == content
    assert store.failures == store.cut == 0
    store.put("b.bin", content)
    files = list_remote("s3://bucket/b.bin")
    store.put("b.bin", content[::-1])
    refused(lambda: download(files), "b.bin", "changed while it was downloaded")
    assert not files[0].local.exists()
    store.put("b.bin", content)
    assert fetched("s3://bucket/b.bin").read_bytes() == content
    refused(lambda: fetched("s3://bucket/c.bin"), "s3://bucket/c.bin", "no such object")
    refused(lambda: fetched("nowhere://bucket/c"), "nowhere", "Protocol not known")
    refused(lambda: fetched("s3://bucket/../c.bin"), "must be a URL without ..")


def test_a_key_of_a_store_cannot_leave_the_cache(store):
    store.put("web/", b"")  # as consoles make for a folder
    store.put("web/a.jsonl", b"{}")
    assert [file.url for file in list_remote("s3://bucket/web")] == ["s3://bucket/web/a.jsonl"]
    for i, name in enumerate(("x/../../../a", "./a", "x//a", "a\\b")):
        store.put(f"wrong{i}/{name}", b"{}")
        refused(lambda i=i: list_remote(f"s3://bucket/wrong{i}"), "must be the path of a file")


def test_a_download_that_was_killed_goes_on_where_it_ended(store, tmp_path):
    content = random.Random(0).randbytes(40 << 20)  # three parts
    store.put("big.bin", content)
    script = "from lingua.tools.storage.fetch import fetched; fetched('s3://bucket/big.bin')"
    asked: list[str] = []

    def holds(request: str) -> bool:
        asked.extend([request] * (request == "GET /bucket/big.bin"))
        return len(asked) == 3

    store.holds = holds
    job = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": "."})
    try:
        wait_for(lambda: len(asked) == 3, job)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    store.holds = lambda request: False
    store.go_on.set()
    before = len(store.log)
    assert fetched("s3://bucket/big.bin").read_bytes() == content
    parts = [part for method, _, part in store.log[before:] if method == "GET" and part]
    assert parts == [f"bytes={32 << 20}-{len(content)}"]


def test_a_tokenizer_at_a_url_is_that_tokenizer(store, tmp_path):
    write_byte_level(tmp_path / "tokenizer.json")
    store.put("tok/tokenizer.json", (tmp_path / "tokenizer.json").read_bytes())
    here, there, in_folder = (
        build_tokenizer(TokenizerArgs(name="hf", path=path))
        for path in (str(tmp_path), "s3://bucket/tok/tokenizer.json", "s3://bucket/tok")
    )
    assert here.fingerprint() == there.fingerprint() == in_folder.fingerprint()
