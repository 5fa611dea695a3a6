"""The tokenizer without a library: a token for each byte."""

from collections.abc import Sequence

import numpy as np

from lingua.tokenizer.interface import Tokenizer


def build_bytes() -> Tokenizer:
    """Ids 0 to 255 are the UTF-8 bytes, then bos and eos."""

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    return Tokenizer("bytes", 258, 256, 257, b"", None, encode, decode)
