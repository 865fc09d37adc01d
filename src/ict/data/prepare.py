"""A pile of images decoded once: one memory-mapped file of pixels, and a manifest that says what it was made from.

    CACHE/<key>/pixels.u8       uint8 [n, C, H, W]
    CACHE/<key>/labels.npy      int64 [n]
    CACHE/<key>/manifest.json   source, options, counts, what was refused and why, SHA-256 of the pixels; written last

The key is a hash of the source's files (names, sizes, times) and of the options, so that a change of either makes a new
set. It is made beside its place and moved there whole; a second process that wants the same set waits for the first.
"""

import hashlib
import io
import json
import os
import re
import shlex
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ict.config import DataConfig
from ict.data.decode import Target
from ict.data.pile import Entry, Pile
from ict.data.workers import decode_all
from ict.files import cache_home, locked, sync_folder, write_new
from ict.reading import require

if TYPE_CHECKING:
    from ict.data.images import Images

FORMAT = "ict-images-2"
Progress = Callable[[int, int | None], object]


def target_of(config: DataConfig) -> Target:
    return Target(size=config.image_size, channels=config.channels, fit=config.fit, background=config.background)


def prepare(pile: Pile, config: DataConfig, progress: Progress | None = None) -> Path:
    """The folder of the decoded set; made if it is not there."""
    target, fingerprint = target_of(config), pile.fingerprint()
    described = json.dumps({"format": FORMAT, "pile": fingerprint, **asdict(target)}, sort_keys=True)
    folder = cache_home() / "sets" / hashlib.sha256(described.encode()).hexdigest()[:24]
    if is_prepared(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not is_prepared(folder):  # another process may have made it meanwhile
            make(folder, pile, fingerprint, target, progress)
    return folder


def make(folder: Path, pile: Pile, fingerprint: str, target: Target, progress: Progress | None) -> None:
    """Decode everything into a folder beside the right one, then move it there."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        manifest = write_pixels(partial, pile, target, progress)
        require(
            pile.fingerprint() == fingerprint,
            f"data.source: {pile.source} changed while it was being prepared; start again when it is at rest",
        )
        manifest |= {"format": FORMAT, "source": pile.source, "options": asdict(target)}
        write_new(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync_folder(partial)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        partial.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        if error.filename is not None and not Path(str(error.filename)).is_relative_to(folder.parent):
            raise  # of the source
        reason = f"{error.strerror}, while preparing images; $ICT_CACHE chooses another place"
        raise OSError(error.errno, reason, str(error.filename or partial)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_pixels(partial: Path, pile: Pile, target: Target, progress: Progress | None) -> dict[str, Any]:
    """Decode the entries in order, into pixels.u8 and labels.npy; gives the counts."""
    seen: dict[str, int] = {}  # classes in the order of their first image
    labels = array("q")
    refused: list[tuple[str, str]] = []
    sizes: Counter[tuple[int, int]] = Counter()
    digest = hashlib.sha256()
    total, done = pile.count(), 0
    with (partial / "pixels.u8").open("wb") as file:
        for outcomes, pixels in decode_all(accepted(pile, refused), target):
            file.write(pixels)
            digest.update(pixels)
            labels.extend(seen.setdefault(entry.label, len(seen)) for entry, reason, _ in outcomes if reason is None)
            sizes.update(size for _, reason, size in outcomes if reason is None)
            refused += [(name_in(pile, entry), reason) for entry, reason, _ in outcomes if reason is not None]
            done = len(labels) + len(refused)
            if progress is not None:
                progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    require(done > 0, f"data.source: no image was found in {pile.source}")
    require(bool(labels), f"data.source: not one image could be used{_first_reason(refused)}")
    classes = pile.classes or sort_labels(seen)
    number = {name: i for i, name in enumerate(classes)}
    numbers = np.array([number[name] for name in seen])[np.frombuffer(labels, dtype=np.int64)]
    stored = io.BytesIO()
    np.save(stored, numbers.astype(np.int64))
    write_new(partial / "labels.npy", stored.getvalue())
    counts = np.bincount(numbers, minlength=len(classes)).tolist()
    return {
        "count": len(labels),
        "classes": dict(zip(classes, counts, strict=True)),
        "sizes": describe_sizes(sizes, target),
        "sha256": digest.hexdigest(),
        "refused": refused,
    }


def describe_sizes(sizes: Counter[tuple[int, int]], target: Target) -> dict[str, Any]:
    """Widths and heights before decoding."""
    area = sorted(sizes, key=lambda size: size[0] * size[1])
    return {
        "smallest": area[0],
        "largest": area[-1],
        "common": sizes.most_common(1)[0],
        "enlarged": sum(count for size, count in sizes.items() if min(size) < target.size),
    }


def accepted(pile: Pile, refused: list[tuple[str, str]]) -> Iterator[Entry]:
    """Entries that are to be decoded; the others go to the list."""
    for entry, reason in pile.entries():
        if reason is None:
            yield entry
        else:
            refused.append((name_in(pile, entry), reason))


def name_in(pile: Pile, entry: Entry) -> str:
    """A name that tells files of several archives apart."""
    return entry.name if len(pile.parts) == 1 else f"{Path(entry.path).name}: {entry.name}"


def sort_labels(labels: dict[str, int]) -> list[str]:
    """By name, as ImageFolder does; whole numbers by their value. What has no class comes first."""
    numbers = all(re.fullmatch(r"-?\d{1,18}", label, re.ASCII) for label in labels if label)
    return sorted(labels, key=lambda label: (label != "", int(label or 0) if numbers else 0, label))


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


def open_prepared(folder: Path) -> "Images":
    """The set as a memory map: pages are read when they are used."""
    import torch

    from ict.data.images import Images, PixelFile

    manifest = read_manifest(folder)
    options, count = manifest["options"], manifest["count"]
    shape = (count, options["channels"], options["size"], options["size"])
    file = PixelFile(folder / "pixels.u8", shape, sha256=manifest["sha256"])
    labels = torch.from_numpy(np.load(folder / "labels.npy", allow_pickle=False))
    return Images(
        pixels=file.pixels(), labels=labels, class_names=tuple(manifest["classes"]), file=file, note=_note(manifest)
    )


def _note(manifest: dict[str, Any]) -> str:
    """About images that are not in the set."""
    refused, source = manifest["refused"], manifest["source"]
    if not refused:
        return ""
    total, seen = manifest["count"] + len(refused), f"`ict data inspect {shlex.quote(source)}` says more"
    return f"{len(refused):,} of {total:,} files of {source} are not used{_first_reason(refused)}; {seen}"


def _first_reason(refused: list[tuple[str, str]]) -> str:
    return f" ({len(refused)} refused, the first: {refused[0][0]}: {refused[0][1]})" if refused else ""
