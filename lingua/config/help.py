"""The text of `--help`: what the program does, then every key with its type, default, resume class
and comment. What it does is the docstring of the program's module: a sentence and examples. And
which key is nearest to one that does not exist."""

import ast
import difflib
import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import takewhile

from lingua.base.errors import MAX_SHOWN, UserError, nearest
from lingua.config.schema import Keys, schema, type_name
from lingua.config.values import MISSING, show

INTRODUCTION = (
    "Arguments: config=FILE key=value ...",
    "config=FILE is a YAML file; its key `base:` names another file that it is laid over.",
    "key=value sets one key over the file: optim.lr=3e-4, data.tokenizer.path=null, "
    "data.sources={a: 1, b: 2}, data.sources.a=1.",
    "Each key is listed with its default, what a change of it means for a resumed run (free: "
    "nothing, announced: it is printed, guarded: refused unless allowed by name), and its type. "
    "`--help GROUP` lists one group: ",
)


def asks_help(argv: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & set(argv))


def print_help_if_asked(cls: type, argv: Sequence[str], program_doc: str | None = None) -> None:
    """Print the help of the groups and keys that the command line names, or of all, and exit, if it
    asks for help. Raises UserError."""
    if asks_help(argv):
        chosen = [word for word in argv if "=" not in word and not word.startswith("-")]
        print(help_text(cls, chosen, program_doc))
        raise SystemExit(0)


def first_example(program_doc: str | None) -> str:
    """The first command in the docstring of a program, or an empty string."""
    lines = inspect.cleandoc(program_doc or "").splitlines()
    return next((line.strip() for line in lines if line.startswith("    ")), "")


def help_text(
    cls: type, chosen: list[str], program_doc: str | None = None, width: int | None = None
) -> str:
    """The help about all keys of a configuration class, after the docstring of the program, or
    about the chosen groups and keys alone. Raises UserError for a name that is neither."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    keys = schema(cls)
    groups = {"": cls} | {path: key.group for path, key in keys.items() if key.group is not None}
    for name in chosen:
        if name not in keys:
            top = [path for path in groups if path and "." not in path]
            known = f"must be a key or a group ({', '.join(top)})" if top else "must be a key"
            raise UserError(f"--help {name}: {known}{nearest(name, keys)}")
    comments: dict[str, str] = {}
    lines = [] if chosen else list(_introduction(program_doc, list(groups)[1:], width))
    for group, owner in groups.items():
        for name, comment in field_comments(owner).items():
            comments[f"{group}.{name}".lstrip(".")] = comment
        rows: list[tuple[list[str], str]] = []
        for path, key in keys.items():
            asked = not chosen or any(f"{path}.".startswith(f"{name}.") for name in chosen)
            if asked and key.group is None and path.rpartition(".")[0] == group:
                default = "(required)" if key.default.value == MISSING else show(key.default)
                kind = type_name(key.type) + (" or null" if key.optional else "")
                rows.append(([path, default, key.resume or "", kind], comments.get(path, "")))
        if rows:
            heading = f"{group}: {comments[group]}" if group in comments else group
            lines += ["", *textwrap.wrap(heading, width), *_table(rows, width)]
    return "\n".join(lines).strip()


def _introduction(program_doc: str | None, groups: list[str], width: int) -> Iterator[str]:
    for paragraph in inspect.cleandoc(program_doc or "").split("\n\n"):
        if paragraph.startswith("    "):  # commands
            for line in paragraph.splitlines():
                yield " \\\n".join(_wrap(line.strip(), width - 2, " " * 4, " " * 8))
        else:
            yield textwrap.fill(paragraph, width)
        yield ""
    *first, last = INTRODUCTION
    for line in (*first, last + ", ".join(groups)):
        yield textwrap.fill(line, width)


def _table(rows: list[tuple[list[str], str]], width: int) -> Iterator[str]:
    """Aligned columns, the comment wrapped below its key. A wide cell shifts the cells after it."""
    limits = (34, 16, 9, 0)
    widths = [min(limit, max(len(cells[i]) for cells, _ in rows)) for i, limit in enumerate(limits)]
    for cells, comment in rows:
        line = "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
        yield from _wrap(line, width, "  ", " " * 6)
        yield from _wrap(comment, width, " " * 6, " " * 6)


def _wrap(line: str, width: int, initial_indent: str, subsequent_indent: str) -> list[str]:
    return textwrap.wrap(
        line,
        max(width, 20),
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def field_comments(cls: type) -> dict[str, str]:
    """The comment beside each field, or else the comment lines directly above it. A field whose
    source cannot be read has none."""
    comments: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        try:
            lines = textwrap.dedent(inspect.getsource(owner)).splitlines()
        except (OSError, TypeError):
            continue
        [definition] = ast.parse("\n".join(lines)).body
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                last, end = node.end_lineno or 0, node.end_col_offset  # in bytes
                beside = lines[last - 1].encode()[end:].decode()
                before = reversed(lines[: node.lineno - 1])
                above = list(takewhile(lambda line: line.startswith("    #"), before))
                words = [beside] if beside else above[::-1]
                comments[node.target.id] = " ".join(word.strip(" #") for word in words)
    return {f.name: comments[f.name] for f in fields(cls) if comments.get(f.name)}


def unknown_keys(given: Iterable[str], keys: Keys) -> Iterator[tuple[str, str]]:
    """(key, which one may have been meant) for each given key that does not exist."""
    for i, path in enumerate(path for path in given if path not in keys):
        yield path, "" if i > MAX_SHOWN else _nearest_key(path, keys)


def _nearest_key(path: str, keys: Keys) -> str:
    """Look for a similar key in the same group, then in other groups, then anywhere."""
    group, _, name = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in keys if p.rpartition(".")[0] == group}
    similar = [siblings[near] for near in difflib.get_close_matches(name, siblings, n=1)]
    similar += [p for p in keys if p.rpartition(".")[2] == name]
    similar += [] if siblings else difflib.get_close_matches(path, keys, n=1)
    if similar:
        return f' (did you mean "{similar[0]}"?)'
    return f"; {group} has the keys {', '.join(siblings)}" if group and siblings else ""
