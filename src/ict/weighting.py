"""λ(σ): how much a pair of noise levels counts (§3.1)."""

from collections.abc import Callable

import torch
from torch import Tensor


def inverse_gap(sigma_low: Tensor, sigma_high: Tensor, *, gap_power: float = 1.0) -> Tensor:
    """λ(σ_i) = 1 / (σ_{i+1} − σ_i)^p (§3.1): with p = 1 the choice of iCT; a larger one prefers low levels more."""
    return (sigma_high - sigma_low) ** -gap_power


def uniform(sigma_low: Tensor, sigma_high: Tensor) -> Tensor:
    """λ(σ_i) = 1: the choice of 2023."""
    return torch.ones_like(sigma_low)


def denoising_weight(sigma: Tensor, *, sigma_data: float) -> Tensor:
    """(σ² + σ_d²) / (σ σ_d)²: EDM's weight of one level, and ECT's of a pair by its upper one."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def adaptive_weight(loss: Tensor, *, power: float, epsilon: float = 1e-3) -> Tensor:
    """1 / (loss + ε)^p of each sample, taken as a constant: MeanFlow's weight, with ε as in its code."""
    return (loss.detach() + epsilon) ** -power


# name in a recipe -> (sigma_low, sigma_high) -> λ per sample; keys of [objective] by the names of further parameters
WEIGHTINGS: dict[str, Callable[..., Tensor]] = {"inverse_gap": inverse_gap, "uniform": uniform}
