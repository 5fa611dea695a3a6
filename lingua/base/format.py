"""Tables, counts, times and sizes as text for people."""

import os
import re
from collections.abc import Sequence

# Terminal control, direction of text, and halves of characters.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text for a terminal, which may quote any file: control characters other than tabs and ends of
    lines are escaped, such as `\\x1b`."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def without_secrets(text: str) -> str:
    """A message without the user and the query of a URL, and without HF_TOKEN."""
    token = os.environ.get("HF_TOKEN", "").strip()
    text = text.replace(token, "<HF_TOKEN>") if token else text
    text = re.sub(r"(\w://)[^/\s@\"']*@", r"\1", text)
    return re.sub(r"(https?://[^\s?\"']*)\?[^\s\"']*", r"\1", text)


def align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns the lines of a table: the first `left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return lines


def counted(n: int, noun: str) -> str:
    """`1 part`, `2,000 parts`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def parameters_text(n: int, trained: int) -> str:
    """`12 parameters`, `12 parameters (4 trained)`."""
    return f"{n:,} parameters" + (f" ({trained:,} trained)" if trained < n else "")


def short_count(count: float) -> str:
    """950, 31.2k, 1.25M: three digits."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if count >= 0.9995 * 10**power:
            return f"{count / 10**power:#.3g}".rstrip(".") + unit
    return f"{count:.0f}"


def short_time(seconds: float) -> str:
    """45s, 2.1m, 59m, 3.1h, 2.2d: two digits."""
    value, unit = seconds, "s"
    for longer, n in (("m", 60), ("h", 60), ("d", 24)):
        if round(value) < n:
            break
        value, unit = value / n, longer
    return f"{value:.0f}{unit}" if unit == "s" or value >= 9.95 else f"{value:.1f}{unit}"


def human_bytes(n: int) -> str:
    """1536 -> "1.50 KiB"."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{n} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
