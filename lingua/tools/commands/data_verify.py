"""Compare the token shards of a run with what their manifests say of them:

    python -m lingua data verify config=apps/main/configs/debug.yaml
    python -m lingua data verify runs/debug
    python -m lingua data verify config=my.yaml data.sources={web: 1}

Every byte of the shards is read and hashed. Their text is compared by size and time, and is read
only where its time differs. A line is printed for each source; a source whose shards are missing,
damaged or of another text is an error. Nothing is changed: `data prepare` builds what is wrong.
Of token files, which are read in place, the hashes are recorded beside the shards.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lingua.base.errors import UserError, all_of
from lingua.base.format import counted, human_bytes
from lingua.config.schema import Free
from lingua.data.args import DataArgs, ValidationArgs
from lingua.tools.arguments import load_data, split_run

if TYPE_CHECKING:
    from lingua.tokenizer.interface import Tokenizer


@dataclass
class VerifyArgs:
    app: Free[str | None] = None  # import path of the app that is trained, as in training
    data: DataArgs = field(default_factory=DataArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)


def main(argv: list[str]) -> None:
    _, words = split_run(argv)
    _, args = load_data(VerifyArgs, words, __doc__)
    from lingua.tokenizer.build import build_tokenizer

    tokenizer = build_tokenizer(args.data.tokenizer)
    wrong = []
    for name in args.data.read_sources(args.validation.sources):
        try:
            held = verify_source(name, args.data, tokenizer)
            print(f"{args.data.source_key(name)}: {held}", flush=True)
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise all_of(wrong)


def verify_source(name: str, args: DataArgs, tokenizer: "Tokenizer") -> str:
    """Returns a summary of the shards of a source. Raises UserError where they are missing,
    damaged, or those of another text."""
    from lingua.data.cache import shard_spec, why_stale
    from lingua.data.shards import SPLITS, Manifest, Source
    from lingua.data.sources import has_tokens, source_files
    from lingua.data.verify import damaged_shards

    spec = shard_spec(name, args, tokenizer)
    where = f"{spec.key}: {spec.folder}"
    try:
        files = source_files(name, args)
        if has_tokens(name, args, files):
            from lingua.data.token_files import verify

            return verify(name, args, tokenizer, files)
        manifest = Manifest.load(spec.folder)
        if manifest is None:
            raise UserError(
                f"{where}: has no token shards; `python -m lingua data prepare` makes them"
            )
        if why := why_stale(manifest, files, spec):
            raise UserError(f"{where}: {why}")
        source, shards = Source(spec.folder, manifest), manifest.shards
        if damaged := damaged_shards(source, range(len(shards))):
            names = ", ".join(shards[i].name for i in damaged)
            raise UserError(f"{where}: {names}: the content is not that of the manifest")
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error}") from None
    size = sum(sum(shard.files(manifest.dtype).values()) for shard in shards)
    tokens = sum(manifest.total(split, "tokens") for split in SPLITS)
    held = f"{counted(len(shards), 'shard')}, {counted(tokens, 'token')}, {human_bytes(size)}"
    return f"{held}; as in its manifest"
