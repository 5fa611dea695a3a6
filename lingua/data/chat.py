"""Rows of conversations, of which only answers carry loss.

A token file of a source of conversations has, for each token, id + vocab_size * kind. Its hash, and
so the fingerprint of the rows, covers which tokens are answers; order, resume and mixture are those
of any source. Examples are never cut by a row: they were packed into rows (lingua.tools.prepare.
conversations), which do not overlap.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lingua.base.errors import UserError
from lingua.base.files import read_bytes
from lingua.data import IGNORE
from lingua.data.rows import HeldOut
from lingua.data.shards import N_KINDS, Budget, Source
from lingua.data.stream import RowStream
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import load_config

# Kinds of tokens: the first of an example or of the padding behind the examples of a row, which is
# no target; one that is read only; one of an answer, which is a target.
FIRST, CONTEXT, ANSWER = range(N_KINDS)
SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
MAX_OPEN_ROWS = 64  # rows that are packed at once

T = TypeVar("T")


class ChatRows:
    """The rows of a stream of conversations, a lingua.data.rows.Rows.

    The stream's rows are those of all views, `seq_len + n_views - 1` stored numbers each.
    """

    def __init__(self, stream: RowStream, seq_len: int, n_views: int, vocab_size: int) -> None:
        self.stream, self.vocab_size = stream, vocab_size
        self.seq_len, self.n_views = seq_len, n_views
        self._read = threading.local()

    def rows(self, positions: np.ndarray) -> np.ndarray:
        return self._parts(positions)[1]

    def is_target(self, positions: np.ndarray) -> np.ndarray:
        return self._parts(positions)[0] == ANSWER

    def documents(self, positions: np.ndarray) -> np.ndarray:
        return _index(self._parts(positions)[0])

    def _parts(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(kinds, ids). The last ones of each thread are kept: a loader asks for rows, targets and
        documents of the same positions."""
        last = getattr(self._read, "last", None)
        if last is None or not np.array_equal(last[0], positions):
            stored = self.stream.rows(positions)
            parts = np.divmod(stored, stored.dtype.type(self.vocab_size))
            self._read.last = last = (positions.copy(), parts)
        return last[1]


def _index(kinds: np.ndarray) -> np.ndarray:
    """Returns the example of its row, from 0, that each token [..., L] belongs to."""
    return (kinds == FIRST).cumsum(-1, dtype=np.int64) - 1


def pack(examples: Iterable[T], room: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """The examples, of at most `room` tokens each by their `size`, in rows of at most `room`.

    An example goes into the fullest of the open rows that has room for it. Where none has, it opens
    one; of MAX_OPEN_ROWS, the fullest is finished before.
    """
    rows: list[list[T]] = []
    free: list[int] = []
    for example in examples:
        n = size(example)
        fitting = [i for i in range(len(free)) if free[i] >= n]
        if fitting:
            chosen = min(fitting, key=free.__getitem__)
        else:
            if len(rows) == MAX_OPEN_ROWS:
                fullest = min(range(MAX_OPEN_ROWS), key=free.__getitem__)
                free.pop(fullest)
                yield rows.pop(fullest)
            chosen = len(rows)
            rows.append([])
            free.append(room)
        rows[chosen].append(example)
        free[chosen] -= n
    yield from rows


def padding(n: int, vocab_size: int) -> np.ndarray:
    """Stored numbers [n] for the end of a row: a document of token 0, without targets."""
    return np.where(np.arange(n) == 0, FIRST, CONTEXT) * vocab_size


def held_out_answers(
    source: Source, seq_len: int, budget: Budget, splits: Sequence[str] = ("heldout",)
) -> HeldOut:
    """The held-out examples of `source` until `budget` is reached, as held_out_windows
    (lingua.data.sources), in its order. Targets are the answers' tokens, bytes those of their
    text."""
    documents = source.documents_by_hash(splits, budget)
    vocab_size = source.manifest.tokenizer["vocab_size"]
    examples = []
    for i, *where, _, _ in documents.tolist():
        stored = source.document(splits[i], *where).astype(np.int64)
        kinds = stored // vocab_size
        last = np.flatnonzero(kinds == ANSWER)[-1]
        behind = np.flatnonzero(kinds[last:] == FIRST)[:1]  # padding
        examples.append(np.split(stored, last + behind)[0])
    length = seq_len + 1
    examples = [example[:length] for example in examples]
    rows = [
        np.concatenate([*row, padding(length - sum(map(len, row)), vocab_size)])
        for row in pack(examples, length, len)
    ]
    stored = np.stack(rows) if rows else np.zeros((0, length), np.int64)
    kinds, ids = np.divmod(stored, vocab_size)
    targets = np.where(kinds == ANSWER, ids, IGNORE)[:, 1:]
    return HeldOut(
        ids[:, :-1], targets, *source.text_of(documents), documents=_index(kinds)[:, :-1]
    )


# ---- the template that the shards of conversations depend on


def find_template(args: TokenizerArgs, template: str | None = None) -> tuple[str, str]:
    """(text, where it is) of the chat template in the file `template`, or else in the tokenizer's
    folder: its chat_template.jinja, or the key chat_template of its tokenizer_config.json. Raises
    UserError."""
    if args.name != "hf":
        need = "conversations need hf, a tokenizer.json, whose folder has a chat template"
        raise UserError(f"data.tokenizer.name = {args.name}: {need}")
    config = load_config(args)
    file = args.file.with_name("chat_template.jinja")
    if template is not None or file.is_file():
        file = file if template is None else Path(template)
        try:
            return read_bytes(file).decode(), str(file)
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: is no chat template ({error})") from None
    text: Any = config.get("chat_template")
    if isinstance(text, list):  # several templates, by name
        named = [t for t in text if isinstance(t, dict) and t.get("name") == "default"]
        text = named[-1].get("template") if named else None
    elif isinstance(text, dict):
        text = text.get("default")
    if not isinstance(text, str):
        raise UserError(
            f"data.tokenizer.path = {args.path}: its folder has no chat template (no {file.name}, "
            "no chat_template in tokenizer_config.json); add one there, or name its file in "
            "data.chat.template"
        )
    return text, f"chat_template of {file.with_name('tokenizer_config.json')}"


def special_names(args: TokenizerArgs, tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a template may use, by their names in it, such as eos_token."""
    config, names = load_config(args), {}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    for special in SPECIAL_NAMES:
        value = config.get(f"{special}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if value is None and (token := ids.get(special)) is not None:
            value = tokenizer.library.id_to_token(token)
        if isinstance(value, str):
            names[f"{special}_token"] = value
    return names
