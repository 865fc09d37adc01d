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


# --- the same with no grid: what becomes of the levels when N grows without end


def lognormal_quantile(
    u: Tensor, *, p_mean: float = -1.1, p_std: float = 2.0, sigma_min: float = 0.002, sigma_max: float = 80.0
) -> Tensor:
    """The limit of `lognormal_pmf`: ln σ ~ N(P_mean, P_std²) between σ_min and σ_max, where a share u lies below."""
    a, b = ((math.log(sigma) - p_mean) / p_std for sigma in (sigma_min, sigma_max))
    # The normal is symmetric: seen from the side on which less lies, nothing cancels.
    mirrored = a + b > 0
    low, high = (0.5 * math.erfc(-end / math.sqrt(2)) for end in ((-b, -a) if mirrored else (a, b)))
    if not high > low:
        raise ValueError(
            f"p_mean = {p_mean}, p_std = {p_std} put no weight between σ = {sigma_min:g} and {sigma_max:g}"
        )
    z = torch.special.ndtri(low + (1 - u if mirrored else u) * (high - low))
    return torch.exp(p_mean + p_std * (-z if mirrored else z)).clamp(sigma_min, sigma_max)


def uniform_quantile(u: Tensor, *, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """The limit of `uniform_pmf`: even in σ^(1/ρ)."""
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    return ((low + u * (high - low)) ** rho).clamp(sigma_min, sigma_max)


def karras_gap(sigma: Tensor, n: int, *, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """How far apart neighbours are near σ on a grid of n levels, where n is large: (dσ/du) / (n − 1)."""
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    return rho * (high - low) / (n - 1) * sigma ** (1 - 1 / rho)


# name in a recipe -> (sigmas) -> probabilities of the n-1 pairs; lognormal also takes p_mean and p_std
INDEX_DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {"lognormal": lognormal_pmf, "uniform": uniform_pmf}
# the same names -> (u in (0, 1)) -> σ, without a grid
LEVEL_QUANTILES: dict[str, Callable[..., Tensor]] = {"lognormal": lognormal_quantile, "uniform": uniform_quantile}
