"""Images in a zip or a tar, read in place. A compressed tar is read from front to back, an uncompressed one anywhere.

In a tar, a file beside an image with the same name and the ending .cls or .json gives its class, as WebDataset shards
have it; else the folder does.
"""

import bz2
import gzip
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ict.data.pile import Entry, Listing, check_entry, is_image, label_of, stamp_of
from ict.reading import ConfigError

MAX_RATIO = 200  # of unpacked to packed size
MAX_LABEL = 1 << 20  # bytes of a .cls, a .json or a header
BESIDE = 16  # images of one sample
OPENERS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}


@dataclass(frozen=True, kw_only=True)
class Zip:
    """A zip archive."""

    path: Path

    def stamp(self) -> str:
        return stamp_of(self.path)

    def count(self) -> int | None:
        return len(self.members())

    def members(self) -> list[zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                listed = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise ConfigError(f"data.source: {self.path} is damaged or not a .zip ({error})") from error
        return [one for one in listed if is_image(one.filename) and not one.is_dir()]

    def entries(self) -> Listing:
        names: set[str] = set()
        for member in self.members():
            name = member.filename
            entry = Entry(name, str(self.path), member.file_size, member.header_offset, label_of(name))
            ratio = member.file_size // max(1, member.compress_size)
            if member.flag_bits & 1:
                yield entry, "encrypted"
            elif ratio > MAX_RATIO:
                yield entry, f"unpacks to {ratio} times its size"
            else:
                yield entry, check_entry(entry, names)


@dataclass(frozen=True, kw_only=True)
class Tar:
    """A tar archive, compressed or not."""

    path: Path

    def stamp(self) -> str:
        return stamp_of(self.path)

    def count(self) -> int | None:
        return None  # it has no table of contents

    def entries(self) -> Listing:
        """Images up to the end, or up to where the archive is damaged: what comes after is lost, and said to be."""
        found = 0
        try:
            for entry, reason in self.labelled():
                found += 1
                yield entry, reason
        except ConfigError:
            raise
        except Exception as error:  # a damaged archive may throw anything
            if not found:
                raise ConfigError(
                    f"data.source: {self.path} is damaged or not a .tar, .tar.gz, .tar.bz2 or .tar.xz ({error!r})"
                ) from error
            yield Entry(self.path.name, str(self.path), 0), f"damaged after {found:,} images: {error}"

    def labelled(self) -> Listing:
        """Images with the class that a file beside them gives: one of the same name, or of the same sample."""
        waiting: list[tuple[Entry, str | None]] = []
        labels: dict[str, str] = {}
        key = ""
        try:
            for name, found, given in self.members():
                if key_of(name) != key:
                    yield from (with_label(one, labels) for one in waiting)
                    waiting, labels, key = [], {}, key_of(name)
                if given is not None:
                    labels[stem_of(name)] = given
                if found is not None:
                    waiting.append(found)
                while len(waiting) > BESIDE:  # a name before the first dot that is not one of a sample
                    yield with_label(waiting.pop(0), labels)
        except Exception:  # what came before the damage is good
            yield from (with_label(one, labels) for one in waiting)
            raise
        yield from (with_label(one, labels) for one in waiting)

    def members(self) -> Iterator[tuple[str, tuple[Entry, str | None] | None, str | None]]:
        """Name of each member that matters, with its entry where it is an image, and the class where it holds one."""
        names: set[str] = set()
        packed = compression(self.path)
        stream = Limited(packed(self.path), MAX_RATIO * max(self.path.stat().st_size, 1 << 16)) if packed else None
        mode = "r|" if packed else "r:"
        with tarfile.open(self.path, mode, fileobj=stream, tarinfo=Header) as archive:  # type: ignore
            for member in archive:
                name = member.name
                if member.size < 0:
                    raise tarfile.ReadError("a member of negative size")
                if is_image(name) and not member.isdir():
                    there = not packed and not member.issparse()  # as it is, in one piece
                    entry = Entry(
                        name, str(self.path), member.size, member.offset_data if there else None, label_of(name)
                    )
                    reason = check_entry(entry, names) if member.isreg() else "a link or a device, not a file"
                    if not there and reason is None:
                        entry = replace(entry, content=read_member(archive, member))
                    yield name, (entry, reason), None
                elif name.lower().endswith((".cls", ".json")) and member.isreg() and member.size <= MAX_LABEL:
                    yield name, None, parse_label(name.lower(), read_member(archive, member))


class Header(tarfile.TarInfo):
    """A tar's header that is right or an error: `tarfile` takes a wrong one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "Header":
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore  # the mark at the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"a damaged header, or no mark at its end ({error})") from error
        extra = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if header.size < 0 or (header.type in extra and header.size > MAX_LABEL):
            raise tarfile.ReadError("a header of an impossible size")
        return header  # type: ignore


class Limited:
    """A stream that refuses to become much longer than what it was unpacked from."""

    def __init__(self, stream: IO[bytes], limit: int):
        self.stream, self.left = stream, limit

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise tarfile.ReadError(f"unpacks to more than {MAX_RATIO} times its size")
        return data


def compression(path: Path) -> Callable[[Path], Any] | None:
    """How to open a compressed file, by its first bytes; None: it is not compressed."""
    with path.open("rb") as file:
        first = file.read(8)
    return next((opener for magic, opener in OPENERS.items() if first.startswith(magic)), None)


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # a regular file
    data = file.read()
    if len(data) != member.size:
        raise tarfile.ReadError("unexpected end of data")
    return data


def key_of(name: str) -> str:
    """What files of one sample share: everything before the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def stem_of(name: str) -> str:
    """A name without its ending."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.rpartition(".")[0]


def parse_label(name: str, data: bytes) -> str | None:
    """The class that a .cls or a .json gives, if it does."""
    try:
        if name.endswith(".cls"):
            return data.decode().strip() or None
        fields = json.loads(data)
        given = next((fields[key] for key in ("label", "class", "cls") if key in fields), None)
        return None if given is None or isinstance(given, (dict, list)) else str(given)
    except (ValueError, TypeError, RecursionError):
        return None


def with_label(found: tuple[Entry, str | None], labels: dict[str, str]) -> tuple[Entry, str | None]:
    entry, reason = found
    label = labels.get(stem_of(entry.name), labels.get(key_of(entry.name)))
    return (entry if label is None else replace(entry, label=label)), reason
