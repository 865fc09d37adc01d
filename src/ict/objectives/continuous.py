"""Continuous-time consistency training (§3.1, Fig. 1b; Song et al., 2023, appendix B): the limit N → ∞.

Along x + σ z the model's answer f_θ moves with df/dσ = ∂f/∂x · z + ∂f/∂σ, so a pair of neighbours that are δ apart
differs by Δ = δ df/dσ + O(δ²). For a distance that is smooth at 0, d(x, y) ≈ ½ κ ‖x − y‖², their loss has the gradient

    ∇_θ λ d(f_θ(σ), stopgrad f_θ(σ − δ)) = λ κ ⟨Δ, ∇_θ f⟩ = (λ δ) κ ⟨df/dσ, ∇_θ f⟩ + O(λ δ²)

with κ = 2 for squared ℓ2. Pseudo-Huber has Δ / √(‖Δ‖² + c²) in place of 2 Δ, which tends to Δ / c: κ = 1 / c, and what
makes it robust is gone in the limit. With iCT's weight λ δ = 1, and the gradient itself has a limit. With λ = 1 it
falls as 1 / (N − 1), and (N − 1) times it has one: λ δ is then taken from the recipe's finest grid, s1 + 1 levels.

No difference of two nearby levels is taken, so nothing hides how sensitive the net is to the level: with a Fourier
scale of 16 training diverges, with 0.02 it does not.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from ict import rng
from ict.config import Config
from ict.distance import huber_c
from ict.model import ConsistencyModel
from ict.noise import LEVEL_QUANTILES, karras_gap
from ict.objectives.base import Loss, Phase, Step, add_noise, one_derivative
from ict.objectives.tangent import derivative, pull, unwrapped
from ict.reading import bind, choose, require
from ict.rng import Stream
from ict.weighting import WEIGHTINGS

# name in a recipe -> (c, dimensions) -> κ
CURVATURES = {
    "squared_l2": lambda c, dimensions: 2.0,
    "pseudo_huber": lambda c, dimensions: 1 / (c or huber_c(dimensions)),
}


class ContinuousConsistencyTraining:
    """Gradient E[λ δ κ ⟨df/dσ, ∇_θ f⟩]; the loss that is shown is ½ λ δ κ ‖df/dσ‖²."""

    keys: ClassVar[tuple[str, ...]] = ("s1", "index", "weighting", "distance")
    beside = staticmethod(one_derivative)

    def __init__(self, config: Config):
        section, noise = config.objective, config.noise
        self.section = section
        self.levels = bind(bind(choose("objective.index", section.index, LEVEL_QUANTILES), section), noise)
        self.gap = bind(karras_gap, noise)
        self.weighting = bind(choose("objective.weighting", section.weighting, WEIGHTINGS), section)
        require(
            section.distance in CURVATURES,
            f"objective.kind = continuous needs a distance that is smooth where both sides are equal, not "
            f"{section.distance}: choose from {', '.join(CURVATURES)}",
        )

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        u = rng.uniform(step.samples, 1, seed=step.seed, step=step.number, stream=Stream.LEVEL)[:, 0]
        sigma = self.levels(u)
        z, key = step.noise(images, sigma).to(images.dtype), step.keys()
        noisy, plain = add_noise(images, sigma, z), unwrapped(model)

        student = model(noisy, sigma, labels, key)
        slope = derivative(lambda x, s: plain(x, s, labels, key), (noisy, sigma), (z, torch.ones_like(sigma)))[1]
        factor = self.factor(sigma, math.prod(images.shape[1:])).to(student.dtype)
        return Loss(factor * pull(student, slope), {}, sigma, student)

    def factor(self, sigma: Tensor, dimensions: int) -> Tensor:
        """λ δ κ of each level."""
        gap = self.gap(sigma, self.section.s1 + 1)
        curvature = CURVATURES[self.section.distance](self.section.c, dimensions)
        return self.weighting(sigma, sigma + gap) * gap * curvature

    def phase(self, step: Step) -> Phase:
        """The same from first to last."""
        return Phase({}, {})
