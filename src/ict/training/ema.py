"""Averages of the student's weights over the run (§2, appendix B): the model that is used in the end."""

import torch
from torch import Tensor, nn


def ramped_decay(decay: float, updates: int, *, ramp: float) -> float:
    """The decay of update number `updates` (from 0): the window 1/(1-decay) never exceeds 1 + ramp · updates.

    Without the ramp a run shorter than the window would be judged by its random start.
    """
    return min(decay, 1 - 1 / (1 + ramp * updates)) if ramp > 0 else decay


@torch.no_grad()
def approach(weights: dict[str, Tensor], model: nn.Module, *, decay: float) -> None:
    """weights ← decay · weights + (1 − decay) · the model's, in place."""
    current = model.state_dict()
    torch._foreach_lerp_(list(weights.values()), [current[name] for name in weights], 1 - decay)


class WeightAverage:
    """One exponential moving average of all floating-point weights; starts as a copy."""

    def __init__(self, model: nn.Module, *, decay: float, ramp: float):
        self.decay, self.ramp = decay, ramp
        self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        assert all(tensor.is_floating_point() for tensor in self.weights.values())

    def decay_at(self, updates: int) -> float:
        """The decay of update number `updates` (from 0)."""
        return ramped_decay(self.decay, updates, ramp=self.ramp)

    def update(self, model: nn.Module, updates: int) -> None:
        approach(self.weights, model, decay=self.decay_at(updates))

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])
