"""Tokenizers behind one interface: bytes, sentencepiece, tiktoken and Hugging Face's tokenizers.

    tokenizer = build_tokenizer(TokenizerArgs(name="sp", path="tokenizer.model"))
    ids = tokenizer.encode("text", bos=True, eos=True)

Text is always text: a special token's name in it (`<s>`, `<|end_of_text|>`) is not that token.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, get_args

import numpy as np

from lingua.config.schema import Guarded
from lingua.errors import UserError, nearest

Name = Literal["bytes", "sp", "tiktoken", "hf"]

FILES = {
    "sp": "a sentencepiece .model file",
    "tiktoken": "a file of tiktoken ranks",
    "hf": "a tokenizer.json of the Hugging Face tokenizers library, or its folder",
}


@dataclass
class TokenizerArgs:
    name: Guarded[Name] = "bytes"  # bytes, sp (sentencepiece), tiktoken, hf (tokenizer.json)
    path: Guarded[str | None] = None  # the tokenizer's file; bytes needs none

    def validate(self) -> Iterator[tuple[str, str]]:
        need = _path_problem(self)
        if need is not None:
            yield "path", need


class Codec(Protocol):
    """What differs between the libraries. Ids are those of the text alone, without bos and eos."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    content: bytes  # whatever decides which ids a text gets

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Any]: ...
    def decode(self, ids: list[int]) -> str: ...
    def byte_offsets(self, text: str) -> np.ndarray: ...


class Tokenizer:
    """Arrays of ids are uint16 where the vocabulary fits, else uint32 (`dtype`)."""

    def __init__(self, name: str, codec: Codec) -> None:
        self.name = name
        self.vocab_size = codec.vocab_size
        self.bos_id = codec.bos_id
        self.eos_id = codec.eos_id
        self.dtype = np.dtype(np.uint16 if codec.vocab_size <= 2**16 else np.uint32)
        self._codec = codec

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> np.ndarray:
        """Ids of the text, `dtype` [n]. UserError where bos or eos is asked for and does not exist;
        UnicodeEncodeError on a lone surrogate, which is no character."""
        parts = self.encode_batch([text])
        if bos:
            parts.insert(0, self._special("bos", self.bos_id))
        if eos:
            parts.append(self._special("eos", self.eos_id))
        return np.concatenate(parts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without bos and eos, by one call of the library."""
        try:
            encoded = self._codec.encode_batch(texts)
            return [np.asarray(ids, dtype=self.dtype) for ids in encoded]
        except (TypeError, RuntimeError):  # what the libraries make of a lone surrogate
            for text in texts:
                text.encode("utf-8")
            raise

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; special tokens leave none, bytes that are no UTF-8 become U+FFFD. An id outside
        the vocabulary is an IndexError."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise IndexError(f"token {i} is outside the vocabulary of {self.vocab_size}")
        return self._codec.decode(ids)

    def byte_offsets(self, text: str) -> np.ndarray:
        """Where in the text's UTF-8 bytes each token of `encode(text)` starts, int64 [n].

        The first token starts at 0 and offsets never fall, so the bytes cut at them are all of the
        text. A token that holds nothing of the text (sentencepiece's leading space) is empty; a
        token that begins inside a character starts at the right one of its bytes.
        """
        starts = np.asarray(self._codec.byte_offsets(text), dtype=np.int64)
        if len(starts):
            starts[0] = 0
            # a normalizer may give a character more bytes than it had: never past the next token
            starts = np.minimum.accumulate(starts[::-1])[::-1]
        return starts

    def fingerprint(self) -> str:
        """Equal for tokenizers that give every text the same ids, on every machine."""
        about = [self.name, self.vocab_size, self.bos_id, self.eos_id]
        head = json.dumps(about).encode()
        return hashlib.sha256(head + b"\0" + self._codec.content).hexdigest()

    def _special(self, what: str, token: int | None) -> np.ndarray:
        if token is None:
            raise UserError(
                f"data.add_{what} = true: the {self.name} tokenizer has no {what} token; "
                f"set data.add_{what}=false"
            )
        return np.array([token], dtype=self.dtype)


def build_tokenizer(args: TokenizerArgs) -> Tokenizer:
    """UserError when the name, the file or the library that reads it is not there or not right."""
    names = get_args(Name)
    if args.name not in names:
        raise UserError(
            f'data.tokenizer.name = "{args.name}": must be one of {", ".join(names)}'
            f"{nearest(args.name, names)}"
        )
    if args.name == "bytes":
        return Tokenizer("bytes", _Bytes())
    need = _path_problem(args)
    if need is not None:
        raise UserError(_about_path(args, need))
    codec = {"sp": _SentencePiece, "tiktoken": _Tiktoken, "hf": _HuggingFace}[args.name]
    return Tokenizer(args.name, codec(args))


class _Bytes:
    """Ids 0 to 255 are the UTF-8 bytes, then bos and eos."""

    vocab_size, bos_id, eos_id = 258, 256, 257
    content = b""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def byte_offsets(self, text: str) -> np.ndarray:
        return np.arange(len(text.encode("utf-8")))


class _SentencePiece:
    def __init__(self, args: TokenizerArgs) -> None:
        library = _library("sentencepiece", args)
        self.content = _read(args)
        try:
            self.model = library.SentencePieceProcessor()
            self.model.load_from_serialized_proto(self.content)
        except (RuntimeError, ValueError):
            raise _not_a_tokenizer(args) from None
        self.vocab_size = self.model.vocab_size()
        self.bos_id = self.model.bos_id() if self.model.bos_id() >= 0 else None
        self.eos_id = self.model.eos_id() if self.model.eos_id() >= 0 else None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # one thread: who encodes much text runs one tokenizer in each of several processes
        return self.model.encode(list(texts), return_type="numpy", num_threads=1)

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids)

    def byte_offsets(self, text: str) -> np.ndarray:
        # given bytes, the library counts in bytes
        found = self.model.encode(text.encode("utf-8"), return_type="offset_mapping")
        starts, into = [], 0
        for token, (start, end) in zip(found["ids"], found["offsets"], strict=True):
            # Of the byte tokens of one character all but the last are reported as empty.
            starts.append(start + into)
            into = into + 1 if self.model.is_byte(token) and start == end else 0
        return np.array(starts, dtype=np.int64)


# How Llama 3 cuts text before merging: contractions, words with the character before them, up to
# three digits, punctuation, line ends, spaces.
_WITHOUT_LOOK_AHEAD = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
    )
)
_SPACES = r"\s+(?!\S)|\s+"
SPLIT = f"{_WITHOUT_LOOK_AHEAD}|{_SPACES}"
# The same. What stands in a group is left as a whole to an engine that knows no look-ahead and is
# faster: one that knows it would try every alternative by itself.
_SPLIT_FAST = f"(?:{_WITHOUT_LOOK_AHEAD})|{_SPACES}"
N_SPECIAL = 256  # bos, eos and 254 reserved ids behind the ranks, as in Llama 3
# In a run of some hundred thousand spaces the library's regex engine fails ("Max stack size
# exceeded"). A text is cut only inside such a run, so all others get exactly the library's tokens.
LONGEST_SPACE = 100_000
_LONG_SPACE = re.compile(rf"\s{{{LONGEST_SPACE}}}")


class _Tiktoken:
    def __init__(self, args: TokenizerArgs) -> None:
        library = _library("tiktoken", args)
        pattern = _pattern(args)
        self.content = _read(args) + pattern.encode()
        ranks = _read_ranks(args)
        self.n_ranks = len(ranks)
        self.vocab_size = self.n_ranks + N_SPECIAL
        self.bos_id, self.eos_id = self.n_ranks, self.n_ranks + 1
        # With no special token at all the library looks for one at every character. This one is
        # never allowed in a text, where its name is text.
        special = {"<|begin_of_text|>": self.bos_id}
        try:
            self.encoding = library.Encoding(
                "lingua",
                pat_str=_SPLIT_FAST if pattern == SPLIT else pattern,
                mergeable_ranks=ranks,
                special_tokens=special,
            )
        except ValueError as e:
            raise UserError(_about_path(args, f"the pattern beside it is wrong: {e}")) from None

    @cached_property
    def lengths(self) -> np.ndarray:
        """Bytes of each rank's token."""
        tokens = (self.encoding.decode_single_token_bytes(i) for i in range(self.n_ranks))
        return np.fromiter(map(len, tokens), dtype=np.int64, count=self.n_ranks)

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return map(self._encode, texts)

    def _encode(self, text: str) -> np.ndarray:
        if len(text) < LONGEST_SPACE:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        cuts = [0, *(m.end() for m in _LONG_SPACE.finditer(text)), len(text)]
        parts = [text[a:b] for a, b in pairwise(cuts)]
        return np.concatenate(
            [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in parts]
        )

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode([i for i in ids if i < self.n_ranks], errors="replace")

    def byte_offsets(self, text: str) -> np.ndarray:
        lengths = self.lengths[self._encode(text)]
        return np.cumsum(lengths) - lengths


def _pattern(args: TokenizerArgs) -> str:
    """How text is cut before merging: Llama 3's way, unless a file .pattern beside the ranks, named
    as they are, gives another regular expression."""
    path = tokenizer_file(args).with_suffix(".pattern")
    return path.read_text(encoding="utf-8") if path.is_file() else SPLIT


def _read_ranks(args: TokenizerArgs) -> dict[bytes, int]:
    """{token: rank} of a file with a line `base64-token rank` for each."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(args).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            reason = f'line {number} is not "<token in base64> <rank>"'
            raise _not_a_tokenizer(args, reason) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _not_a_tokenizer(args, "its ranks are not the numbers from 0, each once")
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise _not_a_tokenizer(args, f"it has no token for the byte {missing[0]:#04x}")
    return ranks


# Names under which published tokenizers keep their first and last token, where no
# tokenizer_config.json beside the file says so.
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]")


class _HuggingFace:
    def __init__(self, args: TokenizerArgs) -> None:
        library = _library("tokenizers", args)
        content = _read(args)
        try:
            self.tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as e:  # the library raises no narrower type
            raise _not_a_tokenizer(args, str(e)) from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # their names in a text are text
        self.content = content
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        config = tokenizer_config(args)
        self.bos_id = _named_token(config, "bos_token", BOS_NAMES, ids)
        self.eos_id = _named_token(config, "eos_token", EOS_NAMES, ids)
        spec = json.loads(content)
        steps = spec.get("pre_tokenizer") or {}
        steps = steps.get("pretokenizers", [steps])
        self.of_bytes = any(step.get("type") == "ByteLevel" for step in steps)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Bytes of each id's token, as far as its spelling tells."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self.tokenizer.get_vocab(with_added_tokens=True).items():
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                lengths[i] = 1
            else:  # byte-level tokens are spelled with one character for each byte
                lengths[i] = len(token) if self.of_bytes else len(token.encode("utf-8"))
        for i, added in self.tokenizer.get_added_tokens_decoder().items():
            lengths[i] = len(added.content.encode("utf-8"))
        return lengths

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [e.ids for e in encoded]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def byte_offsets(self, text: str) -> np.ndarray:
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        chars = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (chars >= 0x80) + (chars >= 0x800) + (chars >= 0x10000)
        char_start = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
        lengths = self.lengths[np.asarray(encoded.ids, dtype=np.int64)]
        before = np.cumsum(lengths) - lengths
        added = int(lengths.sum() - char_start[-1])
        if self.of_bytes and self.tokenizer.normalizer is None and added in (0, 1):
            return np.maximum(before - added, 0)  # `added`: a space put before the text
        # The library counts in characters. A token that begins inside the character in which the
        # one before it ended begins where that one's bytes end.
        starts, last_end = [], 0
        for i, (start, end) in enumerate(encoded.offsets):
            at = int(char_start[start])
            if i and start < last_end:
                at = min(starts[-1] + int(lengths[i - 1]), int(char_start[end]))
            starts.append(at)
            last_end = end
        return np.array(starts, dtype=np.int64)


def tokenizer_config(args: TokenizerArgs) -> dict[str, Any]:
    """The tokenizer_config.json beside the file, empty where there is none."""
    path = tokenizer_file(args).with_name("tokenizer_config.json")
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(_about_path(args, f"{path} beside it cannot be read: {e}")) from None
    return config if isinstance(config, dict) else {}


def _named_token(
    config: dict[str, Any], key: str, usual: Sequence[str], ids: dict[str, int]
) -> int | None:
    if key in config:
        token = config[key]
        return ids.get(token.get("content") if isinstance(token, dict) else token)
    return next((ids[name] for name in usual if name in ids), None)


# ---- files, libraries and what is said about them


def tokenizer_file(args: TokenizerArgs) -> Path:
    """The file, also where `path` is the folder it is in."""
    path = Path(args.path or "")
    return path / "tokenizer.json" if args.name == "hf" and path.is_dir() else path


def _path_problem(args: TokenizerArgs) -> str | None:
    """What is required of the path, None when it can be read as far as is seen from outside."""
    if args.name not in FILES:
        return None
    if not args.path:
        return f"must be given for the tokenizer {args.name}: {FILES[args.name]}"
    if not tokenizer_file(args).is_file():
        return f"must be {FILES[args.name]}; {tokenizer_file(args)} is not a file"
    return None


def _read(args: TokenizerArgs) -> bytes:
    try:
        return tokenizer_file(args).read_bytes()
    except OSError as e:
        raise UserError(_about_path(args, f"cannot be read: {e.strerror}")) from None


def _library(name: str, args: TokenizerArgs) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(
            f'data.tokenizer.name = "{args.name}": needs the Python package {name}, '
            f"which is not installed (pip install {name})"
        ) from None


def _not_a_tokenizer(args: TokenizerArgs, reason: str = "") -> UserError:
    reason = f": {reason}" if reason else ""
    return UserError(_about_path(args, f"must be {FILES[args.name]}; this file is not{reason}"))


def _about_path(args: TokenizerArgs, need: str) -> str:
    return f"data.tokenizer.path = {json.dumps(args.path, ensure_ascii=False)}: {need}"
