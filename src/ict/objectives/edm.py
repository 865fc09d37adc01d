"""Diffusion (EDM; Karras et al., 2022): denoising score matching on the same nets.

A model of it is sampled in many steps; it can teach a consistency model, or be where one starts.
"""

import torch
from torch import Tensor

from ict import rng
from ict.config import Config
from ict.model import ConsistencyModel
from ict.objectives.base import Loss, Step
from ict.objectives.ict import add_noise
from ict.rng import Stream


class Diffusion:
    """E[λ(σ) ‖D(x + σ z, σ) − x‖²], λ = (σ² + σ_d²) / (σ σ_d)², ln σ ~ N(p_mean, p_std²)."""

    def __init__(self, config: Config):
        self.section, self.sigma_data = config.objective, config.noise.sigma_data

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        draws = {"seed": step.seed, "step": step.number}
        level = rng.normal(step.samples, (1,), stream=Stream.LEVEL, **draws)[:, 0].double()
        sigma = torch.exp(self.section.p_mean + self.section.p_std * level)
        z = rng.normal(step.samples, tuple(images.shape[1:]), stream=Stream.NOISE, **draws)
        key = rng.words(step.samples, 1, stream=Stream.DROPOUT, **draws)[:, 0]
        denoised = model(add_noise(images, sigma, z), sigma, labels, key)
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        squared = (denoised - images).float().square().flatten(1).sum(dim=1)
        return Loss(weight.float() * squared, {}, sigma=sigma, output=denoised)
