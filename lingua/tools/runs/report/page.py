"""The page as one file: a template, its style and scripts, and the content, compressed.

No text of a run is ever parsed as HTML or as a script: it lies in base64, and the script of the
page inserts it as text. The page's own policy forbids it to load anything.
"""

import base64
import gzip
import json
from importlib.resources import files
from typing import Any

import numpy as np

DIGITS = 6  # significant ones
MISSING_CODE = -(2**31)
MAX_EXACT = 22  # up to this power of ten, float64 has them exactly, and so is a quotient by one


class Arrays:
    """Columns of numbers, packed for the page; equal ones are stored once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._places: dict[tuple[Any, ...], dict[str, Any]] = {}

    def add(self, values: np.ndarray, exponent: int | None = None) -> dict[str, Any]:
        """Store `values`, float64, and return where the page finds them: {at, n, type, exponent}.
        They are rounded to six significant digits, with an `exponent` to multiples of its power of
        ten. NaN and infinity are what is missing.

        Type i4 is differences between neighbours, int32, of multiples of 10**exponent. Where they
        are too large: f8, and without a given exponent the upper halves of float64, "u4". Their 21
        significant bits are the fewest that keep six digits (2**20 > 10**6).
        """
        values = np.where(np.isfinite(values), values, np.nan)
        given = exponent is not None
        if exponent is None:
            values = _rounded(values)
            sizes = np.abs(values[(values != 0) & ~np.isnan(values)])
            exponent = int(np.floor(np.log10(sizes.min()))) + 1 - DIGITS if len(sizes) else 0
        known = ~np.isnan(values)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = 10.0 ** min(-exponent, MAX_EXACT)
            steps = np.diff(np.round(values[known] * scale), prepend=0.0)
        if -exponent <= MAX_EXACT and np.abs(steps).max(initial=0) < -MISSING_CODE:
            packed = np.full(len(values), MISSING_CODE, "<i4")
            packed[known] = steps
        elif given:
            packed = values.astype("<f8")
        else:
            bits = values.astype("<f8").view("<u8")
            packed = ((bits + np.uint64(1 << 31)) >> np.uint64(32)).astype("<u4")
        return self._store(packed, exponent)

    def _store(self, packed: np.ndarray, exponent: int) -> dict[str, Any]:
        # First the first byte of all numbers, then the second ...: neighbours are alike.
        data = packed.view(np.uint8).reshape(len(packed), -1).T.tobytes()
        kind = packed.dtype.str[1:]
        key = kind, exponent, data
        if key not in self._places:
            place = {"at": len(self.data), "n": len(packed), "type": kind, "exponent": exponent}
            self._places[key] = place
            self.data += data
        return self._places[key]


def _rounded(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(values))))
        rounded = np.round(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)  # 0 and the smallest as they are


def build_page(content: dict[str, Any], arrays: Arrays) -> str:
    """The HTML of the page. `content` is plain values, of finite numbers."""
    described = json.dumps(content, allow_nan=False).encode()
    payload = len(described).to_bytes(4, "little") + described + bytes(arrays.data)
    parts = {
        "uplot.css": _read("uplot/uPlot.min.css"),
        "page.css": _read("page.css"),
        "uplot.js": _read("uplot/uPlot.iife.min.js"),
        "charts.js": _read("charts.js"),
        "page.js": _read("page.js"),
        "payload": base64.b64encode(gzip.compress(payload, 6, mtime=0)).decode(),
    }
    page = _read("page.html")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def _read(name: str) -> str:
    return files("lingua.tools.runs.report").joinpath(name).read_text(encoding="utf-8")
