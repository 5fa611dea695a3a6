"""Rows of text files, as `data` of a configuration describes them."""

import logging
from collections.abc import Callable
from typing import Any

from lingua.data.heldout import HeldOut, held_out_windows
from lingua.data.prepare.sources import check_sources, open_sources, prepare_sources
from lingua.data.rows import OpenData
from lingua.tokenizer import Tokenizer

CONTENT = "data.content."  # and a source's name: the key of its fingerprint

logger = logging.getLogger(__name__)


class TextData:
    """Text, tokenized once into shards and mixed by weight. A lingua.data.rows.Data."""

    def check(self, args: Any, tokenizer: Tokenizer) -> None:
        check_sources(args.data, tokenizer)

    def prepare(self, args: Any, tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
        prepare_sources(args.data, tokenizer, report)

    def open(self, args: Any, tokenizer: Tokenizer) -> OpenData:
        sources = open_sources(args.data, tokenizer)
        held_out: dict[str, HeldOut] = {}
        for name, source in sources.items():
            windows = held_out_windows(source, args.data.seq_len, args.validation.tokens)
            if len(windows.tokens):
                held_out[name] = windows
            else:
                logger.info(
                    f"{name} has too few documents to hold one out: its loss is not measured"
                )
        fingerprints = {f"{CONTENT}{name}": source.fingerprint for name, source in sources.items()}
        return OpenData(args.data.row_stream(sources, args.seed), fingerprints, held_out)
