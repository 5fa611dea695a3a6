"""Reads the file that wandb writes offline, for tests."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record


def logged_in(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged. The file is a log of LevelDB: its records are in blocks of 32 KiB, each in
    one part (1), or in a first (2), middle (3) and last (4) one."""
    file = path.read_bytes()
    at, record = 7, b""
    while at + 7 <= len(file):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, size, part = struct.unpack_from("<IHB", file, at)
        record += file[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):
            items = Record.FromString(record).history.item
            record = b""
            if items:
                names = ("/".join(item.nested_key) or item.key for item in items)
                yield dict(zip(names, (json.loads(i.value_json) for i in items), strict=True))
