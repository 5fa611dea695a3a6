"""Numbers and tables as people read them."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table: the first `left` columns begin together, the others end together."""
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


def short_count(count: float) -> str:
    """950, 31.2k, 1.25M: three digits."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if count >= 0.9995 * 10**power:
            return f"{_three_digits(count / 10**power)}{unit}"
    return f"{count:.0f}"


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def short_time(seconds: float) -> str:
    """45s, 2m05s, 3h07m, 2d04h: the two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = minutes // 60
    return f"{hours // 24}d{hours % 24:02d}h"


def human_bytes(n: int) -> str:
    """1536 -> "1.50 KiB"."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{n} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
