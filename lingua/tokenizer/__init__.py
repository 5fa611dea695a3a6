"""Tokenizers behind one interface: bytes, sentencepiece, tiktoken and Hugging Face's tokenizers.

    tokenizer = build_tokenizer(TokenizerArgs(name="sp", path="tokenizer.model"))
    ids = tokenizer.encode("text", bos=True, eos=True)

The name of a special token inside a text (`<s>`, `<|end_of_text|>`) is encoded as text.
"""

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lingua.config.schema import Guarded
from lingua.errors import UserError, import_optional, nearest
from lingua.files import load_json, read_bytes

FILES = {
    "sp": "a sentencepiece .model file",
    "tiktoken": "a file of tiktoken ranks",
    "hf": "a tokenizer.json of the Hugging Face tokenizers library, or its folder",
}
LARGEST_VOCABULARY = 2**24  # a model has a row for each id


@dataclass
class TokenizerArgs:
    # bytes, sp (sentencepiece), tiktoken, hf (tokenizer.json)
    name: Guarded[Literal["bytes", "sp", "tiktoken", "hf"]] = "bytes"
    path: Guarded[str | None] = None  # the tokenizer's file; bytes needs none
    # tokens of sp and hf that begin and end documents, such as <|endoftext|>; null: their own
    bos: Guarded[str | None] = None
    eos: Guarded[str | None] = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.name in ("bytes", "tiktoken"):
            for what in ("bos", "eos"):
                if getattr(self, what) is not None:
                    yield what, f"must be null: the {self.name} tokenizer has a token for it"
        if self.name == "bytes":
            return
        if not self.path:
            yield "path", f"must be given for the tokenizer {self.name}: {FILES[self.name]}"
        elif not os.path.isfile(file := tokenizer_file(self)):
            yield "path", f"must be {FILES[self.name]}; {file} is not a file"


@dataclass(frozen=True)
class Tokenizer:
    """Arrays of ids are uint16 where the vocabulary fits, else uint32 (`dtype`)."""

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    content: bytes  # what determines the ids of a text
    library: Any  # the object of the library, None for bytes
    encode_texts: Callable[[Sequence[str]], Iterable[Any]]  # ids of each, without bos and eos
    decode_ids: Callable[[list[int]], str]
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # that bos and eos may have

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> np.ndarray:
        """Ids of the text, `dtype` [n].

        Raises:
            UserError: bos or eos is asked for, and the tokenizer has none.
            UnicodeEncodeError: the text has a lone surrogate, which is no character.
        """
        parts = self.encode_batch([text])
        if bos:
            parts.insert(0, self._special("bos", self.bos_id))
        if eos:
            parts.append(self._special("eos", self.eos_id))
        return np.concatenate(parts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without bos and eos, by one call of the library. Raises UserError where
        the library fails."""
        try:
            return [np.asarray(ids, self.dtype) for ids in self.encode_texts(texts)]
        except BaseException as error:
            # The libraries raise any type, also one that is no Exception where Rust panics.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            for text in texts:
                text.encode("utf-8")  # each library fails in its own way at a lone surrogate
            need = f"its library fails at a text: {error}"
            raise UserError(f"data.tokenizer.name = {self.name}: {need}") from error

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text. Special tokens are left out, and bytes that are not UTF-8 become U+FFFD. An id
        outside the vocabulary is an IndexError."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise IndexError(f"token {i} is outside the vocabulary of {self.vocab_size}")
        return self.decode_ids(ids)

    def fingerprint(self) -> str:
        """Equal for tokenizers that give every text the same ids, on every machine."""
        head = json.dumps([self.name, self.vocab_size, self.bos_id, self.eos_id]).encode()
        return hashlib.sha256(head + b"\0" + self.content).hexdigest()

    def _special(self, what: str, token: int | None) -> np.ndarray:
        if token is None:
            names = ", ".join(self.names.get(what, ()))
            raise UserError(
                f"data.add_{what} = true: the {self.name} tokenizer has no {what} token"
                f"{f' (looked for {names})' if names else ''}; name one in data.tokenizer.{what}, "
                f"or set data.add_{what}=false"
            )
        return np.array([token], dtype=self.dtype)


def build_tokenizer(args: TokenizerArgs) -> Tokenizer:
    """UserError when the file, or the library that reads it, is missing or wrong."""
    for key, need in args.validate():
        raise _error(args, need, key)
    if args.name == "bytes":
        return _bytes()
    try:
        content = read_bytes(tokenizer_file(args))
    except OSError as e:
        raise _error(args, f"cannot be read: {e.strerror or e}") from None
    build = {"sp": _sentencepiece, "tiktoken": _tiktoken, "hf": _hugging_face}[args.name]
    tokenizer = build(args, content)
    if not 0 < tokenizer.vocab_size <= LARGEST_VOCABULARY:
        need = f"must have ids below {LARGEST_VOCABULARY:,}; its largest is "
        raise _error(args, f"{need}{tokenizer.vocab_size - 1:,}")
    return tokenizer


def _bytes() -> Tokenizer:
    """Ids 0 to 255 are the UTF-8 bytes, then bos and eos."""

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    return Tokenizer("bytes", 258, 256, 257, b"", None, encode, decode)


def _sentencepiece(args: TokenizerArgs, content: bytes) -> Tokenizer:
    model = _library("sentencepiece", args).SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(content)
        size = model.vocab_size()
        ids = {piece: i for i, piece in enumerate(model.id_to_piece(list(range(size))))}
    except (RuntimeError, ValueError):  # pieces that are not UTF-8 among them
        raise _wrong_file(args) from None
    own = {"bos": model.bos_id(), "eos": model.eos_id()}  # -1: it has none
    names = {what: [model.id_to_piece(i)] if i >= 0 else [] for what, i in own.items()}
    bos_id, eos_id = _special_ids(args, names, ids)

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        # one thread: preparing data runs a tokenizer in each of several processes
        return model.encode(list(texts), return_type="numpy", num_threads=1)

    return Tokenizer("sp", size, bos_id, eos_id, content, model, encode, model.decode)


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
N_SPECIAL = 256  # bos, eos and 254 reserved ids after the ranks, as in Llama 3
# In a run of some hundred thousand spaces the library's regex engine fails ("Max stack size
# exceeded"). A text is cut only inside such a run, so all others get exactly the library's tokens.
LONGEST_SPACE = 100_000
_LONG_SPACE = re.compile(rf"\s{{{LONGEST_SPACE}}}")


def _tiktoken(args: TokenizerArgs, content: bytes) -> Tokenizer:
    ranks = _read_ranks(args, content)
    n_ranks = len(ranks)
    # a file of the same name with the suffix .pattern replaces Llama 3's expression
    file = tokenizer_file(args).with_suffix(".pattern")
    try:
        pattern = read_bytes(file).decode() if file.is_file() else SPLIT
        encoding = _library("tiktoken", args).Encoding(
            "lingua",
            pat_str=_SPLIT_FAST if pattern == SPLIT else pattern,
            mergeable_ranks=ranks,
            # Without any special token the library looks for one at every character. This one is
            # never allowed in a text.
            special_tokens={"<|begin_of_text|>": n_ranks},
        )
    except (OSError, ValueError) as e:
        raise _error(args, f"{file} has a wrong pattern: {e}") from None

    def encode(text: str) -> np.ndarray:
        long_spaces = _LONG_SPACE.finditer(text) if len(text) >= LONGEST_SPACE else ()
        cuts = [0, *(m.end() for m in long_spaces), len(text)]
        parts = (text[a:b] for a, b in pairwise(cuts))
        return np.concatenate([encoding.encode_to_numpy(p, disallowed_special=()) for p in parts])

    def decode(ids: list[int]) -> str:
        return encoding.decode([i for i in ids if i < n_ranks], errors="replace")

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
            raise _wrong_file(args, reason) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _wrong_file(args, ": its ranks are not the numbers from 0, each once")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise _wrong_file(args, f": it has no token for the byte {byte:#04x}")
    return ranks


# The usual names of the first and last token, for a tokenizer without tokenizer_config.json.
BOS_NAMES: Sequence[str] = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
EOS_NAMES: Sequence[str] = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]")


def _hugging_face(args: TokenizerArgs, content: bytes) -> Tokenizer:
    library = _library("tokenizers", args)
    try:
        _check_prefix(content)
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as e:  # the library raises no narrower type
        raise _wrong_file(args, f": {e}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # their names in a text are text
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    config = tokenizer_config(args)
    names = {"bos": BOS_NAMES, "eos": EOS_NAMES}
    for what in names:
        if (key := f"{what}_token") in config:
            token = config[key].get("content") if isinstance(config[key], dict) else config[key]
            if not isinstance(token, str | None):
                where = tokenizer_file(args).with_name("tokenizer_config.json")
                raise _error(args, f"{where} beside it has a {key} that is not text")
            names[what] = [] if token is None else [token]
    bos_id, eos_id = _special_ids(args, names, ids)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [e.ids for e in encoded]

    decode = tokenizer.decode  # without special tokens
    return Tokenizer("hf", size, bos_id, eos_id, content, tokenizer, encode, decode, names)


def _check_prefix(content: bytes) -> None:
    """Raise ValueError where a merge's second token lacks the prefix that the file names. The
    library cuts that many bytes off it: within a character, this aborts the process."""
    if not re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', content):
        return
    model = json.loads(content)["model"]
    for merge in model["merges"]:
        second = merge.rpartition(" ")[2] if isinstance(merge, str) else merge[1]
        if not second.startswith(model["continuing_subword_prefix"]):
            raise ValueError(f"the merge {merge} lacks its continuing_subword_prefix")


def tokenizer_config(args: TokenizerArgs) -> dict[str, Any]:
    """The tokenizer_config.json beside the file, empty where there is none."""
    path = tokenizer_file(args).with_name("tokenizer_config.json")
    if not path.is_file():
        return {}
    try:
        return load_json(path)
    except (OSError, ValueError) as e:
        raise _error(args, f"{path} beside it cannot be read: {e}") from None


def _special_ids(
    args: TokenizerArgs, names: Mapping[str, Sequence[str]], ids: Mapping[str, int]
) -> Iterator[int | None]:
    """The ids of bos and eos: the tokens that `args` names, or else the first of `names` that
    exist."""
    for what, own in names.items():
        name = getattr(args, what)
        if name is not None and name not in ids:
            hint = nearest(name, [token for token in ids if token[:1] in ("<", "[")])
            raise _error(args, f"must be a token of {args.path}{hint}", what)
        wanted = own if name is None else [name]
        yield next((ids[token] for token in wanted if token in ids), None)


# ---- files, libraries and errors


def tokenizer_file(args: TokenizerArgs) -> Path:
    """The file, also where `path` is the folder that has it."""
    path = Path(args.path or "")
    return path / "tokenizer.json" if args.name == "hf" and os.path.isdir(path) else path


def _library(name: str, args: TokenizerArgs) -> Any:
    return import_optional(name, f'data.tokenizer.name = "{args.name}":')


def _wrong_file(args: TokenizerArgs, reason: str = "") -> UserError:
    return _error(args, f"must be {FILES[args.name]}; this file is not{reason}")


def _error(args: TokenizerArgs, need: str, key: str = "path") -> UserError:
    value = json.dumps(getattr(args, key), ensure_ascii=False)
    return UserError(f"data.tokenizer.{key} = {value}: {need}")
