"""A set of images in memory, and the two scales a pixel lives on: uint8 [0, 255] and float32 [-1, 1]."""

import functools
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ict.config import POINTS
from ict.files import DamagedFile


class PixelFile:
    """Pixels in a file: mapped, to look at all of them like a tensor, and open, to read some of them."""

    def __init__(self, path: Path, shape: tuple[int, int, int, int], *, sha256: str | None = None):
        self.path, self.shape, self.sha256 = path, shape, sha256
        self.open = path.open("rb", buffering=0)
        # Writable to please torch; a copy would be changed, never the file.
        self.map = mmap.mmap(self.open.fileno(), 0, access=mmap.ACCESS_COPY)

    def pixels(self) -> Tensor:
        return torch.frombuffer(self.map, dtype=torch.uint8).view(self.shape)

    def read(self, indices: Tensor, out: Tensor) -> None:
        """By reading, not by the map: a map would take megabytes around each image, and fall with a shortened file."""
        rows = out.view(len(indices), -1).numpy()
        size = rows.shape[1]
        for row, index in zip(rows, indices.tolist(), strict=True):
            if not 0 <= index < self.shape[0]:
                raise IndexError(f"image {index} of {self.shape[0]}: out of range index")
            if os.preadv(self.open.fileno(), [row], index * size) != size:
                raise DamagedFile(f"{self.path} has become shorter while it was used: prepare the set again")


@dataclass(frozen=True, kw_only=True)
class Images:
    """uint8 [n, C, H, W], with class numbers [n] and the classes' names."""

    pixels: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    file: "PixelFile | None" = None  # where the pixels lie, when they are not in memory
    note: str = ""  # what somebody who trains on them should know

    def __post_init__(self) -> None:
        assert self.pixels.dtype == torch.uint8
        assert self.pixels.ndim == 4
        assert len(self.pixels) == len(self.labels) > 0

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def describe(self) -> str:
        channels, height, width = self.shape
        if (height, channels) == POINTS:
            return "two numbers, points of the plane"
        return f"{height}×{width} pixels, {'grey' if channels == 1 else 'colour'}"

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of the pixels and their shape; of a prepared set, the pixels' is known."""
        known = self.file.sha256 if self.file is not None else None
        if known is None:
            digest = hashlib.sha256()
            for block in self.pixels.split(1024):
                digest.update(block.cpu().contiguous().numpy())  # type: ignore
            known = digest.hexdigest()
        return hashlib.sha256(f"{tuple(self.pixels.shape)} {known}".encode()).hexdigest()

    def gather(self, indices: Tensor, out: Tensor) -> None:
        """Copy some images to `out`, in memory; of a file, nothing else is read."""
        if self.file is None:
            torch.index_select(self.pixels, 0, indices, out=out)
        else:
            self.file.read(indices, out)

    def forget(self) -> None:
        """Let go of the pages of the file that have been read; they are read again when they are used again."""
        if self.file is not None:
            self.file.map.madvise(mmap.MADV_DONTNEED)

    def to(self, device: torch.device) -> "Images":
        return Images(pixels=self.pixels.to(device), labels=self.labels.to(device), class_names=self.class_names)
