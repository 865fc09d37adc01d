"""What a step minimises: `(model, images, labels, step) -> Loss(per_sample, stats)`; the trainer takes the mean."""

from ict.config import Config, ObjectiveConfig
from ict.objectives.base import Loss, Method, Objective, Phase, Step
from ict.objectives.continuous import ContinuousConsistencyTraining
from ict.objectives.denoise_first import DenoiseFirst
from ict.objectives.distillation import ConsistencyDistillation
from ict.objectives.ect import EasyConsistencyTuning
from ict.objectives.edm import Diffusion
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.objectives.meanflow import MeanFlow
from ict.objectives.sct import SimplifiedConsistencyTraining
from ict.reading import choose

OBJECTIVES: dict[str, type[Method]] = {
    "ict": ImprovedConsistencyTraining,
    "cd": ConsistencyDistillation,
    "ect": EasyConsistencyTuning,
    "edm": Diffusion,
    "continuous": ContinuousConsistencyTraining,
    "sct": SimplifiedConsistencyTraining,
    "meanflow": MeanFlow,
}


def find_method(section: ObjectiveConfig) -> type[Method]:
    """The class of a recipe's method."""
    return choose("objective.kind", section.kind, OBJECTIVES)


def build_objective(config: Config) -> Objective:
    found = find_method(config.objective)(config)
    return DenoiseFirst(config, found) if config.objective.denoise else found


__all__ = ["OBJECTIVES", "Loss", "Method", "Objective", "Phase", "Step", "build_objective", "find_method"]
