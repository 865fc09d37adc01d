"""Diffusion (EDM; Karras et al., 2022): denoising score matching on the same nets.

A model of it is sampled in many steps; it can teach a consistency model, or be where one starts.
"""

from typing import ClassVar

from torch import Tensor

from ict.config import Config, ObjectiveConfig
from ict.distance import squared_l2
from ict.model import ConsistencyModel
from ict.objectives.base import Loss, Phase, Step, add_noise, within
from ict.weighting import denoising_weight


class Diffusion:
    """E[λ(σ) ‖D(x + σ z, σ) − x‖²] / d, λ = (σ² + σ_d²) / (σ σ_d)², ln σ ~ N(p_mean, p_std²).

    A mean over the d numbers of an image, where EDM has their sum: RAdam's first steps follow the gradient as it is.
    """

    keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config):
        self.section, self.noise = config.objective, config.noise

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        sigma = step.lognormal(self.section.p_mean, self.section.p_std)
        if model.kind != "diffusion":  # a consistency model is made for these levels alone
            sigma = within(sigma, self.noise)
        denoised = model(add_noise(images, sigma, step.noise(images, sigma)), sigma, labels, step.keys())
        weight = denoising_weight(sigma, sigma_data=self.noise.sigma_data).float()
        return Loss(weight * squared_l2(denoised, images) / images[0].numel(), {}, sigma=sigma, output=denoised)

    @staticmethod
    def beside(section: ObjectiveConfig) -> dict[str, int]:
        return {}

    def phase(self, step: Step) -> Phase:
        """The same from first to last."""
        return Phase({}, {})
