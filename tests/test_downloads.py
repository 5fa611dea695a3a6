"""setup/download_*.py, run for real against a server on this machine that stands in for the hub."""

import base64
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from lingua.data.args import DataArgs
from lingua.data.sources import prepare_source
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from tests.hub_server import TOKEN, Hub
from tests.programs import python
from tests.tokenizer.test_tokenizer import write_ranks, write_sentencepiece

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [f"Text {i}: Köln, 東京" for i in range(50)]
# Imported once for all processes; not the client, which reads the address of the hub.
SHARED = ("lingua.tokenizer.sentencepiece", "lingua.tokenizer.tiktoken", "asyncio", "ssl")
# Short pauses and parts; otherwise the script as it is.
RUN = """
import sys; sys.path.insert(0, 'setup')
import {script} as script
from lingua.tools.storage import fetch
fetch.PAUSES_S, fetch.PART_BYTES = (0.01, 0.01, 0.01), 2**20
script.run_program(script.main)
"""


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parts(folder: Path) -> list[Path]:
    """Files whose download has begun."""
    return list(folder.rglob("*.part"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.close()


def start(script: str, hub: Hub, home: Path, *words: str, before="", code=RUN, **env: str):
    clean = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"}
    clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [*python(SHARED), "-c", before + code.replace("{script}", script), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(command, cwd=ROOT, env=clean | env, **pipes)


def run(*words: Any, **options: str) -> subprocess.CompletedProcess[str]:
    process = start(*words, **options)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def data(hub: Hub, home: Path, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
    return run("download_prepare_hf_data", hub, home, *words, "--dir", home / "data", **options)


def tokenizer(hub: Hub, home: Path, *words: str, **options: str):
    return run("download_tokenizer", hub, home, *words, "--dir", home / "tok", **options)


def test_a_data_set_is_downloaded_through_kills_and_failures_and_is_a_source(hub, tmp_path):
    large = jsonl([text * 10**4 for text in TEXTS])  # eleven parts
    files = {"en/a.jsonl": jsonl(TEXTS), "en/b.jsonl": large, "README.md": b"# corpus"}
    hub.repos["datasets/some/corpus"] = {**files, "de/a.jsonl": b"no"}
    words = ("some/corpus", "--pattern", "en/*.jsonl", "--name", "english")
    folder = tmp_path / "data" / "english"
    hub.cut["en/b.jsonl"] = 1000
    hub.cut_from = 2**21
    hub.go_on.clear()
    process = start("download_prepare_hf_data", hub, tmp_path, *words, "--dir", folder.parent)
    # a.jsonl is there, and the third part of b.jsonl has begun.
    while not list(folder.rglob("a.jsonl")) or hub.cut:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    hub.go_on.set()

    hub.failures = 1
    hub.cut["en/b.jsonl"] = 1000
    hub.cut_from = 2**22
    done = data(hub, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "data.sources={english: 1.0}" in done.stdout and "has all 2 files" in done.stdout
    assert [p.name for p in folder.iterdir() if p.name[0] != "."] == ["en"]
    for name in ("en/a.jsonl", "en/b.jsonl"):
        assert (folder / name).read_bytes() == files[name]
    assert not parts(folder)
    asked = [(path[-7], part) for method, path, part, _ in hub.log if method == "GET" and part]
    assert [file for file, _ in asked].count("a") == 1  # not again what was there
    begun = [int(re.findall(r"\d+", part)[0]) for file, part in asked if file == "b"]
    # Nor what came before the kill: only the parts that broke off are asked for twice.
    assert sorted(begun) == sorted([*range(0, len(large), 2**20), 2**21, 2**22])

    args = DataArgs(root_dir=str(tmp_path / "data"), sources={"english": 1.0})
    source = prepare_source("english", args, build_tokenizer(args.tokenizer), print, processes=1)
    totals = [source.manifest.total(split, "documents") for split in ("train", "heldout")]
    assert sum(totals) == 2 * len(TEXTS)

    # Again: nothing is downloaded twice; a damaged file is.
    (folder / "en" / "a.jsonl").write_bytes(b"short")
    hub.log.clear()
    assert data(hub, tmp_path, *words).returncode == 0
    assert (folder / "en" / "a.jsonl").read_bytes() == files["en/a.jsonl"]
    assert not [path for method, path, *_ in hub.log if method == "GET" and "b.jsonl" in path]


def test_what_is_missing_is_one_clear_message(hub, tmp_path):
    hub.repos["datasets/some/corpus"] = {"a.jsonl": b"{}"}
    hub.repos["datasets/some/gated"] = {"a.jsonl": jsonl(TEXTS)}
    hub.gated.add("datasets/some/gated")
    hub.repos["datasets/some/quoting"] = {"a.jsonl": b"{}"}
    hub.quoting.add("datasets/some/quoting")
    some, pattern = "some/corpus", ("--pattern", "*.jsonl")
    gated, quoting = "datasets/some/gated", ["some/quoting", *pattern]
    absent = {"before": "import sys; sys.modules['huggingface_hub'] = None\n"}
    full = "import shutil; from types import SimpleNamespace as N\n"
    full = {"before": full + "shutil.disk_usage = lambda path: N(free=1)\n"}
    for words, options, named in [
        (["fineweb"], {}, "fineweb_edu, fineweb_edu_10bt"),
        ([some], {}, "--pattern"),
        ([some, *pattern, "--name", "../x"], {}, '--name "../x"'),
        ([some, "--pattern", "*.gz"], {}, "*.gz"),
        (["some/absent", *pattern], {}, "some/absent"),
        (["some/gated", *pattern], {"HF_TOKEN": "hf_of_another"}, gated),
        (quoting, {"HF_TOKEN": " hf_of_another "}, "Bearer <HF_TO"),
        ([some, *pattern], {"HF_TOKEN": "hf_of_two\nlines"}, "HF_TOKEN"),
        ([some, *pattern], absent, "pip install huggingface_hub"),
        ([some, *pattern], full, "only 1 B are free"),
    ]:
        done = data(hub, tmp_path, *words, **options)
        assert done.returncode == 2, (words, done.stderr)
        assert named in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("error:") == 1 and "hf_of" not in done.stdout + done.stderr
        assert "\x1b" not in done.stderr
    assert not (tmp_path / "data").exists()

    done = data(hub, tmp_path, "some/gated", *pattern, HF_TOKEN=f" {TOKEN}\n")
    assert done.returncode == 0 and TOKEN not in done.stdout + done.stderr, done.stderr


def test_text_of_the_hub_is_a_source_without_a_script(hub, tmp_path):
    """A pattern of data.source_files names it; what has changed on the hub is downloaded again."""
    hub.repos["datasets/some/corpus"] = {"en/a.jsonl": jsonl(TEXTS), "de/b.jsonl": b"no"}
    hub.gated.add("datasets/some/corpus")
    url, env = "hf://datasets/some/corpus/en/*.jsonl", {"LINGUA_CACHE": str(tmp_path / "cache")}
    for texts, token in ((TEXTS, TOKEN), (TEXTS[::-1], TOKEN), (TEXTS, "hf_of_another")):
        hub.repos["datasets/some/corpus"]["en/a.jsonl"] = jsonl(texts)
        done = run("", hub, tmp_path, url, code=SOURCE, HF_TOKEN=token, **env)
        if token == TOKEN:
            place = tmp_path / "cache/hf/datasets/some/corpus/en/a.jsonl"
            assert done.returncode == 0 and place.read_bytes() == jsonl(texts), done.stderr
    assert done.returncode == 2 and "hf_of" not in done.stderr
    assert "https://huggingface.co/datasets/some/corpus" in done.stderr
    refused = run("", hub, tmp_path, url.replace("/en", "/fr"), code=SOURCE, HF_TOKEN=TOKEN, **env)
    assert "no file matches" in refused.stderr, refused.stderr


SOURCE = """
import sys
from lingua.base.urls import storage
from lingua.parallel.program import run_program
def main():
    store = storage(sys.argv[1])
    store.download(store.list_remote(sys.argv[1]) or sys.exit("no file matches"))
run_program(main)
"""
FETCH = """
import resource, sys
from pathlib import Path
from lingua.base.errors import UserError
from lingua.tools.storage import fetch
fetch.PAUSES_S = (0.01, 0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))  # as a disk of that size
for repo in sys.argv[2:]:
    try:
        fetch.download_matching(f"hf://datasets/{repo}", ["*"], Path(sys.argv[1], repo))
    except UserError as error:
        print("refused", repo, ascii(str(error)))
"""
# Of files that would be written elsewhere, or that harm a terminal.
NAMES = [
    "../a",
    "a/../../b",
    "/tmp/a",
    "a\\b",
    "C:a",
    "a/D:b",
    "a//b",
    "./a",
    "a\n",
    "a\x1b[1m",
]


def test_what_cannot_succeed_is_refused_at_once_and_the_token_stays_with_the_hub(hub, tmp_path):
    other, text = Hub(), jsonl(TEXTS)
    path = "/datasets/some/{}/resolve/main/{}".format
    hub.refused |= {"forbidden": 403, "gone": 404, "wrong": 400}
    hub.sizes |= {"short": 9, "none": -1, "text": "9"}
    hub.sent |= {"cut": text[:50], "more": 2 * text}
    hub.moved[path("at-a-file", "a")] = "file:///etc/passwd"
    hub.moved[path("in-a-circle", "a")] = path("in-a-circle", "a")
    hub.moved[path("moved", "a")] = f"{other.url}/a".replace("127.0.0.1", "localhost")
    other.files["/a"] = text
    files: dict[str, tuple[str, str]] = {  # of the repository, and what the message names
        **{f"name-{i}": (name, "must be the path of a file") for i, name in enumerate(NAMES)},
        "empty": ("", "no file of hf://datasets/some/empty matches"),
        "closed": ("forbidden", "403 Forbidden"),
        "gone": ("gone", "404"),
        "wrong": ("wrong", "400"),
        "short": ("short", "not the 9 bytes that its server lists"),
        "none": ("none", "-1"),
        "text": ("text", "'9'"),
        "cut": ("cut", f"not the {len(text):,} bytes"),
        "more": ("more", f"not the {len(text):,} bytes"),
        "at-a-file": ("a", "unsupported protocol"),
        "in-a-circle": ("a", "redirects"),
        "large": ("large", "File too large"),
        "long": (300 * "x", "File name too long"),
    }  # fmt: skip
    for repo, (name, _) in files.items():
        hub.repos[f"datasets/some/{repo}"] = {name: text * (100 if name == "large" else 1)}
    hub.repos["datasets/some/moved"] = {"a": text}
    repos = [f"some/{repo}" for repo in [*files, "moved"]]
    env = {"HF_TOKEN": TOKEN}
    process = start("download_tokenizer", hub, tmp_path, tmp_path / "to", *repos, code=FETCH, **env)
    out, err = process.communicate(timeout=120)
    other.close()
    lines = [line.split(" ", 2) for line in out.splitlines() if line.startswith("refused ")]
    refused = {repo: message for _, repo, message in lines}
    assert refused.keys() == {f"some/{repo}" for repo in files} and process.returncode == 0, err
    for repo, (_, named) in files.items():
        assert named in refused[f"some/{repo}"], (repo, refused[f"some/{repo}"])
    assert "trying again" not in err
    left = [path for path in (tmp_path / "to").rglob("*") if path.is_file() and path.stat().st_size]
    (begun,) = parts(tmp_path / "to/some/large")  # which goes on where there is more space
    assert {*left} == {tmp_path / "to/some/moved/a", begun}
    assert not (tmp_path / "to/some/name-0").exists()
    assert (tmp_path / "to/some/moved/a").read_bytes() == text
    assert other.log and not any(token for *_, token in other.log)
    assert f"Bearer {TOKEN}" in {token for *_, token in hub.log}


def test_tokenizers_of_the_hub_load(hub, tmp_path):
    bpe = Path(write_sentencepiece(tmp_path / "bpe", model_type="bpe")).read_bytes()
    ranks = Path(write_ranks(tmp_path / "ranks")).read_bytes()
    hub.repos["meta-llama/Llama-2-7b"] = {"tokenizer.model": bpe, "w": b"0" * 9}
    hub.repos["meta-llama/Meta-Llama-3-8B"] = {"original/tokenizer.model": ranks}
    hub.repos["google/gemma-2-9b"] = {"tokenizer.model": bpe}
    hub.gated.update(hub.repos)
    for name in ("llama2", "llama3", "gemma"):
        done = tokenizer(hub, tmp_path, name, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        words = [word for word in done.stdout.split() if word.startswith("data.tok")]
        built = build_tokenizer(TokenizerArgs(*(word.rpartition("=")[2] for word in words)))
        assert built.decode(built.encode(TEXTS[3])) == TEXTS[3]
        assert f"{built.vocab_size:,} tokens" in done.stdout
    assert not list(tmp_path.rglob("w"))
    refused = tokenizer(hub, tmp_path / "other", "gemma")
    assert refused.returncode == 2
    assert "https://huggingface.co/google/gemma-2-9b" in refused.stderr
    assert "HF_TOKEN is not set" in refused.stderr

    hub.repos["google/gemma-2-9b"] = {"tokenizer.model": b"something else"}
    wrong = tokenizer(hub, tmp_path / "other", "gemma", HF_TOKEN=TOKEN)
    assert wrong.returncode == 2 and "must be a sentencepiece .model file" in wrong.stderr


PLUGIN = """
from tiktoken.load import load_tiktoken_bpe
ranks = lambda: load_tiktoken_bpe("{address}", "{digest}")
tiny = lambda: dict(name="tiny", pat_str=r"{pattern}", mergeable_ranks=ranks(), special_tokens={{}})
ENCODING_CONSTRUCTORS = {{"tiny": tiny}}
"""


def test_an_encoding_of_tiktoken_keeps_its_ids(hub, tmp_path):
    """An encoding whose text is cut in another way than Llama 3's, as that of o200k_base is."""
    content = Path(write_ranks(tmp_path / "ranks")).read_bytes()
    pattern = r"\p{N}{1,4}|\p{Lu}?\p{Ll}+|\s+|[^\s\p{L}\p{N}]+|\p{L}"
    hub.files["/tiny.tiktoken"] = content
    hub.failures = 2
    plugin = tmp_path / "plugin" / "tiktoken_ext" / "tiny.py"
    plugin.parent.mkdir(parents=True)
    address, digest = f"{hub.url}/tiny.tiktoken", hashlib.sha256(content).hexdigest()
    plugin.write_text(PLUGIN.format(address=address, digest=digest, pattern=pattern))
    env = {"PYTHONPATH": str(plugin.parent.parent), "TIKTOKEN_CACHE_DIR": str(tmp_path / "cache")}
    done = tokenizer(hub, tmp_path, "tiny", **env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trying again") == 2
    path = tmp_path / "tok" / "tiny.tiktoken"
    built = build_tokenizer(TokenizerArgs("tiktoken", str(path)))
    ranks = {base64.b64decode(t): int(i) for t, i in map(bytes.split, content.splitlines())}
    reference = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in ("over the fence", "aBth  x", *TEXTS[:5]):
        assert built.encode(text).tolist() == reference.encode_ordinary(text)
    path.with_suffix(".pattern").unlink()
    llama = build_tokenizer(TokenizerArgs("tiktoken", str(path)))
    assert llama.encode("over the fence").tolist() != built.encode("over the fence").tolist()
    assert llama.fingerprint() != built.fingerprint()

    hidden = "import sys; sys.modules['tiktoken'] = None\n"
    without = tokenizer(hub, tmp_path, "cl100k_base", before=hidden)
    assert without.returncode == 2 and "pip install tiktoken" in without.stderr
    unknown = tokenizer(hub, tmp_path, "cl200k_base")
    assert unknown.returncode == 2 and 'did you mean "' in unknown.stderr
