"""Distances between two sets of features: Fréchet, kernel (KID), precision and recall, nearest neighbours; and the
Inception score. Pure functions of tensors on one device; the scores of the papers when the features are Inception's.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 2048  # rows whose distances to everything are held at a time
SEED = 2020  # of the subsets: torch-fidelity's, so that scores can be compared to the digit


@dataclass(frozen=True)
class Moments:
    """Mean [d] and covariance [d, d] of features, in float64, and of how many."""

    mean: Tensor
    covariance: Tensor
    count: int


class MomentSum:
    """Mean and covariance of rows that come in batches."""

    def __init__(self) -> None:
        self.count, self.shift, self.total, self.products = 0, torch.empty(0), torch.empty(0), torch.empty(0)

    def add(self, features: Tensor) -> None:
        if not self.count:  # sums of differences from a typical row lose no digits
            self.shift = features.double().mean(dim=0)
            self.total, self.products = torch.zeros_like(self.shift), torch.zeros_like(self.shift.outer(self.shift))
        x = features.double() - self.shift
        self.count += len(x)
        self.total += x.sum(dim=0)
        self.products.addmm_(x.T, x)

    def moments(self) -> Moments:
        mean = self.total / self.count
        covariance = (self.products - self.count * mean.outer(mean)) / (self.count - 1)
        return Moments(mean + self.shift, covariance, self.count)


def frechet_distance(a: Moments, b: Moments) -> float:
    """|μ_a − μ_b|² + tr(Σ_a + Σ_b − 2 (Σ_a Σ_b)^½), in float64.

    tr (Σ_a Σ_b)^½ is the sum of the singular values of Σ_a^½ Σ_b^½: the same number as by the eigenvalues of the
    product, but without the square root of rounding errors where a covariance is singular.
    """
    between = torch.linalg.svdvals(root(a.covariance) @ root(b.covariance)).sum()
    apart = (a.mean - b.mean).square().sum()
    return max(0.0, (apart + a.covariance.trace() + b.covariance.trace() - 2 * between).item())


def root(covariance: Tensor) -> Tensor:
    """The symmetric square root, by eigenvalues; those that rounding made negative are zero."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def kernel_distance(real: Tensor, fake: Tensor, *, subsets: int = 100, size: int = 1000) -> tuple[float, float]:
    """KID: the squared maximum mean discrepancy with the kernel (x·y / d + 1)³, unbiased; mean and deviation over
    subsets. It may be slightly below zero.
    """
    size = min(size, len(real), len(fake))
    rng = np.random.RandomState(SEED)
    values = []
    for _ in range(subsets):
        x = fake[torch.from_numpy(rng.choice(len(fake), size, replace=False)).to(fake.device)]
        y = real[torch.from_numpy(rng.choice(len(real), size, replace=False)).to(real.device)]
        inside = sum(kernel.sum() - kernel.diagonal().sum() for kernel in (cubic(x, x), cubic(y, y)))
        values.append(inside / (size * (size - 1)) - 2 * cubic(x, y).mean())
    found = torch.stack(values)
    return found.mean().item(), found.std(correction=0).item()


def cubic(x: Tensor, y: Tensor) -> Tensor:
    return ((x @ y.T).double() / x.shape[1] + 1) ** 3


def inception_score(logits: Tensor, *, splits: int = 10) -> tuple[float, float]:
    """exp of the mean KL(p(class | image) ‖ p(class)), over ten parts of the samples: mean and deviation."""
    order = torch.from_numpy(np.random.RandomState(SEED).permutation(len(logits)))
    scores = []
    for part in range(splits):
        chosen = order[part * len(logits) // splits : (part + 1) * len(logits) // splits].to(logits.device)
        log_p = logits[chosen].double().log_softmax(dim=1)
        log_q = log_p.logsumexp(dim=0) - math.log(len(chosen))
        scores.append((log_p.exp() * (log_p - log_q)).sum(dim=1).mean().exp())
    found = torch.stack(scores)
    return found.mean().item(), found.std(correction=0).item()


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """What the distances between two sets say. Samples near no real image lower the precision, real images near no
    sample the recall; samples nearer to a real image than real images are to each other look like copies."""

    precision: float
    recall: float
    nearest: float  # median distance of a sample to the nearest real image, over the same between real images
    copies: float  # share of samples that are nearer to a real image than 99 % of the real images are to another


def compare_neighbours(real: Tensor, fake: Tensor, *, k: int = 3) -> Neighbours:
    """Improved precision and recall (Kynkäänniemi et al., 2019), exact, in blocks."""
    centre = real.mean(dim=0)
    real, fake = real - centre, fake - centre  # smaller numbers, fewer digits lost
    real_balls, real_nearest = balls(real, k)
    fake_balls, _ = balls(fake, k)
    inside, nearest = cover(fake, real, real_balls)
    reached, _ = cover(real, fake, fake_balls)
    apart = real_nearest[real_nearest > 0]  # images that are in the set twice say nothing about how dense it is
    usual, close = (apart.sqrt().median(), torch.quantile(apart[: 2**24], 0.01)) if len(apart) else (torch.inf, 0.0)
    return Neighbours(
        precision=inside.double().mean().item(),
        recall=reached.double().mean().item(),
        nearest=float(nearest.sqrt().median() / usual),
        copies=(nearest <= close).double().mean().item(),
    )


def balls(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Squared distances of each row to its k-th nearest other row, and to the nearest -> [n], [n]."""
    radii, nearest = [], []
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        distances = squared_distances(block, x)
        rows = torch.arange(len(distances), device=x.device)
        distances[rows, start + rows] = torch.inf  # itself
        near = distances.topk(k, dim=1, largest=False)
        radii.append(near.values[:, -1])
        nearest.append((block - x[near.indices[:, 0]]).square().sum(dim=1))  # exact also where it is nearly 0
    return torch.cat(radii), torch.cat(nearest)


def cover(x: Tensor, y: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row of x lies in the ball of any row of y, and the squared distance to the nearest row of y."""
    inside, nearest = [], []
    for block in x.split(BLOCK):
        distances = squared_distances(block, y)
        inside.append((distances <= radii).any(dim=1))
        nearest.append((block - y[distances.argmin(dim=1)]).square().sum(dim=1))
    return torch.cat(inside), torch.cat(nearest)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x − y|² for all pairs -> float32 [n, m]."""
    products = torch.addmm(y.square().sum(dim=1), x, y.T, alpha=-2)
    return products.add_(x.square().sum(dim=1, keepdim=True)).clamp_min_(0)
