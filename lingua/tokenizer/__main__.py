"""Make a tokenizer from the text of a run, or look at one:

    python -m lingua.tokenizer train config=my.yaml vocab_size=32000 out=tokenizers/mine
    python -m lingua.tokenizer show "A text" name=hf path=tokenizers/mine
    python -m lingua.tokenizer show "A text" config=my.yaml

`train` learns a byte-level BPE from the sources of the config, each by its weight, without what is
held out. `out` gets tokenizer.json and tokenizer_config.json, for data.tokenizer.name=hf and for
transformers. The same config and text give the same files. `show` prints the tokens of a text.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from lingua.command import run_command
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.config.schema import Free, bounds
from lingua.data.args import DataArgs
from lingua.data.prepare.files import FilePart
from lingua.data.prepare.records import Record, read_records
from lingua.data.prepare.sources import source_files
from lingua.data.prepare.units import bad_record, hold_out_tail
from lingua.data.stream import shares
from lingua.errors import UserError, nearest
from lingua.files import write_atomically
from lingua.format import counted, printable
from lingua.tokenizer import SPLIT, Tokenizer, TokenizerArgs, build_tokenizer

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"  # tokens 0 and 1
LEAST = 256 + 2  # every byte is a token, so that all text can be encoded


@dataclass
class AnyTokenizer(TokenizerArgs):
    """That of the config, which may be the one that is made here."""

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from ()


@dataclass
class TextArgs(DataArgs):
    tokenizer: AnyTokenizer = field(default_factory=AnyTokenizer)


@dataclass
class TokenizerTrainArgs:
    vocab_size: Free[int] = 32_000  # tokens, those of the 256 bytes, bos and eos included
    out: Free[str] = MISSING  # folder of the tokenizer, new or empty
    # most bytes of text to learn from, of all sources together; a source that has less than its
    # share is repeated, as in training
    text_bytes: Free[int] = 500_000_000
    data: TextArgs = field(default_factory=TextArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, LEAST, "vocab_size", most=1 << 24)
        yield from bounds(self, 1, "text_bytes", most=1 << 40)
        out = Path(self.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            yield "out", "exists already; must be a new or empty folder"


@dataclass
class ConfigArgs:
    data: DataArgs = field(default_factory=DataArgs)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    commands = {"train": train_command, "show": show_command}
    if argv[:1] and argv[0] in commands:
        commands[argv[0]](argv[1:])
    elif {"-h", "--help"} & set(argv):
        load(TokenizerTrainArgs, argv)
    else:
        word = argv[0] if argv else ""
        raise UserError(f'"{word}": must be train or show{nearest(word, commands)}; see --help')


# ---- train


def train_command(words: list[str]) -> None:
    args, _ = load(TokenizerTrainArgs, words, META_LINGUA, partial=True)
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before an hour of work rather than after it
    except OSError as error:
        raise UserError(f"out = {folder}: cannot be made: {error.strerror}") from None
    try:
        tokenizer = train(mixture_texts(args.data, args.text_bytes), args.vocab_size)
    except BaseException:
        folder.rmdir()
        raise
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    made = build_tokenizer(TokenizerArgs(name="hf", path=str(folder)))
    print(f"{folder}: {counted(made.vocab_size, 'token')}; data.tokenizer.name=hf, .path={folder}")
    if made.vocab_size < args.vocab_size:
        print(f"the text has no more pairs to merge: vocab_size = {args.vocab_size:,} needs more")


def train(texts: Iterator[str], vocab_size: int) -> Any:
    """A tokenizers.Tokenizer: byte-level BPE (Radford et al., 2019), whose merges stay within the
    words of Llama 3's expression."""
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
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # What transformers puts before a text is what data.add_bos puts before a document.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def mixture_texts(args: DataArgs, most: int) -> Iterator[str]:
    """Documents to train on: of each source its share of `most` bytes, or of as many as it takes to
    read every source once. Raises UserError."""
    weights = {name: float(share) for name, share in shares(args.sources).items()}
    files = {name: source_files(name, args) for name in weights}
    sizes = {name: sum(file.size for file in of_source) for name, of_source in files.items()}
    once = max(sizes[name] / weight for name, weight in weights.items())
    for name, weight in weights.items():
        wanted = max(1, int(min(most, once) * weight))
        print(f"{args.source_key(name)}: {wanted:,} bytes of text", flush=True)
        yield from source_texts(name, files[name], args, wanted)


def source_texts(name: str, files: list[FilePart], args: DataArgs, n_bytes: int) -> Iterator[str]:
    """`n_bytes` of a source's documents, at least, without those that are held out: the first ones
    of every file, of each in proportion to its size. They come again where these are fewer."""
    size = max(1, sum(file.size for file in files))
    taken = 0
    while taken < n_bytes:
        before, missing = taken, n_bytes - taken
        for file in files:
            most = missing * file.size / size
            for record in good_records(file, name, args, is_all=len(files) == 1):
                if not record.is_held_out:
                    yield record.text
                    taken += record.n_bytes
                    most -= record.n_bytes
                if most <= 0:
                    break
        if taken == before:
            raise UserError(f"{args.source_key(name)}: has no text to learn from")


def good_records(file: FilePart, name: str, args: DataArgs, is_all: bool) -> Iterator[Record]:
    """Those of a file. `is_all`: it is the whole source, of which one long document may have a part
    that is held out. Raises UserError at a bad one, unless the config skips them."""
    records = read_records(file, args.text_keys(name))
    for record in hold_out_tail(records)[0] if is_all else records:
        if record.wrong is None:
            yield record
        elif args.on_bad_record == "stop":
            raise bad_record(file, record, args, name)


# ---- show


def show_command(argv: list[str]) -> None:
    words = [word for word in argv[1:] if "=" in word or word.startswith("-")]
    if not argv or argv[1:] != words:
        raise UserError("show: must have one text, in quotes, and then config=FILE or name= path=")
    if any(word.startswith("config=") for word in words):
        from lingua.app import choose_app  # which imports torch, as the config's app does
        from lingua.run_config import load_run

        app = choose_app(words)
        of_run, _ = load_run(app, words, part=ConfigArgs(data=app.config().data))
        chosen = of_run.data.tokenizer
    else:
        chosen = load(TokenizerArgs, words)[0]
        if chosen.name == "bytes" and chosen.path is not None:
            raise UserError(
                f"path = {chosen.path}: needs name=hf, sp or tiktoken; bytes has no file"
            )
    for line in describe(build_tokenizer(chosen), argv[0]):
        print(printable(line))


def describe(tokenizer: Tokenizer, text: str) -> Iterator[str]:
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


if __name__ == "__main__":
    run_command(main)
