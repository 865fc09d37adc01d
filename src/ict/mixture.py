"""A mixture of Gaussians in the plane, of which everything is known: density, denoiser, and consistency function.

What a model learns from it (`data.source = "mixture2d"`) can be held against the exact answer. A point of the plane is
an image of two channels and one pixel, x [B, 2, 1, 1].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ict import rng
from ict.rng import Stream

SHAPE = (2, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Σ_k w_k N(m_k, s_k²) in the plane."""

    weights: tuple[float, ...]
    means: tuple[tuple[float, float], ...]
    deviations: tuple[float, ...]

    def draw(self, count: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Points -> float32 [n, 2, 1, 1], and the component of each -> int64 [n]."""
        numbers = torch.arange(count)
        u = rng.uniform(numbers, 1, seed=seed, step=0, stream=Stream.LABEL)[:, 0]
        parts = torch.searchsorted(torch.tensor(self.weights).double().cumsum(0)[:-1].contiguous(), u)
        z = rng.normal(numbers, SHAPE, seed=seed, step=0)
        return torch.tensor(self.means)[parts].reshape(-1, *SHAPE) + self.spread(parts) * z, parts

    def spread(self, parts: Tensor) -> Tensor:
        return torch.tensor(self.deviations)[parts].reshape(-1, 1, 1, 1)

    def log_parts(self, x: Tensor, sigma: Tensor) -> Tensor:
        """ln(w_k N(x; m_k, s_k² + σ²)) of points with noise -> float64 [B, components]."""
        means, deviations, weights = (
            torch.tensor(values, dtype=torch.float64, device=x.device)
            for values in (self.means, self.deviations, self.weights)
        )
        variance = deviations**2 + sigma.double()[:, None] ** 2
        distance = (x.double().reshape(-1, 1, 2) - means).square().sum(-1)
        return weights.log() - (2 * math.pi * variance).log() - distance / (2 * variance)

    def log_density(self, x: Tensor, sigma: Tensor) -> Tensor:
        """ln p(x; σ) of points with noise -> float64 [B]."""
        return self.log_parts(x, sigma).logsumexp(-1)

    def denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """D(x, σ): the mean of the clean points -> float64, of x's shape. The score is (D − x) / σ²."""
        share = self.log_parts(x, sigma).softmax(-1)[..., None]
        means, deviations = (
            torch.tensor(values, dtype=torch.float64, device=x.device) for values in (self.means, self.deviations)
        )
        noise = sigma.double()[:, None] ** 2
        keep = (deviations**2 / (deviations**2 + noise))[..., None]
        each = means + keep * (x.double().reshape(-1, 1, 2) - means)
        return (share * each).sum(1).reshape(x.shape)

    def consistency(self, x: Tensor, sigma: float, *, sigma_min: float, steps: int = 300) -> Tensor:
        """f(x, σ): where the ODE dx/d ln σ = x − D(x, σ) leads at σ_min -> float64, of x's shape.

        Runge and Kutta's method of fourth order, even steps in ln σ.
        """
        x, h = x.double(), (math.log(sigma_min) - math.log(sigma)) / steps

        def slope(x: Tensor, t: float) -> Tensor:
            level = torch.full((len(x),), math.exp(t), dtype=torch.float64, device=x.device)
            return x - self.denoise(x, level)

        for step in range(steps):
            t = math.log(sigma) + step * h
            k1 = slope(x, t)
            k2 = slope(x + h / 2 * k1, t + h / 2)
            k3 = slope(x + h / 2 * k2, t + h / 2)
            k4 = slope(x + h * k3, t + h)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x


# Four unequal ones, all but 0.01 % of the points inside [-1, 1]².
MIXTURE = Mixture(
    weights=(0.35, 0.2, 0.3, 0.15),
    means=((-0.4, -0.3), (0.35, -0.45), (0.4, 0.3), (-0.3, 0.45)),
    deviations=(0.16, 0.14, 0.17, 0.13),
)


class ExactDiffusion(nn.Module):
    """The mixture's denoiser as a diffusion model, for instance as a teacher."""

    kind, image_shape, classes, start = "diffusion", SHAPE, 0, None

    def __init__(self, mixture: Mixture = MIXTURE):
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor, sigma: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        return self.mixture.denoise(x, sigma).to(x.dtype)
