"""What tokenizers of libraries, read from files, have in common."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from lingua.base.errors import UserError, import_optional, nearest
from lingua.base.files import load_json
from lingua.tokenizer.interface import FILE_KINDS, TokenizerArgs, is_library_error

Kind = Literal["hf", "tiktoken", "sp"]
# How their files begin: JSON; a line `base64 rank`; a protobuf's first field, of which so is one.
BEGINS: Mapping[Kind, bytes] = {
    "hf": rb"\s*\{", "tiktoken": rb"\s*[A-Za-z0-9+/]+=* \d+\s", "sp": rb"\n..?\n",
}  # fmt: skip


def kind_of_file(path: str, key: str) -> Kind:
    """The tokenizer that has this file, or its folder, by how the file begins. Raises UserError,
    which asks for `key`, where it begins like that of none."""
    begin = b""
    if os.path.isfile(path) and os.access(path, os.R_OK):
        with open(path, "rb") as file:
            begin = file.read(256)
    kinds = [kind for kind, form in BEGINS.items() if re.match(form, begin, re.DOTALL)]
    if os.path.isdir(path) or kinds:
        return kinds[0] if kinds else "hf"
    why = "its content shows none of them" if os.path.exists(path) else "which does not exist"
    raise UserError(f"{key}: must be one of {', '.join(FILE_KINDS)}, that of {path}: {why}")


def import_library(args: TokenizerArgs, module: str) -> Any:
    return import_optional(module, f'data.tokenizer.name = "{args.name}":')


@contextmanager
def library_errors(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Around what a library, or a template, makes of a file or a text: it may raise any type, and
    no Exception where Rust panics. Raises what `refuse` makes of its message, on one line."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise refuse(" ".join(str(error).split()) or type(error).__name__) from None


def wrong_file(args: TokenizerArgs, reason: str = "") -> UserError:
    return args.wrong_value(f"must be {FILE_KINDS[args.name]}; this file is not{reason}")


def load_config(args: TokenizerArgs) -> dict[str, Any]:
    """The tokenizer_config.json beside the file, empty where there is none. Raises UserError."""
    path = args.file.with_name("tokenizer_config.json")
    if not path.is_file():
        return {}
    with library_errors(lambda why: args.wrong_value(f"{path} beside it: cannot be read: {why}")):
        return load_json(path)


def special_ids(
    args: TokenizerArgs, names: Mapping[str, Sequence[str]], ids: Mapping[str, int]
) -> Iterator[int | None]:
    """The ids of bos and eos: those of the configured tokens, or else of the first of `names` that
    exist. Raises UserError."""
    for key, usual in names.items():
        name = getattr(args, key)
        if name is not None and name not in ids:
            hint = nearest(name, [token for token in ids if token[:1] in ("<", "[")])
            raise args.wrong_value(f"must be a token of {args.path}{hint}", key)
        wanted = usual if name is None else [name]
        yield next((ids[token] for token in wanted if token in ids), None)
