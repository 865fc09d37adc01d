"""RAdam (appendix B) or another optimiser, and learning rates as a function of progress."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ict.config import TrainingConfig
from ict.ranks import ALONE, Ranks
from ict.reading import choose
from ict.training.muon import Muon


def constant(progress: float) -> float:
    """The paper's choice."""
    return 1.0


def cosine(progress: float) -> float:
    """From 1 down to 0 along half a wave."""
    return (1 + math.cos(math.pi * progress)) / 2


def trapezoid(progress: float) -> float:
    """1 for the first 70 % of the run, then straight down to 0."""
    return min(1.0, (1 - progress) / 0.3)


# name in a recipe -> (progress from 0 to 1) -> factor of training.lr
LR_SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "cosine": cosine, "trapezoid": trapezoid}


def learning_rate(training: TrainingConfig, progress: float) -> float:
    factor = choose("training.lr_schedule", training.lr_schedule, LR_SCHEDULES)(progress)
    warmup = min(1.0, progress / training.lr_warmup) if training.lr_warmup > 0 else 1.0
    return training.lr * factor * warmup


def build_optimiser(model: nn.Module, training: TrainingConfig, *, ranks: Ranks = ALONE) -> torch.optim.Optimizer:
    beta1, beta2 = training.betas
    options = {"lr": training.lr, "betas": (beta1, beta2), "eps": training.eps, "foreach": True}
    if training.optimiser == "muon":
        return Muon(model, **options)
    if training.shard_optimiser and ranks.count > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.RAdam, **options)
    return torch.optim.RAdam(model.parameters(), **options)


def own_state(optimiser: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """What this rank keeps of the optimiser's state; of a sharded one, its share."""
    return getattr(optimiser, "optim", optimiser).state


def gather_optimiser(optimiser: torch.optim.Optimizer) -> None:
    """Bring the shares of the optimiser's state to the main rank, where a checkpoint is written."""
    if hasattr(optimiser, "consolidate_state_dict"):
        optimiser.consolidate_state_dict(to=0)  # type: ignore
