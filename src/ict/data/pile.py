"""A pile of images, wherever it lies: what is in it, and one file's bytes. Nothing is unpacked.

A pile is made of parts: folders, archives, arrays. Each can say quickly whether it is still the same (`stamp`), and
what is in it (`entries`), every file with the reason if it is refused at once. Nothing here imports torch: the
processes that decode read their files by `read_entry`.
"""

import hashlib
import os
import re
import stat
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Protocol

from ict.data.decode import ENDINGS, MAX_BYTES, Refused

if TYPE_CHECKING:
    import numpy as np

KEPT = 100_000  # entries of a folder that are remembered, so that small folders are walked once less


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a pile: where its bytes are, and what class it is of."""

    name: str
    path: str  # the file itself, or the archive that holds it
    size: int
    offset: int | None = None  # of a member of an archive; None: a file of its own
    label: str = ""
    content: "bytes | np.ndarray | None" = None  # what a stream brought along: it cannot be read again from its place


Listing = Iterator[tuple[Entry, str | None]]


class Part(Protocol):
    """A folder, an archive, an array or a set of another library."""

    def stamp(self) -> str:
        """A text that changes when a file is added, removed or rewritten; made without reading any."""
        ...

    def count(self) -> int | None:
        """How many entries there will be, where that is known at once."""
        ...

    def entries(self) -> Listing: ...


@dataclass(frozen=True, kw_only=True)
class Pile:
    """All parts of a source."""

    source: str
    parts: list[Part]
    classes: tuple[str, ...] | None = None  # where the source fixes them; else the labels that occur

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.classes).encode("utf-8", "replace"))
        for part in self.parts:
            digest.update(f"{type(part).__name__}\0{part.stamp()}\0".encode("utf-8", "replace"))
        return digest.hexdigest()

    def count(self) -> int | None:
        counts = [part.count() for part in self.parts]
        return sum(counts) if None not in counts else None  # type: ignore

    def entries(self) -> Listing:
        for part in self.parts:
            yield from part.entries()


def stamp_of(path: Path) -> str:
    """Where a file is, its size and its time."""
    found = path.stat()
    return f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ctime_ns}\n"


@dataclass(kw_only=True)
class Folder:
    """Images in a folder and below, in the order of their names; links are followed only to files inside."""

    root: Path
    found: int | None = None
    kept: list[tuple[Entry, str | None]] = field(default_factory=list)  # the first of what the last walk has seen

    def stamp(self) -> str:
        digest = hashlib.sha256(str(self.root.resolve()).encode("utf-8", "replace"))
        self.found, self.kept = 0, []
        for entry, reason, time in self.walk():
            digest.update(f"{entry.name}\0{entry.size}\0{time}\n".encode("utf-8", "replace"))
            self.found += 1
            if self.found <= KEPT:
                self.kept.append((entry, reason))
        return digest.hexdigest()

    def count(self) -> int | None:
        return self.found

    def entries(self) -> Listing:
        yield from self.kept
        for entry, reason, _ in islice(self.walk(), len(self.kept), None) if self.found != len(self.kept) else ():
            yield entry, reason

    def walk(self) -> Iterator[tuple[Entry, str | None, str]]:
        """Every image with the reason if it is refused, and when it was last written."""
        home, waiting = self.root.resolve(), [("", str(self.root))]  # folders: their names from the root, and paths
        while waiting:
            above, folder = waiting.pop()
            try:
                with os.scandir(folder) as listing:
                    found = sorted((one for one in listing if not one.name.startswith(".")), key=lambda one: one.name)
            except OSError as error:
                if not above:
                    raise
                yield Entry(above, folder, 0), f"cannot be read ({error.strerror})", ""
                continue
            below = [one for one in found if one.is_dir(follow_symlinks=False)]
            waiting += [(f"{above}{one.name}/", one.path) for one in reversed(below)]
            for one in found:
                name = f"{above}{one.name}"
                if one.name.lower().endswith(ENDINGS) and not one.is_dir(follow_symlinks=False):
                    yield look(name, one, home)
                elif one.is_symlink() and one.is_dir():
                    yield Entry(f"{name}/", one.path, 0), "a link to a folder, which is not followed", ""


def look(name: str, one: os.DirEntry[str], home: Path) -> tuple[Entry, str | None, str]:
    """A file of a folder, why it is refused, and when it was last written."""
    try:
        found = one.stat()
        inside = not one.is_symlink() or Path(one.path).resolve().is_relative_to(home)
    except OSError as error:
        return Entry(name, one.path, 0), f"cannot be read ({error.strerror})", ""
    entry = Entry(name, one.path, found.st_size, label=label_of(name))
    if not stat.S_ISREG(found.st_mode):
        return entry, "not a file", ""
    # The second time also tells when permissions changed.
    reason = check_size(entry) if inside else "a link that leads out of the folder"
    return entry, reason, f"{found.st_mtime_ns}\0{found.st_ctime_ns}"


def check_entry(entry: Entry, names: set[str]) -> str | None:
    """Why a member of an archive is not even read."""
    parts = PurePosixPath(entry.name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", entry.name):
        return "a path that leads out of the archive"
    if entry.name in names:
        return "a second file of the same name"
    names.add(entry.name)
    return check_size(entry)


def check_size(entry: Entry) -> str | None:
    return f"larger than {MAX_BYTES >> 20} MiB" if entry.size > MAX_BYTES else None


def is_image(name: str) -> bool:
    """Whether a member of an archive is an image by its name; hidden ones are not."""
    return name.lower().endswith(ENDINGS) and not any(is_hidden(part) for part in parts_of(name))


def is_hidden(part: str) -> bool:
    return part == "__MACOSX" or (part.startswith(".") and part not in (".", ".."))


def parts_of(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.replace("\\", "/").split("/") if part not in ("", "."))


def label_of(name: str) -> str:
    """The class of a file: the folder at the top of its path."""
    parts = parts_of(name)
    return parts[0] if len(parts) > 1 else ""


_opened = threading.local()


def is_zip(path: Path | str) -> bool:
    return str(path).lower().endswith(".zip")


def open_member(path: str, offset: int | None) -> IO[bytes]:
    """A member of a zip, by its place: names may occur twice. The zip's directory is read once in each thread."""
    found = os.stat(path)
    key = (path, found.st_ino, found.st_size, found.st_mtime_ns)
    if getattr(_opened, "key", None) != key:
        if hasattr(_opened, "archive"):
            _opened.archive.close()
        _opened.archive = zipfile.ZipFile(path)
        _opened.members = {member.header_offset: member for member in _opened.archive.infolist()}
        _opened.key = key
    return _opened.archive.open(_opened.members[offset])


def read_entry(entry: Entry) -> "bytes | np.ndarray":
    """The bytes (or the pixels) of one image; raises Refused."""
    if entry.content is not None:
        return entry.content
    try:
        if is_zip(entry.path) and entry.offset is not None:
            with open_member(entry.path, entry.offset) as file:
                data = file.read(entry.size + 1)
                if len(data) > entry.size:
                    raise Refused("larger than its archive says")
                return data
        if entry.offset is not None:
            with open(entry.path, "rb", buffering=0) as file:
                file.seek(entry.offset)
                return file.read(entry.size)
        with open(entry.path, "rb", buffering=0) as file:  # asked for what it holds: a buffer of that size is made
            return file.read(min(entry.size, MAX_BYTES) + 1)
    except Refused:
        raise
    except Exception as error:  # a damaged archive may throw anything
        raise Refused(f"cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
