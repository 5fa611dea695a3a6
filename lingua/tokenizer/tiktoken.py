"""Tokenizers of ranks, by the library tiktoken; special tokens as in Llama 3."""

import base64
import binascii
import re
from functools import partial
from itertools import pairwise

import numpy as np

from lingua.base.files import read_bytes
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import import_library, library_errors, wrong_file

# How Llama 3 splits text before merging: contractions, words with the character before them, up to
# three digits, punctuation, line ends; then spaces.
_WITHOUT_LOOK_AHEAD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
)
_SPACES = r"\s+(?!\S)|\s+"
SPLIT = f"{_WITHOUT_LOOK_AHEAD}|{_SPACES}"
# The same expression: tiktoken's regex engine gives a group without look-ahead as a whole to a
# faster engine; ungrouped, it tries every alternative by itself.
_SPLIT_FAST = f"(?:{_WITHOUT_LOOK_AHEAD})|{_SPACES}"
# An expression must match all of it.
SAMPLE = "It's  12,345 caf\u00e9s\t(\u4e2d\u6587) \u0645\n\n  x_y = 'A'; \U0001f600\r\n"
N_SPECIAL = 256  # bos, eos and 254 reserved ids after the ranks, as in Llama 3
# In a run of some hundred thousand spaces the library's regex engine fails ("Max stack size
# exceeded"). A text is cut only inside such a run, so all others get exactly the library's tokens.
MAX_SPACES = 100_000
_LONG_SPACES = re.compile(rf"\s{{{MAX_SPACES}}}")


def build_tiktoken(args: TokenizerArgs, content: bytes) -> Tokenizer:
    ranks = _read_ranks(args, content)
    n_ranks = len(ranks)
    # a file of the same name with the suffix .pattern replaces Llama 3's expression
    file = args.file.with_suffix(".pattern")
    with library_errors(lambda why: args.wrong_value(f"{file} has a wrong pattern: {why}")):
        pattern = read_bytes(file).decode().rstrip("\r\n") if file.is_file() else SPLIT
        encoding = import_library(args, "tiktoken").Encoding(
            "lingua",
            pat_str=_SPLIT_FAST if pattern == SPLIT else pattern,
            mergeable_ranks=ranks,
            # Without any special token the library looks for one at every character. This one is
            # never allowed in a text.
            special_tokens={"<|begin_of_text|>": n_ranks},
        )

    def encode(text: str) -> np.ndarray:
        long_spaces = _LONG_SPACES.finditer(text) if len(text) >= MAX_SPACES else ()
        cuts = [0, *(m.end() for m in long_spaces), len(text)]
        parts = (text[a:b] for a, b in pairwise(cuts))
        return np.concatenate([encoding.encode_to_numpy(p, disallowed_special=()) for p in parts])

    def decode(ids: list[int]) -> str:
        return encoding.decode([i for i in ids if i < n_ranks], errors="replace")

    with library_errors(lambda why: args.wrong_value(f"{file} has a wrong pattern: {why}")):
        again = decode(encode(SAMPLE).tolist())
    if again != SAMPLE:
        need = f"must match every character of a text; {SAMPLE!r} becomes {again!r}"
        raise args.wrong_value(f"{file}: {need}")
    size, bos_id, eos_id = n_ranks + N_SPECIAL, n_ranks, n_ranks + 1
    content, encode_texts = content + pattern.encode(), partial(map, encode)
    return Tokenizer("tiktoken", size, bos_id, eos_id, content, encoding, encode_texts, decode)


def _read_ranks(args: TokenizerArgs, content: bytes) -> dict[bytes, int]:
    """{token: rank} from a line `base64-token rank` for each. tiktoken's own reader would keep a
    copy of the file under its path, and read that copy where the file has changed."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            reason = f': line {number} is not "<token in base64> <rank>"'
            raise wrong_file(args, reason) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise wrong_file(args, ": its ranks are not the numbers from 0, each once")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise wrong_file(args, f": it has no token for the byte {byte:#04x}")
    return ranks
