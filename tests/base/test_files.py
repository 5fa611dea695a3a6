"""Files that are written beside what they replace."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lingua.base.files import open_synced, write_atomically
from tests.disk import full_disk

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = os.umask(0o027)
    yield tmp_path
    os.umask(before)


def test_a_link_that_was_planted_is_not_followed(folder):
    """By whoever else may write in the folder; the name is one that earlier versions took."""
    outside, file = folder / "outside", folder / "file"
    outside.write_text("mine")
    link = folder / f"file.tmp-{socket.gethostname()}-{os.getpid()}"
    link.symlink_to(outside)
    write_atomically(file, "new")
    assert (file.read_text(), outside.read_text()) == ("new", "mine") and link.is_symlink()
    with pytest.raises(FileExistsError):  # nor would one be whose name was guessed
        open_synced(link)
    assert outside.read_text() == "mine" and sorted(folder.iterdir()) == [file, link, outside]


def test_a_file_has_the_mode_of_the_one_that_it_replaces(folder):
    file = folder / "file"
    write_atomically(file, "a")
    assert file.stat().st_mode & 0o777 == 0o640  # by the umask
    for mode in (0o600, 0o664):
        file.chmod(mode)
        write_atomically(file, b"b")
        assert (file.stat().st_mode & 0o777, file.read_text()) == (mode, "b")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(folder):
    file = folder / "file"
    file.write_text("old")
    for content in ("x" * 1000, "x" * 10**6, "\ud800"):  # the last is no text of UTF-8
        with full_disk(100), pytest.raises((OSError, UnicodeError)):
            write_atomically(file, content)
        assert file.read_text() == "old" and list(folder.iterdir()) == [file]
