"""The configuration of a run, read by another program from what the run has written."""

from pathlib import Path

from lingua.config.load import C, build
from lingua.config.report import Report
from lingua.config.schema import leaves, schema
from lingua.config.values import parse_mapping, read_file


def load_saved(cls: type[C], path: str | Path, text: str | None = None) -> C:
    """The keys of `cls` from a config.yaml that a run or a checkpoint has written; `text` is its
    content where it has been read, and `path` then stands for it in messages.

    The file is read as data: `${...}` stays text and `base:` has no meaning. Keys that `cls` does
    not have are ignored, except in `model`, where one would mean another model. Keys that the file
    does not have take their defaults. `validate()` runs in `model` alone. Raises UserError.
    """
    keys, report = schema(cls), Report(saved=str(path))
    values = read_file(Path(path), str(path)) if text is None else parse_mapping(text, str(path))
    saved = leaves(values, keys)
    known = {k: v for k, v in saved.items() if k in keys or k.startswith("model.")}
    args = build(cls, known, keys, report)
    report.check()
    return args
