"""What a step minimises: `(model, images, labels, step) -> Loss(per_sample, stats)`; the trainer takes the mean."""

from collections.abc import Callable

from ict.config import Config, choose
from ict.objectives.base import Loss, Objective, Phase, Step
from ict.objectives.distillation import ConsistencyDistillation
from ict.objectives.ect import EasyConsistencyTuning
from ict.objectives.edm import Diffusion
from ict.objectives.ict import ImprovedConsistencyTraining

OBJECTIVES: dict[str, Callable[[Config], Objective]] = {
    "ict": ImprovedConsistencyTraining,
    "cd": ConsistencyDistillation,
    "ect": EasyConsistencyTuning,
    "edm": Diffusion,
}


def build_objective(config: Config) -> Objective:
    return choose("objective.kind", config.objective.kind, OBJECTIVES)(config)


__all__ = ["OBJECTIVES", "Loss", "Objective", "Phase", "Step", "build_objective"]
