"""Easy consistency tuning (ECT; Geng et al., 2024): pairs of any two levels, drawn nearer to each other stage by stage.

It begins as diffusion, where the lower level is that of the clean image, and ends as consistency training; so it can
start from a diffusion model (`training.start`) or from nothing. There f(x, 0) = x; here the lowest level is σ_min, as
elsewhere.
"""

import functools
from typing import ClassVar

import torch
from torch import Tensor

from ict.config import Config
from ict.distance import DISTANCES
from ict.model import ConsistencyModel
from ict.objectives.base import Loss, Phase, Step, add_noise, one_teacher, within
from ict.objectives.score import DataScore, build_score, step_down
from ict.reading import bind, choose
from ict.weighting import denoising_weight


class EasyConsistencyTuning:
    """E[w(t) d(f_θ(x + t z, t), f_θ⁻(x + r z, r))], ln t ~ N(p_mean, p_std²), w = (t² + σ_d²) / (t σ_d)²."""

    keys: ClassVar[tuple[str, ...]] = ("distance", "score", "stages", "q", "k", "b")
    beside = staticmethod(one_teacher)

    def __init__(self, config: Config):
        self.config, self.section, self.noise = config, config.objective, config.noise
        self.score: DataScore | None = None  # what knows the whole set, where the recipe wants that
        self.distance = bind(choose("objective.distance", config.objective.distance, DISTANCES), config.objective)
        q = config.objective.q
        self.ratio = functools.lru_cache(maxsize=2)(
            lambda stage, device: torch.full((), q ** -(stage + 1), dtype=torch.float64, device=device)
        )

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        section = self.section
        t = within(step.lognormal(section.p_mean, section.p_std), self.noise)
        phase = step.phase or self.phase(step)
        r = lower_level(t, phase.tensors["ratio"], k=section.k, b=section.b).clamp_min(self.noise.sigma_min)
        z, key = step.noise(images, t), step.keys()

        noisy = add_noise(images, t, z)
        student = model(noisy, t, labels, key)
        with torch.no_grad():
            lower = self.lower_side(images, labels, noisy, r, t, z)
            teacher = model(lower, r, labels, key)
        weight = denoising_weight(t, sigma_data=self.noise.sigma_data)
        return Loss(
            weight.to(student.dtype) * self.distance(student, teacher), dict(phase.figures), sigma=t, output=student
        )

    def lower_side(
        self, images: Tensor, labels: Tensor | None, noisy: Tensor, low: Tensor, high: Tensor, z: Tensor
    ) -> Tensor:
        """x at the lower level, as in `ict`."""
        return step_down(self.score, images, labels, noisy, low, high, z)

    def see(self, pixels: Tensor, labels: Tensor, device: torch.device) -> None:
        """What the method wants to know of the training set."""
        self.score = build_score(self.config, pixels, labels, device)

    def phase(self, step: Step) -> Phase:
        """How near the pairs are: 1 / q^(stage + 1)."""
        section = self.section
        stage = min(section.stages - 1, step.done * section.stages // max(1, step.total))
        return Phase({"ratio": self.ratio(stage, step.samples.device)}, {"stage": stage})


def lower_level(t: Tensor, ratio: Tensor | float, *, k: float, b: float) -> Tensor:
    """r = t · (1 − n(t) · ratio) with n(t) = 1 + k / (1 + e^(b t)), and not below 0; ratio = 1 / q^(stage + 1)."""
    return (t * (1 - (1 + k * torch.sigmoid(-b * t)) * ratio)).clamp_min(0)
