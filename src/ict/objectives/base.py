"""The joint between the loop and a method: what a method is given, and what it gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ict import rng
from ict.config import Config, NoiseConfig, ObjectiveConfig
from ict.model import ConsistencyModel, spread
from ict.objectives.coupling import couple
from ict.rng import Stream


class Phase(NamedTuple):
    """What a method takes from the progress of a run: tensors whose shapes never change, and figures for the log."""

    tensors: Mapping[str, Tensor]
    figures: Mapping[str, float]
    kind: str = ""  # of a method that does different things one after the other: which of them


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where in the run a batch is, and which draws are its own."""

    seed: int
    number: int | Tensor  # of the optimiser's step: the counter of everything random
    done: int  # progress is done / total: steps, or milliseconds when time bounds the run
    total: int
    target: ConsistencyModel | None = None  # the average of the student that teaches it, where the recipe wants one
    samples: Tensor  # int64 [B]: the place of each sample in the whole batch of this step, over all ranks and pieces
    phase: Phase | None = None  # the method's own, where it has one and it is already known
    couple_above: float | None = None  # above this level an image gets the noise of the batch that suits it

    def noise(self, images: Tensor, sigma: Tensor) -> Tensor:
        """z ~ N(0, 1) -> float32, of the images' shape; σ [B] is the (higher) level that each will be used at."""
        shape = tuple(images.shape[1:])
        z = rng.normal(self.samples, shape, seed=self.seed, step=self.number, stream=Stream.NOISE)
        if self.couple_above is None:
            return z
        return couple(images, z, takes_part=sigma > self.couple_above)

    def keys(self) -> Tensor:
        """What decides dropout -> [B]."""
        return rng.words(self.samples, 1, seed=self.seed, step=self.number, stream=Stream.DROPOUT)[:, 0]

    def lognormal(self, mean: float, deviation: float) -> Tensor:
        """Noise levels with ln σ ~ N(mean, deviation²) -> float64 [B]."""
        drawn = rng.normal(self.samples, (1,), seed=self.seed, step=self.number, stream=Stream.LEVEL)[:, 0]
        return torch.exp(mean + deviation * drawn.double())


@dataclass(frozen=True)
class Loss:
    """One loss a sample, and figures worth logging, each a number. Those that change with progress belong in a phase's
    figures: the numbers of a recorded step stay as they were.

    With the noise level of each sample [B] and the net's answer to it [B, C, H, W] the guard can tell the levels apart.
    """

    per_sample: Tensor
    stats: dict[str, float]
    sigma: Tensor | None = None
    output: Tensor | None = None


def add_noise(images: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
    """x + σ z, in the images' own precision (float32)."""
    return images + spread(sigma, images) * z


def within(sigma: Tensor, noise: NoiseConfig) -> Tensor:
    """Levels that a consistency model can learn from: up to σ_max, and above σ_min, where it is the identity."""
    return sigma.clamp(1.001 * noise.sigma_min, noise.sigma_max)


class Objective(Protocol):
    """A method may also have `see(pixels, labels, device)`, which is given the training set before the first step, and
    `phase(step) -> Phase`. It then promises that its call depends on progress by the tensors of that alone, so that a
    step can be recorded once and played again (a CUDA graph) while N changes.
    """

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss: ...


class Method(Objective, Protocol):
    """An objective that a recipe can name, and what a table of it has to say."""

    keys: ClassVar[tuple[str, ...]]  # of [objective] that it looks at, beside those that `keys.used_keys` adds

    def __init__(self, config: Config) -> None: ...

    @staticmethod
    def beside(section: ObjectiveConfig) -> dict[str, int]:
        """What an image costs beside its student, in calls of such a net; a derivative along a path counts as two.

        `ict bench` times what is called TEACHER, DERIVATIVE or DIFFUSION; any other is in what it calls the rest.
        """
        ...


TEACHER, DERIVATIVE, DIFFUSION = "teacher forward", "derivative along the path", "diffusion model forward"


def one_teacher(section: ObjectiveConfig) -> dict[str, int]:
    """Beside the student a teacher, whoever that is."""
    return {TEACHER: 1}


def one_derivative(section: ObjectiveConfig) -> dict[str, int]:
    """Beside the student a derivative in forward mode: the values, and how they change."""
    return {DERIVATIVE: 2}
