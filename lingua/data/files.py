"""Which files a source consists of: the same ones in the same order on every machine.

A source `name` is `<root_dir>/<name>`, a folder or a file, or `<name>` with one of SUFFIXES; or the
files that the patterns of `data.source_files` match. Of a folder every file counts, at any depth;
names that begin with a dot, __pycache__ and descriptions of the data such as README.md do not. The
order is that of the paths' bytes. `stdlib` is the running Python's standard library: every .py file
that is not empty, except tests and installed packages.
"""

import glob
import os
import re
import stat
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from lingua.base.errors import UserError, nearest
from lingua.base.urls import RemoteFile, is_url, local_path, storage

STDLIB = "stdlib"
# Names may leave them out.
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt", ".bin", ".ds")
HUB_CACHE = {"blobs", "refs", "snapshots"}  # folders of a data set in the cache of a hub
TOKEN_FILES = (".bin", ".ds", ".arrow")  # may be files of tokens
READ_BYTES = 2**22  # bytes of one read
IO_THREADS = 8  # threads that wait for the file system
_NOT_MODULES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_NOT_READ = {".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz", ".idx", ".npy", ".npz"}
_DESCRIPTION = r"(readme|licen[cs]e|dataset_?card)(\.(md|txt|rst))?|dataset_infos?\.json"


@dataclass(frozen=True)
class FilePart:
    """Bytes `begin` to `end` of a file of a source: all of them, unless the file was split."""

    path: str  # relative to the source's folder (patterns: to root_dir), with "/"; or a URL
    full: str  # its place on this machine; what a URL names is there after `make_local`
    size: int  # bytes of the whole file
    mtime_ns: int  # of what a URL names, a number made of its version
    begin: int
    end: int


def find_files(
    name: str, root_dir: Path, patterns: Iterable[str] = (), key: str = ""
) -> list[FilePart]:
    """The whole files of source `name` in order. Raises UserError, which names the source by `key`
    (default: data.sources.NAME)."""
    key = key or f"data.sources.{name}"
    if patterns:
        files = _match(name, root_dir, patterns)
    elif name == STDLIB:
        files = _stdlib(root_dir, key)
    else:
        place = _find_source(name, root_dir, key)
        files = _files_at(place, Path() if place.is_dir() else Path(place.name))
        if not files:
            raise UserError(f"{key}: {place} has no files")
    if any(file.path.endswith(TOKEN_FILES) for file in files):
        make_local(files)  # their first bytes say what they are
        files = without_companions(files)
    for file in files:
        if Path(file.path).suffix.lower() in _NOT_READ:
            raise UserError(
                f"{key}: {file.full} cannot be read; must be .jsonl, .json, .csv, .tsv, .parquet, "
                ".arrow, tokens or text, all but .parquet, .arrow and tokens also as .gz or .zst"
            )
    return sorted(files, key=lambda file: os.fsencode(file.path))


def without_companions(files: list[FilePart]) -> list[FilePart]:
    """Without the files that describe token files beside them, and are read with those."""
    names = {file.full for file in files}
    is_arrow = any(name.endswith(".arrow") for name in names)

    def is_companion(path: str) -> bool:
        stem, _, suffix = path.rpartition(".")
        return (
            (suffix in ("index", "metadata") and stem in names and stem.endswith(".ds"))
            or (suffix == "idx" and f"{stem}.bin" in names)
            or (is_arrow and Path(path).name in ("state.json", "dataset_dict.json"))
        )

    return [file for file in files if not is_companion(file.full)]


def is_description(path: Path | str) -> bool:
    """Whether a file describes a data set, by its name. It is read only where it is named."""
    return re.fullmatch(_DESCRIPTION, Path(path).name, re.IGNORECASE) is not None


def hash_part(part: FilePart) -> str:
    """xxh3_128 of the part's bytes, as a manifest records it. Raises OSError."""
    content = xxhash.xxh3_128()
    with open(part.full, "rb", buffering=0) as file:
        file.seek(part.begin)
        left = part.end - part.begin
        while left > 0 and (block := file.read(min(READ_BYTES, left))):
            content.update(block)
            left -= len(block)
    return content.hexdigest()


def _stdlib(root_dir: Path, key: str) -> list[FilePart]:
    if (root_dir / STDLIB).exists():
        raise UserError(
            f"{key}: means the standard library of Python; rename "
            f"{root_dir / STDLIB} to use it, or name it in data.source_files"
        )
    files = _files_at(Path(sysconfig.get_path("stdlib")), Path(), _NOT_MODULES)
    return [file for file in files if file.path.endswith(".py") and file.size]


def _match(name: str, root_dir: Path, patterns: Iterable[str]) -> list[FilePart]:
    files: dict[str, FilePart] = {}  # patterns may overlap
    for pattern in patterns:
        if is_url(pattern):
            found = _match_url(pattern)
            if not found:
                raise UserError(f"data.source_files.{name}.files: {pattern} matches no object")
            files |= {file.path: file for file in found}
            continue
        matches = glob.glob(pattern, root_dir=root_dir, recursive=True)
        paths = [Path(os.path.normpath(match)) for match in matches]
        if not is_description(pattern):
            paths = [path for path in paths if not is_description(path)]
        matched = [file for path in paths for file in _files_at(root_dir / path, path)]
        if not matched:
            raise UserError(
                f"data.source_files.{name}.files: {pattern} matches no file "
                f"(relative to {root_dir.absolute()})"
            )
        files |= {file.path: file for file in matched}
    return list(files.values())


def _match_url(pattern: str) -> list[FilePart]:
    return [
        FilePart(file.url, str(file.local), file.size, file.version, begin=0, end=file.size)
        for file in storage(pattern).list_remote(pattern)
        if "/." not in file.url and (file.url == pattern or not is_description(file.url))
    ]


def make_local(files: list[FilePart]) -> list[FilePart]:
    """Download what URLs name and this machine does not have as it was listed. Returns the files
    with their places here. Raises UserError."""
    remote = [RemoteFile(f.path, f.size, f.mtime_ns) for f in files if is_url(f.path)]
    if remote:
        storage(remote[0].url).download(remote)
    return [replace(f, full=str(local_path(f.path))) if is_url(f.path) else f for f in files]


def _find_source(name: str, root_dir: Path, key: str) -> Path:
    tried = [root_dir / f"{name}{suffix}" for suffix in ("", *SUFFIXES)]
    existing = [path for path in tried if path.exists()]
    if len(existing) == 1:
        return existing[0]
    if existing:
        raise UserError(f"{key}: {' and '.join(map(str, existing))} exist; must be one of them")
    known = [STDLIB]
    for path in root_dir.glob("[!.]*"):
        suffix = next((s for s in SUFFIXES if path.name.endswith(s)), "")
        known.append(path.name.removesuffix(suffix))
    raise UserError(
        f"{key}: there is no {tried[0]}, nor with {', '.join(SUFFIXES)}"
        f"{nearest(name, known)}; data.source_files.{name} may name its files"
    )


def _files_at(place: Path, path: Path, without: Iterable[str] = ()) -> list[FilePart]:
    """The file `place`, with the path `path`, or all files in that folder."""
    if not place.is_dir():
        return [_whole_file(place, path)]
    files = []
    visited = set()  # links may lead in a circle
    for parent, folders, names in os.walk(place, followlinks=True, onerror=_raise):
        real = os.path.realpath(parent)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        if {*folders} >= HUB_CACHE:  # its snapshots are links to the others
            folders[:] = ["snapshots"]
        folders[:] = [f for f in folders if f[0] != "." and f not in ("__pycache__", *without)]
        inside = [Path(parent, n) for n in names if n[0] != "." and not is_description(n)]
        files += [_whole_file(full, path / full.relative_to(place)) for full in inside]
    return files


def _raise(error: OSError) -> None:
    raise error


def _whole_file(full: Path, path: Path) -> FilePart:
    info = full.stat()
    name = str(full).encode(errors="backslashreplace").decode()
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{name}: is a pipe, a socket or a device; must be a file")
    if name != str(full):
        raise UserError(f"{name}: the name of this file is not UTF-8; rename it")
    size = info.st_size
    return FilePart(path.as_posix(), str(full), size, info.st_mtime_ns, begin=0, end=size)
