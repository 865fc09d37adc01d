"""A diffusion warm-up inside a run: for its first share a model learns to denoise, and only then the pairs.

A denoiser knows the direction of each step that a consistency model has to add up. It learns that from the images
themselves, not from a teacher that must learn it at the same time, and its step needs one pass less through the net.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ict.config import Config
from ict.model import ConsistencyModel
from ict.objectives.base import Loss, Objective, Phase, Step
from ict.objectives.edm import Diffusion


class DenoiseFirst:
    """EDM's loss while progress is below `objective.denoise`; from there on another method, as if its run began there.

    (Learning rate, optimiser and averages go on as before.) The levels to denoise are drawn by p_mean and p_std.
    """

    def __init__(self, config: Config, then: Objective):
        self.share, self.before, self.then = config.objective.denoise, Diffusion(config), then

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        method, step = self.find(step)
        return method(model, images, labels, step)

    def see(self, pixels: Tensor, labels: Tensor, device: torch.device) -> None:
        if hasattr(self.then, "see"):
            self.then.see(pixels, labels, device)  # type: ignore

    def phase(self, step: Step) -> Phase | None:
        method, step = self.find(step)
        if not hasattr(method, "phase"):
            return None
        return method.phase(step)._replace(kind="denoising" if method is self.before else "")  # type: ignore

    def find(self, step: Step) -> tuple[Objective, Step]:
        """Whose a step is, and where it is in the part of the run that follows the warm-up."""
        first = warm_up(step.total, share=self.share)
        later = replace(step, done=max(0, step.done - first), total=max(1, step.total - first))
        return self.before if step.done < first else self.then, later


def warm_up(total: int, *, share: float) -> int:
    """How much of a run, in steps or milliseconds, is spent on denoising: never all of it."""
    return min(round(share * total), max(0, total - 1))
