"""Tokenizers behind one interface: bytes, sentencepiece, tiktoken and Hugging Face's tokenizers.

    tokenizer = build_tokenizer(TokenizerArgs(name="sp", path="tokenizer.model"))
    ids = tokenizer.encode("text", bos=True, eos=True)

The name of a special token inside a text (`<s>`, `<|end_of_text|>`) is encoded as text. Each
library has a file here, imported when it is chosen.
"""

from lingua.base.files import read_bytes
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs

MAX_VOCAB_SIZE = 2**24  # a model has a row for each id


def build_tokenizer(args: TokenizerArgs) -> Tokenizer:
    """UserError when the file, or the library that reads it, is missing or wrong."""
    for key, need in args.validate():
        raise args.wrong_value(need, key)
    if args.name == "bytes":
        from lingua.tokenizer.bytes import build_bytes

        return build_bytes()
    try:
        content = read_bytes(args.file)
    except OSError as e:
        raise args.wrong_value(f"cannot be read: {e.strerror or e}") from None
    if args.name == "sp":
        from lingua.tokenizer.sentencepiece import build_sentencepiece as build
    elif args.name == "tiktoken":
        from lingua.tokenizer.tiktoken import build_tiktoken as build
    else:
        from lingua.tokenizer.hf import build_hugging_face as build
    tokenizer = build(args, content)
    if not 0 < tokenizer.vocab_size <= MAX_VOCAB_SIZE:
        need = f"must have ids below {MAX_VOCAB_SIZE:,}; its largest is "
        raise args.wrong_value(f"{need}{tokenizer.vocab_size - 1:,}")
    return tokenizer
