"""The text of `--help`: every key with its type, default, resume class and comment."""

import ast
import inspect
import io
import shutil
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import fields

from omegaconf import OmegaConf

from lingua.config.schema import schema, type_name
from lingua.config.yaml import show

INTRODUCTION = (
    "Arguments: config=FILE key=value ...",
    "config=FILE is a YAML file; the key `base:` in it names another one that it is laid over. "
    "key=value sets one key over the file: optim.lr=3e-4, data.sources={a: 1, b: 2}, "
    "data.sources.a=1, data.tokenizer.path=null.",
    "Each key stands with its default, its type and what a change of it means for a resumed run: "
    "free (nothing), announced (it is printed) or guarded (refused unless allowed by name).",
)


def help_text(cls: type, width: int | None = None) -> str:
    width = width or shutil.get_terminal_size((100, 24)).columns
    keys = schema(cls)
    defaults = OmegaConf.structured(cls)
    owners = {"": cls} | {path: key.group for path, key in keys.items() if key.group is not None}
    notes = {group: field_comments(owner) for group, owner in owners.items()}
    rows: dict[str, list[tuple[str, str, str, str, str]]] = {group: [] for group in owners}
    for path, key in keys.items():
        if key.group is None:
            group, _, name = path.rpartition(".")
            default = _default(cls, defaults, path, owners[group], name)
            kind, resume = type_name(key.type), key.resume or ""
            rows[group].append((path, default, resume, kind, notes[group].get(name, "")))
    lines = [textwrap.fill(line, width) for line in INTRODUCTION]
    for group, members in rows.items():
        if members:
            parent, _, name = group.rpartition(".")
            note = notes[parent].get(name, "") if group else ""
            heading = f"{group}: {note}" if note else group
            lines += ["", *([textwrap.fill(heading, width)] if group else [])]
            lines += _table(members, width)
    return "\n".join(lines)


def _table(rows: list[tuple[str, str, str, str, str]], width: int) -> Iterator[str]:
    """Aligned columns, the comment wrapped below its key. A wide cell pushes what follows it."""
    widths = [min(limit, max(len(r[i]) for r in rows)) for i, limit in enumerate((34, 16, 9))]
    for *cells, kind, comment in rows:
        line = "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
        yield from _wrap(f"{line}  {kind}", "  ", width)
        yield from _wrap(comment, "      ", width)


def _wrap(text: str, indent: str, width: int) -> list[str]:
    if len(indent + text) <= width:
        return [indent + text] if text else []
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=indent,
        subsequent_indent="      ",
        break_long_words=False,
    )


def _default(cls: type, defaults: object, path: str, owner: type, name: str) -> str:
    """The default as it stands in the tree, where a group may be built with other values."""
    group = path.rpartition(".")[0]
    if group and OmegaConf.select(defaults, group) is None:  # an optional group
        defaults, path = OmegaConf.structured(owner), name
    value = OmegaConf.select(defaults, path, throw_on_missing=False)
    parent = OmegaConf.select(defaults, path.rpartition(".")[0]) if "." in path else defaults
    if OmegaConf.is_missing(parent, path.rpartition(".")[2]):
        return "(required)"
    return show(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def field_comments(cls: type) -> dict[str, str]:
    """The comment behind each field, or else the comment lines directly above it. A field whose
    source cannot be read has none."""
    comments: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if owner is object:
            continue
        try:
            source = textwrap.dedent(inspect.getsource(owner))
            body = ast.parse(source).body[0].body
            tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        except (OSError, TypeError, SyntaxError, IndexError, tokenize.TokenError):
            continue
        at_line = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                comments[node.target.id] = _comment_of(node, at_line)
    return {f.name: comments[f.name] for f in fields(cls) if comments.get(f.name)}


def _comment_of(node: ast.AnnAssign, at_line: dict[int, tokenize.TokenInfo]) -> str:
    """`at_line`: the comment of each line that has one."""

    def on_its_own_line(line: int) -> bool:
        return line in at_line and not at_line[line].line[: at_line[line].start[1]].strip()

    chosen = [line for line in range(node.lineno, node.end_lineno + 1) if line in at_line]
    if not chosen:
        line = node.lineno - 1
        while on_its_own_line(line) and at_line[line].start[1] == node.col_offset:
            chosen.insert(0, line)
            line -= 1
    return " ".join(at_line[line].string.lstrip("#").strip() for line in chosen)
