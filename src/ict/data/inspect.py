"""What a set of images is like, before anything is trained on it."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ict.config import DataConfig
from ict.data.images import Images
from ict.data.prepare import Progress, open_prepared, prepare, read_manifest
from ict.data.sources import open_source
from ict.pixels import to_float

BLOCK = 4 << 20  # bytes looked at at a time


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Counts and figures of a prepared set."""

    images: Images
    classes: dict[str, int]
    sizes: dict[str, Any]  # before decoding: smallest, largest, common, how many were enlarged; empty if not known
    refused: list[tuple[str, str]]
    duplicates: int  # images whose pixels equal those of an earlier one
    mean: float  # of pixels in [-1, 1]
    deviation: float

    def some(self, count: int) -> Tensor:
        """Images from all over the set, in its order -> uint8 [at most count, C, H, W]."""
        places = torch.linspace(0, len(self.images) - 1, min(count, len(self.images))).round().long()
        return self.images.pixels[places]

    @property
    def warning(self) -> str | None:
        """σ_data is 0.5 in every recipe of the paper; a set far from that deserves its own."""
        if abs(self.deviation - 0.5) <= 0.15:
            return None
        if self.deviation < 0.05:
            return f"the pixels' deviation is only {self.deviation:.3f}: there is hardly anything to learn"
        return (
            f"the pixels' deviation is {self.deviation:.2f}, where the recipes expect about 0.5: "
            f"noise.sigma_data = {self.deviation:.2f} may learn better"
        )


def inspect(config: DataConfig, progress: Progress | None = None) -> Inspection:
    """Prepare a pile of images, or load a set, and look at it."""
    source = open_source(config)
    if isinstance(source, Images):
        images, counts = source, Counter(source.labels.tolist())
        classes = {name: counts[i] for i, name in enumerate(images.class_names)}
        manifest: dict[str, Any] = {"refused": [], "sizes": {}, "classes": classes}
    else:
        folder = prepare(source, config, progress)
        images, manifest = open_prepared(folder), read_manifest(folder)
    seen: set[bytes] = set()
    total = squares = torch.zeros((), dtype=torch.float64)
    for block in images.pixels.split(max(1, BLOCK // images.pixels[0].numel())):
        seen.update(hashlib.sha256(one.numpy().tobytes()).digest() for one in block)
        x = to_float(block).double()
        total, squares = total + x.sum(), squares + x.square().sum()
        images.forget()
    n = images.pixels.numel()
    mean = (total / n).item()
    return Inspection(
        images=images,
        classes=manifest["classes"],
        sizes=manifest["sizes"],
        refused=[(name, reason) for name, reason in manifest["refused"]],
        duplicates=len(images) - len(seen),
        mean=mean,
        deviation=max(0.0, squares.item() / n - mean**2) ** 0.5,
    )
