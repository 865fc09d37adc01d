"""Improved consistency training (§3): the method of the paper."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ict import rng
from ict.config import Config, NoiseConfig, bind, choose
from ict.curriculum import CURRICULA
from ict.distance import DISTANCES
from ict.model import ConsistencyModel
from ict.noise import INDEX_DISTRIBUTIONS, draw_pairs, karras_sigmas
from ict.objectives.base import Loss, Step
from ict.rng import Stream
from ict.weighting import WEIGHTINGS


class ImprovedConsistencyTraining:
    """E[λ(σ_i) d(f_θ(x + σ_{i+1} z, σ_{i+1}), f_θ⁻(x + σ_i z, σ_i))] with θ⁻ = stopgrad(θ) (§2, §3.2).

    Each part can be exchanged for that of 2023; there θ⁻ is an average of θ, the step's target.
    """

    def __init__(self, config: Config):
        section = config.objective
        self.levels = bind(choose("objective.curriculum", section.curriculum, CURRICULA), section)
        self.pmf = bind(choose("objective.index", section.index, INDEX_DISTRIBUTIONS), section)
        self.weighting = choose("objective.weighting", section.weighting, WEIGHTINGS)
        self.distance = bind(choose("objective.distance", section.distance, DISTANCES), section)
        self.grid = functools.cache(functools.partial(build_grid, config.noise, self.pmf))

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        n = self.levels(step.done, step.total)
        low, high = self.draw_levels(n, step)
        z, key = step.noise(images), step.keys()

        noisy = add_noise(images, high, z)
        student = model(noisy, high, labels, key)
        with torch.no_grad():  # the same weights, the same mode, the same dropout: only the level differs
            lower = self.lower_side(images, labels, noisy, low, high, z)
            teacher = (model if step.target is None else step.target)(lower, low, labels, key)
        weight = self.weighting(low, high).to(student.dtype)
        return Loss(weight * self.distance(student, teacher), {"levels": n}, sigma=high, output=student)

    def lower_side(
        self, images: Tensor, labels: Tensor | None, noisy: Tensor, low: Tensor, high: Tensor, z: Tensor
    ) -> Tensor:
        """x at the lower level: the same image with less of the same noise."""
        return add_noise(images, low, z)

    def draw_levels(self, n: int, step: Step) -> tuple[Tensor, Tensor]:
        """σ_i and σ_{i+1} of each sample, i ~ p(i) (§3.5) -> two float64 [B]."""
        sigmas, cdf = self.grid(n, step.samples.device)
        u = rng.uniform(step.samples, 1, seed=step.seed, step=step.number, stream=Stream.LEVEL)[:, 0]
        i = draw_pairs(cdf, u)
        return sigmas[i], sigmas[i + 1]


def add_noise(images: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
    """x + σ z, in the images' own precision (float32)."""
    return images + sigma.to(images.dtype).reshape(-1, 1, 1, 1) * z


def build_grid(
    noise: NoiseConfig, pmf: Callable[[Tensor], Tensor], n: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The n noise levels and the cumulative probabilities of their n-1 pairs, on a device."""
    sigmas = karras_sigmas(n, sigma_min=noise.sigma_min, sigma_max=noise.sigma_max, rho=noise.rho)
    return sigmas.to(device), pmf(sigmas).cumsum(0).to(device)
