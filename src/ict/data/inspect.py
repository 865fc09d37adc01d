"""What a set of images is like, before anything is trained on it."""

import hashlib
from dataclasses import dataclass

import torch

from ict.config import DataConfig
from ict.data.images import Images, to_float
from ict.data.prepare import Progress, open_prepared, prepare, read_manifest


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Counts and figures of a prepared set."""

    images: Images
    classes: dict[str, int]
    refused: list[tuple[str, str]]
    duplicates: int  # images whose pixels equal those of an earlier one
    mean: float  # of pixels in [-1, 1]
    deviation: float

    @property
    def warning(self) -> str | None:
        """σ_data is 0.5 in every recipe of the paper; a set far from that deserves its own."""
        if abs(self.deviation - 0.5) <= 0.15:
            return None
        return (
            f"the pixels' deviation is {self.deviation:.2f}, far from 0.5: set noise.sigma_data = {self.deviation:.2f}"
        )


def inspect(config: DataConfig, progress: Progress | None = None) -> Inspection:
    """Prepare a pile of images and look at it."""
    folder = prepare(config, progress)
    images, manifest = open_prepared(folder), read_manifest(folder)
    seen: set[bytes] = set()
    total = squares = torch.zeros((), dtype=torch.float64)
    for block in images.pixels.split(1024):
        seen.update(hashlib.sha256(one.numpy().tobytes()).digest() for one in block)
        x = to_float(block).double()
        total, squares = total + x.sum(), squares + x.square().sum()
    n = images.pixels.numel()
    mean = (total / n).item()
    return Inspection(
        images=images,
        classes=manifest["classes"],
        refused=[(name, reason) for name, reason in manifest["refused"]],
        duplicates=len(images) - len(seen),
        mean=mean,
        deviation=max(0.0, squares.item() / n - mean**2) ** 0.5,
    )
