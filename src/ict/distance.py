"""d(x, y) between two batches of images (§3.3): one number a sample, summed over channels and pixels.

Always in float32 or better: the two images differ by little, and half precision would round the difference away.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ict.lpips import load_lpips


def huber_c(dimensions: int) -> float:
    """c = 0.00054 · √d (§3.3): 0.0299 for 3×32×32, 0.0599 for 3×64×64."""
    return 0.00054 * math.sqrt(dimensions)


def pseudo_huber(x: Tensor, y: Tensor, *, c: float | None = None) -> Tensor:
    """√(‖x − y‖² + c²) − c over the whole image (§3.3) -> [B]; c by the √d rule unless given."""
    if c is None:
        c = huber_c(math.prod(x.shape[1:]))
    if c <= 0:
        raise ValueError(f"pseudo-Huber needs c > 0, not {c}: at c = 0 its gradient is undefined where x equals y")
    squared = squared_l2(x, y)
    # The textbook form loses every digit once ‖x − y‖ ≪ c; this one is the same number without the subtraction.
    return squared / (torch.sqrt(squared + c * c) + c)


def squared_l2(x: Tensor, y: Tensor) -> Tensor:
    """‖x − y‖² -> [B]."""
    return _difference(x, y).square().sum(dim=1)


def l1(x: Tensor, y: Tensor) -> Tensor:
    """‖x − y‖₁ -> [B]."""
    return _difference(x, y).abs().sum(dim=1)


def lpips(x: Tensor, y: Tensor, *, lpips_net: str = "vgg16", lpips_weights: str = "") -> Tensor:
    """LPIPS of the two (the metric of 2023) -> [B]."""
    if x.shape != y.shape:
        raise ValueError(f"distance between images of different shapes: {tuple(x.shape)} and {tuple(y.shape)}")
    return load_lpips(lpips_net, lpips_weights, x.device)(x, y)


def _difference(x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape:
        raise ValueError(f"distance between images of different shapes: {tuple(x.shape)} and {tuple(y.shape)}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return (x.to(dtype) - y.to(dtype)).flatten(1)


# name in a recipe -> (x, y) -> d per sample; pseudo_huber also takes c
DISTANCES: dict[str, Callable[..., Tensor]] = {
    "pseudo_huber": pseudo_huber,
    "squared_l2": squared_l2,
    "l1": l1,
    "lpips": lpips,
}
