"""Consistency distillation (Song et al., 2023): the lower level is reached along a diffusion model's ODE (§2)."""

import functools
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ict.config import Config, ObjectiveConfig
from ict.mixture import ExactDiffusion
from ict.model import ConsistencyModel, read_model
from ict.objectives.base import DIFFUSION, TEACHER
from ict.objectives.ict import GRID, ImprovedConsistencyTraining
from ict.reading import ConfigError, choose, require
from ict.solvers import SOLVERS


class ConsistencyDistillation(ImprovedConsistencyTraining):
    """As consistency training, but x at σ_i comes from x at σ_{i+1} by one step of a solver on the teacher's ODE."""

    keys: ClassVar[tuple[str, ...]] = (*GRID, "teacher_model", "solver")

    def __init__(self, config: Config):
        super().__init__(config)
        self.solve = choose("objective.solver", config.objective.solver, SOLVERS)
        self.path = config.objective.teacher_model
        require(
            bool(self.path), "objective.kind = cd distils a diffusion model: name its file in objective.teacher_model"
        )
        self.teacher_on = functools.cache(self.load)

    def load(self, device: torch.device) -> ConsistencyModel | ExactDiffusion:
        """The diffusion model that is distilled: one that was trained, or the exact one of the mixture in the plane."""
        if self.path == "mixture2d":
            return ExactDiffusion()
        model, spec, _ = read_model(Path(self.path).expanduser())
        if spec.kind != "diffusion":
            raise ConfigError(f"{self.path} is a {spec.kind} model: objective.teacher_model must be a diffusion model")
        classes = len(spec.class_names)
        require(
            classes in (0, self.config.data.classes),
            f"{self.path} knows {classes} classes: set data.classes to that, or distil a model without classes",
        )
        return model.to(device).requires_grad_(False)

    @staticmethod
    def beside(section: ObjectiveConfig) -> dict[str, int]:
        calls = choose("objective.solver", section.solver, {"euler": 1, "heun": 2})
        return {TEACHER: 1, DIFFUSION: calls}

    def lower_side(
        self, images: Tensor, labels: Tensor | None, noisy: Tensor, low: Tensor, high: Tensor, z: Tensor
    ) -> Tensor:
        teacher = self.teacher_on(noisy.device)
        require(teacher.image_shape == tuple(images.shape[1:]), f"{self.path} was trained on images of another size")
        return self.solve(lambda x, sigma: teacher(x, sigma, labels if teacher.classes else None), noisy, high, low)
