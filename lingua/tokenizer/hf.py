"""Tokenizers of the Hugging Face library tokenizers: a tokenizer.json."""

import json
import re
from collections.abc import Sequence

from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import (
    import_library,
    library_errors,
    load_config,
    special_ids,
    wrong_file,
)

# The usual names of the first and last token, for a tokenizer without tokenizer_config.json.
BOS_NAMES: Sequence[str] = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
EOS_NAMES: Sequence[str] = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]")


def build_hugging_face(args: TokenizerArgs, content: bytes) -> Tokenizer:
    library = import_library(args, "tokenizers")
    with library_errors(lambda why: wrong_file(args, f": {why}")):
        _check_prefix(content)
        tokenizer = library.Tokenizer.from_buffer(content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # their names in a text are text
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    config = load_config(args)
    names = {"bos": BOS_NAMES, "eos": EOS_NAMES}
    for special in names:
        if (key := f"{special}_token") in config:
            token = config[key].get("content") if isinstance(config[key], dict) else config[key]
            if not isinstance(token, str | None):
                where = args.file.with_name("tokenizer_config.json")
                raise args.wrong_value(f"{where} beside it has a {key} that is not text")
            names[special] = [] if token is None else [token]
    bos_id, eos_id = special_ids(args, names, ids)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [e.ids for e in encoded]

    def decode(ids: list[int]) -> str:
        with library_errors(lambda why: wrong_file(args, f": it fails at tokens: {why}")):
            return tokenizer.decode(ids)  # without special tokens

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
