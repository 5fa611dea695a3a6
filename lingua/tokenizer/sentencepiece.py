"""Tokenizers of the library sentencepiece."""

from collections.abc import Sequence

import numpy as np

from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import import_library, library_errors, special_ids, wrong_file


def build_sentencepiece(args: TokenizerArgs, content: bytes) -> Tokenizer:
    model = import_library(args, "sentencepiece").SentencePieceProcessor()
    with library_errors(lambda why: wrong_file(args, f": {why}")):
        model.load_from_serialized_proto(content)
        size = model.vocab_size()
        ids = {piece: i for i, piece in enumerate(model.id_to_piece(list(range(size))))}
    special = {"bos": model.bos_id(), "eos": model.eos_id()}  # -1: it has none
    names = {key: [model.id_to_piece(i)] if i >= 0 else [] for key, i in special.items()}
    bos_id, eos_id = special_ids(args, names, ids)

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        # one thread: preparing data runs a tokenizer in each of several processes
        return model.encode(list(texts), return_type="numpy", num_threads=1)

    return Tokenizer("sp", size, bos_id, eos_id, content, model, encode, model.decode)
