"""A pile of image files, wherever they lie: a folder, a zip, a tar, or many tars. Nothing is unpacked."""

import glob
import hashlib
import os
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ict.config import ConfigError
from ict.data.decode import ENDINGS, MAX_BYTES, Refused

MAX_RATIO = 200  # of unpacked to packed size in a zip


@dataclass(frozen=True)
class Entry:
    """One file of a pile: where its bytes are, and the name of the folder it lies in."""

    name: str
    path: Path  # the file itself, or the archive that holds it
    size: int
    offset: int | None = None  # of a tar's member; None: a file of its own, or a zip's member
    label: str = ""
    time: int = 0  # when a file of its own was last written; a member of an archive is as old as the archive


@dataclass
class Pile:
    """Everything that was found, and what was passed over at once with its reason."""

    entries: list[Entry] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    fingerprint: str = ""  # changes when a file is added, removed or rewritten


def list_pile(source: str) -> Pile:
    """Find every image in a folder, a .zip, a .tar or a pattern of shards like shard-{000..127}.tar."""
    pile, stamps = Pile(), hashlib.sha256()
    for path in expand(source):
        stat = path.stat()
        found = list_folder(path) if path.is_dir() else list_archive(path)
        names: set[str] = set()
        for entry, reason in found:
            reason = reason or check_entry(entry, names)
            if reason:
                pile.refused.append((entry.name, reason))
            else:
                names.add(entry.name)
                pile.entries.append(entry)
            stamp = f"{entry.name}\0{entry.size}\0{entry.time or stat.st_mtime_ns}\n"
            stamps.update(stamp.encode("utf-8", "replace"))
    pile.fingerprint = stamps.hexdigest()
    return pile


def is_zip(path: Path) -> bool:
    return path.suffix.lower() == ".zip"


def check_entry(entry: Entry, names: set[str]) -> str | None:
    """Why a file is not even read."""
    parts = PurePosixPath(entry.name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", entry.name):
        return "a path that leads out of the archive"
    if entry.name in names:
        return "a second file of the same name"
    if entry.size > MAX_BYTES:
        return f"larger than {MAX_BYTES >> 20} MiB"
    return None


def expand(source: str) -> list[Path]:
    """Paths that a source means; {000..127} counts, * matches."""
    counted = re.search(r"\{(\d+)\.\.(\d+)\}", source)
    if counted:
        first, last, width = int(counted[1]), int(counted[2]), len(counted[1])
        names = [source.replace(counted[0], f"{i:0{width}d}") for i in range(first, last + 1)]
    elif any(sign in source for sign in "*?"):
        names = sorted(glob.glob(os.path.expanduser(source)))
    else:
        names = [source]
    paths = [Path(name).expanduser() for name in names]
    missing = [path for path in paths if not path.exists()]
    if missing or not paths:
        raise ConfigError(f"data.source: there is no {missing[0] if missing else source}")
    return paths


def list_folder(root: Path) -> Iterator[tuple[Entry, str | None]]:
    """Images in a folder and below, in the order of their names; links are followed only to files inside."""
    home, waiting = root.resolve(), [root]
    while waiting:
        folder = waiting.pop()
        with os.scandir(folder) as listing:
            found = sorted((one for one in listing if not one.name.startswith(".")), key=lambda one: one.name)
        waiting += [folder / one.name for one in reversed(found) if one.is_dir(follow_symlinks=False)]
        for one in found:
            if not one.name.lower().endswith(ENDINGS):
                continue
            path = folder / one.name
            name = path.relative_to(root).as_posix()
            try:
                stat = one.stat()
                inside = not one.is_symlink() or path.resolve().is_relative_to(home)
            except OSError as error:
                yield Entry(name, path, 0), f"cannot be read ({error.strerror})"
                continue
            reason = None if inside else "a link that leads out of the folder"
            yield Entry(name, path, stat.st_size, label=label_of(name), time=stat.st_mtime_ns), reason


def list_archive(path: Path) -> Iterator[tuple[Entry, str | None]]:
    """Images in a zip or an uncompressed tar."""
    try:
        if is_zip(path):
            yield from list_zip(path)
        else:
            yield from list_tar(path)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"data.source: {path} is damaged or not a .zip or an uncompressed .tar ({error})") from error


def list_zip(path: Path) -> Iterator[tuple[Entry, str | None]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.is_dir() or not member.filename.lower().endswith(ENDINGS):
                continue
            reason, ratio = None, member.file_size // max(1, member.compress_size)
            if ratio > MAX_RATIO:
                reason = f"unpacks to {ratio} times its size"
            if member.flag_bits & 1:
                reason = "encrypted"
            yield Entry(member.filename, path, member.file_size, label=label_of(member.filename)), reason


def list_tar(path: Path) -> Iterator[tuple[Entry, str | None]]:
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isdir() or not member.name.lower().endswith(ENDINGS):
                continue
            reason = None if member.isreg() else "a link or a device, not a file"
            yield Entry(member.name, path, member.size, member.offset_data, label_of(member.name)), reason


def label_of(name: str) -> str:
    """The class of a file: the folder at the top of its path."""
    top, slash, _ = name.removeprefix("./").partition("/")
    return top if slash else ""


_opened = threading.local()


def open_zip(path: Path) -> zipfile.ZipFile:
    """A zip, opened once in each thread: its directory is read only once."""
    if getattr(_opened, "path", None) != path:
        _opened.path, _opened.archive = path, zipfile.ZipFile(path)
    return _opened.archive


def read_entry(entry: Entry) -> bytes:
    """The bytes of one file; raises Refused."""
    try:
        if entry.offset is not None:
            with entry.path.open("rb") as file:
                file.seek(entry.offset)
                return file.read(entry.size)
        if is_zip(entry.path):
            with open_zip(entry.path).open(entry.name) as file:
                data = file.read(entry.size + 1)
                if len(data) > entry.size:
                    raise Refused("larger than its archive says")
                return data
        with entry.path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except Refused:
        raise
    except Exception as error:  # a damaged archive may throw anything
        raise Refused(f"cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
