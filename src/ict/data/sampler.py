"""Which images a step sees: a function of (seed, step), with every image once per epoch."""

import functools

import torch
from torch import Tensor

from ict import rng
from ict.rng import Stream


def batch_indices(step: int, *, batch: int, count: int, seed: int) -> Tensor:
    """Indices of the images in the whole batch of a step -> int64 [batch], on the CPU.

    Place p of the endless stream of images is entry p mod count of epoch p div count's own shuffle.
    """
    places = torch.arange(step * batch, (step + 1) * batch)
    epochs = range(step * batch // count, ((step + 1) * batch - 1) // count + 1)
    parts = [_shuffled(count, seed, epoch)[places[places // count == epoch] % count] for epoch in epochs]
    return torch.cat(parts)


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return rng.permutation(count, seed=seed, epoch=epoch)


def flip_mask(samples: Tensor, *, seed: int, step: int | Tensor) -> Tensor:
    """Which samples of a step are mirrored: each with probability ½ -> bool [B]."""
    return rng.words(samples, 1, seed=seed, step=step, stream=Stream.FLIP)[:, 0] % 2 == 1
