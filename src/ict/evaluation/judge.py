"""Scores of a set of images: one pass through the feature net, then every metric.

The features of the real images are kept in the cache, by the checksums of the images and of the net.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ict import rng
from ict.data import Images
from ict.evaluation.features import FeatureNet
from ict.evaluation.metrics import (
    Moments,
    MomentSum,
    compare_neighbours,
    frechet_distance,
    inception_score,
    kernel_distance,
)
from ict.files import cache_home, write_atomically
from ict.pixels import to_uint8
from ict.ranks import ALONE, Ranks
from ict.reading import require
from ict.rng import Stream
from ict.sampling import Generator, check_ladder, sample_numbers

KEPT = 50_000  # features that are kept of a set, for precision, recall and KID
FORMAT = "ict-features-1"
NEIGHBOURS = 3
Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A set of images as a feature net sees it."""

    moments: Moments
    features: Tensor  # float32 [at most KEPT, d], from all over the set
    logits: Tensor | None = None


def look(
    batches: Iterable[Tensor],
    net: FeatureNet,
    *,
    count: int = 0,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Seen:
    """uint8 batches -> their features; of `count` images only so many features are kept as KEPT allows.

    On several ranks each looks at its own batches, and all see the same in the end.
    """
    total, every = MomentSum(), max(1, -(-count // KEPT))
    kept, logits = [], []
    for features, scores in gathered(map(net, batches), ranks):
        kept.append(features[(-total.count) % every :: every])
        logits += [] if scores is None else [scores]
        total.add(features)
        if progress is not None:
            progress(total.count)
    return Seen(moments=total.moments(), features=torch.cat(kept), logits=torch.cat(logits) if logits else None)


def gathered(answers: Iterator[tuple[Tensor, Tensor | None]], ranks: Ranks) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What all ranks have seen, batch by batch as one alone would have; as it comes where there is one alone."""
    if ranks.count == 1:
        yield from answers
        return
    mine = list(answers)
    size = max(int(n) for n in ranks.highest([max((len(features) for features, _ in mine), default=0)]))
    features, scores = (
        None if mine and mine[0][part] is None else ranks.gather(torch.cat([one[part] for one in mine]))  # type: ignore
        for part in (0, 1)
    )
    assert features is not None
    yield from zip(features.split(size), [None] * len(features) if scores is None else scores.split(size), strict=False)


def look_at_real(images: Images, net: FeatureNet, *, batch: int = 250, progress: Progress | None = None) -> Seen:
    """The features of a data set, from the cache where they are there."""
    key = hashlib.sha256(f"{FORMAT}\0{images.checksum}\0{net.name}\0{net.checksum}\0{KEPT}".encode()).hexdigest()
    path = cache_home() / "features" / f"{key[:24]}.safetensors"
    stored = read_seen(path, net)
    if stored is not None:
        return stored
    require(len(images) > 1, f"{len(images)} image: a set to compare with needs more")

    def batches() -> Iterator[Tensor]:
        for start in range(0, len(images), batch):
            yield images.pixels[start : start + batch]
            images.forget()

    seen = look(batches(), net, count=len(images), progress=progress)
    tensors = {"mean": seen.moments.mean, "covariance": seen.moments.covariance, "features": seen.features}
    header = {"format": FORMAT, "count": str(seen.moments.count)}
    data = safetensors.torch.save({name: one.cpu().contiguous() for name, one in tensors.items()}, metadata=header)
    write_atomically(path, data)
    return seen


def read_seen(path: Path, net: FeatureNet) -> Seen | None:
    """Stored features; None where there are none, or they are damaged."""
    try:
        with safetensors.safe_open(path, framework="pt", device=str(net.device)) as file:
            count = int(file.metadata()["count"])
            mean, covariance, features = (file.get_tensor(name) for name in ("mean", "covariance", "features"))
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return None
    whole = features.shape[1] == net.dimension and all(one.isfinite().all() for one in (mean, covariance, features))
    return Seen(moments=Moments(mean, covariance, count), features=features) if whole else None


def check_sets(images: Images, net: FeatureNet, *, samples: int) -> None:
    """What would make a score meaningless, before anything is computed."""
    for count, what in ((samples, "samples"), (len(images), "real images")):
        require(
            count > net.dimension,
            f"{count:,} {what} are too few: a Fréchet distance over {net.dimension:,} features needs more than "
            f"{net.dimension:,}, and is biased upwards by few (the papers use 50,000)",
        )


def score(fake: Seen, real: Seen, net: FeatureNet) -> dict[str, float]:
    """Every metric that these features allow, by name."""
    found: dict[str, float] = {net.frechet: frechet_distance(fake.moments, real.moments)}
    mean, deviation = kernel_distance(real.features, fake.features)
    found |= {net.kernel: mean, f"{net.kernel} deviation": deviation}
    if fake.logits is not None:
        name = "IS" if net.name == "inception" else f"IS-{net.name}"
        mean, deviation = inception_score(fake.logits)
        found |= {name: mean, f"{name} deviation": deviation}
    near = compare_neighbours(real.features, fake.features, k=NEIGHBOURS)
    return found | {"precision": near.precision, "recall": near.recall, "nearest": near.nearest, "copies": near.copies}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Scores models against one set of real images, with one feature net."""

    images: Images
    source: str  # what the real images are called
    net: FeatureNet
    real: Seen

    @classmethod
    def of(
        cls, images: Images, net: FeatureNet, *, samples: int, source: str = "", progress: Progress | None = None
    ) -> "Judge":
        check_sets(images, net, samples=samples)
        return cls(images=images, source=source, net=net, real=look_at_real(images, net, progress=progress))

    def judge(
        self,
        generator: Generator,
        *,
        samples: int,
        sigmas: list[float] | None = None,
        seed: int = 0,
        batch: int = 250,
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
    ) -> dict[str, float]:
        """Draw samples, one network call for each of `sigmas`, and score them."""
        labels, ladder = self.labels(generator, samples, seed=seed), sigmas or generator.ladder(1)
        drawn = draw(generator, labels, ladder, samples, seed, batch, ranks)
        seen = look(drawn, self.net, count=samples, progress=progress, ranks=ranks)
        return score(seen, self.real, self.net)

    def judge_images(self, images: Images, *, batch: int = 250, progress: Progress | None = None) -> dict[str, float]:
        """Score images that somebody has saved."""
        require(
            images.shape == self.images.shape,
            f"the images are {images.describe()}, the real ones {self.images.describe()}: compare like with like",
        )
        seen = look(images.pixels.split(batch), self.net, count=len(images), progress=progress)
        return score(seen, self.real, self.net)

    def labels(self, generator: Generator, samples: int, *, seed: int) -> Tensor | None:
        """Classes of real images drawn at random -> int64 [samples], or None for a model without.

        Each for itself: dealt out in exact proportion, samples would depend on each other, and KID is then too low.
        """
        names = generator.spec.class_names
        if not names:
            return None
        require(
            tuple(names) == tuple(self.images.class_names),
            f"the model knows {len(names)} classes, and the real images have others: judge it against its own set",
        )
        drawn = rng.uniform(torch.arange(samples), 1, seed=seed, step=0, stream=Stream.LABEL)[:, 0]
        return self.images.labels[(drawn * len(self.images)).long()].to(generator.device)


def draw(
    generator: Generator,
    labels: Tensor | None,
    sigmas: list[float],
    samples: int,
    seed: int,
    batch: int,
    ranks: Ranks = ALONE,
) -> Iterator[Tensor]:
    """Batches of samples as uint8, number by number: a sample depends on its number alone. Each rank has its share."""
    check_ladder(sigmas, generator.spec)
    for numbers in ranks.share(torch.arange(samples, device=generator.device)).split(batch):
        chosen = None if labels is None else labels[numbers]
        x = sample_numbers(generator.model, numbers, sigmas=sigmas, seed=seed, labels=chosen, clip=True)
        yield to_uint8(finite(x))


def finite(x: Tensor) -> Tensor:
    """The same samples, if they are numbers."""
    require(
        bool(x.isfinite().all()),
        "the model gives numbers that are not finite: it has diverged and cannot be judged",
    )
    return x


def summary(scores: list[dict[str, float]]) -> dict[str, Any]:
    """Mean over repeats, and the deviation of each where there are several."""
    mean = {key: sum(one[key] for one in scores) / len(scores) for key in scores[0]}
    if len(scores) == 1:
        return mean
    spread = {key: torch.tensor([one[key] for one in scores], dtype=torch.float64).std().item() for key in mean}
    return mean | {f"{key} over seeds": value for key, value in spread.items() if not key.endswith("deviation")}
