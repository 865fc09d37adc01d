"""Noise levels (§2) and how often each pair of neighbours is trained (§3.5).

Levels ascend: index 0 is sigma_min. Pair i joins level i (the teacher's) with level i+1 (the student's).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def karras_sigmas(n: int, *, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """Noise levels σ_1 < … < σ_N (§2) -> float64 [n]; both ends are exact."""
    if n < 2:
        raise ValueError(f"a grid needs at least 2 noise levels, not {n}")
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    sigmas = (low + torch.linspace(0, 1, n, dtype=torch.float64) * (high - low)) ** rho
    sigmas[0], sigmas[-1] = sigma_min, sigma_max  # the power rounds; the boundary condition must not
    return sigmas


def lognormal_pmf(sigmas: Tensor, *, p_mean: float = -1.1, p_std: float = 2.0) -> Tensor:
    """p(i) ∝ erf((log σ_{i+1} − P_mean) / √2 P_std) − erf((log σ_i − P_mean) / √2 P_std) (§3.5) -> float64 [n-1]."""
    z = (torch.log(sigmas.double()) - p_mean) / (math.sqrt(2) * p_std)
    # erf(b) − erf(a) cancels when both are far out on one side; erfc of the nearer tail does not.
    a, b = z[:-1], z[1:]
    mass = torch.where(a > 0, torch.erfc(a) - torch.erfc(b), torch.erfc(-b) - torch.erfc(-a))
    if not mass.sum() > 0:
        raise ValueError(
            f"p_mean = {p_mean}, p_std = {p_std} put no weight between σ = {sigmas[0]:g} and {sigmas[-1]:g}"
        )
    return mass / mass.sum()


def uniform_pmf(sigmas: Tensor) -> Tensor:
    """i ~ U[1, N-1] (§2, the choice of 2023) -> float64 [n-1]."""
    return torch.full((len(sigmas) - 1,), 1 / (len(sigmas) - 1), dtype=torch.float64)


def draw_pairs(cdf: Tensor, u: Tensor) -> Tensor:
    """Pair indices for uniform numbers u in (0, 1), by inverting the cumulative distribution -> int64, like u.

    Its last number is 1; more may follow that are above 1.
    """
    return torch.searchsorted(cdf, u.to(cdf), right=True).clamp(max=len(cdf) - 1)


# name in a recipe -> (sigmas) -> probabilities of the n-1 pairs; lognormal also takes p_mean and p_std
INDEX_DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {"lognormal": lognormal_pmf, "uniform": uniform_pmf}
