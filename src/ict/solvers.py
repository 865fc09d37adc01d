"""One step along the probability-flow ODE dx/dσ = (x − D(x, σ)) / σ (§2), given the denoiser D of a diffusion model."""

from collections.abc import Callable

from torch import Tensor

Denoiser = Callable[[Tensor, Tensor], Tensor]  # (x, σ) -> the mean of the clean images


def euler(denoise: Denoiser, x: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """One step of dx/dσ = (x − D(x, σ)) / σ from `high` to `low`."""
    return x + spread(low - high, x) * slope(denoise, x, high)


def heun(denoise: Denoiser, x: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """The same with the mean of the slopes at both ends."""
    first = slope(denoise, x, high)
    second = slope(denoise, x + spread(low - high, x) * first, low)
    return x + spread(low - high, x) * (first + second) / 2


def slope(denoise: Denoiser, x: Tensor, sigma: Tensor) -> Tensor:
    return (x - denoise(x, sigma)) / spread(sigma, x)


def spread(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))


SOLVERS: dict[str, Callable[[Denoiser, Tensor, Tensor, Tensor], Tensor]] = {"heun": heun, "euler": euler}
