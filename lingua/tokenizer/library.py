"""What tokenizers of libraries, read from files, have in common."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingua.base.errors import UserError, import_optional, nearest
from lingua.base.files import load_json
from lingua.tokenizer.interface import FILE_KINDS, TokenizerArgs


def import_library(args: TokenizerArgs, module: str) -> Any:
    return import_optional(module, f'data.tokenizer.name = "{args.name}":')


def wrong_file(args: TokenizerArgs, reason: str = "") -> UserError:
    return args.wrong_value(f"must be {FILE_KINDS[args.name]}; this file is not{reason}")


def load_config(args: TokenizerArgs) -> dict[str, Any]:
    """The tokenizer_config.json beside the file, empty where there is none. Raises UserError."""
    path = args.file.with_name("tokenizer_config.json")
    if not path.is_file():
        return {}
    try:
        return load_json(path)
    except (OSError, ValueError) as e:
        raise args.wrong_value(f"{path} beside it cannot be read: {e}") from None


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
