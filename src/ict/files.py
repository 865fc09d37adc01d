"""Writing files so that a crash leaves the old one or the new one, never half of one; and a run's folder."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ict.reading import ConfigError, require


class DamagedFile(Exception):
    """A file of ours that cannot be read; the message says which and what is wrong with it."""


def explain(error: OSError) -> str:
    """Which file, and what is wrong with it."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


_OURS: dict[Path, os.stat_result] = {}  # folders of runs in this process, and what they are


@contextlib.contextmanager
def ours(folder: Path, handle: int) -> Iterator[None]:
    """While a run is in a folder, know it from another of the same name."""
    _OURS[folder] = os.fstat(handle)
    try:
        yield
    finally:
        del _OURS[folder]


def check_folder(folder: Path) -> None:
    """That the folder of a run is still there, and the same: it is not made anew, as it may have been another disk."""
    if not folder.is_dir() or not os.path.samestat(folder.stat(), _OURS.get(folder, folder.stat())):
        raise FileNotFoundError(errno.ENOENT, "the run's folder has vanished", str(folder))


def write_new(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a new file and, unless told not to, wait until it is on the disk. An error names it and what it needs."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        size = f"{len(data) / 2**20:.1f} MiB"
        raise OSError(error.errno, f"{error.strerror} (it needs {size})", str(path)) from error


def write_atomically(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a file in one step; on an error (a full disk) the old one stays and nothing is left lying about.

    Without `sync` it is not waited for until it is on the disk: for one of many, whose folder is synced in the end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")  # two processes do not meet in it
    try:
        write_new(temporary, data, sync=sync)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def check_target(option: str, path: Path, *, folder: bool = False) -> None:
    """That a file, or files in a folder, can be written at a path, before the work whose result they are."""
    if folder:
        require(path.is_dir() or not path.exists(), f"{option} {path} is a file: give a folder, or a .png")
    else:
        require(not path.is_dir(), f"{option} {path} is a folder: name a file")
    place = path if folder else path.parent
    while not os.path.lexists(place):
        place = place.parent
    require(place.is_dir(), f"{option} {path} cannot be written: {place} is not a folder")
    trial = place / f".ict.{os.getpid()}.partial"
    try:
        trial.touch()
        trial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written in {place} ({error.strerror}): choose another") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for other processes that hold the same lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove(path: Path) -> None:
    """Delete a file or a folder; of a link, only the link."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_space(path: Path) -> str:
    """What is left on the disk of a path, or of the nearest folder above it that is there, in words."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return f"{shutil.disk_usage(path).free / 2**20:,.1f} MiB"
    except OSError as error:
        return f"an unknown number of bytes ({error.strerror})"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cache_home() -> Path:
    """Where decoded sets and downloads are kept: $ICT_CACHE, or .cache/ict in the user's home."""
    return Path(os.environ.get("ICT_CACHE") or Path.home() / ".cache" / "ict").expanduser()


# --- what is where in the folder of a run; names that are not ours are never touched

STEP_FOLDER = re.compile(r"step-(\d{8,})")
EVIDENCE = re.compile(r"step-\d{8,}-\d+\.json|attempt\.json")
STEP_PICTURE = re.compile(r"step-(\d{8,})\.png")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return _numbered(run / "checkpoints", STEP_FOLDER)


def list_snapshots(run: Path) -> list[Path]:
    """Pictures of samples drawn on the way, oldest first."""
    return _numbered(run / "samples", STEP_PICTURE)


def list_evidence(run: Path) -> list[Path]:
    """What the guard has written down of its alarms."""
    return sorted(path for path in (run / "guard").glob("*.json") if EVIDENCE.fullmatch(path.name))


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint or a snapshot."""
    return int(path.stem.removeprefix("step-"))


def holds_run(folder: Path) -> bool:
    """Whether there is anything of a run in a folder."""
    return (folder / "log.jsonl").is_file() or bool(list_checkpoints(folder))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = [path for path in folder.glob("step-*") if pattern.fullmatch(path.name)]
    return sorted(found, key=step_of)
