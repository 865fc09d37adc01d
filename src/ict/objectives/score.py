"""The direction from a noisy image to the next lower level: by its own noise, or by the mean over the training set.

Consistency training estimates the score of a noisy image by the one noise that made it (§2): right on average, but at
high levels, where thousands of images could have become this one, far off each time. The average is known, though: it
is a sum over the training images, each weighted by how likely it became this one. For a set that fits on the device
that is two products of matrices, a small part of a step (stable target fields, Xu et al., 2023, with the whole set).
"""

import torch
from torch import Tensor

from ict.config import Config, require
from ict.model import spread

CERTAIN = 0.99  # from this weight of one image on, the own noise is the answer: so low levels lose nothing to rounding
SHARE, HOST = 0.25, 2**33  # of a GPU's free memory that the set may take, and bytes of the host's
PIECE = 10_000  # images that are made numbers at a time


class DataScore:
    """E[z | x + σ z] over a set of images in [-1, 1], `pixels` uint8 [n, C, H, W].

    With `flip` each counts mirrored too; with their `labels` only those of a sample's class count.
    """

    def __init__(self, pixels: Tensor, labels: Tensor | None, device: torch.device, *, flip: bool):
        half = device.type == "cuda"
        size = pixels.numel() * (2 if half else 4)
        room = SHARE * torch.cuda.mem_get_info(device)[0] if half else HOST
        require(
            size <= room,
            f'objective.score = "data" needs the whole training set in memory, {size / 2**30:.1f} GiB, which is too '
            'much here: use objective.score = "sample"',
        )
        self.flip, self.labels = flip, None if labels is None else labels.to(device)
        kind = torch.float16 if half else torch.float32
        self.images = torch.empty(len(pixels), pixels[0].numel(), dtype=kind, device=device)
        for part, raw in zip(self.images.split(PIECE), pixels.split(PIECE), strict=True):
            part.copy_(raw.to(device).flatten(1).float() / 127.5 - 1)
        self.halves = torch.cat([part.float().square().sum(1) / 2 for part in self.images.split(PIECE)])

    @torch.no_grad()
    def noise(self, noisy: Tensor, sigma: Tensor, z: Tensor, labels: Tensor | None) -> Tensor:
        """The mean noise in `noisy` [B, C, H, W], or its own z where that is certain."""
        views = torch.cat((noisy, noisy.flip(-1))) if self.flip else noisy
        count = len(views) // len(noisy)
        likely = (views.flatten(1).to(self.images.dtype) @ self.images.T).float() - self.halves
        likely = likely / sigma.float().square().repeat(count)[:, None]
        if self.labels is not None:
            assert labels is not None
            likely = likely.masked_fill(labels.repeat(count)[:, None] != self.labels, float("-inf"))
        weights = torch.stack(likely.chunk(count)).transpose(0, 1)  # [B, views, images]
        weights = weights.flatten(1).softmax(dim=1)
        highest = weights.amax(dim=1)
        parts = weights.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1).to(self.images.dtype) @ self.images
        means = parts.to(noisy.dtype).reshape(count, *noisy.shape)
        mean = means[0] + means[1].flip(-1) if self.flip else means[0]
        found = (noisy - mean) / spread(sigma, noisy)
        return torch.where(spread(highest, noisy) > CERTAIN, z, found)


def build_score(config: Config, pixels: Tensor, labels: Tensor, device: torch.device) -> DataScore | None:
    """What `objective.score` asks for; nothing for the samples' own."""
    if config.objective.score == "sample":
        return None
    return DataScore(pixels, labels if config.data.classes else None, device, flip=config.data.flip)


def step_down(
    score: DataScore, images: Tensor, labels: Tensor | None, noisy: Tensor, low: Tensor, high: Tensor, z: Tensor
) -> Tensor:
    """x at the lower level along the mean noise: x + σ z where that is the image's own."""
    mean = score.noise(noisy, high, z, labels)
    return images + spread(low, images) * z + spread(high - low, images) * (z - mean)
