"""Training a tokenizer on the sources of a config, and the tokens of a text."""

import json
import signal
import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from tqdm import tqdm

from lingua.base.errors import UserError
from lingua.base.format import counted
from lingua.data.args import DataArgs
from lingua.data.files import FilePart, make_local
from lingua.data.shards import Manifest
from lingua.data.sources import has_tokens, source_files
from lingua.data.stream import shares
from lingua.tokenizer.interface import Tokenizer
from lingua.tokenizer.tiktoken import SPLIT
from lingua.tools.prepare.records import SourceRecord, read_records, text_keys
from lingua.tools.prepare.units import bad_record, hold_out_tail, least_bound

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"  # tokens 0 and 1


def train(texts: Iterator[str], vocab_size: int) -> "LibraryTokenizer":
    """Byte-level BPE (Radford et al., 2019), whose merges stay within the words of Llama 3's
    expression. An interrupt ends the process at once, since the library would return to Python,
    which raises it, only at its end."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as LibraryTokenizer

    tokenizer = LibraryTokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,  # on a terminal alone
    )
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # not ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    name = f"documents read, to learn {vocab_size:,} tokens"
    texts = tqdm(texts, name, mininterval=30, disable=sys.stderr.isatty())
    try:
        tokenizer.train_from_iterator(texts, trainer)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    # What transformers puts before a text is what data.add_bos puts before a document.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def mixture_texts(args: DataArgs, max_bytes: int) -> Iterator[str]:
    """Documents to train on: of each source its share of `max_bytes`, or of as many as it takes
    to read every source once. Raises UserError."""
    args.read_sources()  # raises where there are none
    weights = {name: float(share) for name, share in shares(args.sources).items()}
    files = {name: make_local(source_files(name, args)) for name in weights}
    for name, source_parts in files.items():
        if has_tokens(name, args, source_parts):
            raise UserError(f"{args.source_key(name)}: has files of tokens; must be text")
    sizes = {name: sum(file.size for file in source_parts) for name, source_parts in files.items()}
    once = max(sizes[name] / weight for name, weight in weights.items())
    wanted = {n: max(1, int(min(max_bytes, once) * weight)) for n, weight in weights.items()}
    for name, n_bytes in wanted.items():
        print(f"{args.source_key(name)}: {n_bytes:,} bytes of text", flush=True)
    return chain.from_iterable(source_texts(n, files[n], args, wanted[n]) for n in wanted)


def source_texts(name: str, files: list[FilePart], args: DataArgs, n_bytes: int) -> Iterator[str]:
    """`n_bytes` of a source's documents, at least, without those that are held out: the first ones
    of every file, of each in proportion to its size. They come again where these are fewer."""
    is_all, draws = len(files) == 1, set[int]()
    for record in (r for file in files for r in good_records(file, name, args, is_all)):
        draws.add(record.draw)
        if record.draw < Manifest.held_out_below:
            break
    below, size, taken = least_bound(draws), max(1, sum(file.size for file in files)), 0
    while taken < n_bytes:
        before, missing = taken, n_bytes - taken
        for file in files:
            wanted = missing * file.size / size
            for record in good_records(file, name, args, is_all):
                if record.draw >= below:
                    yield record.text
                    taken += record.n_bytes
                    wanted -= record.n_bytes
                if wanted <= 0:
                    break
        if taken == before:
            raise UserError(f"{args.source_key(name)}: has no text to learn from")


def good_records(file: FilePart, name: str, args: DataArgs, is_all: bool) -> Iterator[SourceRecord]:
    """Yields the good records of a file. `is_all`: it is the whole source, of which one long
    document may have a part that is held out. Raises UserError at a bad one, unless the config
    skips them."""
    records = read_records(file, text_keys(args, name))
    for record in hold_out_tail(records)[0] if is_all else records:
        if record.wrong is None:
            yield record
        elif args.on_bad_record == "stop":
            raise bad_record(file, record, args, name)


def describe_tokens(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """The tokens of a text, with the bos and eos that the tokenizer has."""
    bos, eos = tokenizer.bos_id is not None, tokenizer.eos_id is not None
    try:
        ids = tokenizer.encode(text, bos=bos, eos=eos).tolist()
    except UnicodeEncodeError:
        raise UserError("show: the text has half a surrogate pair, no character") from None
    n, n_bytes = len(ids) - bos - eos, len(text.encode())
    ratio = f", {n_bytes / n:.2f} bytes a token" if n else ""
    yield (
        f"{tokenizer.name}: {counted(tokenizer.vocab_size, 'token')}; the text is "
        f"{counted(n, 'token')} of {counted(n_bytes, 'byte')}{ratio}"
    )
    special = {tokenizer.bos_id: "bos", tokenizer.eos_id: "eos"}
    for i in ids:
        yield f"{i:>8}  {special.get(i) or json.dumps(tokenizer.decode([i]), ensure_ascii=False)}"
    if (decoded := tokenizer.decode(ids)) != text:
        yield f"decoded it is another text: {json.dumps(decoded, ensure_ascii=False)}"
