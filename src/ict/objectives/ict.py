"""Improved consistency training (§3): the method of the paper."""

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ict import rng
from ict.config import Config, NoiseConfig
from ict.curriculum import CURRICULA
from ict.distance import DISTANCES
from ict.model import ConsistencyModel
from ict.noise import INDEX_DISTRIBUTIONS, draw_pairs, karras_sigmas
from ict.objectives.base import Loss, Phase, Step, add_noise, one_teacher
from ict.objectives.score import DataScore, build_score, step_down
from ict.reading import bind, choose
from ict.rng import Stream
from ict.weighting import WEIGHTINGS

GRID = ("curriculum", "s0", "s1", "index", "weighting", "distance", "teacher")  # keys of all methods with a grid


class ImprovedConsistencyTraining:
    """E[λ(σ_i) d(f_θ(x + σ_{i+1} z, σ_{i+1}), f_θ⁻(x + σ_i z, σ_i))] with θ⁻ = stopgrad(θ) (§2, §3.2).

    Each part can be exchanged for that of 2023; there θ⁻ is an average of θ, the step's target.
    """

    keys: ClassVar[tuple[str, ...]] = (*GRID, "score")
    beside = staticmethod(one_teacher)

    def __init__(self, config: Config):
        self.config = config
        self.score: DataScore | None = None  # what knows the whole set, where the recipe wants that
        section = config.objective
        self.levels = bind(choose("objective.curriculum", section.curriculum, CURRICULA), section)
        self.pmf = bind(choose("objective.index", section.index, INDEX_DISTRIBUTIONS), section)
        self.weighting = bind(choose("objective.weighting", section.weighting, WEIGHTINGS), section)
        self.distance = bind(choose("objective.distance", section.distance, DISTANCES), section)
        self.size = section.s1 + 1  # levels that there is room for
        self.grid = functools.lru_cache(maxsize=2)(functools.partial(build_grid, config.noise, self.pmf, self.size))

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        phase = step.phase or self.phase(step)
        low, high = self.draw_levels(phase, step)
        z, key = step.noise(images, high), step.keys()

        noisy = add_noise(images, high, z)
        student = model(noisy, high, labels, key)
        with torch.no_grad():  # the same weights, the same mode, the same dropout: only the level differs
            lower = self.lower_side(images, labels, noisy, low, high, z)
            teacher = (model if step.target is None else step.target)(lower, low, labels, key)
        weight = self.weighting(low, high).to(student.dtype)
        return Loss(weight * self.distance(student, teacher), dict(phase.figures), sigma=high, output=student)

    def lower_side(
        self, images: Tensor, labels: Tensor | None, noisy: Tensor, low: Tensor, high: Tensor, z: Tensor
    ) -> Tensor:
        """x at the lower level: the same image with less of the same noise, or of the mean noise of such an image."""
        return step_down(self.score, images, labels, noisy, low, high, z)

    def see(self, pixels: Tensor, labels: Tensor, device: torch.device) -> None:
        """What the method wants to know of the training set."""
        self.score = build_score(self.config, pixels, labels, device)

    def phase(self, step: Step) -> Phase:
        """The levels of N(k) and how often each pair is drawn."""
        n = self.levels(step.done, step.total)
        return Phase(self.grid(n, step.samples.device), {"levels": n})

    def draw_levels(self, phase: Phase, step: Step) -> tuple[Tensor, Tensor]:
        """σ_i and σ_{i+1} of each sample, i ~ p(i) (§3.5) -> two float64 [B]."""
        sigmas, cdf = phase.tensors["sigmas"], phase.tensors["cdf"]
        u = rng.uniform(step.samples, 1, seed=step.seed, step=step.number, stream=Stream.LEVEL)[:, 0]
        i = draw_pairs(cdf, u)
        return sigmas[i], sigmas[i + 1]


def build_grid(
    noise: NoiseConfig, pmf: Callable[[Tensor], Tensor], size: int, n: int, device: torch.device
) -> dict[str, Tensor]:
    """The n noise levels and the cumulative probabilities of their n-1 pairs, on a device, with room for `size`."""
    sigmas = karras_sigmas(n, sigma_min=noise.sigma_min, sigma_max=noise.sigma_max, rho=noise.rho)
    cdf = pmf(sigmas).cumsum(0)
    room = max(0, size - n)
    padded = (F.pad(sigmas, (0, room), value=noise.sigma_max), F.pad(cdf / cdf[-1], (0, room), value=2.0))
    return dict(zip(("sigmas", "cdf"), (each.to(device, non_blocking=True) for each in padded), strict=True))
