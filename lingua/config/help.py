"""The text of `--help`: every key with its type, default, resume class and comment."""

import inspect
import io
import shutil
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import fields

from lingua.config.schema import schema, type_name
from lingua.config.values import MISSING, show

INTRODUCTION = (
    "Arguments: config=FILE key=value ...",
    "config=FILE is a YAML file; its key `base:` names another file that it is laid over.",
    "key=value sets one key over the file: optim.lr=3e-4, data.tokenizer.path=null, "
    "data.sources={a: 1, b: 2}, data.sources.a=1.",
    "Each key is listed with its default, what a change of it means for a resumed run (free: "
    "nothing, announced: it is printed, guarded: refused unless allowed by name), and its type.",
)


def help_text(cls: type, width: int | None = None) -> str:
    width = width or shutil.get_terminal_size((100, 24)).columns
    keys = schema(cls)
    groups = {"": cls} | {path: key.group for path, key in keys.items() if key.group is not None}
    comments: dict[str, str] = {}
    lines = [textwrap.fill(line, width) for line in INTRODUCTION]
    for group, owner in groups.items():
        for name, comment in field_comments(owner).items():
            comments[f"{group}.{name}".lstrip(".")] = comment
        rows = []
        for path, key in keys.items():
            if key.group is None and path.rpartition(".")[0] == group:
                default = "(required)" if key.default.value == MISSING else show(key.default)
                cells = (path, default, key.resume or "", type_name(key.type))
                rows.append((cells, comments.get(path, "")))
        if rows:
            heading = f"{group}: {comments[group]}" if group in comments else group
            lines += ["", *textwrap.wrap(heading, width), *_table(rows, width)]
    return "\n".join(lines)


def _table(rows: list[tuple[tuple[str, ...], str]], width: int) -> Iterator[str]:
    """Aligned columns, the comment wrapped below its key. A wide cell shifts the cells after it."""
    style = {"width": max(width, 20), "subsequent_indent": " " * 6, "break_long_words": False}
    limits = (34, 16, 9, 0)
    widths = [min(limit, max(len(cells[i]) for cells, _ in rows)) for i, limit in enumerate(limits)]
    for cells, comment in rows:
        line = "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
        yield from textwrap.wrap(line, initial_indent="  ", **style)
        yield from textwrap.wrap(comment, initial_indent=" " * 6, **style)


def field_comments(cls: type) -> dict[str, str]:
    """The comment beside each field, or else the comment lines directly above it. A field whose
    source cannot be read has none."""
    comments: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):
            continue
        name, beside, above = "", [], []
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                (beside if name else above).append(token.string.lstrip("#").strip())
            elif token.type == tokenize.NAME and token.start[1] == 4 and not name:
                name = token.string  # the first word of a statement in the body of the class
            elif token.type == tokenize.NEWLINE:
                comments[name] = " ".join(beside or above)
                name, beside, above = "", [], []
            elif token.type == tokenize.NL and not token.line.strip():
                above.clear()
    return {f.name: comments[f.name] for f in fields(cls) if comments.get(f.name)}
