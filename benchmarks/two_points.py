"""What consistency training would learn without any error of its own, on a set of two numbers, -1 and 1.

    PYTHONPATH=src python benchmarks/two_points.py 11 41 161 1281

With squared ℓ2 the best answer at a level is the mean of the answers at the level below. Followed exactly up the grid,
it gives the deviation of one-step samples (1 would be right): with a sample's own noise, and with the set's score.
"""

import itertools
import sys

import torch
from torch import Tensor

from ict.noise import karras_sigmas

IMAGES = torch.tensor([-1.0, 1.0], dtype=torch.float64)


def main() -> None:
    for n in map(int, sys.argv[1:] or ["11", "41", "161", "1281"]):
        print(f"N = {n}: own noise {deviation(n, mean=False):.3f}, the set's score {deviation(n, mean=True):.3f}")


def deviation(n: int, *, mean: bool) -> float:
    sigmas = karras_sigmas(n, sigma_min=0.002, sigma_max=80.0, rho=7.0)
    x = answers = torch.linspace(-1.1, 1.1, 3)  # at σ_min: the identity
    for low, high in itertools.pairwise(sigmas):
        points = (
            torch.cat((torch.linspace(-1, 1, 6001) * (1 + 8 * high), torch.linspace(-3, 3, 6001))).double().unique()
        )
        weights = torch.softmax(-((points[:, None] - IMAGES) ** 2) / (2 * high**2), dim=1)
        noise = (points[:, None] - IMAGES) / high
        if mean:
            found = read(x, answers, points + (low - high) * (weights * noise).sum(1))
        else:
            found = (weights * read(x, answers, IMAGES + low * noise)).sum(1)
        x, answers = points, found
    noise = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return read(x, answers, sigmas[-1] * noise).std().item()


def read(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """The line through the points (x, y), also beyond them."""
    right = torch.searchsorted(x.double(), at.contiguous()).clamp(1, len(x) - 1)
    share = (at - x[right - 1]) / (x[right] - x[right - 1])
    return y[right - 1] + share * (y[right] - y[right - 1])


if __name__ == "__main__":
    main()
