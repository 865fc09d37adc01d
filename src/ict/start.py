"""Where samples begin: noise of σ_max (§2), or a Gaussian or a mixture that stands for noisy images of a lower level.

At σ_max nothing is left of an image, and noise is all there is to draw. But noisy images are easy to draw long before:
where the noise is about as strong as what images have in common (their mean, and the few directions in which they vary
most), it has smoothed away most of what is not Gaussian. So noisy images are drawn there, from a Gaussian with the mean
and the covariance of the noisy training images, one for each class, or from a mixture that EM has fitted to them; and
the network is asked from there on. That is still one call, but none of the mistakes that a model makes above.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ict import rng
from ict.config import SamplingConfig
from ict.pixels import to_float
from ict.reading import require
from ict.rng import Stream

DIRECTIONS = 256  # principal directions that are told apart …
OWN = 64  # … and those of them in which each class has a covariance of its own
NUMBERS = 2**22  # as far as a model file has room for them
LOOKED_AT = 2**28  # numbers of the training images that are looked at, at most
POWERS, EXTRA = 5, 32  # rounds of the search for the directions, and how many more are searched for
PIECE, AT_ONCE = 2**11, 2**23  # images, and numbers, at a time
NEAREST, ROUNDS = 8, 16  # rounds of k-means, which EM begins with, and of EM
NOISY, FEWEST = 10, 2**15  # noisy images that EM wants for each number of its parts' centres, and at least
WORK = {"cpu": 2**36, "cuda": 2**41}  # products that a round of EM may take, which bounds the images it looks at


@dataclass(frozen=True, kw_only=True)
class StartSpec:
    """What a model file says of its start."""

    sigma: float = 0.0  # the level of the Gaussian; 0: there is none, and samples begin at σ_max
    directions: int = 0
    own: int = 0
    parts: int = 0  # of the mixture; 0: one Gaussian for each class, or for all

    def __post_init__(self) -> None:
        require(0 <= self.sigma <= 1e6, f"start.sigma = {self.sigma}: not a noise level")
        require(
            0 <= self.own <= self.directions <= DIRECTIONS and (self.own > 0) == (self.sigma > 0) and self.own <= OWN,
            f"start.sigma = {self.sigma:g} with directions = {self.directions} and own = {self.own}: not a start",
        )
        require(
            0 <= self.parts <= 1024 and (self.sigma > 0 or not self.parts),
            f"start.parts = {self.parts}: not those of a mixture",
        )

    def describe(self) -> str:
        if not self.sigma:
            return "noise"
        return f"a mixture of {self.parts} Gaussians" if self.parts else "a Gaussian"

    @classmethod
    def of(cls, sampling: SamplingConfig, shape: tuple[int, int, int], *, classes: int) -> "StartSpec":
        """What a recipe asks for."""
        if sampling.start == "noise":
            return cls()
        parts = sampling.start_parts if sampling.start == "mixture" else 0
        return cls.sized(sampling.start_sigma, shape, classes=classes, parts=parts)

    @classmethod
    def sized(cls, sigma: float, shape: tuple[int, int, int], *, classes: int, parts: int = 0) -> "StartSpec":
        """For images of a shape, as detailed as there is room for."""
        numbers = math.prod(shape)
        directions = max(1, min(DIRECTIONS, numbers, NUMBERS // numbers))
        own = max(1, min(OWN, directions, math.isqrt(NUMBERS // (parts or max(1, classes)))))
        return cls(sigma=sigma, directions=directions, own=own, parts=parts)


class Start(nn.Module):
    """Noisy images of a level, drawn without a network: from what `fit` has found."""

    mean: Tensor  # [d]
    basis: Tensor  # [directions, d], orthonormal; images vary most along the first ones
    spread: Tensor  # [directions + 1] deviations along each, noise included, and in any direction beyond them
    centres: Tensor  # [Gaussians, own] along the first directions, from the mean; one a class, or those of the mixture
    factors: Tensor  # [Gaussians, own, own] lower triangles L: L Lᵀ is its covariance there, noise included
    shares: Tensor | None  # [classes or 1, Gaussians] of a mixture: how often each is drawn

    def __init__(self, spec: StartSpec, shape: tuple[int, int, int], *, classes: int):
        super().__init__()
        self.sigma, self.shape, kinds, numbers = spec.sigma, shape, max(1, classes), math.prod(shape)
        several = spec.parts or kinds
        sizes = {
            "mean": (numbers,),
            "basis": (spec.directions, numbers),
            "spread": (spec.directions + 1,),
            "centres": (several, spec.own),
            "factors": (several, spec.own, spec.own),
        }
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size))
        self.register_buffer("shares", torch.zeros(kinds, several) if spec.parts else None)

    @torch.no_grad()
    def draw(self, numbers: Tensor, *, sigma: float, seed: int, labels: Tensor | None) -> Tensor:
        """Noisy images number `numbers` (int64 [B]) of a seed, at its level or a higher one -> float32 [B, C, H, W].

        They are made of the noise that a sample begins with at σ_max: the same number gives much the same image.
        """
        z = rng.normal(numbers, self.shape, seed=seed, step=0, stream=Stream.SAMPLING).flatten(1)
        wide = torch.float32 if z.device.type == "mps" else torch.float64  # so that the size of a batch does not show
        z, mean, basis, spread, centres, factors = (
            each.to(wide) for each in (z, self.mean, self.basis, self.spread, self.centres, self.factors)
        )
        which, own = torch.zeros_like(numbers) if labels is None else labels, self.centres.shape[1]
        if self.shares is not None:
            there = numbers.cpu() if numbers.device.type == "mps" else numbers  # no float64 there
            u = rng.uniform(there, 1, seed=seed, step=0, stream=Stream.START)[:, 0].to(wide).to(z.device)
            # Running sums; a GPU refuses torch's own where it has to be deterministic.
            ladder = (self.shares.to(wide) @ centres.new_ones(len(centres), len(centres)).triu())[which]
            which = (ladder <= u[:, None] * ladder[:, -1:]).sum(1).clamp(max=len(centres) - 1)
        along = z @ basis.T
        first = centres[which] + (factors[which] @ along[:, :own, None])[:, :, 0]
        x = torch.cat((first, spread[own:-1] * along[:, own:]), dim=1) @ basis
        x = mean + x + spread[-1] * (z - along @ basis)
        more = max(0.0, sigma**2 - self.sigma**2) ** 0.5
        if more > 0:
            x = x + more * rng.normal(numbers, self.shape, seed=seed, step=1, stream=Stream.START).flatten(1).to(wide)
        return x.to(torch.float32).reshape(-1, *self.shape)


@torch.no_grad()
def fit(
    start: Start,
    pixels: Tensor,
    labels: Tensor | None,
    *,
    flip: bool,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Fit a start to training images (uint8 [n, C, H, W]), on the device that it is on.

    With `flip` each counts mirrored, too. `labels` are needed where the model has classes. `progress` is told of passes
    over the images that are done, and of how many there are.
    """
    device, done = start.mean.device, 0
    passes = POWERS + 3 + (0 if start.shares is None else NEAREST + ROUNDS)
    room = max(2, LOOKED_AT // (pixels[0].numel() * (1 + flip)))
    chosen = torch.arange(len(pixels))
    if len(pixels) > room:  # some, from everywhere: sets are often in an order
        chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:room].sort().values
    piece = max(1, min(PIECE, AT_ONCE // pixels[0].numel()))

    def images() -> Iterator[tuple[Tensor, Tensor]]:
        """Images as rows of numbers from their mean, and their classes."""
        for some in chosen.split(piece):
            rows = to_float(pixels[some].to(device))
            kinds = torch.zeros_like(some) if labels is None else labels[some]
            for view in (rows, rows.flip(-1)) if flip else (rows,):
                yield view.flatten(1) - start.mean, kinds.to(device)
        tell()

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, passes)

    start.mean.zero_()
    count, total, squares = 0, torch.zeros_like(start.mean, dtype=torch.float64), 0.0
    for x, _ in images():
        count, total, squares = count + len(x), total + x.double().sum(0), squares + x.double().square().sum().item()
    start.mean.copy_(total / count)
    variances = find_directions(start, images, count)
    left = squares / count - (total / count).square().sum().item() - variances.sum().item()
    rest = max(0.0, left) / max(1, len(start.mean) - len(variances))
    start.spread.copy_((torch.cat((variances, variances.new_tensor([rest]))) + start.sigma**2).sqrt())
    if start.shares is None:
        describe_classes(start, images)
    else:
        fit_parts(start, images, tell)


def find_directions(start: Start, images: Callable[[], Iterator[tuple[Tensor, Tensor]]], count: int) -> Tensor:
    """The principal directions, by powers of the covariance -> the variances of the images along them."""
    wanted, numbers = start.basis.shape
    columns = min(numbers, wanted + EXTRA)
    draws = torch.Generator().manual_seed(0)
    found = torch.randn(numbers, columns, generator=draws).to(start.basis)
    for _ in range(POWERS):
        found = torch.linalg.qr(found)[0]
        found = sum((x.T @ (x @ found) for x, _ in images()), torch.zeros_like(found)) / count
    found = torch.linalg.qr(found)[0]
    small = torch.zeros(columns, columns, dtype=torch.float64, device=found.device)
    for x, _ in images():
        along = (x @ found).double()
        small += along.T @ along
    variances, turn = torch.linalg.eigh(small / count)
    start.basis.copy_((found.double() @ turn).T.flip(0)[:wanted])
    return variances.flip(0)[:wanted].clamp_min(0)


def describe_classes(start: Start, images: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> None:
    """Mean and covariance of each class. Some have few images: each borrows of what all have in common.

    Its mean is drawn to the mean of all as far as chance alone would make means of so few images differ.
    """
    classes, own = start.centres.shape
    size = torch.zeros(classes, 1, 1, dtype=torch.float64, device=start.centres.device)
    first, second = size.new_zeros(classes, 1, own), size.new_zeros(classes, own, own)
    for x, kinds in images():
        along = (x @ start.basis[:own].T).double()
        for kind in kinds.unique():
            mine = along[kinds == kind]
            size[kind] += len(mine)
            first[kind] += mine.sum(0)
            second[kind] += mine.T @ mine
    means = first / size.clamp_min(1)
    scatter = second - size * means.mT * means
    pooled = scatter.sum(0) / size.sum()
    share = own / (size + own) if classes > 1 else torch.zeros_like(size)
    covariance = (1 - share) * scatter / size.clamp_min(1) + share * pooled
    chance = pooled.diagonal() / size.clamp_min(1)  # variance of a mean, [classes, 1, own]
    apart = ((size * (means.square() - chance)).sum(0) / size.sum()).clamp_min(0)  # of what the means are of
    means = means * torch.where(apart > 0, apart / (apart + chance), 0.0 if classes > 1 else 1.0)
    noise = start.sigma**2 * torch.eye(own, dtype=covariance.dtype, device=covariance.device)
    start.centres.copy_(means[:, 0])
    start.factors.copy_(torch.linalg.cholesky((covariance + covariance.mT) / 2 + noise))


def fit_parts(start: Start, images: Callable[[], Iterator[tuple[Tensor, Tensor]]], tell: Callable[[], None]) -> None:
    """The parts of a mixture, by EM on noisy images with fresh noise in every round; it begins with k-means."""
    assert start.shares is not None
    parts, own = start.centres.shape
    rows = [((x @ start.basis[:own].T), kinds) for x, kinds in images()]
    places, kinds = (torch.cat(each) for each in zip(*rows, strict=True))
    room = max(50 * parts, WORK.get(places.device.type, WORK["cpu"]) // (parts * own**2))
    again = min(room, max(FEWEST, NOISY * own * parts)) // len(places)
    if again > 1:  # the noise of few images would be taken for what they are
        places, kinds = places.repeat(again, 1), kinds.repeat(again)
    draws = torch.Generator().manual_seed(0)
    if len(places) > room:
        chosen = torch.randperm(len(places), generator=draws)[:room].to(places.device)
        places, kinds = places[chosen], kinds[chosen]
    first = torch.randint(len(places), (parts,), generator=draws).to(places.device)
    start.centres.copy_(places[first])
    draws = torch.Generator(places.device).manual_seed(0)
    for done in range(NEAREST + ROUNDS):
        weigh = nearest(start) if done <= NEAREST else likely(start)
        count, total, squares = torch.zeros_like(start.shares), torch.zeros_like(start.centres), None
        if done >= NEAREST:
            squares = torch.zeros_like(start.factors)
        for some, mine in zip(places.split(PIECE // 2), kinds.split(PIECE // 2), strict=True):
            x = some + start.sigma * torch.randn(some.shape, generator=draws, device=some.device)
            weights = weigh(x, mine)
            count += nn.functional.one_hot(mine, len(count)).to(x).T @ weights
            total += weights.T @ x
            if squares is not None:
                squares.baddbmm_((weights.T[:, :, None] * x).mT, x.expand(parts, -1, -1))
        settle(start, count, total, squares)
        tell()


def nearest(start: Start) -> Callable[[Tensor, Tensor], Tensor]:
    """Each image belongs to the part whose centre is nearest."""
    centres = start.centres.clone()
    halves = centres.square().sum(1) / 2
    return lambda x, kinds: nn.functional.one_hot((x @ centres.T - halves).argmax(1), len(centres)).to(x)


def likely(start: Start) -> Callable[[Tensor, Tensor], Tensor]:
    """Each image belongs to all parts, as likely as it comes from them."""
    assert start.shares is not None
    shares, (parts, own) = start.shares.log(), start.centres.shape
    inverse = torch.linalg.solve_triangular(start.factors, torch.eye(own).to(start.factors), upper=False)
    turned, shift = inverse.flatten(0, 1).T, (inverse @ start.centres[:, :, None]).flatten()
    sizes = inverse.diagonal(dim1=1, dim2=2).log().sum(1)

    def weigh(x: Tensor, kinds: Tensor) -> Tensor:
        distances = (x @ turned - shift).unflatten(1, (parts, own)).square().sum(2)
        return (shares[kinds] + sizes - distances / 2).softmax(1)

    return weigh


def settle(start: Start, count: Tensor, total: Tensor, squares: Tensor | None) -> None:
    """The parts that fit these sums best. Each borrows a little of what all have in common: some have few images."""
    assert start.shares is not None
    images, own = count.sum(0), total.shape[1]
    there = images[:, None] > 1e-3
    means = torch.where(there, total / images.clamp_min(1e-3)[:, None], start.centres)
    start.centres.copy_(means)
    start.shares.copy_((count + images / images.sum()) / (count.sum(1, keepdim=True) + 1))
    if squares is None:
        return
    scatter = torch.where(there[..., None], squares - images[:, None, None] * means[:, :, None] * means[:, None, :], 0)
    covariance = (scatter + own * scatter.sum(0) / images.sum()) / (images + own)[:, None, None]
    ridge = 1e-3 * start.sigma**2 * torch.eye(own).to(covariance)  # where images are few, rounding may eat the noise
    start.factors.copy_(torch.linalg.cholesky((covariance + covariance.mT) / 2 + ridge))
