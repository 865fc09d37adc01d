"""What a step minimises: `(model, images, labels, step) -> Loss(per_sample, stats)`; the trainer takes the mean."""

from collections.abc import Callable

from ict.config import Config
from ict.objectives.base import Loss, Objective, Phase, Step
from ict.objectives.continuous import ContinuousConsistencyTraining
from ict.objectives.denoise_first import DenoiseFirst
from ict.objectives.distillation import ConsistencyDistillation
from ict.objectives.ect import EasyConsistencyTuning
from ict.objectives.edm import Diffusion
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.objectives.meanflow import MeanFlow
from ict.objectives.sct import SimplifiedConsistencyTraining
from ict.reading import choose

OBJECTIVES: dict[str, Callable[[Config], Objective]] = {
    "ict": ImprovedConsistencyTraining,
    "cd": ConsistencyDistillation,
    "ect": EasyConsistencyTuning,
    "edm": Diffusion,
    "continuous": ContinuousConsistencyTraining,
    "sct": SimplifiedConsistencyTraining,
    "meanflow": MeanFlow,
}


def build_objective(config: Config) -> Objective:
    found = choose("objective.kind", config.objective.kind, OBJECTIVES)(config)
    return DenoiseFirst(config, found) if config.objective.denoise else found


__all__ = ["OBJECTIVES", "Loss", "Objective", "Phase", "Step", "build_objective"]
