"""Which noise levels for two and more steps (§2): a search on the grid of 1,281 levels, as in the paper.

The first call of every sample is the same whatever comes after, so it is made once; the noise of the later calls is a
function of the sample's number, so two levels are compared on the same noise. A coarse look at a few levels on a small
sample finds the valley, thirds of it are tried on the whole sample.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ict.evaluation.judge import Judge, finite, look
from ict.evaluation.metrics import frechet_distance
from ict.noise import karras_sigmas
from ict.pixels import to_uint8
from ict.reading import require
from ict.sampling import Generator, sample_call

LEVELS = 1281
COARSE = 9  # levels of the first look
Say = Callable[[float, float, int], object]  # σ, score, samples


@dataclass
class Search:
    """A minimum of a noisy function on whole numbers; every value is computed once and remembered."""

    function: Callable[[int], float]
    tried: dict[int, float] = field(default_factory=dict)

    def __call__(self, place: int) -> float:
        if place not in self.tried:
            self.tried[place] = self.function(place)
        return self.tried[place]

    def thirds(self, low: int, high: int, *, stop: int) -> int:
        """Narrow low..high by thirds until it is `stop` wide; gives the best place tried, not the last one."""
        while high - low > stop:
            third = max(1, (high - low) // 3)
            a, b = low + third, high - third
            if self(a) <= self(b):
                high = b
            else:
                low = a
        for place in (low, (low + high) // 2, high):
            self(place)
        return min(self.tried, key=lambda place: self.tried[place])


class Ladder:
    """Samples after the calls that are settled, and scores of one more call at any level."""

    def __init__(self, generator: Generator, judge: Judge, *, samples: int, seed: int, batch: int):
        self.generator, self.judge, self.seed, self.batch = generator, judge, seed, batch
        self.labels = judge.labels(generator, samples, seed=seed)
        self.numbers = torch.arange(samples, device=generator.device)
        self.sigmas: list[float] = []
        self.x = torch.zeros(samples, *generator.model.image_shape)  # on the CPU: the set may be large
        self.settle(generator.spec.first_sigma)

    def settle(self, sigma: float) -> None:
        """Make one more call for good."""
        self.x = torch.cat([x.cpu() for x in self.call(sigma, len(self.numbers))])
        self.sigmas.append(sigma)

    def call(self, sigma: float, samples: int) -> Iterator[Tensor]:
        """Batches of samples after one more call at a level."""
        for numbers in self.numbers[:samples].split(self.batch):
            labels = None if self.labels is None else self.labels[numbers]
            x = self.x[numbers.cpu()].to(numbers.device)
            place = {"call": len(self.sigmas), "sigma": sigma, "seed": self.seed}
            yield finite(sample_call(self.generator.model, x, numbers, labels=labels, clip=True, **place))

    def score(self, sigma: float, samples: int) -> float:
        """The Fréchet distance after one more call at a level."""
        seen = look(map(to_uint8, self.call(sigma, samples)), self.judge.net)
        return frechet_distance(seen.moments, self.judge.real.moments)


def grid_of(generator: Generator) -> Tensor:
    noise = generator.spec.noise
    return karras_sigmas(LEVELS, sigma_min=noise.sigma_min, sigma_max=noise.sigma_max, rho=noise.rho)


def tune(
    generator: Generator,
    judge: Judge,
    *,
    steps: int,
    samples: int,
    first: int,
    seed: int = 0,
    batch: int = 250,
    stop: int = 8,
    say: Say | None = None,
) -> tuple[list[float], float]:
    """The noise levels of `steps` calls that score best, one after the other, and their score on `samples`."""
    require(steps >= 2, f"--steps {steps}: one step has no level to choose; use 2 or more")
    first = min(first, samples)
    require(first > judge.net.dimension, f"--first {first}: use more than the {judge.net.dimension:,} features")
    sigmas = grid_of(generator)
    ladder = Ladder(generator, judge, samples=samples, seed=seed, batch=batch)
    ceiling, score = int((sigmas < generator.spec.first_sigma).sum()), float("nan")

    def measure(count: int, place: int) -> float:
        sigma = sigmas[place].item()
        found = ladder.score(sigma, count)
        if say is not None:
            say(sigma, found, count)
        return found

    for _ in range(steps - 1):
        require(ceiling > 2, f"no level is left below σ = {ladder.sigmas[-1]:.4g}: use fewer steps")
        look_first = Search(partial(measure, first))
        low, middle, high = coarse(look_first, ceiling)
        search = Search(partial(measure, samples), dict(look_first.tried) if first == samples else {})
        search(middle)
        best = search.thirds(low, high, stop=stop)
        score, ceiling = search.tried[best], best
        ladder.settle(sigmas[best].item())
    return ladder.sigmas, score


def coarse(search: Search, ceiling: int) -> tuple[int, int, int]:
    """The best of a few levels between the first and the ceiling, and its neighbours, which bound the valley."""
    places = sorted({min(max(1, round(ceiling * (i + 0.5) / COARSE)), ceiling - 1) for i in range(COARSE)})
    best = min(places, key=search)
    at = places.index(best)
    return places[at - 1] if at else 1, best, places[at + 1] if at + 1 < len(places) else ceiling - 1
