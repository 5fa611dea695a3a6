"""What every tokenizer offers, and which one a run has: the keys of `data.tokenizer`."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lingua.base.errors import UserError
from lingua.base.urls import local_copy
from lingua.config.schema import Guarded

if TYPE_CHECKING:  # --help, which lists the keys of TokenizerArgs, needs no numpy
    import numpy as np

FILE_KINDS = {
    "sp": "a sentencepiece .model file",
    "tiktoken": "a file of tiktoken ranks",
    "hf": "a tokenizer.json of the Hugging Face tokenizers library, or its folder",
}


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
            for key in ("bos", "eos"):
                if getattr(self, key) is not None:
                    yield key, f"must be null: the {self.name} tokenizer has a token for it"
        if self.name == "bytes":
            return
        if not self.path:
            yield "path", f"must be given for the tokenizer {self.name}: {FILE_KINDS[self.name]}"
        else:
            try:
                if not os.path.isfile(self.file):
                    yield "path", f"must be {FILE_KINDS[self.name]}; {self.file} is not a file"
            except UserError as error:  # of a URL
                yield "path", str(error)

    @property
    def file(self) -> Path:
        """The tokenizer's file, also where `path` is the folder that has it."""
        path = local_copy(self.path or "", alone=True)
        return path / "tokenizer.json" if self.name == "hf" and os.path.isdir(path) else path

    def wrong_value(self, need: str, key: str = "path") -> UserError:
        value = json.dumps(getattr(self, key), ensure_ascii=False)
        return UserError(f"data.tokenizer.{key} = {value}: {need}")


@dataclass(frozen=True)
class Tokenizer:
    """Arrays of ids are uint16 where the vocabulary fits, else uint32 (`dtype`)."""

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    content: bytes = field(repr=False)  # everything the ids of a text depend on
    library: Any = field(repr=False)  # the library's tokenizer, None for bytes
    # ids of each text, without bos and eos
    encode_texts: Callable[[Sequence[str]], Iterable[Any]] = field(repr=False)
    decode_ids: Callable[[list[int]], str] = field(repr=False)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # usual names of bos and eos
    more_ends: tuple[int, ...] = ()  # tokens beside eos that end a text which the model generates

    @property
    def dtype(self) -> "np.dtype":
        import numpy as np

        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> "np.ndarray":
        """Ids of the text, `dtype` [n].

        Raises:
            UserError: bos or eos is asked for, and the tokenizer has none.
            UnicodeEncodeError: the text has a lone surrogate, which is no character.
        """
        import numpy as np

        parts = self.encode_batch([text])
        if bos:
            parts.insert(0, np.array([self._special("bos", self.bos_id)], self.dtype))
        if eos:
            parts.append(np.array([self._special("eos", self.eos_id)], self.dtype))
        return np.concatenate(parts)

    def encode_batch(self, texts: Sequence[str]) -> "list[np.ndarray]":
        """Ids of each text, without bos and eos, by one call of the library. Raises UserError where
        the library fails."""
        import numpy as np

        try:
            return [np.asarray(ids, self.dtype) for ids in self.encode_texts(texts)]
        except BaseException as error:
            if not is_library_error(error):
                raise
            for text in texts:
                text.encode("utf-8")  # each library fails in its own way at a lone surrogate
            need = f"its library fails at a text: {error}"
            raise UserError(f"data.tokenizer.name = {self.name}: {need}") from error

    def decode(self, ids: "Sequence[int] | np.ndarray") -> str:
        """The text. Special tokens are left out, and bytes that are not UTF-8 become U+FFFD. An id
        outside the vocabulary is an IndexError."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise IndexError(f"token {i} is outside the vocabulary of {self.vocab_size}")
        return self.decode_ids(ids)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text which the model generates."""
        return [*([] if self.eos_id is None else [self.eos_id]), *self.more_ends]

    def fingerprint(self) -> str:
        """Equal for tokenizers that give every text the same ids, on every machine."""
        head = json.dumps([self.name, self.vocab_size, self.bos_id, self.eos_id]).encode()
        return hashlib.sha256(head + b"\0" + self.content).hexdigest()

    def _special(self, key: str, token: int | None) -> int:
        if token is not None:
            return token
        names = ", ".join(self.names.get(key, ()))
        raise UserError(
            f"data.add_{key} = true: the {self.name} tokenizer has no {key} token"
            f"{f' (looked for {names})' if names else ''}; name one in data.tokenizer.{key}, "
            f"or set data.add_{key}=false"
        )


def is_library_error(error: BaseException) -> bool:
    """Whether a library may have raised it: any type, and no Exception where Rust panics."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
