"""Files from the network, only when asked for: resumed where they broke off, believed only after their checksum."""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ict.files import sync_folder
from ict.reading import ConfigError

BLOCK = 1 << 20
PATIENCE = 60  # seconds without a byte


@dataclass(frozen=True, kw_only=True)
class Download:
    """Where a file is, and what it must be."""

    url: str
    sha256: str
    size: int


Progress = Callable[[int, int], object]


def fetch(what: Download, path: Path, *, url: str | None = None, progress: Progress | None = None) -> Path:
    """Bring a file to a path, unless it is there and right. What came before a break is kept and gone on with."""
    if path.is_file() and checksum(path) == what.sha256:
        return path
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    place = url or what.url
    try:
        receive(place, partial, what.size, progress)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{place} cannot be brought ({reason}). What has come is kept: try again, or bring the file by another way "
            f"and put it at {path}"
        ) from error
    got = checksum(partial)
    if got != what.sha256:
        size = partial.stat().st_size
        partial.unlink()
        raise ConfigError(
            f"{place} is not the file it should be: {size:,} bytes with SHA-256 {got}, not {what.size:,} bytes with "
            f"{what.sha256}; it was thrown away"
        )
    partial.replace(path)
    sync_folder(path.parent)
    return path


def receive(url: str, partial: Path, size: int, progress: Progress | None) -> None:
    """Append to a partial file until it is whole."""
    have = partial.stat().st_size if partial.exists() else 0
    if have >= size:
        return
    request = urllib.request.Request(
        url, headers={"User-Agent": "ict", **({"Range": f"bytes={have}-"} if have else {})}
    )
    try:
        opened = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # what we have is not the beginning of what is there
            partial.unlink()
        raise
    with opened as answer:
        continued = getattr(answer, "status", None) == 206
        start = have if continued else 0
        length = answer.headers.get("Content-Length")
        if length is not None and start + int(length) != size:
            partial.unlink(missing_ok=True)
            raise ValueError(f"it announces {start + int(length):,} bytes instead of {size:,}")
        with partial.open("ab" if continued else "wb") as file:
            have = have if continued else 0
            while have <= size and (block := answer.read(BLOCK)):  # never much more than was announced
                file.write(block)
                have += len(block)
                if progress is not None:
                    progress(have, size)
    if have < size:
        raise OSError(f"the connection ended after {have:,} of {size:,} bytes")


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
