"""Muon (Jordan et al., 2024) beside RAdam: a matrix moves by the nearest orthogonal one to its momentum.

Every direction in which a layer's gradient points is then learned at the same speed, not the strongest first. What is
not a matrix inside the net (biases, norms, embeddings, the first layer and the last) goes on with RAdam. A matrix's
step is given the size of Adam's (0.2 an entry, root mean square; Liu et al., 2025): one learning rate serves both.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

MOMENTUM = 0.95
SIZE = 0.2  # root mean square of a step's entries, in learning rates
ROUNDS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0; singular values end between about 0.7 and 1.2
OUTSIDE = {"embed", "conv_in", "conv_out", "dense_in", "dense_out"}  # layers where the net meets the world …
NARROW = 8  # … and any with so few channels on one side: they read or write images


class Muon(torch.optim.RAdam):
    """RAdam for the first group of parameters, Muon for the second."""

    def __init__(self, model: nn.Module, **options: Any):
        inside, rest = [], []
        for name, parameter in model.named_parameters():
            wide = parameter.ndim >= 2 and min(parameter.shape[:2]) >= NARROW
            (inside if wide and not OUTSIDE & set(name.split(".")) else rest).append(parameter)
        super().__init__([{"params": rest}, {"params": inside}], **options)
        self.ready: list[tuple[Parameter, Tensor, Tensor]] | None = None  # each, its momentum from now on, its step
        self.steps: dict[torch.Size, Tensor] = {}
        self.copies: dict[int, Tensor] = {}  # of those that have to be laid out otherwise

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # RAdam's expects its own numbers of every parameter

    @property
    def inside(self) -> list[Parameter]:
        return self.param_groups[1]["params"]

    @torch.no_grad()
    def prepare(self) -> None:
        """Find where the matrices will go, and change nothing: a GPU does it before anyone knows if they may."""
        parameters = [parameter for parameter in self.inside if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        before = [self.state[each]["momentum"] if self.state[each] else torch.zeros_like(each) for each in parameters]
        momenta = torch._foreach_lerp(before, gradients, 1 - MOMENTUM) if parameters else []
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM) if parameters else []  # as Nesterov
        self.ready = list(zip(parameters, momenta, self.turn(ahead), strict=True))

    def turn(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """The orthogonal neighbour of each, of the size of Adam's steps; those of one shape together.

        They lie in memory as the updates do, in the same place every time.
        """
        alike, found = defaultdict(list), list(updates)
        for place, update in enumerate(updates):
            alike[as_matrix(update).shape].append(place)
        for shape, places in alike.items():
            turned = orthogonal(torch.stack([as_matrix(updates[place]) for place in places]))
            if shape not in self.steps or self.steps[shape].shape != turned.shape:
                self.steps[shape] = torch.empty(turned.shape, dtype=updates[0].dtype, device=turned.device)
            steps = self.steps[shape].copy_(turned).mul_(SIZE * max(shape) ** 0.5)
            for place, step in zip(places, steps.unbind(), strict=True):
                found[place] = as_weight(step, updates[place])
        for place, (step, update) in enumerate(zip(found, updates, strict=True)):
            if step.stride() != update.stride() and not (step.is_contiguous() and update.is_contiguous()):
                copy = self.copies.get(place)
                if copy is None or (copy.shape, copy.stride()) != (update.shape, update.stride()):
                    copy = self.copies[place] = torch.empty_like(update)
                found[place] = copy.copy_(step)
        return found

    def keep(self) -> None:
        """The steps have been taken: their momenta are those of the next."""
        for parameter, momentum, _ in self.ready or []:
            self.state[parameter]["momentum"] = momentum
        self.ready = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore
        both = self.param_groups
        try:
            self.param_groups = both[:1]
            super().step()
        finally:
            self.param_groups = both
        if self.ready is None:
            self.prepare()
        if self.ready:
            parameters, _, steps = map(list, zip(*self.ready, strict=True))
            torch._foreach_add_(parameters, steps, alpha=-both[1]["lr"])
        self.keep()


def as_matrix(weight: Tensor) -> Tensor:
    """[out, in, height, width] -> [out, height · width · in], which channels_last need not be copied for."""
    return weight if weight.ndim == 2 else weight.movedim(1, -1).flatten(1)


def as_weight(matrix: Tensor, like: Tensor) -> Tensor:
    """`as_matrix` back."""
    if like.ndim == 2:
        return matrix
    return matrix.reshape(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each of [K, M, N]: U S Vᵀ -> U S' Vᵀ with S' near 1.

    An odd polynomial, five times, brings the singular values there. In bfloat16 on a GPU: it is only a direction.
    """
    a, b, c = QUINTIC
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-20).to(x.dtype)  # no singular value is above 1
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
