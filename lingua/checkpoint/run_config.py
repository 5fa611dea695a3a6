"""The configuration of a training run. Keys that it leaves open are those of the trained model that
it starts from (`checkpoint.init_from`), if it names one; others have the app's defaults."""

import re
from dataclasses import fields
from typing import Any

from lingua.app import App
from lingua.checkpoint.args import CheckpointArgs
from lingua.config.load import draft, load, meta_lingua
from lingua.config.values import LocatedValue, Values, read_files

NAME, PATH = "data.tokenizer.name", "data.tokenizer.path"


def load_run(
    app: App,
    argv: list[str],
    part: Any = None,
    program_doc: str | None = None,
    files: list[Values] | None = None,
) -> tuple[Any, list[str]]:
    """Load, as lingua.config.load.load does, an app's configuration, or a `part` of it, for which
    `argv` may have the app's other keys."""
    cls = app.config if part is None else type(part)
    if {"-h", "--help"} & set(argv):
        return load(cls, argv, program_doc=program_doc)
    files = read_files(argv) if files is None else files
    args: Any
    args, given = draft(app.config, argv, meta_lingua, files)
    below: Values = {}
    tokenizer = getattr(args.data, "tokenizer", None)
    # What is not of the class is a mistake, which `load` reports.
    if isinstance(args.checkpoint, CheckpointArgs) and args.checkpoint.init_from is not None:
        from lingua.checkpoint.origin import config_of_init_checkpoint

        below = config_of_init_checkpoint(app, args, given)
        if tokenizer and not given & {NAME, PATH}:
            where = f"the defaults, since {args.checkpoint.init_from} names none"
            below.setdefault(NAME, LocatedValue.of(tokenizer.name, where))
    path = getattr(tokenizer, "path", None)
    if path and given & {NAME, PATH} == {PATH}:
        from lingua.tokenizer.library import kind_of_file  # imported for a file without a name

        below[NAME] = LocatedValue.of(kind_of_file(path, NAME), path)
    if part is not None:
        others = {f.name for f in fields(app.config)} - {f.name for f in fields(part)}
        argv = [word for word in argv if re.split(r"[.=]", word)[0] not in others]
    args, notices = load(cls, argv, meta_lingua, part is not None, below, part, program_doc, files)
    if NAME in below:
        notices.append(f"{NAME} = {below[NAME].value}: taken from {below[NAME].where}")
    elif path and tokenizer and tokenizer.name == "bytes":
        notices.append(f"{PATH} = {path}: has no effect, since {NAME} = bytes reads no file")
    return args, notices
