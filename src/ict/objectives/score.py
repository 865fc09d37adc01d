"""The direction from a noisy image to the next lower level: by its own noise, or by the mean over the training set.

Consistency training estimates the score of a noisy image by the one noise that made it (§2): right on average, but at
high levels, where thousands of images could have become this one, far off each time. The average is known, though: it
is a sum over the training images, each weighted by how likely it became this one. For a set that fits on the device
that is two products of matrices, a small part of a step (stable target fields, Xu et al., 2023, with the whole set).
"""

import torch
from torch import Tensor

from ict.config import Config
from ict.device import free_memory
from ict.model import spread
from ict.objectives.base import add_noise
from ict.pixels import to_float
from ict.precision import quick_products
from ict.reading import require

CERTAIN = 0.99  # from this weight of one image on, its own noise stands for the mean, to the last bit
ROUNDED = 0.035  # times d^¼: the level below which tf32 cannot tell images apart to a tenth of a nat
SHARE, HOST = 0.25, 2**33  # of a GPU's free memory that the set may take, and bytes of the host's
PIECE = 2**26  # numbers that are made at a time


class DataScore:
    """E[z | x + σ z] over a set of images in [-1, 1], `pixels` uint8 [n, C, H, W].

    With `flip` each counts mirrored too; with their `labels` only those of a sample's class count.
    """

    def __init__(self, pixels: Tensor, labels: Tensor | None, device: torch.device, *, flip: bool):
        require_room(pixels.numel(), device)
        numbers = pixels[0].numel()
        self.flip, self.labels = flip, None if labels is None else labels.to(device)
        self.lowest = ROUNDED * numbers**0.25 if device.type == "cuda" else 0.0
        self.images = torch.empty(len(pixels), numbers, device=device)
        several = max(1, PIECE // numbers)
        for part, raw in zip(self.images.split(several), pixels.split(several), strict=True):
            part.copy_(to_float(raw.to(device)).flatten(1))
        self.halves = torch.cat([part.square().sum(1) / 2 for part in self.images.split(several)])

    @torch.no_grad()
    def noise(self, noisy: Tensor, sigma: Tensor, z: Tensor, labels: Tensor | None) -> Tensor:
        """The mean noise in `noisy` [B, C, H, W]; its own z, which is right on average, where that is (nearly) the same
        or the level too low for the precision of the products.
        """
        views = [noisy, noisy.flip(-1)] if self.flip else [noisy]
        with quick_products():
            likely = torch.stack([view.flatten(1) @ self.images.T for view in views], dim=1)  # [B, views, images]
            likely = likely.sub_(self.halves).div_(sigma.float().square()[:, None, None])
            if self.labels is not None:
                assert labels is not None
                likely = likely.masked_fill_((labels[:, None] != self.labels)[:, None], float("-inf"))
            weights = likely.flatten(1).softmax(dim=1)
            means = [(part @ self.images).view_as(noisy) for part in weights.view_as(likely).unbind(1)]
        mean = means[0] + means[1].flip(-1) if self.flip else means[0]
        own = (weights.amax(dim=1) > CERTAIN) | (sigma < self.lowest)
        return torch.where(own[:, None, None, None], z, (noisy - mean) / spread(sigma, noisy))


def require_room(numbers: int, device: torch.device) -> None:
    """That a set of so many numbers may be kept."""
    size, room = 4 * numbers, SHARE * free_memory(device) if device.type == "cuda" else HOST
    require(
        size <= room,
        f'objective.score = "data" needs the whole training set in memory, {size / 2**30:.1f} GiB, which is too '
        'much here: use objective.score = "sample"',
    )


def build_score(config: Config, pixels: Tensor, labels: Tensor, device: torch.device) -> DataScore | None:
    """What `objective.score` asks for; nothing for the samples' own."""
    if config.objective.score == "sample":
        return None
    return DataScore(pixels, labels if config.data.classes else None, device, flip=config.data.flip)


def step_down(
    score: DataScore | None, images: Tensor, labels: Tensor | None, noisy: Tensor, low: Tensor, high: Tensor, z: Tensor
) -> Tensor:
    """x at the lower level: along the mean noise, or without a score along the image's own, to x + σ z."""
    lower = add_noise(images, low, z)
    if score is None:
        return lower
    return lower + spread(high - low, images) * (z - score.noise(noisy, high, z, labels))
