"""Download a tokenizer, and check that it loads.

    python setup/download_tokenizer.py llama3 [--dir tokenizers]
    python setup/download_tokenizer.py o200k_base [--dir tokenizers]

Llama and Gemma are gated: ask for access on the hub, then set HF_TOKEN to a token of that account.
"""

import argparse
import base64
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it runs without an installation

from lingua.base.errors import UserError, nearest
from lingua.base.files import write_atomically
from lingua.parallel.program import run_program
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.storage.fetch import download_matching, retrying

Kind = Literal["sp", "tiktoken"]
# name -> (repository, file, data.tokenizer.name)
HUB_TOKENIZERS: dict[str, tuple[str, str, Kind]] = {
    "llama2": ("meta-llama/Llama-2-7b", "tokenizer.model", "sp"),
    "llama3": ("meta-llama/Meta-Llama-3-8B", "original/tokenizer.model", "tiktoken"),
    "gemma": ("google/gemma-2-9b", "tokenizer.model", "sp"),
}
SAMPLE = "It's 10 o'clock in Köln, 東京 is asleep 😀\n\tdef f(x): return x\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"{', '.join(HUB_TOKENIZERS)}, or an encoding of tiktoken")
    parser.add_argument("--dir", type=Path, default=Path("tokenizers"), help="folder to put it in")
    args = parser.parse_args()

    if args.name in HUB_TOKENIZERS:
        kind: Kind
        repo, file, kind = HUB_TOKENIZERS[args.name]
        download_matching(f"hf://{repo}", [file], args.dir / args.name)
        path = args.dir / args.name / file
    else:
        kind, path = "tiktoken", fetch_encoding(args.name, args.dir)
    tokenizer = build_tokenizer(TokenizerArgs(kind, str(path)))
    if tokenizer.decode(tokenizer.encode(SAMPLE)) != SAMPLE:
        raise UserError(f"{path}: loses text: {tokenizer.decode(tokenizer.encode(SAMPLE))!r}")
    print(f"{path} loads: {tokenizer.vocab_size:,} tokens")
    print(f"use it with data.tokenizer.name={kind} data.tokenizer.path={path}")


def fetch_encoding(name: str, folder: Path) -> Path:
    """Write the ranks and the pattern of one of tiktoken's encodings; returns the ranks' file."""
    try:
        import tiktoken
    except ImportError:
        raise UserError(
            f"{name}: needs the Python package tiktoken, which is not installed "
            "(pip install tiktoken)"
        ) from None
    allowed = [*HUB_TOKENIZERS, *tiktoken.list_encoding_names()]
    if name not in allowed:
        raise UserError(f'"{name}": must be one of {", ".join(allowed)}{nearest(name, allowed)}')
    get = partial(tiktoken.get_encoding, name)
    encoding = retrying(get, f"{name}: cannot be downloaded")
    # These two attributes are how tiktoken's README has an encoding extended.
    ranks, pattern = encoding._mergeable_ranks, encoding._pat_str
    path = folder / f"{name}.tiktoken"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(_lines(ranks)))
        write_atomically(path.with_suffix(".pattern"), pattern)
    except OSError as error:
        what = error.filename or folder
        raise UserError(f"{what}: cannot be written: {error.strerror}") from None
    return path


def _lines(ranks: dict[bytes, int]) -> Iterator[str]:
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        yield f"{base64.b64encode(token).decode()} {rank}\n"


if __name__ == "__main__":
    run_program(main)
