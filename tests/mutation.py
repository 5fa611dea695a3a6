"""Inputs changed at random, and what a reader may do with them: accept them, or refuse them with a
UserError that names a key or the file. No other exception, no hang, bounded memory, and nothing of
an input is executed.

    def make(draw):
        path.write_bytes(change_bytes(original, draw))
        return lambda: read(path), [str(path)]

    fuzz(make, seconds=20)
"""

import errno
import json
import os
import pickle
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from lingua.base.errors import UserError

SEED = 14  # the cases of a test follow from it
CASE_S = 60  # in which a case must be answered, on a busy machine
MEMORY = 4 << 30  # bytes of address space that all cases together may add
EXECUTED = Path(tempfile.gettempdir(), f"lingua-executed-{os.getpid()}")

# Values of a file of JSON or YAML, its bytes, and words of a command line.
HOSTILE = Path(__file__).with_name("hostile.txt").read_text().split("\n\n")
VALUES, BYTES, WORDS = (
    [eval(line, {"EXECUTED": str(EXECUTED)}) for line in part.splitlines() if line[0] != "#"]
    for part in HOSTILE
)


class Executes:
    """A pickle that makes a folder where it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(EXECUTED),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def fuzz(make: Callable[[random.Random], tuple[Callable[[], Any], Sequence[str]]], seconds: float):
    """Read one input after another for some seconds. `make` returns what reads one, and names: a
    refusal must contain one of them. Inputs of both kinds, accepted and refused, must occur."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    n = refused = 0
    end = time.monotonic() + seconds
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    try:
        while time.monotonic() < end:
            read, names = make(random.Random(f"{SEED} {n}"))
            refused += is_refused(read, names, f"case {n}")
            n += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)
    assert not EXECUTED.exists()
    assert n > 20 and n / 20 < refused < n, (n, refused)


def is_refused(read: Callable[[], Any], names: Sequence[str], case: str = "") -> bool:
    """Whether a program refuses its input; fails where it does so without one of `names`."""
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
            read()
    except UserError as error:
        message = str(error)
        assert any(name in message for name in names), f"{case}: {message[:1000]!a}"
        assert len(message) < 20_000 and "MemoryError" not in message, f"{case}: {message[:1000]!a}"
        return True
    except BaseException as error:
        if getattr(error, "errno", None) != errno.ENAMETOOLONG:  # which run_program reports
            raise AssertionError(f"{case}: {type(error).__name__}: {error}"[:1000]) from error
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if dist.is_initialized():
            dist.destroy_process_group()
    assert "Traceback" not in printed.getvalue(), f"{case}: {printed.getvalue()[-2000:]}"
    return False


def late(*_: Any) -> None:
    raise TimeoutError(f"no answer in {CASE_S} s")


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, inserted, cut out, repeated or cut off, a few times."""
    changed = bytearray(content)
    # Half of the changes are near the begin, where headers are.
    span = len(changed) if draw.random() < 0.5 else min(len(changed), 400)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, n = draw.randrange(span + 1), draw.choice((1, 4, 50, 200))
        how = draw.randrange(6)
        if how == 0:
            changed[at : at + 1] = bytes([draw.randrange(256)])
        elif how == 1:
            changed[at:at] = draw.randbytes(n)
        elif how == 2:
            del changed[at : at + n]
        elif how == 3:
            changed[at:at] = changed[at : at + n]
        elif how == 4:
            changed[at:at] = draw.choice(BYTES)
        else:
            del changed[at + n :]
    return bytes(changed)


def change_tree(tree: Any, draw: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """A value of dicts, lists and objects replaced, removed or renamed, one to three times."""
    for _ in range(draw.randint(1, 3)):
        places = list(places_in(tree))
        if not places:
            break
        container, key = draw.choice(places)
        how = draw.random()
        if how < 0.7:
            container[key] = deepcopy(draw.choice(values))
        elif how < 0.9:
            del container[key]
        elif isinstance(container, dict):
            container[f"{key}_"] = container.pop(key)
    return tree if draw.random() < 0.97 else deepcopy(draw.choice(values))


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value of dicts and lists, and attributes of objects."""
    if hasattr(tree, "__dict__") and not isinstance(tree, type):
        tree = vars(tree)
    pairs = dict(enumerate(tree)) if type(tree) is list else tree if isinstance(tree, dict) else {}
    for key, value in list(pairs.items())[:50]:
        yield tree, key
        yield from places_in(value)


def change_json(content: bytes, draw: random.Random) -> bytes:
    return json.dumps(change_tree(json.loads(content), draw)).encode()


def change_file(path: Path, draw: random.Random) -> None:
    """The bytes of a file, or the values that its kind of file holds."""
    content = path.read_bytes()
    if draw.random() < 0.5 or path.suffix not in (".json", ".yaml", ".safetensors", ""):
        path.write_bytes(change_bytes(content, draw))
    elif path.name == ".metadata":
        with suppress(AttributeError, TypeError, RuntimeError):  # what does not pickle
            tree = change_tree(pickle.loads(content), draw, [*VALUES, Executes()])
            path.write_bytes(pickle.dumps(tree))
    elif path.suffix == ".safetensors":
        n = 8 + int.from_bytes(content[:8], "little")
        header = change_json(content[8:n], draw)
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[n:])
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(change_tree(yaml.safe_load(content), draw)))
    else:
        path.write_bytes(change_json(content, draw))


def hostile_argument(draw: random.Random, keys: Sequence[str]) -> str:
    """`key=value` of a command line with a value, now and then a key, that nobody means."""
    key, value, how = draw.choice(keys), draw.choice(WORDS), draw.randrange(10)
    if how == 0:
        odd = [f"{key}.x", key[:-1], key.upper(), f"{key}[0]", f".{key}", draw.choice(WORDS)]
        key = draw.choice(odd)
    elif how == 1:
        value += "".join(draw.choices(WORDS, k=2))
    return key if how == 2 else f"{key}={value}"
