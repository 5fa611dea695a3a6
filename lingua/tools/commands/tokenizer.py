"""Make a tokenizer from the text of a run, or look at one:

    python -m lingua tokenizer train config=my.yaml vocab_size=32000 out=tokenizers/mine
    python -m lingua tokenizer show "A text" name=hf path=tokenizers/mine
    python -m lingua tokenizer show "A text" config=my.yaml

`train` learns a byte-level BPE from the sources of the config, each by its weight, without what is
held out. `out` gets tokenizer.json and tokenizer_config.json, for data.tokenizer.name=hf and for
transformers. The same config and text give the same files. `show` prints the tokens of a text.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lingua.base.errors import UserError, nearest
from lingua.base.files import write_atomically
from lingua.base.format import counted, printable
from lingua.config.help import print_help_if_asked
from lingua.config.load import load, meta_lingua
from lingua.config.schema import Free, bounds
from lingua.config.values import MISSING
from lingua.data.args import DataArgs
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tokenizer.library import kind_of_file
from lingua.tools.arguments import load_data

MIN_VOCAB_SIZE = 256 + 2  # every byte is a token, so that all text can be encoded


@dataclass
class AnyTokenizer(TokenizerArgs):
    """Configuration of a tokenizer that this command may be about to make."""

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
        yield from bounds(self, MIN_VOCAB_SIZE, "vocab_size", maximum=1 << 24)
        yield from bounds(self, 1, "text_bytes", maximum=1 << 40)
        out = Path(self.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            yield "out", "exists already; must be a new or empty folder"


@dataclass
class ConfigArgs:
    data: DataArgs = field(default_factory=DataArgs)


def main(argv: list[str]) -> None:
    commands = {"train": train_command, "show": show_command}
    if argv[:1] and argv[0] in commands:
        commands[argv[0]](argv[1:])
    else:
        print_help_if_asked(TokenizerTrainArgs, argv, __doc__)
        word = argv[0] if argv else ""
        raise UserError(f'"{word}": must be train or show{nearest(word, commands)}; see --help')


def train_command(words: list[str]) -> None:
    args, _ = load(TokenizerTrainArgs, words, meta_lingua, partial=True, program_doc=__doc__)
    # Imported here, since --help needs no numpy.
    from lingua.tokenizer.build import build_tokenizer
    from lingua.tools.inspect.tokenizer import BOS, EOS, mixture_texts, train

    folder = Path(args.out)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before an hour of work rather than after it
        if is_new:
            folder.rmdir()  # an interrupt of that work leaves nothing
    except OSError as error:
        raise UserError(f"out = {folder}: cannot be made: {error.strerror}") from None
    tokenizer = train(mixture_texts(args.data, args.text_bytes), args.vocab_size)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    folder.mkdir(exist_ok=True)
    try:
        write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    except BaseException:
        for path in folder.glob("tokenizer*"):
            path.unlink()
        raise
    made = build_tokenizer(TokenizerArgs(name="hf", path=str(folder)))
    print(f"{folder}: {counted(made.vocab_size, 'token')}; data.tokenizer.name=hf, .path={folder}")
    if made.vocab_size < args.vocab_size:
        print(f"the text has no more pairs to merge: vocab_size = {args.vocab_size:,} needs more")


def show_command(argv: list[str]) -> None:
    words = [word for word in argv[1:] if "=" in word or word.startswith("-")]
    if not argv or argv[1:] != words:
        raise UserError("show: must have one text, in quotes, and then config=FILE or name= path=")
    if any(word.startswith("config=") for word in words):
        chosen = load_data(ConfigArgs, words, __doc__)[1].data.tokenizer
    else:
        chosen = load(TokenizerArgs, words, program_doc=__doc__)[0]
        if chosen.name == "bytes" and chosen.path:
            chosen.name = kind_of_file(chosen.path, "name")
    from lingua.tokenizer.build import build_tokenizer
    from lingua.tools.inspect.tokenizer import describe_tokens

    for line in describe_tokens(build_tokenizer(chosen), argv[0]):
        print(printable(line))
