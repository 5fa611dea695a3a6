"""Tokenizers of the library sentencepiece."""

from collections.abc import Sequence

import numpy as np

from lingua.tokenizer.interface import Tokenizer, TokenizerArgs


def build_sentencepiece(args: TokenizerArgs, content: bytes) -> Tokenizer:
    model = args.import_library("sentencepiece").SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(content)
        size = model.vocab_size()
        ids = {piece: i for i, piece in enumerate(model.id_to_piece(list(range(size))))}
    except (RuntimeError, ValueError):  # pieces that are not UTF-8 among them
        raise args.wrong_file() from None
    special = {"bos": model.bos_id(), "eos": model.eos_id()}  # -1: it has none
    names = {key: [model.id_to_piece(i)] if i >= 0 else [] for key, i in special.items()}
    bos_id, eos_id = args.special_ids(names, ids)

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        # one thread: preparing data runs a tokenizer in each of several processes
        return model.encode(list(texts), return_type="numpy", num_threads=1)

    return Tokenizer("sp", size, bos_id, eos_id, content, model, encode, model.decode)
