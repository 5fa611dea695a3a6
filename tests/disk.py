"""A full disk, for tests."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(n_bytes: int = 100) -> Iterator[None]:
    """No file of this process can grow past a size; Python ignores the signal of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
