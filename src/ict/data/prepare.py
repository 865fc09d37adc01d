"""A pile of images decoded once: one memory-mapped file of pixels, and a manifest that says what it was made from.

    CACHE/<key>/pixels.u8       uint8 [n, C, H, W]
    CACHE/<key>/labels.npy      int64 [n]
    CACHE/<key>/manifest.json   source, options, counts, what was refused and why, SHA-256 of the pixels; written last

The key is a hash of the source's files (names, sizes, times) and of the options, so that a change of either makes a new
set. It is made beside its place and moved there whole; a second process that wants the same set waits for the first.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ict.config import DataConfig, require
from ict.data.decode import Refused, Target, decode
from ict.data.images import Images
from ict.data.pile import Entry, Pile, list_pile, read_entry
from ict.files import sync_folder, write_synced

FORMAT = "ict-images-1"
CHUNK = 64  # images a thread takes at a time
Progress = Callable[[int, int], object]


def cache_home() -> Path:
    """Where prepared sets are kept: $ICT_CACHE, or .cache/ict in the user's home."""
    return Path(os.environ.get("ICT_CACHE") or Path.home() / ".cache" / "ict")


def target_of(config: DataConfig) -> Target:
    return Target(size=config.image_size, channels=config.channels, fit=config.fit, background=config.background)


def load_pile(config: DataConfig, progress: Progress | None = None) -> Images:
    """The images of a folder or an archive, decoded now or earlier."""
    return open_prepared(prepare(config, progress))


def prepare(config: DataConfig, progress: Progress | None = None) -> Path:
    """The folder of the decoded set; made if it is not there."""
    pile = list_pile(config.source)
    require(bool(pile.entries), f"data.source: no image was found in {config.source}{_first_reason(pile.refused)}")
    target = target_of(config)
    described = json.dumps({"format": FORMAT, "pile": pile.fingerprint, **asdict(target)}, sort_keys=True)
    folder = cache_home() / hashlib.sha256(described.encode()).hexdigest()[:24]
    if is_prepared(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not is_prepared(folder):  # another process may have made it meanwhile
            make(folder, config.source, pile, target, progress)
    return folder


def make(folder: Path, source: str, pile: Pile, target: Target, progress: Progress | None) -> None:
    """Decode everything into a folder beside the right one, then move it there."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        manifest = write_pixels(partial, pile, target, progress)
        require(
            list_pile(source).fingerprint == pile.fingerprint,
            f"data.source: {source} changed while it was being prepared; start again when it is at rest",
        )
        manifest |= {"format": FORMAT, "source": source, "options": asdict(target)}
        write_synced(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync_folder(partial)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        partial.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        reason = f"{error.strerror}, while preparing images; $ICT_CACHE chooses another place"
        raise OSError(error.errno, reason, str(error.filename or partial)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_pixels(partial: Path, pile: Pile, target: Target, progress: Progress | None) -> dict[str, Any]:
    """Decode the entries in order, into pixels.u8 and labels.npy; gives the counts."""
    classes = sorted({entry.label for entry in pile.entries})
    numbers = {name: i for i, name in enumerate(classes)}
    labels: list[int] = []
    refused = list(pile.refused)
    digest = hashlib.sha256()
    done = 0
    with (partial / "pixels.u8").open("wb") as file:
        for outcomes, pixels in decode_all(pile.entries, target):
            file.write(pixels)
            digest.update(pixels)
            labels += [numbers[entry.label] for entry, reason in outcomes if reason is None]
            refused += [(entry.name, reason) for entry, reason in outcomes if reason is not None]
            done += len(outcomes)
            if progress is not None:
                progress(done, len(pile.entries))
        file.flush()
        os.fsync(file.fileno())
    require(bool(labels), f"data.source: not one image could be used{_first_reason(refused)}")
    with (partial / "labels.npy").open("wb") as file:
        np.save(file, np.array(labels, dtype=np.int64))
    counted = Counter(classes[i] for i in labels)
    return {
        "count": len(labels),
        "classes": {name: counted[name] for name in classes},
        "sha256": digest.hexdigest(),
        "refused": refused,
    }


Chunk = tuple[list[tuple[Entry, str | None]], bytes]


def decode_all(entries: list[Entry], target: Target) -> Iterator[Chunk]:
    """Chunks of entries, each with the reason if it was refused, and the pixels of the rest, in order.

    By as many threads as cores: Pillow lets go of the interpreter while it decodes and resizes, and so do the hash and
    the file when they are given a whole chunk.
    """
    chunks = iter([entries[i : i + CHUNK] for i in range(0, len(entries), CHUNK)])
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        # No more than this is ever held in memory.
        waiting = deque(pool.submit(decode_chunk, chunk, target) for chunk in islice(chunks, 3 * workers))
        while waiting:
            finished = waiting.popleft().result()
            waiting.extend(pool.submit(decode_chunk, chunk, target) for chunk in islice(chunks, 1))
            yield finished


def decode_chunk(chunk: list[Entry], target: Target) -> Chunk:
    """The work of one thread."""
    outcomes: list[tuple[Entry, str | None]] = []
    pixels: list[bytes] = []
    for entry in chunk:
        try:
            pixels.append(decode(read_entry(entry), target).tobytes())
            outcomes.append((entry, None))
        except Refused as refused:
            outcomes.append((entry, str(refused)))
    return outcomes, b"".join(pixels)


def is_prepared(folder: Path) -> bool:
    """Whether a set is there and whole: what was cut off or is of another version is made again."""
    try:
        manifest = read_manifest(folder)
        size = manifest["count"] * manifest["options"]["channels"] * manifest["options"]["size"] ** 2
        labels = np.load(folder / "labels.npy", mmap_mode="r", allow_pickle=False)
        whole = (folder / "pixels.u8").stat().st_size == size and len(labels) == manifest["count"]
        return whole and manifest["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())


def open_prepared(folder: Path) -> Images:
    """The set as a memory map: pages are read when they are used."""
    manifest = read_manifest(folder)
    options, count = manifest["options"], manifest["count"]
    shape = (count, options["channels"], options["size"], options["size"])
    pixels = np.memmap(folder / "pixels.u8", dtype=np.uint8, mode="c", shape=shape)  # copy on write: never changed
    labels = np.load(folder / "labels.npy", allow_pickle=False)
    return Images(
        pixels=torch.from_numpy(pixels), labels=torch.from_numpy(labels), class_names=tuple(manifest["classes"])
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for other processes that make the same set."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _first_reason(refused: list[tuple[str, str]]) -> str:
    return f" ({len(refused)} refused, the first: {refused[0][0]}: {refused[0][1]})" if refused else ""
