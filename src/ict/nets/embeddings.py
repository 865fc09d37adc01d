"""How a net sees the noise level (§3.1): c_noise = ¼ ln σ, one number a sample -> a vector.

Sensitivity is what matters: neighbouring levels of a fine grid differ by 0.001 in c_noise, and a net that answers
wildly to that cannot be trained to be consistent.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ict.config import NetConfig


class FourierEmbedding(nn.Module):
    """[sin, cos](2π w c_noise) with frozen w ~ N(0, scale²); scale 16 in 2023, 0.02 in iCT."""

    frequencies: Tensor

    def __init__(self, width: int, *, scale: float = 0.02):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(width // 2) * scale)

    def forward(self, c_noise: Tensor) -> Tensor:
        angle = 2 * math.pi * c_noise.float()[:, None] * self.frequencies.float()
        return torch.cat((angle.sin(), angle.cos()), dim=1)


class PositionalEmbedding(nn.Module):
    """[cos, sin](scale · c_noise · w) with w from 1 down to 1/10000: the transformer's embedding of a position.

    The scale is 1000 in the consistency models of 2023.
    """

    frequencies: Tensor

    def __init__(self, width: int, *, scale: float = 1000.0, max_period: float = 10_000.0):
        super().__init__()
        self.scale = scale
        half = width // 2
        frequencies = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float64) / half)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def forward(self, c_noise: Tensor) -> Tensor:
        angle = self.scale * c_noise.float()[:, None] * self.frequencies.float()
        return torch.cat((angle.cos(), angle.sin()), dim=1)


class SinusoidalEmbedding(nn.Module):
    """[sin, cos](c_noise · w) with w from 1 down to 1/10000, both ends included: DDPM's form, as NCSN++ has it."""

    frequencies: Tensor

    def __init__(self, width: int, *, max_period: float = 10_000.0):
        super().__init__()
        exponents = torch.linspace(0, 1, width // 2, dtype=torch.float64)
        self.register_buffer("frequencies", (max_period**-exponents).float(), persistent=False)

    def forward(self, c_noise: Tensor) -> Tensor:
        angle = c_noise.float()[:, None] * self.frequencies.float()
        return torch.cat((angle.sin(), angle.cos()), dim=1)


# name in a recipe -> (width, config of the net) -> module
EMBEDDINGS: dict[str, Callable[[int, NetConfig], nn.Module]] = {
    "fourier": lambda width, config: FourierEmbedding(width, scale=config.fourier_scale),
    "sinusoidal": lambda width, config: SinusoidalEmbedding(width),
    "positional": lambda width, config: PositionalEmbedding(width, scale=config.positional_scale),
}


def sensitivity(embedding: nn.Module, sigma: Tensor) -> Tensor:
    """‖∂ emb / ∂ log σ‖ at each noise level (Fig. 1a) -> [n]: what it makes of a little more noise."""
    log_sigma = sigma.log().float()
    slope = torch.func.jvp(lambda s: embedding(0.25 * s), (log_sigma,), (torch.ones_like(log_sigma),))[1]
    return slope.norm(dim=1)
